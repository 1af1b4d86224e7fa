"""The activity with which a group's workflow switches seats on this node. One at a time for each group, while those of
other groups go on beside it.

A run of the workflow that another followed is refused (law 5); one whose activity was lost with a process is answered
from what the hardware says.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence

from temporalio import activity
from temporalio.exceptions import ApplicationError

from nodeworkers.seats.reporting import SwitchLog
from nodeworkers.seats.slots import Slot, Slots, SupersededError
from nodeworkers.seats.switching import Group, Patience
from nodeworkers.seats.world import World
from planning.seats.orders import SUPERSEDED_RUN, TURN, GroupTask, Turned

BEAT = 2.0  # seconds


class Switches:
    """The activity, over what one node has. One instance for the process."""

    def __init__(
        self, slots: Slots, world: World, patience: Patience | None = None, log: SwitchLog | None = None
    ) -> None:
        """`log` is told how each ended."""
        self._slots, self._world, self._patience = slots, world, patience or Patience()
        self._log = log or SwitchLog()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @activity.defn(name=TURN)
    async def turn(self, task: GroupTask) -> Turned:
        """Decides who is to have the slot, and gives it to them. Raises ApplicationError (SUPERSEDED_RUN)."""
        begun = list[Group]()
        beat = asyncio.create_task(_beat(begun))
        try:
            async with self._turns[task.group]:
                epoch = self._slots.enter(task.group, task.run)
                begun.append(Group(task.group, epoch, self._slots, self._world, self._patience))
                return await self._switch(begun[0], self._slots.slot(task.group))
        except SupersededError as newer:
            raise ApplicationError(str(newer), type=SUPERSEDED_RUN, non_retryable=True) from newer
        finally:
            beat.cancel()

    async def _switch(self, group: Group, before: Slot) -> Turned:
        cleared = await group.clear()
        self._log.cleared(before, cleared, time.time())
        if not cleared.next:
            return Turned(
                cleared.phase, cleared.active, False, cleared.reason, cleared.within, cleared.seconds, cleared.gone
            )
        filled = await group.fill(cleared.next)
        self._log.filled(before.group, cleared.next, filled, time.time())
        seconds = {name: cleared.seconds.get(name, 0.0) + more for name, more in filled.seconds.items()}
        switched = filled.active == cleared.next
        reason = f"{cleared.next} serves: {cleared.reason}" if switched else filled.reason
        return Turned(filled.phase, filled.active, switched, reason, filled.within, {**cleared.seconds, **seconds})


async def _beat(begun: Sequence[Group]) -> None:
    """Tells Temporal what goes on. By its answers a cancellation comes here."""
    while True:
        activity.heartbeat(begun[0].doing if begun else "waiting for what this node does to the group already")
        await asyncio.sleep(BEAT)
