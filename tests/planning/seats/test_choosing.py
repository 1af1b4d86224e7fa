"""Who is to have the slot: each case that a person would name, and what must hold of any group whatever its numbers."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.seats import rules
from planning.seats.choosing import choose
from planning.seats.group import IN_SLOT, READY, Choice, GroupView, Hours, Phase, Policy, SeatView
from planning.seats.host_memory import Level, NodeMemory
from tests.planning.seats.groups import SWITCH, active, group, later, seat, waited

R = 9 * SWITCH  # S * (1 - L) / L for L of a tenth


def said(view: GroupView, now: float = 0.0) -> Choice:
    return choose(view, now)


def test_nobody_waits_nobody_is_parked() -> None:
    choice = said(group(active(1, resident=5000, running=0, idle=4000), seat(2), seat(3, Phase.LOST)))
    assert choice == Choice("", "kyb-G01-s1 keeps the slot: nobody waits for a seat.")
    assert said(group(seat(1), seat(2))).reason == "The slot stays empty: nobody waits for a seat."


def test_an_empty_slot_goes_to_who_waited_longest() -> None:
    choice = said(group(waited(1, 3), waited(2, 9, held=4), waited(3, 1)))
    assert choice.seat == "kyb-G01-s2" and choice.within is None
    assert choice.reason == "kyb-G01-s2 gets the slot, which is empty: 4 requests wait, the first for 9 s."


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.LOST, Phase.PARKED])
def test_containers_that_want_to_start_need_the_slot_and_lost_seats_when_they_are_asked(phase: Phase) -> None:
    assert said(group(seat(1, phase, oldest=4))).seat == ("kyb-G01-s1" if phase is Phase.WAITING else "")
    assert said(group(seat(1, phase, held=1))).seat == "kyb-G01-s1"


def test_one_that_is_asked_keeps_the_slot_for_a_residency() -> None:
    view = group(active(1, resident=60), waited(2, 5))
    choice = said(view)
    assert choice.seat == "" and choice.within == pytest.approx(R - 60)
    assert choice.reason == (
        "kyb-G01-s1 keeps the slot for another 2 min or until nobody asks for it: it has had it for 60 s, and a switch "
        "of 20 s is worth 3 min. Next is kyb-G01-s2: a request waits for 5 s."
    )
    then = said(later(view, R - 60))
    assert then.seat == "kyb-G01-s2" and "worth a switch of 20 s" in then.reason


def test_one_that_nobody_asks_for_leaves_after_a_pause() -> None:
    """The pause is a tenth of a switch; with its share spent, it has had the slot for as long as a switch before."""
    assert said(group(active(1, resident=30, running=0, idle=1.9), waited(2, 0))).within == pytest.approx(0.1)
    choice = said(group(active(1, resident=30, running=0, idle=2), waited(2, 0)))
    assert choice.seat == "kyb-G01-s2" and "nobody has asked for kyb-G01-s1 for 2 s" in choice.reason
    spent = group(active(1, resident=12, running=0, idle=12), waited(2, 0), lost=350)
    assert said(spent).seat == "" and said(spent).within == pytest.approx(8)
    assert "taken their share of the time lately" in said(spent).reason
    assert said(later(spent, 8)).seat == "kyb-G01-s2"
    assert said(replace(spent, lost=300.0)).seat == "kyb-G01-s2"


def test_a_batch_seat_always_wants_and_is_never_idle() -> None:
    assert said(group(seat(1, batch=True), seat(2))).seat == "kyb-G01-s1"
    resting = active(1, resident=50, running=0, idle=50, batch=True)
    assert said(group(resting, waited(2, 5))).within == pytest.approx(R - 50)
    assert said(group(active(1, resident=R), seat(2, batch=True, oldest=R))).seat == "kyb-G01-s2"


@pytest.mark.parametrize("phase", sorted(IN_SLOT - {Phase.ACTIVE}))
def test_nothing_is_decided_while_a_switch_is_under_way(phase: Phase) -> None:
    choice = said(group(seat(1, phase), waited(2, 500)))
    assert choice.seat == "" and f"kyb-G01-s1 is {phase}: a switch is under way" in choice.reason


def test_two_in_the_slot_are_left_alone() -> None:
    choice = said(group(active(1, resident=9999), seat(2, Phase.WAKING), waited(3, 500), pinned="kyb-G01-s3"))
    assert choice.seat == "" and "kyb-G01-s1 and kyb-G01-s2 both have the slot" in choice.reason


def test_who_is_absent_or_in_quarantine_gets_nothing_and_is_promised_nothing() -> None:
    away = [seat(number, phase, held=3) for number, phase in ((1, Phase.ABSENT), (2, Phase.QUARANTINED))]
    choice = said(group(*away))
    assert choice.seat == "" and not choice.waits


def test_who_cannot_be_parked_keeps_the_slot_and_it_is_said_why() -> None:
    stuck = active(1, resident=9999, running=0, idle=999, parkable=False, why_not="it uses managed memory")
    choice = said(group(stuck, waited(2, 700), waited(3, 5)))
    assert choice.seat == "" and not choice.waits
    assert choice.reason == (
        "kyb-G01-s2 and kyb-G01-s3 wait, but kyb-G01-s1 cannot be parked: it uses managed memory."
    )  # fmt: skip


def test_memory_that_does_not_suffice_keeps_it_too() -> None:
    levels = (Level("container", 40 * 2**30, 3 * 2**30),)
    large = active(1, resident=9999, bytes=72 * 2**30, levels=levels)
    choice = said(group(large, waited(2, 700), memory=NodeMemory(available=512 * 2**30)))
    assert choice.seat == "" and "has 3 GiB in use and a limit of 40 GiB" in choice.reason
    assert choice.within == SWITCH, "for nobody tells when memory gets free"
    assert said(group(large, waited(2, 700))).seat == "kyb-G01-s2", "where nobody checks memory"


def test_a_pin_goes_above_all() -> None:
    view = group(active(1, resident=1), waited(2, 900), seat(3), pinned="kyb-G01-s3")
    choice = said(view)
    assert choice.seat == "kyb-G01-s3" and "it is pinned" in choice.reason
    assert "nobody else gets it: kyb-G01-s2 waits" in choice.reason and not choice.waits
    kept = said(group(seat(1), waited(2, 900), active(3, resident=9999, running=0, idle=999), pinned="kyb-G01-s3"))
    assert kept.seat == "" and kept.within is None and "is pinned" in kept.reason and not kept.waits
    asked = replace(view, seats=(*view.seats[:2], waited(3, 2)))
    assert said(asked).waits == {"kyb-G01-s3": SWITCH}
    assert said(group(seat(1, Phase.PARKING), seat(3), pinned="kyb-G01-s3")).seat == ""
    stuck = active(1, resident=1, parkable=False, why_not="MIG is on")
    assert "kyb-G01-s1 cannot be parked: MIG is on" in said(group(stuck, seat(3), pinned="kyb-G01-s3")).reason


@pytest.mark.parametrize(
    ("pinned", "told"),
    [("kyb-G01-s2", "is pinned, but is Quarantined."), ("kyb-G99-s1", "is pinned, but is no seat of this group.")],
)
def test_a_pin_of_one_that_cannot_have_it_is_told_and_does_not_stop_the_others(pinned: str, told: str) -> None:
    choice = said(group(waited(1, 3), seat(2, Phase.QUARANTINED), pinned=pinned))
    assert choice.seat == "kyb-G01-s1" and told in choice.reason


def test_an_unknown_rule_changes_nothing() -> None:
    choice = said(group(waited(1, 3), rule="fastest"))
    assert choice.seat == "" and choice.reason.startswith(
        "There is no rule 'fastest', so all stays as it is; there are"
    )


EVENING = Policy("schedule", hours=(Hours(("m3",), (0,), 20 * 60, 22 * 60),))
MONDAY = 4 * 86_400.0  # the first since the epoch


def test_a_schedule_wakes_its_seat_for_its_hours_where_nobody_uses_the_slot() -> None:
    begin = MONDAY + 20 * 3600
    idle = group(active(1, resident=9999, running=0, idle=R), seat(3), policy=EVENING)
    assert choose(idle, begin - 7).seat == ""
    assert choose(idle, begin - 7).within == pytest.approx(1), "so that it serves when they begin"
    assert choose(idle, begin - 6).seat == "kyb-G01-s3" and "for its hours" in choose(idle, begin - 6).reason
    empty = group(seat(1), seat(3), policy=EVENING)
    assert choose(empty, begin).seat == "kyb-G01-s3"
    assert choose(empty, begin - 3600).seat == "" and choose(empty, begin + 7200).seat == ""
    used = group(active(1, resident=9999), seat(3), policy=EVENING)
    assert choose(used, begin).seat == ""
    recent = group(active(1, resident=9999, running=0, idle=R - 5), seat(3), policy=EVENING)
    assert choose(recent, begin).seat == "" and choose(recent, begin).within == pytest.approx(5)


def test_in_its_hours_a_seat_comes_first_and_is_kept() -> None:
    during = MONDAY + 21 * 3600
    view = group(waited(1, 500), waited(3, 1), policy=EVENING)
    assert choose(view, during).seat == "kyb-G01-s3"
    assert choose(view, during + 7200).seat == "kyb-G01-s1"
    assert choose(group(active(3, resident=2 * R), waited(1, 500), policy=EVENING), during).seat == ""
    assert choose(replace(view, utc_offset=7200.0), during).seat == "kyb-G01-s1", "it is 23:00 there"
    hurried = group(active(1, resident=SWITCH), waited(3, 1), policy=EVENING)
    assert choose(hurried, during).seat == "kyb-G01-s3"


numbers = st.one_of(st.floats(), st.floats(0, 1000), st.sampled_from([0.0, -1.0, nan, inf, -inf, 1e300]))
small = st.one_of(st.integers(-2, 5), st.just(10**12))


@st.composite
def seats(draw: st.DrawFn) -> SeatView:
    named = ("oldest", "idle", "resident", "used", "park", "wake", "drain", "weight", "late")
    times: dict[str, Any] = {key: draw(numbers) for key in named}
    return SeatView(
        draw(st.sampled_from(["a", "b", "c", "d"])),
        draw(st.sampled_from(sorted(Phase))),
        name=draw(st.sampled_from(["m1", "m2"])),
        held=draw(small),
        running=draw(small),
        priority=draw(small),
        batch=draw(st.booleans()),
        busy=draw(st.none() | numbers),
        parkable=draw(st.booleans()),
        bytes=draw(small),
        **times,
    )


hours = st.builds(
    Hours,
    st.just(("m1",)),
    st.sets(st.integers(0, 6), min_size=1).map(tuple),
    st.integers(0, 1439),
    st.integers(0, 1439),
)
policies = st.builds(
    Policy,
    st.sampled_from([*rules.installed(), "", "x" * 999]),
    numbers,
    numbers,
    st.lists(hours, max_size=2).map(tuple),
)
memories = st.none() | st.builds(NodeMemory, small, small, small, st.none() | small, small)
views = st.builds(
    GroupView,
    st.lists(seats(), max_size=5).map(tuple),
    policies,
    numbers,
    pinned=st.sampled_from(["", "a", "z"]),
    target=st.sampled_from(["", "a", "z"]),
    memory=memories,
    utc_offset=numbers,
)


@given(views, numbers)
def test_no_numbers_make_it_crash_or_choose_who_cannot_have_it(view: GroupView, now: float) -> None:
    choice = choose(view, now)
    assert choice == choose(view, now)
    assert choice.reason.endswith(".") and len(choice.reason) < 2000
    assert choice.within is None or 0.001 <= choice.within < inf
    assert all(isfinite(wait) and wait >= 0 for wait in choice.waits.values())
    last = {each.seat: each for each in view.seats}
    if choice.seat:
        assert last[choice.seat].phase in READY
        holders = [each for each in last.values() if each.phase in IN_SLOT]
        assert all(each.phase is Phase.ACTIVE and each.parkable for each in holders) and len(holders) <= 1


@st.composite
def plausible(draw: st.DrawFn) -> GroupView:
    """A group as it could be, one of its seats in the slot."""
    count = draw(st.integers(2, 4))
    sane = st.floats(0, 4000)

    def some(number: int) -> SeatView:
        known: dict[str, Any] = {
            "park": draw(st.floats(0, 60)),
            "wake": draw(st.floats(0, 60)),
            "priority": draw(st.integers(0, 2)),
            "weight": draw(st.floats(0.1, 10)),
            "used": draw(st.floats(0, 3600)),
        }
        if number:
            return seat(number, held=draw(st.integers(0, 1)), oldest=draw(sane), **known)
        resident = draw(sane)
        idle = draw(st.floats(0, resident))
        return active(0, resident=resident, running=draw(st.integers(0, 1)), idle=idle, **known)

    rule = draw(st.sampled_from(rules.installed()))
    policy = Policy(rule, hours=(Hours(("m1",), (0,), 600, 660),) if rule == "schedule" else ())
    return group(*map(some, range(count)), policy=policy, lost=draw(st.floats(0, 1000)))


@given(plausible(), st.floats(0, 0.999))
def test_before_it_says_to_look_again_nothing_would_have_been_done(view: GroupView, share: float) -> None:
    now = MONDAY + 9.7 * 3600
    choice = choose(view, now)
    if not choice.seat:
        wait = 4000.0 if choice.within is None else share * choice.within
        assert choose(later(view, wait), now + wait).seat == "" or wait <= 0.002


@given(plausible())
def test_looking_when_it_says_so_ends_with_a_switch_if_anybody_waits(view: GroupView) -> None:
    now, waiting = MONDAY, any(each.wants for each in view.seats)
    for _ in range(200):
        choice = choose(view, now)
        if choice.seat or choice.within is None:
            break
        view, now = later(view, choice.within), now + choice.within
    assert bool(choice.seat) or not waiting
