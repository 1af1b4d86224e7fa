"""Ends workloads whose first Job completed, as a recorded decision says, and tells of every step that a person should
hear of. For the activity that carries out a round, and for the looks of the workloads' own workflows.
"""

from __future__ import annotations

import logging
import time

from opentelemetry import metrics

from activities.cache import ClusterCache
from activities.writes import Write, reference, remove_finalizer
from kube.client import KubeClient
from kube.events import EventRecorder
from planning import status
from planning.lifecycle import Observation, Step, next_step
from planning.model import Completion, Turn, WorkloadView
from planning.recommendation import advised

log = logging.getLogger(__name__)

_meter = metrics.get_meter("berth.worker")
_failed = _meter.create_counter("warp_gpuworkload_failed", description="Failures of GPUWorkloads, by reason")
_retries = _meter.create_counter("warp_gpuworkload_retries", description="Retries granted after a failure, by reason")

_TOLD = {
    "finish": ("Normal", "Finish"),
    "retry": ("Warning", "Retry"),
    "again": ("Normal", "Requeue"),
    "suspend": ("Normal", "Suspend"),
}


class Endings:
    def __init__(self, cache: ClusterCache, kube: KubeClient, events: EventRecorder, write: Write) -> None:
        self._cache = cache
        self._kube = kube
        self._events = events
        self._write = write

    async def end(self, completion: Completion) -> bool:
        """Writes the tombstone and lets go of the workload. False: it is no longer as it was decided upon, or somebody
        wrote meanwhile; decide again.
        """
        view = self._cache.workloads.items.get(completion.uid)
        if view is None:
            return True  # gone, or its own workflow was faster
        jobs = self._cache.jobs_of(view.namespace, view.uid)
        step = next_step(Observation(time.time(), view, jobs), Turn(), None, 0.0)
        if step.kind != "finish" or step.delete:
            return False
        raw, patch = None, status.project(view, step, time.time())
        if patch is not None:  # else it was written by an earlier try
            raw = await self._write(view, advised(patch, view, self._cache.recommendation(view)))
            if raw is None:
                return False
            tell(self._events, step, view)
        return await remove_finalizer(self._kube, view, raw)


def tell(events: EventRecorder, step: Step, view: WorkloadView) -> None:
    """An Event, a line in the log and the counters, once for each status that was really written."""
    if step.failure:
        _failed.add(1, {"reason": step.failure})
    if step.kind == "retry":
        _retries.add(1, {"reason": step.failure})
    if step.kind in _TOLD:
        log.info(
            "GPUWorkload %s/%s: %s, %s: %s",
            view.namespace,
            view.name,
            step.phase,
            step.reason or step.kind,
            step.message,
        )
        kind, action = _TOLD[step.kind]
        if step.phase == "Failed":
            kind = "Warning"
        events.record(
            regarding=reference(view),
            type="Warning" if kind == "Warning" else "Normal",
            reason=step.reason or step.phase,
            action=action,
            note=step.message,
        )
    elif step.reason in ("NodeNotReady", "NodeGone", "NodeOutOfService"):
        events.record(regarding=reference(view), type="Warning", reason=step.reason, action="Follow", note=step.message)
