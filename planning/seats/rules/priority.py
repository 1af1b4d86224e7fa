"""priority: the seat of the highest priority is next, and keeps the slot from lower ones while it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from planning.seats.group import SeatView
from planning.seats.rules.on_demand import OnDemand
from planning.seats.rules.rule import Moment


class Priority(OnDemand):
    """By priority; a higher one does not wait for a lower one's whole residency."""

    name = "priority"
    patient = True
    hurries = True

    def rank(self, seat: SeatView, moment: Moment) -> float:
        return float(-seat.priority)

    def residencies(self, holder: SeatView, ahead: float, seats: Sequence[SeatView], moment: Moment) -> float:
        return inf if ahead > 0 else 1.0
