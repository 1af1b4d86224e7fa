"""SeatMigration: one move of a model server to a seat of another group, undone where it does not come off.

Decide, start a second server there, pass requests on to it, end the first. Until the first is ended everything can be
undone, and is: by a failure, by a deadline, by the SeatMigration's deletion, and where this workflow is cancelled.
Budget: 40 history events for one that comes off, however long the new server takes to start, and 50 for one that is
undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.migration_signatures import (
    DECIDE_MIGRATION,
    MIGRATION_QUEUE,
    NOT_YET,
    RETIRE,
    ROLL_BACK,
    SEAT_MIGRATION_WORKFLOW,
    START_QUEUE,
    START_REPLACEMENT,
    Decided,
    Ended,
    MigrationRef,
    RollBack,
    Started,
)
from planning.seats.migration import Move
from planning.seats.orders import DIVERT, PREFER, Divert, Diverted, Preferred, seat_queue

T = TypeVar("T")

# An activity that waits says so; one that was lost with its worker is begun anew soon, and reads how far it came.
HEARTBEAT = timedelta(seconds=20)
LONGEST = timedelta(days=2)
# Until the API server answers again, however long that takes: what was begun is neither left nor guessed at.
RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))
# A node that is away cannot be told which group comes first; where the pod lands is looked at in any case.
PREFER_PATIENCE = timedelta(seconds=15)
# Nor can its requests be passed on: then nothing is moved. That they come back to their own server is asked for again.
NODE_PATIENCE = timedelta(minutes=2)
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 900.0  # seconds
# A step that is cancelled says first that it has ended: what undoes it is not to run beside it.
ENDED = workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
PREFERRED = 120.0  # seconds from the moment on at which the pod is about to be made


@workflow.defn(name=SEAT_MIGRATION_WORKFLOW, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class SeatMigration:
    def __init__(self) -> None:
        self._diverted = False  # or perhaps

    @workflow.run
    async def run(self, ref: MigrationRef) -> str:
        decided = await self._ask(DECIDE_MIGRATION, ref, Decided, "can it be moved?")
        move = decided.move
        if move is None:
            return decided.message
        self._diverted = decided.resumed
        if decided.undo:
            return await self._to_its_end(self._undo(move, "Failed", "it was being undone, and is undone"))
        workflow.set_current_details(f"**Starting** {move.replacement} on {move.told}\n\n{decided.message}")
        try:
            ended = await self._carry_out(move)
        except (ActivityError, asyncio.CancelledError) as failed:
            cancelled = is_cancelled_exception(failed)
            why = "its workflow was cancelled" if cancelled else f"{failed.__cause__ or failed}"
            told = await self._to_its_end(self._undo(move, "Cancelled" if cancelled else "Failed", why))
            if cancelled:
                raise
            return told
        if not ended.reason:
            return ended.message
        return await self._to_its_end(self._undo(move, ended.reason, ended.message))

    async def _carry_out(self, move: Move) -> Ended:
        """What came of it; with a reason where it is to be undone."""
        await self._prefer(move)
        started = await self._ask(START_REPLACEMENT, move, Started, f"start {move.replacement}", START_QUEUE)
        if started.reason:
            return Ended(started.message, started.reason)
        workflow.set_current_details(f"**Switching** to {move.replacement} on {move.told}\n\n{started.message}")
        if move.port and started.address:
            self._diverted = True
            try:
                diverted = await self._divert(move, started.address)
            except ActivityError as silent:
                if is_cancelled_exception(silent):
                    raise
                return Ended(f"Node {move.node} did not answer for {NODE_PATIENCE}.", "NodeSilent")
            if diverted.why_not:
                return Ended(f"Pod {move.pod} keeps its requests: {diverted.why_not}.", "RequestsNotPassedOn")
        return await self._ask(RETIRE, move, Ended, f"end {move.pod}")

    async def _undo(self, move: Move, reason: str, why: str) -> str:
        """The new server goes when requests are certain not to go there, however long that takes."""
        workflow.set_current_details(f"**RollingBack** {reason}\n\n{why}")
        pause = FIRST_PAUSE
        while True:
            own = not move.port or not self._diverted or await self._taken_back(move)
            ended = await self._ask(ROLL_BACK, RollBack(move, reason, why, own), Ended, "as it was before")
            if ended.reason != NOT_YET:
                break
            await workflow.sleep(pause, summary=f"node {move.node} is to answer")
            pause = min(2 * pause, LONGEST_PAUSE)
        workflow.set_current_details(f"**{reason}** {ended.message}\n\n{why}")
        return ended.message

    async def _taken_back(self, move: Move) -> bool:
        """Whether requests for the old server go to itself, for certain."""
        try:
            return not (await self._divert(move, "")).why_not
        except ActivityError:
            return False

    async def _to_its_end(self, undoing: Coroutine[Any, Any, str]) -> str:
        """Also where somebody cancels meanwhile: half of an undoing is worse than either."""
        task = asyncio.create_task(undoing)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
        return task.result()

    async def _prefer(self, move: Move) -> None:
        if not move.to_group:
            return
        try:
            await workflow.execute_activity(
                PREFER,
                Preferred(move.to_group, PREFERRED),
                task_queue=seat_queue(move.to_node),
                schedule_to_close_timeout=PREFER_PATIENCE,
                start_to_close_timeout=timedelta(seconds=5),
                retry_policy=RETRY,
                summary=f"{move.to_group} first",
            )
        except ActivityError as silent:
            if is_cancelled_exception(silent):
                raise

    async def _divert(self, move: Move, address: str) -> Diverted:
        diverted: Diverted = await workflow.execute_activity(
            DIVERT,
            Divert(move.group, move.seat, move.pod_uid, address),
            task_queue=seat_queue(move.node),
            result_type=Diverted,
            schedule_to_start_timeout=NODE_PATIENCE,
            start_to_close_timeout=LONGEST,
            heartbeat_timeout=HEARTBEAT,
            cancellation_type=ENDED,
            retry_policy=RETRY,
            summary=f"requests to {address or 'where they went before'}",
        )
        return diverted

    async def _ask(self, name: str, value: Any, told: type[T], summary: str, queue: str = MIGRATION_QUEUE) -> T:
        answer: T = await workflow.execute_activity(
            name,
            value,
            task_queue=queue,
            result_type=told,
            start_to_close_timeout=LONGEST,
            heartbeat_timeout=HEARTBEAT,
            cancellation_type=ENDED,
            retry_policy=RETRY,
            summary=summary,
        )
        return answer
