"""The activities with which a group's workflow switches seats on this node, and with which a migration diverts their
requests. One at a time for each group, while those of other groups go on beside it.

A run of the workflow that another followed is refused (law 5); one whose activity was lost with a process is answered
from what the hardware says.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from temporalio import activity
from temporalio.exceptions import ApplicationError

from nodeworkers.seats.proxy_words import ProxyError
from nodeworkers.seats.reporting import SwitchLog
from nodeworkers.seats.slots import Slot, Slots, SupersededError
from nodeworkers.seats.switching import Group, Patience
from nodeworkers.seats.world import UntouchedError, World
from planning.seats.orders import (
    DIVERT,
    PREFER,
    SUPERSEDED_RUN,
    TURN,
    Divert,
    Diverted,
    GroupTask,
    Preferred,
    Turned,
)

BEAT = 2.0  # seconds


class Switches:
    """The activity, over what one node has. One instance for the process."""

    def __init__(
        self, slots: Slots, world: World, patience: Patience | None = None, log: SwitchLog | None = None,
        prefer: Callable[[str, float], None] = lambda group, seconds: None,
    ) -> None:  # fmt: skip
        """`log` is told how each ended. `prefer`: whoever hands seats out begins with this group's, for so long."""
        self._prefer = prefer
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

    @activity.defn(name=PREFER)
    async def prefer(self, preferred: Preferred) -> None:
        """For the pod that a migration is about to start on this node."""
        self._prefer(preferred.group, preferred.seconds)

    @activity.defn(name=DIVERT)
    async def pass_on(self, order: Divert) -> Diverted:
        """Never beside a switch of the group: who has the slot would not know of it."""
        begun = list[Group]()
        beat = asyncio.create_task(_beat(begun))
        try:
            async with self._turns[order.group]:
                await self._world.look(order.group)
                return Diverted(await self._world.pass_on(order.seat, order.pod, order.address))
        except (UntouchedError, ProxyError) as trouble:
            return Diverted(str(trouble).rstrip("."))
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
