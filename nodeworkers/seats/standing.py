"""Where planning has a seat, by how it looks and by who has the slot: for `node_world.py`, before it asks whose turn it
is.
"""

from __future__ import annotations

from collections.abc import Mapping

from nodeworkers.seats.slots import Slot
from nodeworkers.seats.world import SeatLook
from planning.seats.group import Phase

_PHASES: Mapping[str, Phase] = {
    "Starting": Phase.STARTING, "Active": Phase.ACTIVE, "Draining": Phase.DRAINING, "Parking": Phase.PARKING,
    "Restoring": Phase.WAKING, "VerifyServing": Phase.WAKING,
}  # fmt: skip


def standing(look: SeatLook, slot: Slot, seat: str, *, asks: bool) -> Phase:
    """`asks`: its container wants to start. One that only requests would start counts as lost."""
    if slot.seat == seat and look.state in ("Running", "Locked", "Changing", "Waiting") and slot.phase in _PHASES:
        return _PHASES[slot.phase]
    match look.state:
        case "Absent":
            return Phase.ABSENT
        case "Parked":
            return Phase.PARKED
        case "Waiting":
            return Phase.WAITING if asks else Phase.LOST
        case _:
            return Phase.QUARANTINED
