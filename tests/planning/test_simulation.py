"""Simulated fleets: who gets a place, who waits for how long, and that nothing is lost or over-committed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.filters import Shape
from planning.model import WHOLE, Resources
from planning.simulation import Arrival, capacity, compressed, fill, live, typical_of
from planning.strategies import informed, installed
from planning.strategies.most_allocated import MostAllocated
from planning.typical import Kind
from tests.planning.builders import node


def arrival(name: str, gpus: int, at: float = 0.0, seconds: float = 10.0, milli: int = WHOLE) -> Arrival:
    need = Resources(gpus, 1000, 0, 1, milli)
    return Arrival(name, "team", Shape(need), Kind(gpus, milli, 1000), at, seconds)


arrivals = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 50), st.integers(0, 50)).map(lambda t: arrival("x", t[0], t[1], t[2])),
    max_size=40,
).map(lambda them: sorted(them, key=lambda each: each.at))
PACKING = MostAllocated()


def test_it_fills_until_all_gpus_were_asked_for() -> None:
    nodes = [node("a", 2), node("b", 2)]
    result = fill(nodes, [arrival("1", 1), arrival("2", 2), arrival("3", 1), arrival("4", 1)], PACKING, 1)
    assert (result.unallocated, result.unplaced, result.decisions) == (0.0, 0, 3)
    assert result.curve[0] == 0.0 or result.curve[0] == 25.0
    stranded = fill(nodes, [arrival("1", 1), arrival("3", 3)], PACKING, 1)
    assert (stranded.unallocated, stranded.unplaced) == (75.0, 1)


def test_compressed_arrivals_ask_for_just_that_load() -> None:
    queue = compressed([arrival("1", 1, 100, 30), arrival("2", 2, 400, 30), arrival("3", 1, 1100, 60)], 4000, 0.5)
    assert [each.at for each in queue] == pytest.approx([0, 22.5, 75])
    work = sum(each.gpu_milli * each.seconds for each in queue)
    assert work / (4000 * queue[-1].at) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no creation and deletion times"):
        compressed([arrival("1", 1)], 4000, 0.5)


def test_who_does_not_fit_waits_and_holds_up_nobody() -> None:
    queue = [arrival("first", 2, 0, 10), arrival("large", 3, 1, 5), arrival("small", 1, 2, 20), arrival("never", 9, 3)]
    result = live([node("a", 3)], queue, PACKING, 1)
    assert {each.name: wait for each, wait in result.waits} == {"first": 0, "large": 21, "small": 0}
    assert result.unplaced == 1


def test_the_oldest_that_fits_goes_first_whatever_its_size() -> None:
    queue = [arrival("all", 2, 0, 10), arrival("b", 1, 1, 5), arrival("c", 2, 2, 5), arrival("d", 1, 3, 5)]
    waits = {each.name: wait for each, wait in live([node("a", 2)], queue, PACKING, 1).waits}
    assert waits == {"all": 0, "b": 9, "d": 7, "c": 13}


@given(arrivals, st.sampled_from(installed()), st.integers(0, 9))
def test_everybody_who_fits_gets_a_place_and_never_more_than_there_is(
    queue: list[Arrival], strategy: str, seed: int
) -> None:
    nodes = [node("a", 3), node("b", 2)]
    result = live(nodes, queue, informed(strategy, lambda: typical_of(queue)), seed)
    assert len(result.waits) + result.unplaced == len(queue)
    assert result.unplaced == sum(each.gpu_milli > 3000 for each in queue)
    changes = []
    for each, wait in result.waits:
        assert wait >= 0
        began = each.at + wait
        changes += [(began + each.seconds, 0, -each.gpu_milli), (began, 1, each.gpu_milli)] if each.seconds else []
    used = 0
    for _, _, change in sorted(changes):
        used += change
        assert used <= capacity(nodes)
