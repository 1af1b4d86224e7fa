"""What is said between a seat group's workflow and its node: names and values, small, for they go through histories.

The workflow only sequences. Who is to have the slot is decided by the node's activity, which sees the requests that
wait there and reads the hardware; what it returns is that decision, and what came of it (law 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TURN = "take_turn"
"""Activity on a node's queue: GroupTask -> Turned. Reads the hardware, puts in order what was left halfway, and decides
who is to have the slot. If that is another it drains and parks whoever has it, proves that the GPUs have room, wakes
the other or lets its container start, and proves that it serves. Safe to repeat from wherever it was broken off."""
PREFER = "prefer_seats"
"""Activity on a node's queue: Preferred -> None. Of seats that are as good as each other the kubelet is told the named
group's first, for a while."""
DIVERT = "divert_requests"
"""Activity on a node's queue: Divert -> Diverted. Requests for a seat go elsewhere once none is in flight, or go to its
server again. Safe to repeat."""
NEWS = "news"
"""Signal of a node's process to a group's workflow, without content: somebody waits, or something changed there."""
SEAT_GROUP_WORKFLOW = "SeatGroup"

SUPERSEDED_RUN = "SupersededRun"
"""Type of the ApplicationError with which a node refuses a run of the workflow since it has heard of another."""

GroupPhase = Literal[
    "Empty", "Starting", "Active", "Draining", "Parking", "VerifyFree", "Restoring", "VerifyServing", "Quarantined"
]


@dataclass(frozen=True, slots=True)
class GroupTask:
    """`run` is the workflow's run: the node issues a fencing epoch when it hears of a run first, and from then on
    refuses every run before it.
    """

    node: str
    group: str
    run: str


@dataclass(frozen=True, slots=True)
class Turned:
    """`active` has the slot now, '' nobody; `switched`: that is another than before. `reason` says for people why,
    `within` after how many seconds to look again without news (None: never), `seconds` what each stage took. `gone`:
    the node has no such group any more.
    """

    phase: GroupPhase
    active: str = ""
    switched: bool = False
    reason: str = ""
    within: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Preferred:
    """`seconds`: for how long; 0 takes it back."""

    group: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Divert:
    """`pod`: the UID of the pod that has the seat; `address`: host and port, '' for its own server again."""

    group: str
    seat: str
    pod: str
    address: str


@dataclass(frozen=True, slots=True)
class Diverted:
    """`why_not`: why all is as it was, '' where it was done."""

    why_not: str = ""


def seat_queue(node: str) -> str:
    """The task queue of a node's activities for seats."""
    return f"node-{node}-seats"


def group_id(node: str, group: str) -> str:
    """The id of a group's workflow."""
    return f"seatgroup/{node}/{group}"
