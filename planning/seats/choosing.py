"""Decides which seat of a group is to have the slot: `choose`, for the node's "clear" step and for simulations.

Nobody is parked for whom nobody waits. A seat keeps the slot for a residency that its switch is worth; one that nobody
asks for leaves sooner, as far as the share of time that switches may take allows. A rule says who comes first; whoever
has waited for as long as the group's patience comes before that. A pin goes above all.
"""

from __future__ import annotations

from planning.seats import rules
from planning.seats.group import Choice, GroupView, Phase, SeatView, spoken
from planning.seats.residency import residency, switching
from planning.seats.standing import Standing
from planning.seats.waits import pinned_waits, waits

_SOON = 0.001  # seconds: what is due within it is due
_AT_A_TIME = 3  # seats that a sentence names


def choose(view: GroupView, now: float) -> Choice:
    """Who is to have the slot. `now`: seconds since the epoch. Never raises, whatever the numbers are."""
    rule = rules.rule_of(view.policy.rule)
    if rule is None:
        known = ", ".join(rules.installed())
        return Choice("", f"There is no rule {view.policy.rule[:64]!r}, so all stays as it is; there are {known}.")
    standing = Standing(view, rule, now)
    if len(standing.holders) > 1:
        names = " and ".join(each.seat for each in standing.holders)
        return Choice("", f"{names} both have the slot, which must not be: nobody gets it until one has left it.")
    pinned = standing.known.get(view.pinned)
    if pinned is not None and pinned.phase not in (Phase.ABSENT, Phase.QUARANTINED):
        seat, reason, within = _pinned(standing, next(each for each in standing.seats if each.seat == pinned.seat))
        return Choice(seat, reason, within, pinned_waits(standing, pinned.seat))
    seat, reason, within = _unpinned(standing)
    if view.pinned:
        state = f"is {pinned.phase}" if pinned is not None else "is no seat of this group"
        reason = f"{view.pinned} is pinned, but {state}. {reason}"
    return Choice(seat, reason, max(within, _SOON) if within is not None else None, waits(standing))


def _pinned(standing: Standing, pinned: SeatView) -> tuple[str, str, float | None]:
    holder = standing.holder
    others = [each for each in standing.waiting if each.seat != pinned.seat]
    wait = f" Until that is undone nobody else gets it: {_named(others)} wait{_s(others)}." if others else ""
    if holder is None:
        return pinned.seat, f"{pinned.seat} gets the slot: it is pinned.{wait}", None
    if holder.seat == pinned.seat:
        return "", f"{pinned.seat} has the slot and is pinned.{wait}", None
    if holder.phase is not Phase.ACTIVE:
        return "", _under_way(holder), None
    if why := standing.stays(holder):
        return "", f"{pinned.seat} is pinned and cannot have the slot, for {why}.", _again(holder, pinned)
    return pinned.seat, f"{pinned.seat} gets the slot from {holder.seat}: it is pinned.{wait}", None


def _unpinned(standing: Standing) -> tuple[str, str, float | None]:
    holder = standing.holder
    if holder is not None and holder.phase is not Phase.ACTIVE:
        return "", _under_way(holder), None
    if not standing.waiting:
        return _nobody_waits(standing, holder)
    first = standing.first(standing.waiting)
    if holder is None:
        return first.seat, f"{first.seat} gets the slot, which is empty: {_wanted(first)}.", None
    if why := standing.stays(holder):
        told = f"{_named(standing.waiting)} wait{_s(standing.waiting)}, but {why}."
        return "", told, _again(holder, first)
    idle_in = standing.idle_in(holder, first)
    due = standing.due(holder, first, resident=holder.resident, idle_in=idle_in)
    if due <= _SOON:
        return first.seat, f"{first.seat} gets the slot: {_wanted(first)}; {_leaving(standing, holder, first)}.", None
    return "", _keeping(standing, holder, first, due), _look(standing, due)


