"""GPUReservation (gpu.warp.dev/v1alpha1): GPUs kept for some namespaces for a time, for everyone who reads one.

A GPUWorkload uses it by naming it in `spec.reservation`; what it does not use meanwhile, preemptible work may.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictStr, ValidationInfo, field_validator

from crds.gpuworkload import (
    SPEC_LIMIT,
    Condition,
    Count,
    CRDModel,
    Generation,
    Int,
    LabelKey,
    LabelValue,
    Name,
    NamespaceName,
    Time,
    serialised_size,
)

KIND = "GPUReservation"
PLURAL = "gpureservations"
MOST_GPUS = 10_000
MOST_SHOWN = 256  # nodes in a status

Phase = Literal["Pending", "Reserved", "Active", "Ended"]

_MOMENT = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$"


def _moment(value: str) -> str:
    try:
        seconds(value)
    except (ValueError, OverflowError):
        raise ValueError(f"is no time that there is, such as 2026-03-01T14:00:00Z; it is {value}") from None
    return value


Moment = Annotated[
    Annotated[StrictStr, Field(max_length=64, pattern=_MOMENT, json_schema_extra={"format": "date-time"})],
    AfterValidator(_moment),
]


def seconds(moment: str) -> float:
    """Seconds since the epoch of a time with its zone; ValueError if it is none."""
    return datetime.fromisoformat(moment).timestamp()


class GPUReservationSpec(CRDModel):
    """What a platform engineer sets aside, for whom, and when."""

    start: Moment = Field(description="When the window begins: RFC 3339 with a zone, such as 2026-03-01T14:00:00Z.")
    end: Moment = Field(description="When it ends; from then on nothing is kept any more.")
    gpus: Annotated[Int, Field(ge=1, le=MOST_GPUS, json_schema_extra={"format": "int32"})] = Field(
        description="Whole GPUs, in all."
    )
    gpus_per_node: Annotated[Int, Field(ge=1, le=64, json_schema_extra={"format": "int32"})] | None = Field(
        default=None,
        alias="gpusPerNode",
        description="They come in blocks of so many on one node, so that a workload with as many fits.",
    )
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(
        default_factory=dict, description="Labels that their nodes must have."
    )
    namespaces: Annotated[list[NamespaceName], Field(min_length=1, max_length=256)] = Field(
        description="Whose workloads may use them.", json_schema_extra={"x-kubernetes-list-type": "set"}
    )

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {"rule": "self.end > self.start", "fieldPath": ".end", "message": "must be after start"},
                {
                    "rule": "!has(self.gpusPerNode) || self.gpus % self.gpusPerNode == 0",
                    "fieldPath": ".gpusPerNode",
                    "message": "gpus must be a multiple of it",
                },
            ]
        }
    )

    @field_validator("end")
    @classmethod
    def _ends_after_its_start(cls, end: str, info: ValidationInfo) -> str:
        start = info.data.get("start")
        if start is not None and seconds(end) <= seconds(start):
            raise ValueError(f"must be after start ({start}), not {end}")
        return end

    @field_validator("gpus_per_node")
    @classmethod
    def _whole_blocks(cls, block: int | None, info: ValidationInfo) -> int | None:
        gpus = info.data.get("gpus")
        if block is not None and gpus is not None and gpus % block:
            raise ValueError(f"gpus must be a multiple of it, and {gpus} is none of {block}")
        return block

    @property
    def starts(self) -> float:
        """`start` in seconds since the epoch."""
        return seconds(self.start)

    @property
    def ends(self) -> float:
        """`end` in seconds since the epoch."""
        return seconds(self.end)

    @property
    def block(self) -> int:
        """How many GPUs belong together on a node."""
        return self.gpus_per_node or 1

    @classmethod
    def parse(cls, raw: object) -> tuple[GPUReservationSpec | None, str]:
        """The spec, or None and a sentence with path and reason. Never raises, whatever `raw` is."""
        if not isinstance(raw, Mapping):
            return None, "spec: must be an object"
        if serialised_size(raw, SPEC_LIMIT) > SPEC_LIMIT:
            return None, f"spec: must be at most {SPEC_LIMIT // 1024} KiB as JSON"
        return cls.validated(raw, "spec")


class ReservedNode(CRDModel):
    """How many GPUs are kept on a node, those that are in use among them."""

    name: Name
    gpus: Annotated[int, Field(ge=1, json_schema_extra={"format": "int32"})]


class GPUReservationStatus(CRDModel):
    """What berth reports, at most every few seconds."""

    observed_generation: Generation | None = None
    phase: Phase | None = Field(
        default=None,
        description="Pending: not all is kept yet; Reserved: all is, from its start on; Active; Ended.",
    )
    reserved: Count | None = Field(default=None, description="GPUs that are kept, those in use among them.")
    used: Count | None = Field(default=None, description="GPUs that its workloads hold.")
    lent: Count | None = Field(default=None, description="GPUs of these that others hold who can be stopped.")
    waiting: Count | None = Field(default=None, description="Workloads that name it and wait.")
    nodes: Annotated[list[ReservedNode], Field(max_length=MOST_SHOWN)] | None = Field(
        default=None,
        description=f"Where, at most {MOST_SHOWN} of them.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    updated: Time | None = None
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
