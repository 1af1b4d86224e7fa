"""Watches what kernel caches depend on, and pokes the workflows of those that a change concerns: the cache itself, the
policies and trusted roots about it, and the nodes that it is for.

A part of the leader's term. It decides nothing: a poke too many costs a look, and one too few is made up for by the
sweep, which pokes every cache when a term begins and every so often after.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import metrics
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from activities.cache import driver_on
from activities.cache_signatures import CacheState, cache_attributes
from activities.messages import Poke
from activities.signatures import TASK_QUEUE, Versions
from controller.digests import NodeDigest
from controller.outage import ANSWER, TEMPORAL_AWAY, reason
from crds.settings import SETTINGS_NAME, SETTINGS_NAMESPACE
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import (
    CONFIGMAPS,
    CSINODES,
    KERNELCACHEPOLICIES,
    TRITONKERNELCACHECLUSTERS,
    TRITONKERNELCACHES,
)
from planning.caches.model import FORCE_ANNOTATION
from planning.caches.orders import CacheRef, cache_id, node_id
from workflows.placement import newest

log = logging.getLogger(__name__)

PAUSE = 0.25  # news waits a moment for company
FLEET_PAUSE = 2.0  # and news of nodes longer: when a fleet starts, each of a thousand concerns a hundred caches
CONCURRENCY = 16
LONGEST_PAUSE = 15.0

_meter = metrics.get_meter("berth.controller")
_sent = _meter.create_counter("berth_cache_pokes_sent", description="Pokes of kernel caches that Temporal took")


@dataclass(frozen=True, slots=True)
class CacheDigest:
    """The little that is kept of a cache. `told`: what a change of must be heard of."""

    ref: CacheRef
    selector: Mapping[str, str]
    told: tuple[object, ...]


@dataclass(slots=True)
class _Due:
    caches: dict[str, tuple[CacheRef, Versions]] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)  # that went


class CacheWatch:
    """`run` watches and pokes until cancelled; `node_changed` is told of nodes by whoever watches them."""

    def __init__(self, kube: KubeClient, temporal: Client) -> None:
        self._temporal = temporal
        self._due = _Due()
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self.trouble = ""
        self.caches: Reflector[CacheDigest] = Reflector(
            kube, TRITONKERNELCACHES, project=cache_digest, on_change=self._cache_changed
        )
        self.cluster_caches: Reflector[CacheDigest] = Reflector(
            kube, TRITONKERNELCACHECLUSTERS, project=cache_digest, on_change=self._cluster_cache_changed
        )
        self.policies: Reflector[int] = Reflector(
            kube, KERNELCACHEPOLICIES, project=_generation, on_change=self._policy_changed
        )
        self.settings: Reflector[tuple[bool, int]] = Reflector(
            kube, CONFIGMAPS, namespace=SETTINGS_NAMESPACE, project=_content, on_change=self._settings_changed
        )
        self.drivers: Reflector[str] = Reflector(kube, CSINODES, project=driver_on, on_change=self._driver_changed)

    @property
    def reflectors(self) -> dict[str, Reflector[Any]]:
        return {
            "tritonkernelcaches": self.caches,
            "tritonkernelcacheclusters": self.cluster_caches,
            "kernelcachepolicies": self.policies,
            "configmaps": self.settings,
            "csinodes": self.drivers,
        }

    def sweep(self) -> None:
        """Every cache is looked at: for a new term, for Temporal that came back, and from time to time."""
        self._poke(self._everything(), {})

    def node_changed(self, before: NodeDigest | None, now: NodeDigest | None, version: int) -> None:
        """A node came, went, is ready or not, or has other labels: caches hear of it that are for it, or were."""
        if before is not None and now is not None and (before.able, before.labels) == (now.able, now.labels):
            return
        nodes = [each for each in (before, now) if each is not None]
        # One that is gone may also be about to let go of a cache that was for it once.
        fitting = (
            each for each in self._digests() if now is None or any(_fits(each.selector, node.labels) for node in nodes)
        )
        self._poke([each.ref for each in fitting], {"nodes": version}, urgent=False)
        if now is None and before is not None:
            self._due.nodes.add(before.name)
            self._wake.set()

    async def run(self) -> None:
        failures = 0
        while True:
            await self._wake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLEET_PAUSE):
                    await self._urgent.wait()
            await asyncio.sleep(PAUSE)
            self._wake.clear()
            self._urgent.clear()
            if await self._deliver():
                if failures:
                    self.sweep()  # Temporal may have come back without its data
                failures, self.trouble = 0, ""
                continue
            failures += 1
            await asyncio.sleep(min(LONGEST_PAUSE, 0.5 * 2.0 ** min(failures, 10)))
            self._wake.set()

    async def flush(self, seconds: float) -> None:
        """Tells once what was seen and not told yet, `seconds` at most: the next leader sweeps."""
        try:
            async with asyncio.timeout(seconds):
                await self._deliver()
        except TimeoutError:
            log.warning("%d pokes of kernel caches are left to the next leader's sweep", len(self._due.caches))

    # ---- whom a change concerns

    def _cache_changed(self, change: Change[CacheDigest]) -> None:
        self._changed(change, "tritonkernelcaches")

    def _cluster_cache_changed(self, change: Change[CacheDigest]) -> None:
        self._changed(change, "tritonkernelcacheclusters")

    def _changed(self, change: Change[CacheDigest], kind: str) -> None:
        digest = change.new or change.old
        if digest is not None and (change.old is None or change.new is None or change.old.told != change.new.told):
            self._poke([digest.ref], {kind: change.resource_version})

    def _policy_changed(self, change: Change[int]) -> None:
        if change.old != change.new:
            self._poke(self._everything(), {"kernelcachepolicies": change.resource_version})

    def _settings_changed(self, change: Change[tuple[bool, int]]) -> None:
        if change.old != change.new:
            # A worker watches the settings alone, and would wait in vain for the version of a trusted root.
            settings, _ = change.new or change.old or (False, 0)
            self._poke(self._everything(), {"configmaps": change.resource_version} if settings else {})

    def _driver_changed(self, change: Change[str]) -> None:
        if change.old != change.new:
            self._poke(self._everything(), {"csinodes": change.resource_version}, urgent=False)

    def _digests(self) -> Iterable[CacheDigest]:
        yield from self.caches.items.values()
        yield from self.cluster_caches.items.values()

    def _everything(self) -> list[CacheRef]:
        return [each.ref for each in self._digests()]

    def _poke(self, refs: Iterable[CacheRef], seen: Versions, *, urgent: bool = True) -> None:
        for ref in refs:
            _, before = self._due.caches.get(ref.uid, (ref, {}))
            self._due.caches[ref.uid] = ref, newest(before, seen)
            self._wake.set()
            if urgent:
                self._urgent.set()

    # ---- telling them

    async def _deliver(self) -> bool:
        """Tells all that are due. False if Temporal did not take some: they stay due."""
        due, self._due = self._due, _Due()
        gate = asyncio.Semaphore(CONCURRENCY)
        refused = 0

        async def cache(ref: CacheRef, seen: Versions) -> None:
            nonlocal refused
            async with gate:
                try:
                    await self._tell_cache(ref, seen)
                    _sent.add(1)
                except TEMPORAL_AWAY as away:
                    refused += 1
                    self._again(reason(away))
                    self._poke([ref], seen)

        async def node(name: str) -> None:
            nonlocal refused
            async with gate:
                try:
                    await self._signal(node_id(name), "poke")
                except TEMPORAL_AWAY as away:
                    refused += 1
                    self._again(reason(away))
                    self._due.nodes.add(name)

        try:
            async with asyncio.TaskGroup() as group:
                for ref, seen in due.caches.values():
                    group.create_task(cache(ref, seen))
                for name in due.nodes:
                    group.create_task(node(name))
        except BaseException:
            for ref, seen in due.caches.values():
                self._poke([ref], seen)
            self._due.nodes |= due.nodes
            raise
        return not refused

    def _again(self, why: str) -> None:
        if not self.trouble:
            log.warning("Temporal did not take a poke of a kernel cache: %s; trying again", why)
        self.trouble = why

    async def _tell_cache(self, ref: CacheRef, seen: Versions) -> None:
        known = ref.uid in self.caches.items or ref.uid in self.cluster_caches.items
        if not known:
            await self._signal(cache_id(ref.uid), "poke", Poke(seen))
            return
        await self._temporal.start_workflow(
            "KernelCache",
            CacheState(ref),
            id=cache_id(ref.uid),
            task_queue=TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=cache_attributes(ref),
            static_summary=ref.told,
            start_signal="poke",
            start_signal_args=[Poke(seen)],
            rpc_timeout=ANSWER,
        )

    async def _signal(self, workflow_id: str, name: str, *values: object) -> None:
        try:
            handle = self._temporal.get_workflow_handle(workflow_id)
            await handle.signal(name, args=values, rpc_timeout=ANSWER)
        except RPCError as refused:
            if refused.status != RPCStatusCode.NOT_FOUND:
                raise


def cache_digest(raw: Mapping[str, Any]) -> CacheDigest:
    meta, spec = raw.get("metadata") or {}, raw.get("spec")
    selector = spec.get("nodeSelector") if isinstance(spec, dict) else None
    whole = raw.get("kind") == TRITONKERNELCACHECLUSTERS.kind
    return CacheDigest(
        ref=CacheRef(
            kind="TritonKernelCacheCluster" if whole else "TritonKernelCache",
            namespace=str(meta.get("namespace") or ""),
            name=str(meta.get("name") or ""),
            uid=str(meta.get("uid") or ""),
        ),
        selector=selector if isinstance(selector, dict) else {},
        told=(
            meta.get("generation"),
            "deletionTimestamp" in meta,
            (meta.get("annotations") or {}).get(FORCE_ANNOTATION),
        ),
    )


def _fits(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def _generation(raw: Mapping[str, Any]) -> int:
    return int((raw.get("metadata") or {}).get("generation") or 0)


def _content(raw: Mapping[str, Any]) -> tuple[bool, int]:
    """Of a ConfigMap: whether it is the settings, and something that is another where its data are."""
    settings = (raw.get("metadata") or {}).get("name") == SETTINGS_NAME
    return settings, hash(str(sorted((raw.get("data") or {}).items())))
