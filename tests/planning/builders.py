"""Small makers of planning's values, so that a test says only what it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from crds.gpuquota import GPUQuotaSpec
from crds.gpureservation import GPUReservationSpec
from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings
from planning.accelerators import gpu_model
from planning.caches.warmth import Warm
from planning.jobs import requests_of
from planning.model import (
    Assignment,
    Decision,
    Defaults,
    JobView,
    Ledger,
    NodeView,
    PodView,
    QuotaView,
    Resources,
    Snapshot,
    Taint,
    Turn,
    WorkloadView,
)
from planning.naming import job_name
from planning.placement import decide
from planning.times import timestamp
from planning.windows import ReservationView

SETTINGS = Settings()
ASKED = partial(requests_of, settings=SETTINGS)
GIB = 2**30
NOW = 1_000_000.0


def node(name: str, gpus: int = 8, **changes: Any) -> NodeView:
    view = NodeView(
        name, f"uid-{name}", 1, True, False, (), {"kubernetes.io/hostname": name},
        Resources(gpus, 64_000, 256 * GIB, 110),
    )  # fmt: skip
    # As planning.views tells them, for each resource that is offered.
    labels, offered = changes.get("labels", {}), changes.get("allocatable", view.allocatable).gpus_by_resource()
    models = ((name, gpu_model(labels, name or SETTINGS.gpu_resource)) for name, _ in offered)
    return replace(view, **{"gpu_models": tuple((name, model) for name, model in models if model), **changes})


def taint(key: str, effect: str = "NoSchedule", value: str = "") -> Taint:
    return Taint(key, value, effect)


def workload(uid: str, gpus: int = 1, *, spec: Mapping[str, Any] | None = None, **changes: Any) -> WorkloadView:
    """A workload whose name is its uid; `spec` adds to the minimal one."""
    raw = {"modelName": "m", "gpuCount": gpus, **(spec or {})}
    parsed, invalid = GPUWorkloadSpec.parse(raw)
    view = WorkloadView(uid, "ns", uid, 1, 1, NOW - 100, parsed, invalid, finalizer=True)
    return replace(view, **changes)


def job(uid: str, node_name: str, attempt: int = 0, *, gpus: int = 1, **changes: Any) -> JobView:
    name = job_name(uid, uid, attempt)
    view = JobView(
        f"{uid}-job-{attempt}", "ns", name, 1, uid, attempt, 0, node_name, Resources(gpus, 0, 0, 1), NOW,
    )  # fmt: skip
    return replace(view, **changes)


def pod(name: str, node_name: str = "", *, gpus: int = 0, of: JobView | None = None, **changes: Any) -> PodView:
    view = PodView(f"uid-{name}", "ns", name, 1, node_name, Resources(gpus, 0, 0, 1))
    if of is not None:
        view = replace(view, requests=of.requests, workload_uid=of.workload_uid, job_name=of.name)
    return replace(view, **changes)


def promise(uid: str, node_name: str, attempt: int = 0, *, gpus: int = 1) -> Assignment:
    return Assignment(
        uid, "ns", uid, 1, 1, Turn(attempt), node_name, Resources(gpus, 0, 0, 1), "leastLoaded",
        job_name(uid, uid, attempt),
    )  # fmt: skip


def quota(name: str, *namespaces: str, **spec: Any) -> QuotaView:
    """A GPUQuota; `gpus=8` stands for a nominal of that."""
    raw: dict[str, Any] = {"namespaces": list(namespaces), **spec}
    if "gpus" in raw:
        raw["nominal"] = {"gpus": raw.pop("gpus")}
    created = raw.pop("created", NOW)
    parsed, invalid = GPUQuotaSpec.parse(raw)
    return QuotaView(name, f"uid-{name}", 1, 1, created, parsed, invalid)


def reservation(name: str, *namespaces: str, gpus: int, start: float, end: float, **spec: Any) -> ReservationView:
    """A GPUReservation; `start` and `end` in seconds from NOW."""
    raw: dict[str, Any] = {"namespaces": list(namespaces or ("ns",)), "gpus": gpus, **spec}
    raw |= {"start": timestamp(NOW + start), "end": timestamp(NOW + end)}
    created = raw.pop("created", NOW)
    parsed, invalid = GPUReservationSpec.parse(raw)
    return ReservationView(name, f"uid-{name}", 1, 1, created, parsed, invalid)


def snapshot(
    nodes: Sequence[NodeView] = (), workloads: Sequence[WorkloadView] = (), *, jobs: Sequence[JobView] = (),
    pods: Sequence[PodView] = (), strategy: str = "leastLoaded", namespaces: Mapping[str, str] | None = None,
    now: float = NOW, jobs_version: int = 0, quotas: Sequence[QuotaView] = (),
    reservations: Sequence[ReservationView] = (), warm: Warm | None = None,
) -> Snapshot:  # fmt: skip
    return Snapshot(
        now,
        tuple(nodes),
        tuple(pods),
        tuple(jobs),
        tuple(workloads),
        Defaults(strategy, namespaces or {}),
        jobs_version,
        quotas=tuple(quotas),
        reservations=tuple(reservations),
        warm=warm or {},
    )


def round_of(seen: Snapshot, ledger: Ledger | None = None, *, limit: int = 1000, seed: int = 7) -> Decision:
    return decide(seen, ledger or Ledger(), SETTINGS, limit=limit, seed=seed)


def placed(decision: Decision) -> dict[str, str]:
    return {assignment.uid: assignment.node for assignment in decision.assignments}


def merge(into: dict[str, Any], patch: Mapping[str, Any]) -> None:
    """As RFC 7386 says."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
