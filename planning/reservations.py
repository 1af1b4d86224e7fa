"""Which nodes are kept for a GPUReservation, what that leaves to others until it begins, and who may use it.

For the placement round and `berth explain`. Reserved are GPUs of the installation's resource. The choice stands in the
ledger and stays as long as its nodes do; what cannot be had yet is planned on nodes where it will come free. Work that
is preemptible never stands in the way: it is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from planning.accelerators import seat_size
from planning.capacity import Holding, Room, room, whole
from planning.filters import Constraints, TolerationView, affine, lacking, repelling_taint
from planning.model import Assignment, NodeView, Resources, Snapshot, WorkloadView
from planning.quotas import firm
from planning.windows import Window, unusable, window_of

# More than any node has.
_ALL = 2**62
# Nodes in all reservations together: the ledger goes into every round's history (law 4).
_NODES = 2048


@dataclass(slots=True)
class Step:
    """From `window.opens` on only so much of a node is for others; it goes down as they are placed."""

    window: Window
    slack: Room


@dataclass(slots=True)
class Claim:
    """A node with reserved GPUs. `free`: what nobody holds there, reserved or not."""

    free: Room
    steps: list[Step]

    def left(self, until: float = inf) -> Room:
        """What is left for work that may not be stopped and goes on `until` then."""
        least = self.free.copy()
        for step in self.steps:
            if step.window.opens < until:
                _lower(least, step.slack)
        return least

    def slack(self, until: float) -> Room:
        """The same if all were gone that can be stopped."""
        others = tuple((resource, _ALL) for resource, _ in self.free.other_gpus)
        least = Room(_ALL, _ALL, _ALL, _ALL, self.free.gpu_resource, others)
        for step in self.steps:
            if step.window.opens < until:
                _lower(least, step.slack)
        return least

    def lent_until(self, until: float) -> float | None:
        """Until when work that may not be stopped and stays `until` then may have for sure what is kept here."""
        return min((step.window.opens for step in self.steps if step.window.opens >= until), default=None)

    def keeper(self, need: Resources) -> Window | None:
        """The first whose GPUs such a request would take."""
        return next((step.window for step in self.steps if lacking(need, step.slack)), None)

    def kept(self) -> tuple[float, Resources]:
        """What is free and kept, and until when at the latest."""
        free, left = self.free.copy(), self.left()
        free.take(left.as_resources())
        return max(step.window.end for step in self.steps), free.as_resources()

    def take(self, need: Resources, until: float) -> None:
        """Others hold so much from now on, and cannot be stopped before `until`."""
        self.free.take(need)
        for step in self.steps:
            if step.window.opens < until:
                step.slack.take(need)

    def give_back(self, need: Resources, until: float) -> None:
        """They do not, after all."""
        self.free.give_back(need)
        for step in self.steps:
            if step.window.opens < until:
                step.slack.give_back(need)


class Reservations:
    """Those of one round: which have not ended, on which nodes they are, and what that leaves to others."""

    def __init__(self, snapshot: Snapshot, recorded: Mapping[str, Mapping[str, int]]) -> None:
        self._now, self._recorded = snapshot.now, recorded
        self._views = {view.name: view for view in snapshot.reservations}
        self._nodes = {node.name: node for node in snapshot.nodes}
        ordered = sorted(snapshot.reservations, key=lambda view: (view.created, view.name))
        self.windows = [found for view in ordered if (found := window_of(view)) and found.end > snapshot.now]
        self._by_name = {window.name: window for window in self.windows}
        self._staying: dict[str, list[tuple[float, Resources]]] = {}  # by node, others, and until when
        self._free: dict[str, Room] = {}

    def settle(
        self, snapshot: Snapshot, held: Iterable[Holding], promised: Mapping[str, Assignment], free: dict[str, Room],
        gpu_resource: str,
    ) -> None:  # fmt: skip
        """Chooses the nodes. `free`: what nobody holds, by node."""
        if self.windows:
            self._free = free
            self._look_at(snapshot, held, promised)
            self._choose(TolerationView(gpu_resource, "Exists", "", "NoSchedule"))

    def as_recorded(self, snapshot: Snapshot, held: list[Holding]) -> None:
        """Takes the nodes as they were chosen."""
        self._free = room(snapshot.nodes, held)
        self._look_at(snapshot, held, {})
        for window in self.windows:
            for name, gpus in self._recorded.get(window.uid, {}).items():
                if name in self._nodes:
                    window.keep(name, gpus)

    def of(self, view: WorkloadView | None) -> Window | None:
        """The window that the workload may use, now or later."""
        if view is None or view.spec is None or view.spec.reservation is None:
            return None
        window = self._by_name.get(view.spec.reservation)
        return window if window is not None and view.namespace in window.namespaces else None

    def named(self, name: str) -> Window | None:
        """That reservation's window; None if it has ended or cannot be understood."""
        return self._by_name.get(name)

    def over(self, view: WorkloadView | None) -> bool:
        """Whether the workload's window has ended: what it holds others may have."""
        if view is None or view.spec is None or view.spec.reservation is None:
            return False
        found = self._views.get(view.spec.reservation)
        return found is not None and not unusable(found.name, view.namespace, found, -inf) and self.of(view) is None

    def unusable(self, view: WorkloadView) -> str:
        """Why the workload cannot have what it names; '' if it can, or names nothing."""
        name = view.spec.reservation if view.spec is not None else None
        return unusable(name, view.namespace, self._views.get(name), self._now) if name is not None else ""

    def recorded(self) -> dict[str, dict[str, int]] | None:
        """What the ledger is to remember from now on; None if it does already."""
        chosen = {window.uid: window.nodes for window in self.windows if window.nodes}
        return None if chosen == self._recorded else {uid: dict(nodes) for uid, nodes in chosen.items()}

    def next_change(self) -> float | None:
        """Seconds until a window is about to begin, begins or ends."""
        moments = [moment for each in self.windows for moment in (each.opens, each.start, each.end)]
        return min((moment - self._now for moment in moments if moment > self._now), default=None)

    def kept_now(self, window: Window) -> int:
        """How many GPUs the window is sure to have: on the others something is that will not be stopped."""
        return sum(max(min(gpus, self._sure(window, name)), 0) for name, gpus in window.nodes.items())

    def lent(self, window: Window) -> int:
        """How many of these others hold who can be stopped."""
        return sum(
            max(0, min(gpus, self._sure(window, name)) - (gpus - window.left(name)) - max(self._free[name].of(""), 0))
            for name, gpus in window.nodes.items()
        )

    def claims(self) -> dict[str, Claim]:
        """What the reservations leave to others, by node."""
        names = sorted({name for window in self.windows for name in window.nodes})
        return {name: Claim(self._free[name].copy(), self._steps(self._nodes[name])) for name in names}

    def _look_at(self, snapshot: Snapshot, held: Iterable[Holding], promised: Mapping[str, Assignment]) -> None:
        """What the windows' own workloads hold, and what others hold who cannot be stopped, and until when."""
        views = snapshot.by_uid()
        given: dict[tuple[str, str], float | None] = {}
        for job in snapshot.jobs:
            if not job.finished:
                given[job.namespace, job.workload_uid] = -inf if job.lent else job.backfill
        for uid, promise in promised.items():
            given[promise.namespace, uid] = -inf if promise.lent else promise.backfill
        for each in held:
            view = views.get((each.namespace, each.workload_uid))
            window = self.of(view)
            if window is not None:
                window.used.setdefault(each.node, Room(0, 0, 0, 0)).give_back(each.requests)
            elif firm(view) and not each.leaving and not self.over(view):
                until = each.until if each.until is not None else inf
                lent = given.get((each.namespace, each.workload_uid))
                until = until if lent is None else min(until, lent)
                self._staying.setdefault(each.node, []).append((until, each.requests))

    def _choose(self, gpu_taint: TolerationView) -> None:
        for window in self.windows:
            for name, used in sorted(window.used.items()):
                self._keep(window, name, -(-used.gpus // window.block) * window.block)
        for window in self.windows:
            for name, gpus in self._recorded.get(window.uid, {}).items():
                if self._suits(window, name, chosen=True):
                    self._keep(window, name, min(gpus, self._sure(window, name)))
        for window in self.windows:
            if window.total < window.gpus:
                tainted = {n for n, node in self._nodes.items() if repelling_taint(Constraints((), (gpu_taint,)), node)}
                suited = [name for name in self._nodes if self._suits(window, name)]
                self._pack(window, suited, tainted)
                self._plan(window, suited, tainted)

    def _pack(self, window: Window, suited: list[str], tainted: set[str]) -> None:
        """What can be had for sure, on as few nodes as possible, with as few stopped as possible."""
        sure = {name: self._sure(window, name) // window.block * window.block for name in suited}
        options = [name for name in suited if sure[name] > window.nodes.get(name, 0)]

        def stopped(name: str) -> int:
            return max(0, min(sure[name], window.gpus - window.total) - max(self._free[name].of(""), 0))

        here = set(window.nodes)
        options.sort(key=lambda name: (name not in here, name in tainted, -sure[name], stopped(name), name))
        for i, name in enumerate(options):
            missing = window.gpus - window.total
            if missing <= 0:
                return
            if sure[name] - window.nodes.get(name, 0) > missing:  # the last piece: where least is broken up
                rest = [n for n in options[i:] if sure[n] - window.nodes.get(n, 0) >= missing]
                name = min(rest, key=lambda n: (n not in here, n in tainted, stopped(n), sure[n], n))
            self._keep(window, name, sure[name])

    def _plan(self, window: Window, suited: list[str], tainted: set[str]) -> None:
        """The rest where it will come free: where it was planned before, or least is in the way."""
        before = self._recorded.get(window.uid, {})
        begin = max(self._now, window.opens)

        def order(name: str) -> tuple[bool, bool, int, str]:
            return name not in before, name in tainted, self._stays(name, begin).gpus, name

        for name in sorted(suited, key=order):
            if window.total >= window.gpus:
                return
            self._keep(window, name, self._nodes[name].allocatable.of("") - self._taken(window, name))

    def _keep(self, window: Window, name: str, most: int) -> None:
        """Keeps whole blocks on the node, `most` GPUs in all and no more than are missing."""
        if name not in self._nodes or (name not in window.nodes and self._kept_nodes() >= _NODES):
            return
        here = window.nodes.get(name, 0)
        gpus = min(most, here + window.gpus - window.total) // window.block * window.block
        if gpus > here:
            window.keep(name, gpus)

    def _kept_nodes(self) -> int:
        return sum(len(window.nodes) for window in self.windows)

    def _suits(self, window: Window, name: str, *, chosen: bool = False) -> bool:
        """Whether the window may be on the node. Where it is already, it stays while the node may come back in time."""
        node = self._nodes.get(name)
        if node is None or node.unschedulable or node.out_of_service or affine(window.constraints, node):
            return False
        return node.ready or (chosen and self._now < window.opens)

    def _taken(self, window: Window, name: str) -> int:
        """The most GPUs on the node that other reservations have at one moment of the window."""
        others = [each for each in self.windows if each is not window and each.overlaps(window) and each.holds(name)]
        moments = [window.start, *(each.start for each in others if window.during(each.start))]
        return max(sum(each.holds(name) for each in others if each.during(moment)) for moment in moments)

    def _sure(self, window: Window, name: str) -> int:
        """How many GPUs on the node it can have when it begins, if all are stopped who can be."""
        stays = self._stays(name, max(self._now, window.opens)).gpus
        return self._nodes[name].allocatable.of("") - stays - self._taken(window, name)

    def _stays(self, name: str, moment: float) -> Room:
        """What others hold on the node beyond that moment."""
        found = Room(0, 0, 0, 0)
        for until, requests in self._staying.get(name, ()):
            if until > moment:
                found.give_back(requests)
        return found

    def _steps(self, node: NodeView) -> list[Step]:
        there = sorted((w for w in self.windows if w.holds(node.name)), key=lambda w: (w.start, w.name))
        steps = []
        for window in there:
            begin, slack = max(self._now, window.start), whole(node)
            slack.take(self._stays(node.name, max(self._now, window.opens)).as_resources())
            for each in there:
                if each.during(begin):
                    slack.take(self._kept_for(each, node))
            steps.append(Step(window, slack))
        return steps

    def _kept_for(self, window: Window, node: NodeView) -> Resources:
        """The window's GPUs on the node, and to each its part of CPU, memory and pods that is there for GPU work. Seats
        have none: they lie on GPUs, which have theirs.
        """
        others = Room(0, 0, 0, 0)
        for _, requests in self._staying.get(node.name, ()):
            if not requests.gpus:
                others.give_back(requests)
        gpus, used = window.holds(node.name), window.used.get(node.name, Room(0, 0, 0, 0))
        there, offers = whole(node), node.allocatable.gpus_by_resource()
        offered = sum(count for resource, count in offers if not seat_size(resource))
        there.take(others.as_resources())

        def part(amount: int) -> int:
            return max(0, amount) * min(gpus, offered) // max(1, offered)

        return Resources(
            gpus,
            max(used.cpu_milli, part(there.cpu_milli)),
            max(used.memory, part(there.memory)),
            max(used.pods, part(there.pods)),
        )


def _lower(room: Room, bound: Room) -> None:
    for resource, count in room.gpus_by_resource():
        room.add_gpus(resource, min(0, bound.of(resource) - count))
    room.cpu_milli = min(room.cpu_milli, bound.cpu_milli)
    room.memory = min(room.memory, bound.memory)
    room.pods = min(room.pods, bound.pods)
