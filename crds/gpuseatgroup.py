"""GPUSeatGroup (kyb.ai/v1alpha1): a group of GPUs of one node, whose seats share one slot: who has it, who is parked,
who waits.

The node's own process writes it, and nobody else; people read it. It goes with the node's object.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StrictBool, StrictStr

from crds.gpuseatprofile import GroupName, Rebalance
from crds.gpuworkload import Condition, Count, CRDModel, Name, ObjectName, Time

KIND = "GPUSeatGroup"
PLURAL = "gpuseatgroups"
MOST_SHOWN = 64  # seats, which is as many as a group has
MOST_STAGES = 16
MOST_CHECKS = 32

Short = Annotated[StrictStr, Field(max_length=128)]
Sentence = Annotated[StrictStr, Field(max_length=512)]
Millis = Annotated[Count, Field(json_schema_extra={"format": "int64"})]
Bytes = Annotated[Count, Field(json_schema_extra={"format": "int64"})]


def _keyed(key: str) -> dict[str, JsonValue]:
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class GPUSeatGroupSpec(CRDModel):
    """What this object is about."""

    node_name: ObjectName
    group: GroupName


class PodSeat(CRDModel):
    """The container that has a seat."""

    namespace: Name
    pod: Name
    container: Name


class SeatStatus(CRDModel):
    """One seat."""

    id: Short
    phase: Literal[
        "Absent", "Waiting", "Starting", "Active", "Draining", "Parking", "Parked", "Waking", "Lost", "Quarantined"
    ]
    since: Time | None = Field(default=None, description="When the phase became what it is.")
    reason: Short | None = Field(default=None, description="Why it is in this phase, in a word.")
    message: Sentence | None = None
    last_error: Sentence | None = Field(
        default=None, description="Why it could not be parked, or lost its state; until that has come off."
    )
    held_by: PodSeat | None = None
    backend: Short | None = Field(default=None, description="How it is parked and woken.")
    parkable: StrictBool | None = Field(default=None, description="False: whoever has the slot before it keeps it.")
    port: Annotated[Count, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Where the node's seat proxy takes its requests."
    )
    requests: Count | None = Field(default=None, description="Requests that wait for it to wake.")
    busy_percent: Annotated[Count, Field(le=100)] | None = Field(
        default=None, description="For how much of windowSeconds requests for it waited or were in flight."
    )
    passed_on: Short | None = Field(
        default=None, description="Where its requests go, as it moves to another seat (SeatMigration)."
    )
    parked_bytes: Bytes | None = Field(default=None, description="Of its GPUs' memory, in its container's memory now.")
    park_millis: Millis | None = Field(default=None, description="What parking it takes, as measured of late.")
    wake_millis: Millis | None = Field(default=None, description="What waking it takes, as measured of late.")
    expected_millis: Millis | None = Field(
        default=None, description="Until it serves, as whoever waits for it is told."
    )


class Stage(CRDModel):
    """A part of a switch."""

    name: Short
    millis: Millis


class Switch(CRDModel):
    """A change of who has the slot."""

    at: Time
    before: Short | None = Field(default=None, description="The seat that was parked; none where the slot was empty.")
    after: Short | None = Field(default=None, description="The seat that got it; none where that failed.")
    outcome: Literal["Switched", "Kept", "Failed", "Quarantined"] | None = Field(
        default=None, description="Kept: whoever had the slot could not be parked. Failed: nobody has it."
    )
    millis: Millis
    stages: Annotated[list[Stage], Field(max_length=MOST_STAGES)] | None = Field(
        default=None, json_schema_extra=_keyed("name")
    )
    reason: Sentence


class Check(CRDModel):
    """What was found out before anything is parked."""

    name: Short
    ok: StrictBool
    message: Sentence


class GPUSeatGroupStatus(CRDModel):
    """What the node sees."""

    updated: Time | None = None
    simulated: StrictBool | None = Field(default=None, description="True: its GPUs are pretended.")
    resource: Short | None = Field(default=None, description="What its seats are asked for as.")
    window_seconds: Annotated[Count, Field(ge=1)] | None = Field(
        default=None, description="Over how long busyPercent is counted: its policy's windowSeconds."
    )
    rebalance: Rebalance | None = Field(default=None, description="As its GPUSeatProfile says.")
    phase: Literal[
        "Empty", "Starting", "Active", "Draining", "Parking", "VerifyFree", "Restoring", "VerifyServing", "Quarantined"
    ] | None = None  # fmt: skip
    active: Short | None = Field(default=None, description="The seat that has the slot.")
    reason: Short | None = None
    message: Sentence | None = Field(default=None, description="Why it is so, and what follows.")
    since: Time | None = Field(default=None, description="When the phase became what it is.")
    requests: Count | None = Field(default=None, description="Requests that wait, of all seats.")
    oldest_millis: Millis | None = Field(default=None, description="For how long the first of them has waited.")
    refused: Count | None = Field(
        default=None, description="Requests refused with 503, since the node's process began."
    )
    held: Count | None = Field(default=None, description="Seats that containers have.")
    parked: Count | None = Field(default=None, description="Seats that are parked.")
    parked_bytes: Bytes | None = None
    switches: Count | None = Field(default=None, description="Since the node's ledger began.")
    last_switch: Switch | None = None
    seats: Annotated[list[SeatStatus], Field(max_length=MOST_SHOWN)] | None = Field(
        default=None, json_schema_extra=_keyed("id")
    )
    preflight: Annotated[list[Check], Field(max_length=MOST_CHECKS)] | None = Field(
        default=None, description="What this node can park with, and what it lacks.", json_schema_extra=_keyed("name")
    )
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        default=None, json_schema_extra=_keyed("type")
    )
