"""Which nodes are kept for a GPUReservation, and how long the choice stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.model import Ledger
from tests.planning.builders import (
    NOW,
    node,
    reservation,
    taint,
)
from tests.planning.test_reservations import FREE, HOUR, chosen, cluster, holder, later, named


def test_it_packs_into_as_few_nodes_as_possible_and_breaks_up_the_smallest() -> None:
    there = cluster(node("a", 8), node("b", 4), node("c", 8), keeps=[reservation("r", gpus=11, start=HOUR, end=9999)])
    there.settle()
    assert chosen(there) == {"a": 8, "b": 3}


def test_blocks_lie_on_one_node_each() -> None:
    four = reservation("r", gpus=8, gpusPerNode=4, start=HOUR, end=9999)
    there = cluster(node("a", 7), node("b", 3), node("c", 6), keeps=[four])
    there.settle()
    assert chosen(there) == {"a": 4, "c": 4}


def test_what_is_held_by_work_that_may_not_be_stopped_is_passed_over() -> None:
    there = cluster(node("a", 8), node("b", 8), node("c", 8), keeps=[])
    there.add(*(named(f"f{n}", 1, nodeSelector={"kubernetes.io/hostname": n}) for n in "a"))
    there.add(*(named(f"p{n}", 8, nodeSelector={"kubernetes.io/hostname": n}, **FREE) for n in "b"))
    there.settle()
    there.reservations.append(reservation("r", gpus=8, start=HOUR, end=9999))
    there.settle()
    assert chosen(there) == {"c": 8}, "there nobody has to be stopped"
    there.reservations[0] = reservation("r", gpus=16, start=HOUR, end=9999)
    there.settle()
    assert chosen(there) == {"c": 8, "b": 8}, "there only work that can be stopped"


def test_work_that_ends_before_it_begins_is_no_hindrance() -> None:
    there = cluster(node("a", 8), keeps=[])
    there.add(named("short", 8, activeDeadlineSeconds=600))
    there.settle()
    there.reservations.append(reservation("r", gpus=8, start=HOUR, end=9999))
    there.settle()
    assert chosen(there) == {"a": 8}


@pytest.mark.parametrize(
    "wrong",
    [
        {"unschedulable": True},
        {"ready": False},
        {"labels": {}},
        {"taints": (taint("node.kubernetes.io/out-of-service", "NoExecute"),)},
    ],
)
def test_nodes_that_cannot_be_used_are_not_chosen(wrong: dict[str, Any]) -> None:
    h100 = {"gpu": "h100"}
    keeps = reservation("r", gpus=2, start=HOUR, end=9999, nodeSelector=h100)
    there = cluster(node("a", 8, **{"labels": h100, **wrong}), node("z", 2, labels=h100), keeps=[keeps])
    there.settle()
    assert chosen(there) == {"z": 2}


def test_tainted_nodes_come_last() -> None:
    there = cluster(
        node("a", 8, taints=(taint("dedicated"),)),
        node("b", 4, taints=(taint("nvidia.com/gpu"),)),
        keeps=[reservation("r", gpus=5, start=HOUR, end=9999)],
    )
    there.settle()
    assert chosen(there) == {"b": 4, "a": 1}


def test_the_choice_stays_until_its_node_goes() -> None:
    there = cluster(node("b", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=9999)])
    there.settle()
    there.nodes.append(node("a", 8))
    assert there.round().reserved is None and chosen(there) == {"b": 8}, "nothing to write down anew"
    there.nodes[0] = replace(there.nodes[0], ready=False)
    there.settle()
    assert chosen(there) == {"b": 8}, "it may come back in time"
    there.nodes[0] = replace(there.nodes[0], unschedulable=True)
    there.settle()
    assert chosen(there) == {"a": 8}
    there.nodes.pop()
    there.settle()
    assert chosen(there) == {}


def test_what_cannot_be_had_now_is_kept_where_it_comes_free() -> None:
    there = cluster(node("a", 8), node("b", 8), keeps=[])
    there.add(*(named(f"w{i}", 2) for i in range(8)))
    there.settle()
    there.reservations.append(reservation("r", gpus=8, gpusPerNode=8, start=HOUR, end=2 * HOUR))
    there.settle()
    (place,) = chosen(there)
    there.add(*(named(f"late{i}", 2) for i in range(8)))
    for uid in [uid for uid, where in there.running.items() if where == place]:
        there.runs[uid] = 0.0
        there.tick(1)
        there.settle()
        assert all(where != place for uid, where in there.running.items() if uid.startswith("late")), "it drains"
    assert chosen(there) == {place: 8}


def test_without_its_ledger_it_is_chosen_anew_around_what_runs() -> None:
    there = cluster(node("a", 8), node("b", 8), keeps=[reservation("r", gpus=8, start=100, end=9999)])
    there.settle()
    there.nodes[0] = replace(there.nodes[0], unschedulable=True)
    there.settle()
    there.nodes[0] = replace(there.nodes[0], unschedulable=False)
    there.add(holder("h", 4))
    later(there, 101)
    assert there.running == {"h": "b"} and chosen(there) == {"b": 8}
    there.ledger = Ledger(turns=there.ledger.turns)
    there.settle()
    assert chosen(there) == {"b": 8}


def test_two_never_get_the_same_gpus_unless_one_after_the_other() -> None:
    day = reservation("day", gpus=6, start=HOUR, end=2 * HOUR)
    both = reservation("both", gpus=6, start=HOUR, end=3 * HOUR, created=NOW + 1)
    night = reservation("night", gpus=6, start=2 * HOUR, end=3 * HOUR, created=NOW + 2)
    there = cluster(node("a", 8), keeps=[day, both, night])
    there.settle()
    assert (chosen(there, "day"), chosen(there, "both"), chosen(there, "night")) == ({"a": 6}, {"a": 2}, {"a": 6})


def test_more_nodes_than_a_history_takes_are_not_kept() -> None:
    there = cluster(*(node(f"n{i}", 1) for i in range(2100)), keeps=[reservation("r", gpus=2100, start=HOUR, end=9999)])
    assert len((there.round().reserved or {})["uid-r"]) == 2048
