"""The two activities with which a group's workflow switches seats on this node. One at a time for each group, while
those of other groups go on beside it.

A run of the workflow that another followed is refused (law 5); one whose activity was lost with a process is answered
from what the hardware says.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from nodeworkers.seats.reporting import SwitchLog
from nodeworkers.seats.slots import Slots, SupersededError
from nodeworkers.seats.switching import Group, Patience
from nodeworkers.seats.world import World
from planning.seats.orders import CLEAR, FILL, SUPERSEDED_RUN, Cleared, Filled, GroupTask

T = TypeVar("T")

BEAT = 2.0  # seconds


class Switches:
    """The activities, over what one node has. One instance for the process."""

    def __init__(
        self, slots: Slots, world: World, patience: Patience | None = None, log: SwitchLog | None = None
    ) -> None:
        """`log` is told how each ended."""
        self._slots, self._world, self._patience = slots, world, patience or Patience()
        self._log = log or SwitchLog()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @activity.defn(name=CLEAR)
    async def clear(self, task: GroupTask) -> Cleared:
        """Decides who is to have the slot, and clears it. Raises ApplicationError (SUPERSEDED_RUN)."""

        async def work(group: Group) -> Cleared:
            before = self._slots.slot(task.group)
            cleared = await group.clear()
            self._log.cleared(before, cleared, time.time())
            return cleared

        return await self._take(task, work)

    @activity.defn(name=FILL)
    async def fill(self, task: GroupTask) -> Filled:
        """Gives the slot that was cleared to `task.next`. Raises as `clear` does."""

        async def work(group: Group) -> Filled:
            filled = await group.fill(task.next)
            self._log.filled(task.group, task.next, filled, time.time())
            return filled

        return await self._take(task, work)

    async def _take(self, task: GroupTask, work: Callable[[Group], Awaitable[T]]) -> T:
        begun = list[Group]()
        beat = asyncio.create_task(_beat(begun))
        try:
            async with self._turns[task.group]:
                epoch = self._slots.enter(task.group, task.run)
                begun.append(Group(task.group, epoch, self._slots, self._world, self._patience))
                return await work(begun[0])
        except SupersededError as newer:
            raise ApplicationError(str(newer), type=SUPERSEDED_RUN, non_retryable=True) from newer
        finally:
            beat.cancel()


async def _beat(begun: Sequence[Group]) -> None:
    """Tells Temporal what goes on. By its answers a cancellation comes here."""
    while True:
        activity.heartbeat(begun[0].doing if begun else "waiting for what this node does to the group already")
        await asyncio.sleep(BEAT)
