"""random: any node that fits, all alike, for people who want no pattern; replayable from the round's seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from planning.strategies.candidates import Candidate, Request


class Random:
    """A hash of seed and workload picks the node: the order of the candidates does not matter, nor does the process."""

    name = "random"

    def choose(self, request: Request, candidates: Sequence[Candidate], seed: int) -> str:
        digest = hashlib.sha256(f"{seed}/{request.uid}".encode("utf-8", "surrogatepass")).digest()
        names = sorted(candidate.node.name for candidate in candidates)
        return names[int.from_bytes(digest[:8], "big") % len(names)]
