"""A fleet that is filled: who gets a place, and when it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.filters import Shape
from planning.model import WHOLE, Resources
from planning.simulation import Arrival, capacity, fill, typical_of
from planning.strategies import informed, installed
from planning.strategies.most_allocated import MostAllocated
from planning.typical import Kind
from tests.planning.builders import node


def arrival(name: str, gpus: int, milli: int = WHOLE) -> Arrival:
    return Arrival(name, Shape(Resources(gpus, 1000, 0, 1, milli)), Kind(gpus, milli, 1000))


PACKING = MostAllocated()


def test_it_fills_until_all_gpus_were_asked_for() -> None:
    nodes = [node("a", 2), node("b", 2)]
    result = fill(nodes, [arrival("1", 1), arrival("2", 2), arrival("3", 1), arrival("4", 1)], PACKING, 1)
    assert (result.unallocated, result.unplaced, result.decisions) == (0.0, 0, 3)
    assert len(result.curve) == 101 and (result.curve[10], result.curve[50], result.curve[100]) == (25, 75, 100)


def test_the_one_that_crosses_what_there_is_counts() -> None:
    stranded = fill([node("a", 2), node("b", 2)], [arrival("1", 1), arrival("2", 9), arrival("3", 1)], PACKING, 1)
    assert (stranded.unallocated, stranded.unplaced, stranded.decisions) == (75.0, 1, 2)


def test_what_a_typical_request_cannot_use_is_a_fragment() -> None:
    result = fill([node("a", 4)], [arrival("1", 3), arrival("2", 3)], PACKING, 1)
    assert result.unallocated == result.fragments == pytest.approx(25)
    assert fill([node("a", 4)], [arrival("1", 1), arrival("2", 1)], PACKING, 1).fragments == pytest.approx(0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([WHOLE, 300])), max_size=30),
    st.sampled_from(installed()),
    st.integers(0, 9),
)
def test_never_more_than_there_is(asked: list[tuple[int, int]], strategy: str, seed: int) -> None:
    queue = [arrival("x", gpus, milli if gpus == 1 else WHOLE) for gpus, milli in asked]
    nodes = [node("a", 3), node("b", 2)]
    result = fill(nodes, queue, informed(strategy, lambda: typical_of(queue)), seed)
    assert 0 <= result.unallocated <= 100 and result.decisions <= len(queue)
    asked_for = sum(each.gpu_milli for each in queue[: result.decisions])
    allocated = capacity(nodes) * (1 - result.unallocated / 100)
    assert allocated <= asked_for + 1e-6
    if not result.unplaced:
        assert allocated == pytest.approx(asked_for)
