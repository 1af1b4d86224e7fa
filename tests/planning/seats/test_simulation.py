"""What is promised of any sequence of requests, held against groups that are played: nobody starves, nothing thrashes,
each request ends once, and what is said of waits is true in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.seats import rules
from planning.seats.group import Hours, Policy, SeatView
from planning.seats.residency import bound, patience, switching
from planning.seats.simulation import Outcome, Proxy, Request, simulate
from tests.planning.seats.groups import SWITCH, WAKE, seat

FOUR = tuple(seat(number, priority=4 - number, weight=float(number)) for number in range(1, 5))
R = 9 * SWITCH
LONGEST = 20.0  # seconds that a request takes, below


def every(outcome: Outcome) -> list[float]:
    return [wait for waits in outcome.waits for wait in waits]


def drawn(seed: int, count: int, rate: float, seconds: float = 8.0) -> list[Request]:
    """Requests that come each by itself, for four seats of which each is asked for less than the one before."""
    chance, at, found = Random(seed), 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate)
        number = chance.choices(range(4), (12, 6, 4, 3))[0]
        found.append((at, number, chance.expovariate(1 / seconds)))
    return found


def test_the_first_wakes_its_seat_and_those_that_come_meanwhile_wait_for_the_rest() -> None:
    outcome = simulate(FOUR, [(10, 0, 5), (13, 0, 5), (17, 0, 1)], Policy())
    assert outcome.waits[0] == [WAKE, WAKE - 3, 0]
    assert (outcome.switches, outcome.lost, outcome.seconds) == (1, WAKE, 21)
    assert outcome.used == 5, "both at the same time, and the third meanwhile"


def test_another_comes_after_a_pause_or_after_a_residency() -> None:
    idle = simulate(FOUR, [(0, 0, 10), (100, 1, 5)], Policy())
    assert idle.waits[1] == [SWITCH]
    busy = simulate(FOUR, [(float(at), 0, 1.5) for at in range(1000)] + [(1000.5, 0, 1)], Policy())
    assert busy.switches == 1
    both = sorted([(float(at), 0, 1.5) for at in range(1000)] + [(50.0, 1, 5.0)])
    outcome = simulate(FOUR, both, Policy())
    came = WAKE
    assert outcome.waits[1] == [pytest.approx(came + R - 50 + SWITCH, abs=1.5)], "a residency, and what runs ends"
    assert outcome.taken == SWITCH


def test_a_request_is_refused_after_its_deadline_and_where_the_queue_is_full() -> None:
    asked = [(float(at), 0, 1.5) for at in range(300)]
    come = sorted([*asked, (20.0, 1, 1.0), (21.0, 1, 1.0), (22.0, 1, 1.0)])
    assert simulate(FOUR, come, Policy(), Proxy(deadline=60)).refused == [0, 3, 0, 0]
    assert simulate(FOUR, come, Policy(), Proxy(queue=2)).refused[1] == 1


def test_a_schedule_is_followed() -> None:
    policy = Policy("schedule", hours=(Hours(("m2",), (3,), 60, 120),))
    outcome = simulate(FOUR, [(0, 0, 10), (3700, 1, 10)], policy)
    assert outcome.waits == [[WAKE], [0], [], []], "its hours began a hundred seconds ago"


def test_a_batch_seat_has_the_slot_while_nobody_else_asks() -> None:
    seats = (*FOUR[:2], seat(3, batch=True))
    outcome = simulate(seats, [(500, 0, 5), (2000, 0, 5)], Policy())
    assert outcome.waits[0] == [SWITCH, SWITCH], "it had its residency"
    assert outcome.used / outcome.seconds > 0.9


@st.composite
def groups(draw: st.DrawFn) -> tuple[tuple[SeatView, ...], Policy, list[Request]]:
    count = draw(st.integers(2, 4))
    seats = tuple(
        seat(
            number,
            park=draw(st.sampled_from([0.5, 7.0, 30.0])),
            wake=draw(st.sampled_from([0.5, 4.0, 60.0])),
            priority=draw(st.integers(0, 2)),
            weight=draw(st.sampled_from([0.1, 1.0, 2.0, 30.0])),
            batch=draw(st.integers(0, 5)) == 0,
        )
        for number in range(count)
    )
    rule = draw(st.sampled_from(rules.installed()))
    hours = (Hours(("m0", "m1"), (3, 4), 30, 600),) if rule == "schedule" else ()
    policy = Policy(rule, draw(st.sampled_from([0.05, 0.1, 0.3])), draw(st.sampled_from([60.0, 600.0, 3600.0])), hours)
    # With a batch seat the slot changes hands all the time, so that a long time takes long to play.
    batch = any(each.batch for each in seats)
    gaps = st.one_of(st.floats(0, 3), st.floats(0, 20), st.floats(0, 20 if batch else 900))
    one = st.tuples(gaps, st.integers(0, count - 1), st.floats(0, LONGEST))
    shape = draw(st.lists(one, min_size=1, max_size=20)) * draw(st.integers(1, 15))
    times = accumulate(gap for gap, _, _ in shape)
    return seats, policy, [(at, number, seconds) for at, (_, number, seconds) in zip(times, shape, strict=False)]


def long_drains(seats: Sequence[SeatView]) -> list[SeatView]:
    return [replace(each, drain=LONGEST) for each in seats]


@given(groups())
@settings(max_examples=40, deadline=None)
def test_nobody_starves(drawn: tuple[tuple[SeatView, ...], Policy, list[Request]]) -> None:
    """Whoever waits has the slot within the bound, whatever is asked for and whatever the rule."""
    seats, policy, requests = drawn
    rule = rules.rule_of(policy.rule)
    assert rule is not None
    waits = every(simulate(seats, requests, policy))
    assert len(waits) == len(requests), "and each is answered once"
    assert max(waits) <= bound(long_drains(seats), policy.lost, rule.patient) + 0.1


@given(groups())
@settings(max_examples=40, deadline=None)
def test_nothing_thrashes(drawn: tuple[tuple[SeatView, ...], Policy, list[Request]]) -> None:
    """Over any time T, switches take L * T from seats that are asked, but for the window's credit, and half of T at
    most from those that are not.
    """
    seats, policy, requests = drawn
    outcome = simulate(seats, requests, policy)
    one = max(switching(leaves, comes) for leaves in seats for comes in seats)
    credit = policy.lost * policy.window + one
    assert outcome.taken <= policy.lost * outcome.seconds + credit + 0.01
    assert outcome.lost <= outcome.seconds / 2 + credit + 0.01


def endless(*asked: tuple[int, float, float], until: float = 20_000) -> list[Request]:
    """Requests for seats, each every so many seconds and so long."""
    return sorted(
        (every * n + 0.1 * number, number, long) for number, every, long in asked for n in range(int(until / every))
    )


FAST = tuple(seat(number, park=0.5, wake=0.5, priority=number) for number in range(3))


def test_who_comes_last_by_rank_has_the_slot_once_others_were_put_before_it_for_long_enough() -> None:
    come = endless((2, 1, 1.5), (1, 1, 1.5))
    outcome = simulate(FAST, sorted([*come, (50.0, 0, 1.0)]), Policy("priority"))
    (wait,) = outcome.waits[0]
    patient = patience(FAST, 0.1)
    assert 0.9 * patient < wait <= bound([replace(each, drain=1.5) for each in FAST], 0.1, True)
    assert max(outcome.waits[1]) <= bound([replace(each, drain=1.5) for each in FAST], 0.1, True)


@pytest.mark.parametrize("rule", ["onDemand", "fair"])
def test_seats_that_are_all_asked_have_the_slot_in_turn(rule: str) -> None:
    outcome = simulate(FAST, endless((0, 1, 1.5), (1, 1, 1.5), (2, 1, 1.5), until=3000), Policy(rule))
    begins = [each.seat for each in outcome.stays][:60]
    assert all(sorted(begins[at : at + 3]) == [0, 1, 2] for at in range(0, 60, 3))
    shares = [sum(each.end - each.begin for each in outcome.stays if each.seat == number) for number in range(3)]
    assert max(shares) < 1.1 * min(shares)


def test_slices_are_as_weights_say() -> None:
    weighted = [replace(each, weight=weight) for each, weight in zip(FAST, (1.0, 2.0, 4.0), strict=True)]
    outcome = simulate(weighted, endless((0, 1, 1.5), (1, 1, 1.5), (2, 1, 1.5), until=6000), Policy("fair"))
    shares = [sum(each.end - each.begin for each in outcome.stays if each.seat == number) for number in range(3)]
    assert shares[1] / shares[0] == pytest.approx(2, rel=0.15) and shares[2] / shares[0] == pytest.approx(4, rel=0.15)


def test_requests_that_alternate_do_not_make_a_group_switch_for_more_than_half_of_the_time() -> None:
    policy = Policy(window=600)
    outcome = simulate(FOUR, endless((0, 20, 0.1), (1, 20, 0.1)), policy)
    assert 0.4 * outcome.seconds < outcome.lost <= outcome.seconds / 2 + 60 + SWITCH


def test_a_high_priority_that_comes_again_and_again_takes_its_share_from_lower_ones_and_no_more() -> None:
    policy = Policy("priority", window=600)
    seats = (seat(0, batch=True), seat(1, priority=5))
    outcome = simulate(seats, endless((1, 45, 1.0)), policy)
    assert 0.05 * outcome.seconds < outcome.taken <= 0.1 * (outcome.seconds + 600) + SWITCH
    calm = simulate(seats, endless((1, 900, 1.0)), policy)
    assert max(calm.waits[1][1:]) <= 2 * SWITCH + 1, "where it comes seldom it waits for no residency"


@given(groups(), st.sampled_from([1.0, 30.0, 300.0]), st.sampled_from([1, 3, 1000]))
@settings(max_examples=30, deadline=None)
def test_each_request_is_answered_or_refused_once(
    drawn: tuple[tuple[SeatView, ...], Policy, list[Request]], deadline: float, queue: int
) -> None:
    seats, policy, requests = drawn
    outcome = simulate(seats, requests, policy, Proxy(deadline, queue))
    for number in range(len(seats)):
        come = sum(each == number for _, each, _ in requests)
        assert len(outcome.waits[number]) + outcome.refused[number] == come
    assert all(0 <= wait <= deadline for wait in every(outcome))
    assert all(one.end <= other.begin for one, other in zip(outcome.stays, outcome.stays[1:], strict=False))
    assert outcome.used <= outcome.seconds + 1e-6
    assert all(told >= 0 and took >= 0 for told, took in outcome.told)


@pytest.mark.parametrize(
    ("rule", "rate", "least", "most"),
    [
        ("onDemand", 0.03, 0.9, 1.1),
        ("onDemand", 0.1, 0.9, 1.1),
        ("onDemand", 0.3, 0.85, 1.15),
        ("priority", 0.03, 0.9, 1.1),
        ("fair", 0.03, 0.9, 1.1),
        # By rank those who come later are put before who was told, and how many do is in no plan: where the slot is
        # always asked for, it takes longer than was told.
        ("priority", 0.1, 0.4, 1.1),
        ("fair", 0.1, 0.7, 1.1),
    ],
)
def test_what_is_told_of_waits_is_true_in_the_mean(rule: str, rate: float, least: float, most: float) -> None:
    told = simulate(FOUR, drawn(1, 4000, rate), Policy(rule)).told
    assert len(told) > 80
    said, took = (sum(each) / len(told) for each in zip(*told, strict=True))
    assert least <= said / took <= most


def test_the_same_requests_end_the_same_way() -> None:
    assert simulate(FOUR, drawn(1, 500, 0.1), Policy("fair")) == simulate(FOUR, drawn(1, 500, 0.1), Policy("fair"))
