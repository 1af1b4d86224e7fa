"""Takes Jobs back, as a recorded decision says: those that found no place, and those whose place goes to another.

For the activity that carries out a round. A Job that runs is suspended first, so that its pods end as they would on a
node that is drained; when they are gone, a later round withdraws it, or keeps it for its next turn. Each step can be
repeated.
"""

from __future__ import annotations

import logging
import time

from opentelemetry import metrics
from temporalio import activity

from activities.cache import ClusterCache
from activities.patience import cut, may_pass
from activities.signatures import CarriedOut
from activities.writes import Write, delete_job, mark_withdrawn, reference, suspend_job
from kube.client import KubeClient
from kube.errors import KubeError, NotFound
from kube.events import EventRecorder
from kube.resources import JOBS
from planning import status
from planning.lifecycle import NOT_STOPPED, PREEMPTED, Step
from planning.model import Preemption, Turn, Withdrawal
from planning.preemption import SPARED
from planning.views import job_view

log = logging.getLogger(__name__)

_meter = metrics.get_meter("berth.worker")
_preempted = _meter.create_counter("berth_preemptions", description="Jobs suspended because others get their place")


class TakingBack:
    def __init__(self, cache: ClusterCache, kube: KubeClient, events: EventRecorder, write: Write) -> None:
        self._cache = cache
        self._kube = kube
        self._events = events
        self._write = write

    async def preempt(self, preemption: Preemption, done: CarriedOut) -> None:
        """Suspends the Job, if it is still as it was decided upon, and tells why. If that is refused, the Job goes on,
        and is left alone for a while.
        """
        job = preemption.namespace, preemption.job_name, preemption.job_uid
        try:
            if not await suspend_job(self._kube, *job, preemption.message, version=preemption.job_version):
                return  # it changed; the next round decides again
        except KubeError as refused:
            if may_pass(refused):
                raise
            done.spared[preemption.uid] = time.time() + SPARED
            self._tell_refused(preemption, cut(refused))
            return
        _preempted.add(1)
        await self._tell(preemption.uid, preemption.next_turn, PREEMPTED, preemption.message, preemption.job_name)

    async def withdraw(self, withdrawal: Withdrawal) -> bool:
        """Takes the Job back and tells why, which the workload's own workflow leaves to the ledger. False: it has
        found its place meanwhile, or ended; decide again.
        """
        if not withdrawal.keep and not await self._take_back(withdrawal):
            return False
        view = self._cache.workloads.items.get(withdrawal.uid)
        if withdrawal.reason == PREEMPTED and view is not None and status.shows(view, PREEMPTED):
            return True  # that it was stopped, and for whom, it was told when it was
        await self._tell(
            withdrawal.uid, withdrawal.next_turn, withdrawal.reason, withdrawal.message, withdrawal.job_name
        )
        return True

    def _tell_refused(self, preemption: Preemption, why: str) -> None:
        note = f"Job {preemption.job_name} could not be stopped, so its place goes to nobody else: {why}"
        log.warning("GPUWorkload %s/%s: %s", preemption.namespace, preemption.name, note)
        view = self._cache.workloads.items.get(preemption.uid)
        if view is not None:
            self._events.record(
                regarding=reference(view), type="Warning", reason=NOT_STOPPED, action="Preempt", note=note
            )

    async def _tell(self, uid: str, turn: Turn, reason: str, message: str, job_name: str) -> None:
        view = self._cache.workloads.items.get(uid)
        if view is None or view.deleting:
            return
        step = Step("again", turn, phase="Scheduling", reason=reason, message=message, job_name=job_name)
        patch = status.project(view, step, time.time())
        if patch is None or status.same(view, patch):
            return
        self._events.record(regarding=reference(view), type="Warning", reason=reason, action="Place", note=message)
        await self._write(view, patch)

    async def _take_back(self, withdrawal: Withdrawal) -> bool:
        """Marks the Job as withdrawn and deletes it, if it is still as it was decided upon; True also if an earlier try
        did. It may have found its place meanwhile, or even have ended: then it is left, and decided upon again.
        """
        job = withdrawal.namespace, withdrawal.job_name, withdrawal.job_uid
        version = withdrawal.job_version or None  # 0: decided by an older build
        marked = await mark_withdrawn(self._kube, *job, withdrawal.message, version=version)
        if marked is not None and await delete_job(self._kube, *job, finished=False, version=marked):
            return True
        try:
            found = job_view(
                await self._kube.get(JOBS, withdrawal.job_name, withdrawal.namespace), self._cache.settings.gpu_resource
            )
        except NotFound:
            found = None
        if found is None or found.uid != withdrawal.job_uid:
            # By an earlier try, whose result was lost. In the first one it was somebody else who took it away.
            return marked is not None or activity.info().attempt > 1
        if found.withdrawn and not found.deleting:
            await mark_withdrawn(self._kube, *job, None)
        return found.withdrawn and found.deleting
