"""KernelCache: one kernel cache on all its nodes, from the object's creation until the last node has let go of it.

Every look is one local activity that reads, asks the registry what a tag stands for, decides (planning.caches.rollout),
sends orders to the workflows of nodes and shows the status. What nodes answer comes as signals, and good answers wait a
moment for company. Between looks this waits: a cache that is ready everywhere costs nothing.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.cache_signatures import LOOK_AT_CACHE, CacheLook, CacheLooked, CacheState
from activities.messages import PHASE, Poke
from planning.caches.orders import Report
from planning.caches.rollout import applied, reported
from workflows.placement import newest

# As for workloads: short calls are repeated inside the workflow task, long silences are timers.
LOCAL_RETRY = timedelta(seconds=4)
PATIENCE = timedelta(hours=1)
RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))
# A node that is done changes numbers, or makes room for the next: such answers are looked at once they are a quarter as
# many as those that are still awaited, or after so long. A change of these, as of any wait, needs a patch marker.
GOOD = ("ready", "incompatible", "removed")
AWAITED_FOR_EACH = 4
COMPANY = 5.0  # seconds


@workflow.defn(name="KernelCache", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class KernelCache:
    @workflow.init
    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._poked = False
        self._heard = 0  # good answers since the last look
        self._looking = False
        self._early: list[Report] = []
        self._phase = ""

    @workflow.signal(description="Something changed that may concern this cache: look again")
    def poke(self, poke: Poke) -> None:
        self._poked = True
        self._state.seen = newest(self._state.seen, poke.seen)

    @workflow.signal(description="A node tells what became of its order")
    def report(self, report: Report) -> None:
        # An order's answer may be here before the look that gave the order has told of it.
        if self._looking:
            self._early.append(report)
        else:
            self._hear(report)

    def _hear(self, report: Report) -> None:
        after = reported(self._state.rollout, report)
        if after is self._state.rollout:
            return
        self._state.rollout = after
        if report.outcome in GOOD:
            self._heard += 1
        else:
            self._poked = True

    @workflow.signal(description="A node's hardware or store is another: have it check the cache anew")
    def recheck(self, node: str) -> None:
        if (self._looking or node in self._state.rollout.members) and node not in self._state.rechecked:
            self._state.rechecked.append(node)
            self._poked = True

    @workflow.run
    async def run(self, state: CacheState) -> str:
        while True:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(self._state)
            try:
                looked = await self._look()
            except ActivityError as failed:
                if is_cancelled_exception(failed):
                    raise
                # An hour of tries is over: begin again.
                workflow.set_current_details(f"**No answer for {PATIENCE}**: {failed.cause}; it is tried again")
                continue
            self._show(looked)
            if looked.over:
                return looked.phase
            await self._sleep(looked.within)

    async def _look(self) -> CacheLooked:
        self._poked, self._heard = False, 0
        # What is heard during the look is not what it knew: a node that changes again meanwhile is told again.
        rechecked, self._state.rechecked = sorted(self._state.rechecked), []
        told: set[str] = set()
        self._looking = True
        try:
            looked: CacheLooked = await workflow.execute_local_activity(
                LOOK_AT_CACHE,
                CacheLook(self._state.ref, self._state.rollout, self._state.seen, rechecked),
                result_type=CacheLooked,
                schedule_to_close_timeout=PATIENCE,
                start_to_close_timeout=timedelta(seconds=60),
                local_retry_threshold=LOCAL_RETRY,
                retry_policy=RETRY,
                summary="look",
            )
            if looked.step is not None:
                self._state.rollout = applied(self._state.rollout, looked.step)
                told = {sent.node for sent in looked.step.orders}
        finally:
            self._looking = False
            due = {node for node in rechecked if node not in told}.union(self._state.rechecked)
            self._state.rechecked = sorted(due & self._state.rollout.members.keys())
            early, self._early = self._early, []
            for report in early:
                self._hear(report)
        return looked

    async def _sleep(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._poked or self._heard > 0, timeout=seconds, timeout_summary="look again"
            )
            company = COMPANY if seconds is None else min(COMPANY, seconds)
            await workflow.wait_condition(lambda: self._enough, timeout=company, timeout_summary="more answers")

    @property
    def _enough(self) -> bool:
        awaited = sum(member.outcome == "" for member in self._state.rollout.members.values())
        return self._poked or self._heard * AWAITED_FOR_EACH >= awaited

    def _show(self, looked: CacheLooked) -> None:
        if looked.phase != self._phase:
            self._phase = looked.phase
            workflow.upsert_search_attributes([PHASE.value_set(looked.phase)])
        aim = self._state.rollout.aim
        workflow.set_current_details(
            f"**{looked.phase}**: {looked.message}\n\n{aim.reference} → `{aim.goal.digest or 'not resolved yet'}`"
        )
