"""What a rule is: who of those who want the slot comes first, for the register and for `planning/seats/choosing.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planning.seats.group import Policy, SeatView


@dataclass(frozen=True, slots=True)
class Moment:
    """When something is decided: seconds since the epoch, on the clocks of the policy's time zone."""

    local: float
    policy: Policy


class Rule(Protocol):
    """Ranks seats. Pure. Of equal rank who waited longer is first; nobody is passed over for longer than `patience`
    whatever the rank.

    patient: whether somebody who came later may be put before who waits. hurries: whether one that ranks before the
    seat in the slot need not wait for all of its residency, as far as the share that may be lost allows.
    """

    @property
    def name(self) -> str: ...

    @property
    def patient(self) -> bool: ...

    @property
    def hurries(self) -> bool: ...

    def rank(self, seat: SeatView, moment: Moment) -> float:
        """The lowest comes first."""
        ...

    def residencies(self, holder: SeatView, ahead: float, seats: Sequence[SeatView], moment: Moment) -> float:
        """For how many of its residencies `holder`, while it is asked, keeps the slot from one that ranks so far after
        it (before it where that is negative); inf for as long as it is asked.
        """
        ...

    def next_change(self, seats: Sequence[SeatView], moment: Moment) -> float | None:
        """Seconds until ranks, or who is prefetched, change with the clock; None if they never do."""
        ...

    def prefetch(self, seats: Sequence[SeatView], moment: Moment) -> str:
        """A seat that should have the slot though nobody waits; '' for none. It gets it where nobody uses the slot."""
        ...
