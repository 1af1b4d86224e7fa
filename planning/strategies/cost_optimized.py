"""costOptimized: a cheap node while one fits, then leastLoaded; for people who pay for nodes by the hour."""

from __future__ import annotations

from collections.abc import Sequence

from planning.strategies.candidates import Candidate, Request
from planning.strategies.least_loaded import LeastLoaded

CHEAP_LABEL = "gpu-orchestrator/cheap-node"


class CostOptimized:
    """Nodes labelled `gpu-orchestrator/cheap-node=true` go first; among equals leastLoaded decides."""

    name = "costOptimized"

    def __init__(self) -> None:
        self._among_equals = LeastLoaded()

    def choose(self, request: Request, candidates: Sequence[Candidate], seed: int) -> str:
        cheap = [candidate for candidate in candidates if candidate.node.labels.get(CHEAP_LABEL) == "true"]
        return self._among_equals.choose(request, cheap or candidates, seed)
