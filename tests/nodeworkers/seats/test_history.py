"""What happened at a group: told as planning counts it."""

from __future__ import annotations

import pytest

from nodeworkers.seats.history import GroupHistory
from nodeworkers.seats.proxy_words import State, Traffic
from nodeworkers.seats.records import Known
from planning.seats.group import DEFAULT_PARK, DEFAULT_WAKE, Phase, SeatView
from planning.seats.pod_settings import PodSettings

NOTHING, WITH_PORT = Known(), PodSettings(port=8000)
A, B = "kyb-G01-s1", "kyb-G01-s2"


def traffic(
    seat: str, held: int = 0, oldest: float | None = None, in_flight: int = 0, ended: float | None = None
) -> Traffic:
    return Traffic(seat, 1, State.HELD if held else State.OPEN, False, held, oldest, in_flight, ended, 0)


def seen(
    history: GroupHistory, seat: str, phase: Phase, now: float, since: float = 0.0, asked: float | None = None,
    known: Known = NOTHING, settings: PodSettings = WITH_PORT,
) -> SeatView:  # fmt: skip
    return history.view(seat, phase, since, asked, settings, known, now)


def test_a_switch_counts_from_the_end_of_the_drain_until_the_next_seat_serves() -> None:
    history = GroupHistory(100.0, 0.0)
    history.opened(A, 10.0)
    history.closed(A, 30.0)
    history.drained(A, 35.0)
    assert history.lost(37.0) == pytest.approx(2.0)
    history.opened(B, 40.0)
    assert history.lost(41.0) == pytest.approx(5.0)
    assert history.lost(137.0) == pytest.approx(3.0)  # the window moves on


def test_time_in_the_slot_counts_until_it_is_closed_and_is_forgotten_with_the_window() -> None:
    history = GroupHistory(100.0, 0.0)
    history.opened(A, 10.0)
    history.opened(A, 12.0)  # said again: nothing new
    view = seen(history, A, Phase.ACTIVE, 40.0)
    assert (view.used, view.resident) == (30.0, 30.0)
    history.closed(A, 60.0)
    history.closed(A, 70.0)
    assert seen(history, A, Phase.PARKED, 80.0, since=65.0).used == 50.0
    assert seen(history, A, Phase.PARKED, 80.0, since=65.0).resident == 15.0
    assert seen(history, A, Phase.PARKED, 140.0).used == 20.0


def test_whoever_waits_does_so_since_the_first_request_that_was_not_served() -> None:
    history = GroupHistory(100.0, 0.0)
    assert history.heard(traffic(B, held=1, oldest=2.0), 50.0)
    assert not history.heard(traffic(B, held=3, oldest=9.0), 57.0)
    assert history.heard(traffic(B), 60.0)  # they were refused: and yet somebody waits since then
    assert history.heard(traffic(B, held=1, oldest=0.0), 70.0)
    view = seen(history, B, Phase.PARKED, 70.0)
    assert (view.held, view.oldest) == (1, 22.0)
    history.opened(B, 75.0)
    history.closed(B, 80.0)
    assert seen(history, B, Phase.PARKED, 85.0).oldest == 5.0


def test_a_container_that_wants_to_start_waits_since_it_does() -> None:
    history = GroupHistory(100.0, 0.0)
    assert seen(history, B, Phase.WAITING, 50.0, asked=44.0).oldest == 6.0
    history.heard(traffic(B, held=1, oldest=10.0), 50.0)
    assert seen(history, B, Phase.WAITING, 50.0, asked=44.0).oldest == 10.0


def test_how_long_a_seat_is_asked_is_a_mean_and_a_cut_ends_none() -> None:
    history = GroupHistory(100.0, 0.0)
    history.opened(A, 0.0)
    assert history.heard(traffic(A, in_flight=1), 10.0)
    assert not history.heard(traffic(A, in_flight=5), 12.0)
    assert seen(history, A, Phase.ACTIVE, 12.0).idle == 0.0
    assert history.heard(traffic(A, ended=0.0), 20.0)
    view = seen(history, A, Phase.ACTIVE, 20.0)
    assert (view.running, view.idle, view.busy) == (0, 0.0, 10.0)
    assert seen(history, A, Phase.ACTIVE, 20.5).idle == 0.5, "also while nothing is heard of it"
    history.heard(traffic(A, in_flight=1), 21.0)
    history.drained(A, 51.0)
    assert (seen(history, A, Phase.DRAINING, 51.0).busy or 0.0) > 10.0


def test_what_was_told_is_held_against_what_it_took() -> None:
    history = GroupHistory(100.0, 0.0)
    history.heard(traffic(B, held=1, oldest=0.0), 10.0)
    history.told(B, 5.0, 10.0)
    history.told(B, 500.0, 11.0)  # to those who came later
    history.opened(B, 30.0)
    assert seen(history, B, Phase.ACTIVE, 30.0).late > 1.0


def test_measured_times_count_and_usual_ones_where_there_are_none() -> None:
    history = GroupHistory(100.0, 0.0)
    view = seen(history, A, Phase.PARKED, 1.0)
    assert (view.park, view.wake) == (DEFAULT_PARK, DEFAULT_WAKE)
    known = Known(park=2.0, wake=1.0, start=60.0, drain=3.0, parkable=False, why_not="it cannot")
    view = seen(history, A, Phase.PARKED, 1.0, known=known)
    assert (view.park, view.wake, view.drain, view.parkable, view.why_not) == (2.0, 1.0, 3.0, False, "it cannot")
    assert seen(history, A, Phase.LOST, 1.0, known=known).wake == 60.0
    assert seen(history, A, Phase.PARKED, 1.0, settings=PodSettings()).batch


def test_a_server_that_is_gone_is_not_in_the_slot() -> None:
    history = GroupHistory(100.0, 0.0)
    history.opened(A, 0.0)
    history.heard(traffic(A, in_flight=1), 1.0)
    history.ended(A, 5.0)
    history.forgotten(A)
    view = seen(history, A, Phase.WAITING, 9.0, asked=8.0)
    assert (view.used, view.running, view.busy) == (5.0, 0, None)


def test_a_seat_is_as_busy_as_requests_for_it_wait_or_are_in_flight() -> None:
    history = GroupHistory(60.0, 1000.0)
    assert history.busy(A, 1001.0) == 0.0
    history.heard(traffic(A, held=1, oldest=0.0), 1010.0)
    history.heard(traffic(A, in_flight=1), 1013.0)
    assert history.busy(A, 1016.0) == pytest.approx(6 / 16)
    history.heard(traffic(A), 1022.0)
    assert history.busy(A, 1030.0) == pytest.approx(12 / 30)
    assert history.busy(A, 1062.0) == pytest.approx(12 / 60)
    assert history.busy(A, 1100.0) == 0.0
    history.heard(traffic(B, held=1, oldest=0.0), 1100.0, starts=True)
    assert history.busy(B, 1130.0) == 0.0, "its container has yet to start"
    history.heard(traffic(B, held=1, oldest=9.0), 1130.0)
    assert history.busy(B, 1145.0) == pytest.approx(15 / 60)
