"""Containers with seats start one after the other, and whoever is sent away is known to wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeworkers.ledger import Ledger
from nodeworkers.seats import gate as gate_module
from nodeworkers.seats.gate import Gate
from nodeworkers.seats.slots import Slot, Slots
from planning.devices.offers import Refused

A, B = "kyb-G01-s1", "kyb-G01-s2"


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    ledger = Ledger(tmp_path / "berth")
    yield Slots(ledger)
    ledger.close()


def grant(slots: Slots, seat: str, heir: str = "") -> None:
    slots.put(Slot("G01", "Starting", seat, heir), slots.enter("G01", "run"), 1.0)


def test_who_has_the_slot_starts_at_once_and_again_and_again(slots: Slots) -> None:
    poked = list[str]()
    gate = Gate(slots, poked.append, 0.0)
    grant(slots, A)
    for _ in range(3):
        gate.start("G01", A)
    assert poked == [] and gate.waiting("G01") == {}


def test_who_has_not_is_told_who_has_and_waits(slots: Slots) -> None:
    poked = list[str]()
    gate = Gate(slots, poked.append, 0.0)
    with pytest.raises(Refused, match=f"{A} waits for the slot of G01: nobody has it yet"):
        gate.start("G01", A)
    grant(slots, B, "kyb-G01-s3")
    with pytest.raises(Refused, match=f"{B} has it, and kyb-G01-s3 is to have it next"):
        gate.start("G01", A)
    assert poked == ["G01", "G01"] and list(gate.waiting("G01")) == [A] and gate.waiting("G23") == {}
    first = gate.waiting("G01")[A]
    with pytest.raises(Refused):
        gate.start("G01", A)
    assert gate.waiting("G01")[A].since == first.since, "its place in the queue is its own"
    grant(slots, A)
    gate.start("G01", A)
    assert gate.waiting("G01") == {}


def test_why_a_group_is_left_alone_is_told(slots: Slots) -> None:
    slots.put(Slot("G01", "Quarantined", reason="process 4711 holds GPU 0."), slots.enter("G01", "run"), 1.0)
    with pytest.raises(Refused, match="left alone for now: process 4711"):
        Gate(slots, lambda group: None, 0.0).start("G01", A)


def test_a_slot_that_comes_in_a_moment_is_waited_for(slots: Slots) -> None:
    def granted_soon(group: str) -> None:
        threading.Timer(0.05, grant, (slots, A)).start()

    Gate(slots, granted_soon, 30.0).start("G01", A)


def test_who_does_not_come_back_is_not_waited_for_for_ever(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(slots, lambda group: None, 0.0)
    with pytest.raises(Refused):
        gate.start("G01", A)
    monkeypatch.setattr(gate_module, "FORGOTTEN", -1.0)
    assert gate.waiting("G01") == {}
