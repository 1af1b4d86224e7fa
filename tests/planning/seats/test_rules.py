"""The rules: who comes before whom, for how long one keeps the slot from another, and the hours of a schedule."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.gpuseatprofile import SeatPolicy
from planning.seats import rules
from planning.seats.choosing import choose
from planning.seats.group import Hours, Policy, policy_of
from planning.seats.residency import patience
from planning.seats.rules.schedule import during
from tests.planning.seats.groups import SWITCH, active, group, later, seat, waited

R = 9 * SWITCH


def test_the_rules_are_those_that_a_profile_may_name() -> None:
    field = SeatPolicy.model_fields["type"]
    assert set(get_args(field.annotation)) == set(rules.installed())
    assert field.default == Policy().rule == rules.installed()[0]
    assert policy_of(None) == policy_of(SeatPolicy()) == Policy()


def test_a_profiles_policy_in_full() -> None:
    spec = SeatPolicy.model_validate(
        {
            "type": "schedule",
            "lostPercent": 5,
            "windowSeconds": 600,
            "timeZone": "Europe/Berlin",
            "schedule": [
                {"seats": ["chat"], "start": "08:30", "end": "18:00"},
                {"seats": ["b"], "days": ["Sat", "Sun"], "start": "00:00", "end": "00:00"},
            ],
        }
    )
    hours = (Hours(("chat",), (0, 1, 2, 3, 4, 5, 6), 510, 1080), Hours(("b",), (5, 6), 0, 0))
    assert policy_of(spec) == Policy("schedule", 0.05, 600.0, hours)


def test_a_higher_priority_is_next_and_keeps_the_slot_while_it_is_asked() -> None:
    assert choose(group(waited(1, 90), waited(2, 1, priority=3), rule="priority"), 0).seat == "kyb-G01-s2"
    busy = group(active(2, resident=5 * R, priority=3), waited(1, 90), rule="priority")
    assert choose(busy, 0).seat == "" and "it comes before those who wait" in choose(busy, 0).reason
    assert choose(group(active(2, resident=R, priority=3), waited(1, 1, priority=3), rule="priority"), 0).seat


def test_a_higher_priority_does_not_wait_for_a_whole_residency_unless_that_was_done_too_often() -> None:
    view = group(active(1, resident=SWITCH - 3), waited(2, 1, priority=3), rule="priority")
    assert choose(view, 0).seat == "" and choose(view, 0).within == pytest.approx(3)
    assert choose(later(view, 3), 0).seat == "kyb-G01-s2"
    spent = group(active(1, resident=SWITCH), waited(2, 1, priority=3), rule="priority", lost=341)
    assert choose(spent, 0).within == pytest.approx(R - SWITCH)


def test_patience_comes_before_priority() -> None:
    seats = (active(2, resident=5 * R, priority=3), waited(1, 0))
    long = patience(seats, 0.1)
    assert choose(group(seats[0], waited(1, long - 9), rule="priority"), 0).within == pytest.approx(9)
    assert choose(group(seats[0], waited(1, long), rule="priority"), 0).seat == "kyb-G01-s1"
    third = (*seats[:1], waited(3, 0, priority=2), waited(1, 0))
    nearly = patience(third, 0.1) - 9
    assert choose(group(*third[:2], waited(1, nearly), rule="priority"), 0).within == pytest.approx(9)
    both = group(waited(1, long), waited(2, 5, priority=3), rule="priority")
    assert choose(both, 0).seat == "kyb-G01-s1"


def test_fair_slices_go_by_what_was_used_and_last_by_weight() -> None:
    view = group(waited(1, 90, used=600), waited(2, 1, used=1000, weight=2.0), rule="fair")
    assert choose(view, 0).seat == "kyb-G01-s2"
    heavy = group(active(1, resident=0, weight=3.0), waited(2, 1), rule="fair")
    assert choose(heavy, 0).within == pytest.approx(3 * R)
    assert choose(later(heavy, 3 * R), 0).seat == "kyb-G01-s2"
    light = group(active(1, resident=0), waited(2, 1, weight=3.0), rule="fair")
    assert choose(light, 0).within == pytest.approx(R)
    lightest = group(active(1, resident=0, weight=1e6), waited(2, 1), rule="fair")
    assert choose(lightest, 0).within == pytest.approx(10 * R), "no more than others are patient for"


MONDAY = 4 * 86_400.0


@pytest.mark.parametrize(
    ("start", "end", "days", "inside", "outside"),
    [
        (8 * 60, 18 * 60, (0,), [8.0, 17.99], [7.99, 18.0, 24 + 9]),
        (22 * 60, 6 * 60, (0,), [22.0, 24 + 5.99], [5.0, 24 + 6, 24 + 22]),
        (0, 0, (0,), [0.0, 23.99], [24.0, -0.01]),
        (22 * 60, 6 * 60, (6,), [5.0, 7 * 24 - 1], [6.0, 22.0]),
    ],
)
def test_hours(start: int, end: int, days: tuple[int, ...], inside: list[float], outside: list[float]) -> None:
    of = Hours(("m1",), days, start, end)
    assert [during(of, MONDAY + hour * 3600) for hour in inside] == [True] * len(inside)
    assert [during(of, MONDAY + hour * 3600) for hour in outside] == [False] * len(outside)


@given(
    st.floats(-1e9, 4e9),
    st.sets(st.integers(0, 6), min_size=1),
    st.integers(0, 1439),
    st.integers(0, 1439),
    st.floats(0, 0.999),
)
def test_a_schedule_says_when_ranks_change(now: float, days: set[int], start: int, end: int, share: float) -> None:
    of = Hours(("m1",), tuple(days), start, end)
    schedule = rules.rule_of("schedule")
    assert schedule is not None
    moment = rules.Moment(now, Policy("schedule", hours=(of,)))
    change = schedule.next_change((seat(1),), moment)
    assert change is not None and 0 < change <= 3600
    before = min(share * change, change - 1e-3)
    if before > 0:
        assert during(of, now + before) == during(of, now)
