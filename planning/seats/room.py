"""Decides whether a group's GPUs have room for a seat: by the driver's word on free memory, and on who holds some.

For the node, before it wakes or starts a server: a restore that runs out of memory loses the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planning.seats.host_memory import amount

MARGIN = 64 * 2**20  # bytes that must be free on a GPU beyond what a seat had there, for a small one a 32nd of that


@dataclass(frozen=True, slots=True)
class CardRoom:
    """A GPU: bytes that are free, and that processes hold, by pid."""

    free: int
    holders: Mapping[int, int] = field(default_factory=dict)


def lacks(
    group: str, seat: str, cards: Mapping[str, CardRoom | None], owners: Mapping[int, str], had: Mapping[str, int]
) -> str:
    """Why there is no room, as the end of a sentence; '' if there is. cards: the group's, None for one that the driver
    does not show; owners: whose each process of the group's seats is; had: bytes that the seat had on each card.
    """
    for card, room in cards.items():
        if room is None:
            return f"the driver does not show the GPU {card}"
        for pid, size in sorted(room.holders.items()):
            if pid not in owners:
                return f"process {pid}, which is of no seat of {group}, holds {amount(size)} of GPU {card}"
        before = had.get(card, 0)
        own = sum(size for pid, size in room.holders.items() if owners[pid] == seat)
        need = max(0, before + min(MARGIN, before // 32) - own)
        if room.free < need:
            return f"GPU {card} has {amount(room.free)} free, and {seat} needs {amount(need)} there"
    return ""
