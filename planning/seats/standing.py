"""How a group stands when something is decided: who has the slot, who is first, and when it may change hands.

For `choosing`, which asks what is to be done now, and `waits`, which asks the same of what is expected to come. Seats
that nobody can give the slot (absent, quarantined) are left out; numbers that make no sense are put right here, once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import exp, inf, isfinite

from planning.seats.group import IN_SLOT, READY, GroupView, Phase, SeatView
from planning.seats.host_memory import Parking, refusal
from planning.seats.residency import patience, pause, residency, switching
from planning.seats.rules.rule import Moment, Rule

_FAR = 1e9  # seconds: what is beyond is no time that anybody measured
_LEAST_LOST, _MOST_LOST = 0.001, 0.9


class Standing:
    """A group at a moment. `known`: all of its seats, as they were given. `holders` are more than one only where
    something has gone wrong.
    """

    def __init__(self, view: GroupView, rule: Rule, now: float) -> None:
        self.view, self.rule = view, rule
        self.share = max(_number(view.policy.lost, _MOST_LOST), _LEAST_LOST)
        sane = view.policy.lost == self.share
        policy = view.policy if sane else replace(view.policy, lost=self.share)
        self.moment = Moment(_clock(now) + _clock(view.utc_offset), policy)
        self.known = {each.seat: each for each in view.seats}
        there = (each for each in self.known.values() if each.phase in IN_SLOT or each.phase in READY)
        self.seats = tuple(map(_sane, there))
        self.holders = tuple(each for each in self.seats if each.phase in IN_SLOT)
        self.waiting = tuple(each for each in self.seats if each.wants)
        self.ranks = {each.seat: rule.rank(each, self.moment) for each in self.seats}
        self.patience = patience(self.seats, self.share) if rule.patient else 0.0
        self.lost = _number(view.lost, _FAR)

    @property
    def holder(self) -> SeatView | None:
        return self.holders[0] if self.holders else None

    def first(self, waiting: Collection[SeatView], after: float = 0.0) -> SeatView:
        """Who of them comes first, so many seconds from now."""
        if self.patience:
            over = [each for each in waiting if each.oldest + after >= self.patience]
            if over:
                return max(over, key=lambda each: each.oldest)
        return min(waiting, key=lambda each: (self.ranks[each.seat], -each.oldest))

    def affordable(self, switch: float, more: float = 0.0) -> bool:
        """Whether a switch may come before its time: what was lost within the window leaves room for it."""
        return self.lost + more + switch <= self.share * max(self.view.policy.window, 0.0)

    def stays(self, holder: SeatView) -> str:
        """Why the seat cannot leave the slot, to follow a colon; '' if it can."""
        if not holder.parkable:
            return f"{holder.seat} cannot be parked: {holder.why_not or 'nobody said why'}"
        if self.view.memory is None:
            return ""
        return refusal(Parking(holder.seat, holder.bytes, holder.numa, holder.bound, holder.levels), self.view.memory)

    def due(
        self, holder: SeatView, comes: SeatView, *, resident: float, after: float = 0.0, more: float = 0.0,
        idle_in: float = inf, likely: bool = False,
    ) -> float:  # fmt: skip
        """In how many seconds `holder`, which has had the slot for `resident`, leaves it for `comes`.

        after: how many seconds from now that is asked. more: what switches take until then. idle_in: when nobody asks
        for it any more; with `likely` that is a mean, of a time that ends as likely in any moment as in any other.
        """
        switch = switching(holder, comes)
        least = residency(switch, self.share)
        left = max(0.0, least - resident)
        ahead = self.ranks[comes.seat] - self.ranks[holder.seat]
        sooner = left
        if (many := self.rule.residencies(holder, ahead, self.seats, self.moment)) > 1:
            overdue = max(0.0, self.patience - comes.oldest - after)
            sooner = max(left, min(overdue, many * least - resident))
        cheap = self.affordable(switch, more)
        if cheap and self.rule.hurries and ahead < 0:
            sooner = min(sooner, max(0.0, switch - resident))
        if idle_in < inf:
            served = 0.0 if cheap else max(0.0, switch - resident)
            sooner = _expected(idle_in, served, sooner) if likely else min(sooner, max(served, idle_in))
        return sooner

    def idle_in(self, holder: SeatView, comes: SeatView) -> float:
        """Seconds until the seat counts as idle if nobody asks for it; inf while somebody does."""
        if not holder.resting:
            return inf
        return max(0.0, pause(switching(holder, comes), self.share) - holder.idle)


def _expected(mean: float, least: float, most: float) -> float:
    """The mean of min(max(least, X), most), for a time X of this mean that is as likely to end in any moment as in any
    other.
    """
    if least >= most or mean <= 0:
        return min(least, most)
    return least + mean * (exp(-least / mean) - exp(-most / mean))


def _sane(seat: SeatView) -> SeatView:
    """The seat with numbers that can be; nearly always it has them, and this is asked very often."""
    busy = 0.0 if seat.busy is None else seat.busy
    if (
        0 <= seat.oldest <= _FAR
        and 0 <= seat.idle <= (seat.resident if seat.phase is Phase.ACTIVE else _FAR)
        and 0 <= seat.resident <= _FAR
        and 0 <= seat.used <= _FAR
        and 0 <= seat.park <= _FAR
        and 0 <= seat.wake <= _FAR
        and 0 <= seat.drain <= _FAR
        and 0 <= busy <= _FAR
        and 0 < seat.weight <= _FAR
        and 0 <= seat.late <= _FAR
    ):
        return seat
    resident = _number(seat.resident, _FAR)
    idle = _number(seat.idle, _FAR)
    return replace(
        seat,
        oldest=_number(seat.oldest, _FAR),
        # Whoever came a minute ago has not been idle for an hour: that was before.
        idle=min(idle, resident) if seat.phase is Phase.ACTIVE else idle,
        resident=resident,
        used=_number(seat.used, _FAR),
        park=_number(seat.park, _FAR),
        wake=_number(seat.wake, _FAR),
        drain=_number(seat.drain, _FAR),
        busy=busy if 0 <= busy <= _FAR and seat.busy is not None else None,
        weight=seat.weight if 0 < seat.weight <= _FAR else 1.0,
        late=seat.late if 0 <= seat.late <= _FAR else 1.0,
    )


def _number(value: float, most: float) -> float:
    """From 0 to `most`; what is not a number is 0."""
    return min(max(value, 0.0), most) if value == value else 0.0


def _clock(value: float) -> float:
    return value if isfinite(value) and abs(value) < 1e12 else 0.0
