"""Which of the free devices a container is best given: cards that are well connected with each other, and such that
good groups stay whole for others. For GetPreferredAllocation, which the kubelet waits for without a deadline.

In polynomial time: sets are grown greedily from each card and improved by exchanges; where there are few sets, all of
them are tried. Shares of a card and seats on a group are as good as each other, and go to the least crowded one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import combinations
from math import comb
from operator import add, sub

from planning.devices.cards import Card, Connection, Link

# How good it is to have two cards together: the numbers of NVIDIA's go-gpuallocator. Each NVLink counts, and a single
# one outweighs every other connection.
SCORES: Mapping[Connection, int] = {
    "nvlink": 100,
    "same-board": 60,
    "single-switch": 50,
    "multi-switch": 40,
    "host-bridge": 30,
    "same-cpu": 20,
    "cross-cpu": 10,
}
SAME_NUMA = 5  # where the provider tells of no link
EXHAUSTIVE = 1000  # sets of one card less that are all gone through, and so every set is tried: as those of 4 of 16
CONSIDERED = 64  # cards at most; more free ones than on any machine are cut down to those of the fewest NUMA nodes

TWO_BY_TWO = 4096  # that cards times cards times seeds are at most, where sets are grown two by two
MOST_LANES = 32  # between two cards; NVLink has 18
_NEVER = -(1 << 80)  # the worth of what is chosen already

Row = list[int]


class Affinity:
    """How well each two cards are connected; made once for a node's cards and links."""

    def __init__(self, cards: Iterable[Card], links: Iterable[Link]) -> None:
        self._scores: dict[str, dict[str, int]] = {}
        self._numa: dict[str, int] = {}
        parents: dict[str, list[str]] = {}
        for card in cards:
            if card.numa is not None:
                self._numa[card.id] = card.numa
            if card.parent:
                parents.setdefault(card.parent, []).append(card.id)
        for siblings in parents.values():  # instances of one GPU
            for one, other in combinations(siblings, 2):
                self._connect(one, other, SCORES["same-board"])
        for link in links:
            lanes = link.lanes if link.connection == "nvlink" else 1
            self._connect(link.a, link.b, SCORES[link.connection] * min(max(1, lanes), MOST_LANES))

    def between(self, one: str, other: str) -> int:
        """0 for a card with itself: to have two shares of one is nothing that anybody wants."""
        return self.row(one, (other,))[0]

    def row(self, one: str, others: Iterable[str]) -> Row:
        """The same for each of the others."""
        known, numa = self._scores.get(one, {}), self._numa.get(one)
        near = 0 if numa is None else SAME_NUMA
        return [
            0 if other == one else known[other] if other in known else near if self._numa.get(other) == numa else 0
            for other in others
        ]

    def within(self, cards: Sequence[str]) -> int:
        """The sum over all pairs."""
        return sum(self.between(one, other) for one, other in combinations(cards, 2))

    def numa(self, card: str) -> int:
        """The card's NUMA node, -1 where nobody tells."""
        return self._numa.get(card, -1)

    def _connect(self, one: str, other: str, score: int) -> None:
        self._scores.setdefault(one, {})[other] = score
        self._scores.setdefault(other, {})[one] = score


def preferred(
    affinity: Affinity,
    devices: Mapping[str, tuple[str, ...]],
    available: Sequence[str],
    must: Sequence[str],
    size: int,
    taken: Collection[str] = (),
    first: Collection[str] = (),
) -> list[str]:
    """`size` of the available device ids, with all of `must`; as many as there are, if there are fewer. `devices` has
    the cards of each id, `taken` the ids that containers hold; all come of `first` where that has
    enough. Ids that nobody knows are left out. The same question has the same answer. Never raises.
    """
    kept = [each for each in dict.fromkeys(must) if each in devices]
    free = set(available).intersection(devices).difference(kept)
    wanted = size - len(kept)
    if wanted <= 0:
        return kept
    if len(free.intersection(first)) >= wanted:
        free = free.intersection(first)
    if wanted >= len(free):
        return kept + sorted(free)
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for each in free:
        places[devices[each]].append(each)
    mine = [devices[each] for each in kept]
    used = [devices[each] for each in taken if each in devices]
    # How cards are connected matters where each device is a card that nothing else is on.
    whole = len(places) == len(free) and all(len(cards) == 1 for cards in places)
    if whole and places.keys().isdisjoint([*mine, *used]):
        base = [cards[0] for cards in mine if len(cards) == 1]
        best = _connected(affinity, sorted(card for (card,) in places), base, wanted)
        return kept + [places[card,][0] for card in best]
    return kept + _spread(places, mine, used, wanted)


def _spread(
    places: Mapping[tuple[str, ...], list[str]], mine: Iterable[tuple[str, ...]], used: Iterable[tuple[str, ...]],
    wanted: int,
) -> list[str]:  # fmt: skip
    """One of each card (group) before a second of any, the least crowded first: parked seats of a group compete for it,
    as shares of a card do.
    """
    crowd = Counter(card for cards in used for card in cards)
    rounds = Counter(mine)
    order = []
    for cards, ids in places.items():
        crowded = sum(crowd[card] for card in cards)
        order += [(rounds[cards] + number, crowded, each) for number, each in enumerate(nsmallest(wanted, ids))]
    return [each for _, _, each in sorted(order)[:wanted]]


