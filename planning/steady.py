"""What a strategy makes of work that comes and goes: who waits for a place, and for how long.

For `berth simulate --load` and the benchmarks. Whoever waits is tried in turn whenever something changed; what fits is
placed, and room is kept for the first that finds none, as in rounds of placement where nobody may be stopped, has a
deadline or a quota. Tests hold it against such rounds, which would take minutes for what takes seconds here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from planning.filters import Shape, able_when_empty, refusal
from planning.fleet import Place
from planning.model import WHOLE, NodeView, Resources
from planning.orders import Order, Submission
from planning.simulation import empty
from planning.strategies import Candidate, Rank, Request, Strategy

# As in a round (planning.turns): for how many at most room is kept at once.
_KEPT = 64

_Entry = tuple[float, float, int]
"""What orders those who wait: the rank, when it came, its number."""


@dataclass(frozen=True, slots=True)
class Running:
    """A submission that has its place, since when, and until when."""

    number: int
    place: Place
    since: float
    until: float


class Simulation:
    """Nodes, and submissions in the order in which they come; they are known by their number in it.

    started: when each got its place; None: not yet. Those that fit on no node even when it is empty never wait.
    """

    def __init__(
        self, nodes: Sequence[NodeView], submissions: Sequence[Submission], strategy: Strategy, order: Order, seed: int
    ) -> None:
        self.submissions: list[Submission] = []
        self.started: list[float | None] = []
        self.now = -inf
        self.fleet = empty(nodes)
        self.running: dict[int, Running] = {}
        self.gpu_milli = 0  # allocated now
        self.gpu_seconds = 0.0  # allocated so far, in thousandths
        self._nodes = {node.name: node for node in nodes}
        self._strategy, self._order, self._seed = strategy, order, seed
        self._ends: list[tuple[float, int]] = []
        self._next = 0
        self._waiting: dict[Shape, list[_Entry]] = {}
        self._kept: list[tuple[Place, Resources]] = []
        self._roomiest: dict[Shape, _Roomiest] = {}
        self._possible: dict[Shape, bool] = {}
        self._usable: dict[tuple[Shape, str], bool] = {}
        for each in submissions:
            self.submit(each)

    def submit(self, submission: Submission) -> None:
        """One more, which comes no earlier than those before it."""
        self.submissions.append(submission)
        self.started.append(None)
        if submission.shape not in self._possible:
            self._possible[submission.shape] = bool(fitting(self._nodes.values(), (submission.shape,)))

    @property
    def waiting(self) -> list[int]:
        """The numbers of those who wait, the next one first."""
        return [number for *_, number in sorted(entry for line in self._waiting.values() for entry in line)]

    @property
    def upcoming(self) -> float:
        """When something comes or ends next; inf if nothing does."""
        comes = self.submissions[self._next].at if self._next < len(self.submissions) else inf
        return min(comes, self._ends[0][0] if self._ends else inf)

    def advance(self, until: float) -> None:
        """All that happens up to that moment."""
        while (moment := self.upcoming) <= until and moment < inf:
            self._pass(moment)
            self._moment()
        if until < inf:
            self._pass(until)

    def _pass(self, moment: float) -> None:
        if self.now > -inf:
            self.gpu_seconds += self.gpu_milli * (moment - self.now)
        self.now = moment

    def _moment(self) -> None:
        """What ends now leaves, what comes now waits, and then everybody has a turn."""
        while self._ends and self._ends[0][0] <= self.now:
            ended = self.running.pop(heappop(self._ends)[1])
            submission = self.submissions[ended.number]
            self.fleet.give_back(ended.place, submission.shape.requests)
            self.gpu_milli -= submission.gpu_milli
            self._order.ended(submission, self.now)
        while self._next < len(self.submissions) and self.submissions[self._next].at <= self.now:
            number, submission = self._next, self.submissions[self._next]
            self._next += 1
            if not self._possible[submission.shape]:
                continue
            entry = (self._order.rank(submission, self.now), submission.at - submission.ran, number)
            heappush(self._waiting.setdefault(submission.shape, []), entry)
        for place, amount in self._kept:
            self.fleet.give_back(place, amount)
        self._kept.clear()
        self._turns()

    def _turns(self) -> None:
        """One after the other; where one of a shape finds no place, no other of that shape would."""
        heads = [(line[0], shape) for shape, line in self._waiting.items()]
        queue = [(entry, index) for index, (entry, _) in enumerate(heads)]
        heapify(queue)
        while queue:
            (*_, number), index = heappop(queue)
            shape = heads[index][1]
            if not self._placed(number, shape):
                self._keep(shape)
                continue
            line = self._waiting[shape]
            heappop(line)
            if line:
                heappush(queue, (line[0], index))
            else:
                del self._waiting[shape]

    def _placed(self, number: int, shape: Shape) -> bool:
        submission, need = self.submissions[number], shape.requests
        request = Request(str(number), submission.tenant, submission.name, need, self._seed)
        place = self.fleet.find(request, shape, self._strategy)
        if place is None:
            return False
        self.fleet.take(place, need)
        self.gpu_milli += submission.gpu_milli
        self.started[number] = self.now
        running = self.running[number] = Running(number, place, self.now, self.now + submission.seconds)
        heappush(self._ends, (running.until, number))
        return True

    def _keep(self, shape: Shape) -> None:
        """Room is kept for one among those that could use it."""
        if len(self._kept) >= _KEPT or any(self._could_use(shape, place.node) for place, _ in self._kept):
            return
        roomiest = self._roomiest.get(shape)
        if roomiest is None:
            roomiest = self._roomiest[shape] = _Roomiest(shape, len(self._roomiest))
        nothing = Resources()
        found = self.fleet.find(Request("", "", "", nothing), Shape(nothing, shape.constraints), roomiest)
        if found is not None:
            self._kept.append((self.fleet.keep(found.node, shape.requests), shape.requests))

    def _could_use(self, shape: Shape, name: str) -> bool:
        """Whether the request may be on the node, and could if it were empty (planning.floor.competes)."""
        key = shape, name
        if key not in self._usable:
            node = self._nodes[name]
            self._usable[key] = not refusal(shape.constraints, node) and able_when_empty(shape, node)
        return self._usable[key]


def fitting(nodes: Collection[NodeView], shapes: Iterable[Shape]) -> set[Shape]:
    """The shapes that fit on some node when it is empty."""
    return {shape for shape in shapes if any(able_when_empty(shape, node) for node in nodes)}


class _Roomiest:
    """The node on which room is kept for a shape where nobody can tell when anything ends: the most free GPUs of those
    that could hold it (planning.floor.kept_for). For the fleet's index, as a strategy of its own for each shape.
    """

    steady = True

    def __init__(self, shape: Shape, number: int) -> None:
        self.name = f"roomiest-{number}"
        self._shape = shape

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        return not able_when_empty(self._shape, candidate.node), -candidate.devices.count(WHOLE)
