"""What is typically asked for and what rarely; how much of a node's free GPUs typical requests could not use: its
fragmentation; and for how many GPUs' worth of rare ones it has room.

For the strategies that look ahead. Source of the former: Weng et al., "Beware of Fragmentation" (ATC 2023), section 3:
for each typical request, weighted by how often it comes, all that is free is a fragment if the node cannot hold the
request, and else what is free on GPUs that have less than it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from planning.model import WHOLE, Devices

# Of all requests, the most frequent kinds that make up this share are typical.
COVERAGE = 0.95
# Tables kept: each is one state of a node's GPUs. A fleet has some thousands; more only wastes memory.
_TABLES = 50_000


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What tells one typical request from another. `models`: the GPU models it takes; none for any.

    `resource`: of its GPUs, '' for the installation's.
    """

    gpus: int
    gpu_milli: int
    cpu_milli: int
    models: tuple[str, ...] = ()
    resource: str = ""

    def takes(self, model: str) -> bool:
        """Whether it could use GPUs of that model."""
        return bool(self.gpus) and (not self.models or model in self.models)


@dataclass(frozen=True, slots=True)
class Typical:
    """A kind of request and its share of all requests that are typical; or if `rare`, of all for GPUs that are."""

    kind: Kind
    share: float
    rare: bool = False


def typical(asked: Iterable[tuple[Kind, float]]) -> tuple[Typical, ...]:
    """The most frequent kinds, and with what share; `asked` are kinds with how often, in any order and repeatedly.

    After them the other kinds that ask for GPUs, which are rare.
    """
    weights: dict[Kind, float] = {}
    for kind, weight in asked:
        weights[kind] = weights.get(kind, 0.0) + weight
    total, covered = sum(weights.values()), 0.0
    chosen: list[tuple[Kind, float]] = []
    rest: list[tuple[Kind, float]] = []
    for kind, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        if covered < COVERAGE * total:
            chosen.append((kind, weight))
            covered += weight
        elif kind.gpus:
            rest.append((kind, weight))
    # In steps, so that one workload more or less among thousands mostly changes nothing: whoever knows the same typical
    # requests as before still knows what it found out about nodes. Coarser ones for the rest, of which there are few.
    uncovered = sum(weight for _, weight in rest)
    found = [Typical(kind, round(weight / covered, 3)) for kind, weight in chosen]
    found += [Typical(kind, share, rare=True) for kind, weight in rest if (share := round(weight / uncovered, 2))]
    return tuple(found)


Known = TypeVar("Known")


class Fragments:
    """How many thousandths of GPUs are fragments on a node, for a fixed set of typical requests; rare ones are ignored.

    A request without GPUs cannot use any: all that is free counts in full for it, whatever becomes of the node.
    """

    def __init__(self, requests: Iterable[Typical]) -> None:
        self._typical = tuple(each for each in requests if not each.rare)
        self._share = sum(each.share for each in self._typical)
        self._of_model: dict[str, tuple[Typical, ...]] = {}
        self._tables: dict[tuple[str, Devices], tuple[float, list[int], list[float]]] = {}

    def on(self, model: str, cpu_milli: int, devices: Devices) -> float:
        """The fragments on a node of that GPU model with so much free."""
        table = self._tables.get((model, devices))
        if table is None:
            table = self._table(model, devices)
        all_free, steps, usable = table
        return all_free - usable[bisect_right(steps, cpu_milli)]

    def _table(self, model: str, devices: Devices) -> tuple[float, list[int], list[float]]:
        """What is free, weighted; and what of it is usable: by how much CPU that takes, the sums so far."""
        if len(self._tables) >= _TABLES:
            self._tables.clear()
        takers = self._of_model.get(model)
        if takers is None:
            takers = tuple(each for each in self._typical if each.kind.takes(model))
            self._of_model[model] = takers
        usable = _up_to((each.kind.cpu_milli, each.share * _enough(each.kind, devices)) for each in takers)
        table = self._share * sum(devices), *usable
        self._tables[model, devices] = table
        return table


def _enough(kind: Kind, devices: Devices) -> int:
    """Thousandths of all GPUs that have enough, if one request fits."""
    enough = [free for free in devices if free >= kind.gpu_milli]
    return sum(enough) if len(enough) >= kind.gpus else 0


class Room:
    """How many of a node's whole GPUs rare requests for such could use: each kind alone, weighted by its share.

    As for fragments, all that are free are usable if it fits; but in equal parts for as many of it as there are GPUs
    for, and of these parts only those for which there is CPU. A request for a part of a GPU finds one nearly anywhere.
    """

    def __init__(self, requests: Iterable[Typical]) -> None:
        self._rare = tuple(each for each in requests if each.rare and each.kind.gpu_milli == WHOLE)
        self._tables: dict[tuple[str, int], tuple[list[int], list[float]]] = {}

    def on(self, model: str, cpu_milli: int, whole: int) -> float:
        """On a node of that GPU model with so much CPU and so many whole GPUs free."""
        table = self._tables.get((model, whole))
        if table is None:
            table = self._tables[model, whole] = _up_to(self._parts(model, whole))
        steps, room = table
        return room[bisect_right(steps, cpu_milli)]

    def _parts(self, model: str, whole: int) -> Iterator[tuple[int, float]]:
        for each in self._rare:
            if each.kind.takes(model):
                times = whole // each.kind.gpus
                for number in range(1, times + 1):
                    yield number * each.kind.cpu_milli, each.share * whole / times


def _up_to(parts: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps of free CPU, and the sum of all parts that take no more: below the first step, and from each one on."""
    known = sorted(parts)
    return [cpu for cpu, _ in known], [0.0, *accumulate(part for _, part in known)]


class ByResource(dict[str, Known]):
    """For each GPU resource what `make` finds out of its typical requests: no other can use those GPUs."""

    def __init__(self, requests: Iterable[Typical], make: Callable[[tuple[Typical, ...]], Known]) -> None:
        super().__init__()
        self._typical, self._make = tuple(requests), make

    def __missing__(self, resource: str) -> Known:
        mine = (each for each in self._typical if each.kind.resource == resource or not each.kind.gpus)
        self[resource] = self._make(tuple(mine))
        return self[resource]
