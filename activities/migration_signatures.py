"""What the workflow of a SeatMigration may ask of its activities, and how controller and workflow find each other:
names and values, and nothing that does the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from temporalio.common import SearchAttributePair, TypedSearchAttributes

from activities.messages import KIND, NAME, NAMESPACE
from planning.seats.migration import Move
from planning.seats.rebalancing import Standing

SEAT_MIGRATION_WORKFLOW = "SeatMigration"
MIGRATION_QUEUE = "control-plane-migrations"
"""Where its activities are carried out, beside whatever the ledger does."""
START_QUEUE = "control-plane-migration-starts"
"""Where the one is that waits for a server to start, for a day perhaps: nobody who ends or undoes one waits for it."""

DECIDE_MIGRATION = "decide_migration"
"""MigrationRef -> Decided. What is decided is claimed: no other SeatMigration touches the pod from then on."""
START_REPLACEMENT = "start_replacement"
"""Move -> Started. Returns once the new server serves, or will not."""
RETIRE = "retire_moved_pod"
"""Move -> Ended. Requests go to the new server already: ends the one before it."""
ROLL_BACK = "roll_migration_back"
"""RollBack -> Ended. All is as it was before; or done, where the old server was ending already. With the reason NOT_YET
nothing was done: the old server is there, and its requests may go to the new one."""
NOT_YET = "NotYet"

SEAT_REBALANCING_WORKFLOW = "SeatRebalancing"
REBALANCE_SEATS = "rebalance_seats"
"""Standing -> Rebalanced. One look at all groups of seats; orders or proposes a move where one has been worth it for a
while."""


@dataclass(frozen=True)
class MigrationRef:
    namespace: str
    name: str
    uid: str

    @property
    def told(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Decided:
    """`move`: what is to be done, None where nothing is; `message` says what was decided. `resumed`: somebody has begun
    with it before, and nobody knows how far that came; `undo`: that was to be undone.
    """

    message: str
    move: Move | None = None
    resumed: bool = False
    undo: bool = False


@dataclass(frozen=True)
class Started:
    """`reason`: why the new server will not serve, in a word; '' where it does, and then `address` is where the proxy
    of its node takes its requests, '' where it takes none.
    """

    message: str
    reason: str = ""
    address: str = ""


@dataclass(frozen=True)
class RollBack:
    """Why, in a word and a sentence. `own`: requests for the old server go to itself, for certain."""

    move: Move
    reason: str
    message: str
    own: bool = True


@dataclass(frozen=True)
class Ended:
    """`reason`: why it was not done, in a word; '' where it was."""

    message: str
    reason: str = ""


@dataclass(frozen=True)
class Rebalanced:
    """`within`: look again after so many seconds; None: no GPUSeatProfile asks for it any more."""

    message: str
    standing: Standing = field(default_factory=Standing)
    within: float | None = None


@dataclass
class RebalancingState:
    """What the workflow carries over continue-as-new."""

    pool: str = "default"
    standing: Standing = field(default_factory=Standing)


def rebalancing_id(pool: str) -> str:
    return f"seatrebalancing/{pool}"


def rebalancing_attributes(pool: str) -> TypedSearchAttributes:
    return TypedSearchAttributes(
        [SearchAttributePair(KIND, SEAT_REBALANCING_WORKFLOW), SearchAttributePair(NAME, pool)]
    )


def migration_id(uid: str) -> str:
    return f"seatmigration/{uid}"


def migration_attributes(ref: MigrationRef) -> TypedSearchAttributes:
    return TypedSearchAttributes(
        [
            SearchAttributePair(KIND, SEAT_MIGRATION_WORKFLOW),
            SearchAttributePair(NAMESPACE, ref.namespace),
            SearchAttributePair(NAME, ref.name),
        ]
    )
