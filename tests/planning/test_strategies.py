"""Which node each strategy takes, alone among candidates that all hold the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.accelerators import AMD
from planning.capacity import Room
from planning.filters import Shape
from planning.fleet import Fleet, Place
from planning.model import GPU_MODEL_LABEL, NodeView, Resources
from planning.strategies import Request, Strategy, informed, installed
from planning.strategies.cost_optimized import price
from planning.strategies.fgd import FGD, score
from planning.strategies.headroom import Headroom
from planning.typical import Kind, typical
from tests.planning.builders import GIB, NOW, node, placed, round_of, snapshot, workload

ONE = Resources(1)


def candidate(
    name: str, free: int, labels: Mapping[str, str] = {}, *, cpu: int = 64_000, gpus: int = 8
) -> tuple[NodeView, Room]:
    return node(name, gpus, labels=labels), Room(free, cpu, 256 * GIB, 110)


def choose(
    strategy: str | Strategy, candidates: list[tuple[NodeView, Room]], seed: int = 1, need: Resources = ONE
) -> str:
    found = informed(strategy, tuple) if isinstance(strategy, str) else strategy
    place = Fleet(candidates).find(Request("u", "ns", "w", need, seed), Shape(need), found)
    assert place is not None
    return place.node


def test_least_loaded_takes_most_free_gpus_then_least_used_share_then_name() -> None:
    assert choose("leastLoaded", [candidate("a", 2), candidate("b", 3)]) == "b"
    assert choose("leastLoaded", [candidate("a", 3, cpu=100), candidate("b", 3)]) == "b"
    assert choose("leastLoaded", [candidate("b", 3), candidate("a", 3)]) == "a"
    used = candidate("a", 3)
    used[1].memory -= 255 * GIB
    assert choose("leastLoaded", [used, candidate("b", 3)]) == "b"


def test_least_loaded_spreads_equal_nodes_in_turn() -> None:
    nodes = [node(f"n{i}") for i in range(4)]
    decision = round_of(snapshot(nodes, [workload(f"w{i}") for i in range(4)]))
    assert sorted(placed(decision).values()) == ["n0", "n1", "n2", "n3"]


def test_most_allocated_takes_the_fewest_free_gpus_then_the_first_name() -> None:
    assert choose("mostAllocated", [candidate("a", 4), candidate("b", 1), candidate("c", 1)]) == "b"


def test_best_fit_weighs_what_is_left_of_cpu_and_gpus() -> None:
    assert choose("bestFit", [candidate("a", 2), candidate("b", 3, cpu=16_000)]) == "b"
    assert choose("bestFit", [candidate("a", 2), candidate("b", 5, cpu=32_000)]) == "a"


def test_cost_optimized_takes_cheap_nodes_first_then_the_lower_price() -> None:
    cheap = {"gpu-orchestrator/cheap-node": "true"}
    assert choose("costOptimized", [candidate("a", 8), candidate("b", 1, cheap), candidate("c", 2, cheap)]) == "c"
    assert choose("costOptimized", [candidate("a", 8), candidate("b", 1)]) == "a"
    costs = [{"gpu.warp.dev/price-per-gpu-hour": told} for told in ("3.10", "2.48", "cheap")]
    assert choose("costOptimized", [candidate(f"n{i}", 8 - i, costs[i]) for i in range(3)]) == "n1"
    assert choose("costOptimized", [candidate("a", 8), candidate("b", 1, costs[0])]) == "b"


@pytest.mark.parametrize("label", ["", "free", "-1", "nan", "inf", "1e999", "1" * 21])
def test_what_is_no_price_counts_as_the_highest(label: str) -> None:
    assert price(label) == float("inf")


def test_fgd_keeps_free_what_others_typically_ask_for() -> None:
    whole_nodes = typical([(Kind(8, 1000, 1000), 1.0)])
    assert choose(FGD(whole_nodes), [candidate("a", 8), candidate("b", 7)]) == "b", "an empty node is spoiled once only"
    of_one_model = typical([(Kind(1, 1000, 1000, ("H200",)), 1.0)])
    models = [candidate(name, 4, {GPU_MODEL_LABEL: model}) for name, model in (("a", "H200"), ("b", "T4"))]
    assert choose(FGD(of_one_model), models) == "b", "what others cannot use goes first"


@pytest.mark.parametrize("make", [FGD, Headroom])
def test_the_model_that_counts_is_that_of_the_gpus_that_are_asked_for(make: type[FGD] | type[Headroom]) -> None:
    """The one node has AMD's that others typically ask for, the other has not; both have the same card for a screen."""
    offered, left = Resources.counting([("", 1), (AMD, 4)], 64_000, 256 * GIB, 110), Room(1, 64_000, 256 * GIB, 110)
    left.add_gpus(AMD, 4)
    screen = {GPU_MODEL_LABEL: "T400"}
    nodes = [
        node(name, labels={**screen, "amd.com/gpu.product-name": model}, allocatable=offered)
        for name, model in (("a", "MI300X"), ("b", "MI210"))
    ]
    wanted = typical([(Kind(1, 1000, 1000, ("MI300X",), AMD), 1.0)])
    asks = Resources(1, gpu_resource=AMD)
    assert choose(make(wanted), [(view, left.copy()) for view in nodes], need=asks) == "b"


