"""fgd: the node whose free GPUs become least useless to what is typically asked for, for people who run many sizes.

Fragmentation gradient descent (Weng et al., ATC 2023). Its gain hangs on coarse scores and a steady tie-break: with
exact ones it loses to plain packing (scheduling.md 3.2), so the score is an integer, as in the authors' simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

from planning.strategies.candidates import Candidate, Rank, Request
from planning.typical import ByResource, Fragments, Typical

# Beyond this many thousandths of GPUs the score does not change any more, and exp would overflow.
_STEEPEST = 20_000.0


class FGD:
    """Steepest fall of fragments first; ties by fewest free GPUs, then by name. Knowing nothing typical, it packs."""

    name = "fgd"
    steady = True

    def __init__(self, requests: Iterable[Typical] = ()) -> None:
        self._of = ByResource(requests, Fragments)

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        need, model, free = request.requests, candidate.node.gpu_model, candidate.cpu_milli
        fragments = self._of[need.gpu_resource]
        fall = fragments.on(model, free, candidate.devices) - fragments.on(
            model, free - need.cpu_milli, candidate.after
        )
        return -score(fall), sum(candidate.devices)


def score(fall: float) -> int:
    """0 to 100, for a fall of fragments in thousandths of GPUs: about 40 of them a step around 50, coarser further off.

    Source: the sigmoid of the authors' simulator, cut to an integer as they do. Sums of shares are off by less than a
    millionth of a step; unrounded, that would tell a fall of nothing from one of nothing.
    """
    return int(100 / (1 + exp(-max(-_STEEPEST, min(round(fall, 6), _STEEPEST)) / 1000)))
