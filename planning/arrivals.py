"""What is coming: nodes whose GPUs are not usable yet, or their memory not known, and for whom they will suffice.

For the orders of a placement round, and for the workflow of an order before it tries again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from crds.gpuworkload import MAX_GPUS
from crds.settings import Settings
from planning.capacity import Belongings, Room, room
from planning.filters import Constraints, Shape, affine, refusal, repelling_taint, slots, too_small
from planning.gangs import domain_of
from planning.held import visible
from planning.model import NodeView, Snapshot
from planning.places import Gang, times


@dataclass(slots=True)
class Arrival:
    """A node whose GPUs are not allocatable yet. `counted`: whether it is known how many it will have. `untold`: they
    are, but for those who ask for memory of which its labels do not tell yet.
    """

    node: NodeView
    room: Room
    counted: bool
    untold: bool = False

    def slots(self, shape: Shape, now: float) -> int:
        """How many such requests it will hold; one, where nobody knows."""
        asked = shape.constraints
        if self.untold and not (asked.gpu_memory and not self.node.memory_of(asked.gpu_resource)):
            return 0
        if affine(asked, self.node) or too_small(asked, self.node, now):
            return 0
        if repelling_taint(asked, self.node, lasting=True):
            return 0
        found = slots(shape.requests, self.room)
        return found if self.counted else min(found, 1)


class Arrivals:
    """What is coming, and for how many it suffices: whoever is served has claimed it. A gang is served by what is free
    as well: `left`, by node, as it is when somebody asks.
    """

    def __init__(self, nodes: Iterable[NodeView], left: Mapping[str, Room], now: float) -> None:
        self._nodes, self._now = tuple(nodes), now
        new = [node for node in self._nodes if node.is_new(now) and not (node.unschedulable or node.out_of_service)]
        self._coming = [_arrival(node, left[node.name]) for node in new if _unusable(node)]
        self._coming += [
            Arrival(node, left[node.name].copy(), counted=True, untold=True) for node in new if _untold(node)
        ]
        self._left = left
        self._claimed: dict[str, Room] = {}  # by gangs, of what is free
        self._suited: dict[Constraints, list[NodeView]] = {}
        self._in_vain: dict[tuple[Shape, str], int] = {}  # so many of these, or more, find no room

    def serve(self, shape: Shape, gang: Gang | None = None) -> bool:
        """Whether it will fit on nodes that are coming, beside those who were served before; a gang on these and what
        is free. Where not all of its pods do, nothing is claimed.
        """
        pods, level = (gang.least, gang.level if gang.required else "") if gang is not None else (1, "")
        if not self._coming or pods >= self._in_vain.get((shape, level), pods + 1):
            return False
        if gang is None or not level:
            found = self._serve(shape, pods, self._free(shape) if gang is not None else [], self._coming)
        else:
            found = self._in_one_domain(shape, gang)
        if not found:
            self._in_vain[shape, level] = pods
        return found

    def _in_one_domain(self, shape: Shape, gang: Gang) -> bool:
        there, coming = dict[str, list[NodeView]](), dict[str, list[Arrival]]()
        for node in self._free(shape):
            there.setdefault(domain_of(gang, node), []).append(node)
        for arrival in self._coming:
            coming.setdefault(domain_of(gang, arrival.node), []).append(arrival)
        return any(
            self._serve(shape, gang.least, there.get(domain, []), coming[domain]) for domain in sorted(coming) if domain
        )

    def _serve(self, shape: Shape, pods: int, there: Iterable[NodeView], coming: Iterable[Arrival]) -> bool:
        need, claims, arrivals = shape.requests, list[tuple[str, int]](), list[tuple[Arrival, int]]()
        for node in there:
            free = self._left[node.name].copy()
            if claimed := self._claimed.get(node.name):
                free.take(claimed.as_resources())
            if count := min(slots(need, free), pods):
                claims.append((node.name, count))
                pods -= count
        for arrival in coming:
            if pods and (count := min(arrival.slots(shape, self._now), pods)):
                arrivals.append((arrival, count))
                pods -= count
        if pods or not arrivals:  # who needs no more than is free has another reason to wait
            return False
        for name, count in claims:
            self._claimed.setdefault(name, Room(0, 0, 0, 0)).give_back(times(need, count))
        for arrival, count in arrivals:
            arrival.room.take(times(need, count))
            if not arrival.counted:
                self._coming.remove(arrival)
        return True

    def _free(self, shape: Shape) -> list[NodeView]:
        """The nodes that take such a request now if there is room: also one of which other GPUs are yet to come."""
        if shape.constraints not in self._suited:
            self._suited[shape.constraints] = [each for each in self._nodes if not refusal(shape.constraints, each)]
        return self._suited[shape.constraints]


def coming_for(shape: Shape, gang: Gang | None, snapshot: Snapshot, settings: Settings) -> bool:
    """Whether nodes are coming that will hold such a workload, whoever else may want them."""
    held = visible(snapshot, Belongings.of(snapshot.jobs, snapshot.pods), settings)
    return Arrivals(snapshot.nodes, room(snapshot.nodes, held), snapshot.now).serve(shape, gang)


def _unusable(node: NodeView) -> bool:
    return bool(node.gaps) or (not node.ready and node.allocatable.gpus > 0)


def _untold(node: NodeView) -> bool:
    """Whether it has GPUs that are usable, of which no label tells the memory."""
    return node.ready and any(n and not node.memory_of(each) for each, n in node.allocatable.gpus_by_resource())


def _arrival(node: NodeView, left: Room) -> Arrival:
    # Of a node that is ready only what it does not offer yet is coming.
    there = Room(0, left.cpu_milli, left.memory, left.pods) if node.ready else replace(left, gpus=max(left.gpus, 0))
    counted = any(gap.expected for gap in node.gaps) or (not node.ready and node.allocatable.gpus > 0)
    for gap in node.gaps:
        there.add_gpus(gap.resource, gap.expected if counted else MAX_GPUS)
    reported = node.allocatable.cpu_milli > 0 or node.allocatable.memory > 0
    if not reported and not node.ready:  # nothing is known against it yet
        there = replace(there, cpu_milli=2**62, memory=2**62, pods=2**62)
    return Arrival(node, there, counted)
