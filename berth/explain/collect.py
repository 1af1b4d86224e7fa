"""Reads from the API server, once, what the planner's cache watches; for `berth explain`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.cache import LIVE_PODS
from crds.settings import SETTINGS_NAME, SETTINGS_NAMESPACE, Settings
from kube.client import KubeClient
from kube.errors import AccessDenied, NotFound
from kube.resources import (
    CONFIGMAPS,
    DEVICECLASSES,
    EVENTS,
    GPUMODELPROFILES,
    GPUQUOTAS,
    GPURESERVATIONS,
    GPUWORKLOADS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    RESOURCECLAIMS,
    RESOURCESLICES,
    TRITONKERNELCACHENODESTATUSCLUSTERS,
    TRITONKERNELCACHENODESTATUSES,
    Resource,
)
from planning import views
from planning.caches.preference import caches, mounted
from planning.caches.warmth import Warm, WarmNodes, cache_use
from planning.devices import counted
from planning.model import Defaults, Snapshot, WorkloadView
from planning.naming import JOB_SELECTOR, STRATEGY_ANNOTATION
from planning.profile_status import profile_view
from planning.settings import read_settings as settings_in

_EVENTS = 10


@dataclass(frozen=True, slots=True)
class Collected:
    """The cluster as it is, the installation's settings, and the newest Events about the workload, oldest first.

    `assumed` says what could not be had, '' if all is known.
    """

    snapshot: Snapshot
    settings: Settings
    events: list[dict[str, Any]]
    assumed: str


async def collect(kubeconfig: Path | None, context: str | None, namespace: str, name: str) -> Collected:
    """Raises KubeError; its text is for people."""
    async with await KubeClient.connect(kubeconfig, context, user_agent="berth-explain") as kube:
        settings, assumed = await read_settings(kube)

        async def read(kind: Resource, *, fields: str = "", labels: str = "") -> list[dict[str, Any]]:
            return (await kube.list(kind, field_selector=fields, label_selector=labels))[0]

        quotas, reservations = await _granted(kube, GPUQUOTAS), await _granted(kube, GPURESERVATIONS)
        nodes, pods, jobs, workloads, namespaces, events = await asyncio.gather(
            read(NODES),
            read(PODS, fields=LIVE_PODS),
            read(JOBS, labels=JOB_SELECTOR),
            read(GPUWORKLOADS),
            read(NAMESPACES),
            kube.list(EVENTS, namespace, field_selector=f"regarding.name={name},regarding.kind=GPUWorkload"),
        )
        profiles = await read(GPUMODELPROFILES)
        sliced = [await _granted(kube, kind) for kind in (RESOURCESLICES, DEVICECLASSES, RESOURCECLAIMS)]
        wanted = tuple(views.workload_view(raw) for raw in workloads)
        warm = await _warm(kube, wanted)
    offered = _offered(*(each or () for each in sliced))
    snapshot = Snapshot(
        now=time.time(),
        nodes=tuple(
            counted.with_devices(node, offered.get(node.name, ()), settings.gpu_resource)
            for node in (views.node_view(raw, settings.gpu_resource) for raw in nodes)
        ),
        pods=tuple(pod for raw in pods if (pod := views.pod_view(raw, settings.gpu_resource)) is not None),
        jobs=tuple(job for raw in jobs if (job := views.job_view(raw, settings.gpu_resource)) is not None),
        workloads=wanted,
        defaults=Defaults(
            settings.default_strategy,
            {
                raw["metadata"]["name"]: strategy
                for raw in namespaces
                if (strategy := (raw["metadata"].get("annotations") or {}).get(STRATEGY_ANNOTATION))
            },
        ),
        quotas=tuple(views.quota_view(raw) for raw in quotas or ()),
        reservations=tuple(views.reservation_view(raw) for raw in reservations or ()),
        profiles=tuple(profile for raw in profiles if (profile := profile_view(raw)) is not None),
        warm=warm or {},
    )
    for kind, found in (
        ("GPUQuotas", quotas),
        ("GPUReservations", reservations),
        ("the kernel caches' node statuses", warm),
        ("ResourceSlices, DeviceClasses or ResourceClaims", None if None in sliced else sliced),
    ):
        if found is None:
            assumed = "; ".join(filter(None, (assumed, f"you may not read {kind}: they are left out")))
    return Collected(snapshot, settings, sorted(events[0], key=happened)[-_EVENTS:], assumed)


def _offered(
    slices: Iterable[object], classes: Iterable[object], claims: Iterable[object]
) -> dict[str, tuple[counted.Counted, ...]]:
    """What nodes offer through DRA."""
    return counted.counted(
        [view for view in map(counted.slice_view, slices) if view is not None],
        [view for view in map(counted.class_view, classes) if view is not None],
        [view for view in map(counted.claim_view, claims) if view is not None],
    )


def happened(event: dict[str, Any]) -> str:
    """When it was last seen, as RFC 3339."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("eventTime") or event.get("deprecatedLastTimestamp") or "")


async def _granted(kube: KubeClient, kind: Resource) -> list[dict[str, Any]] | None:
    """None if they may not be read."""
    try:
        return (await kube.list(kind))[0]
    except NotFound:
        return []  # an installation from before there were any
    except AccessDenied:
        return None


async def _warm(kube: KubeClient, workloads: Iterable[WorkloadView]) -> Warm | None:
    """Where the caches are Ready that workloads without an end mount; None if that may not be read. There may be very
    many, so they are read a page at a time, and only in namespaces where somebody asks.
    """
    asked = {
        cache
        for view in workloads
        if view.spec is not None and not view.finished
        for cache in caches(mounted(view.spec), view.namespace)
    }
    found = WarmNodes()
    for namespace in sorted({namespace for namespace, _ in asked}):
        kind = TRITONKERNELCACHENODESTATUSES if namespace else TRITONKERNELCACHENODESTATUSCLUSTERS
        try:
            async for page, _ in kube.list_pages(kind, namespace or None):
                for raw in page:
                    use = cache_use(raw)
                    if use is not None and (use.namespace, use.cache) in asked:
                        found.change(None, use)
        except NotFound:
            continue  # an installation from before there were any
        except AccessDenied:
            return None
    return found.now()


async def read_settings(kube: KubeClient) -> tuple[Settings, str]:
    """The installation's; the defaults, and why, where they cannot be read."""
    try:
        found = await kube.get(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE)
    except NotFound:
        return Settings(), ""
    except AccessDenied:
        return Settings(), f"you may not read the settings (ConfigMap {SETTINGS_NAMESPACE}/{SETTINGS_NAME})"
    settings, wrong = settings_in(found.get("data"))
    return settings or Settings(), wrong
