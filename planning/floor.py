"""The nodes during a round of placement: what is left on them, what is kept free for whom, what is known of shapes.

For the placement round alone, which takes and keeps; it decides nothing about whose turn it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from crds.settings import Settings
from planning import strategies
from planning.caches.preference import WarmFirst
from planning.caches.warmth import Cache
from planning.capacity import Room, whole
from planning.demand import learned
from planning.filters import Constraints, Shape, able_when_empty, explain_never, explain_now, lacking, refusal, slots
from planning.fleet import Place
from planning.memory import Memory
from planning.model import NodeView, Resources, Snapshot, Stopped, Turn, Warmth, WorkloadView
from planning.places import Gang, times
from planning.quotas import firm
from planning.reservations import Claim
from planning.strategies import Request, Strategy
from planning.times import timestamp
from planning.windows import Window

Kind = tuple[Shape, Gang | None]


@dataclass(frozen=True, slots=True)
class Wish:
    """A workload that wants a place now. `shape`: of one pod; `limit`: the retries that it allows; `until`: when it
    will have ended at the latest (inf: nobody can tell); `window`: the GPUReservation on whose GPUs alone it runs;
    `resumes`: the stopped Job that is to go on; `caches`: the kernel caches that its pods mount.
    """

    view: WorkloadView
    turn: Turn
    shape: Shape
    strategy: str
    limit: int
    gang: Gang | None = None
    until: float = inf
    window: Window | None = None
    resumes: Stopped | None = None
    caches: tuple[Cache, ...] = ()

    @property
    def need(self) -> Resources:
        """The least that it must get, of its quota and of nodes."""
        return self.shape.requests if self.gang is None else times(self.shape.requests, self.gang.least)

    def beside(self, other: Resources) -> Resources:
        """What it and another need of a quota."""
        mine = self.need
        return Resources(mine.gpus + other.gpus, mine.cpu_milli + other.cpu_milli, mine.memory + other.memory)

    @property
    def kind(self) -> Kind:
        """Two of one kind fit or do not fit alike."""
        return self.shape, self.gang

    @property
    def stays(self) -> float:
        """Until when it cannot be stopped, once it has its place."""
        return self.until if firm(self.view) else -inf


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept free on a node for the workload at the head of the queue, until `start` (None: nobody can tell).
    What is kept for a GPUReservation is a `Claim` on the node, from its start on.
    """

    view: WorkloadView
    node: str
    amount: Resources
    start: float | None


