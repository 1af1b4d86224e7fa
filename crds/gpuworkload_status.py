"""What berth reports of a GPUWorkload: phase, conditions, decisions, recommendation; for whoever writes a status.

A projection of the cluster: nothing reads it back to decide, except that a terminal phase is final.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from crds.gpuworkload import Condition, Count, CRDModel, Generation, Name, Phase, Time


class DecisionNote(CRDModel):
    """One thing that was decided about a workload."""

    time: Time
    reason: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="As in the conditions and Events.")
    attempt: Count | None = None
    node: Name | None = None
    message: Annotated[str, Field(max_length=256)] = ""


class Recommendation(CRDModel):
    """What berth proposes from what it learned of the model; nothing applies it."""

    gpu_count: Annotated[int, Field(ge=1, json_schema_extra={"format": "int32"})] | None = None
    memory_mib: Annotated[int, Field(ge=1, json_schema_extra={"format": "int32"})] | None = Field(
        default=None, alias="memoryMiB", description="Memory that each GPU should have."
    )
    gpu_type: Annotated[str, Field(max_length=63)] | None = Field(
        default=None, description="The smallest GPU model of the fleet that has as much."
    )
    priority: Literal["low", "normal", "high"] | None = None
    confidence: Annotated[float, Field(ge=0, le=1)] = Field(description="From 0 to 1; it grows with the runs seen.")
    reason: Annotated[str, Field(max_length=1024)] = ""
    simulated: bool | None = Field(default=None, description="It rests on samples that were simulated.")


# Nodes of a gang that its status names.
SHOWN_NODES = 32


class PodsOnNode(CRDModel):
    """How many of a gang's pods are on a node."""

    name: Name
    pods: Annotated[int, Field(ge=1, json_schema_extra={"format": "int32"})]


class GPUWorkloadStatus(CRDModel):
    """What berth reports. A projection: nothing reads it back to decide, except that a terminal phase is final."""

    phase: Phase | None = None
    assigned_node: Name | None = Field(
        default=None, description="Where the current Job is pinned; of a gang, the node of its first pod."
    )
    placed_replicas: Annotated[int, Field(ge=1, json_schema_extra={"format": "int32"})] | None = Field(
        default=None, description="Of a gang: the pods of the current or last Job."
    )
    nodes: Annotated[list[PodsOnNode], Field(max_length=SHOWN_NODES)] | None = Field(
        default=None, description="Of a gang: where its pods are, in the order of their indices; the first nodes."
    )
    last_schedule_time: Time | None = Field(default=None, description="When the last Job was created.")
    retry_count: Count | None = Field(
        default=None, description="Failures so far that were answered, or will be, with another Job."
    )
    message: Annotated[str, Field(max_length=8192)] | None = Field(default=None, description="What matters now.")
    job_name: Name | None = Field(default=None, description="The current or last Job.")
    observed_generation: Generation | None = None
    attempt: Count | None = Field(
        default=None, description="Number of the current or next Job, from 0; evictions count here, not as retries."
    )
    next_retry_time: Time | None = None
    start_time: Time | None = None
    finish_time: Time | None = None
    strategy: Annotated[str, Field(max_length=63)] | None = Field(
        default=None, description="The strategy that chose the node, or will."
    )
    expected_start_time: Time | None = Field(
        default=None, description="While it waits: when it should start, by what such runs took so far."
    )
    expected_start_latest: Time | None = Field(default=None, description="The same, nine times in ten.")
    decisions: Annotated[list[DecisionNote], Field(max_length=10)] | None = Field(
        default=None, description="The last ten decisions about it, the latest last; all are in its workflow's history."
    )
    recommendation: Recommendation | None = Field(
        default=None, description="What its model's profile proposed when this status was written."
    )
    conditions: Annotated[list[Condition], Field(max_length=16)] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
