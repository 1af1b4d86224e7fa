"""GPUWorkload: what comes next for one workload, from the moment that there is something to decide for it.

Follows the workload's Job, waits out the back-off after a failure, hands the workload back to the ledger for its next
turn, and tears down on deletion. While a first Job starts and runs, the ledger tells of it and this has not begun.
Every look is one local activity that reads, decides (planning.lifecycle) and projects the status; all of its effects
can be repeated. Budget: 6 history events for a first Job that completes.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeUpdate, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.messages import NODE, PHASE, Poke, WorkloadState
from activities.signatures import FOLLOW, HAND_BACK, Followed, FollowRequest, HandBack
from planning.model import Verdict
from workflows.placement import newest

# A short call is repeated inside the workflow task for this long; after that Temporal's own timer takes over, so that
# an API server that is away for minutes costs a few timers and not a row of workflow-task heartbeats.
LOCAL_RETRY = timedelta(seconds=4)
PATIENCE = timedelta(hours=1)
RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))


@workflow.defn(name="GPUWorkload", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class GPUWorkload:
    @workflow.init
    def __init__(self, state: WorkloadState) -> None:
        self._state = state
        self._poked = True
        shown = workflow.info().typed_search_attributes
        self._phase, self._node = shown.get(PHASE) or "", shown.get(NODE) or ""

    @workflow.signal(description="Something about this workload changed: look again")
    def poke(self, poke: Poke) -> None:
        self._poked = True
        self._state.seen = newest(self._state.seen, poke.seen)

    @workflow.signal(description="The ledger cannot place this workload by waiting")
    def verdict(self, verdict: Verdict) -> None:
        # The ledger's activity may send the same verdict again after a crash.
        if verdict not in self._state.verdicts:
            self._state.verdicts.append(verdict)
            self._poked = True

    @workflow.run
    async def run(self, state: WorkloadState) -> str:
        while True:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(self._state)
            try:
                followed = await self._look()
            except ActivityError as failed:
                self._give_up_on(failed)
                continue
            self._show(followed)
            if followed.next == "end":
                return followed.phase
            wait = followed.within
            if followed.next == "retry":
                # A later look at the same failure computes its delay anew; only an earlier moment counts.
                due = workflow.time() + (followed.within or 0.0)
                self._state.due = due if self._state.due is None else min(due, self._state.due)
                wait = self._state.due - workflow.time()
                if wait <= 0:
                    try:
                        await self._hand_back(followed)
                    except ActivityError as failed:
                        self._give_up_on(failed)
                    continue
            else:
                self._state.due = None
            await self._sleep(wait, "back-off" if followed.next == "retry" else "look again")

    async def _look(self) -> Followed:
        self._poked = False
        followed: Followed = await workflow.execute_local_activity(
            FOLLOW,
            FollowRequest(
                ref=self._state.ref,
                turn=self._state.turn,
                fresh=self._state.seen,
                jitter=workflow.random().random(),
                verdict=self._state.verdicts[0] if self._state.verdicts else None,
            ),
            result_type=Followed,
            schedule_to_close_timeout=PATIENCE,
            start_to_close_timeout=timedelta(seconds=20),
            local_retry_threshold=LOCAL_RETRY,
            retry_policy=RETRY,
            summary="look",
        )
        if followed.restored:
            # Versions of the cluster's former life: every look would wait for them in vain, for days perhaps.
            self._state.seen = {}
        return followed

    async def _hand_back(self, followed: Followed) -> None:
        await workflow.execute_local_activity(
            HAND_BACK,
            HandBack(self._state.ref, followed.turn),
            schedule_to_close_timeout=PATIENCE,
            start_to_close_timeout=timedelta(seconds=20),
            local_retry_threshold=LOCAL_RETRY,
            retry_policy=RETRY,
            summary=f"back to the queue for attempt {followed.turn.attempt}",
        )
        self._state.turn = followed.turn
        self._state.due = None
        # Verdicts about turns that are over say nothing any more.
        self._state.verdicts = [v for v in self._state.verdicts if v.turn.attempt >= followed.turn.attempt]

    def _give_up_on(self, failed: ActivityError) -> None:
        """An hour of tries is over: begin again, so that the history can be continued as new between two hours."""
        if is_cancelled_exception(failed):
            raise failed
        workflow.set_current_details(f"**No answer for {PATIENCE}**: {failed.cause}; it is tried again")

    async def _sleep(self, seconds: float | None, summary: str) -> None:
        if self._poked:
            return
        try:
            await workflow.wait_condition(lambda: self._poked, timeout=seconds, timeout_summary=summary)
        except TimeoutError:
            return

    def _show(self, followed: Followed) -> None:
        """Keep the Temporal UI telling: the phase as a search attribute, the sentence as current details."""
        changed: list[SearchAttributeUpdate[str]] = []
        if followed.phase and followed.phase != self._phase:
            self._phase = followed.phase
            changed.append(PHASE.value_set(followed.phase))
        if followed.node and followed.node != self._node:
            self._node = followed.node
            changed.append(NODE.value_set(followed.node))
        if changed:
            workflow.upsert_search_attributes(changed)
        where = f" on {followed.node}" if followed.node else ""
        workflow.set_current_details(
            f"**{followed.phase or 'Gone'}**{where}, attempt {followed.turn.attempt}, "
            f"{followed.turn.retries} {'retry' if followed.turn.retries == 1 else 'retries'} used\n\n{followed.message}"
        )
