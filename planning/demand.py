"""What the fleet is typically asked for: learned from GPUWorkloads, the newer ones counting more.

For the placement round. Those that ended count by their model's profile, so that they still do when they are deleted;
the others, and those that the profile does not know yet, because they exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from crds.gpuworkload import GPUWorkloadSpec
from planning.accelerators import MODEL_LABELS
from planning.decay import DAY, HALF_LIFE, UNIT, fade
from planning.filters import Constraints, Shape
from planning.model import WorkloadView
from planning.profiles import Profile, by_key, mark_of
from planning.typical import Kind, Typical, typical

# Learned is from what was there at the last of these points in time, in seconds: not anew in every round.
PAUSE = 600.0


def learned(
    workloads: Iterable[WorkloadView],
    shape: Callable[[GPUWorkloadSpec], Shape],
    now: float,
    profiles: Iterable[Profile] = (),
) -> tuple[Typical, ...]:
    """The typical requests, most frequent first; `shape` is what a spec asks for."""
    # Specs that are equal are mostly one object (activities.cache.Specs), so few shapes have to be made.
    weights: dict[int, float] = {}
    specs: dict[int, GPUWorkloadSpec] = {}
    until, today = now // PAUSE * PAUSE, now // DAY
    known = by_key(profiles)
    for view in workloads:
        if view.spec is not None and not view.spec.suspend and view.created < until:
            if known and _profiled(view, known.get((view.namespace, view.spec.model_name))):
                continue
            key = id(view.spec)
            specs[key] = view.spec
            weights[key] = weights.get(key, 0.0) + 0.5 ** ((today - view.created // DAY) / HALF_LIFE)
    asked = [(found, weights[key]) for key, spec in specs.items() if (found := kind(spec, shape(spec))) is not None]
    for profile in known.values():
        worth = fade(profile.reference, int(today)) / UNIT
        asked += [(found, weight * worth) for found, weight in profile.typical.items()]
    return typical(asked)


def _profiled(view: WorkloadView, profile: Profile | None) -> bool:
    """Whether the workload ended and its model's profile counts it."""
    mark = mark_of(view) if profile is not None else None
    return mark is not None and profile is not None and mark <= profile.mark


def kind(spec: GPUWorkloadSpec, shape: Shape) -> Kind | None:
    """What such a request counts as. A template may ask for anything; None for one that asks for other than `gpuCount`
    GPUs, which is refused.
    """
    need = shape.requests
    if need.gpus != spec.gpu_count:
        return None
    return Kind(need.gpus, need.gpu_milli, need.cpu_milli, models(shape.constraints), need.gpu_resource)


def models(constraints: Constraints) -> tuple[str, ...]:
    """The GPU models that a node must have one of, sorted; none if any will do, or if it cannot be told."""
    for label, value in constraints.selector:
        if label in MODEL_LABELS:
            return (value,)
    named: set[str] = set()
    for term in filter(None, constraints.affinity or ()):  # an empty term selects nothing
        asked = [set(each.values) for each in term if each.key in MODEL_LABELS and each.operator == "In"]
        if not asked:
            return ()
        named |= set.intersection(*asked)
    return tuple(sorted(named))