def _nobody_waits(standing: Standing, holder: SeatView | None) -> tuple[str, str, float | None]:
    """Where a rule may name somebody for whom nobody has asked yet."""
    change = standing.rule.next_change(standing.seats, standing.moment)
    named = standing.rule.prefetch(standing.seats, standing.moment)
    seat = next((each for each in standing.seats if each.seat == named), None)
    if seat is None:
        has = f"{holder.seat} keeps the slot" if holder is not None else "The slot stays empty"
        return "", f"{has}: nobody waits for a seat.", change
    if holder is None:
        return seat.seat, f"{seat.seat} gets the slot, which is empty, before somebody asks: its hours come.", None
    if why := standing.stays(holder):
        return "", f"{seat.seat} should have the slot for its hours, but {why}.", _again(holder, seat)
    # Here a switch waits for as long a pause as a residency, so that it is paid whatever comes after it.
    pause = residency(switching(holder, seat), standing.share)
    if holder.resting and pause - holder.idle <= _SOON:
        idle = f"nobody has asked for {holder.seat} for {spoken(holder.idle)}"
        return seat.seat, f"{seat.seat} gets the slot for its hours: {idle}.", None
    look = min(pause - holder.idle if holder.resting else pause, change if change is not None else pause)
    told = f"{holder.seat} keeps the slot: {seat.seat} gets it for its hours once nobody has asked for {spoken(pause)}."
    return "", told, look


def _look(standing: Standing, due: float) -> float:
    """When to look again, at the latest: when it is due, or somebody else comes first."""
    moments = [due]
    change = standing.rule.next_change(standing.seats, standing.moment)
    if change is not None:
        moments.append(change)
    if standing.patience:
        moments += [left for each in standing.waiting if (left := standing.patience - each.oldest) > 0]
    return min(moments)


def _again(holder: SeatView, comes: SeatView) -> float:
    """When to look again where a seat cannot leave: nobody tells when memory gets free."""
    return switching(holder, comes)


def _wanted(seat: SeatView) -> str:
    """Why a seat wants the slot."""
    since = f"for {spoken(seat.oldest)}"
    if seat.held > 0:
        many = f"{seat.held} requests wait, the first" if seat.held > 1 else "a request waits"
        return f"{many} {since}"
    if seat.phase is Phase.WAITING:
        return f"its container has waited to start {since}"
    return f"it has no port, so that it always wants it, and has been without {since}"


def _leaving(standing: Standing, holder: SeatView, first: SeatView) -> str:
    """Why the one in the slot leaves it."""
    switch = switching(holder, first)
    has = f"{holder.seat} has had it for {spoken(holder.resident)}"
    if residency(switch, standing.share) - holder.resident <= _SOON:
        return f"{has}, which is worth a switch of {spoken(switch)}"
    if standing.idle_in(holder, first) <= _SOON:
        return f"nobody has asked for {holder.seat} for {spoken(holder.idle)}"
    return f"{has} and comes after it"


def _keeping(standing: Standing, holder: SeatView, first: SeatView, seconds: float) -> str:
    """Why the one in the slot keeps it for now, and until when."""
    switch = switching(holder, first)
    least = residency(switch, standing.share)
    told = f"{holder.seat} keeps the slot for another {spoken(seconds)} or until nobody asks for it"
    if holder.resting:
        told = f"{holder.seat} keeps the slot for another {spoken(seconds)}"
        spent = "" if standing.affordable(switch) else ", and switches have taken their share of the time lately"
    else:
        spent = "" if standing.affordable(switch) else ", switches having taken their share of the time lately"
        if spent:
            told = f"{holder.seat} keeps the slot for another {spoken(seconds)}"
    if holder.resident < least:
        why = f"it has had it for {spoken(holder.resident)}, and a switch of {spoken(switch)} is worth {spoken(least)}"
    else:
        why = "it comes before those who wait"
    return f"{told}: {why}{spent}. Next is {first.seat}: {_wanted(first)}."


def _under_way(holder: SeatView) -> str:
    return f"{holder.seat} is {holder.phase}: a switch is under way, and nothing is decided until it has ended."


def _named(seats: list[SeatView] | tuple[SeatView, ...]) -> str:
    names = sorted(each.seat for each in seats)
    more = len(names) - _AT_A_TIME
    return " and ".join([*names[:_AT_A_TIME], *([f"{more} more"] if more > 0 else [])])


def _s(seats: list[SeatView] | tuple[SeatView, ...]) -> str:
    return "s" if len(seats) == 1 else ""
