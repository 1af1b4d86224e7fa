"""Profiles as the cluster keeps them: what a GPUModelProfile's status says, and what is read back from one.

For the activity that writes them and the cache that reads them. What cannot be read counts as nothing learned: it is
learned anew from the workloads that are still there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from crds.gpumodelprofile import (
    PROFILE_KIND,
    Failures,
    GpuCount,
    GPUModelProfileSpec,
    GPUModelProfileStatus,
    TypicalPod,
    Watermark,
)
from crds.gpumodelprofile import Usage as UsageStatus
from crds.gpuworkload import API_VERSION
from planning.decay import DAY, Weights, quantile, runs_today
from planning.naming import profile_name
from planning.podspecs import mapping, text
from planning.profiles import NOTHING, AtCount, Gpus, Mark, Profile
from planning.runtimes import BUCKETS, longer
from planning.runtimes import quantile as run_time
from planning.times import timestamp
from planning.typical import Kind

_FARTHEST = 100 * 366  # days since 1970 that a reference may be: what is beyond was written by somebody else


def span(seconds: float) -> str:
    """A run time for a person, as Kubernetes writes durations: 42s, 1h3m, 4d2h."""
    whole = round(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            count, rest = divmod(whole, size)
            return f"{count}{unit}{rest // part}{below}" if rest // part else f"{count}{unit}"
    return f"{whole}s" if seconds >= 1 else f"{seconds:.1f}s"


def manifest(profile: Profile) -> dict[str, Any]:
    """A new object for a profile; its status is written apart."""
    return {
        "apiVersion": API_VERSION,
        "kind": PROFILE_KIND,
        "metadata": {"name": profile_name(profile.model), "namespace": profile.namespace},
        "spec": {"modelName": profile.model},
    }


def status_of(profile: Profile, now: float) -> dict[str, Any]:
    """The whole status, so that a merge patch leaves nothing of the one before."""
    today = int(now // DAY)
    durations: dict[int, int] = {}
    for at in profile.at.values():
        for bucket, weight in at.durations.items():
            durations[bucket] = durations.get(bucket, 0) + weight
    sampled = [at for at in profile.at.values() if at.active]
    status = GPUModelProfileStatus(
        runs=profile.runs,
        succeeded=profile.succeeded,
        retries=profile.retries,
        failures=[Failures(reason=reason, count=count) for reason, count in sorted(profile.failures.items())],
        **_spans(durations),
        active_gpus=max((max(at.active) for at in sampled), default=None),
        peak_memory_mib=max((at.peak_memory_mib for at in sampled), default=None),
        gpu_counts=[_count(gpus, at, profile.reference, today) for gpus, at in sorted(profile.at.items())],
        typical_pods=[
            TypicalPod(
                gpus=kind.gpus,
                gpu_milli=kind.gpu_milli,
                cpu_milli=kind.cpu_milli,
                models=list(kind.models),
                resource=kind.resource,
                weight=weight,
            )
            for kind, weight in sorted(profile.typical.items())
        ],
        reference_day=profile.reference,
        watermark=Watermark(told=profile.mark.told, uid=profile.mark.uid),
        last_updated=timestamp(now),
    )
    return status.model_dump(by_alias=True)


def profile_view(raw: object) -> Profile | None:
    """The profile that an object holds; None for an object that is called otherwise than its model's would be."""
    found = mapping(raw)
    meta = mapping(found.get("metadata"))
    try:
        model = GPUModelProfileSpec.model_validate(found.get("spec")).model_name
    except ValidationError:
        return None
    if text(meta.get("name")) != profile_name(model):
        return None
    version = text(meta.get("resourceVersion"))
    empty = Profile(
        text(meta.get("namespace")),
        model,
        uid=text(meta.get("uid")),
        resource_version=int(version) if version.isdecimal() and version.isascii() and len(version) <= 20 else 0,
    )
    try:
        return _read(empty, GPUModelProfileStatus.model_validate(found.get("status") or {}))
    except (ValidationError, ValueError, RecursionError):
        return empty


def _read(empty: Profile, status: GPUModelProfileStatus) -> Profile:
    if status.reference_day > _FARTHEST:
        raise ValueError("a reference that is no day of ours")
    mark = Mark(status.watermark.told, status.watermark.uid) if status.watermark else NOTHING
    if not status.runs or mark == NOTHING:
        return empty
    return Profile(
        namespace=empty.namespace,
        model=empty.model,
        runs=status.runs,
        succeeded=status.succeeded,
        retries=status.retries,
        failures={each.reason: each.count for each in status.failures},
        reference=status.reference_day,
        at={Gpus(each.gpu_count, each.resource): _at(each) for each in status.gpu_counts},
        typical={
            Kind(pod.gpus, pod.gpu_milli, pod.cpu_milli, tuple(pod.models), pod.resource): pod.weight
            for pod in status.typical_pods
        },
        mark=mark,
        uid=empty.uid,
        resource_version=empty.resource_version,
    )


def _at(count: GpuCount) -> AtCount:
    usage = count.usage
    return AtCount(
        durations=_weights(count.duration_histogram, BUCKETS),
        active=_weights(usage.active_histogram, count.gpu_count + 1) if usage else {},
        engine=_weights(usage.engine_histogram) if usage else {},
        power=_weights(usage.power_histogram) if usage else {},
        peaks={int(week): peak for week, peak in usage.peak_memory_by_week.items()} if usage else {},
        simulated=usage is not None and usage.simulated,
    )


def _weights(histogram: Mapping[str, int], buckets: int | None = None) -> Weights:
    found = {int(bucket): weight for bucket, weight in histogram.items() if weight}
    if buckets is not None and max(found, default=0) >= buckets:
        raise ValueError("a bucket that is none of ours")
    return found


def _count(gpus: Gpus, at: AtCount, reference: int, today: int) -> GpuCount:
    return GpuCount(
        gpu_count=gpus.number,
        resource=gpus.resource,
        runs=round(runs_today(at.durations, reference, today)),
        **_spans(at.durations),
        duration_histogram=_histogram(at.durations),
        usage=_usage(at, reference, today) if at.active else None,
    )


def _usage(at: AtCount, reference: int, today: int) -> UsageStatus:
    return UsageStatus(
        runs=round(runs_today(at.active, reference, today)),
        active_gpus=max(at.active),
        peak_memory_mib=at.peak_memory_mib,
        engine_active_p95_percent=int(quantile(at.engine, 0.95, float)),
        power_p95_watts=int(quantile(at.power, 0.95, float)),
        simulated=at.simulated,
        active_histogram=_histogram(at.active),
        engine_histogram=_histogram(at.engine),
        power_histogram=_histogram(at.power),
        peak_memory_by_week=_histogram(at.peaks),
    )


def _spans(durations: Weights) -> dict[str, str | None]:
    parts = longer(durations)
    times = {name: run_time(parts, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95))}
    return {name: None if seconds is None else span(seconds) for name, seconds in times.items()}


def _histogram(weights: Mapping[int, int]) -> dict[str, int]:
    return {str(bucket): weight for bucket, weight in sorted(weights.items())}
