"""What pods ask for and nodes offer, as placement counts it: GPUs by resource, CPU, memory, pods; and the nodes.

Small and hashable, for every pod and node of a cluster has one, and histories hold those that were promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Thousandths of a GPU: requests may ask for a part of one.
WHOLE = 1000
# Seconds after its creation from when on a node that does not offer its GPUs is broken, and no longer expected to, and
# one whose labels do not tell their memory never will.
COMING = 1800.0
Devices = tuple[int, ...]
"""Free thousandths of each of a node's GPUs, the most first."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a pod asks for or a node offers. What is not counted here is checked by the kube-scheduler when it binds.

    `gpu_milli`: thousandths of each of the GPUs; below 1000 for a part of a single one. `gpu_resource`: by which name
    the GPUs are counted; '' is the installation's. `other_gpus`: those of further names, of few nodes and of pods that
    are nobody's workload; there are none unless there are `gpus`.
    """

    gpus: int = 0
    cpu_milli: int = 0
    memory: int = 0
    pods: int = 0
    gpu_milli: int = WHOLE
    gpu_resource: str = ""
    other_gpus: tuple[tuple[str, int], ...] = ()

    @classmethod
    def counting(cls, gpus: Iterable[tuple[str, int]], cpu_milli: int, memory: int, pods: int) -> Resources:
        """With GPUs by resource; those of the installation's come first, then by name."""
        found = sorted((name, count) for name, count in gpus if count > 0)
        if not found:
            return cls(0, cpu_milli, memory, pods)
        (resource, count), *others = found
        return cls(count, cpu_milli, memory, pods, gpu_resource=resource, other_gpus=tuple(others))

    @property
    def all_gpus(self) -> int:
        return self.gpus + sum(count for _, count in self.other_gpus) if self.other_gpus else self.gpus

    def gpus_by_resource(self) -> tuple[tuple[str, int], ...]:
        return ((self.gpu_resource, self.gpus), *self.other_gpus)

    def of(self, resource: str) -> int:
        """The GPUs of this resource."""
        if resource == self.gpu_resource:
            return self.gpus
        return next((count for name, count in self.other_gpus if name == resource), 0)


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Why a node that has GPUs of a resource offers none, and how many it will (0: nobody tells)."""

    expected: int
    why: str
    resource: str = ""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as placement sees it. `gpu_memory`: of each of its GPUs, by resource, in MiB, where its labels tell.
    `gpu_models`: their models, likewise.
    """

    name: str
    uid: str
    resource_version: int
    ready: bool
    unschedulable: bool
    taints: tuple[Taint, ...]
    labels: Mapping[str, str]
    allocatable: Resources
    gaps: tuple[Gap, ...] = ()
    not_ready_since: float | None = None
    created: float = 0.0
    gpu_memory: tuple[tuple[str, int], ...] = ()
    gpu_models: tuple[tuple[str, str], ...] = ()

    @property
    def out_of_service(self) -> bool:
        return any(t.key == "node.kubernetes.io/out-of-service" for t in self.taints)

    def is_new(self, now: float) -> bool:
        """Whether its GPUs, and the labels that tell of them, may be expected to come by themselves."""
        return now - self.created <= COMING

    def gap(self, resource: str) -> Gap | None:
        return next((gap for gap in self.gaps if gap.resource == resource), None)

    def most(self, resource: str) -> int:
        """The GPUs of this resource that it offers, or will."""
        offered = self.allocatable.of(resource)
        gap = self.gap(resource) if self.gaps else None
        return max(offered, gap.expected) if gap is not None else offered

    def memory_of(self, resource: str) -> int:
        """The memory of each of its GPUs of this resource, in MiB; 0 where nobody tells."""
        return next((mib for name, mib in self.gpu_memory if name == resource), 0)

    def model_of(self, resource: str) -> str:
        """The model of its GPUs of this resource; '' where nobody tells."""
        for name, model in self.gpu_models:  # for every node that is ranked
            if name == resource:
                return model
        return ""
