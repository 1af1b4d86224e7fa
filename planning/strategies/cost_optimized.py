"""costOptimized: a cheap node while one fits, then leastLoaded; for people who pay for nodes by the hour."""

from __future__ import annotations

from planning.strategies.candidates import Candidate, Rank, Request
from planning.strategies.least_loaded import LeastLoaded

CHEAP_LABEL = "gpu-orchestrator/cheap-node"
PRICE_LABEL = "gpu.warp.dev/price-per-gpu-hour"
# Without a label nobody knows: such a node comes after all that tell their price.
_UNKNOWN = float("inf")


class CostOptimized:
    """Nodes labelled `gpu-orchestrator/cheap-node=true` go first, then those with the lower price; then leastLoaded."""

    name = "costOptimized"
    steady = True

    def __init__(self) -> None:
        self._among_equals = LeastLoaded()

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        labels = candidate.node.labels
        dear = labels.get(CHEAP_LABEL) != "true"
        return dear, price(labels.get(PRICE_LABEL, "")), *self._among_equals.rank(request, candidate)


def price(label: str) -> float:
    """A price per GPU-hour, in whatever currency all nodes share: '2.48'. What is no price at all counts as unknown."""
    try:
        value = float(label) if len(label) <= 20 else _UNKNOWN
    except ValueError:
        return _UNKNOWN
    return value if 0 <= value < _UNKNOWN else _UNKNOWN
