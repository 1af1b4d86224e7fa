"""Finds the best node for a request among very many, by looking only at what changed since the last such request.

For the placement round and the simulation. For a shape of request and a strategy that are asked for again it keeps a
heap of the nodes that hold it; a placement changes one node, and each heap learns of it when it is asked again. So a
decision costs what happened since, not the number of nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice

from planning.capacity import Room
from planning.filters import Constraints, Shape, refusal
from planning.model import WHOLE, Devices, NodeView, Resources
from planning.strategies import Candidate, Rank, Request, Strategy

# A node may say of itself whatever it likes: beyond so many GPUs nobody counts.
_MOST_GPUS = 1024
# After so many rounds in which nobody asked for it, a view of the nodes is forgotten.
_ROUNDS = 20
# Shapes that were asked for once only, of which that is remembered.
_ONCE = 10_000

# A heap entry: rank, the node's name (ties), free thousandths of the chosen GPU, the node's version, its index.
_Entry = tuple[Rank, str, int, int, int]


@dataclass(frozen=True, slots=True)
class Place:
    """A node, and which of its GPUs: their indices, as the fleet counts them."""

    node: str
    devices: tuple[int, ...]


@dataclass(slots=True)
class _Gpus:
    """A node's GPUs of one resource: free thousandths of each, the same with the most first, and how many are whole."""

    free: list[int]
    devices: Devices = ()
    whole: int = 0

    def __post_init__(self) -> None:
        self.count()

    def count(self) -> None:
        self.devices = tuple(sorted(self.free, reverse=True))
        self.whole = self.devices.count(WHOLE)


_NONE = _Gpus([])


@dataclass(slots=True)
class _Node:
    """A node and what is left on it; its GPUs by resource."""

    view: NodeView
    cpu_milli: int
    memory: int
    pods: int
    gpus: dict[str, _Gpus]
    version: int = 0

    def same(self, other: _Node) -> bool:
        """Whether just as much is left, on a node that offers the same."""
        return (
            self.cpu_milli == other.cpu_milli
            and self.memory == other.memory
            and self.pods == other.pods
            and all(self.gpus[resource].devices == gpus.devices for resource, gpus in other.gpus.items())
        )

    def of(self, resource: str) -> _Gpus:
        return self.gpus.get(resource, _NONE)

    def holds(self, need: Resources, gpus: _Gpus) -> bool:
        """`gpus`: its own of the resource that is asked for."""
        if need.cpu_milli > self.cpu_milli or need.memory > self.memory or need.pods > self.pods:
            return False
        if need.gpu_milli == WHOLE or not need.gpus:
            return need.gpus <= gpus.whole
        return bool(gpus.devices) and need.gpu_milli <= gpus.devices[0]


@dataclass(slots=True)
class _View:
    """The nodes that hold one shape, the best first, as one strategy ranks them, after `seen` changes of the log.

    `asked`: in which round it was last of use.
    """

    heap: list[_Entry]
    seen: int
    asked: int


