"""Groups found from how GPUs are connected: disjoint, of the sizes wanted, always the same, and the best there are."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.devices.cards import Card, Connection, Link
from planning.devices.groups import WORTH, partitioned, sizes_for


def gpus(count: int, numa: int | None = None) -> list[Card]:
    return [Card(f"GPU-{n}", "nvidia", "H100", "nvidia.com/gpu", n, numa=numa) for n in range(count)]


def link(a: int, b: int, connection: Connection = "nvlink", lanes: int = 0) -> Link:
    return Link(f"GPU-{a}", f"GPU-{b}", connection, lanes)


def indices(groups: tuple[tuple[str, ...], ...]) -> list[list[int]]:
    return [[int(card.removeprefix("GPU-")) for card in group] for group in groups]


@pytest.mark.parametrize(
    ("count", "sizes", "made"),
    [
        (8, {2}, (2, 2, 2, 2)),
        (8, {1, 2, 4}, (4, 2, 1, 1)),
        (4, {1, 2}, (2, 1, 1)),
        (7, {2}, (2, 2, 2)),
        (8, {3}, (3, 3)),
        (16, {4, 2}, (4, 4, 4, 2, 2)),
        (1, {2}, ()),
        (0, {1}, ()),
        (8, set(), ()),
        (2, {0, -1, 2}, (2,)),
    ],
)
def test_how_many_groups_of_each_size(count: int, sizes: set[int], made: tuple[int, ...]) -> None:
    assert sizes_for(count, sizes) == made


def test_nvlink_pairs_stay_together_wherever_they_are() -> None:
    links = [
        link(0, 3, lanes=4),
        link(1, 2, lanes=4),
        *(link(a, b, "host-bridge") for a, b in ((0, 1), (2, 3), (0, 2))),
    ]
    assert indices(partitioned(gpus(4), links, [2, 2])) == [[0, 3], [1, 2]]


def test_two_sockets_are_two_groups() -> None:
    near = [link(a, b, "single-switch") for half in ((0, 2, 4, 6), (1, 3, 5, 7)) for a, b in combinations(half, 2)]
    far = [link(a, b, "cross-cpu") for a in (0, 2, 4, 6) for b in (1, 3, 5, 7)]
    assert indices(partitioned(gpus(8), [*near, *far], [4, 4])) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_better_connected_become_the_larger_group() -> None:
    links = [link(a, b, lanes=12) for a, b in combinations((2, 3, 4, 5), 2)]
    assert indices(partitioned(gpus(6), links, [4, 1, 1])) == [[0], [1], [2, 3, 4, 5]]
    assert indices(partitioned(gpus(6), links, [4])) == [[2, 3, 4, 5]]


def test_where_all_are_alike_neighbours_are_groups() -> None:
    links = [link(a, b, lanes=18) for a, b in combinations(range(16), 2)]
    assert indices(partitioned(gpus(8), links, [2] * 4)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert indices(partitioned(gpus(16), links, [4] * 4)) == [[n, n + 1, n + 2, n + 3] for n in (0, 4, 8, 12)]
    assert indices(partitioned(gpus(4), [], [2, 2])) == [[0, 1], [2, 3]]


def test_without_links_numa_nodes_decide() -> None:
    cards = [Card(f"GPU-{n}", "nvidia", "H100", "nvidia.com/gpu", n, numa=n % 2) for n in range(4)]
    assert indices(partitioned(cards, [], [2, 2])) == [[0, 2], [1, 3]]


def test_sixteen_gpus_by_nvlink_quads() -> None:
    quads = [tuple(range(n, 16, 4)) for n in range(4)]
    near = {frozenset(pair) for quad in quads for pair in combinations(quad, 2)}
    links = [link(a, b, lanes=2 if frozenset((a, b)) in near else 1) for a, b in combinations(range(16), 2)]
    assert indices(partitioned(gpus(16), links, [4] * 4)) == [list(quad) for quad in quads]


def test_a_greedy_choice_that_spoils_the_rest_is_taken_back() -> None:
    chain = [link(1, 2, lanes=5), link(0, 1, lanes=4), link(2, 3, lanes=4)]
    links = [*chain, *(link(a, a + 1, lanes=9) for a in (4, 6, 8))]
    assert indices(partitioned(gpus(10), links, [2] * 5)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert indices(partitioned(gpus(9), chain, [4])) == [[0, 1, 2, 3]]


connections = st.sampled_from(sorted(WORTH))


@st.composite
def machines(draw: st.DrawFn, most: int) -> tuple[list[Card], list[Link], list[int]]:
    count = draw(st.integers(0, most))
    pairs = list(combinations(range(count), 2))
    links = [link(a, b, draw(connections), draw(st.integers(0, 3))) for a, b in pairs if draw(st.booleans())]
    sizes = draw(st.lists(st.integers(1, 5), max_size=6))
    return gpus(count), links, sizes


def total(groups: list[tuple[str, ...]] | tuple[tuple[str, ...], ...], links: list[Link]) -> int:
    worth = {
        (each.a, each.b): WORTH[each.connection] * (max(each.lanes, 1) if each.connection == "nvlink" else 1)
        for each in links
    }
    return sum(worth.get((a, b), 0) for group in groups for a, b in combinations(sorted(group), 2))


@given(machines(most=14), st.randoms(use_true_random=False))
def test_groups_are_disjoint_of_the_sizes_wanted_and_always_the_same(
    machine: tuple[list[Card], list[Link], list[int]], random: Random
) -> None:
    cards, links, sizes = machine
    found = partitioned(cards, links, sizes)
    members = [card for group in found for card in group]
    assert len(members) == len({*members}) and {*members} <= {card.id for card in cards}
    left, expected = len(cards), []
    for size in sorted(sizes, reverse=True):
        if size <= left:
            expected.append(size)
            left -= size
    assert sorted(map(len, found), reverse=True) == expected
    mixed_cards, mixed_links = [*cards], [*links]
    random.shuffle(mixed_cards)
    random.shuffle(mixed_links)
    assert partitioned(mixed_cards, mixed_links, sizes) == found


@given(machines(most=7))
def test_up_to_eight_gpus_nothing_is_better_connected(machine: tuple[list[Card], list[Link], list[int]]) -> None:
    cards, links, sizes = machine
    found = partitioned(cards, links, sizes)

    def best(free: tuple[str, ...], wanted: tuple[int, ...]) -> int:
        if not wanted:
            return 0
        return max(
            total([group], links) + best(tuple(card for card in free if card not in group), wanted[1:])
            for group in combinations(free, wanted[0])
        )

    assert total(found, links) == best(tuple(card.id for card in cards), tuple(map(len, found)))


def test_links_of_cards_that_are_not_there_and_double_ones_do_no_harm() -> None:
    links = [link(0, 9), link(0, 0), link(0, 1, "cross-cpu"), link(0, 1, lanes=2), link(1, 0)]
    assert partitioned(gpus(3), links, [2]) == partitioned(gpus(3), [*reversed(links)], [2]) == (("GPU-0", "GPU-1"),)


def test_a_node_with_many_gpus_is_divided_soon() -> None:
    """In about 0.1 s; whoever looks at all divisions is not done in a lifetime."""
    links = [link(a, b, lanes=(a * b) % 5) for a, b in combinations(range(64), 2)]
    assert len(partitioned(gpus(64), links, [4] * 16)) == 16
