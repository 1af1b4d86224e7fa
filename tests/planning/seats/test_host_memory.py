"""Whether a seat may be parked: limits of its cgroups, the node's memory and budget, NUMA nodes, and what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.seats.host_memory import (
    Level,
    NodeMemory,
    NumaNode,
    Parked,
    Parking,
    amount,
    needed,
    parked,
    refusal,
    slow,
)

GIB = 2**30
LARGE = Parking("kyb-G01-s1", 72 * GIB, levels=(Level("container", 80 * GIB, 4 * GIB), Level("pod", None, 5 * GIB)))
ROOMY = NodeMemory(available=512 * GIB)


def test_what_fits_is_not_refused() -> None:
    assert refusal(LARGE, ROOMY) == "" and slow(LARGE, ROOMY) == ""
    assert refusal(replace(LARGE, bytes=0), NodeMemory(available=0)) == ""


def test_page_tables_and_slack_are_counted() -> None:
    assert needed(GIB) == GIB + GIB // 512 + 64 * 2**20
    assert needed(0) == needed(-5) == 0 and needed(1) > 1


@pytest.mark.parametrize(
    ("parking", "memory", "told"),
    [
        (
            replace(LARGE, levels=(Level("container", 70 * GIB, 4 * GIB),)),
            ROOMY,
            "the container has 4 GiB in use and a limit of 70 GiB, so that it would be killed: raise its memory limit",
        ),
        (replace(LARGE, levels=(LARGE.levels[0], Level("pod", 76 * GIB, 5 * GIB))), ROOMY, "the pod has 5 GiB in use"),
        (
            LARGE,
            replace(ROOMY, budget=128 * GIB, parked=40 * GIB, coming=20 * GIB),
            "parked seats of this node hold 60 GiB and may hold 128 GiB",
        ),
        (LARGE, NodeMemory(available=72 * GIB), "the node has 72 GiB to spare"),
        (
            LARGE,
            NodeMemory(available=100 * GIB, keep=10 * GIB, coming=20 * GIB),
            "the node has 70 GiB to spare (100 GiB available, 20 GiB promised to others that are being parked, 10 GiB",
        ),
        (LARGE, NodeMemory(available=10 * GIB, keep=20 * GIB), "the node has 0 bytes to spare"),
        (
            replace(LARGE, numa=((0, 36 * GIB), (1, 36 * GIB)), bound=True),
            replace(ROOMY, numa=(NumaNode(0, 200 * GIB), NumaNode(1, 20 * GIB))),
            "NUMA node 1, which has 20 GiB for 36.1 GiB",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(parking: Parking, memory: NodeMemory, told: str) -> None:
    text = refusal(parking, memory)
    assert told in text and text.startswith("parking kyb-G01-s1 moves 72 GiB to the host")


def test_memory_of_another_numa_node_is_slow_where_it_is_allowed() -> None:
    spread = replace(LARGE, numa=((1, 72 * GIB),))
    memory = replace(ROOMY, numa=(NumaNode(0, 200 * GIB), NumaNode(1, 20 * GIB)))
    assert refusal(spread, memory) == ""
    assert "slower: of NUMA node 1, which has 20 GiB for 72.2 GiB" in slow(spread, memory)


def test_what_is_parked_is_counted_by_numa_node() -> None:
    one, other = Parking("a", 10, ((0, 4), (1, 6))), Parking("b", 5, ((1, 5),))
    assert parked([one, other, Parking("c", -3)]) == Parked(15, ((0, 4), (1, 11)))


sizes = st.integers(-(2**40), 2**45)


@given(
    st.builds(
        Parking,
        st.just("s"),
        sizes,
        st.lists(st.tuples(st.integers(0, 3), sizes), max_size=3).map(tuple),
        st.booleans(),
        st.lists(st.builds(Level, st.just("container"), st.none() | sizes, sizes), max_size=3).map(tuple),
    ),
    st.builds(
        NodeMemory,
        sizes,
        sizes,
        sizes,
        st.none() | sizes,
        sizes,
        st.lists(st.builds(NumaNode, st.integers(0, 3), sizes), max_size=4).map(tuple),
    ),
)
def test_what_is_not_refused_fits_everywhere(parking: Parking, memory: NodeMemory) -> None:
    text = refusal(parking, memory)
    slow(parking, memory)
    if not text and parking.bytes > 0:
        assert all(each.limit is None or each.used + parking.bytes < each.limit for each in parking.levels)
        assert parking.bytes < memory.available - memory.coming - memory.keep
        assert memory.budget is None or memory.parked + memory.coming + parking.bytes <= memory.budget
    assert len(text) < 1000


@pytest.mark.parametrize(("size", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (GIB, "1 GiB"), (2**70, "1048576 PiB")])
def test_amounts(size: int, text: str) -> None:
    assert amount(size) == text