class Fleet:
    """Nodes with what is left on them. Strategies whose ranks are not steady are asked about every node each time.

    What it finds depends on nothing but that; what it has found out before only makes it faster. Views are made of what
    is asked for a second time, and hold `most` entries in all (a view: one for each node that holds its shape); None
    for as many as there are.
    """

    def __init__(self, nodes: Iterable[tuple[NodeView, Room]], most: int | None = None) -> None:
        self._round = 0
        self._most = most
        self._begin([_node(view, left) for view, left in nodes])

    def refresh(self, nodes: Iterable[tuple[NodeView, Room]]) -> None:
        """The nodes as they are now, for another round: what is known of those that did not change stays."""
        self._round += 1
        now = [_node(view, left) for view, left in nodes]
        if self._index.keys() - {node.view.name for node in now}:
            self._begin(now)
            return
        for node in now:
            index = self._index.get(node.view.name)
            if index is None:
                index = self._index[node.view.name] = len(self._nodes)
                self._nodes.append(node)
                for constraints, allowed in self._open.items():
                    allowed.append(not refusal(constraints, node.view))
                self._changed(index)
                continue
            known = self._nodes[index]
            if not _alike(known.view, node.view):
                for constraints, allowed in self._open.items():
                    allowed[index] = not refusal(constraints, node.view)
            elif known.same(node):
                known.view = node.view
                continue
            node.version = known.version + 1
            self._nodes[index] = node
            self._changed(index)
        for key, view in list(self._views.items()):
            if view.asked < self._round - _ROUNDS:
                del self._views[key]
        if len(self._once) > _ONCE:
            self._once.clear()
            for name in self._newest.keys() - {strategy.name for strategy, _ in self._views}:
                del self._newest[name]
        used = {shape.constraints for _, shape in self._views}
        for constraints in [each for each in self._open if each not in used]:
            del self._open[constraints]

    def _begin(self, nodes: list[_Node]) -> None:
        self._nodes = nodes
        self._index = {node.view.name: i for i, node in enumerate(nodes)}
        self._open: dict[Constraints, list[bool]] = {}
        self._views: dict[tuple[Strategy, Shape], _View] = {}
        self._newest: dict[str, Strategy] = {}
        self._once: set[tuple[Strategy, Shape]] = set()
        self._log: list[int] = []
        self._logged = 0  # how many changes were dropped from the log's beginning

    def find(self, request: Request, shape: Shape, strategy: Strategy, avoided: Collection[str] = ()) -> Place | None:
        """The best place for the request now, on none of the `avoided` nodes; None if no other node holds it."""
        heap = self._heap(request, shape, strategy)
        if heap is None:
            ranked = self._ranked(range(len(self._nodes)), request, shape, strategy)
            best = min((entry for entry in ranked if entry[1] not in avoided), default=None)
            return self._place(best, shape) if best else None
        aside: list[_Entry] = []
        found: Place | None = None
        while heap:
            entry = heap[0]
            _, name, _, version, index = entry
            if self._nodes[index].version != version:
                heappop(heap)
                continue
            if name in avoided:
                aside.append(heappop(heap))
                continue
            found = self._place(entry, shape)
            break
        for entry in aside:
            heappush(heap, entry)
        return found

    def _place(self, entry: _Entry, shape: Shape) -> Place:
        _, name, free, _, index = entry
        gpus = self._nodes[index].of(shape.requests.gpu_resource)
        return Place(name, _chosen(gpus.free, shape.requests, free))

    def best(self, request: Request, shape: Shape, strategy: Strategy, limit: int) -> list[tuple[str, Rank]]:
        """The first `limit` nodes by rank, for people; each is looked at."""
        entries = nsmallest(limit, self._ranked(range(len(self._nodes)), request, shape, strategy))
        return [(name, rank) for rank, name, *_ in entries]

    def take(self, place: Place, requests: Resources) -> None:
        """The request is there from now on."""
        self._change(place, requests, -1)

    def give_back(self, place: Place, requests: Resources) -> None:
        """The request is there no longer."""
        self._change(place, requests, 1)

    def keep(self, name: str, requests: Resources) -> Place:
        """So much less is free on the node; of its GPUs, as many as there are. `give_back` undoes it."""
        gpus = self._nodes[self._index[name]].of(requests.gpu_resource)
        whole = (i for i, each in enumerate(gpus.free) if each == WHOLE)
        place = Place(name, tuple(islice(whole, requests.gpus)))
        self._change(place, requests, -1)
        return place

    def left(self) -> Iterator[tuple[NodeView, int, Devices]]:
        """Each node with its free CPU and GPUs of the resource that it has first."""
        for node in self._nodes:
            yield node.view, node.cpu_milli, node.of(node.view.allocatable.gpu_resource).devices

    @property
    def remembered(self) -> int:
        """How many entries the views hold, outdated ones among them."""
        return sum(len(view.heap) for view in self._views.values())

    def _change(self, place: Place, requests: Resources, sign: int) -> None:
        index = self._index[place.node]
        node = self._nodes[index]
        node.cpu_milli += sign * requests.cpu_milli
        node.memory += sign * requests.memory
        node.pods += sign * requests.pods
        if place.devices:
            gpus = node.gpus[requests.gpu_resource]
            for device in place.devices:
                gpus.free[device] += sign * requests.gpu_milli
            gpus.count()
        node.version += 1
        self._changed(index)

    def _changed(self, index: int) -> None:
        self._log.append(index)
        if len(self._log) > 4 * len(self._nodes) + 1000:
            half = len(self._log) // 2
            del self._log[:half]
            self._logged += half

    def _heap(self, request: Request, shape: Shape, strategy: Strategy) -> list[_Entry] | None:
        """The ranked nodes that hold the shape, among outdated entries of any; None if no view is kept of it."""
        if not strategy.steady:
            return None
        now, key = self._logged + len(self._log), (strategy, shape)
        view = self._views.get(key)
        if view is None and key not in self._once:
            self._supersede(strategy)
            self._once.add(key)
            return None
        if view is None or view.seen < self._logged or len(view.heap) > 2 * len(self._nodes) + 1000:
            view = _View(self._ranked(range(len(self._nodes)), request, shape, strategy), now, self._round)
            heapify(view.heap)
            self._views.pop(key, None)
            self._views[key] = view
            self._forget_the_oldest()
            return view.heap
        view.asked = self._round
        if view.seen < now:
            changed = set(self._log[view.seen - self._logged :])
            for entry in self._ranked(changed, request, shape, strategy):
                heappush(view.heap, entry)
            view.seen = now
        return view.heap

    def _supersede(self, strategy: Strategy) -> None:
        """Nobody asks any more for one that knew something else of what is typical."""
        if self._newest.get(strategy.name) is not strategy:
            self._newest[strategy.name] = strategy
            for key in [key for key in self._views if key[0].name == strategy.name and key[0] is not strategy]:
                del self._views[key]
            self._once = {key for key in self._once if key[0].name != strategy.name}

    def _forget_the_oldest(self) -> None:
        """Keeps within `most`, but for the newest view."""
        if self._most is None:
            return
        held = sum(len(view.heap) for view in self._views.values())
        for key in list(self._views)[:-1]:
            if held <= self._most:
                return
            held -= len(self._views.pop(key).heap)

    def _ranked(self, indices: Iterable[int], request: Request, shape: Shape, strategy: Strategy) -> list[_Entry]:
        """An entry for each of the nodes that hold the request."""
        allowed = self._open.get(shape.constraints)
        if allowed is None:
            allowed = [not refusal(shape.constraints, node.view) for node in self._nodes]
            self._open[shape.constraints] = allowed
        need, nodes, resource = shape.requests, self._nodes, shape.requests.gpu_resource
        entries = []
        for index in indices:
            if not allowed[index]:
                continue
            node = nodes[index]
            gpus = node.gpus.get(resource, _NONE)
            if node.holds(need, gpus):
                entries.append(_entry(node, gpus.devices, index, request, strategy))
        return entries


