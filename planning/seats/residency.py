"""How long a seat keeps the slot before another gets it: from what a switch takes, so that a bounded share is lost.

For whoever chooses who is active. Nothing here is a constant of anybody's: a group whose switches are measured to be
fast changes hands as often as that allows. S below is what a switch takes, L the share of time that they may take.
"""

from __future__ import annotations

from collections.abc import Iterable

from planning.seats.group import SeatView

# What a switch takes at least, in seconds, whatever was measured: it is two activities and a few calls of a driver.
LEAST_SWITCH = 0.1


def residency(switch: float, lost: float) -> float:
    """Seconds that a seat must have had the slot so that a switch of so many has been worth it: S / (S + R) <= L."""
    return switch * (1 - lost) / lost


def pause(switch: float, lost: float) -> float:
    """For how long nobody asks for a seat before it counts as idle: S * L. What is shorter is taken for the moment
    between two requests of one user, and costs whoever waits no more than that share of a switch.
    """
    return switch * lost


def switching(leaves: SeatView | None, comes: SeatView) -> float:
    """What a switch between these is expected to take, in seconds, the drain left out: meanwhile the GPU works."""
    return max((leaves.park if leaves is not None else 0.0) + comes.wake, LEAST_SWITCH)


def turn(seats: Iterable[SeatView], lost: float) -> float:
    """The longest that it takes until each of the seats has had the slot for its residency, drains included: in it each
    seat is parked once and woken once.
    """
    return sum((each.park + each.wake + LEAST_SWITCH) / lost + each.drain for each in seats)


def patience(seats: Iterable[SeatView], lost: float) -> float:
    """For how long others may be put before a seat that waits: after that, nobody who came later is. So many turns that
    those who wait so long take no more than the share L of the time from those who come before them.
    """
    return turn(seats, lost) / lost


def bound(seats: Iterable[SeatView], lost: float, patient: bool) -> float:
    """The longest that anybody waits for a seat, in seconds, whatever is asked for: what is under way, a turn of all
    the others, and patience where the rule puts others first. It holds while nobody is pinned, each seat can be parked
    and woken, and both take no longer than expected.
    """
    those = tuple(seats)
    under_way = max((each.park + each.drain for each in those), default=0.0) + max(
        (each.wake for each in those), default=0.0
    )
    return under_way + turn(those, lost) + (patience(those, lost) if patient else 0.0)
