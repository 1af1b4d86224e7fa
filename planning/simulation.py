"""What a strategy would have made of a trace: a fleet is filled with arrivals, none of which ever ends.

For `berth simulate` and the benchmarks. The same index and the same strategies decide as in production.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planning.capacity import whole
from planning.filters import Shape
from planning.fleet import Fleet, Place
from planning.model import WHOLE, NodeView
from planning.strategies import Request, Strategy
from planning.typical import Fragments, Kind, Typical, typical


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    name: str
    shape: Shape
    kind: Kind

    @property
    def gpu_milli(self) -> int:
        need = self.shape.requests
        return need.gpus * need.gpu_milli


@dataclass(slots=True)
class Filled:
    """A fleet after arrivals without an end. Shares are of all its GPUs, in percent.

    curve: allocated, at each percent that was asked for so far.
    """

    unallocated: float
    fragments: float
    unplaced: int
    decisions: int
    curve: list[float]


def typical_of(arrivals: Iterable[Arrival]) -> tuple[Typical, ...]:
    """What a trace typically asks for."""
    return typical((arrival.kind, 1.0) for arrival in arrivals)


def fill(nodes: Sequence[NodeView], queue: Iterable[Arrival], strategy: Strategy, seed: int) -> Filled:
    """Places arrivals until they have asked for all GPUs there are, or none is left. Who finds no place is given up."""
    fleet, gpu_milli = empty(nodes), capacity(nodes)
    asked = allocated = unplaced = decisions = 0
    curve: list[float] = []
    seen: list[Arrival] = []
    for number, arrival in enumerate(queue):
        if asked >= gpu_milli:
            break
        asked += arrival.gpu_milli
        place = _find(fleet, arrival, number, strategy, seed)
        decisions += 1
        if place is None:
            unplaced += 1
        else:
            fleet.take(place, arrival.shape.requests)
            allocated += arrival.gpu_milli
        while len(curve) <= min(100, 100 * asked // gpu_milli):
            curve.append(100 * allocated / gpu_milli)
        seen.append(arrival)
    fragments = Fragments(typical_of(seen))
    left = sum(fragments.on(node.model_of(""), cpu, devices) for node, cpu, devices in fleet.left())
    return Filled(100 * (1 - allocated / gpu_milli), 100 * left / gpu_milli, unplaced, decisions, curve)


def capacity(nodes: Iterable[NodeView]) -> int:
    """Thousandths of GPUs on all nodes."""
    return sum(node.allocatable.gpus for node in nodes) * WHOLE


def empty(nodes: Iterable[NodeView]) -> Fleet:
    """The nodes, with nothing on them."""
    return Fleet((node, whole(node)) for node in nodes)


def _find(fleet: Fleet, arrival: Arrival, number: int, strategy: Strategy, seed: int) -> Place | None:
    request = Request(str(number), "", arrival.name, arrival.shape.requests, seed)
    return fleet.find(request, arrival.shape, strategy)
