"""What is typically asked for, and how much of a node's free GPUs such requests could not use: its fragmentation.

For the strategies that avoid it. Source: Weng et al., "Beware of Fragmentation" (ATC 2023), section 3: for each typical
request, weighted by how often it comes, all that is free is a fragment if the node cannot hold the request, and else
what is free on GPUs that have less than it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
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


@dataclass(frozen=True, slots=True)
class Typical:
    """A kind of request and its share of all requests that are typical."""

    kind: Kind
    share: float


def typical(asked: Iterable[tuple[Kind, float]]) -> tuple[Typical, ...]:
    """The most frequent kinds, and with what share; `asked` are kinds with how often, in any order and repeatedly."""
    weights: dict[Kind, float] = {}
    for kind, weight in asked:
        weights[kind] = weights.get(kind, 0.0) + weight
    total, covered = sum(weights.values()), 0.0
    chosen: list[tuple[Kind, float]] = []
    for kind, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        if covered >= COVERAGE * total:
            break
        chosen.append((kind, weight))
        covered += weight
    # In steps, so that one workload more or less among thousands mostly changes nothing: whoever knows the same typical
    # requests as before still knows what it found out about nodes.
    return tuple(Typical(kind, round(weight / covered, 3)) for kind, weight in chosen)


Known = TypeVar("Known")
Usable = Callable[[Kind, Devices], Iterable[tuple[int, float]]]
"""What requests of a kind could use of the free GPUs: thousandths, each with the free CPU that it takes in all."""


def once(kind: Kind, devices: Devices) -> Iterable[tuple[int, float]]:
    """All GPUs that have enough, if one request fits: the paper's."""
    enough = [free for free in devices if free >= kind.gpu_milli]
    return [(kind.cpu_milli, sum(enough))] if len(enough) >= kind.gpus else []


def as_often_as_it_fits(kind: Kind, devices: Devices) -> Iterable[tuple[int, float]]:
    """The same GPUs, but in equal parts for as many requests as fit there: what CPU is left for counts only."""
    enough = [free for free in devices if free >= kind.gpu_milli]
    if kind.gpu_milli < WHOLE:
        parts = [free / (free // kind.gpu_milli) for free in enough for _ in range(free // kind.gpu_milli)]
    else:
        times = len(enough) // kind.gpus
        parts = [WHOLE * len(enough) / times] * times if times else []
    return [(number * kind.cpu_milli, part) for number, part in enumerate(parts, 1)]


class Fragments:
    """How many thousandths of GPUs are fragments on a node, for a fixed set of typical requests.

    A request without GPUs cannot use any: all that is free counts in full for it, whatever becomes of the node.
    """

    def __init__(self, requests: Iterable[Typical], usable: Usable = once) -> None:
        self._typical = tuple(requests)
        self._usable = usable
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
            takers = tuple(t for t in self._typical if t.kind.gpus and (not t.kind.models or model in t.kind.models))
            self._of_model[model] = takers
        parts = sorted((cpu, each.share * part) for each in takers for cpu, part in self._usable(each.kind, devices))
        usable = [0.0, *accumulate(part for _, part in parts)]
        table = self._share * sum(devices), [cpu for cpu, _ in parts], usable
        self._tables[model, devices] = table
        return table


class ByResource(dict[str, Known]):
    """For each GPU resource what `make` finds out of its typical requests: no other can use those GPUs."""

    def __init__(self, requests: Iterable[Typical], make: Callable[[tuple[Typical, ...]], Known]) -> None:
        super().__init__()
        self._typical, self._make = tuple(requests), make

    def __missing__(self, resource: str) -> Known:
        mine = (each for each in self._typical if each.kind.resource == resource or not each.kind.gpus)
        self[resource] = self._make(tuple(mine))
        return self[resource]
