"""Divides a node's GPUs into disjoint groups, best connected first, for seats whose groups nobody named.

The same GPUs and links always give the same groups, in whatever order they come. Up to 8 GPUs it looks at all
divisions, which are fewer than 2,000. The best is NP-hard to find in general, so beyond that it is greedy, largest
groups first, and then exchanges single GPUs while that connects them better: at most n rounds of O(n^3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from planning.devices.cards import Card, Connection, Link

# As NVIDIA's allocator weighs links (go-gpuallocator, besteffort_policy.go): only sums of pairs are compared.
WORTH: Mapping[Connection, int] = {
    "nvlink": 100,
    "same-board": 60,
    "single-switch": 50,
    "multi-switch": 40,
    "host-bridge": 30,
    "same-cpu": 20,
    "cross-cpu": 10,
}

_ALL = 8  # cards of which every division is looked at

Group = tuple[str, ...]  # ids of cards, by index
Scores = Mapping[str, Mapping[str, int]]


def sizes_for(count: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """How `count` GPUs become groups of these sizes: one of each size in turn, largest first, while GPUs are left.

    Eight for sizes 1, 2 and 4 are 4, 2, 1 and 1. Largest first.
    """
    wanted = sorted({size for size in sizes if size > 0}, reverse=True)
    found: list[int] = []
    left = count
    while fitting := [size for size in wanted if size <= left]:
        for size in fitting:
            if size <= left:
                found.append(size)
                left -= size
    return tuple(sorted(found, reverse=True))


def partitioned(cards: Sequence[Card], links: Iterable[Link], sizes: Iterable[int]) -> tuple[Group, ...]:
    """Disjoint groups of these sizes, as many as the cards are enough for; those with the lowest index first.

    Cards between which no link is told count as of one CPU where both have the same NUMA node.
    """
    ordered = sorted({card.id: card for card in cards}.values(), key=lambda card: (card.index, card.id))
    place = {card.id: number for number, card in enumerate(ordered)}
    scores = _scores(ordered, links)
    fitting: list[int] = []
    for size in sorted(sizes, reverse=True):
        if 0 < size <= len(ordered) - sum(fitting):
            fitting.append(size)
    groups = (_looked_at_all if len(ordered) <= _ALL else _grown)(list(place), fitting, scores)
    inside = (tuple(sorted(group, key=place.__getitem__)) for group in groups)
    return tuple(sorted(inside, key=lambda group: [place[card] for card in group]))


def score(group: Iterable[str], scores: Scores) -> int:
    """The sum of the links within a group."""
    cards = list(group)
    return sum(scores[a][b] for number, a in enumerate(cards) for b in cards[:number])


def _scores(cards: Sequence[Card], links: Iterable[Link]) -> Scores:
    scores = {
        a.id: {b.id: WORTH["same-cpu"] if a.numa is not None and a.numa == b.numa else 0 for b in cards} for a in cards
    }
    told: dict[tuple[str, str], int] = {}
    for link in links:
        if link.a in scores and link.b in scores and link.a != link.b:
            lanes = max(link.lanes, 1) if link.connection == "nvlink" else 1
            told[link.a, link.b] = max(told.get((link.a, link.b), 0), WORTH.get(link.connection, 0) * lanes)
    for (a, b), worth in told.items():
        scores[a][b] = scores[b][a] = max(worth, told.get((b, a), 0))
    return scores


def _looked_at_all(cards: Sequence[str], sizes: Sequence[int], scores: Scores) -> list[list[str]]:
    """Of all divisions the best, and of equals the first, in which low indices are together in large groups."""
    found: list[list[str]] = []
    most = -1

    def divide(free: Sequence[str], left: Counter[int], spare: int, groups: list[list[str]], total: int) -> None:
        nonlocal found, most
        if not +left:
            if total > most:
                found, most = groups, total
            return
        first, rest = free[0], free[1:]
        for size in sorted(+left, reverse=True):
            for others in combinations(rest, size - 1):
                group = [first, *others]
                remaining = [card for card in rest if card not in others]
                divide(remaining, left - Counter((size,)), spare, [*groups, group], total + score(group, scores))
        if spare:
            divide(rest, left, spare - 1, groups, total)

    divide(cards, Counter(sizes), len(cards) - sum(sizes), [], 0)
    return found


def _grown(cards: Sequence[str], sizes: Sequence[int], scores: Scores) -> list[list[str]]:
    free = list(cards)
    groups: list[list[str]] = []
    for size in sizes:
        group = _best(free, size, scores)
        groups.append(group)
        free = [card for card in free if card not in group]
    _exchanged(groups, free, scores)
    return groups


def _best(free: Sequence[str], size: int, scores: Scores) -> list[str]:
    """The best group that grows from any one card, by the card that is connected best to what is there already."""
    found: list[str] = []
    most = -1
    for seed in free:
        group, total = [seed], 0
        gain = {card: scores[card][seed] for card in free if card != seed}
        while len(group) < size:
            card = max(gain, key=gain.__getitem__)  # the first of equals, which has the lowest index
            total += gain.pop(card)
            group.append(card)
            for other in gain:
                gain[other] += scores[other][card]
        if total > most:
            found, most = group, total
    return found


def _exchanged(groups: list[list[str]], spare: list[str], scores: Scores) -> None:
    """Exchanges cards of two groups, or of a group and what is left over, while the sum of all links grows by it."""
    rows = [*groups, spare]
    inside = [True] * len(groups) + [False]  # the links of cards that are left over count for nothing

    def worth(card: str, row: int, without: str) -> int:
        return sum(scores[card][each] for each in rows[row] if each not in (card, without)) if inside[row] else 0

    for _ in range(len(scores)):
        better = False
        for one in range(len(rows)):
            for other in range(one):
                for i in range(len(rows[one])):
                    for j in range(len(rows[other])):
                        a, b = rows[one][i], rows[other][j]
                        now = worth(a, one, a) + worth(b, other, b)
                        if worth(b, one, a) + worth(a, other, b) > now:
                            rows[one][i], rows[other][j] = b, a
                            better = True
        if not better:
            return