@pytest.mark.parametrize("make", [FGD, Headroom])
def test_what_is_typical_of_one_vendor_keeps_nothing_free_of_another(make: type[FGD] | type[Headroom]) -> None:
    """Knowing no request for AMD's GPUs, it packs them, though whole nodes of NVIDIA's are often asked for."""
    amd = [replace(view, allocatable=replace(view.allocatable, gpu_resource=AMD)) for view in (node("a"), node("b", 7))]
    candidates = [(amd[0], Room(8, 64_000, 256 * GIB, 110, AMD)), (amd[1], Room(7, 64_000, 256 * GIB, 110, AMD))]
    need = Resources(1, gpu_resource=AMD)
    nvidias = typical([(Kind(7, 1000, 1000), 1.0)])
    assert choose(make(nvidias), candidates, need=need) == "b", "the fewest free GPUs"
    own = typical([(Kind(7, 1000, 1000, resource=AMD), 1.0)])
    assert choose(make(own), candidates, need=need) == "a", "seven stay free there"


def test_prices_hold_for_every_vendor() -> None:
    dear, cheap = ({"gpu.warp.dev/price-per-gpu-hour": told} for told in ("3.10", "2.48"))
    there = [
        (replace(view, allocatable=replace(view.allocatable, gpu_resource=AMD)), Room(8, 64_000, 256 * GIB, 110, AMD))
        for view in (node("a", labels=dear), node("b", labels=cheap))
    ]
    assert choose("costOptimized", there, need=Resources(1, gpu_resource=AMD)) == "b"


def test_fgd_shares_a_gpu_that_is_shared_already() -> None:
    fleet, half = Fleet([candidate("a", 8), candidate("b", 8)]), Resources(1, gpu_milli=500)
    strategy, used = FGD(typical([(Kind(1, 1000, 0), 1.0)])), []
    for number in range(4):
        place = fleet.find(Request(str(number), "ns", "w", half), Shape(half), strategy)
        assert place is not None
        fleet.take(place, half)
        used.append((place.node, place.devices))
    assert used[0] == used[1] and used[2] == used[3]


@pytest.mark.parametrize("name", ["fgd", "headroom"])
def test_who_looks_ahead_and_knows_nothing_typical_packs(name: str) -> None:
    assert choose(name, [candidate("a", 4), candidate("b", 1), candidate("c", 1)]) == "b"


# Those for whole nodes are one in a hundred, some of them with more CPU than most nodes have.
SMALL, LARGE = Kind(1, 1000, 12_000), (Kind(8, 1000, 60_000), Kind(8, 1000, 120_000))
SELDOM_LARGE = typical([(SMALL, 990), (LARGE[0], 5), (LARGE[1], 5)])


