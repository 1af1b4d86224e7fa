"""headroom: as fgd, but among nodes that it finds alike the one where least room is lost for what is rarely asked for.

berth's own. FGD looks at the kinds of request that make up 95 % of what is asked for. Those for whole nodes are mostly
not among them, and yet they are the ones that wait, for a small request fits nearly anywhere. fgd, whose scores tie
often, leaves room for them only as far as taking the fewest free GPUs does; which nodes they need, for their CPU or
their model, it does not see.
"""

from __future__ import annotations

from collections.abc import Iterable

from planning.model import WHOLE
from planning.strategies.candidates import Candidate, Rank, Request
from planning.strategies.fgd import FGD
from planning.typical import ByResource, Room, Typical


class Headroom:
    """fgd's score first, then the least room lost for rare requests, in thousandths of GPUs; then fewest free GPUs."""

    name = "headroom"
    steady = True

    def __init__(self, requests: Iterable[Typical] = ()) -> None:
        known = tuple(requests)
        self._fgd = FGD(known)
        self._room = ByResource(known, Room)

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        need, cpu = request.requests, candidate.cpu_milli
        score, free = self._fgd.rank(request, candidate)
        model, room = candidate.node.model_of(need.gpu_resource), self._room[need.gpu_resource]
        before, after = candidate.devices.count(WHOLE), candidate.after.count(WHOLE)
        lost = room.on(model, cpu, before) - room.on(model, cpu - need.cpu_milli, after)
        return score, round(WHOLE * lost), free
