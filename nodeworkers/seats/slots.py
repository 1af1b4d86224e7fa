"""Who has the slot of each group of GPUs, in the node's ledger: written by that group's workflow alone, by way of its
activities (law 5), and read by whoever starts a container.

Each run of the workflow gets a fencing epoch when it is heard of first; from then on the runs before it write nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from threading import Condition
from typing import get_args

import orjson
from pydantic import TypeAdapter, ValidationError

from nodeworkers.ledger import Ledger
from planning.seats.orders import GroupPhase

_RUNS = 32  # that are remembered of a group: an activity that outlives its workflow's end does so by minutes
_MAY_START: frozenset[GroupPhase] = frozenset({"Starting", "Active"})
_runs: TypeAdapter[list[str]] = TypeAdapter(list[str])


class SupersededError(Exception):
    """Another run of the group's workflow was heard of since. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A group's slot. `seat` has it, '' nobody; `next` is to have it once it is clear. `since`: when the phase became
    what it is, in seconds of the epoch. `reason` is a sentence.
    """

    group: str
    phase: GroupPhase = "Empty"
    seat: str = ""
    next: str = ""
    reason: str = ""
    since: float = 0.0
    switches: int = 0


class Slots:
    """The groups' part of an open ledger. Methods may be called by any thread, answer from memory, and raise
    LedgerError, and change nothing then, where what they write cannot be written.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Reads all of it. A row that makes no sense counts as none: the hardware is read before anything is done."""
        self._ledger = ledger
        self._turn = Condition()
        self._slots: dict[str, Slot] = {}
        self._epochs: dict[str, int] = {}
        self._known: dict[str, list[str]] = {}
        read = "SELECT name, epoch, CAST(runs AS BLOB), phase, seat, next, reason, since, switches FROM seat_groups"
        for name, epoch, runs, phase, *rest in ledger.read(read, (), tuple):
            self._epochs[name] = epoch
            try:
                self._known[name] = _runs.validate_json(runs)
            except ValidationError:
                self._known[name] = []
            if phase in get_args(GroupPhase):
                self._slots[name] = Slot(name, phase, *rest)

    def enter(self, group: str, run: str) -> int:
        """The epoch of a run of the group's workflow: a new one where nobody has heard of it. Raises SupersededError
        for one after which another was heard of.
        """
        with self._turn:
            known = self._known.get(group, [])
            if known and known[-1] == run:
                return self._epochs[group]
            if run in known:
                raise SupersededError(f"{group}: the run {run} of its workflow was followed by {known[-1]}.")
            # The proxy and the helpers remember epochs longer than a ledger that was lost: a new one begins above them.
            before = self._epochs.get(group) or int(time.time() * 1000)
            epoch, runs = before + 1, [*known, run][-_RUNS:]
            self._write(self.slot(group), epoch, runs)
            return epoch

    def check(self, group: str, epoch: int) -> None:
        """To be called right before the hardware is asked for anything. Raises SupersededError."""
        with self._turn:
            if epoch != self._epochs.get(group, 0):
                raise SupersededError(f"{group}: the epoch {epoch} ended when {self._epochs.get(group, 0)} began.")

    def epoch(self, group: str) -> int:
        """The newest of the group; 0 where nobody has heard of a run yet."""
        return self._epochs.get(group, 0)

    def slot(self, group: str) -> Slot:
        """As it is; that of a group of which nothing is known is empty."""
        return self._slots.get(group, Slot(group))

    def has(self, seat: str) -> bool:
        """Whether it has its group's slot, in whatever phase."""
        return any(slot.seat == seat for slot in self._slots.values())

    def active(self) -> list[str]:
        """The seats that have their groups' slots, and serve."""
        return [slot.seat for slot in self._slots.values() if slot.phase == "Active"]

    def put(self, slot: Slot, epoch: int, at: float) -> Slot:
        """Writes the group's slot down, at `at` (seconds of the epoch). Raises SupersededError."""
        with self._turn:
            self.check(slot.group, epoch)
            before = self.slot(slot.group)
            slot = replace(slot, since=before.since if before.phase == slot.phase else at)
            if slot != before:
                self._write(slot, epoch, self._known[slot.group])
            return slot

    def may_start(self, group: str, seat: str) -> bool:
        """Whether a container with this seat may start now (again): the slot is granted to it."""
        slot = self.slot(group)
        return slot.seat == seat and slot.phase in _MAY_START

    def may_start_within(self, group: str, seat: str, seconds: float) -> bool:
        """As `may_start`, as soon as it may; waits, so never to be called by the loop's thread."""
        with self._turn:
            return self._turn.wait_for(lambda: self.may_start(group, seat), seconds)

    def forget(self, group: str, epoch: int) -> None:
        """The node has no such group any more. Its epoch stays: should it come back, it goes on from there."""
        with self._turn:
            self.check(group, epoch)
            self._write(Slot(group, switches=self.slot(group).switches), epoch, self._known[group])

    def _write(self, slot: Slot, epoch: int, runs: list[str]) -> None:
        values = (slot.phase, slot.seat, slot.next, slot.reason, slot.since, slot.switches)
        with self._ledger.transaction():
            self._ledger.execute(
                "INSERT OR REPLACE INTO seat_groups (name, epoch, runs, phase, seat, next, reason, since, switches) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (slot.group, epoch, orjson.dumps(runs).decode(), *values),
            )
        self._slots[slot.group], self._epochs[slot.group], self._known[slot.group] = slot, epoch, runs
        self._turn.notify_all()
