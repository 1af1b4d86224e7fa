"""Which devices a container is best given: against every possible set where there are few, and quickly where many."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.devices.cards import Card, Link
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
        near = "nvlink" if a // 2 == b // 2 else "single-switch" if a // 4 == b // 4 else "cross-cpu"
        found.append(Link(one.id, other.id, near, lanes if near == "nvlink" else 0))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("count", [16, 64])
def test_where_not_all_sets_can_be_tried_the_best_of_a_clear_case_is_found(count: int) -> None:
    cards = gpus(count, numa=count // 2)
    affinity = Affinity(cards, pairs(cards))
    found = preferred(affinity, whole(cards), [card.id for card in cards][1:], (), 4, ())
    assert sorted(found) == ["g04", "g05", "g06", "g07"]


connections = st.sampled_from(["nvlink", "single-switch", "host-bridge", "cross-cpu"])


@given(st.data())
def test_with_few_cards_nothing_is_better_connected(data: st.DataObject) -> None:
    cards = gpus(data.draw(st.integers(2, 8)))
    links = [
        Link(one.id, other.id, data.draw(connections), data.draw(st.integers(0, 4)))
        for one, other in combinations(cards, 2)
    ]
    affinity = Affinity(cards, links)
    names = [card.id for card in cards]
    free = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2))
    size = data.draw(st.integers(1, len(free)))
    found = preferred(affinity, whole(cards), free, must, size, ())
    best = max(
        (affinity.within(each) for each in combinations(free, max(size, len(must))) if set(must) <= set(each)),
    )
    assert affinity.within(found) == best if affinity.told else True


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
