"""What a placement strategy decides about: a request, and the nodes that hold it with what is free there."""

from __future__ import annotations

from dataclasses import dataclass, field

from planning.model import NodeView, Resources


@dataclass(frozen=True, slots=True)
class Request:
    """One workload that needs a node."""

    uid: str
    namespace: str
    name: str
    requests: Resources


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that holds the request now. The share in its `load` is the used part of its most used resource among GPU,
    CPU and memory.
    """

    node: NodeView
    free: Resources
    load: tuple[int, float, str] = field(init=False)  # ascending: least loaded first, ties by share, then by name

    def __post_init__(self) -> None:
        whole, free = self.node.allocatable, self.free
        share = max(
            1.0 - free.gpus / whole.gpus if whole.gpus > 0 else 0.0,
            1.0 - free.cpu_milli / whole.cpu_milli if whole.cpu_milli > 0 else 0.0,
            1.0 - free.memory / whole.memory if whole.memory > 0 else 0.0,
        )
        object.__setattr__(self, "load", (-free.gpus, share, self.node.name))