def _entry(node: _Node, devices: Devices, index: int, request: Request, strategy: Strategy) -> _Entry:
    """How the strategy ranks the node; where a part of a GPU is asked for, with the best of its GPUs."""
    need = request.requests
    candidate = Candidate(node.view, node.cpu_milli, node.memory, devices, devices)
    if need.gpu_milli == WHOLE or not need.gpus:
        if need.gpus:
            candidate.after = devices[need.gpus :] + (0,) * need.gpus
        return strategy.rank(request, candidate), node.view.name, WHOLE, node.version, index
    offers: list[tuple[Rank, int]] = []
    for free in dict.fromkeys(devices):
        if free < need.gpu_milli:
            break
        at = devices.index(free)
        candidate.after = tuple(sorted((*devices[:at], free - need.gpu_milli, *devices[at + 1 :]), reverse=True))
        offers.append((strategy.rank(request, candidate), free))
    rank, chosen = min(offers)
    return rank, node.view.name, chosen, node.version, index


def _chosen(gpus: list[int], need: Resources, free: int) -> tuple[int, ...]:
    """The indices of the GPUs: as many whole ones, or the first with just so much free."""
    if not need.gpus:
        return ()
    if need.gpu_milli == WHOLE:
        return tuple(i for i, each in enumerate(gpus) if each == WHOLE)[: need.gpus]
    return (gpus.index(free),)


def _node(view: NodeView, left: Room) -> _Node:
    gpus = {}
    for resource, offered in view.allocatable.gpus_by_resource():
        free = left.of(resource)
        gpus[resource] = _Gpus([WHOLE if i < free else 0 for i in range(min(offered, _MOST_GPUS))])
    return _Node(view, left.cpu_milli, left.memory, left.pods, gpus)


def _alike(known: NodeView, now: NodeView) -> bool:
    """Whether filters and strategies see the same: nearly every write to a node changes its version alone."""
    return known is now or (
        known.ready == now.ready
        and known.unschedulable == now.unschedulable
        and known.taints == now.taints
        and known.labels == now.labels
        and known.allocatable == now.allocatable
    )
