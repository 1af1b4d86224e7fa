"""Notices when somebody else of a group should have the slot, and tells its workflow: then, and not at every request.

What is decided here only says when to ask: whoever switches decides anew, from the hardware (law 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from nodeworkers.seats.node_world import NodeWorld
from nodeworkers.seats.proxy_words import ProxyError
from nodeworkers.seats.slots import Slot, Slots
from nodeworkers.seats.world import UntouchedError
from planning.seats.orders import GroupPhase

LOOK = 2.0  # seconds between looks without news: containers start and end, cards come and go
# Seconds after which a workflow is told again that did nothing: the first time, and at most. Each time is an event of
# its history, also while nobody carries workflows on.
_AGAIN = (2.0, 300.0)
SOON = 0.005  # seconds in which news are taken together
_SETTLED: frozenset[GroupPhase] = frozenset({"Empty", "Active", "Quarantined"})
_log = logging.getLogger(__name__)


class Attention:
    """To one group. `poke` tells its workflow."""

    def __init__(self, group: str, world: NodeWorld, slots: Slots, poke: Callable[[str], None]) -> None:
        self._group, self._world, self._slots, self._poke = group, world, slots, poke
        self._due = asyncio.Event()
        self._due.set()
        self._look = True
        self._told: tuple[Slot, str] | None = None  # what the workflow was told last
        self._told_at, self._again = 0.0, _AGAIN[0]

    def touch(self, *, requests: bool = False) -> None:
        """Something is news there; `requests`: it is requests alone, for which nobody reads the hardware."""
        self._look = self._look or not requests
        self._due.set()

    async def run(self) -> None:
        """Until cancelled, or the node has no such group any more."""
        within, loop, looked = 0.0, asyncio.get_running_loop(), 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within):
                    await self._due.wait()
            await asyncio.sleep(SOON)
            self._due.clear()
            try:
                if self._look or loop.time() - looked > LOOK:
                    self._look, looked = False, loop.time()
                    if await self._world.look(self._group) is None:
                        self._poke(self._group)  # its workflow ends
                        return
                within = await self._consider()
            except (UntouchedError, ProxyError) as trouble:
                _log.debug("%s: %s", self._group, trouble)
                within = LOOK
            except Exception:  # a mistake of ours ends nobody else's work
                _log.exception("the group %s could not be looked at", self._group)
                within = LOOK

    def _tell(self, slot: Slot, seat: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._told == (slot, seat):
            if now < self._told_at + self._again:
                return
            self._again = min(2 * self._again, _AGAIN[1])
        else:
            self._told, self._again = (slot, seat), _AGAIN[0]
        self._told_at = now
        self._poke(self._group)

    async def _consider(self) -> float:
        slot = self._slots.slot(self._group)
        choice = await self._world.decide(self._group)
        if slot.phase in _SETTLED and (choice.seat or self._world.strange(self._group)):
            self._tell(slot, choice.seat)
        await self._world.show(self._group)
        return min(LOOK, choice.within) if choice.within is not None and not choice.seat else LOOK
