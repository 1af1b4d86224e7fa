"""A GPUReservation as planning sees it: when it has which GPUs, who may have them, and what is said to those who wait.

For the placement round, `berth explain` and the admission webhooks, which say the same in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crds.gpureservation import GPUReservationSpec
from planning.capacity import Room
from planning.filters import Constraints, show_gpus
from planning.times import timestamp

# Seconds before the window from which on its nodes are cleared for those who wait: what is stopped has, unless it asks
# for more, 30 s to end, and a round before it and the Job's creation after it take a few.
LEAD = 60.0


@dataclass(frozen=True, slots=True)
class ReservationView:
    """A GPUReservation. `spec` is None when the models refuse it; `invalid` then says where and why, for a person."""

    name: str
    uid: str
    resource_version: int
    generation: int
    created: float
    spec: GPUReservationSpec | None
    invalid: str = ""
    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Window:
    """A GPUReservation that has not ended. `nodes`: the GPUs that are kept on each, `total` in all; `used`: what its
    own workloads hold there.
    """

    name: str
    uid: str
    start: float
    end: float
    gpus: int
    block: int
    constraints: Constraints
    namespaces: tuple[str, ...]
    nodes: dict[str, int] = field(default_factory=dict)
    used: dict[str, Room] = field(default_factory=dict)
    total: int = 0

    @property
    def opens(self) -> float:
        """From when on its nodes are cleared."""
        return self.start - LEAD

    def keep(self, node: str, gpus: int) -> None:
        self.total += gpus - self.nodes.get(node, 0)
        self.nodes[node] = gpus

    def uses(self, node: str) -> int:
        """The GPUs on the node that its own workloads hold."""
        used = self.used.get(node)
        return used.gpus if used is not None else 0

    def left(self, node: str) -> int:
        """The GPUs on the node that are kept and not in use."""
        return self.nodes.get(node, 0) - self.uses(node)

    def slots(self, node: str, gpus: int) -> int:
        """How many requests for so many GPUs what is left there suffices for."""
        return max(0, self.left(node)) // gpus

    def holds(self, node: str) -> int:
        """The GPUs on the node that no other reservation may have."""
        return max(self.nodes.get(node, 0), self.uses(node))

    def during(self, moment: float) -> bool:
        return self.start <= moment < self.end

    def overlaps(self, other: Window) -> bool:
        return self.start < other.end and other.start < self.end


def window_of(view: ReservationView) -> Window | None:
    """None if the reservation is not valid."""
    if view.spec is None:
        return None
    spec, selector = view.spec, tuple(sorted(view.spec.node_selector.items()))
    return Window(
        view.name, view.uid, spec.starts, spec.ends, spec.gpus, spec.block, Constraints(selector),
        tuple(spec.namespaces),
    )  # fmt: skip


def unusable(name: str, namespace: str, found: ReservationView | None, now: float) -> str:
    """Why a workload of the namespace cannot have what it names; '' if it can, now or later."""
    place, named = "spec.reservation:", f"GPUReservation {name}"
    if found is None:
        return f"{place} there is no {named}"
    if found.spec is None:
        return f"{place} {named} is not valid: {found.invalid}"
    if namespace not in found.spec.namespaces:
        others = ", ".join(found.spec.namespaces[:5]) + (", …" if len(found.spec.namespaces) > 5 else "")
        return f"{place} {named} is not for namespace {namespace}; its spec.namespaces names {others}"
    return f"{place} {named} ended at {timestamp(found.spec.ends)}" if found.spec.ends <= now else ""


def before_it_begins(window: Window) -> str:
    """What a workload is told that waits for the window."""
    return f"GPUReservation {window.name} begins at {timestamp(window.start)}; {where(window)}"


def when_all_is_used(window: Window, need: int) -> str:
    """What a workload is told that finds nothing left in its window."""
    if sum(max(0, window.left(name)) for name in window.nodes) <= 0 and window.total >= window.gpus:
        return f"all {show_gpus(window.gpus)} of GPUReservation {window.name} are in use"
    most = max((window.left(name) for name in window.nodes), default=0)
    return (
        f"needs {show_gpus(need)} on one node; of the {show_gpus(window.gpus)} of GPUReservation {window.name} no node "
        f"has more than {max(most, 0)} left that it can have now; {where(window)}"
    )


def where(window: Window) -> str:
    """What is kept for it, and on which nodes."""
    names = sorted(window.nodes)
    if not names:
        return f"none of its {show_gpus(window.gpus)} could be kept yet"
    others = len(names) - 3
    shown = ", ".join(names[:3]) + (f" and {others} other{'s' * (others > 1)}" if others > 0 else "")
    return f"{show_gpus(window.total)} are kept on node{'s' * (len(names) > 1)} {shown}"
