"""fair: seats that are all asked have the slot in turn, each for a slice of its weight."""

from __future__ import annotations

from collections.abc import Sequence

from planning.seats.group import SeatView
from planning.seats.rules.on_demand import OnDemand
from planning.seats.rules.rule import Moment


class FairSlices(OnDemand):
    """Next is who had the least of the slot for its weight within the window. The smallest slice is a residency."""

    name = "fair"
    patient = True

    def rank(self, seat: SeatView, moment: Moment) -> float:
        return seat.used / seat.weight

    def residencies(self, holder: SeatView, ahead: float, seats: Sequence[SeatView], moment: Moment) -> float:
        """As many as its weight is of the smallest: at most as many as others are patient for."""
        return min(holder.weight / min(each.weight for each in seats), 1 / moment.policy.lost)
