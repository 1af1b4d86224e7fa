"""NodeKernelCache: has one node carry out the orders for one cache, and tells the cache's workflow what came of it.

Begins with an order and ends when it is answered for good; one that has to be tried for long goes on in a new run. A
newer order replaces one that is under way. Budget: 13 history events for a node that becomes ready at its first try.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception
from temporalio.workflow import ActivityCancellationType

from activities.cache_signatures import TELL_CACHE, NodeCacheState, TellCache
from planning.backoff import delay
from planning.caches.orders import PREPARE, REMOVE, SUPERSEDED, NodeOrder, NodeTask, Report, node_queue

# A node may be away for as long as it likes; one that is at work says so every five seconds, and is asked anew if not.
WORK = timedelta(hours=2)
HEARTBEAT = timedelta(seconds=20)
SOONEST = 1.0  # seconds until a node is asked again, whatever it says
LATER = 30.0  # and where it did not say
RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), maximum_interval=timedelta(minutes=1), non_retryable_error_types=[SUPERSEDED]
)
TELLING = timedelta(hours=1)
TELL_RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))


@workflow.defn(name="NodeKernelCache", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class NodeKernelCache:
    @workflow.init
    def __init__(self, state: NodeCacheState) -> None:
        self._state = state
        self._next = state.order
        self._epoch = 0
        self._dismissed = False

    @workflow.signal(description="What the node is to do from now on")
    def order(self, order: NodeOrder) -> None:
        newest = self._epoch if self._next is None else self._next.epoch
        if order.epoch > newest:
            self._next = order

    @workflow.signal(description="The node is gone: nobody waits for it any more")
    def dismiss(self) -> None:
        self._dismissed = True

    @workflow.run
    async def run(self, state: NodeCacheState) -> str:
        await workflow.wait_condition(lambda: self._interrupted)
        outcome = "dismissed"
        while self._next is not None and not self._dismissed:
            order, self._next = self._next, None
            if order != self._state.order:
                self._state = replace(self._state, order=order, tries=0, pods=-1)
            self._epoch = order.epoch
            outcome = await self._carry_out(order)
        if self._dismissed and self._state.order is not None:
            # Should there be a node of that name again, it is known that this order was never answered.
            void = Report(self._state.node, self._state.order.epoch, "removed", reason="NodeGone", message="it is gone")
            await self._tell(void)
        return "dismissed" if self._dismissed else outcome

    @property
    def _interrupted(self) -> bool:
        return self._dismissed or self._next is not None

    async def _carry_out(self, order: NodeOrder) -> str:
        """One order, tried until it is answered for good or something newer comes."""
        while True:
            report = await self._attempt(order)
            if report is None:
                return "superseded"
            await self._tell(report)
            if report.outcome not in ("retrying", "busy"):
                return report.outcome
            # The node answers a removal anew once the pods are others than those that it is told of here.
            changed = report.outcome == "busy" and report.pods != self._state.pods
            self._state.pods = report.pods if report.outcome == "busy" else -1
            if not changed and await self._newer_within(report):
                return "superseded"
            if workflow.info().is_continue_as_new_suggested() and not self._interrupted:
                workflow.continue_as_new(self._state)

    async def _newer_within(self, report: Report) -> bool:
        """Waits before the next try. Whether something newer came."""
        try:
            await workflow.wait_condition(
                lambda: self._interrupted,
                timeout=delay(max(SOONEST, report.within), self._state.tries, workflow.random().random()),
                timeout_summary=f"back-off: {report.reason}",
            )
        except TimeoutError:
            self._state.tries += 1
            return False
        return True

    async def _attempt(self, order: NodeOrder) -> Report | None:
        """The node's answer; None if something newer came first, here or on the node."""
        work = workflow.start_activity(
            PREPARE if order.task == "prepare" else REMOVE,
            NodeTask(self._state.ref, self._state.node, order, self._state.pods),
            task_queue=node_queue(self._state.node),
            result_type=Report,
            start_to_close_timeout=WORK,
            heartbeat_timeout=HEARTBEAT,
            retry_policy=RETRY,
            cancellation_type=ActivityCancellationType.TRY_CANCEL,
            summary=f"{order.task} {order.digest[:19]}".strip(),
        )
        await workflow.wait_condition(lambda: work.done() or self._interrupted)
        if not work.done():
            work.cancel()
            return None
        try:
            report: Report = await work
            return report
        except ActivityError as failed:
            if is_cancelled_exception(failed):
                raise
            if isinstance(failed.cause, ApplicationError) and failed.cause.type == SUPERSEDED:
                return None
            # Nothing that a node answers may leave the cache's workflow waiting for ever.
            told = f"its node could not carry it out: {failed.cause}"[:1024]
            serves = self._state.told.serves if self._state.told is not None else ""
            return Report(
                self._state.node, order.epoch, "retrying", serves, "NodeFailed", told, within=LATER
            )  # fmt: skip

    async def _tell(self, report: Report) -> None:
        """The cache's workflow hears what is new to it."""
        said = f"**{report.outcome}** {report.reason}: {report.message}"
        workflow.set_current_details(f"{said}\n\nserves `{report.serves or 'nothing'}`, {report.pods} pods")
        while report != self._state.told:
            try:
                await workflow.execute_local_activity(
                    TELL_CACHE,
                    TellCache(self._state.ref, report),
                    schedule_to_close_timeout=TELLING,
                    start_to_close_timeout=timedelta(seconds=20),
                    local_retry_threshold=timedelta(seconds=4),
                    retry_policy=TELL_RETRY,
                    summary=f"tell: {report.outcome}",
                )
            except ActivityError as failed:
                if is_cancelled_exception(failed):
                    raise
                workflow.set_current_details(f"**Not told for {TELLING}**: {failed.cause}; it is tried again")
            else:
                self._state.told = report
