"""SeatMigration (kyb.ai/v1alpha1): a model server moves to a seat of another group of GPUs, for whoever orders a move,
or follows one.

It is ordered once: what is to be moved, and where to, is not edited later. Deleted while it is under way, it is undone,
as long as whatever was to be moved still serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StrictStr, model_validator

from crds.gpuseatprofile import GroupName
from crds.gpuworkload import (
    SPEC_LIMIT,
    Condition,
    CRDModel,
    Generation,
    Int,
    Name,
    ObjectName,
    Time,
    serialised_size,
)

KIND = "SeatMigration"
PLURAL = "seatmigrations"
FINALIZER = "kyb.ai/finalizer"
DEADLINE = 600  # seconds
LEAST_DEADLINE, MOST_DEADLINE = 10, 86_400
MOST_STEPS = 16

Phase = Literal["Pending", "Starting", "Switching", "Completed", "RollingBack", "RolledBack", "Refused"]
ENDED: tuple[Phase, ...] = ("Completed", "RolledBack", "Refused")

Short = Annotated[StrictStr, Field(max_length=128)]
Sentence = Annotated[StrictStr, Field(max_length=1024)]


def _keyed(key: str) -> dict[str, JsonValue]:
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class Workload(CRDModel):
    """What has one pod with a seat."""

    kind: Literal["Deployment", "GPUWorkload"]
    name: ObjectName


class Destination(CRDModel):
    """Where a seat is to be: on another group, another node, or both."""

    group: GroupName | None = Field(
        default=None, description="The group of GPUs; left out, any of the node that has a free seat."
    )
    node: ObjectName | None = Field(default=None, description="The node; left out, the one that it is on.")


class SeatMigrationSpec(CRDModel):
    """A move."""

    pod: ObjectName | None = Field(default=None, description="The pod that is to move.")
    workload: Workload | None = Field(
        default=None, description="Instead of a pod: what the pod belongs to, where it has one pod with a seat."
    )
    to: Destination = Field(description="Where it is to be.")
    deadline_seconds: Annotated[
        Int, Field(ge=LEAST_DEADLINE, le=MOST_DEADLINE, json_schema_extra={"format": "int32"})
    ] = Field(
        default=DEADLINE, description="Seconds that the new server gets to serve; after that all is as it was before."
    )

    @model_validator(mode="after")
    def _whole(self) -> SeatMigrationSpec:
        if (self.pod is None) == (self.workload is None):
            raise ValueError("names either a pod or a workload")
        if self.to.group is None and self.to.node is None:
            raise ValueError("to names a group, a node, or both")
        return self

    @classmethod
    def parse(cls, raw: object) -> tuple[SeatMigrationSpec | None, str]:
        """The spec, or None and a sentence with path and reason. Never raises, whatever `raw` is."""
        if not isinstance(raw, Mapping):
            return None, "spec: must be an object"
        if serialised_size(raw, SPEC_LIMIT) > SPEC_LIMIT:
            return None, f"spec: must be at most {SPEC_LIMIT // 1024} KiB as JSON"
        return cls.validated(raw, "spec")


class Place(CRDModel):
    """A pod and its seat."""

    node: Name | None = None
    group: Short | None = None
    seat: Short | None = None
    pod: Name | None = None


class Step(CRDModel):
    """Something that was done."""

    name: Short
    at: Time


class SeatMigrationStatus(CRDModel):
    """How far it is."""

    observed_generation: Generation | None = None
    phase: Phase | None = Field(
        default=None,
        description="Starting: another server starts at the destination; Switching: it serves, requests go there, and "
        "the one before it goes. RollingBack: the other goes, and the one before it goes on.",
    )
    reason: Short | None = Field(default=None, description="Why it is in this phase, in a word.")
    message: Sentence | None = None
    source: Place | None = Field(default=None, description="From where.")
    destination: Place | None = Field(default=None, description="Where to; with the seat once there is one.")
    steps: Annotated[list[Step], Field(max_length=MOST_STEPS)] | None = Field(
        default=None, json_schema_extra=_keyed("name")
    )
    finished: Time | None = None
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        default=None, json_schema_extra=_keyed("type")
    )
