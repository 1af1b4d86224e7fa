"""Decides whether a model server should move to another group of its node: where one group is asked for more than a GPU
group can be awake, and another for less.

A seat's load is the share of time in which requests for it waited or were in flight; a group's is the sum over its
seats, and above 1 somebody waits for somebody else. One move at a time on a node, and only where it is worth it for a
while (hysteresis): what has moved is not moved again soon, and a group that a seat came from or went to is left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planning.podspecs import mapping, mappings, text

CROWDED = 1.0  # load above which somebody waits
WORTH = 0.25  # by how much the fuller of the two groups must become less full
STANDS = 1 / 12  # of the window over which load is counted, for which a proposal must have stood
REST = 1 / 2  # of it, for which a node is left alone after a move
LEAST_WINDOW = 60.0  # seconds

Mode = Literal["Propose", "Perform"]


@dataclass(frozen=True, slots=True)
class SeatLoad:
    """A seat that a pod holds."""

    seat: str
    namespace: str
    pod: str
    load: float


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """A group. `free`: seats that nobody holds; `window`: seconds over which their load is counted. `well`: it is
    neither in quarantine, nor has a server that is yet to start, for which requests wait that will not wait later.
    """

    node: str
    group: str
    resource: str
    mode: Mode | None
    seats: tuple[SeatLoad, ...]
    free: int
    window: float
    well: bool = True

    @property
    def load(self) -> float:
        return sum(each.load for each in self.seats)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A move, and what the two groups' loads are before it and would be after it."""

    node: str
    seat: SeatLoad
    source: str
    target: str
    mode: Mode
    window: float
    before: tuple[float, float]
    after: tuple[float, float]

    @property
    def key(self) -> str:
        """What has to stand for a while: that this group is too full. Which seat is the best to move may change."""
        return f"{self.node} {self.source}"

    @property
    def told(self) -> str:
        """A sentence for people, without its full stop."""
        return (
            f"pod {self.seat.namespace}/{self.seat.pod} should move from {self.source} to {self.target} on node "
            f"{self.node}: {self.source} is asked for {_percent(self.before[0])} of what it can be awake and would be "
            f"for {_percent(self.after[0])}, {self.target} for {_percent(self.before[1])} and would be for "
            f"{_percent(self.after[1])}"
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """What the rebalancer remembers: since when each proposal stands, and until when a node is left alone. Seconds of
    the epoch.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    rests: Mapping[str, float] = field(default_factory=dict)


def loads(groups: Iterable[Mapping[str, Any]]) -> list[GroupLoad]:
    """Of GPUSeatGroups. Never raises; of a group that says nothing nothing is known, and it takes part in nothing."""
    found = []
    for raw in groups:
        spec, status = mapping(raw.get("spec")), mapping(raw.get("status"))
        resource, mode = text(status.get("resource")), status.get("rebalance")
        if not resource:
            continue
        seats, free, starts = [], 0, False
        for seat in mappings(status.get("seats")):
            held = mapping(seat.get("heldBy"))
            if not held.get("pod"):
                free += 1
                continue
            starts = starts or seat.get("phase") in ("Waiting", "Starting")
            busy = seat.get("busyPercent")
            load = min(max(busy, 0), 100) / 100 if isinstance(busy, int) and not isinstance(busy, bool) else 0.0
            seats.append(SeatLoad(text(seat.get("id")), text(held.get("namespace")), text(held.get("pod")), load))
        found.append(
            GroupLoad(
                text(spec.get("nodeName")), text(spec.get("group")), resource,
                "Propose" if mode == "Propose" else "Perform" if mode == "Perform" else None,
                tuple(seats), free, _window(status.get("windowSeconds")),
                status.get("phase") != "Quarantined" and not starts,
            )
        )  # fmt: skip
    return found


def proposals(groups: Iterable[GroupLoad], unmovable: Iterable[tuple[str, str]] = ()) -> list[Proposal]:
    """The best move of each node that has one. `unmovable`: pods that cannot be moved, as namespace and name."""
    fixed = set(unmovable)
    by_node: defaultdict[tuple[str, str], list[GroupLoad]] = defaultdict(list)
    for each in groups:
        if each.mode is not None and each.well:
            by_node[each.node, each.resource].append(each)
    best: dict[str, tuple[tuple[float, float, str], Proposal]] = {}
    for (node, _), there in sorted(by_node.items()):
        for source in there:
            for target in there:
                if source.load <= CROWDED or target.group == source.group or not target.free or source.mode is None:
                    continue
                for seat in source.seats:
                    if (seat.namespace, seat.pod) in fixed:
                        continue
                    after = (source.load - seat.load, target.load + seat.load)
                    if source.load - max(after) < WORTH - 1e-9:
                        continue
                    made = Proposal(
                        node, seat, source.group, target.group, source.mode, source.window,
                        (source.load, target.load), after,
                    )  # fmt: skip
                    # Measured loads are never quite the same. Of about equally good ones the least busy is moved, so
                    # that few requests are held meanwhile; of those the last.
                    worth = (-round(max(after), 1), -round(seat.load, 1), seat.seat)
                    if node not in best or worth > best[node][0]:
                        best[node] = worth, made
    return [made for _, made in best.values()]


def what_if(groups: Iterable[GroupLoad], namespace: str, pod: str, target: str) -> Proposal | str:
    """What a move would make of the loads, whoever wants it; or why there is no such, a sentence without its full
    stop.
    """
    there = list(groups)
    found = [(each, seat) for each in there for seat in each.seats if (seat.namespace, seat.pod) == (namespace, pod)]
    if not found:
        return f"pod {namespace}/{pod} holds no seat that its node switches (kubectl get gpusg)"
    source, seat = found[0]
    goal = next((each for each in there if (each.node, each.group) == (source.node, target)), None)
    if goal is None:
        names = ", ".join(sorted(each.group for each in there if each.node == source.node))
        return f"node {source.node} has no group {target}; it has {names}"
    if goal.group == source.group:
        return f"pod {namespace}/{pod} is in {target} already"
    if goal.resource != source.resource:
        return f"{target} has {goal.resource}, and pod {namespace}/{pod} has {source.resource}"
    if not goal.free:
        return f"all seats of {target} are held"
    before, after = (source.load, goal.load), (source.load - seat.load, goal.load + seat.load)
    return Proposal(source.node, seat, source.group, target, source.mode or "Propose", source.window, before, after)


def due(found: Iterable[Proposal], standing: Standing, now: float) -> tuple[list[Proposal], Standing]:
    """The proposals that have stood long enough, on nodes that have rested; and what to remember. Whoever acts on one
    says so by `moved`.
    """
    there = {each.key: each for each in found}
    since = {key: min(standing.since.get(key, now), now) for key in there}
    rests = {node: until for node, until in standing.rests.items() if until > now}
    ripe = [each for key, each in there.items() if now - since[key] >= STANDS * each.window and each.node not in rests]
    return ripe, Standing(since, rests)


def moved(standing: Standing, proposal: Proposal, now: float) -> Standing:
    """After this one was acted on."""
    since = {key: at for key, at in standing.since.items() if key != proposal.key}
    return replace(standing, since=since, rests={**standing.rests, proposal.node: now + REST * proposal.window})


def _window(told: object) -> float:
    return max(float(told), LEAST_WINDOW) if isinstance(told, int) and not isinstance(told, bool) else LEAST_WINDOW


def _percent(load: float) -> str:
    return f"{100 * load:.0f} %"
