"""leastLoaded: the node with the most free GPUs, for people who want their neighbours few.

It spreads, and so leaves more GPUs stranded than any packing strategy (scheduling.md 3.2: 17 % on openb, random
13.7 %, packing 5.8 %); it is upstream's default and kept as such, without the claim that it avoids fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from planning.strategies.candidates import Candidate, Request

_load = attrgetter("load")


class LeastLoaded:
    """Most free GPUs first; ties by the least used share, then by name, so that equal nodes fill in turn."""

    name = "leastLoaded"

    def choose(self, request: Request, candidates: Sequence[Candidate], seed: int) -> str:
        chosen: Candidate = min(candidates, key=_load)
        return chosen.node.name
