"""What the fleet is typically asked for: learned from the GPUWorkloads that exist, the newer ones counting more.

For the placement round. Ended ones count for as long as they are kept (`ttlSecondsAfterFinished`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from crds.gpuworkload import GPUWorkloadSpec
from planning.filters import Constraints, Shape
from planning.model import GPU_MODEL_LABEL, WorkloadView
from planning.typical import Kind, Typical, typical

DAY = 24 * 3600.0
HALF_LIFE = 7  # days after which a workload counts half
# Learned is from what was there at the last of these points in time, in seconds: not anew in every round.
PAUSE = 600.0


def learned(
    workloads: Iterable[WorkloadView], shape: Callable[[GPUWorkloadSpec], Shape], now: float
) -> tuple[Typical, ...]:
    """The typical requests, most frequent first; `shape` is what a spec asks for."""
    # Specs that are equal are mostly one object (activities.cache.Specs), so few shapes have to be made.
    weights: dict[int, float] = {}
    specs: dict[int, GPUWorkloadSpec] = {}
    until, today = now // PAUSE * PAUSE, now // DAY
    for view in workloads:
        if view.spec is not None and not view.spec.suspend and view.created < until:
            key = id(view.spec)
            specs[key] = view.spec
            weights[key] = weights.get(key, 0.0) + 0.5 ** ((today - view.created // DAY) / HALF_LIFE)
    asked = ((shape(spec), spec.gpu_count, weights[key]) for key, spec in specs.items())
    # A template may ask for anything; one that asks for other than `gpuCount` GPUs is refused.
    return typical((kind(found), weight) for found, gpus, weight in asked if found.requests.gpus == gpus)


def kind(shape: Shape) -> Kind:
    """What such a request counts as."""
    need = shape.requests
    return Kind(need.gpus, need.gpu_milli, need.cpu_milli, models(shape.constraints))


def models(constraints: Constraints) -> tuple[str, ...]:
    """The GPU models that a node must have one of, sorted; none if any will do, or if it cannot be told."""
    for label, value in constraints.selector:
        if label == GPU_MODEL_LABEL:
            return (value,)
    named: set[str] = set()
    for term in filter(None, constraints.affinity or ()):  # an empty term selects nothing
        asked = [set(each.values) for each in term if each.key == GPU_MODEL_LABEL and each.operator == "In"]
        if not asked:
            return ()
        named |= set.intersection(*asked)
    return tuple(sorted(named))
