"""Groups of seats for tests: shortly written, and advanced in time as if nothing happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planning.seats.group import GroupView, Phase, Policy, SeatView

PARK, WAKE = 14.0, 6.0
SWITCH = PARK + WAKE


def seat(number: int, phase: Phase = Phase.PARKED, **said: Any) -> SeatView:
    known: dict[str, Any] = {"name": f"m{number}", "park": PARK, "wake": WAKE} | said
    return SeatView(f"kyb-G01-s{number}", phase, **known)


def active(number: int, *, resident: float, running: int = 1, idle: float = 0.0, **said: Any) -> SeatView:
    return seat(number, Phase.ACTIVE, resident=resident, running=running, idle=idle, **said)


def waited(number: int, oldest: float, **said: Any) -> SeatView:
    return seat(number, held=said.pop("held", 1), oldest=oldest, **said)


def group(*seats: SeatView, rule: str = "onDemand", lost: float = 0.0, **said: Any) -> GroupView:
    policy = said.pop("policy", Policy(rule))
    return GroupView(seats, policy, lost, **said)


def later(view: GroupView, seconds: float) -> GroupView:
    """The same group after so many seconds in which nothing happened."""

    def aged(each: SeatView) -> SeatView:
        resting = each.phase is Phase.ACTIVE and each.resting
        return replace(
            each,
            oldest=each.oldest + seconds if each.wants else each.oldest,
            resident=each.resident + seconds,
            idle=each.idle + seconds if resting else each.idle,
            used=each.used + seconds if each.phase is Phase.ACTIVE else each.used,
        )

    return replace(view, seats=tuple(aged(each) for each in view.seats))
