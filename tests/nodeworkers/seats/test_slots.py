"""The slot of a group: one run of its workflow writes, whatever arrives late, and it outlives the process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.ledger import Ledger, LedgerError
from nodeworkers.seats.slots import Slot, Slots, SupersededError

SEAT = "kyb-G01-s1"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "berth")
    yield made
    made.close()


def test_what_is_written_is_there_after_a_restart(ledger: Ledger) -> None:
    slots = Slots(ledger)
    epoch = slots.enter("G01", "run-1")
    slots.put(Slot("G01", "Active", SEAT, reason="it was asked for", switches=7), epoch, 100.0)
    again = Slots(ledger)
    assert again.slot("G01") == Slot("G01", "Active", SEAT, "", "it was asked for", 100.0, 7)
    assert again.enter("G01", "run-1") == epoch, "the same run goes on"


def test_a_run_that_another_followed_writes_nothing(ledger: Ledger) -> None:
    slots = Slots(ledger)
    old = slots.enter("G01", "run-1")
    new = slots.enter("G01", "run-2")
    assert new == old + 1
    for attempt in (
        lambda: slots.put(Slot("G01", "Active", SEAT), old, 1.0),
        lambda: slots.check("G01", old),
        lambda: slots.forget("G01", old),
        lambda: slots.enter("G01", "run-1"),
    ):
        with pytest.raises(SupersededError, match="G01"):
            attempt()
    assert Slots(ledger).slot("G01") == Slot("G01")
    with pytest.raises(SupersededError):
        Slots(ledger).enter("G01", "run-1")


def test_groups_have_epochs_of_their_own(ledger: Ledger) -> None:
    slots = Slots(ledger)
    first, second = slots.enter("G01", "a"), slots.enter("G23", "b")
    slots.enter("G23", "c")
    slots.check("G01", first)
    with pytest.raises(SupersededError):
        slots.check("G23", second)


@pytest.mark.parametrize(
    ("phase", "may"),
    [
        ("Empty", False), ("Starting", True), ("Active", True), ("Draining", False), ("Parking", False),
        ("VerifyFree", False), ("Restoring", False), ("VerifyServing", False), ("Quarantined", False),
    ],
)  # fmt: skip
def test_a_container_starts_only_with_the_slot(ledger: Ledger, phase: str, may: bool) -> None:
    slots = Slots(ledger)
    slots.put(Slot("G01", phase, SEAT, "kyb-G01-s2"), slots.enter("G01", "r"), 1.0)  # type: ignore[arg-type]
    assert slots.may_start("G01", SEAT) is may
    assert not slots.may_start("G01", "kyb-G01-s2") and not slots.may_start("G23", SEAT)


def test_a_phase_lasts_from_its_beginning(ledger: Ledger) -> None:
    slots = Slots(ledger)
    epoch = slots.enter("G01", "r")
    slots.put(Slot("G01", "Active", SEAT), epoch, 5.0)
    assert slots.put(Slot("G01", "Active", SEAT, reason="asked again"), epoch, 9.0).since == 5.0
    assert slots.put(Slot("G01", "Draining", SEAT), epoch, 12.0).since == 12.0


def test_a_ledger_that_was_lost_is_followed_by_newer_epochs(tmp_path: Path, ledger: Ledger) -> None:
    slots = Slots(ledger)
    last = [slots.enter("G01", run) for run in ("a", "b", "c")][-1]
    anew = Ledger(tmp_path / "anew")
    try:
        assert Slots(anew).enter("G01", "d") > last
    finally:
        anew.close()


def test_a_group_that_comes_back_goes_on_with_its_epochs(ledger: Ledger) -> None:
    slots = Slots(ledger)
    epoch = slots.enter("G01", "r")
    slots.put(Slot("G01", "Active", SEAT, switches=3), epoch, 1.0)
    slots.forget("G01", epoch)
    assert slots.slot("G01") == Slot("G01", switches=3)
    assert Slots(ledger).enter("G01", "s") == epoch + 1


def test_what_makes_no_sense_counts_as_an_empty_slot(ledger: Ledger) -> None:
    slots = Slots(ledger)
    epoch = slots.enter("G01", "r")
    slots.put(Slot("G01", "Active", SEAT), epoch, 1.0)
    ledger.execute("UPDATE seat_groups SET phase = 'Dreaming', runs = '7'", ())
    again = Slots(ledger)
    assert again.slot("G01") == Slot("G01")
    assert again.enter("G01", "r") == epoch + 1, "nobody's epoch is given twice"


def test_what_cannot_be_written_did_not_happen(ledger: Ledger) -> None:
    slots = Slots(ledger)
    epoch = slots.enter("G01", "r")
    before = slots.put(Slot("G01", "Active", SEAT), epoch, 1.0)
    ledger.execute("CREATE TRIGGER no BEFORE INSERT ON seat_groups BEGIN SELECT RAISE(ABORT, 'no'); END", ())
    with pytest.raises(LedgerError):
        slots.put(replace(before, phase="Draining"), epoch, 2.0)
    with pytest.raises(LedgerError):
        slots.enter("G01", "s")
    assert slots.slot("G01") == before
    slots.check("G01", epoch)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["r1", "r2", "r3"]), st.booleans()), max_size=40))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_arrives_in_which_order_only_the_newest_run_writes(
    ledger: Ledger, arrivals: list[tuple[str, str, bool]]
) -> None:
    ledger.execute("DELETE FROM seat_groups", ())
    slots, newest, epochs = Slots(ledger), dict[str, str](), dict[tuple[str, str], int]()
    for group, run, restarted in arrivals:
        if restarted:
            slots = Slots(ledger)
        try:
            epoch = slots.enter(group, run)
        except SupersededError:
            assert (group, run) in epochs and newest[group] != run
            continue
        if (group, run) not in epochs:
            assert all(epoch > old for (other, _), old in epochs.items() if other == group)
            newest[group] = run
        assert newest[group] == run and epochs.setdefault((group, run), epoch) == epoch
        for (other, old), stale in epochs.items():
            if other == group and old != run:
                with pytest.raises(SupersededError):
                    slots.put(Slot(group, "Active", SEAT), stale, 1.0)
        slots.put(Slot(group, "Active", run), epoch, 1.0)
        assert slots.slot(group).seat == run
