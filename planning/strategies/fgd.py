"""fgd: the node whose free GPUs become least useless to what is typically asked for, for people who run many sizes.

Fragmentation gradient descent (Weng et al., ATC 2023). Its gain hangs on coarse scores and a steady tie-break: with
exact ones it loses to plain packing (scheduling.md 3.2), so the score is an integer, as in the authors' simulator.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import log

from planning.strategies.candidates import Candidate, Rank, Request
from planning.typical import ByResource, Fragments, Typical

# Sums of shares are off by less than this; without it, that would tell a fall of nothing from one of nothing.
_EXACT = 0.5e-6
# From which fall on the score is 1, 2, … 99.
_STEPS = [-1000 * log(100 / reached - 1) - _EXACT for reached in range(1, 100)]


class FGD:
    """Steepest fall of fragments first; ties by fewest free GPUs, then by name. Knowing nothing typical, it packs."""

    name = "fgd"
    steady = True

    def __init__(self, requests: Iterable[Typical] = ()) -> None:
        self._of = ByResource(requests, Fragments)

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        need, free = request.requests, candidate.cpu_milli
        model, fragments = candidate.node.model_of(need.gpu_resource), self._of[need.gpu_resource]
        fall = fragments.on(model, free, candidate.devices) - fragments.on(
            model, free - need.cpu_milli, candidate.after
        )
        return -score(fall), sum(candidate.devices)


def score(fall: float) -> int:
    """0 to 100, for a fall of fragments in thousandths of GPUs: about 40 of them a step around 50, coarser further off.

    Source: the sigmoid of the authors' simulator, 100 / (1 + exp(-fall / 1000)), cut to an integer as they do. Here its
    steps are looked up, for it is asked very often.
    """
    return bisect_right(_STEPS, fall)
