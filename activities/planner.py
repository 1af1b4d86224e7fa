"""The planner as an activity: one look at the cache, one pure decision, recorded by the ledger's history."""

from __future__ import annotations

import asyncio
import logging
import time

from opentelemetry import metrics
from temporalio import activity

from activities.cache import ClusterCache, StaleCacheError
from activities.signatures import DECIDE, DecideRequest, DecideResult, Versions
from crds.settings import SETTINGS_NAMESPACE
from kube.client import KubeClient
from kube.resources import CONFIGMAPS
from planning.model import Decision, Ledger, Snapshot
from planning.placement import decide
from planning.projection import lagging

log = logging.getLogger(__name__)

_meter = metrics.get_meter("berth.worker")
_queued = _meter.create_gauge("berth_queue_depth", description="GPUWorkloads waiting for a place after the last round")
_in_flight = _meter.create_gauge("berth_promises_in_flight", description="Assignments whose Job was not seen yet")
_seconds = _meter.create_histogram("berth_decision_duration", unit="s", description="Duration of one planning round")

# A promise that was dropped binds the planner: without having seen its Job it would promise the same GPUs again.
BINDING_WAIT = 10.0
FRESH_WAIT = 2.0


class Planner:
    def __init__(self, cache: ClusterCache, kube: KubeClient) -> None:
        self._cache = cache
        self._kube = kube

    @activity.defn(name=DECIDE)
    async def decide(self, request: DecideRequest) -> DecideResult:
        """Raises StaleCacheError while this worker has not seen what earlier decisions were based on."""
        missing = await self._cache.reach(request.at_least, BINDING_WAIT)
        restored = bool(missing) and await self._restored(missing)
        if missing and not restored:
            raise StaleCacheError(
                f"this worker's view of the cluster is older than an earlier decision's (waiting for {missing}); "
                "it is tried again. If it lasts, look at the worker's log and /readyz: its watches bring nothing."
            )
        behind = await self._cache.reach(request.fresh, FRESH_WAIT)
        snapshot, settings = self._cache.snapshot(), self._cache.settings
        jobs = tuple(self._cache.jobs.items.values())
        began = time.perf_counter()
        # In a thread: a large queue takes a while, and the worker's watches must go on meanwhile.
        decision = await asyncio.to_thread(
            decide, snapshot, request.ledger, settings, limit=request.limit, seed=request.seed
        )
        _seconds.record(time.perf_counter() - began)
        _queued.set(decision.queued)
        _in_flight.set(len(request.ledger.in_flight) + len(decision.assignments) - len(decision.seen))
        lags = await asyncio.to_thread(lagging, snapshot.now, snapshot.workloads, jobs, snapshot.pods, snapshot.nodes)
        versions = _binding(decision, snapshot, request.ledger)
        return DecideResult(decision, versions, bool(behind), restored, len(lags))

    async def _restored(self, missing: Versions) -> bool:
        """Whether the API server itself is older than what was seen of it: etcd was restored from a backup."""
        _, version = await self._kube.list(CONFIGMAPS, SETTINGS_NAMESPACE, label_selector="berth-version-probe")
        if version >= max(missing.values()):
            return False
        log.warning("the cluster is at version %d, but %s was seen before: it was restored", version, missing)
        return True


def _binding(decision: Decision, snapshot: Snapshot, ledger: Ledger) -> Versions:
    """What every later decision must have seen: the Jobs for which promises were dropped (else it would promise their
    GPUs again), and the workloads that were given a place (else it would take them for gone).
    """
    seen = set(decision.seen)
    versions = [job.resource_version for job in snapshot.jobs if job.workload_uid in seen]
    jobs = max(versions + [ledger.made.get(uid, 0) for uid in seen], default=0)
    # A workload may be known in a version of ours that the watch has yet to bring; that it is there, the watch brought.
    seen_at = max((assignment.resource_version for assignment in decision.assignments), default=0)
    workloads = min(seen_at, snapshot.workloads_version)
    return {kind: version for kind, version in (("jobs", jobs), ("gpuworkloads", workloads)) if version}
