"""What whoever waits is told: exact where all is known, and nothing where nobody can say it."""

from __future__ import annotations

from math import exp

import pytest

from planning.seats.choosing import choose
from planning.seats.group import Phase
from tests.planning.seats.groups import PARK, SWITCH, WAKE, active, group, seat, waited

R = 9 * SWITCH
PAUSE = SWITCH / 10


def test_an_empty_slot_takes_a_wake_each_and_what_the_others_stay() -> None:
    view = group(waited(1, 9, busy=0.0), waited(2, 5, busy=0.0), waited(3, 1))
    stay = PAUSE * (1 - exp(-R / PAUSE))
    told = choose(view, 0).waits
    assert told["kyb-G01-s1"] == WAKE
    assert told["kyb-G01-s2"] == pytest.approx(WAKE + stay + SWITCH)
    assert told["kyb-G01-s3"] == pytest.approx(WAKE + 2 * (stay + SWITCH))


def test_one_that_is_asked_is_waited_for_up_to_its_residency() -> None:
    assert choose(group(active(1, resident=R - 30, busy=1e9, drain=4.0), waited(2, 5)), 0).waits == {
        "kyb-G01-s2": pytest.approx(30 + 4 + SWITCH)
    }
    assert choose(group(active(1, resident=R, drain=4.0), waited(2, 5)), 0).waits == {"kyb-G01-s2": 4 + SWITCH}
    assert choose(group(active(1, resident=R, running=0, idle=9), waited(2, 5)), 0).waits == {"kyb-G01-s2": SWITCH}


def test_nothing_known_counts_as_a_residency() -> None:
    (told,) = choose(group(active(1, resident=0), waited(2, 0)), 0).waits.values()
    mean = R + PAUSE
    assert told == pytest.approx(mean * (1 - exp(-R / mean)) + SWITCH)


@pytest.mark.parametrize(
    ("phase", "since", "left"),
    [
        (Phase.DRAINING, 1.0, 3.0 + PARK + WAKE),
        (Phase.PARKING, 4.0, PARK - 4 + WAKE),
        (Phase.PARKING, 99.0, WAKE),
    ],
)
def test_a_switch_that_is_under_way_is_waited_for(phase: Phase, since: float, left: float) -> None:
    view = group(seat(1, phase, resident=since, drain=4.0), waited(2, 1), target="kyb-G01-s2")
    assert choose(view, 0).waits == {"kyb-G01-s2": left}
    unknown = group(seat(1, phase, resident=since, drain=4.0), waited(2, 1))
    assert choose(unknown, 0).waits == {"kyb-G01-s2": left}


@pytest.mark.parametrize("phase", [Phase.WAKING, Phase.STARTING])
def test_who_comes_is_told_the_rest_and_the_next_ones_wait_for_it(phase: Phase) -> None:
    view = group(seat(1, phase, resident=2.0, held=3, busy=1e9), waited(2, 1))
    told = choose(view, 0).waits
    assert told["kyb-G01-s1"] == WAKE - 2
    assert told["kyb-G01-s2"] == pytest.approx(WAKE - 2 + R + SWITCH, rel=1e-3)


def test_seats_for_which_nobody_waits_are_not_told() -> None:
    assert choose(group(seat(1), seat(2, Phase.LOST), active(3, resident=5)), 0).waits == {}
    assert choose(group(seat(1, Phase.PARKING, resident=1.0), seat(2)), 0).waits == {}


def test_the_stays_of_others_are_corrected_and_switches_are_not() -> None:
    view = group(active(1, resident=R - 30, busy=1e9, drain=4.0), waited(2, 5, late=3.0))
    assert choose(view, 0).waits == {"kyb-G01-s2": pytest.approx(3 * 30 + 4 + SWITCH)}