class Floor:
    """The nodes during one round: what is left on them, and what was found out about shapes so far."""

    def __init__(
        self, snapshot: Snapshot, settings: Settings, left: dict[str, Room], memory: Memory,
        claims: Mapping[str, Claim] | None = None,
    ) -> None:  # fmt: skip
        self.nodes, self.left, self.claims = snapshot.nodes, left, claims or {}
        for name, claim in self.claims.items():
            left[name] = claim.left()
        self._now, self._claimed = snapshot.now, list(self.claims)
        self._tried: dict[tuple[Shape, float], int] = {}  # how many of the claimed nodes have no room for such a one
        self.full: set[Kind] = set()  # for whom there is no room now
        self._spent: dict[str, set[Shape]] = {}  # the same of the rooms of reservations
        self._never: dict[Shape, bool] = {}
        self.kept: list[Kept] = []
        self._kept_on: dict[str, list[Kept]] = {}  # the same by node
        self._index = {node.name: i for i, node in enumerate(snapshot.nodes)}
        self._competing: dict[Shape, tuple[int, bool]] = {}  # and among the first how many that are kept
        self._fleet = memory.fleet
        self._fleet.refresh((node, left[node.name]) for node in snapshot.nodes)
        self._messages: dict[Shape, str] = {}
        self._refusals: dict[Constraints, list[str]] = {}
        self._strategies: dict[str, Strategy] = {}
        self._memory, self._warm = memory, snapshot.warm
        shape = partial(memory.shape, settings=settings)
        self._learned = partial(learned, snapshot.workloads, shape, snapshot.now, snapshot.profiles)

    def take(self, wish: Wish, strategy: str, seed: int, avoided: Collection[str] = ()) -> str:
        """The node that holds the request from now on; '' if none does, but for those to avoid."""
        place = self.put(wish, strategy, seed, avoided)
        return place.node if place is not None else ""

    def put(self, wish: Wish, strategy: str, seed: int, avoided: Collection[str]) -> Place | None:
        """Gives one pod its place; `take_back` undoes it exactly. Raises StrategyError."""
        view, shape, need = wish.view, wish.shape, wish.shape.requests
        request = Request(view.uid, view.namespace, view.name, need, seed)
        place = self._fleet.find(request, shape, self._preferring(wish, strategy), avoided)
        if place is not None:
            self._fleet.take(place, need)
            self.left[place.node].take(need)
            if claim := self.claims.get(place.node):
                claim.take(need, wish.stays)
        return place

    def take_back(self, wish: Wish, place: Place, need: Resources) -> None:
        """As if the pod had not been put there."""
        self._fleet.give_back(place, need)
        self.left[place.node].give_back(need)
        if claim := self.claims.get(place.node):
            claim.give_back(need, wish.stays)
            self._true_up(place.node)

    def take_reserved(self, wish: Wish, window: Window, avoided: Collection[str] = ()) -> str:
        """The node on which the request holds GPUs of its window from now on: of the warmest the fullest; '' if there
        is none.
        """
        need = wish.shape.requests
        if wish.shape in self._spent.setdefault(window.uid, set()):
            return ""
        fits = [
            name
            for name in window.nodes
            if need.gpus <= window.left(name) and not lacking(need, self.claims[name].free) and self._suits(wish, name)
        ]
        if not fits:
            self._spent[window.uid].add(wish.shape)
            return ""
        ready = self.ready(wish)
        node = min(fits, key=lambda name: (name in avoided, -ready.get(name, 0), window.left(name), name))
        self.hold_reserved(wish, window, node)
        return node

    def slots_reserved(self, wish: Wish, window: Window) -> dict[str, int]:
        """How many such requests hold GPUs of their window now, by node."""
        found = {}
        for node in self.suited(wish.shape, window):
            free = slots(wish.shape.requests, self.claims[node.name].free)
            if count := min(free, window.slots(node.name, wish.shape.requests.gpus)):
                found[node.name] = count
        return found

    def hold_reserved(self, wish: Wish, window: Window, node: str, pods: int = 1) -> None:
        """So many requests hold GPUs of their window there from now on, or will when who is being stopped is gone."""
        held = times(wish.shape.requests, pods)
        window.used.setdefault(node, Room(0, 0, 0, 0)).give_back(held)
        self.claims[node].free.take(held)
        self._true_up(node)

    def suited(self, shape: Shape, window: Window) -> Iterator[NodeView]:
        """The window's nodes that take such a request and have as many of its GPUs left."""
        for node in self.allowed(shape):
            if shape.requests.gpus <= window.left(node.name):
                yield node

    def keep(self, kept: Kept) -> None:
        """Nobody is given `kept.amount` on its node from now on, but by `take_kept`."""
        self.kept.append(kept)
        self._kept_on.setdefault(kept.node, []).append(kept)
        self._fleet.keep(kept.node, kept.amount)
        self.left[kept.node].take(kept.amount)
        if claim := self.claims.get(kept.node):
            claim.free.take(kept.amount)
        self._messages.clear()

    def competes(self, shape: Shape) -> bool:
        """Whether room that this one might use too is kept already for another workload."""
        looked, found = self._competing.get(shape, (0, False))
        if not found and looked < len(self.kept):
            nodes = dict.fromkeys(kept.node for kept in self.kept[looked:])
            found = any(self._contested(shape, name) for name in nodes)
            self._competing[shape] = len(self.kept), found
        return found

    def _contested(self, shape: Shape, name: str) -> bool:
        """Whether the request could use what is kept on the node: the same GPUs, or CPU, memory or pods of which the
        node has not enough for it beside. Who waits for other GPUs there is in nobody's way.
        """
        node, need, kept = self.nodes[self._index[name]], shape.requests, self._kept_on[name]
        if self._refused(shape.constraints)[self._index[name]] or not able_when_empty(shape, node):
            return False
        if any(each.amount.gpu_resource == need.gpu_resource for each in kept):
            return True
        rest = whole(node)
        for each in kept:
            rest.take(each.amount)
        return bool(lacking(Resources(0, need.cpu_milli, need.memory, need.pods), rest))

    def kept_near(self, wish: Wish) -> list[Kept]:
        """What is kept, first on the nodes where the most of the request's kernel caches are Ready."""
        ready = self.ready(wish)
        return sorted(self.kept, key=lambda kept: -ready.get(kept.node, 0)) if ready else self.kept

    def take_kept(self, wish: Wish, kept: Kept) -> bool:
        """Gives the request room on that node, out of what is kept there too; False if it does not fit."""
        claim = self.claims.get(kept.node)
        if not self._fits(wish.shape, kept) or (claim and lacking(wish.shape.requests, claim.slack(wish.stays))):
            return False
        self._take_between(wish, kept.node)
        return True

    def take_claimed(self, wish: Wish) -> tuple[str, float | None] | None:
        """A node where it gets room out of what is kept for reservations, as it can be stopped or ends before that is
        needed; and until when it may have it for sure, if it cannot be stopped.
        """
        need, stays, ready = wish.shape.requests, wish.stays, self.ready(wish)
        untried: Iterable[int] = range(self._tried.get((wish.shape, stays), 0), len(self._claimed))
        if ready:
            untried = sorted(untried, key=lambda i: -ready.get(self._claimed[i], 0))
        for i in untried:
            node = self._claimed[i]
            claim = self.claims[node]
            if not lacking(need, claim.left(stays)) and self._suits(wish, node):
                if not ready:
                    self._tried[wish.shape, stays] = i
                self._take_between(wish, node)
                return node, None if stays == -inf else claim.lent_until(stays)
        self._tried[wish.shape, stays] = len(self._claimed)
        return None

    def _take_between(self, wish: Wish, node: str) -> None:
        if claim := self.claims.get(node):
            claim.take(wish.shape.requests, wish.stays)
            self._true_up(node)
        else:
            self.left[node].take(wish.shape.requests)
            self._fleet.keep(node, wish.shape.requests)

    def _true_up(self, node: str) -> None:
        """What is left is no more than the reservations leave."""
        left, now = self.left[node], self.claims[node].left()
        less = Resources.counting(
            ((resource, count - now.of(resource)) for resource, count in left.gpus_by_resource()),
            max(0, left.cpu_milli - now.cpu_milli),
            max(0, left.memory - now.memory),
            max(0, left.pods - now.pods),
        )
        self._fleet.keep(node, replace(less, other_gpus=()))
        for resource, count in less.other_gpus:
            self._fleet.keep(node, Resources(count, gpu_resource=resource))
        left.take(less)

    def _suits(self, wish: Wish, node: str) -> bool:
        return not self._refused(wish.shape.constraints)[self._index[node]]

    def reserve(self, wish: Wish, node: str, need: Resources) -> Place:
        """Nobody is given this on the node from now on: it is somebody's who must wait for those that still hold it.
        `take_back` undoes it.
        """
        self.left[node].take(need)
        if claim := self.claims.get(node):
            claim.take(need, wish.stays)
        self._messages.clear()
        return self._fleet.keep(node, need)

    def unpromised(self, node: str) -> Room:
        """What is left on the node, reserved or not, but for what is free there now and kept for those who are first:
        what comes free later is nobody's yet.
        """
        claim = self.claims.get(node)
        free = (self.left[node] if claim is None else claim.free).copy()
        for kept in self._kept_on.get(node, ()):
            now, amount = free.copy(), kept.amount
            now.give_back(amount)
            kind = amount.gpu_resource
            free.add_gpus(kind, now.of(kind) - free.of(kind) - min(amount.gpus, max(now.of(kind), 0)))
            free.cpu_milli = now.cpu_milli - min(amount.cpu_milli, max(now.cpu_milli, 0))
            free.memory = now.memory - min(amount.memory, max(now.memory, 0))
            free.pods = now.pods - min(amount.pods, max(now.pods, 0))
        return free

    def allowed(self, shape: Shape) -> Iterator[NodeView]:
        """The nodes that take such a request if there is room."""
        for node, why in zip(self.nodes, self._refused(shape.constraints), strict=True):
            if not why:
                yield node

    def never(self, shape: Shape) -> bool:
        """Whether no node could hold the shape even empty."""
        if shape not in self._never:
            self._never[shape] = not any(able_when_empty(shape, node, self._now) for node in self.nodes)
        return self._never[shape]

    def explain(self, shape: Shape) -> str:
        if shape not in self._messages:
            if self.never(shape):
                self._messages[shape] = explain_never(shape, self.nodes)
            else:
                text = explain_now(shape, self.nodes, self.left, self._refused(shape.constraints))
                self._messages[shape] = text + self._because_of_the_kept(shape)
        return self._messages[shape]

    def _because_of_the_kept(self, shape: Shape) -> str:
        """What to add where it would fit if nothing were kept free."""
        found = next(self._free_but_reserved(shape), None)
        if found is None:
            kept = next((kept for kept in self.kept if self._fits(shape, kept)), None)
            if kept is None:
                return ""
            found = kept.node, f"{kept.view.namespace}/{kept.view.name}, which is before it"
        node, whom = found
        return (
            f"; what is free on node {node} is kept for {whom}"
            " (preemptible work may use it meanwhile, and work whose activeDeadlineSeconds end in time)"
        )

    def _free_but_reserved(self, shape: Shape) -> Iterator[tuple[str, str]]:
        """Nodes where it would fit, and the first reservation that keeps it off."""
        for node, claim in self.claims.items():
            if lacking(shape.requests, claim.free) or self._refused(shape.constraints)[self._index[node]]:
                continue
            window = claim.keeper(shape.requests)
            if window is not None:
                yield node, f"GPUReservation {window.name} from {timestamp(window.start)} on"

    def _fits(self, shape: Shape, kept: Kept) -> bool:
        """Whether the request fits on the node with what is kept there."""
        left = self.left[kept.node]
        left.give_back(kept.amount)
        fits = not lacking(shape.requests, left)
        left.take(kept.amount)
        return fits and not self._refused(shape.constraints)[self._index[kept.node]]

    def _refused(self, constraints: Constraints) -> list[str]:
        """Why each node refuses such requests, whatever is free; '' where it does not."""
        found = self._refusals.get(constraints)
        if found is None:
            found = self._refusals[constraints] = [refusal(constraints, node) for node in self.nodes]
        return found

    def ready(self, wish: Wish) -> Mapping[str, int]:
        """By node, how many of the kernel caches that the request mounts are Ready there, where any is."""
        return self._warm_first(wish, wish.strategy).counts if wish.caches else {}

    def warmth(self, wish: Wish, nodes: Iterable[str]) -> Warmth | None:
        """How warm the nodes are for a request that is given them; None if it mounts no caches."""
        if not wish.caches:
            return None
        known = self._warm_first(wish, wish.strategy)
        return Warmth(len(wish.caches), min(known.counts.get(node, 0) for node in nodes), known.most)

    def _preferring(self, wish: Wish, name: str) -> Strategy:
        """The strategy, with the request's kernel caches before it where any is Ready on some node."""
        if not wish.caches:
            return self._strategy(name)
        known = self._warm_first(wish, name)
        return known if known.most else self._strategy(name)

    def _warm_first(self, wish: Wish, name: str) -> WarmFirst:
        return self._memory.warm_first(self._strategy(name), wish.caches, self._warm)

    def _strategy(self, name: str) -> Strategy:
        known = self._strategies.get(name)
        if known is None:
            known = self._strategies[name] = strategies.informed(name, self._learned)
        return known


