"""mostAllocated: the node with the fewest free GPUs, for people who want whole nodes to stay free for large requests.

The packing that every other strategy has to beat: on openb it beats all of the FGD paper's but FGD itself.
"""

from __future__ import annotations

from planning.strategies.candidates import Candidate, Rank, Request


class MostAllocated:
    """Fewest free GPUs first; ties by name."""

    name = "mostAllocated"
    steady = True

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        return (sum(candidate.devices),)
