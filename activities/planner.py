"""The planner as an activity: one look at the cache, one pure decision, recorded by the ledger's history."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from opentelemetry import metrics
from temporalio import activity

from activities import round_metrics
from activities.cache import ClusterCache, StaleCacheError, restored_to
from activities.forecasts import Forecasts
from activities.heartbeats import beating
from activities.signatures import DECIDE, DecideRequest, DecideResult, Versions
from kube.client import KubeClient
from planning import gates
from planning.memory import Memory
from planning.model import Decision, Ledger, Snapshot
from planning.placement import decide
from planning.profiles import by_key, next_due
from planning.projection import lagging
from planning.quota_status import PAUSE, lagging_quotas, standing, tenants
from planning.reservation_status import lagging_reservations, standings

_meter = metrics.get_meter("berth.worker")
_seconds = _meter.create_histogram("berth_decision_duration", unit="s", description="Duration of one planning round")

# A promise that was dropped binds the planner: without having seen its Job it would promise the same GPUs again.
BINDING_WAIT = 10.0
FRESH_WAIT = 2.0
# How many times longer than a round was planned the next one waits for company, and at most. With thousands in the
# queue whoever comes would else have them all looked at again; with a few it is nothing.
REST = 2.0
LONGEST_REST = 1.0


class Planner:
    def __init__(self, cache: ClusterCache, kube: KubeClient, forecasts: Forecasts) -> None:
        self._cache = cache
        self._kube = kube
        self._memory: Memory | None = None
        self._forecasts = forecasts
        self._rested = 0.0  # when the next round may be planned, by the monotonic clock

    @activity.defn(name=DECIDE)
    async def decide(self, request: DecideRequest) -> DecideResult:
        """Raises StaleCacheError while this worker has not seen what earlier decisions were based on."""
        async with beating():
            return await self._decide(request)

    async def _decide(self, request: DecideRequest) -> DecideResult:
        await asyncio.sleep(self._rested - time.monotonic())
        missing = await self._cache.reach(request.at_least, BINDING_WAIT)
        restored = await restored_to(self._kube, missing)
        if missing and restored is None:
            raise StaleCacheError(
                f"this worker's view of the cluster is older than an earlier decision's (waiting for {missing}); "
                "it is tried again. If it lasts, look at the worker's log and /readyz: its watches bring nothing."
            )
        behind = await self._cache.reach(request.fresh, FRESH_WAIT)
        if restored is None:
            restored = await restored_to(self._kube, behind)
        ledger = request.ledger if restored is None else _after_restore(request.ledger, restored)
        snapshot, settings = self._cache.snapshot(), self._cache.settings
        jobs = tuple(self._cache.live_jobs.values())
        began = time.perf_counter()
        # In a thread: a large queue takes a while, and the worker's watches must go on meanwhile.
        # Nobody else may have the memory: a round that took too long may still go on beside its repetition.
        memory, self._memory = self._memory or Memory(), None
        decision = await asyncio.to_thread(
            decide, snapshot, ledger, settings, limit=request.limit, seed=request.seed, memory=memory
        )
        self._memory = memory
        expected, soon = self._forecasts.told(snapshot, settings, decision.queued)
        waits = [seconds for seconds in (decision.wake_after, soon) if seconds is not None]
        decision = replace(decision, expected=expected, wake_after=min(waits, default=None))
        _seconds.record(time.perf_counter() - began)
        lags = await asyncio.to_thread(lagging, snapshot.now, snapshot.workloads, jobs, snapshot.pods, snapshot.nodes)
        held = await asyncio.to_thread(standing, snapshot, settings)
        quotas, later = await asyncio.to_thread(lagging_quotas, snapshot, ledger.lately, settings, held)
        reserved = ledger.reserved if decision.reserved is None else decision.reserved
        kept = await asyncio.to_thread(standings, snapshot, reserved, settings)
        reservations, more = lagging_reservations(snapshot, reserved, settings, kept)
        round_metrics.tell(
            round_metrics.Round(
                snapshot.now,
                decision.queued,
                len(ledger.in_flight) + len(decision.assignments) - len(decision.seen),
                decision.reasons,
                tuple(tenants(held)),
                tuple(kept),
                gates.standing(snapshot),
            )
        )
        ended = [*snapshot.workloads, *self._cache.departed.values()]
        learn_in = await asyncio.to_thread(next_due, ended, jobs, by_key(snapshot.profiles), snapshot.now)
        self._rested = time.monotonic() + min(LONGEST_REST, REST * (time.perf_counter() - began))
        versions = _binding(decision, snapshot, ledger)
        return DecideResult(
            decision,
            versions,
            bool(behind),
            restored is not None,
            len(lags),
            len(quotas),
            learn_in,
            PAUSE if later or more else None,
            len(reservations),
        )


def _after_restore(ledger: Ledger, version: int) -> Ledger:
    """The ledger in a cluster that went back to `version`: Jobs made after that are no more, and for days no cache will
    have seen the versions they were made with. Any has seen 1: so their promises end as if the Jobs had come and gone.
    """
    return replace(ledger, made={uid: made if made <= version else 1 for uid, made in ledger.made.items()})


def _binding(decision: Decision, snapshot: Snapshot, ledger: Ledger) -> Versions:
    """What every later decision must have seen: the Jobs for which promises were dropped (else it would promise their
    GPUs again), the workloads that were given a place (else it would take them for gone), and the reservations that
    were given nodes (else it would give these away).
    """
    seen = set(decision.seen)
    versions = [job.resource_version for job in snapshot.jobs if job.workload_uid in seen]
    jobs = max(versions + [ledger.made.get(uid, 0) for uid in seen], default=0)
    # A workload may be known in a version of ours that the watch has yet to bring; that it is there, the watch brought.
    seen_at = max((assignment.resource_version for assignment in decision.assignments), default=0)
    workloads = min(seen_at, snapshot.workloads_version)
    reserved = max((view.resource_version for view in snapshot.reservations if decision.reserved), default=0)
    found = {"jobs": jobs, "gpuworkloads": workloads, "gpureservations": reserved}
    return {kind: version for kind, version in found.items() if version}
