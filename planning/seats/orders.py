"""What is said between a seat group's workflow and its node: names and values, small, for they go through histories.

The workflow only sequences. Who is to have the slot is decided by the node's first activity, which sees the requests
that wait there and reads the hardware; what it returns is that decision (law 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CLEAR = "clear_slot"
"""Activity on a node's queue: GroupTask -> Cleared. Reads the hardware, puts in order what was left halfway, decides
who is to have the slot, and if that is another drains and parks whoever has it."""
FILL = "fill_slot"
"""Activity on a node's queue: GroupTask -> Filled. Gives the slot that is clear to whom it was cleared for: wakes it,
or lets its container start, once its GPUs are proven to have room, and proves that it serves."""
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
    refuses every run before it. `next`: for whom the slot was cleared; '' for CLEAR.
    """

    node: str
    group: str
    run: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class Cleared:
    """`next` is the seat that is to get the slot, '' where all stays as it is; `active` has it now, '' nobody. `reason`
    says for people why, `within` after how many seconds to look again without news (None: never), `seconds` what each
    stage took. `gone`: the node has no such group any more.
    """

    phase: GroupPhase
    active: str = ""
    next: str = ""
    reason: str = ""
    within: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Filled:
    """As Cleared has it, after the slot was given; `active` is '' where that did not come off, and `reason` why."""

    phase: GroupPhase
    active: str = ""
    reason: str = ""
    within: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def seat_queue(node: str) -> str:
    """The task queue of a node's activities for seats."""
    return f"node-{node}-seats"


def group_id(node: str, group: str) -> str:
    """The id of a group's workflow."""
    return f"seatgroup/{node}/{group}"
