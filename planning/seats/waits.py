"""Tells for how long those who wait for a seat will still wait, from measured times: what a Retry-After says.

For `choosing`. What is decided next, and next after that, is played forward with the same rules and the mean of what
is not known (for how long the seat in the slot is asked); requests that have not come yet are left out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from planning.seats.group import Phase, SeatView
from planning.seats.residency import pause, residency, switching
from planning.seats.standing import Standing


def waits(standing: Standing) -> Mapping[str, float]:
    """For each seat that somebody waits for, seconds until it is expected to serve; one for which nobody can say, for
    the seat in the slot cannot leave it, is not in it.
    """
    found: dict[str, float] = {}
    holder, after = standing.holder, 0.0
    if holder is not None and holder.phase is not Phase.ACTIVE:
        holder, after = _under_way(standing, holder)
        if holder is None:
            return found
        found[holder.seat] = after
    elif holder is not None and standing.waiting and standing.stays(holder):
        return found
    left = {each.seat: each for each in standing.waiting if each.seat not in found}
    fresh = holder is None or holder.phase is not Phase.ACTIVE
    resident, more, stays = 0.0 if fresh or holder is None else holder.resident, 0.0, 0.0
    while left:
        comes = standing.first(left.values(), after)
        if holder is not None:
            idle_in, likely = _asked(standing, holder, comes, fresh=fresh)
            due = standing.due(
                holder, comes, resident=resident, after=after, more=more, idle_in=idle_in, likely=likely
            )  # fmt: skip
            busy = fresh or not holder.resting
            after += due + (holder.drain if busy else 0.0)
            stays += due
        switch = switching(holder, comes)
        after, more = after + switch, more + switch
        found[comes.seat] = after + stays * (comes.late - 1)  # of switches nobody is in doubt, of stays one is
        del left[comes.seat]
        holder, resident, fresh = comes, 0.0, True
    waited = {each.seat for each in standing.seats if each.wants or each.held > 0}
    return {seat: seconds for seat, seconds in found.items() if seat in waited}


def pinned_waits(standing: Standing, pinned: str) -> Mapping[str, float]:
    """The same where a seat is pinned: nobody can say it of the others."""
    seat = next(each for each in standing.seats if each.seat == pinned)
    holder = standing.holder
    if seat.held <= 0 and not seat.wants:
        return {}
    if holder is None:
        return {pinned: seat.wake}
    if holder.phase is Phase.ACTIVE:
        if holder.seat == pinned or standing.stays(holder):
            return {}
        return {pinned: (0.0 if holder.resting else holder.drain) + switching(holder, seat)}
    if holder.seat == pinned and holder.phase in (Phase.STARTING, Phase.WAKING):
        return {pinned: max(0.0, holder.wake - holder.resident)}
    return {pinned: _left(holder) + (seat.wake if holder.seat != pinned else holder.wake)}


def _under_way(standing: Standing, holder: SeatView) -> tuple[SeatView | None, float]:
    """Who has the slot after the switch that is under way, and in how many seconds; None if nobody is known to come."""
    if holder.phase in (Phase.STARTING, Phase.WAKING):
        return holder, max(0.0, holder.wake - holder.resident)
    target = next((each for each in standing.seats if each.seat == standing.view.target), None)
    if target is None and standing.waiting:
        target = standing.first(standing.waiting)
    if target is None:
        return None, 0.0
    return target, _left(holder) + target.wake


def _left(holder: SeatView) -> float:
    """Seconds until a seat that leaves the slot, or comes into it, has done so and left it again."""
    match holder.phase:
        case Phase.DRAINING:
            return max(0.0, holder.drain - holder.resident) + holder.park
        case Phase.PARKING:
            return max(0.0, holder.park - holder.resident)
        case _:
            return max(0.0, holder.wake - holder.resident) + holder.park


def _asked(standing: Standing, holder: SeatView, comes: SeatView, *, fresh: bool) -> tuple[float, bool]:
    """For how long the seat will be asked, and whether that is but a mean."""
    idle = standing.idle_in(holder, comes) if not fresh else inf
    if idle < inf or holder.batch:
        return idle, False
    switch = switching(holder, comes)
    busy = holder.busy if holder.busy is not None else residency(switch, standing.share)
    return busy + pause(switch, standing.share), True
