"""Residency, pause, patience and the bound that follows: as the field notes have them, and what is kept of measures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.seats.recent import Asked, Late, Recent, Share
from planning.seats.residency import LEAST_SWITCH, bound, patience, pause, residency, switching, turn
from tests.planning.seats.groups import seat


def test_a_switch_of_twenty_seconds_is_worth_three_minutes() -> None:
    """Field notes, section 7: for S = 20 s and a loss of 10 % residency must be at least 180 s."""
    assert residency(20, 0.1) == pytest.approx(180)
    assert pause(20, 0.1) == pytest.approx(2)


@given(st.floats(1e-3, 1e4), st.floats(0.01, 0.9))
def test_the_share_lost_is_what_was_asked_for(switch: float, lost: float) -> None:
    stay = residency(switch, lost)
    assert switch / (switch + stay) == pytest.approx(lost)


def test_no_switch_is_for_nothing() -> None:
    assert switching(seat(1, park=0.0), seat(2, wake=0.0)) == LEAST_SWITCH
    assert switching(None, seat(2, wake=3.0)) == 3.0


def test_the_bound_grows_with_the_others_turns_and_with_patience() -> None:
    seats = [seat(1, drain=5.0), seat(2), seat(3)]
    assert turn(seats, 0.1) == pytest.approx(3 * (20 + LEAST_SWITCH) / 0.1 + 5)
    assert patience(seats, 0.1) == pytest.approx(10 * turn(seats, 0.1))
    assert bound(seats, 0.1, False) == pytest.approx(14 + 5 + 6 + turn(seats, 0.1))
    assert bound(seats, 0.1, True) == pytest.approx(bound(seats, 0.1, False) + patience(seats, 0.1))
    assert bound([], 0.1, True) == 0


def test_time_within_a_window() -> None:
    recent = Recent(100)
    assert recent.within(50) == 0
    recent.add(0, 30)
    recent.add(60, 70)
    assert recent.within(70) == 40
    assert recent.within(120) == 20, "of the first, ten seconds are left"
    assert recent.within(130) == 10
    assert recent.within(165) == 5
    assert recent.within(170) == recent.within(1e9) == 0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=20), st.floats(1, 200))
def test_a_window_counts_what_a_sum_over_all_would(gaps: list[tuple[float, float]], window: float) -> None:
    recent, stretches, now = Recent(window), list[tuple[float, float]](), 0.0
    for pause_, length in gaps:
        stretches.append((now + pause_, now + pause_ + length))
        now += pause_ + length
        recent.add(*stretches[-1])
        expected = sum(max(0.0, end - max(begin, now - window)) for begin, end in stretches)
        assert recent.within(now) == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 90)), max_size=40), st.floats(1, 300))
def test_a_share_is_what_a_window_counts_to_a_sixtieth_and_stays_small(
    gaps: list[tuple[float, float]], window: float
) -> None:
    share, exact, now = Share(window), Recent(window), 0.0
    for gap, length in gaps:
        share.add(now + gap, now + gap + length)
        exact.add(now + gap, now + gap + length)
        now += gap + length
        assert abs(share.within(now) - exact.within(now)) <= 2 * window / 60 + 1e-6
    assert len(share._parts) <= 61


def test_an_end_that_a_switch_made_is_no_end() -> None:
    asked = Asked()
    assert asked.mean is None
    for _ in range(200):
        asked.ended(10, cut=True)
        asked.ended(10, cut=False)
    assert asked.mean == pytest.approx(20, rel=0.1)
    for _ in range(200):
        asked.ended(10, cut=True)
    assert asked.mean is None


def test_what_was_told_too_short_is_told_longer_until_it_is_true() -> None:
    late = Late()
    for _ in range(600):
        late.served(told=20 + 10 * late.factor, took=80)
    assert late.factor == pytest.approx(6, rel=0.01)
    for _ in range(600):
        late.served(told=20 + 10 * late.factor, took=20)
    assert 0 < late.factor <= 0.2
    late.served(0, 0)