def _connected(affinity: Affinity, free: list[str], base: Sequence[str], wanted: int) -> list[str]:
    """The cards that are best connected with each other and with `base`. Of equally good sets the one that is connected
    least with what it leaves: it breaks up what is broken up already. Of those the first by id.

    With W the sum over the pairs within a set and T the sum of its cards' connections with all that is free, what it is
    connected with what it leaves is T - 2 W. So both goals are sums over cards (`single`) and pairs (`pairs`), and one
    number has both: the first of them times more than the second can ever be.
    """
    if len(free) > CONSIDERED:
        free = _nearest(affinity, free, base, wanted)
    if len(free) == wanted:
        return free
    scores = [affinity.row(one, free) for one in free]
    totals = [sum(row) for row in scores]
    first = 2 * sum(totals) + 1
    pairs = [[(first + 2) * score for score in row] for row in scores]
    single = [first * sum(affinity.row(card, base)) - total for card, total in zip(free, totals, strict=True)]
    few = comb(len(free), wanted - 1) <= EXHAUSTIVE
    chosen = _tried(single, pairs, wanted) if few else _searched(single, pairs, wanted)
    return [free[each] for each in sorted(chosen)]


def _nearest(affinity: Affinity, free: list[str], base: Sequence[str], wanted: int) -> list[str]:
    """So many of the free cards that a choice is left, or as many as are wanted: one NUMA node after another, those of
    `base` first, then the one with the fewest that are enough.
    """
    count = max(CONSIDERED, wanted)
    nodes: dict[int, list[str]] = {}
    for card in free:
        nodes.setdefault(affinity.numa(card), []).append(card)
    near = {affinity.numa(card) for card in base}
    order = sorted(nodes, key=lambda numa: (numa not in near, len(nodes[numa]) < wanted, len(nodes[numa]), numa))
    return sorted([card for numa in order for card in nodes[numa]][:count])


def _tried(single: Row, pairs: list[Row], wanted: int) -> list[int]:
    """The best of all sets."""
    best: tuple[int, list[int]] | None = None

    def choose(start: int, chosen: list[int], worth: int, gains: Row) -> None:
        nonlocal best
        if len(chosen) == wanted - 1:
            rest = gains[start:]
            most = max(rest)
            if best is None or worth + most > best[0]:
                best = worth + most, [*chosen, start + rest.index(most)]
            return
        for each in range(start, len(single) - (wanted - 1 - len(chosen))):
            choose(each + 1, [*chosen, each], worth + gains[each], list(map(add, gains, pairs[each])))

    choose(0, [], 0, single)
    return best[1] if best is not None else []


def _searched(single: Row, pairs: list[Row], wanted: int) -> list[int]:
    """The best of the sets that are grown from each card, one by one and two by two; the same set is improved once."""
    count = len(single)
    start = [gain + max(row) for gain, row in zip(single, pairs, strict=True)]
    seeds = sorted(range(count), key=lambda each: -start[each])
    found = [_grown(single, pairs, seed, wanted, 1) for seed in seeds]
    found += [_grown(single, pairs, seed, wanted, 2) for seed in seeds[: max(1, TWO_BY_TWO // count**2)]]
    least = min(min(row[:number]) for number, row in enumerate(pairs) if number)
    distinct = {frozenset(each): each for each in found}
    return max((_improved(single, pairs, least, each) for each in distinct.values()), key=lambda each: each[0])[1]


def _grown(single: Row, pairs: list[Row], seed: int, wanted: int, step: int) -> list[int]:
    """From the seed the best connected next card, and so on; in steps of two once it has a partner, which finds pairs
    that are far from each other.
    """
    chosen: list[int] = []
    gains, found = list(single), [seed]
    while True:
        for each in found:
            chosen.append(each)
            gains = list(map(add, gains, pairs[each]))
            gains[each] = _NEVER
        left = wanted - len(chosen)
        if left == 0:
            return chosen
        found = [gains.index(max(gains))] if step == 1 or len(chosen) == 1 or left == 1 else _two(gains, pairs)


def _two(gains: Row, pairs: list[Row]) -> list[int]:
    """The two that are the best to have together."""
    worth, best = 2 * _NEVER, [0, 0]
    for one, gain in enumerate(gains):
        both = list(map(add, gains, pairs[one]))
        both[one] = _NEVER
        if gain + max(both) > worth:
            worth, best = gain + max(both), [one, both.index(max(both))]
    return best


def _improved(single: Row, pairs: list[Row], least: int, chosen: list[int]) -> tuple[int, list[int]]:
    """The set after exchanges of one card for another, the best first, as long as there is one that makes it better:
    at most as many as there are cards. `least` is the worst connection of two. With what the set is worth.
    """
    inside = list(chosen)
    gains = list(single)  # of each card, with what is inside
    for each in inside:
        gains = list(map(add, gains, pairs[each]))
    outside = [each for each in range(len(single)) if each not in chosen]
    for _ in single:
        best, place, other = 0, -1, -1
        offers = [gains[each] for each in outside]
        most = max(offers)
        for number, each in enumerate(inside):
            if most - gains[each] - least <= best:  # it would not do whatever it is exchanged for
                continue
            row = pairs[each]
            for candidate, gain in zip(outside, offers, strict=True):
                won = gain - gains[each] - row[candidate]
                if won > best:
                    best, place, other = won, number, candidate
        if place < 0:
            break
        left, inside[place] = inside[place], other
        outside[outside.index(other)] = left
        gains = list(map(sub, map(add, gains, pairs[other]), pairs[left]))
    return sum(single[each] for each in inside) + sum(pairs[a][b] for a, b in combinations(inside, 2)), inside
