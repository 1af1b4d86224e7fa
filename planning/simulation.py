"""What a strategy would have made of a trace: filling a fleet with arrivals, or living through them in simulated time.

For `berth simulate` and the benchmarks. The same index and the same strategies decide as in production; only time is
simulated, and that a request which has a place runs at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from planning.capacity import Room
from planning.filters import Shape
from planning.fleet import Fleet, Place
from planning.model import GPU_MODEL_LABEL, NodeView
from planning.strategies import Request, Strategy
from planning.typical import Fragments, Kind, Typical, typical


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: who asks for what, when, and for how long it runs (both in seconds)."""

    name: str
    tenant: str
    shape: Shape
    kind: Kind
    at: float = 0.0
    seconds: float = 0.0

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
    curve: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Lived:
    """How long arrivals waited for a place, in seconds, in the order in which they came; and GPUs allocated meanwhile.

    unplaced: those that no node could ever hold. allocated: mean share until the last arrival, in percent.
    """

    waits: list[tuple[Arrival, float]]
    unplaced: int
    allocated: float


def typical_of(arrivals: Iterable[Arrival]) -> tuple[Typical, ...]:
    """What a trace typically asks for."""
    return typical((arrival.kind, 1.0) for arrival in arrivals)


def fill(nodes: Sequence[NodeView], queue: Iterable[Arrival], strategy: Strategy, seed: int) -> Filled:
    """Places arrivals until they have asked for all GPUs there are. Who finds no place is given up."""
    fleet, gpu_milli = _empty(nodes), capacity(nodes)
    asked = allocated = unplaced = decisions = 0
    curve: list[float] = []
    seen: list[Arrival] = []
    for number, arrival in enumerate(queue):
        if asked + arrival.gpu_milli > gpu_milli:
            break
        asked += arrival.gpu_milli
        place = _find(fleet, arrival, number, strategy, seed)
        decisions += 1
        if place is None:
            unplaced += 1
        else:
            fleet.take(place, arrival.shape.requests)
            allocated += arrival.gpu_milli
        while len(curve) <= 100 * asked // gpu_milli:
            curve.append(100 * allocated / gpu_milli)
        seen.append(arrival)
    fragments = Fragments(typical_of(seen))
    left = sum(fragments.on(node.labels.get(GPU_MODEL_LABEL, ""), cpu, devices) for node, cpu, devices in fleet.left())
    return Filled(100 * (1 - allocated / gpu_milli), 100 * left / gpu_milli, unplaced, decisions, curve)


def compressed(arrivals: Sequence[Arrival], gpu_milli: int, load: float) -> list[Arrival]:
    """The arrivals with the same runs, so much closer together that their GPU-seconds are `load` of those there are.

    Raises ValueError if the trace has no times to compress.
    """
    work = sum(arrival.gpu_milli * arrival.seconds for arrival in arrivals)
    first = min((arrival.at for arrival in arrivals), default=0.0)
    span = max((arrival.at for arrival in arrivals), default=0.0) - first
    if work <= 0 or span <= 0:
        raise ValueError("the pods have no creation and deletion times")
    pace = work / (load * gpu_milli) / span
    ordered = sorted(arrivals, key=lambda arrival: arrival.at)
    return [
        Arrival(each.name, each.tenant, each.shape, each.kind, (each.at - first) * pace, each.seconds)
        for each in ordered
    ]


def live(nodes: Sequence[NodeView], arrivals: Sequence[Arrival], strategy: Strategy, seed: int) -> Lived:
    """Places arrivals, oldest first, as others end; one that does not fit does not hold up a later one that does."""
    return _Life(nodes, arrivals, strategy, seed).lived()


class _Life:
    """A fleet in simulated time."""

    def __init__(self, nodes: Sequence[NodeView], arrivals: Sequence[Arrival], strategy: Strategy, seed: int) -> None:
        self._fleet, self._never_used = _empty(nodes), _empty(nodes)
        self._gpu_milli = capacity(nodes)
        self._arrivals, self._strategy, self._seed = arrivals, strategy, seed
        self._last_arrival = arrivals[-1].at if arrivals else 0.0
        self._waiting: dict[Shape, deque[int]] = {}
        self._running: list[tuple[float, int, Place]] = []
        self._began: dict[int, float] = {}
        self._used, self._busy, self._now = 0, 0.0, 0.0

    def lived(self) -> Lived:
        never: set[int] = set()
        for number, arrival in enumerate(self._arrivals):
            while self._running and self._running[0][0] <= arrival.at:
                self._end_next()
            self._pass_until(arrival.at)
            if arrival.shape in self._waiting:
                self._waiting[arrival.shape].append(number)
            elif not self._begin(number):
                if _find(self._never_used, arrival, number, self._strategy, self._seed) is None:
                    never.add(number)
                else:
                    self._waiting[arrival.shape] = deque([number])
        while self._waiting:  # what waits fits an empty node, so something runs
            self._end_next()
        waits = [
            (arrival, self._began[number] - arrival.at)
            for number, arrival in enumerate(self._arrivals)
            if number not in never
        ]
        whole = self._gpu_milli * self._last_arrival
        return Lived(waits, len(never), 100 * self._busy / whole if whole else 0.0)

    def _pass_until(self, now: float) -> None:
        until = min(now, self._last_arrival)
        self._busy += self._used * max(0.0, until - self._now)
        self._now = now

    def _begin(self, number: int) -> bool:
        arrival = self._arrivals[number]
        place = _find(self._fleet, arrival, number, self._strategy, self._seed)
        if place is None:
            return False
        self._fleet.take(place, arrival.shape.requests)
        self._used += arrival.gpu_milli
        self._began[number] = self._now
        heappush(self._running, (self._now + arrival.seconds, number, place))
        return True

    def _end_next(self) -> None:
        """The next one ends, and who waits gets its place: the oldest of each shape, for younger ones fit no better."""
        at, number, place = heappop(self._running)
        self._pass_until(at)
        arrival = self._arrivals[number]
        self._fleet.give_back(place, arrival.shape.requests)
        self._used -= arrival.gpu_milli
        oldest = sorted(queue[0] for queue in self._waiting.values())
        while oldest:
            number = heappop(oldest)
            shape = self._arrivals[number].shape
            if not self._begin(number):
                continue
            queue = self._waiting[shape]
            queue.popleft()
            if queue:
                heappush(oldest, queue[0])
            else:
                del self._waiting[shape]


def capacity(nodes: Iterable[NodeView]) -> int:
    """Thousandths of GPUs on all nodes."""
    return sum(node.allocatable.gpus for node in nodes) * 1000


def _empty(nodes: Iterable[NodeView]) -> Fleet:
    return Fleet(
        (node, Room(whole.gpus, whole.cpu_milli, whole.memory, whole.pods))
        for node in nodes
        for whole in (node.allocatable,)
    )


def _find(fleet: Fleet, arrival: Arrival, number: int, strategy: Strategy, seed: int) -> Place | None:
    request = Request(str(number), arrival.tenant, arrival.name, arrival.shape.requests, seed)
    return fleet.find(request, arrival.shape, strategy)
