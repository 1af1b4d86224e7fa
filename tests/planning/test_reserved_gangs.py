"""Gangs beside GPUReservations and in them: all of their places on what is reserved, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planning.places import pods_in
from tests.planning.builders import (
    NOW,
    node,
    reservation,
)
from tests.planning.test_reservations import FREE, HOUR, chosen, cluster, holder, later, named, reasons


def test_a_gang_gets_nothing_of_what_is_reserved_and_stops_nobody_for_it() -> None:
    there = cluster(node("a", 8), node("b", 8), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("low", 4, priority="low", nodeSelector={"kubernetes.io/hostname": "b"}))
    there.settle()
    there.now += 200
    there.add(named("large", 4, replicas=4, priority="high"))
    there.settle()
    assert there.running.keys() == {"low"} and not there.stopped
    there.add(named("fits", 4, replicas=3, priority="high"))
    there.settle()
    there.tick(1)
    there.settle()
    assert there.running.keys() == {"fits"} and chosen(there) == {"a": 4}
    assert dict(there.jobs["fits"].places) == {"a": 1, "b": 2}


def test_a_gang_takes_its_places_from_its_reservation_when_it_begins_and_from_nothing_else() -> None:
    """Who borrowed is stopped on all of its nodes; what is free beside is not the gang's."""
    there = cluster(
        node("a", 4), node("b", 4), node("c", 8),
        keeps=[reservation("r", gpus=8, gpusPerNode=4, nodeSelector={"pool": "x"}, start=HOUR, end=2 * HOUR)],
    )  # fmt: skip
    there.nodes[:2] = [replace(each, labels={**each.labels, "pool": "x"}) for each in there.nodes[:2]]
    there.add(*(named(f"lent-{name}", 4, nodeSelector={"kubernetes.io/hostname": name}, **FREE) for name in "ab"))
    there.settle()
    there.add(holder("g", 2, replicas=4), holder("large", 4, replicas=3))
    assert reasons(there)["g"][0] == "WaitingForReservation"
    later(there, HOUR - 61)
    assert there.running.keys() == {"lent-a", "lent-b"} and not there.stopped
    there.tick(1)
    assert {stop.uid for stop in there.round().preemptions} == {"lent-a", "lent-b"}
    later(there, HOUR + 1)
    assert dict(there.jobs["g"].places) == {"a": 2, "b": 2}
    assert there.jobs["g"].backfill == NOW + 2 * HOUR
    assert there.running.keys() == {"g"}
    assert reasons(there)["large"] == (
        "WaitingForReservation",
        "needs 3 pods with 4 GPUs each; what is left of the 8 GPUs of GPUReservation r has room for 0 of them, now for "
        "0; 8 GPUs are kept on nodes a, b",
    )


def test_a_gang_in_its_window_starts_as_a_whole_or_with_as_many_as_it_may() -> None:
    """Six GPUs are reserved: room for three of four pods, though two more would be free."""
    nodes = [node("a", 4), node("b", 4)]
    for least, running in ((4, {}), (2, {"a": 2, "b": 1})):
        there = cluster(*nodes, keeps=[reservation("r", gpus=6, start=10, end=HOUR)])
        there.add(holder("g", 2, replicas=4, minReplicas=least))
        later(there, 20)
        assert (dict(there.jobs["g"].places) if "g" in there.jobs else {}) == running


def test_for_a_gang_only_as_many_are_stopped_as_it_needs_and_then_nobody_stops_it() -> None:
    there = cluster(node("a", 4), node("b", 4), keeps=[reservation("r", gpus=8, start=10, end=HOUR)])
    there.add(*(named(f"p{i}", 2, **FREE) for i in range(4)))
    there.settle()
    there.add(holder("g", 1, replicas=4, priority="low"))
    later(there, 20)
    assert len(there.stopped) == 2 and "g" in there.running
    there.now += 600
    there.add(named("high", 4, priority="high"))
    later(there, 700)
    assert "g" in there.running and len(there.stopped) == 2


def test_a_gang_that_must_be_in_one_domain_finds_it_among_the_nodes_of_its_window() -> None:
    near = {"level": "rack", "mode": "Required"}
    nodes = [replace(node(name, 4), labels={"rack": rack}) for name, rack in (("a", "1"), ("b", "2"), ("c", "2"))]
    there = cluster(*nodes, keeps=[reservation("r", gpus=12, start=10, end=HOUR)])
    there.add(holder("g", 4, replicas=2, topology=near), holder("late", 4, replicas=2, topology=near))
    later(there, 20)
    assert dict(there.jobs["g"].places) == {"b": 1, "c": 1} and there.running.keys() == {"g"}
    assert "in one rack" in reasons(there)["late"][1]


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans()), max_size=5),
    st.integers(0, 200),
)
def test_gangs_in_a_window_are_placed_whole_on_what_is_reserved_and_on_no_more(
    sizes: list[int], reserved: int, asked: list[tuple[int, int, int, bool]], seconds: int
) -> None:
    nodes = [node(f"n{i}", gpus) for i, gpus in enumerate(sizes)]
    there = cluster(*nodes, keeps=[reservation("r", gpus=min(reserved, sum(sizes)), start=100, end=HOUR)])
    for number, (gpus, pods, least, lent) in enumerate(asked):
        spec: dict[str, Any] = {"replicas": pods, "minReplicas": min(pods, least)} if pods > 1 else {}
        there.add(named(f"l{number}", gpus, age=50, **FREE) if lent else holder(f"h{number}", gpus, **spec))
    there.settle()
    later(there, seconds)
    kept, used = chosen(there), dict[str, int]()
    for uid, made in there.jobs.items():
        if not uid.startswith("h") or made.preempted:
            continue
        assert there.now >= NOW + 100, "not before its window"
        spec_of = there.workloads[uid].spec
        assert spec_of is not None
        assert pods_in(made.places) >= (spec_of.min_replicas or 1) if made.places else spec_of.replicas == 1
        for name, count in made.places or ((made.node, 1),):
            used[name] = used.get(name, 0) + count * made.requests.gpus
    assert all(gpus <= kept.get(name, 0) for name, gpus in used.items())
