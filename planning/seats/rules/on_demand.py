"""onDemand: who has waited longest is next, and nobody is woken whom nobody asked for. The default."""

from __future__ import annotations

from collections.abc import Sequence

from planning.seats.group import SeatView
from planning.seats.rules.rule import Moment


class OnDemand:
    """All are equal."""

    name = "onDemand"
    patient = False
    hurries = False

    def rank(self, seat: SeatView, moment: Moment) -> float:
        return 0.0

    def residencies(self, holder: SeatView, ahead: float, seats: Sequence[SeatView], moment: Moment) -> float:
        return 1.0

    def next_change(self, seats: Sequence[SeatView], moment: Moment) -> float | None:
        return None

    def prefetch(self, seats: Sequence[SeatView], moment: Moment) -> str:
        return ""
