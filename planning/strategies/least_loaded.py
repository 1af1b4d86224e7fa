"""leastLoaded: the node with the most free GPUs, for people who want their neighbours few.

It spreads, and so leaves more GPUs stranded than any packing strategy (scheduling.md 3.2: 17 % on openb, random
13.7 %, packing 5.8 %); it is upstream's default and kept as such, without the claim that it avoids fragmentation.
"""

from __future__ import annotations

from planning.model import WHOLE
from planning.strategies.candidates import Candidate, Rank, Request


class LeastLoaded:
    """Most free GPUs first; ties by the least used share of GPUs, CPU or memory, so that equal nodes fill in turn."""

    name = "leastLoaded"
    steady = True

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        whole, free = candidate.node.allocatable, sum(candidate.devices)
        used = max(
            1.0 - free / (len(candidate.devices) * WHOLE) if candidate.devices else 0.0,
            1.0 - candidate.cpu_milli / whole.cpu_milli if whole.cpu_milli > 0 else 0.0,
            1.0 - candidate.memory / whole.memory if whole.memory > 0 else 0.0,
        )
        return -free, used
