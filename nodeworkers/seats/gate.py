"""Keeps a container with a seat from starting, and from starting again, until its seat has the slot: what it did on the
GPUs it would do beside whoever is there.

The kubelet (PreStartContainer) or the container runtime (NRI) asks, is answered soon, and asks again later where the
answer was no. Whoever asked is one who waits for the slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

from nodeworkers.seats.slots import Slots
from planning.devices.offers import Refused

# What a slot that nobody has takes to be granted: no reason to send the kubelet away, which comes back much later.
PATIENCE = 3.0
# The kubelet asks again after at most some minutes. Whoever did not for longer is no longer waiting.
FORGOTTEN = 600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """Who wants to start: `since` and `last` are when that was asked first and last, in seconds of the epoch."""

    group: str
    since: float
    last: float


class Gate:
    """One node's. `poke` says that a group is to be looked at; called by any thread."""

    def __init__(self, slots: Slots, poke: Callable[[str], None], patience: float = PATIENCE) -> None:
        self._slots, self._poke, self._patience = slots, poke, patience
        self._asked: dict[str, Asked] = {}
        self._turn = Lock()

    def start(self, group: str, seat: str) -> None:
        """Returns where a container with this seat may start now. Raises Refused where it may not. Waits for a moment,
        so never to be called by the loop's thread.
        """
        try:
            self.ask(group, seat)
        except Refused:
            if not self._slots.may_start_within(group, seat, self._patience):
                raise Refused(self._why(group, seat)) from None
            self.forget(seat)

    def ask(self, group: str, seat: str) -> None:
        """The same at once, for whoever cannot wait. Raises Refused."""
        if not self._slots.may_start(group, seat):
            self._ask(group, seat)
            self._poke(group)
            raise Refused(self._why(group, seat))
        self.forget(seat)

    def waiting(self, group: str) -> Mapping[str, Asked]:
        """The seats of this group whose containers want to start."""
        with self._turn:
            now = time.time()
            self._asked = {seat: each for seat, each in self._asked.items() if now - each.last < FORGOTTEN}
            return {seat: each for seat, each in self._asked.items() if each.group == group}

    def forget(self, seat: str) -> None:
        """Its container has started, or nobody holds the seat any more."""
        with self._turn:
            self._asked.pop(seat, None)

    def _ask(self, group: str, seat: str) -> None:
        with self._turn:
            now = time.time()
            before = self._asked.get(seat)
            self._asked[seat] = Asked(group, before.since if before is not None else now, now)

    def _why(self, group: str, seat: str) -> str:
        slot = self._slots.slot(group)
        if slot.phase == "Quarantined":
            return f"{seat} waits for the slot of {group}, which is left alone for now: {slot.reason}"
        has = f"{slot.seat} has it" if slot.seat else "nobody has it yet"
        heir = f", and {slot.next} is to have it next" if slot.next and slot.next != seat else ""
        return f"{seat} waits for the slot of {group}: {has}{heir}. Its container starts when the slot is its own."
