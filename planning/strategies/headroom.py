"""headroom: as fgd, but among nodes that it finds alike the one that keeps room for the most typical requests.

berth's own. FGD asks of each typical request whether it still fits once; a node with eight free GPUs and CPU for one
such request counts as wholly usable. Here its ties, which are many, are broken by how often it fits, CPU included.
"""

from __future__ import annotations

from planning.strategies.candidates import Candidate, Rank, Request
from planning.strategies.fgd import score
from planning.typical import ByResource, Fragments, Typical, as_often_as_it_fits


class Headroom:
    """fgd's score first, then the same score of what requests could use as often as they fit, then fewest free GPUs."""

    name = "headroom"
    steady = True

    def __init__(self, requests: tuple[Typical, ...] = ()) -> None:
        self._of = ByResource(requests, lambda mine: (Fragments(mine), Fragments(mine, as_often_as_it_fits)))

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        need, model, cpu = request.requests, candidate.node.gpu_model, candidate.cpu_milli
        left, before, after = cpu - need.cpu_milli, candidate.devices, candidate.after
        fits_once, fits_often = self._of[need.gpu_resource]
        once = fits_once.on(model, cpu, before) - fits_once.on(model, left, after)
        often = fits_often.on(model, cpu, before) - fits_often.on(model, left, after)
        return -score(once), -score(often), sum(before)
