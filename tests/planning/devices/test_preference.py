"""Which devices a container is best given: against every possible set where there are few, and quickly where many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.devices import preference
from planning.devices.cards import Card, Connection, Link
from planning.devices.preference import Affinity, preferred


def gpus(count: int, numa: int = 0) -> list[Card]:
    return [
        Card(f"g{number:02}", "nvidia", "H100", "nvidia.com/gpu", number, numa=number // numa if numa else None)
        for number in range(count)
    ]


def pairs(cards: list[Card], lanes: int = 4) -> list[Link]:
    """NVLink between neighbours, a switch between four, and the other socket."""
    found = []
    for one, other in combinations(cards, 2):
        a, b = one.index, other.index
        near: Connection = "nvlink" if a // 2 == b // 2 else "single-switch" if a // 4 == b // 4 else "cross-cpu"
        found.append(Link(one.id, other.id, near, lanes if near == "nvlink" else 0))
    return found


def whole(cards: list[Card]) -> dict[str, tuple[str, ...]]:
    return {card.id: (card.id,) for card in cards}


EIGHT = gpus(8, numa=4)
AFFINITY = Affinity(EIGHT, pairs(EIGHT))
EVERY = [card.id for card in EIGHT]


def ask(available: list[str], size: int, must: tuple[str, ...] = (), taken: tuple[str, ...] = ()) -> list[str]:
    return sorted(preferred(AFFINITY, whole(EIGHT), available, must, size, taken))


def test_two_are_neighbours_and_four_share_a_socket() -> None:
    assert ask(EVERY, 2) == ["g00", "g01"] and ask(EVERY, 4) == ["g00", "g01", "g02", "g03"]
    assert ask(EVERY[1:], 2) == ["g02", "g03"], "g01's neighbour is gone"
    assert ask(EVERY, 2, must=("g05",)) == ["g04", "g05"]


def test_a_single_one_breaks_up_no_pair() -> None:
    assert ask(EVERY[1:], 1) == ["g01"]
    assert ask([*EVERY[:4], "g06"], 1) == ["g06"], "the pairs of the other socket stay whole"


def test_shares_are_spread_over_cards_the_least_crowded_first() -> None:
    cards = gpus(3)
    shares = {f"{card.id}-r{number}": (card.id,) for card in cards for number in range(4)}
    free = [each for each in shares if each not in ("g00-r0", "g01-r0", "g00-r1")]
    found = preferred(Affinity(cards, []), shares, free, (), 1, ("g00-r0", "g00-r1", "g01-r0"))
    assert found == ["g02-r0"]
    three = preferred(Affinity(cards, []), shares, list(shares), (), 3, ())
    assert {shares[each] for each in three} == {("g00",), ("g01",), ("g02",)}


def test_seats_are_spread_over_groups() -> None:
    seats = {f"kyb-{group}-s{number}": (f"{group}a", f"{group}b") for group in ("G0", "G1") for number in range(2)}
    found = preferred(Affinity([], []), seats, sorted(seats)[1:], (), 1, ("kyb-G0-s0",))
    assert found == ["kyb-G1-s0"]


def test_a_group_that_a_pod_moves_to_comes_first_if_it_has_room() -> None:
    seats = {f"kyb-{group}-s{n}": (group,) for group in ("G01", "G23") for n in (1, 2)}
    none, free, first = Affinity([], []), sorted(seats), ["kyb-G23-s1", "kyb-G23-s2"]
    taken = ["kyb-G23-s1"]
    available = [each for each in free if each not in taken]
    assert preferred(none, seats, available, [], 1, taken) == ["kyb-G01-s1"]
    assert preferred(none, seats, available, [], 1, taken, first) == ["kyb-G23-s2"]
    assert preferred(none, seats, ["kyb-G01-s1"], [], 1, taken, first) == ["kyb-G01-s1"]


@pytest.mark.parametrize("count", [16, 64])
def test_where_not_all_sets_can_be_tried_the_best_of_a_clear_case_is_found(count: int) -> None:
    cards = gpus(count, numa=count // 2)
    affinity = Affinity(cards, pairs(cards))
    found = preferred(affinity, whole(cards), [card.id for card in cards][1:], (), 4, ())
    assert sorted(found) == ["g04", "g05", "g06", "g07"]


def test_cards_of_which_no_link_is_told_go_together_by_numa_node() -> None:
    cards = [
        Card(f"tt-{number}", "tenstorrent", "n150", "tenstorrent.com/n150", number, numa=number % 2)
        for number in range(8)
    ]
    affinity, every = Affinity(cards, ()), [card.id for card in cards]
    assert sorted(preferred(affinity, whole(cards), every, (), 2)) == ["tt-0", "tt-2"]
    assert sorted(preferred(affinity, whole(cards), every[1:], (), 2)) == ["tt-2", "tt-4"], "broken up already"
    assert sorted(preferred(affinity, whole(cards), every, ("tt-3",), 2)) == ["tt-1", "tt-3"]


def test_instances_are_taken_from_the_gpu_that_is_broken_up_already() -> None:
    cards = [
        Card(f"MIG-{gpu}-{number}", "nvidia", "1g", "nvidia.com/mig-1g.10gb", gpu, numa=0, parent=f"GPU-{gpu}")
        for gpu in range(2)
        for number in range(7)
    ]
    every = [card.id for card in cards]
    assert preferred(Affinity(cards, ()), whole(cards), [*every[:7], *every[8:]], (), 1) == ["MIG-1-1"]


def test_shares_go_to_the_least_crowded_card_however_cards_are_connected() -> None:
    shares = {f"{card.id}-r{number}": (card.id,) for card in EIGHT for number in range(2)}
    held = ["g06-r0", *(f"g0{number}-r0" for number in range(6))]
    free = [each for each in shares if each not in held]
    assert preferred(AFFINITY, shares, free, (), 1, held) == ["g07-r0"]
    assert preferred(AFFINITY, shares, ["g00-r1", "g07-r0"], (), 1, held) == ["g07-r0"], "one is left of each"
    assert preferred(AFFINITY, shares, ["g00-r1", "g01-r1"], ("g00-r0",), 2, ()) == ["g00-r0", "g01-r1"]


def test_of_two_equally_good_sets_the_one_is_taken_that_breaks_up_nothing() -> None:
    """Two that are connected with each other, or two that are with what the container must have, and with another."""
    cards = [Card(name, "nvidia", "H100", "nvidia.com/gpu", 0) for name in ("a1", "a2", "b", "c1", "c2", "x")]
    links = [
        Link("a1", "a2", "same-cpu"),
        *(Link(one, other, "cross-cpu") for one, other in [("b", "c1"), ("b", "c2"), ("c1", "x")]),
    ]
    affinity = Affinity(cards, links)
    assert preferred(affinity, whole(cards), ["a1", "a2", "c1", "c2", "x"], ("b",), 3) == ["b", "a1", "a2"]


def test_devices_without_cards_are_devices_all_the_same() -> None:
    assert preferred(AFFINITY, {"a": ("g00",), "b": (), "c": ()}, ["a", "b", "c"], (), 2) == ["a", "b"]


connections: st.SearchStrategy[Connection] = st.sampled_from(["nvlink", "single-switch", "host-bridge", "cross-cpu"])


def worth(affinity: Affinity, free: Sequence[str], must: Sequence[str], chosen: Sequence[str]) -> tuple[int, int]:
    """How well a set is connected, and how little with what it leaves."""
    new, left = [each for each in chosen if each not in must], [each for each in free if each not in chosen]
    return affinity.within(chosen), -sum(affinity.between(one, other) for one in new for other in left)


@given(st.data())
def test_with_few_cards_nothing_is_better_connected_and_breaks_up_less(data: st.DataObject) -> None:
    cards = gpus(data.draw(st.integers(2, 8)), data.draw(st.sampled_from([0, 2, 4])))
    links = [
        Link(one.id, other.id, data.draw(connections), data.draw(st.integers(0, 4)))
        for one, other in combinations(cards, 2)
        if data.draw(st.booleans())
    ]
    affinity = Affinity(cards, links)
    names = [card.id for card in cards]
    free = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2))
    size = data.draw(st.integers(max(1, len(must)), len(free)))
    found = preferred(affinity, whole(cards), free, must, size, ())
    sets = [each for each in combinations(sorted(free), size) if set(must) <= set(each)]
    assert worth(affinity, free, must, found) == max(worth(affinity, free, must, each) for each in sets)
    again = preferred(affinity, whole(cards), data.draw(st.permutations(free)), must, size, ())
    assert found == again, "the order of the question is no matter"


@settings(max_examples=60)
@given(st.data())
def test_the_search_finds_pairs_that_are_far_from_each_other(data: st.DataObject) -> None:
    """On trees of switches with NVLinked pairs, of which some are taken, in place of trying all sets."""
    cards = gpus(16)
    affinity = Affinity(cards, pairs(cards, data.draw(st.integers(1, 18))))
    free = sorted(data.draw(st.sets(st.sampled_from([card.id for card in cards]), min_size=5, max_size=12)))
    size = data.draw(st.integers(2, min(5, len(free) - 1)))
    with mock.patch.object(preference, "EXHAUSTIVE", 0):
        found = preferred(affinity, whole(cards), free, (), size)
    assert affinity.within(found) == max(affinity.within(each) for each in combinations(free, size))


@settings(max_examples=60)
@given(st.data())
def test_the_search_is_never_far_from_the_best(data: st.DataObject) -> None:
    """However cards are connected, in place of trying all sets."""
    cards = gpus(data.draw(st.integers(4, 8)))
    links = [
        Link(one.id, other.id, data.draw(connections), data.draw(st.integers(1, 18)))
        for one, other in combinations(cards, 2)
    ]
    affinity, every = Affinity(cards, links), [card.id for card in cards]
    size = data.draw(st.integers(2, len(cards) - 1))
    with mock.patch.object(preference, "EXHAUSTIVE", 0):
        found = preferred(affinity, whole(cards), every, (), size)
    assert affinity.within(found) >= 0.95 * max(affinity.within(each) for each in combinations(every, size))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("count", "size"), [(64, 8), (64, 62), (200, 8), (200, 100), (10_000, 4), (10_000, 9_999)])
def test_it_is_done_soon_with_as_many_cards_as_there_may_be(count: int, size: int) -> None:
    cards = gpus(count, numa=max(1, count // 2))
    affinity = Affinity(cards, pairs(cards[:64]))
    found = preferred(affinity, whole(cards), [card.id for card in cards], (), size)
    assert len(set(found)) == size


@given(
    st.lists(st.text("ab0", max_size=3)), st.lists(st.text("ab0", max_size=3)), st.integers(-3, 9),
    st.dictionaries(st.text("ab0", max_size=3), st.lists(st.text("ab0", max_size=2), max_size=2).map(tuple)),
)  # fmt: skip
def test_it_never_fails_and_keeps_what_it_must(
    available: list[str], must: list[str], size: int, devices: dict[str, tuple[str, ...]]
) -> None:
    found = preferred(AFFINITY, devices, available, must, size, must)
    kept = {each for each in must if each in devices}
    free = {each for each in available if each in devices} | kept
    assert kept <= set(found) <= free and len(set(found)) == len(found)
    assert len(found) == max(len(kept), min(size, len(free)))
