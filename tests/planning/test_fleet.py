"""The fleet's index against a look at every node, through any sequence of requests, ends and strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.accelerators import AMD, SEAT
from planning.capacity import Room, whole
from planning.filters import Constraints, Shape
from planning.fleet import Fleet, Place
from planning.model import GPU_MODEL_LABEL, WHOLE, NodeView, Resources
from planning.strategies import Candidate, Rank, Request, Strategy, informed, installed
from planning.strategies.fgd import FGD
from planning.typical import Kind, typical
from tests.planning.builders import GIB, node

KNOWN = typical(
    [
        (Kind(1, 300, 2000), 30.0),
        (Kind(2, WHOLE, 9000, ("T4",)), 10.0),
        (Kind(4, WHOLE, 4000), 20.0),
        (Kind(2, WHOLE, 5, resource=AMD), 20.0),
        (Kind(3, WHOLE, 8000), 2.0),
        (Kind(3, WHOLE, 5, resource=AMD), 1.0),
    ]
)
STRATEGIES: list[Strategy] = [informed(name, lambda: KNOWN) for name in installed()]

others = st.sampled_from([AMD, SEAT])
needs = st.one_of(
    st.builds(Resources, gpus=st.integers(0, 4), cpu_milli=st.integers(0, 9) | st.just(40_000), pods=st.just(1)),
    st.builds(Resources, gpus=st.just(1), cpu_milli=st.integers(0, 9), gpu_milli=st.sampled_from([100, 300, 500, 999])),
    st.builds(Resources, gpus=st.integers(1, 3), cpu_milli=st.integers(0, 9), gpu_resource=others),
)
offers = st.dictionaries(st.sampled_from(["", AMD, SEAT]), st.integers(1, 8), max_size=3)
models = st.sampled_from(["", "T4", "H200"])


@dataclass
class Plain:
    """A node without any index: what every answer is compared with."""

    view: NodeView
    cpu: int
    memory: int
    pods: int
    gpus: dict[str, list[int]]

    def offers(self, request: Request, strategy: Strategy) -> list[tuple[Rank, str, int]]:
        need = request.requests
        if need.cpu_milli > self.cpu or need.memory > self.memory or need.pods > self.pods:
            return []
        gpus = self.gpus.get(need.gpu_resource, [])
        before = tuple(sorted(gpus, reverse=True))
        if need.gpu_milli == WHOLE or not need.gpus:
            free = [i for i, each in enumerate(gpus) if each == WHOLE][: need.gpus]
            choices = [(WHOLE, free)] if len(free) == need.gpus else []
        else:
            choices = [(each, [i]) for i, each in enumerate(gpus) if each >= need.gpu_milli]
        found = []
        for free_there, devices in choices:
            left = [each - need.gpu_milli * (i in devices) for i, each in enumerate(gpus)]
            candidate = Candidate(self.view, self.cpu, self.memory, before, tuple(sorted(left, reverse=True)))
            found.append((strategy.rank(request, candidate), self.view.name, free_there))
        return found

    def change(self, need: Resources, devices: tuple[int, ...], sign: int) -> None:
        self.cpu += sign * need.cpu_milli
        self.memory += sign * need.memory
        self.pods += sign * need.pods
        for device in devices:
            self.gpus[need.gpu_resource][device] += sign * need.gpu_milli


def plain(name: str, gpus: dict[str, int], model: str) -> Plain:
    offered = Resources.counting(gpus.items(), 64_000, 256 * GIB, 5)
    view = node(name, labels={GPU_MODEL_LABEL: model}, allocatable=offered)
    return Plain(view, 64_000, 256 * GIB, 5, {resource: [WHOLE] * count for resource, count in gpus.items()})


@given(
    st.lists(st.tuples(offers, models), min_size=1, max_size=6),
    st.lists(st.tuples(needs, models, st.sampled_from(STRATEGIES), st.booleans()), max_size=60),
)
def test_it_finds_what_a_look_at_every_node_finds(
    made: list[tuple[dict[str, int], str]], asked: list[tuple[Resources, str, Strategy, bool]]
) -> None:
    nodes = {f"n{i}": plain(f"n{i}", *each) for i, each in enumerate(made)}
    fleet = Fleet((each.view, whole(each.view)) for each in nodes.values())
    placed: list[tuple[Place, Resources]] = []
    for number, (need, model, strategy, one_ends) in enumerate(asked):
        constraints = Constraints(selector=((GPU_MODEL_LABEL, model),) if model else ())
        request = Request(str(number), "ns", "w", need, 7)
        place = fleet.find(request, Shape(need, constraints), strategy)
        open_to = [each for each in nodes.values() if not model or each.view.labels[GPU_MODEL_LABEL] == model]
        offers = [offer for each in open_to for offer in each.offers(request, strategy)]
        assert (place is None) == (not offers)
        if place is not None:
            _, name, free = min(offers)
            gpus = nodes[name].gpus.get(need.gpu_resource, [])
            assert place.node == name
            assert [gpus[i] for i in place.devices] == [free] * need.gpus
            assert len(set(place.devices)) == need.gpus
            fleet.take(place, need)
            nodes[name].change(need, place.devices, -1)
            placed.append((place, need))
        if one_ends and placed:
            place, need = placed.pop(number % len(placed))
            fleet.give_back(place, need)
            nodes[place.node].change(need, place.devices, 1)
        left = {view.name: devices for view, _, devices in fleet.left()}
        for name, each in nodes.items():
            first = each.gpus.get(each.view.allocatable.gpu_resource, [])
            assert left[name] == tuple(sorted(first, reverse=True))
            thousandths = chain.from_iterable(each.gpus.values())
            assert min([each.cpu, each.memory, each.pods, *thousandths]) >= 0, "over-committed"


BOTH = Resources.counting([("", 4), (AMD, 2)], 64_000, 256 * GIB, 110)
states = st.dictionaries(
    st.sampled_from(["n0", "n1", "n2"]),
    st.tuples(
        st.integers(-1, 4),
        st.sampled_from([0, 2000, 64_000]),
        models,
        st.booleans(),
        st.sampled_from([0, 1, 9]),
        st.integers(-1, 2),
    ),
    min_size=1,
)


# Few, so that most are asked for again in a later round.
few = st.sampled_from(
    [Resources(1, 2000, pods=1), Resources(3, 0, GIB), Resources(1, gpu_milli=300), Resources(2, 0, gpu_resource=AMD)]
)


@given(st.lists(st.tuples(states, st.lists(st.tuples(few, models, st.sampled_from(STRATEGIES)))), max_size=30))
def test_what_it_knew_of_earlier_rounds_changes_no_answer(
    rounds: list[tuple[dict[str, tuple[int, int, str, bool, int, int]], list[tuple[Resources, str, Strategy]]]],
) -> None:
    reused = Fleet(())
    for made, asked in rounds:
        nodes = [
            (
                node(name, labels={GPU_MODEL_LABEL: model}, allocatable=BOTH, unschedulable=cordoned),
                Room(left, cpu, more * GIB, more, other_gpus=((AMD, of_amd),)),
            )
            for name, (left, cpu, model, cordoned, more, of_amd) in made.items()
        ]
        reused.refresh(nodes)
        fresh = Fleet(nodes)
        for need, model, strategy in asked:
            shape = Shape(need, Constraints(selector=((GPU_MODEL_LABEL, model),) if model else ()))
            place = fresh.find(request(need), shape, strategy)
            assert reused.find(request(need), shape, strategy) == place
            if place is not None:
                fresh.take(place, need)
                reused.take(place, need)


def ask_twice(fleet: Fleet, need: Resources, strategy: Strategy) -> None:
    for _ in range(2):
        assert fleet.find(request(need), Shape(need), strategy) is not None


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    nodes, strategy = [(node("a", 2), Room(2, 64_000, 256 * GIB, 110))], FGD()
    fleet = Fleet(nodes)
    for number in range(200):
        ask_twice(fleet, Resources(1, number), strategy)
        fleet.refresh(nodes)
    assert 10 < fleet.remembered < 30


def test_what_is_asked_for_once_is_not_remembered_and_the_rest_is_bounded() -> None:
    nodes = [(node(f"n{i}", 2), Room(2, 64_000, 256 * GIB, 110)) for i in range(10)]
    fleet, strategy = Fleet(nodes, most=100), FGD()
    for number in range(50):
        need = Resources(1, number)
        assert fleet.find(request(need), Shape(need), strategy) is not None
    assert fleet.remembered == 0
    for number in range(50):
        ask_twice(fleet, Resources(1, number), strategy)
    assert 50 < fleet.remembered <= 100


def test_a_strategy_that_learned_anew_replaces_what_it_knew() -> None:
    fleet = two_nodes()
    for number in range(20):
        ask_twice(fleet, Resources(1), FGD(typical([(Kind(number, WHOLE, 0), 1.0)])))
    assert fleet.remembered <= 2


def test_a_node_that_boasts_costs_no_more_than_others() -> None:
    boasting = node("a", 2**62)
    fleet = Fleet([(boasting, Room(2**62, 64_000, 256 * GIB, 110))])
    place = fleet.find(request(Resources(8)), Shape(Resources(8)), FGD())
    ((_, _, devices),) = fleet.left()
    assert place is not None and len(devices) <= 1024


def test_a_write_that_changes_nothing_of_use_is_no_change() -> None:
    views = [node(name, 2) for name in "ab"]
    room = Room(2, 64_000, 256 * GIB, 110)
    fleet, strategy, asked = Fleet((view, room) for view in views), Counting(), Resources(1)
    ask_twice(fleet, asked, strategy)
    before = strategy.ranked
    fleet.refresh((replace(view, resource_version=9), room) for view in views)
    assert fleet.find(request(asked), Shape(asked), strategy) is not None
    assert strategy.ranked == before
    fleet.refresh([*((view, room) for view in views), (node("c", 2), room)])
    assert fleet.find(request(asked), Shape(asked), strategy) is not None
    assert strategy.ranked == before + 1, "one that joins is asked about alone"


class Counting(FGD):
    ranked = 0

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        self.ranked += 1
        return super().rank(request, candidate)


def test_long_after_a_shape_was_last_asked_for_it_is_found_anew() -> None:
    fleet, one, rare, strategy = two_nodes(), Resources(1), Resources(2), FGD()
    fleet.take(Place("b", (0,)), one)
    for _ in range(2):  # what is asked for once is not remembered
        first = fleet.find(request(rare), Shape(rare), strategy)
        assert first is not None and first.node == "a"
    fleet.give_back(Place("b", (0,)), one)
    fleet.take(Place("a", (0,)), one)
    for _ in range(2000):  # far more changes than are kept: that of b is no longer among them
        fleet.take(Place("a", (1,)), one)
        fleet.give_back(Place("a", (1,)), one)
    place = fleet.find(request(rare), Shape(rare), strategy)
    assert place is not None and place.node == "b"


def test_avoided_nodes_are_left_out_once_and_not_for_ever() -> None:
    fleet, one, strategy = two_nodes(), Resources(1), FGD()
    for avoided, node_name in (({"a"}, "b"), ((), "a"), ({"b"}, "a")):
        place = fleet.find(request(one), Shape(one), strategy, avoided)
        assert place is not None and place.node == node_name
    assert fleet.find(request(one), Shape(one), strategy, {"a", "b"}) is None


@pytest.mark.parametrize("left", [Room(-1, 64_000, GIB, 9), Room(2, -1, GIB, 9), Room(2, 64_000, GIB, 0)])
def test_a_node_that_others_over_committed_holds_nothing(left: Room) -> None:
    need = Resources(1, 1, 1, 1)
    assert Fleet([(node("a", 2), left)]).find(request(need), Shape(need), FGD()) is None


def test_a_node_that_does_not_take_such_requests_is_not_looked_at() -> None:
    cordoned = replace(node("a", 8), unschedulable=True)
    fleet = Fleet([(cordoned, Room(8, 64_000, GIB, 9))])
    assert fleet.find(request(Resources(1)), Shape(Resources(1)), FGD()) is None


def request(need: Resources) -> Request:
    return Request("u", "ns", "w", need)


def two_nodes() -> Fleet:
    return Fleet((node(name, 2), Room(2, 64_000, 256 * GIB, 110)) for name in "ab")
