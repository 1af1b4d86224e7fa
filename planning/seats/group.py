"""A group of seats as planning sees it at one moment, and what is decided about it: the values of `planning/seats`.

For whoever holds a group (the node, which reads hardware, proxy and ledger) and for `berth simulate seats`, which plays
one. Times are in seconds, amounts in bytes; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from crds.gpuseatprofile import DAYS, LOST_PERCENT, POLICY_WINDOW, SeatPolicy
from planning.seats.host_memory import Level, NodeMemory

DEFAULT_PARK = 14.0
DEFAULT_WAKE = 7.0
"""Seconds that a switch is expected to take where none was measured yet: an 80 GB card that is full, by the driver's
checkpoint (derived from published rates, shared field notes on seats; nothing that berth measured)."""


class Phase(StrEnum):
    """Where a seat is. `Waiting`: its container wants to start, for the first time or again; `Lost`: its server must
    start cold when somebody asks for it.
    """

    ABSENT = "Absent"
    WAITING = "Waiting"
    STARTING = "Starting"
    ACTIVE = "Active"
    DRAINING = "Draining"
    PARKING = "Parking"
    PARKED = "Parked"
    WAKING = "Waking"
    LOST = "Lost"
    QUARANTINED = "Quarantined"


IN_SLOT = frozenset({Phase.STARTING, Phase.ACTIVE, Phase.DRAINING, Phase.PARKING, Phase.WAKING})
"""Those who have the slot, or come into it, or leave it: of a group at most one."""

READY = frozenset({Phase.WAITING, Phase.PARKED, Phase.LOST})
"""Those who could get it."""


@dataclass(frozen=True, slots=True)
class SeatView:
    """A seat. What nobody knows stays at its default; numbers that make no sense count as the nearest that do.

    seat: its device id. name: what a schedule calls it. held: requests that the proxy holds for it. oldest: for how
    long somebody has waited for it: since the first request that it has not served since it had the slot last (one that
    was refused meanwhile counts, or whoever is refused again and again never comes); of a container that wants to
    start, since it does; of a batch seat, since it lost the slot. running: requests in flight. idle: since the last of
    them ended. resident: since it serves; in another phase than Active, since that began. used: for how long it had the
    slot within the policy's window. priority, weight: higher comes first, gets more. batch: it has no port, so that it
    always wants the slot.

    park, wake: what these are expected to take, measured, without the drain; of a `Lost` or `Waiting` seat `wake` is
    its start. drain: how long requests in flight take to end. busy: how long it is asked without a pause once it is,
    None where nothing is known (then as long as a residency is expected). late: how many times as long as expected
    others keep it waiting, from what was told before and how long it took then (`Late`).

    parkable: whether it can be parked at all; why_not is then the reason, to follow a colon. bytes: what parking moves
    to the host; numa: which of them to which NUMA node; bound: whether its memory may be on no other; levels: the
    limits that its container is under.
    """

    seat: str
    phase: Phase
    name: str = ""
    held: int = 0
    oldest: float = 0.0
    running: int = 0
    idle: float = 0.0
    resident: float = 0.0
    used: float = 0.0
    priority: int = 0
    weight: float = 1.0
    batch: bool = False
    park: float = DEFAULT_PARK
    wake: float = DEFAULT_WAKE
    drain: float = 0.0
    busy: float | None = None
    late: float = 1.0
    parkable: bool = True
    why_not: str = ""
    bytes: int = 0
    numa: tuple[tuple[int, int], ...] = ()
    bound: bool = False
    levels: tuple[Level, ...] = ()

    @property
    def wants(self) -> bool:
        """Whether somebody waits for it to have the slot."""
        return self.phase in READY and (self.held > 0 or self.batch or self.phase is Phase.WAITING)

    @property
    def resting(self) -> bool:
        """Whether it has the slot and nobody asks for it."""
        return not self.batch and self.running <= 0 and self.held <= 0


@dataclass(frozen=True, slots=True)
class Hours:
    """A window of a schedule. seats: names. days: 0 is Monday; of the day on which it begins. start, end: minutes since
    midnight; one that does not end after its start ends on the next day.
    """

    seats: tuple[str, ...]
    days: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Who is active, as a GPUSeatProfile says it. rule: its name in `planning.seats.rules`. lost: the share of the time
    (0 to 1) that switches may take. window: the seconds over which time is counted, what was used and what was lost.
    """

    rule: str = "onDemand"
    lost: float = LOST_PERCENT / 100
    window: float = float(POLICY_WINDOW)
    hours: tuple[Hours, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group. lost: seconds that its switches took within the policy's window (`Recent`), one under way included.
    pinned: the seat that a person pinned, '' if none. target: for whom the switch under way is, '' where nobody knows.
    memory: the node's, None where parking is not checked. utc_offset: seconds that clocks in the schedule's time zone
    are ahead of UTC just now, for reading time zones is I/O.
    """

    seats: tuple[SeatView, ...]
    policy: Policy
    lost: float
    pinned: str = ""
    target: str = ""
    memory: NodeMemory | None = None
    utc_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is decided. seat: who is to have the slot now, '' to leave all as it is. reason: a sentence for a person.
    within: seconds after which to look again though nothing happened, None for never. waits: for each seat that
    somebody waits for, the seconds until it is expected to serve; one for which nobody can say it is not in it.

    Something has happened when a phase changed, somebody began to wait for a seat for which nobody did, or the last
    request in flight ended. Another request for a seat that has some changes nothing.
    """

    seat: str
    reason: str
    within: float | None = None
    waits: Mapping[str, float] = field(default_factory=dict)


def policy_of(spec: SeatPolicy | None) -> Policy:
    """The policy of a profile's entry; without one, on demand."""
    if spec is None:
        return Policy()
    hours = tuple(
        Hours(
            seats=tuple(each.seats),
            days=tuple(DAYS.index(day) for day in each.days or DAYS),
            start=_minutes(each.start),
            end=_minutes(each.end),
        )
        for each in spec.schedule or ()
    )
    return Policy(spec.type, spec.lost_percent / 100, float(spec.window_seconds), hours)


def _minutes(clock: str) -> int:
    """Since midnight, of `08:30`."""
    hours, minutes = clock.split(":")
    return 60 * int(hours) + int(minutes)


def spoken(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3.5 min`, `2.5 h`: a time for a person."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}".removesuffix(".0") + " s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds < 9.95 * 60:
        return f"{seconds / 60:.1f}".removesuffix(".0") + " min"
    if seconds < 119.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f}".removesuffix(".0") + " h"
