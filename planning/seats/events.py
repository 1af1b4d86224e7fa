"""What people are told of a group's seats as Events: what is another thing since it was looked at last, a sentence
each.

A busy group switches every few seconds: of what happens again and again the first is told at once, and the rest as one
with a count. For the node's process, which writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from planning.seats.group import spoken
from planning.seats.status import GroupPicture, SeatPicture, SwitchPicture

QUIET = 60.0  # seconds for which what was told is not told again
OFTEN = 300.0  # the same for switches, which are no news on a group that is asked for two seats

MOST_SERIES = 512  # of one group: its seats, with what can be said of each


@dataclass(frozen=True, slots=True)
class Told:
    """An Event. `pod`: namespace, name and UID of the pod that it is about; None: it is about the group, and so about
    its node.
    """

    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str
    pod: tuple[str, str, str] | None = None


def news(before: GroupPicture, now: GroupPicture) -> list[Told]:
    """What is to be told of a group that was `before` and is `now`."""
    told: list[Told] = []
    seats, were = {each.id: each for each in now.seats}, {each.id: each for each in before.seats}
    told += [event for id, seat in seats.items() for event in _of_seat(were.get(id), seat)]
    if now.last is not None and now.last != before.last:
        tried = {event.pod for event in told if event.reason == "TrialParkFailed"}
        told += [
            event for event in _switched(now.group, now.last, seats) if event.pod is None or event.pod not in tried
        ]
    if now.phase == "Quarantined" and before.phase != "Quarantined":
        why = now.message or "nothing more is known"
        note = f"Group {now.group} is left alone, and nobody gets its slot: {why}"
        told.append(Told("Warning", "SeatGroupQuarantined", "SwitchSeats", note))
    if before.phase == "Quarantined" and now.phase != "Quarantined":
        lasted = f" after {spoken(now.since - before.since)}" if 0 < before.since < now.since else ""
        has = f"{now.active} has its slot" if now.active else "its slot is to be had"
        note = f"Group {now.group} is at work again{lasted}: {has}."
        told.append(Told("Normal", "SeatGroupRecovered", "SwitchSeats", note))
    return told


def _of_seat(before: SeatPicture | None, now: SeatPicture) -> list[Told]:
    """What happened to a seat beside switches. A pod that has just got it has no past."""
    pod = _pod(now)
    if pod is None:
        return []
    if before is None or _pod(before) != pod:
        before = SeatPicture(now.id, "Absent")
    if now.lost and not before.lost:
        why = now.error or now.message or "nothing more is known"
        note = f"The state of the server on {now.id} is gone; it starts cold when it gets the slot: {why}"
        return [Told("Warning", "SeatLost", "ParkSeat", note, pod)]
    if before.lost and not now.lost and now.phase == "Active":
        return [Told("Normal", "SeatStartedCold", "WakeSeat", f"{now.id} serves again, after a cold start.", pod)]
    if now.error and now.error != before.error and not now.lost and now.parkable is None:
        note = f"Parking {now.id} was tried for the first time and did not come off; until it does it keeps the slot: "
        return [Told("Warning", "TrialParkFailed", "ParkSeat", note + now.error, pod)]
    return []


def _switched(group: str, last: SwitchPicture, seats: dict[str, SeatPicture]) -> list[Told]:
    stages = [
        f"{name} {spoken(seconds)}" for name, seconds in last.seconds.items() if ":" not in name and seconds >= 0.05
    ]
    took = spoken(last.whole) + (f" ({', '.join(stages)})" if len(stages) > 1 else "")
    why = f": {last.reason}" if last.reason else ""
    old, new = seats.get(last.before), seats.get(last.after)
    told: list[Told] = []
    match last.outcome:
        case "Switched":
            note = f"Group {group} switched to {last.after} in {took}{why}"
            told.append(Told("Normal", "SeatSwitched", "SwitchSeats", note))
            if new is not None and (pod := _pod(new)) is not None:
                told.append(Told("Normal", "SeatActive", "WakeSeat", f"{new.id} has the slot, in {took}{why}", pod))
            if old is not None and old.phase == "Parked" and (pod := _pod(old)) is not None:
                note = f"{old.id} is parked, for {last.after} has the slot; a request wakes it."
                told.append(Told("Normal", "SeatParked", "ParkSeat", note, pod))
        case "Kept":
            note = last.reason or f"{last.before} could not be parked."
            told.append(Told("Warning", "SeatNotParked", "ParkSeat", note))
            if old is not None and (pod := _pod(old)) is not None:
                told.append(Told("Warning", "SeatNotParked", "ParkSeat", note, pod))
        case "Failed":
            note = f"Group {group} did not come to a switch to {last.after or 'another seat'} in {took}{why}"
            told.append(Told("Warning", "SeatSwitchFailed", "SwitchSeats", note))
            if new is not None and (pod := _pod(new)) is not None:
                told.append(Told("Warning", "SeatSwitchFailed", "WakeSeat", note, pod))
        case "Quarantined":
            pass  # the group's phase tells
    return told


def _pod(seat: SeatPicture) -> tuple[str, str, str] | None:
    return None if seat.pod is None or not seat.uid else (seat.pod[0], seat.pod[1], seat.uid)


@dataclass(slots=True)
class _Series:
    first: float  # when it was told
    last: Told
    since: int = 0  # how often it was not told since


class Pace:
    """Lets through what is not too often. One for each group; times are seconds on any one clock."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, tuple[str, str, str] | None], _Series] = {}

    def at(self, told: Iterable[Told], now: float) -> list[Told]:
        """What is to be told now: what was not told of late, and what came meanwhile of whose quiet time is over."""
        out: list[Told] = []
        for event in told:
            key = (event.reason, event.pod)
            series = self._series.get(key)
            if series is not None:
                series.last, series.since = event, series.since + 1
            elif len(self._series) < MOST_SERIES:
                self._series[key] = _Series(now, event)
                out.append(event)
        for key, series in list(self._series.items()):
            quiet = OFTEN if series.last.type == "Normal" else QUIET
            passed = now - series.first
            if passed < quiet:
                continue
            if series.since == 0:
                del self._series[key]
                continue
            out.append(_once(series.last, series.since, passed))
            series.first, series.since = now, 0
        return out


def _once(last: Told, count: int, seconds: float) -> Told:
    if count == 1:
        return last
    return replace(last, note=f"{count} times in {spoken(seconds)}, the last: {last.note}")
