"""Decides what to recommend to who asks for GPUs, from what the model's runs in that namespace did with as many.

For the workload's status and `berth recommend`; nothing applies it. Conservative: never less than was seen in use, and
nothing at all before a few runs were seen. Margin and fading as in Kubernetes' Vertical Pod Autoscaler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from crds.gpuworkload import PRIORITIES, GPUWorkloadSpec
from crds.gpuworkload_status import Recommendation as RecommendationStatus
from planning.accelerators import asked_resource, gpu_model, known_as
from planning.decay import DAY, runs_today
from planning.filters import show_gpus
from planning.model import NodeView, WorkloadView
from planning.podspecs import mapping
from planning.profile_status import span
from planning.profiles import AtCount, Gpus, Profile
from planning.runtimes import longer, quantile

# Runs that must be remembered, older ones counting less: three of the last days.
MINIMUM = 2.5
# So many runs make a confidence of one half, nine times as many 0.9.
HALF_SURE = 4.0
MARGIN = 0.15  # on top of the most memory seen
# GPU-hours of nine runs in ten: up to the one a run is short, from the other on long. Short work first lowers the mean
# wait of all (Weng et al., "MLaaS in the Wild", NSDI 2022).
SHORT, LONG = 0.25, 24.0

Priority = Literal["low", "normal", "high"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for now. `priority` is None where it is not known; `gpu_type` is '' for any.

    `gpu_resource`: by which name the GPUs are counted, '' for the installation's.
    """

    gpu_count: int
    priority: str | int | None = None
    gpu_type: str = ""
    gpu_resource: str = ""


@dataclass(frozen=True, slots=True, order=True)
class GpuType:
    """A GPU model of the fleet: memory of one in MiB, the least that a node tells; GPUs of a node, the most."""

    memory_mib: int
    model: str
    gpus: int
    resource: str = ""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What is proposed; None where nothing can be said. `memory_mib`: that each GPU should have.

    confidence: from 0 to 1, n / (n + 4) for n remembered runs. simulated: it rests on samples that nobody measured.
    """

    gpu_count: int | None
    memory_mib: int | None
    gpu_type: str | None
    priority: Priority | None
    confidence: float
    reason: str
    simulated: bool = False


def ask_of(spec: GPUWorkloadSpec, installed: str) -> Ask:
    """`installed`: the GPU resource that counts where a workload names none."""
    resource = asked_resource(spec, installed)
    model = gpu_model(spec.node_selector or {}, resource)
    return Ask(spec.gpu_count, spec.priority, model, known_as(resource, installed))


def gpu_types(nodes: Iterable[NodeView]) -> tuple[GpuType, ...]:
    """The GPU models of the fleet whose memory is known, the smallest first."""
    found: dict[tuple[str, str], GpuType] = {}
    for node in nodes:
        for resource, memory in node.gpu_memory:
            model, gpus = node.model_of(resource), node.allocatable.of(resource)
            if model and gpus:
                known = found.get((model, resource), GpuType(memory, model, 0, resource))
                least, most = min(known.memory_mib, memory), max(known.gpus, gpus)
                found[model, resource] = GpuType(least, model, most, resource)
    return tuple(sorted(found.values()))


def recommend(profile: Profile, ask: Ask, types: Iterable[GpuType], now: float) -> Recommendation | None:
    """What this profile recommends to who asks for that; None while too little is known."""
    at, today = profile.at.get(Gpus(ask.gpu_count, ask.gpu_resource), AtCount()), int(now // DAY)
    sampled, timed = (runs_today(weights, profile.reference, today) for weights in (at.active, at.durations))
    count = memory = gpu_type = priority = None
    reasons, runs = [], []
    if sampled >= MINIMUM:
        most = max(at.active)
        count = max(1, most)
        memory = math.ceil(at.peak_memory_mib * (1 + MARGIN)) or None
        if memory is not None:
            kinds = sorted(each for each in types if each.resource == ask.gpu_resource)
            gpu_type = next((each.model for each in kinds if each.memory_mib >= memory and each.gpus >= count), None)
        how = "simulated samples of " if at.simulated else ""
        told = f"{how}its runs with {show_gpus(ask.gpu_count, ask.gpu_resource)} show at most {most} in use at once"
        reasons.append(told + (f", with up to {at.peak_memory_mib} MiB each" if memory else ""))
        runs.append(sampled)
    took = quantile(longer(at.durations), 0.9)
    if timed >= MINIMUM and took is not None and ask.priority in PRIORITIES:
        hours = took / 3600 * ask.gpu_count
        priority = _priority(hours)
        size = {"high": "short", "normal": "neither short nor long", "low": "long"}[priority]
        reasons.append(f"nine in ten take up to {span(took)} ({hours:.2g} GPU-hours), which is {size}")
        runs.append(timed)
    if not reasons:
        return None
    least = min(runs)
    return Recommendation(
        gpu_count=count,
        memory_mib=memory,
        gpu_type=gpu_type,
        priority=priority,
        confidence=round(least / (least + HALF_SURE), 2),
        reason="; ".join(reasons),
        simulated=at.simulated and count is not None,
    )


def advised(status: dict[str, Any], view: WorkloadView, recommendation: Recommendation | None) -> dict[str, Any]:
    """The status with this recommendation, or with none, in place of the one that it had."""
    if recommendation is None:
        return {**status, "recommendation": None}
    now = shown(recommendation)
    # A merge patch keeps what it does not name.
    cleared = {key: None for key in mapping(view.status.get("recommendation")) if key not in now}
    return {**status, "recommendation": {**cleared, **now}}


def shown(recommendation: Recommendation) -> dict[str, Any]:
    """As the resource shows it."""
    status = RecommendationStatus(
        gpu_count=recommendation.gpu_count,
        memory_mib=recommendation.memory_mib,
        gpu_type=recommendation.gpu_type,
        priority=recommendation.priority,
        confidence=recommendation.confidence,
        reason=recommendation.reason,
        simulated=recommendation.simulated or None,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def _priority(gpu_hours: float) -> Priority:
    return "high" if gpu_hours <= SHORT else "low" if gpu_hours >= LONG else "normal"
