"""schedule: within its hours a seat comes first, and is awake when they begin; at other times it is as on demand.

Hours are those of the clocks on the wall: at a change to summer time they are looked up again within the hour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planning.seats.group import IN_SLOT, READY, Hours, SeatView
from planning.seats.rules.priority import Priority
from planning.seats.rules.rule import Moment

_DAY = 86_400.0
_HOUR = 3_600.0
_THURSDAY = 3  # the first of January 1970


class Schedule(Priority):
    """Seats whose hours it is rank before all others."""

    name = "schedule"

    def rank(self, seat: SeatView, moment: Moment) -> float:
        mine = (each for each in moment.policy.hours if seat.name in each.seats)
        return 0.0 if any(during(each, moment.local) for each in mine) else 1.0

    def next_change(self, seats: Sequence[SeatView], moment: Moment) -> float | None:
        ahead = {0.0, *(each.wake for each in seats)}
        changes = [change for each in moment.policy.hours for change in _changes(each, moment.local, ahead)]
        return min([_HOUR, *changes]) if moment.policy.hours else None

    def prefetch(self, seats: Sequence[SeatView], moment: Moment) -> str:
        """The first of those whose hours it is, or will be by the time that it is awake; nobody while one of them has
        the slot.
        """
        wanted = [each for each in seats if self._due(each, moment)]
        if any(each.phase in IN_SLOT for each in wanted):
            return ""
        return next((each.seat for each in wanted if each.phase in READY), "")

    def _due(self, seat: SeatView, moment: Moment) -> bool:
        return any(
            seat.name in each.seats and (during(each, moment.local) or during(each, moment.local + seat.wake))
            for each in moment.policy.hours
        )


def during(hours: Hours, local: float) -> bool:
    """Whether it is these hours at this moment of their time zone: seconds since the epoch on its clocks."""
    return any(begin <= local < end for begin, end in _around(hours, local))


def _changes(hours: Hours, local: float, ahead: Iterable[float]) -> Iterator[float]:
    """Seconds until so long before they begin, and until they end, the next times."""
    for begin, end in _around(hours, local):
        for at in (*(begin - lead for lead in ahead), end):
            if at > local:
                yield at - local


def _around(hours: Hours, local: float) -> Iterator[tuple[float, float]]:
    """Those that began yesterday, begin today and tomorrow."""
    today = local // _DAY
    for day in (today - 1, today, today + 1):
        if (day + _THURSDAY) % 7 in hours.days:
            begin = day * _DAY + hours.start * 60
            yield begin, day * _DAY + hours.end * 60 + (_DAY if hours.end <= hours.start else 0.0)
