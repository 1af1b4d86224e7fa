"""The node's record of its seats, in the ledger: the port of each on the seat proxy, and what was measured of whoever
holds it.

Ports outlive the process and the pods, for Services lead there. What was measured is one pod's: another one's server is
another one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from nodeworkers.ledger import Ledger, LedgerError
from planning.seats.parking import TRIES, Way

PORTS = range(23_000, 24_000)  # below those that Kubernetes and the kernel give away (30000 and 32768 on)
_NEWER = 0.2  # how much the newest of measured times counts
_log = logging.getLogger(__name__)


class NoPortError(Exception):
    """All ports for seats are in use. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one pod's server. park, wake, drain, start: seconds that these took, a mean of the last ones,
    None before the first; cards: bytes that it had on each GPU when it was parked last, and processes whose these were,
    as pid and start; parkable: None while it was never parked, and with False `why_not`; lost: its state is gone, and
    it has not served since. way: by which it is parked, None while none was tried; tries: in a row that this failed,
    while it never succeeded; failed: ways that did not do, and why; kept: bytes that the host holds while it is parked,
    None where that is what it had on its GPUs; ended: it was ended to be parked, and has not served
    since. passed_on: where its requests go instead of to its server, as it moves to another seat; '' to its server.
    """

    park: float | None = None
    wake: float | None = None
    drain: float | None = None
    start: float | None = None
    cards: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[tuple[int, int], ...] = ()
    parkable: bool | None = None
    why_not: str = ""
    lost: bool = False
    way: Way | None = None
    tries: int = 0
    failed: Mapping[Way, str] = field(default_factory=dict)
    kept: int | None = None
    ended: bool = False
    passed_on: str = ""

    @property
    def host_bytes(self) -> int:
        """What the host holds of it while it is parked, as far as is known."""
        return self.bytes if self.kept is None else self.kept

    @property
    def bytes(self) -> int:
        """What parking it moves to the host, as far as is known."""
        return sum(self.cards.values())

    def took(self, what: str, seconds: float) -> Known:
        """With one more measured time, of `park`, `wake`, `drain` or `start`."""
        before: float | None = getattr(self, what)
        mean = seconds if before is None else before + _NEWER * (seconds - before)
        return replace(self, **{what: round(mean, 4)})  # type: ignore[arg-type]

    def tried(self, way: Way | None, why: str) -> Known:
        """After a park that was not done. The first is a trial: until one succeeds nobody counts on another, and a way
        that fails TRIES times is left for the next. `way`: None where nothing of it was to blame.
        """
        if self.parkable is not None:
            return self
        if way is None:
            return replace(self, why_not=why)
        if self.tries + 1 < TRIES:
            return replace(self, why_not=why, tries=self.tries + 1)
        return replace(self, why_not=why, way=None, tries=0, failed={**self.failed, way: why})


_known: TypeAdapter[Known] = TypeAdapter(Known)


@dataclass(frozen=True, slots=True)
class SeatRecord:
    """A seat. `holder`: the UID of the pod that `known` is about, '' for nobody."""

    seat: str
    port: int
    holder: str = ""
    known: Known = field(default_factory=Known)


class SeatRecords:
    """The seats' part of an open ledger, for one thread. What cannot be written is logged and kept in memory: all of it
    can be measured again.
    """

    def __init__(self, ledger: Ledger, ports: Collection[int] = PORTS) -> None:
        """Reads all of it; a row that makes no sense loses what was measured."""
        self._ledger, self._ports = ledger, ports
        self._records: dict[str, SeatRecord] = {}
        read = "SELECT id, port, holder, CAST(known AS BLOB) FROM seats"
        for seat, port, holder, known in ledger.read(read, (), tuple):
            self._records[seat] = SeatRecord(seat, port, holder, _read(known))

    def of(self, seat: str) -> SeatRecord:
        """A seat's, with a port of its own. Raises NoPortError."""
        found = self._records.get(seat)
        if found is None:
            taken = {each.port for each in self._records.values()}
            port = next((each for each in self._ports if each not in taken), None)
            if port is None:
                raise NoPortError(f"There is no port left for {seat}: seats have {len(self._ports)} on a node.")
            found = self._records[seat] = SeatRecord(seat, port)
            self._write(found)
        return found

    def held_by(self, seat: str, pod: str) -> SeatRecord:
        """The same for the pod with this UID: if another had the seat before, nothing is known of its server. '': of a
        pod that is not known yet, for which what was known goes on to count.
        """
        found = self.of(seat)
        if pod in (found.holder, ""):
            return found
        return self._put(SeatRecord(seat, found.port, pod))

    def put(self, seat: str, known: Known) -> None:
        """What is known now of the pod that holds the seat."""
        found = self.of(seat)
        if found.known != known:
            self._put(replace(found, known=known))

    def keep(self, seats: Collection[str]) -> None:
        """Those, and no others: the node has no other seats any more."""
        for seat in self._records.keys() - set(seats):
            del self._records[seat]
            self._do("DELETE FROM seats WHERE id = ?", (seat,))

    def _put(self, record: SeatRecord) -> SeatRecord:
        self._records[record.seat] = record
        self._write(record)
        return record

    def _write(self, record: SeatRecord) -> None:
        values = (record.seat, record.port, record.holder, orjson.dumps(asdict(record.known)).decode())
        self._do("INSERT OR REPLACE INTO seats (id, port, holder, known) VALUES (?, ?, ?, ?)", values)

    def _do(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            with self._ledger.transaction():
                self._ledger.execute(statement, values)
        except LedgerError as error:
            _log.warning("what is known of the seat %s is not on record: %s", values[0], error)


def _read(raw: bytes) -> Known:
    try:
        told = orjson.loads(raw)
        names = {each.name for each in fields(Known)}
        return _known.validate_python({key: value for key, value in told.items() if key in names})
    except (ValueError, AttributeError, ValidationError):
        return Known()
