"""Provisioning: one workload's order of a node, from the ledger's decision until nobody needs it any more.

Every look is one local activity that reads, decides (planning.requests), makes the ProvisioningRequest and tells how
far it is. Another takes back what was made, before the order is tried again, is given up, ends or is cancelled; only
then does the ledger hear of it. Budget: 30 history events for an order that is accepted, provisioned and used.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Literal

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.messages import Poke, ProvisioningState
from activities.signatures import ARRANGE, TAKE_BACK, Arranged, ArrangeRequest, TakeBack
from planning.model import Order
from workflows.placement import newest

# As for a workload's own workflow: short calls are repeated inside the workflow task, long silences are timers.
LOCAL_RETRY = timedelta(seconds=4)
PATIENCE = timedelta(hours=1)
RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))


@workflow.defn(name="Provisioning", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class Provisioning:
    @workflow.init
    def __init__(self, state: ProvisioningState) -> None:
        self._state = state
        self._poked = False
        self._ending = False
        self._next: Order | None = None

    @workflow.signal(description="Have a node provisioned for the workload")
    def order(self, order: Order) -> None:
        # The ledger's activity may send the same order again after a crash.
        if order.generation != self._state.generation or self._ending:
            self._next = order

    @workflow.signal(description="Something about this order changed: look again")
    def poke(self, poke: Poke) -> None:
        self._poked = True
        self._state.seen = newest(self._state.seen, poke.seen)

    @workflow.run
    async def run(self, state: ProvisioningState) -> str:
        try:
            return await self._carry_on()
        except (ActivityError, asyncio.CancelledError) as ended:
            if self._state.generation and is_cancelled_exception(ended):
                await self._take_back("failed")
            raise

    async def _carry_on(self) -> str:
        told = "no order was given"
        while self._next is not None or (self._state.generation and not self._ending):
            if workflow.info().is_continue_as_new_suggested() and self._next is None:
                workflow.continue_as_new(self._state)
            try:
                if self._next is not None:
                    await self._begin(self._next)
                arranged = await self._look()
                told = arranged.message
                await self._go_on(arranged)
            except ActivityError as failed:
                if is_cancelled_exception(failed):
                    raise
                # An hour of tries is over: begin again.
                self._ending = False
                workflow.set_current_details(f"**No answer for {PATIENCE}**: {failed.cause}; it is tried again")
        return told

    async def _begin(self, order: Order) -> None:
        """Turns to this order; what was made for another is taken back."""
        if self._state.generation and not self._ending:
            await self._take_back("over")
        self._state.generation, self._next, self._ending = order.generation, None, False
        self._state.attempt, self._state.known, self._state.told = 0, False, ""

    async def _go_on(self, arranged: Arranged) -> None:
        match arranged.next:
            case "wait":
                await self._sleep(arranged.within, "look again", poked=True)
            case "retry":
                await self._take_back("ordered" if self._state.told == "provisioned" else "")
                self._state.attempt, self._state.known, self._state.told = arranged.attempt + 1, False, ""
                await self._sleep(arranged.within, "back-off", poked=False)
            case "fail" | "over":
                self._ending = True
                await self._take_back("failed" if arranged.next == "fail" else "over")

    async def _look(self) -> Arranged:
        self._poked = False
        arranged: Arranged = await workflow.execute_local_activity(
            ARRANGE,
            ArrangeRequest(
                ref=self._state.ref,
                generation=self._state.generation,
                attempt=self._state.attempt,
                known=self._state.known,
                told=self._state.told,
                fresh=self._state.seen,
                jitter=workflow.random().random(),
            ),
            result_type=Arranged,
            schedule_to_close_timeout=PATIENCE,
            start_to_close_timeout=timedelta(seconds=20),
            local_retry_threshold=LOCAL_RETRY,
            retry_policy=RETRY,
            summary="look",
        )
        self._state.attempt = arranged.attempt
        if arranged.next == "wait":
            self._state.told = arranged.stage
            self._state.known |= bool(arranged.stage)
        workflow.set_current_details(f"attempt {arranged.attempt + 1}\n\n{arranged.message}")
        return arranged

    async def _take_back(self, state: Literal["", "ordered", "failed", "over"]) -> None:
        await workflow.execute_local_activity(
            TAKE_BACK,
            TakeBack(
                self._state.ref,
                self._state.generation,
                self._state.attempt,
                state,
                workflow.time(),
                known=self._state.known,
            ),
            schedule_to_close_timeout=PATIENCE,
            start_to_close_timeout=timedelta(seconds=20),
            local_retry_threshold=LOCAL_RETRY,
            retry_policy=RETRY,
            summary=f"take back ({state or 'another try'})",
        )

    async def _sleep(self, seconds: float, summary: str, *, poked: bool) -> None:
        """`poked`: whether a poke ends it; another order always does."""
        try:
            await workflow.wait_condition(
                lambda: self._next is not None or (poked and self._poked), timeout=seconds, timeout_summary=summary
            )
        except TimeoutError:
            return