def test_headroom_spares_the_nodes_that_only_rare_requests_need() -> None:
    """Only a has CPU for all that ask for eight GPUs; to fgd both are alike, and a has the first name."""
    nodes, need = [candidate("a", 8, cpu=128_000), candidate("b", 8, cpu=96_000)], Resources(1, 12_000)
    assert choose(FGD(SELDOM_LARGE), nodes, need=need) == "a"
    assert choose(Headroom(SELDOM_LARGE), nodes, need=need) == "b"


def test_headroom_keeps_the_cpu_that_rare_requests_need_beside_their_gpus() -> None:
    """Also from those that want no GPU: what a has left would not do for eight GPUs any more."""
    nodes, need = [candidate("a", 8, cpu=64_000), candidate("b", 8, cpu=96_000)], Resources(0, 6_000)
    assert choose(FGD(SELDOM_LARGE), nodes, need=need) == "a"
    assert choose(Headroom(SELDOM_LARGE), nodes, need=need) == "b"


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_headroom_keeps_nodes_whole_while_small_requests_come_and_go(seed: int) -> None:
    """Two thirds of all GPUs are in use, and CPU is short on some nodes; whoever wants a whole node still finds one."""
    draw = Random(seed)
    fleet = Fleet(candidate(f"n{i}", 8, cpu=(96_000, 128_000)[i % 2]) for i in range(12))
    strategy, there = Headroom(SELDOM_LARGE), list[tuple[Place, Resources]]()
    for number in range(400):
        if len(there) >= 64:
            fleet.give_back(*there.pop(draw.randrange(len(there))))
        need = Resources(1, draw.choice((6_000, 12_000, 16_000)))
        place = fleet.find(Request(str(number), "ns", "w", need), Shape(need), strategy)
        assert place is not None
        fleet.take(place, need)
        there.append((place, need))
    for kind in LARGE:
        need = Resources(kind.gpus, kind.cpu_milli)
        assert fleet.find(Request("", "ns", "large", need), Shape(need), strategy) is not None, kind


def test_scores_of_fgd_are_coarse_and_never_overflow() -> None:
    assert (score(0), score(1000), score(-1000), score(1e12), score(-1e12)) == (50, 73, 26, 99, 0)
    assert len({score(fall) for fall in range(-20, 20)}) == 2
    assert score(-1e-12) == score(1e-12) == 50, "sums of shares are never quite exact"


@given(st.floats(-1e4, 1e4).filter(lambda fall: abs(fall) > 1e-5))
def test_scores_of_fgd_are_the_sigmoid_cut_to_an_integer(fall: float) -> None:
    assert score(fall) == int(100 / (1 + exp(-fall / 1000)))


def test_a_round_knows_what_is_typical() -> None:
    """A single empty node of eight stays whole for those that ask for all of one."""
    before = NOW - 10_000
    past = [workload(f"past-{i}", 8, created=before, status={"phase": "Succeeded"}) for i in range(9)]
    wish = workload("w", 1, spec={"schedulingStrategy": "fgd"})
    nodes = [node("a", 8), node("b", 9, allocatable=Resources(9, 64_000, 256 * GIB, 110))]
    assert placed(round_of(snapshot(nodes, [wish, *past]))) == {"w": "b"}
    assert placed(round_of(snapshot(nodes, [wish]))) == {"w": "a"}, "knowing nothing, it packs"


@given(st.permutations(range(9)), st.integers(0, 2**63), st.sampled_from(installed()))
def test_every_strategy_is_replayable_and_blind_to_order(order: list[int], seed: int, strategy: str) -> None:
    candidates = [candidate(f"n{i}", 1 + i % 3) for i in range(9)]
    assert choose(strategy, [candidates[i] for i in order], seed) == choose(strategy, candidates, seed)


def test_random_reaches_every_node_about_as_often() -> None:
    candidates = [candidate(f"n{i}", 1) for i in range(5)]
    taken = [choose("random", candidates, seed) for seed in range(1000)]
    assert {name for name in taken if 150 <= taken.count(name) <= 250} == {f"n{i}" for i in range(5)}
