"""GPUModelProfile (gpu.warp.dev/v1alpha1): what berth learned of a model in a namespace, for everyone who reads one.

berth writes these, people read them, or delete one to have it learned anew. Bounded like a GPUWorkload: however much
was learned, a profile stays small. Unknown fields are passed over, so that an older build does not refuse a newer's.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StrictStr
from pydantic.alias_generators import to_camel

from crds.gpuworkload import MAX_GPUS, CRDModel, Int, Time

PROFILE_KIND = "GPUModelProfile"
PROFILE_PLURAL = "gpumodelprofiles"

# Of a profile: a model is run with a few vendors' GPUs, and with a few numbers of each.
MOST_COUNTS = 2 * MAX_GPUS
_MOST = 2**53  # what JSON's numbers hold exactly, in every reader
Count = Annotated[Int, Field(ge=0, le=_MOST, json_schema_extra={"format": "int64"})]
Small = Annotated[Int, Field(ge=0, le=2**31 - 1, json_schema_extra={"format": "int32"})]
Span = Annotated[StrictStr, Field(max_length=32)]
Resource = Annotated[StrictStr, Field(max_length=317)]


def _bucket(key: str) -> str:
    if not re.fullmatch(r"0|[1-9][0-9]{0,6}", key):
        raise ValueError("is not the number of a bucket")
    return key


Bucket = Annotated[str, AfterValidator(_bucket)]
Histogram = Annotated[dict[Bucket, Count], Field(max_length=256)]


class ProfileModel(CRDModel):
    """As all of berth's resources, but open to what a newer build adds."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, hide_input_in_errors=True
    )


class GPUModelProfileSpec(ProfileModel):
    """Whose profile it is."""

    model_name: Annotated[StrictStr, Field(min_length=1, max_length=255)] = Field(
        description="The model, as the GPUWorkloads of this namespace name it.",
        json_schema_extra={
            "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "a profile stays its model's"}]
        },
    )


class Failures(ProfileModel):
    """Workloads that failed for one reason."""

    reason: Annotated[StrictStr, Field(max_length=256)]
    count: Count


class Usage(ProfileModel):
    """What sampled runs did with their GPUs."""

    runs: Count = Field(description="Sampled runs remembered; older ones count less.")
    active_gpus: Small = Field(alias="activeGPUs", description="Most GPUs of a run that were in use at once.")
    peak_memory_mib: Small = Field(alias="peakMemoryMiB", description="Most memory in use on a GPU.")
    engine_active_p95_percent: Small = Field(description="Engine active on GPUs in use; 95 % of runs have no more.")
    power_p95_watts: Small = Field(description="Power of a GPU in use; 95 % of runs draw no more.")
    simulated: bool = Field(default=False, description="Some samples were not measured but simulated.")
    active_histogram: Histogram = Field(default_factory=dict, description="Weight of runs by GPUs in use.")
    engine_histogram: Histogram = Field(default_factory=dict, description="Weight of runs by percent of engine active.")
    power_histogram: Histogram = Field(default_factory=dict, description="Weight of runs by watts.")
    peak_memory_by_week: Histogram = Field(default_factory=dict, description="Peak MiB by week since 1970.")


class GpuCount(ProfileModel):
    """The runs with one number of GPUs of one resource."""

    gpu_count: Annotated[Int, Field(ge=1, le=MAX_GPUS, json_schema_extra={"format": "int32"})]
    resource: Resource = Field(default="", description="The resource of these GPUs; empty for the installation's.")
    runs: Count = Field(description="Succeeded runs remembered; older ones count less.")
    p50: Span | None = Field(default=None, description="Run time that half of them do not exceed.")
    p90: Span | None = None
    p95: Span | None = None
    duration_histogram: Histogram = Field(
        default_factory=dict, description="Weight of runs by bucket; bucket n ends at 1.1^n seconds."
    )
    usage: Usage | None = Field(default=None, description="Of those runs that were sampled.")


class TypicalPod(ProfileModel):
    """A kind of pod that the model's workloads ask for."""

    gpus: Small
    gpu_milli: Small = Field(description="Thousandths of each GPU.")
    cpu_milli: Count
    models: Annotated[list[Annotated[StrictStr, Field(max_length=63)]], Field(max_length=8)] = Field(
        default_factory=list, description="GPU models of which it needs one; none for any."
    )
    resource: Resource = Field(default="", description="The resource of its GPUs; empty for the installation's.")
    weight: Count


class Watermark(ProfileModel):
    """Up to where was learned: ends of workloads by when they were told, then by UID."""

    told: Count = Field(description="Seconds since 1970.")
    uid: Annotated[StrictStr, Field(max_length=64)]


class GPUModelProfileStatus(ProfileModel):
    """What was learned. Weights halve every week; 1024 is a run at the reference day."""

    runs: Count = Field(default=0, description="Workloads that ended, all that were ever counted.")
    succeeded: Count = 0
    retries: Count = Field(default=0, description="Failures that were answered with another Job.")
    failures: Annotated[list[Failures], Field(max_length=16)] = Field(default_factory=list)
    p50: Span | None = Field(default=None, description="Run time that half of the succeeded runs do not exceed.")
    p90: Span | None = None
    p95: Span | None = None
    active_gpus: Small | None = Field(
        default=None, alias="activeGPUs", description="Most GPUs of a run that were in use at once."
    )
    peak_memory_mib: Small | None = Field(
        default=None, alias="peakMemoryMiB", description="Most memory in use on a GPU."
    )
    gpu_counts: Annotated[list[GpuCount], Field(max_length=MOST_COUNTS)] = Field(default_factory=list)
    typical_pods: Annotated[list[TypicalPod], Field(max_length=32)] = Field(default_factory=list)
    reference_day: Small = Field(default=0, description="Days since 1970 at which a run weighs 1024.")
    watermark: Watermark | None = None
    last_updated: Time | None = None
