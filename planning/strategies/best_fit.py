"""bestFit: the node that has the least left afterwards, of CPU and GPUs alike, for people short of both.

Source: the BestFit of the FGD paper's simulator, which weighs 128 cores like 8 GPUs.
"""

from __future__ import annotations

from planning.model import WHOLE
from planning.strategies.candidates import Candidate, Rank, Request

_CPU_MILLI = 128_000
_GPU_MILLI = 8 * WHOLE


class BestFit:
    """Least left over first; ties by name."""

    name = "bestFit"
    steady = True

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        cpu = (candidate.cpu_milli - request.requests.cpu_milli) / _CPU_MILLI
        return (cpu + sum(candidate.after) / _GPU_MILLI,)
