"""What the control plane knows of the cluster: nodes, live pods, berth's Jobs and workloads, kept fresh by watches.

One cache serves every activity of a worker process. It holds `planning` views only, never raw objects, so that 1,000
nodes and 5,000 workloads stay small. A reader that must not see an older state than somebody else saw asks `reach`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import orjson

from activities.signatures import Versions
from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import SETTINGS_NAME, SETTINGS_NAMESPACE, Settings
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import (
    CONFIGMAPS,
    CSINODES,
    DEVICECLASSES,
    GPUMODELPROFILES,
    GPUQUOTAS,
    GPURESERVATIONS,
    GPUSEATPROFILES,
    GPUWORKLOADS,
    JOBS,
    KERNELCACHEPOLICIES,
    NAMESPACES,
    NODEDEVICES,
    NODES,
    PODS,
    RESOURCECLAIMS,
    RESOURCESLICES,
    TRITONKERNELCACHENODESTATUSCLUSTERS,
    TRITONKERNELCACHENODESTATUSES,
)
from planning import views
from planning.caches.rules import policy_of
from planning.caches.trust import Policy
from planning.caches.volumes import DRIVER
from planning.caches.warmth import CacheUse, WarmNodes, cache_use
from planning.devices import counted
from planning.devices.fleet import NodeDevicesView, SeatStanding, node_devices_view, seat_standing
from planning.model import Defaults, JobView, NodeView, PodView, QuotaView, Snapshot, WorkloadView
from planning.naming import JOB_SELECTOR, STRATEGY_ANNOTATION
from planning.places import amiss
from planning.profile_status import profile_view
from planning.profiles import Key, Profile
from planning.recommendation import GpuType, Recommendation, ask_of, gpu_types, recommend
from planning.settings import read_settings
from planning.windows import ReservationView

log = logging.getLogger(__name__)

# Ended workloads that were deleted and are kept to be learned from.
DEPARTED = 5000

# For so many seconds the fleet's GPU models are not looked up anew: there are many nodes, and few models.
GPU_TYPES_KEPT = 30.0

LIVE_PODS = "status.phase!=Succeeded,status.phase!=Failed"

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class StaleCacheError(Exception):
    """The cache has not seen what a recorded decision was based on; the caller is retried until it has."""


async def restored_to(kube: KubeClient, missing: Versions) -> int | None:
    """The API server's own version, if it is older than what was once seen of it and is `missing` from a cache: etcd
    was restored from a backup, and to wait for that is in vain. None: it is the cache that is behind, if anything.
    """
    if not missing:
        return None
    _, version = await kube.list(CONFIGMAPS, SETTINGS_NAMESPACE, label_selector="berth-version-probe")
    if version >= max(missing.values()):
        return None
    log.warning("the cluster is at version %d, but %s was seen before: it was restored", version, missing)
    return version


class ByOwner(Generic[K, V]):
    """A reflector's objects by whom they belong to, or another key: what `owner` makes of each, None for those that are
    nobody's.
    """

    def __init__(self, owner: Callable[[V], K | None]) -> None:
        self._owner = owner
        self._index: dict[K, dict[str, V]] = {}

    def change(self, change: Change[V]) -> None:
        before = None if change.old is None else self._owner(change.old)
        now = None if change.new is None else self._owner(change.new)
        if before is not None and before != now:
            mine = self._index.get(before, {})
            mine.pop(change.uid, None)
            if not mine:
                self._index.pop(before, None)
        if now is not None and change.new is not None:
            self._index.setdefault(now, {})[change.uid] = change.new

    def of(self, owner: K) -> tuple[V, ...]:
        return tuple(self._index.get(owner, {}).values())


class Specs:
    """Parses specs, and gives one object for all that are equal: those of a sweep over a model differ in little else
    than their names, and every status write brings the same spec again.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[bytes, GPUWorkloadSpec] = WeakValueDictionary()

    def parse(self, raw: object) -> tuple[GPUWorkloadSpec | None, str]:
        try:
            key = orjson.dumps(raw, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # nested too deep: the model says so in words for people
            return GPUWorkloadSpec.parse(raw)
        known = self._known.get(key)
        if known is not None:
            return known, ""
        spec, invalid = GPUWorkloadSpec.parse(raw)
        if spec is not None:
            self._known[key] = spec
        return spec, invalid


class ClusterCache:
    """Reflectors of the kinds that placement reads, run as one task group by `run`."""

    def __init__(self, client: KubeClient) -> None:
        self._settings = Settings()
        self.settings_problem = ""
        self._jobs_by_workload: ByOwner[tuple[str, str], JobView] = ByOwner(_workload)
        self._pods_by_workload: ByOwner[tuple[str, str], PodView] = ByOwner(_workload)
        self._known_since: dict[str, float] = {}  # Jobs, by the monotonic clock
        # All Jobs but those that ended with their workload: they stay as long as it does, and tell nothing any more.
        self.live_jobs: dict[str, JobView] = {}
        self._nodes_by_name: ByOwner[str, NodeView] = ByOwner(lambda node: node.name)
        self.nodes: Reflector[NodeView] = Reflector(
            client, NODES, project=self._node, on_change=self._nodes_by_name.change
        )
        self.pods: Reflector[PodView] = Reflector(
            client, PODS, project=self._pod, field_selector=LIVE_PODS, on_change=self._pods_by_workload.change
        )
        self.jobs: Reflector[JobView] = Reflector(
            client,
            JOBS,
            project=self._job,
            label_selector=JOB_SELECTOR,
            on_change=self._job_changed,
        )
        specs = Specs()
        self.workloads: Reflector[WorkloadView] = Reflector(
            client,
            GPUWORKLOADS,
            project=lambda raw: views.workload_view(raw, specs.parse),
            on_change=self._workload_changed,
        )
        self.quotas: Reflector[QuotaView] = Reflector(client, GPUQUOTAS, project=views.quota_view)
        self.reservations: Reflector[ReservationView] = Reflector(
            client, GPURESERVATIONS, project=views.reservation_view
        )
        self._profiles_by_model: ByOwner[Key, Profile] = ByOwner(lambda profile: (profile.namespace, profile.model))
        self.profiles: Reflector[Profile] = Reflector(
            client, GPUMODELPROFILES, project=profile_view, on_change=self._profiles_by_model.change
        )
        self._gpu_types: tuple[float, tuple[GpuType, ...]] = (0.0, ())
        # Workloads that ended and were deleted since, by UID: a short time to live must not keep them from being
        # learned from. Another worker, or this one after a restart, does not know them.
        self.departed: dict[str, WorkloadView] = {}
        self.policies: Reflector[Policy] = Reflector(client, KERNELCACHEPOLICIES, project=policy_of)
        self.csi_nodes: Reflector[str] = Reflector(client, CSINODES, project=driver_on)
        self._uses_by_cache: ByOwner[str, CacheUse] = ByOwner(lambda use: use.cache_uid)
        self._warm = WarmNodes()
        self.cache_uses: Reflector[CacheUse] = Reflector(
            client, TRITONKERNELCACHENODESTATUSES, project=cache_use, on_change=self._use_changed
        )
        self.cluster_cache_uses: Reflector[CacheUse] = Reflector(
            client, TRITONKERNELCACHENODESTATUSCLUSTERS, project=cache_use, on_change=self._use_changed
        )
        # GPUs that are offered through DRA; a cluster before 1.34 does not know these kinds.
        self._recount = True
        self._offered: dict[str, tuple[counted.Counted, ...]] = {}
        self._with_offered: dict[str, tuple[NodeView, tuple[counted.Counted, ...], NodeView]] = {}
        self.slices: Reflector[counted.SliceView] = Reflector(
            client, RESOURCESLICES, project=counted.slice_view, optional=True, on_change=self._offer_changed
        )
        self.device_classes: Reflector[counted.ClassView] = Reflector(
            client, DEVICECLASSES, project=counted.class_view, optional=True, on_change=self._offer_changed
        )
        self.claims: Reflector[tuple[counted.Device, ...]] = Reflector(
            client, RESOURCECLAIMS, project=counted.claim_view, optional=True, on_change=self._offer_changed
        )
        self.node_devices: Reflector[NodeDevicesView] = Reflector(client, NODEDEVICES, project=node_devices_view)
        self.seat_profiles: Reflector[SeatStanding] = Reflector(client, GPUSEATPROFILES, project=seat_standing)
        self.namespaces: Reflector[tuple[str, str]] = Reflector(client, NAMESPACES, project=namespace_strategy)
        self.settings_map: Reflector[dict[str, Any]] = Reflector(
            client,
            CONFIGMAPS,
            namespace=SETTINGS_NAMESPACE,
            field_selector=f"metadata.name={SETTINGS_NAME}",
            project=lambda raw: raw.get("data") or {},
            on_change=self._settings_changed,
        )

    @property
    def settings(self) -> Settings:
        """The installation's settings; the last valid ones while somebody repairs the ConfigMap."""
        return self._settings

    @property
    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        return {
            "nodes": self.nodes,
            "pods": self.pods,
            "jobs": self.jobs,
            "gpuworkloads": self.workloads,
            "gpuquotas": self.quotas,
            "gpureservations": self.reservations,
            "gpumodelprofiles": self.profiles,
            "namespaces": self.namespaces,
            "kernelcachepolicies": self.policies,
            "csinodes": self.csi_nodes,
            "tritonkernelcachenodestatuses": self.cache_uses,
            "tritonkernelcachenodestatusclusters": self.cluster_cache_uses,
            "resourceslices": self.slices,
            "deviceclasses": self.device_classes,
            "resourceclaims": self.claims,
            "nodedevices": self.node_devices,
            "gpuseatprofiles": self.seat_profiles,
            "configmaps": self.settings_map,
        }

    @property
    def synced(self) -> bool:
        return all(r.synced.is_set() for r in self.reflectors.values())

    async def run(self) -> None:
        """Watches until cancelled. Settings come first, for they say which resource counts as a GPU."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.settings_map.run())
            await self.settings_map.synced.wait()
            for reflector in self.reflectors.values():
                if reflector is not self.settings_map:
                    group.create_task(reflector.run())

    async def wait_synced(self) -> None:
        for reflector in self.reflectors.values():
            await reflector.synced.wait()

    async def reach(self, versions: Versions, seconds: float) -> Versions:
        """Waits until the cache has seen `versions`, `seconds` in all at most; returns what it still lacks."""
        await self.wait_synced()
        deadline = time.monotonic() + seconds
        missing: Versions = {}
        for kind, version in versions.items():
            reflector = self.reflectors.get(kind)
            if reflector is None or reflector.resource_version >= version:
                continue
            if not await reflector.wait_for(version, max(0.0, deadline - time.monotonic())):
                missing[kind] = version
        return missing

    @property
    def defaults(self) -> Defaults:
        strategies = {name: strategy for name, strategy in self.namespaces.items.values() if strategy}
        return Defaults(self._settings.default_strategy, strategies)

    def snapshot(self) -> Snapshot:
        now = time.time()
        return Snapshot(
            now=now,
            nodes=self.offering(),
            pods=tuple(self.pods.items.values()),
            jobs=tuple(self._aged(uid, job, now) for uid, job in self.live_jobs.items()),
            workloads=tuple(self.workloads.items.values()),
            defaults=self.defaults,
            jobs_version=self.jobs.resource_version,
            workloads_version=self.workloads.resource_version,
            quotas=tuple(self.quotas.items.values()),
            profiles=tuple(self.profiles.items.values()),
            reservations=tuple(self.reservations.items.values()),
            warm=self._warm.now(),
        )

    def offering(self) -> tuple[NodeView, ...]:
        """The nodes with the GPUs that they offer in either way. One object for as long as it says the same."""
        if self._recount:
            self._recount = False
            values = (self.slices.items.values(), self.device_classes.items.values(), self.claims.items.values())
            self._offered = counted.counted(*values)
        if not self._offered:
            self._with_offered = {}
            return tuple(self.nodes.items.values())
        before, self._with_offered = self._with_offered, {}
        return tuple(self._offering(node, before) for node in self.nodes.items.values())

    def _offering(
        self, node: NodeView, before: Mapping[str, tuple[NodeView, tuple[counted.Counted, ...], NodeView]]
    ) -> NodeView:
        found = self._offered.get(node.name)
        if found is None:
            return node
        known = before.get(node.uid)
        if known is None or known[0] is not node or known[1] != found:
            known = node, found, counted.with_devices(node, found, self._settings.gpu_resource)
        self._with_offered[node.uid] = known
        return known[2]

    def _offer_changed(self, _: Change[Any]) -> None:
        self._recount = True

    def _aged(self, uid: str, job: JobView, now: float) -> JobView:
        """A Job that waits for its pod, as old as this process has known it: the API server's clock may differ from
        ours, and either may jump, but deadlines are ours.
        """
        if job.ready or job.finished or job.deleting:
            return job
        return replace(job, created=now - (time.monotonic() - self._known_since.get(uid, 0.0)))

    def jobs_of(self, namespace: str, workload_uid: str) -> tuple[JobView, ...]:
        return self._jobs_by_workload.of((namespace, workload_uid))

    def pods_of(self, namespace: str, workload_uid: str) -> tuple[PodView, ...]:
        return self._pods_by_workload.of((namespace, workload_uid))

    def uses_of(self, cache_uid: str) -> tuple[CacheUse, ...]:
        """How a kernel cache stands on the nodes that have it."""
        return self._uses_by_cache.of(cache_uid)

    def recommendation(self, view: WorkloadView) -> Recommendation | None:
        """What the workload's model's profile recommends to it."""
        if view.spec is None:
            return None
        made, types = self._gpu_types
        if not made or time.monotonic() - made > GPU_TYPES_KEPT:
            types = gpu_types(self.offering())
            self._gpu_types = time.monotonic(), types
        profiles = self._profiles_by_model.of((view.namespace, view.spec.model_name))
        ask = ask_of(view.spec, self._settings.gpu_resource)
        return recommend(profiles[0], ask, types, time.time()) if profiles else None

    def node(self, name: str) -> NodeView | None:
        # One that was deleted and made anew may be there twice for a moment: the latest is meant.
        return next(reversed(self._nodes_by_name.of(name)), None)

    def amiss(self, job: JobView) -> tuple[str, NodeView | None]:
        """The node of the Job's that matters most: see `planning.places.amiss`."""
        return amiss(job, {n.name: n for n in self.nodes.items.values()}.get if job.places else self.node)

    def _node(self, raw: dict[str, Any]) -> NodeView:
        return views.node_view(raw, self._settings.gpu_resource)

    def _job(self, raw: dict[str, Any]) -> JobView | None:
        return views.job_view(raw, self._settings.gpu_resource)

    def _pod(self, raw: dict[str, Any]) -> PodView | None:
        return views.pod_view(raw, self._settings.gpu_resource)

    def _workload_changed(self, change: Change[WorkloadView]) -> None:
        if change.new is not None and change.new.finished:
            for job in self.jobs_of(change.new.namespace, change.uid):
                self._sort(job)
        if change.new is None and change.old is not None and change.old.ended is not None:
            self.departed[change.uid] = change.old
            if len(self.departed) > DEPARTED:
                del self.departed[next(iter(self.departed))]

    def _job_changed(self, change: Change[JobView]) -> None:
        self._jobs_by_workload.change(change)
        if change.new is None:
            self._known_since.pop(change.uid, None)
            self.live_jobs.pop(change.uid, None)
        else:
            self._known_since.setdefault(change.uid, time.monotonic())
            self._sort(change.new)

    def _use_changed(self, change: Change[CacheUse]) -> None:
        self._uses_by_cache.change(change)
        self._warm.change(change.old, change.new)

    def _sort(self, job: JobView) -> None:
        """Whether the Job has anything left to tell."""
        owner = self.workloads.items.get(job.workload_uid)
        if job.finished and owner is not None and owner.finished and owner.namespace == job.namespace:
            self.live_jobs.pop(job.uid, None)
        else:
            self.live_jobs[job.uid] = job

    def _settings_changed(self, change: Change[dict[str, Any]]) -> None:
        settings, problem = read_settings(change.new)
        if settings is not None:
            if self.workloads.synced.is_set() and settings.gpu_resource != self._settings.gpu_resource:
                log.warning("gpuResource is now %s: it counts from the next restart on", settings.gpu_resource)
                settings = settings.model_copy(update={"gpu_resource": self._settings.gpu_resource})
            self._settings, self.settings_problem = settings, ""
            return
        self.settings_problem = problem
        log.warning("%s; the last valid settings stay in force", self.settings_problem)


def _workload(view: JobView | PodView) -> tuple[str, str] | None:
    """Its workload's namespace, which is its own, and UID: a label alone would let any namespace pose as another's."""
    return (view.namespace, view.workload_uid) if view.workload_uid else None


def namespace_strategy(raw: dict[str, Any]) -> tuple[str, str]:
    """A namespace's name and the strategy that it names, '' if none."""
    meta = raw.get("metadata") or {}
    return str(meta.get("name", "")), str((meta.get("annotations") or {}).get(STRATEGY_ANNOTATION, ""))


def driver_on(raw: dict[str, Any]) -> str | None:
    """The name of a CSINode's node, if berth's driver is registered there."""
    drivers = (raw.get("spec") or {}).get("drivers") or ()
    return str(raw["metadata"]["name"]) if any(each.get("name") == DRIVER for each in drivers) else None
