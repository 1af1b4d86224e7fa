"""What the workflow of a seat group carries on, and how people find it in Temporal: names and values, and nothing that
does the work.
"""

from __future__ import annotations

from dataclasses import dataclass

from temporalio.common import SearchAttributePair, TypedSearchAttributes

from activities.messages import KIND, NAME, NODE
from planning.seats.orders import SEAT_GROUP_WORKFLOW


@dataclass(frozen=True)
class GroupState:
    """What the workflow starts with and carries over continue-as-new. Who has the slot is not in it: the node's ledger
    and its hardware know.
    """

    node: str
    group: str


def group_attributes(node: str, group: str) -> TypedSearchAttributes:
    return TypedSearchAttributes(
        [
            SearchAttributePair(KIND, SEAT_GROUP_WORKFLOW),
            SearchAttributePair(NAME, group),
            SearchAttributePair(NODE, node),
        ]
    )
