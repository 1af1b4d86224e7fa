"""random: any node that fits, all alike, for people who want no pattern; replayable from the round's seed."""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

from planning.strategies.candidates import Candidate, Rank, Request

_MASK = (1 << 64) - 1


class Random:
    """A hash of seed, workload and node ranks the nodes: their order does not matter, nor does the process."""

    name = "random"
    steady = False

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        word = _of_node(candidate.node.name) | _of_request(request.seed, request.uid) << 32
        # 64 bits of which each depends on all of the word's. Source: the finalizer of Steele's SplitMix64.
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
        return (word ^ (word >> 31),)


@lru_cache(maxsize=100_000)
def _of_node(name: str) -> int:
    return crc32(name.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=16)
def _of_request(seed: int, uid: str) -> int:
    return crc32(f"{seed}/{uid}".encode("utf-8", "surrogatepass"))
