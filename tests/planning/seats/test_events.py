"""What people are told of seats: each thing that happened once, on whom it concerns, and not too often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.seats.events import MOST_SERIES, OFTEN, QUIET, Pace, Told, news
from planning.seats.status import GroupPicture, Outcome, SeatPicture, SwitchPicture

A, B = "kyb-G01-s1", "kyb-G01-s2"
LLAMA = SeatPicture(A, "Active", ("team", "llama-0", "server"), uid="u1", parkable=True)
QWEN = SeatPicture(B, "Parked", ("team", "qwen-0", "server"), uid="u2", parkable=True)
BEFORE = GroupPicture("G01", "Active", A, since=100.0, seats=[LLAMA, QWEN])
ON_LLAMA, ON_QWEN = ("team", "llama-0", "u1"), ("team", "qwen-0", "u2")


def switch(outcome: Outcome = "Switched", reason: str = "it waited longest") -> SwitchPicture:
    return SwitchPicture(200.0, A, B, reason, {"drain": 0.1, "park": 1.5, "park: copy": 1.4, "wake": 2.0}, outcome)


def reasons(told: list[Told]) -> list[tuple[str, object]]:
    return [(event.reason, event.pod) for event in told]


def test_nothing_new_is_no_news() -> None:
    assert news(BEFORE, BEFORE) == []
    assert news(BEFORE, replace(BEFORE, message="another", switches=4, refused=7)) == []


def test_a_switch_is_told_to_the_node_and_to_both_pods() -> None:
    seats = [replace(LLAMA, phase="Parked"), replace(QWEN, phase="Active")]
    told = news(BEFORE, replace(BEFORE, active=B, seats=seats, last=switch()))
    assert reasons(told) == [("SeatSwitched", None), ("SeatActive", ON_QWEN), ("SeatParked", ON_LLAMA)]
    assert told[0].note == (
        f"Group G01 switched to {B} in 3.6 s (drain 0.1 s, park 1.5 s, wake 2 s): it waited longest"
    )
    assert told[2].note == f"{A} is parked, for {B} has the slot; a request wakes it."
    assert {event.type for event in told} == {"Normal"}
    again = replace(BEFORE, last=switch())
    assert news(again, again) == []


def test_a_park_that_was_refused_is_told_with_its_reason() -> None:
    told = news(BEFORE, replace(BEFORE, last=switch("Kept", f"{A} was not parked: 40 GiB do not fit")))
    assert reasons(told) == [("SeatNotParked", None), ("SeatNotParked", ON_LLAMA)]
    assert all(event.type == "Warning" and "40 GiB do not fit" in event.note for event in told)


def test_a_switch_in_vain_is_told_to_whom_it_was_for() -> None:
    told = news(BEFORE, replace(BEFORE, phase="Empty", active="", last=switch("Failed", f"{B} did not come to serve")))
    assert reasons(told) == [("SeatSwitchFailed", None), ("SeatSwitchFailed", ON_QWEN)]


def test_quarantine_and_its_end() -> None:
    ill = replace(BEFORE, phase="Quarantined", active="", message="process 7 holds 3 GiB of GPU 0", since=300.0)
    (event,) = news(BEFORE, replace(ill, last=switch("Quarantined")))
    assert (event.reason, event.type) == ("SeatGroupQuarantined", "Warning")
    assert event.note.endswith("nobody gets its slot: process 7 holds 3 GiB of GPU 0")
    assert news(ill, ill) == []
    (event,) = news(ill, replace(BEFORE, since=540.0))
    assert event.note == f"Group G01 is at work again after 4 min: {A} has its slot."


def test_a_loss_and_the_cold_start_after_it() -> None:
    lost = replace(QWEN, phase="Lost", lost=True, error="its process ended while it was parked")
    there = replace(BEFORE, seats=[LLAMA, lost])
    (event,) = news(BEFORE, there)
    assert (event.reason, event.pod) == ("SeatLost", ON_QWEN)
    assert event.note.endswith("starts cold when it gets the slot: its process ended while it was parked")
    starting = replace(there, seats=[LLAMA, replace(lost, phase="Starting")])
    assert news(there, starting) == []
    (event,) = news(starting, replace(there, seats=[LLAMA, replace(QWEN, phase="Active")]))
    assert (event.reason, event.pod) == ("SeatStartedCold", ON_QWEN)


def test_a_trial_that_failed_is_told_once_and_not_as_another_refusal() -> None:
    new = replace(LLAMA, parkable=None)
    before = replace(BEFORE, seats=[new, QWEN])
    failed = replace(before, seats=[replace(new, error="it uses managed memory"), QWEN], last=switch("Kept", "so"))
    assert reasons(news(before, failed)) == [("TrialParkFailed", ON_LLAMA), ("SeatNotParked", None)]
    assert news(failed, failed) == []


def test_of_a_pod_that_has_just_got_the_seat_nothing_of_the_one_before_is_told() -> None:
    lost = replace(QWEN, phase="Lost", lost=True, error="gone")
    before = replace(BEFORE, seats=[LLAMA, lost])
    assert news(before, replace(BEFORE, seats=[LLAMA, replace(QWEN, phase="Active", uid="u3")])) == []
    assert news(before, replace(BEFORE, seats=[LLAMA, SeatPicture(B, "Absent")])) == []


def event(pod: tuple[str, str, str] | None = None, note: str = "so", reason: str = "SeatNotParked") -> Told:
    return Told("Warning", reason, "ParkSeat", note, pod)


def test_the_first_is_told_at_once_and_what_follows_together() -> None:
    pace = Pace()
    assert pace.at([event(note="1")], 0.0) == [event(note="1")]
    for second in range(1, 40):
        assert pace.at([event(note=str(second))], float(second)) == []
    assert pace.at([event(ON_QWEN)], 40.0) == [event(ON_QWEN)], "another pod's is another one"
    (told,) = pace.at([], QUIET)
    assert told.note == "39 times in 60 s, the last: 39"
    assert pace.at([], QUIET + 1) == [] and pace.at([], 3 * QUIET) == []
    assert pace.at([event()], 3 * QUIET + 1) == [event()], "after quiet times the next is told at once"


@pytest.mark.parametrize("every", [1.0, 3.0, 20.0])
def test_a_busy_group_tells_of_its_switches_rarely_and_of_all_of_them(every: float) -> None:
    pace, counted, written, now = Pace(), 0, 0, 0.0
    while now < 3600.0:
        for told in pace.at([Told("Normal", "SeatSwitched", "SwitchSeats", "x")], now):
            counted += int(told.note.split(" times")[0]) if " times" in told.note else 1
            written += 1
        now += every
    assert written <= 3600 / OFTEN + 1 and counted >= 3600 / every - OFTEN / every - 1


@given(st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 100)), max_size=60))
def test_what_is_remembered_is_bounded(steps: list[tuple[int, float]]) -> None:
    pace, now = Pace(), 0.0
    for count, passed in steps:
        now += passed
        pace.at([event(("n", str(i), "u")) for i in range(count)], now)
        assert len(pace._series) <= MOST_SERIES


TEXT = st.text(max_size=60)
SEATS = st.builds(
    SeatPicture, st.sampled_from([A, B]), st.sampled_from(["Absent", "Active", "Parked", "Lost"]),
    st.none() | st.just(("team", "x", "c")), error=TEXT, lost=st.booleans(), uid=st.sampled_from(["", "u"]),
    parkable=st.none() | st.booleans(),
)  # fmt: skip
GROUPS = st.builds(
    GroupPicture, st.just("G01"), st.sampled_from(["Empty", "Active", "Quarantined"]),
    st.sampled_from(["", A, B]), TEXT,
    st.floats(-1e9, 1e12), seats=st.lists(SEATS, max_size=4),
    last=st.none() | st.builds(
        SwitchPicture, st.floats(0, 1e9), st.sampled_from(["", A, B]), st.sampled_from(["", A, B]), TEXT,
        st.dictionaries(TEXT, st.floats(allow_nan=True), max_size=4),
        st.sampled_from(["Switched", "Kept", "Failed", "Quarantined"]),
    ),
)  # fmt: skip


@given(GROUPS, GROUPS)
def test_whatever_happened_can_be_told(before: GroupPicture, now: GroupPicture) -> None:
    for told in news(before, now):
        assert told.note and told.reason and (told.pod is None or all(told.pod))
    assert news(now, now) == []
