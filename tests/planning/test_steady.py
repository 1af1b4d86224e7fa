"""Work that comes and goes: held against real rounds of placement, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.filters import Constraints, Shape
from planning.jobs import shape_of
from planning.model import WHOLE, NodeView, Resources
from planning.orders import ORDERS, Submission
from planning.steady import Simulation
from planning.strategies import informed, installed
from tests.planning.builders import NOW, SETTINGS, node, workload
from tests.planning.cluster import Cluster

SEED = 7  # of tests.planning.builders.round_of


def submission(
    at: float, seconds: float, gpus: int, milli: int = WHOLE, cpu: int = 1000, tenant: str = "t", zone: str = ""
) -> Submission:
    allowed = Constraints(selector=(("zone", zone),)) if zone else Constraints()
    return Submission("x", tenant, Shape(Resources(gpus, cpu, 0, 1, milli), allowed), at, seconds)


def simulation(
    nodes: list[NodeView], submissions: list[Submission], order: str = "fifo", strategy: str = "mostAllocated"
) -> Simulation:
    return Simulation(nodes, submissions, informed(strategy, lambda: ()), ORDERS[order](), SEED)


def started(nodes: list[NodeView], submissions: list[Submission], order: str = "fifo") -> list[float | None]:
    simulated = simulation(nodes, submissions, order)
    simulated.advance(1e9)
    return simulated.started


def test_what_fits_starts_at_once_and_the_rest_when_something_ends() -> None:
    assert started([node("a", 2)], [submission(0, 10, 2), submission(1, 5, 1), submission(2, 5, 1)]) == [0, 10, 10]


def test_ends_at_a_moment_make_room_for_who_comes_then() -> None:
    assert started([node("a", 1)], [submission(0, 10, 1), submission(10, 1, 1)]) == [0, 10]


def test_a_small_one_does_not_take_what_is_kept_for_a_large_one() -> None:
    come = [submission(0, 10, 1), submission(0, 30, 1), submission(1, 5, 2), submission(2, 99, 1)]
    assert started([node("a", 2)], come) == [0, 0, 30, 35]


def test_who_may_use_other_nodes_does_not_wait_for_them() -> None:
    nodes = [node("a", 2, labels={"zone": "a"}), node("b", 1, labels={"zone": "b"})]
    come = [submission(0, 10, 1, zone="a"), submission(1, 9, 2, zone="a"), submission(2, 9, 1, zone="b")]
    assert started(nodes, come) == [0, 10, 2]


def test_room_is_kept_for_each_that_competes_with_no_other() -> None:
    nodes = [node("a", 2, labels={"zone": "a"}), node("b", 2, labels={"zone": "b"})]
    come = [submission(0, took, 1, zone=zone) for zone in "ab" for took in (10, 30)]
    come += [submission(1, 5, 2, zone=zone) for zone in "ab"]
    come += [submission(2, 99, 1, zone=zone) for zone in "ab"]
    assert started(nodes, come)[4:] == [30, 30, 35, 35]


def test_two_halves_share_a_gpu_and_what_can_never_run_is_left_out() -> None:
    come = [submission(0, 10, 1, 500), submission(0, 10, 1, 500), submission(0, 10, 1, 500), submission(0, 1, 9)]
    simulated = simulation([node("a", 1)], come)
    simulated.advance(5)
    assert simulated.started == [0, 0, None, None] and simulated.waiting == [2]
    assert simulated.gpu_milli == WHOLE and simulated.gpu_seconds == 5 * WHOLE
    simulated.advance(100)
    assert simulated.started == [0, 0, 10, None] and not simulated.running
    assert simulated.gpu_seconds == 10 * WHOLE + 10 * 500


def test_the_shortest_goes_first_where_it_is_known() -> None:
    come = [submission(0, 10, 1), submission(1, 50, 1), submission(2, 5, 1)]
    assert started([node("a", 1)], come, "oracle") == [0, 15, 10]
    assert started([node("a", 1)], come, "fifo") == [0, 10, 60]


def test_what_is_learned_is_learned_from_those_that_ended() -> None:
    def long(at: float) -> Submission:
        return submission(at, 500, 1, cpu=1000)

    def short(at: float) -> Submission:
        return submission(at, 10, 1, cpu=2000)

    # Each kind runs three times, one after the other; then both wait for a third, the long one first.
    seen = [long(0), long(500), long(1000), short(1500), short(1510), short(1520)]
    end = 1530.0
    come = [*seen, submission(end, 400, 1, cpu=3000), long(end + 301), short(end + 302)]
    assert started([node("a", 1)], come, "learned")[-2:] == [end + 410, end + 400]
    # Before anything has ended nothing is known, and the older one goes first.
    come = [submission(0, 400, 1, cpu=3000), long(1), short(2)]
    assert started([node("a", 1)], come, "learned") == [0, 400, 900]


def test_who_ran_before_the_beginning_is_the_older_one_and_is_learned_in_full() -> None:
    old = replace(submission(0, 10, 1), ran=1000.0)
    assert started([node("a", 1)], [submission(0, 10, 1), old]) == [10, 0]
    order = ORDERS["learned"]()
    for _ in range(3):
        order.ended(old, 10.0)
    assert order.rank(submission(400, 1, 1), 400.0) == pytest.approx(1010, rel=0.1)


come_and_go = st.lists(
    st.tuples(
        st.integers(0, 40),  # when it comes
        st.integers(1, 30),  # how long it runs
        st.integers(1, 5),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(["1", "20"]),
    ),
    max_size=14,
)


@settings(max_examples=120)
@given(come_and_go, st.sampled_from(["leastLoaded", "mostAllocated", "bestFit", "random"]))
def test_it_decides_as_rounds_of_placement_do(asked: list[tuple[int, int, int, str, str]], strategy: str) -> None:
    nodes = [
        node("n1", 4, labels={"zone": "a"}, allocatable=Resources(4, 30_000, 2**40, 110)),
        node("n2", 3, labels={"zone": "b"}, allocatable=Resources(3, 40_000, 2**40, 110)),
        node("n3", 2, labels={"zone": "a"}, allocatable=Resources(2, 64_000, 2**40, 3)),
    ]
    views, submissions = [], []
    for number, (at, seconds, gpus, zone, cpu) in enumerate(sorted(asked)):
        spec = {
            "image": "i",
            "resources": {"requests": {"cpu": cpu}},
            "schedulingStrategy": strategy,
            **({"nodeSelector": {"zone": zone}} if zone else {}),
        }
        view = workload(str(number), gpus, spec=spec, created=NOW + at, name=f"w{number:03}")
        assert view.spec is not None
        views.append(view)
        submissions.append(Submission(view.name, "ns", shape_of(view.spec, SETTINGS), NOW + at, seconds))
    simulated = Simulation(nodes, submissions, informed(strategy, lambda: ()), ORDERS["fifo"](), SEED)
    real = Cluster(nodes)
    while (moment := simulated.upcoming) < float("inf"):
        simulated.advance(moment)
        real.tick(moment - real.now)
        for view, each in zip(views, submissions, strict=True):
            if each.at == moment:
                real.add(view, run=each.seconds)
        real.settle()
        assert {str(each.number): each.place.node for each in simulated.running.values()} == real.running


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 50), st.integers(0, 4), st.sampled_from([WHOLE, 300])), max_size=25
    ),
    st.sampled_from(installed()),
    st.sampled_from(list(ORDERS)),
)
def test_nothing_is_given_away_twice_and_all_that_can_run_do(
    asked: list[tuple[float, float, int, int]], strategy: str, order: str
) -> None:
    come = sorted(
        (submission(at, took, gpus, milli if gpus == 1 else WHOLE) for at, took, gpus, milli in asked),
        key=lambda each: each.at,
    )
    simulated = simulation([node("a", 3), node("b", 2)], come, order, strategy)
    while (moment := simulated.upcoming) < float("inf"):
        simulated.advance(moment)
        held: dict[tuple[str, int], int] = {}
        for running in simulated.running.values():
            need = come[running.number].shape.requests
            assert len(running.place.devices) == need.gpus
            for device in running.place.devices:
                held[running.place.node, device] = held.get((running.place.node, device), 0) + need.gpu_milli
        assert all(milli <= WHOLE for milli in held.values())
        assert simulated.gpu_milli == sum(held.values()) <= 5 * WHOLE
    for number, each in enumerate(come):
        start = simulated.started[number]
        assert (start is None) == (each.shape.requests.gpus > 3) and (start is None or start >= each.at)
    assert not simulated.running and not simulated.waiting
    held_for = sum(
        each.seconds * each.shape.requests.gpus * each.shape.requests.gpu_milli
        for each in come
        if each.shape.requests.gpus <= 3
    )
    assert simulated.gpu_seconds == pytest.approx(held_for, abs=1e-6)
    assert all(sum(devices) == WHOLE * len(devices) for _, _, devices in simulated.fleet.left()), "all is given back"
