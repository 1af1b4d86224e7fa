"""Which seats should move: only where somebody waits for somebody else, only for a real gain, never to and fro."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planning.seats.rebalancing import (
    CROWDED,
    WORTH,
    GroupLoad,
    Mode,
    Proposal,
    SeatLoad,
    Standing,
    due,
    loads,
    moved,
    proposals,
)
from tests.planning.test_admission import json_values


def group(name: str, *seats: float, free: int = 1, mode: Mode | None = "Perform", node: str = "n") -> GroupLoad:
    held = tuple(
        SeatLoad(f"kyb-{name}-s{number}", "team", f"{name}-{number}", load) for number, load in enumerate(seats, 1)
    )
    return GroupLoad(node, name, "kyb.ai/gpu-2x-seat", mode, held, free, 3600.0)


def one(found: list[Proposal]) -> Proposal:
    (only,) = found
    return only


def test_the_designs_example_c_moves_to_the_group_that_is_asked_for_less() -> None:
    found = one(proposals([group("G01", 0.9, 0.9, 0.9), group("G23", 0.1, 0.0, 0.0)]))
    assert (found.seat.seat, found.source, found.target) == ("kyb-G01-s3", "G01", "G23")
    assert found.told == (
        "pod team/G01-3 should move from G01 to G23 on node n: G01 is asked for 270 % of what it can be awake and "
        "would be for 180 %, G23 for 10 % and would be for 100 %"
    )


def test_nobody_moves_where_nobody_waits_or_nothing_is_won() -> None:
    assert not proposals([group("G01", 0.5, 0.5), group("G23")])  # 100 %: they have room beside each other
    assert not proposals([group("G01", 0.6, 0.6), group("G23", 0.5, 0.6)])  # it would be as full there
    assert not proposals([group("G01", 1.0, 1.0), group("G23", free=0)])
    assert not proposals([group("G01", 1.0, 1.0), replace(group("G23"), well=False)])
    assert not proposals([group("G01", 1.0, 1.0), group("G23", node="n2")])  # never by itself to another node
    assert not proposals([group("G01", 1.0, 1.0), replace(group("G4"), resource="kyb.ai/gpu-1x-seat")])
    assert not proposals([group("G01", 1.0, 1.0, mode=None), group("G23", mode=None)])
    assert one(proposals([group("G01", 1.0, 1.0), group("G23")], [("team", "G01-2")])).seat.pod == "G01-1"
    assert not proposals([group("G01", 1.0, 1.0), group("G23")], [("team", "G01-1"), ("team", "G01-2")])


GROUPS = st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=4).map(
    lambda found: [group(f"G{number}", *seats, free=4) for number, seats in enumerate(found)]
)


def applied(groups: list[GroupLoad], move: Proposal) -> list[GroupLoad]:
    after = []
    for each in groups:
        if each.group == move.source:
            each = replace(each, seats=tuple(seat for seat in each.seats if seat != move.seat))
        elif each.group == move.target:
            each = replace(each, seats=(*each.seats, move.seat))
        after.append(each)
    return after


@given(GROUPS)
def test_each_move_is_worth_it_and_they_come_to_an_end(groups: list[GroupLoad]) -> None:
    for _ in range(40):
        found = proposals(groups)
        if not found:
            return
        move = one(found)
        by_name = {each.group: each for each in groups}
        assert move.before == (by_name[move.source].load, by_name[move.target].load)
        assert move.before[0] > CROWDED and max(move.after) <= move.before[0] - WORTH + 1e-6
        groups = applied(groups, move)
    raise AssertionError("they move for ever")


def test_a_proposal_is_acted_on_once_it_has_stood_and_then_its_node_rests() -> None:
    found = proposals([group("G01", 0.9, 0.9), group("G23")])
    ripe, standing = due(found, Standing(), 1000.0)
    assert not ripe
    ripe, standing = due(found, standing, 1299.0)
    assert not ripe
    ripe, passing = due([], standing, 1299.5)
    assert not due(found, passing, 1301.0)[0], "it had passed meanwhile"
    ripe, standing = due(found, standing, 1301.0)
    assert ripe == found
    standing = moved(standing, ripe[0], 1301.0)
    for now in (1302.0, 2000.0, 3100.0):
        ripe, standing = due(found, standing, now)
        assert not ripe
    assert due(found, standing, 3102.0)[0] == found
    assert not due(found, standing, 3102.0)[1].rests


def test_which_seat_is_the_best_may_change_while_it_stands() -> None:
    _, standing = due(proposals([group("G01", 0.9, 0.8), group("G23")]), Standing(), 0.0)
    other = proposals([group("G01", 0.8, 0.9), group("G23")])
    assert due(other, standing, 301.0)[0] == other


def test_a_clock_that_goes_back_makes_nothing_older() -> None:
    found = proposals([group("G01", 0.9, 0.9), group("G23")])
    _, standing = due(found, Standing(), 10_000.0)
    ripe, standing = due(found, standing, 100.0)
    assert not ripe and list(standing.since.values()) == [100.0]


def test_what_a_node_says_becomes_loads() -> None:
    raw: dict[str, Any] = {
        "spec": {"nodeName": "n", "group": "G01"},
        "status": {
            "resource": "kyb.ai/gpu-2x-seat", "rebalance": "Propose", "windowSeconds": 600,
            "seats": [
                {"id": "s1", "busyPercent": 70, "heldBy": {"namespace": "team", "pod": "a"}},
                {"id": "s2", "heldBy": {"namespace": "team", "pod": "b"}}, {"id": "s3"},
            ],
        },
    }  # fmt: skip
    (found,) = loads([raw])
    assert found == GroupLoad(
        "n", "G01", "kyb.ai/gpu-2x-seat", "Propose",
        (SeatLoad("s1", "team", "a", 0.7), SeatLoad("s2", "team", "b", 0.0)), 1, 600.0,
    )  # fmt: skip
    assert loads([{"spec": raw["spec"]}]) == []
    raw["status"]["seats"][1]["phase"] = "Starting"
    assert not loads([raw])[0].well, "requests wait for it that will not wait later"


@given(st.lists(json_values), json_values)
def test_nothing_that_a_node_says_is_too_strange(seats: list[Any], told: Any) -> None:
    status = {"resource": "r", "rebalance": told, "windowSeconds": told, "seats": seats, "phase": told}
    assert proposals(loads([{"spec": told, "status": status}, {"spec": {}, "status": told}])) == []
