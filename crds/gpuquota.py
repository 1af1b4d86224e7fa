"""GPUQuota (gpu.warp.dev/v1alpha1): what a tenant may hold, lends and borrows, for everyone who reads one.

One kind for tenants and for what is above them: a GPUQuota that others name as their `cohort` is a cohort, and its own
`nominal` is shared by all below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, StrictStr

from crds.gpuworkload import (
    SPEC_LIMIT,
    Condition,
    Count,
    CRDModel,
    Generation,
    Int,
    ObjectName,
    Quantity,
    Time,
    serialised_size,
)

KIND = "GPUQuota"
PLURAL = "gpuquotas"
EVERY_OTHER = "*"  # among `namespaces`: all those that no other GPUQuota names
MOST_GPUS = 10_000_000

NamespaceOrEveryOther = Annotated[
    StrictStr, Field(min_length=1, max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$")
]


class Amounts(CRDModel):
    """GPUs, CPU and memory; what is left out is not limited."""

    gpus: Annotated[Int, Field(ge=0, le=MOST_GPUS, json_schema_extra={"format": "int32"})] | None = Field(
        default=None, description="Whole GPUs."
    )
    cpu: Quantity | None = Field(default=None, description="CPU of GPU workloads, such as 64 or 500m.")
    memory: Quantity | None = Field(default=None, description="Memory of GPU workloads, such as 512Gi.")


class GPUQuotaSpec(CRDModel):
    """What a platform engineer grants to a tenant."""

    namespaces: Annotated[list[NamespaceOrEveryOther], Field(max_length=256)] = Field(
        default_factory=list,
        description="The tenant's namespaces; * stands for all that no other GPUQuota names.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    cohort: ObjectName | None = Field(
        default=None, description="The GPUQuota above this one: its members lend each other what they do not use."
    )
    nominal: Amounts = Field(
        default_factory=Amounts,
        description="What the tenant is always entitled to; a cohort's own is shared by its members.",
    )
    borrowing_limit: Amounts | None = Field(
        default=None, description="The most it may hold beyond its nominal; left out, all that its cohort has to lend."
    )
    lending_limit: Amounts | None = Field(
        default=None, description="The most of its unused nominal that others may borrow; left out, all of it."
    )
    weight: Annotated[Int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = Field(
        default=1, description="Beside others with the same share, one of weight 2 may hold twice as much."
    )

    @classmethod
    def parse(cls, raw: object) -> tuple[GPUQuotaSpec | None, str]:
        """The spec, or None and a sentence with path and reason. Never raises, whatever `raw` is."""
        if not isinstance(raw, Mapping):
            return None, "spec: must be an object"
        if serialised_size(raw, SPEC_LIMIT) > SPEC_LIMIT:
            return None, f"spec: must be at most {SPEC_LIMIT // 1024} KiB as JSON"
        return cls.validated(raw, "spec")


class Held(CRDModel):
    """Amounts as they are shown."""

    gpus: Count | None = None
    cpu: Annotated[str, Field(max_length=64)] | None = None
    memory: Annotated[str, Field(max_length=64)] | None = None


class GPUQuotaStatus(CRDModel):
    """What berth reports, at most every few seconds."""

    observed_generation: Generation | None = None
    used: Held | None = Field(default=None, description="What the tenant's workloads, or a cohort's members, hold.")
    borrowed: Held | None = Field(default=None, description="What of it is beyond the nominal.")
    waiting: Count | None = Field(default=None, description="Workloads in the queue.")
    share: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="The largest part of the fleet's GPUs, CPU or memory that it holds, by its weight."
    )
    lately: Annotated[str, Field(max_length=16)] | None = Field(
        default=None, description="The share it held lately, on average."
    )
    updated: Time | None = None
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
