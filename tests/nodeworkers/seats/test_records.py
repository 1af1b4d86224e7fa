"""The node's record of seats: ports that last, and times that are one pod's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeworkers.ledger import Ledger, LedgerError
from nodeworkers.seats.records import Known, NoPortError, SeatRecords

SEATS = ("kyb-G01-s1", "kyb-G01-s2", "kyb-G23-s1")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path)
    yield made
    made.close()


def test_a_port_stays_a_seats_also_after_a_restart(ledger: Ledger) -> None:
    ports = {seat: SeatRecords(ledger).of(seat).port for seat in SEATS}
    assert len(set(ports.values())) == 3
    assert {seat: SeatRecords(ledger).of(seat).port for seat in reversed(SEATS)} == ports


def test_a_port_is_free_again_when_its_seat_is_gone(ledger: Ledger) -> None:
    records = SeatRecords(ledger, range(5, 7))
    assert [records.of(seat).port for seat in SEATS[:2]] == [5, 6]
    with pytest.raises(NoPortError, match="kyb-G23-s1: seats have 2"):
        records.of(SEATS[2])
    records.keep(SEATS[1:])
    assert SeatRecords(ledger, range(5, 7)).of(SEATS[2]).port == 5


def test_what_was_measured_outlives_the_process_but_not_the_pod(ledger: Ledger) -> None:
    records = SeatRecords(ledger)
    first = records.held_by(SEATS[0], "uid-a")
    records.put(SEATS[0], first.known.took("wake", 4.0).took("wake", 5.0))
    again = SeatRecords(ledger)
    assert again.held_by(SEATS[0], "uid-a").known == Known(wake=4.2)
    assert again.held_by(SEATS[0], "").known == Known(wake=4.2), "who holds it is not known yet after a restart"
    other = again.held_by(SEATS[0], "uid-b")
    assert (other.known, other.port) == (Known(), first.port)


def test_a_row_that_makes_no_sense_keeps_its_port(ledger: Ledger) -> None:
    port = SeatRecords(ledger).held_by(SEATS[0], "uid-a").port
    for told in ('{"wake": "soon"}', "[1]", "7", '{"wake": 3.5, "new": 1}'):
        with ledger.transaction():
            ledger.execute("UPDATE seats SET known = ?", (told,))
        found = SeatRecords(ledger).of(SEATS[0])
        assert found.port == port
        assert found.known == (Known(wake=3.5) if "3.5" in told else Known())


def test_a_ledger_that_cannot_be_written_stops_nobody(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    records = SeatRecords(ledger)
    before = records.of(SEATS[0])

    def full(*_: object) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(ledger, "execute", full)
    records.put(SEATS[0], Known(wake=1.0))
    assert records.of(SEATS[0]).known.wake == 1.0
    assert records.of(SEATS[1]).port != before.port
    assert "kyb-G01-s2 is not on record" in caplog.text
