"""The node's record of its devices, in the ledger: the cards that it knew last, and what it gave to whom.

For the allocation core, which answers the kubelet from here while no provider has spoken yet. All of it can be had
again: cards from their providers, allocations from the kubelet (`holdings.py`). Reads come from memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from nodeworkers.hardware.wire import WireError, card
from nodeworkers.ledger import Ledger
from planning.devices.cards import Card
from planning.devices.offers import Injection

KEPT_SECONDS = 7 * 24 * 3600.0  # for which a card is remembered that nobody sees and nobody holds
MOST_CARDS = 2048
MOST_ALLOCATIONS = 65_536
_SEEN_STEP = 3600.0  # seconds by which the record of when a card was seen may be behind
_injection: TypeAdapter[Injection | None] = TypeAdapter(Injection | None)
_ids: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])
_health: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any], config=ConfigDict(strict=True))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """A card as it was last seen, at `seen` (seconds of the epoch, up to an hour behind); `health` as the core wrote
    it.
    """

    card: Card
    health: Mapping[str, Any]
    seen: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """Devices that were given together, at `at` (seconds of the epoch). `claim` is the uid of the DRA claim, '' where
    the device plugin gave them; `injection` is what the container got, None where only the kubelet knows.
    """

    resource: str
    ids: tuple[str, ...]
    claim: str
    at: float
    injection: Injection | None


class Records:
    """The devices' part of an open ledger; for one thread. Methods that write raise LedgerError, and change nothing
    then. What a method has written survives the end of this process in any way. A power cut may take what was written
    in the last moments, and no more; it ends every container as well, and what the kubelet still means to run it shows.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Reads all of it. What cannot be understood is dropped, with a warning."""
        self._ledger = ledger
        self._cards: dict[str, Known] = {}
        self._allocations: dict[int, Allocation] = {}
        self._number_of: dict[tuple[str, str], int] = {}  # of a device and the claim that it was given for
        self._load()
        self._next = max(self._allocations, default=0) + 1

    # ---- allocations

    def remember_allocation(
        self, resource: str, ids: Collection[str], injection: Injection | None, at: float, claim: str = ""
    ) -> Allocation:
        """Notes that these devices were given, now and not as before: an earlier allocation for the same claim (or by
        the device plugin) no longer has them. Before it returns, the ledger has it. The oldest beyond MOST_ALLOCATIONS
        are forgotten.
        """
        made = Allocation(resource, tuple(dict.fromkeys(ids)), claim, at, injection)
        number = self._next
        parted = self._without(made.ids, claim)
        surplus = max(len(self._allocations) + 1 - MOST_ALLOCATIONS, 0)
        parted.update(dict.fromkeys(islice(self._allocations, surplus)))
        with self._ledger.transaction():
            self._write_parted(parted)
            self._ledger.execute(
                "INSERT INTO allocations (number, resource, devices, claim, given, injection) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (number, resource, _json(made.ids), claim, at, _json(injection)),
            )
        self._part(parted)
        self._next += 1
        self._add(number, made)
        return made

    def allocations(self) -> tuple[Allocation, ...]:
        """All that is given, the oldest first."""
        return tuple(self._allocations.values())

    def claim(self, uid: str) -> tuple[Allocation, ...]:
        """What was given for a claim, () for one that nobody knows."""
        return tuple(each for each in self._allocations.values() if uid and each.claim == uid)

    def forget(self, ids: Collection[str], claim: str = "") -> None:
        """Notes that these devices are not given for this claim (by the device plugin) any more."""
        parted = self._without(ids, claim)
        if parted:
            with self._ledger.transaction():
                self._write_parted(parted)
            self._part(parted)

    # ---- cards

    def cards(self) -> Mapping[str, Known]:
        """What is known of cards, by id; also of those that were not seen for some time."""
        return self._cards

    def remember_cards(
        self, seen: Iterable[tuple[Card, Mapping[str, Any]]], at: float, held: Collection[str] = ()
    ) -> None:
        """Notes the cards that were seen at `at`, each with its health as JSON has it; cheap where nothing changed.
        Forgets a card after a week in which it was not seen, and the longest unseen beyond MOST_CARDS; never one whose
        id is in `held`.
        """
        changed = {}
        for each, health in seen:
            known = self._cards.get(each.id)
            if known is None or known.card != each or known.health != health or abs(at - known.seen) >= _SEEN_STEP:
                changed[each.id] = Known(each, dict(health), at)
        after = self._cards | changed
        by_age = sorted(after.keys() - set(held), key=lambda id: after[id].seen)
        most = max(len(after) - MOST_CARDS, 0)
        old = [id for number, id in enumerate(by_age) if number < most or after[id].seen < at - KEPT_SECONDS]
        if not changed and not old:
            return
        with self._ledger.transaction():
            for id, known in changed.items():
                self._ledger.execute(
                    "INSERT OR REPLACE INTO cards (id, card, health, seen) VALUES (?, ?, ?, ?)",
                    (id, _json(known.card), _json(known.health), known.seen),
                )
            for id in old:
                self._ledger.execute("DELETE FROM cards WHERE id = ?", (id,))
        for id in old:
            del after[id]
        self._cards = after

    # ---- memory and file

    def _without(self, ids: Collection[str], claim: str) -> dict[int, Allocation | None]:
        """What becomes of each allocation that has one of these devices; None: nothing is left of it."""
        numbers = {self._number_of[id, claim] for id in ids if (id, claim) in self._number_of}
        gone, parted = set(ids), dict[int, Allocation | None]()
        for number in numbers:
            before = self._allocations[number]
            left = tuple(id for id in before.ids if id not in gone)
            parted[number] = replace(before, ids=left) if left else None
        return parted

    def _write_parted(self, parted: Mapping[int, Allocation | None]) -> None:
        for number, left in parted.items():
            if left is None:
                self._ledger.execute("DELETE FROM allocations WHERE number = ?", (number,))
            else:
                self._ledger.execute("UPDATE allocations SET devices = ? WHERE number = ?", (_json(left.ids), number))

    def _part(self, parted: Mapping[int, Allocation | None]) -> None:
        for number, left in parted.items():
            before = self._allocations[number]
            for id in before.ids:
                del self._number_of[id, before.claim]
            if left is None:
                del self._allocations[number]
            else:
                self._add(number, left)

    def _add(self, number: int, allocation: Allocation) -> None:
        self._allocations[number] = allocation
        self._number_of.update(dict.fromkeys(((id, allocation.claim) for id in allocation.ids), number))

    def _load(self) -> None:
        """Text is read as bytes, for a disk may have made it such that it is no text."""
        odd: list[str] = []
        cards = "SELECT rowid, CAST(id AS BLOB), CAST(card AS BLOB), CAST(health AS BLOB), seen FROM cards"
        for row, id, written, health, seen in self._ledger.read(cards, (), tuple):
            try:
                known = Known(card(orjson.loads(written), "the card"), _health.validate_json(health), seen)
                if known.card.id != id.decode():
                    raise ValueError("its id is another's")
                self._cards[known.card.id] = known
            except (WireError, ValueError) as error:
                odd.append(f"the card {id!r:.80}: {_first_line(error)}")
                self._ledger.execute("DELETE FROM cards WHERE rowid = ?", (row,))
        allocations = (
            "SELECT number, CAST(resource AS BLOB), CAST(devices AS BLOB), CAST(claim AS BLOB), given, "
            "CAST(injection AS BLOB) FROM allocations ORDER BY number"
        )
        for number, resource, devices, of, given, injection in self._ledger.read(allocations, (), tuple):
            try:
                ids, claim = _ids.validate_json(devices), of.decode()
                if not ids or len(set(ids)) < len(ids) or any((id, claim) in self._number_of for id in ids):
                    raise ValueError("its devices are none, or those of another")
                given_so = _injection.validate_json(injection)
                self._add(number, Allocation(resource.decode(), ids, claim, given, given_so))
            except ValueError as error:
                odd.append(f"the allocation {number}: {_first_line(error)}")
                self._ledger.execute("DELETE FROM allocations WHERE number = ?", (number,))
        if odd:
            _log.warning(
                "%d entries of the ledger's devices make no sense and were dropped; what is in use is learnt from the "
                "kubelet again. The first is %s", len(odd), odd[0],
            )  # fmt: skip


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
    return str(error)