def kept_for(
    view: WorkloadView, shape: Shape, floor: Floor, releases: Mapping[str, list[tuple[float, Resources]]]
) -> Kept | None:
    """Where the workload at the head of the queue will fit first, and what must be kept free there until then.

    `releases`: by node, what is held there and the moment at which it will be free at the latest (inf: unknown).
    """
    best: tuple[float, int, str] | None = None
    for node in floor.allowed(shape):
        if not able_when_empty(shape, node):
            continue
        left = floor.left[node.name]
        start = _start(shape.requests, left, releases.get(node.name, ()))
        key = (start, -max(0, left.of(shape.requests.gpu_resource)), node.name)
        if best is None or key < best:
            best = key
    if best is None:
        return None
    start, _, name = best
    freed = Room(0, 0, 0, 0)
    if start < inf:
        for moment, held in releases.get(name, ()):
            if moment <= start:
                freed.give_back(held)
    return Kept(view, name, beyond(shape.requests, freed), start if start < inf else None)


def beyond(need: Resources, freed: Room) -> Resources:
    """What of a request must be free beside what comes free."""
    return Resources(
        max(0, need.gpus - freed.of(need.gpu_resource)),
        max(0, need.cpu_milli - freed.cpu_milli),
        max(0, need.memory - freed.memory),
        max(0, need.pods - freed.pods),
        gpu_resource=need.gpu_resource,
    )


def _start(need: Resources, left: Room, releases: Iterable[tuple[float, Resources]]) -> float:
    """When so much will be free; inf if nobody can tell."""
    free = left.copy()
    for moment, held in sorted(releases, key=lambda each: each[0]):
        free.give_back(held)
        if not lacking(need, free):
            return moment
    return inf
