"""Which of the free devices a container is best given: cards that are well connected with each other, and such that
good groups stay whole for others. For GetPreferredAllocation.

In polynomial time: sets are grown greedily from each card and improved by exchanges, O(n^3) for n cards; only where
there are few sets are all of them tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb

from planning.devices.cards import Card, Connection, Link

# How good it is to have two cards together; an NVLink outweighs any number of switches.
SCORES: Mapping[Connection, int] = {
    "nvlink": 0,
    "same-board": 60,
    "single-switch": 50,
    "multi-switch": 40,
    "host-bridge": 30,
    "same-cpu": 20,
    "cross-cpu": 10,
}
PER_LANE = 100
_SAME_NUMA = 5  # where nothing better is known
_EXHAUSTIVE = 2000  # sets that are all tried
_EXCHANGES = 64  # beyond so many free cards sets are grown and not improved: everybody is connected alike then


class Affinity:
    """How well each two cards are connected; made once for a node's cards and links."""

    def __init__(self, cards: Iterable[Card], links: Iterable[Link]) -> None:
        known = list(cards)
        self._scores: dict[str, dict[str, int]] = {card.id: {} for card in known}
        sockets: dict[int, list[str]] = {}
        for card in known:
            if card.numa is not None:
                sockets.setdefault(card.numa, []).append(card.id)
        self._socket = {card: numa for numa, each in sockets.items() for card in each}
        for link in links:
            score = SCORES[link.connection] + PER_LANE * link.lanes
            self._scores.setdefault(link.a, {})[link.b] = score
            self._scores.setdefault(link.b, {})[link.a] = score
        self.told = any(self._scores.values())

    def between(self, one: str, other: str) -> int:
        """0 for a card with itself: to have two shares of one is nothing that anybody wants."""
        if one == other:
            return 0
        score = self._scores.get(one, {}).get(other)
        if score is not None:
            return score
        socket = self._socket.get(one)
        return _SAME_NUMA if socket is not None and socket == self._socket.get(other) else 0

    def within(self, cards: Sequence[str]) -> int:
        """The sum over all pairs."""
        return sum(self.between(one, other) for one, other in combinations(cards, 2))


def preferred(
    affinity: Affinity,
    devices: Mapping[str, tuple[str, ...]],
    available: Sequence[str],
    must: Sequence[str],
    size: int,
    taken: Collection[str] = (),
) -> list[str]:
    """`size` of the available device ids, with all of `must`; as many as there are, if there are fewer. `devices` has
    the cards of each id, `taken` the ids that containers hold. Ids that nobody knows are left out. The same question
    has the same answer.
    """
    kept = [each for each in dict.fromkeys(must) if each in devices]
    free = sorted({each for each in available if each in devices} - set(kept))
    wanted = size - len(kept)
    if wanted <= 0:
        return kept
    if wanted >= len(free):
        return kept + free
    # Shares and seats of one card (group) are as good as each other: the least crowded ones go first.
    crowd = Counter(card for each in taken if each in devices for card in devices[each])
    order = sorted(free, key=lambda each: (sum(crowd[card] for card in devices[each]), each))
    if not affinity.told or all(len(devices[each]) != 1 for each in free):
        return kept + _spread(order, devices, wanted)
    return kept + _connected(affinity, devices, order, kept, wanted)


def _spread(order: Sequence[str], devices: Mapping[str, tuple[str, ...]], wanted: int) -> list[str]:
    """One of each card (group) before a second of any."""
    rounds: Counter[tuple[str, ...]] = Counter()
    ranked = []
    for place, each in enumerate(order):
        ranked.append((rounds[devices[each]], place, each))
        rounds[devices[each]] += 1
    return [each for _, _, each in sorted(ranked)[:wanted]]


def _connected(
    affinity: Affinity, devices: Mapping[str, tuple[str, ...]], order: Sequence[str], kept: Sequence[str], wanted: int
) -> list[str]:
    card = {each: devices[each][0] for each in (*order, *kept) if devices[each]}
    base = [card[each] for each in kept if each in card]
    pool = [each for each in order if each in card]
    if comb(len(pool), wanted) <= _EXHAUSTIVE:
        sets: Iterable[tuple[str, ...]] = combinations(pool, wanted)
    else:
        seeds = pool if not kept else pool[:1]
        grown = (_grown(affinity, card, pool, base, seed, wanted) for seed in seeds)
        sets = (_improved(affinity, card, pool, base, each) for each in grown)
    best = max(sets, key=lambda each: _worth(affinity, card, pool, base, each))
    return list(best)


def _worth(
    affinity: Affinity, card: Mapping[str, str], pool: Sequence[str], base: Sequence[str], chosen: Sequence[str]
) -> tuple[int, int]:
    """First how well the set is connected; then how little it is connected with what it leaves: it breaks up least."""
    mine = [card[each] for each in chosen]
    inside = affinity.within([*base, *mine])
    if len(pool) > _EXCHANGES:
        return inside, 0
    left = [card[each] for each in pool if each not in chosen]
    return inside, -sum(affinity.between(one, other) for one in mine for other in left)


def _grown(
    affinity: Affinity, card: Mapping[str, str], pool: Sequence[str], base: Sequence[str], seed: str, wanted: int
) -> tuple[str, ...]:
    """From what is there already and the seed, the best connected next one, and so on."""
    chosen = [] if base else [seed]
    gain = {each: sum(affinity.between(card[each], other) for other in base) for each in pool if each not in chosen}
    for each in gain:
        gain[each] += sum(affinity.between(card[each], card[other]) for other in chosen)
    while len(chosen) < wanted:
        best = max(gain, key=lambda each: gain[each])  # the first of several, which is the least crowded
        chosen.append(best)
        del gain[best]
        for each in gain:
            gain[each] += affinity.between(card[each], card[best])
    return tuple(chosen)


def _improved(
    affinity: Affinity, card: Mapping[str, str], pool: Sequence[str], base: Sequence[str], chosen: tuple[str, ...]
) -> tuple[str, ...]:
    """Exchanges one for one while that makes the set better; each makes it strictly better, so it ends."""
    if len(pool) > _EXCHANGES:
        return chosen
    inside = list(chosen)
    worth = _worth(affinity, card, pool, base, inside)
    for _ in range(len(pool)):
        best = None
        for place in range(len(inside)):
            for other in pool:
                if other in inside:
                    continue
                tried = [*inside[:place], other, *inside[place + 1 :]]
                found = _worth(affinity, card, pool, base, tried)
                if found > worth:
                    worth, best = found, tried
        if best is None:
            break
        inside = best
    return tuple(inside)
