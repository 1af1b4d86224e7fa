"""SeatGroup: who has the slot of one group of GPUs on one node, one switch after the other, for as long as the group is
there.

A switch is one activity of the node, which decides and carries out, so that nothing of Temporal is between the GPUs'
being cleared and their being filled. Budget: 12 history events a switch. A node that is away is waited for: its slot
stays with whoever has it.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from activities.seat_signatures import GroupState
from planning.seats.orders import NEWS, SEAT_GROUP_WORKFLOW, SUPERSEDED_RUN, TURN, GroupTask, Turned, seat_queue

# A server may drain for long and copy for minutes. A node at work says so each second or two; one that was killed is
# asked again when it has said nothing for this long, reads how far it came, and goes on from there.
WORK = timedelta(hours=2)
HEARTBEAT = timedelta(seconds=8)
RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100),
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=[SUPERSEDED_RUN],
)
LATER = timedelta(seconds=30)  # until a node is asked again that could not carry a step out


@workflow.defn(name=SEAT_GROUP_WORKFLOW, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class SeatGroup:
    @workflow.init
    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._news = False
        self._dismissed = False
        self._switches = 0

    @workflow.signal(name=NEWS, description="Somebody waits for a seat, or something changed: look")
    def news(self) -> None:
        self._news = True

    @workflow.signal(description="The node is gone: nobody waits for it any more")
    def dismiss(self) -> None:
        self._dismissed = True

    @workflow.run
    async def run(self, state: GroupState) -> str:
        while not self._dismissed:
            self._news = False
            within: float | None = None
            try:
                turned = await self._on_node()
                if turned is None:
                    break
                if turned.gone:
                    return f"{self._state.node} has no group {self._state.group} any more"
                self._switches += turned.switched
                self._tell(turned)
                within = turned.within
            except ActivityError as failed:
                if is_cancelled_exception(failed):
                    raise
                if isinstance(failed.cause, ApplicationError) and failed.cause.type == SUPERSEDED_RUN:
                    # The node took another run of this workflow for the newer one. This is the one that there is.
                    workflow.continue_as_new(self._state)
                within = LATER.total_seconds()
                workflow.set_current_details(f"**{self._state.node} could not carry it out**: {failed.cause}"[:1024])
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(self._state)  # a run begins with a look: no news is lost
            await self._waited(within)
        return f"{self._state.node} is gone"

    async def _waited(self, within: float | None) -> None:
        try:
            await workflow.wait_condition(
                lambda: self._news or self._dismissed,
                timeout=None if within is None else timedelta(seconds=within),
                timeout_summary="look again",
            )
        except TimeoutError:
            return

    async def _on_node(self) -> Turned | None:
        """The node's answer, or None where the node went for good."""
        work = workflow.start_activity(
            TURN,
            GroupTask(self._state.node, self._state.group, workflow.info().run_id),
            task_queue=seat_queue(self._state.node),
            result_type=Turned,
            start_to_close_timeout=WORK,
            heartbeat_timeout=HEARTBEAT,
            retry_policy=RETRY,
            summary="whose turn is it?",
        )
        await workflow.wait_condition(lambda: work.done() or self._dismissed)
        if not work.done():
            work.cancel()
            return None
        result: Turned = await work
        return result

    def _tell(self, turned: Turned) -> None:
        workflow.set_current_details(
            f"**{turned.phase}** {turned.active or '(nobody)'}\n\n{turned.reason}\n\n"
            f"{self._switches} switches in this run"
        )
