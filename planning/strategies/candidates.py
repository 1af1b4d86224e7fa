"""What a placement strategy decides about: a request, and a node that holds it as it is now and as it would be.

GPUs are counted in thousandths, for a request may ask for a part of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.model import Devices, NodeView, Resources

Rank = tuple[float, ...]
"""How much a strategy likes a candidate: the lowest is taken. All of one strategy's have the same length."""


@dataclass(frozen=True, slots=True)
class Request:
    """One workload that needs a node. `seed` is the round's: chance must be replayable."""

    uid: str
    namespace: str
    name: str
    requests: Resources
    seed: int = 0


@dataclass(slots=True)
class Candidate:
    """A node that holds the request: free CPU, memory and GPUs before it is placed there, and free GPUs after.

    A request for a part of a GPU makes a candidate of each GPU of the node that has it; then `after` differs.
    """

    node: NodeView
    cpu_milli: int
    memory: int
    devices: Devices
    after: Devices
