"""Keeps what the node says about its caches in the API server: one TritonKernelCacheNodeStatus[Cluster] for each, by
server-side apply, with the pods that the ledger knows. Nobody else writes them.

Nothing waits for these writes: what cannot be written now is written once the API server answers again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from crds.kernelcache import CLUSTER_KIND
from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from kube.resources import (
    NODES,
    TRITONKERNELCACHENODESTATUSCLUSTERS,
    TRITONKERNELCACHENODESTATUSES,
    Resource,
)
from nodeworkers.ledger import Ledger, LedgerError, Mount
from planning.caches.hits import Seen, reported
from planning.caches.node_status import (
    Check,
    ConditionType,
    Findings,
    Pod,
    document,
    same,
    status,
    status_name,
    with_pods,
)
from planning.caches.orders import CacheRef
from planning.caches.volumes import NodeCache

MANAGER = "berth-node"
PAUSE = 1.0  # seconds between two looks at the ledger: pods that start together are one write
_MOST_PAUSE = 30.0  # while the API server is away
_log = logging.getLogger(__name__)

_NOT_CHECKED = Check("Unknown", "NotChecked", "Not checked since the node's process was started.")


class Statuses:
    """The statuses of one node."""

    def __init__(
        self, kube: KubeClient, ledger: Ledger, node: str, simulated: Callable[[], bool] = lambda: False
    ) -> None:
        self._kube = kube
        self._ledger = ledger
        self._node = node
        self._simulated = simulated
        self._node_uid = ""
        self._turn = asyncio.Lock()
        self._findings: dict[str, Findings] = {}
        self._leaving: dict[str, Check] = {}
        self._written: dict[str, dict[str, Any]] = {}
        self._forgotten: set[str] = set()
        self._due: set[str] = set()
        self._seen = -1
        self._pods: dict[str, frozenset[Pod]] = {}
        self._hits: dict[str, Check | None] = {}
        self.trouble = ""
        """Why the API server does not take them; '' while it does."""

    async def tell(self, ref: CacheRef, found: Findings) -> None:
        """What a look found. Written now, or as soon as that is possible."""
        self._findings[ref.uid] = found
        self._written.pop(ref.uid, None)  # looks are rare, and somebody may have removed it since
        self._leaving.pop(ref.uid, None)
        self._forgotten.discard(ref.uid)
        await self._try(ref)

    async def leave(self, ref: CacheRef, ready: Check) -> None:
        """A cache that goes as soon as its pods did."""
        self._leaving[ref.uid] = ready
        await self._try(ref)

    async def forget(self, ref: CacheRef) -> None:
        """Removes what the node said about a cache. Raises KubeError where that could not be done."""
        async with self._turn:
            self._forgotten.add(ref.uid)
            for kept in (self._findings, self._leaving, self._written, self._pods, self._hits):
                kept.pop(ref.uid, None)
            self._due.discard(ref.uid)
            resource, name, namespace = self._place(ref)
            try:
                found = await self._kube.get(resource, name, namespace)
                if _about(found) == ref.uid:
                    await self._kube.delete(resource, name, namespace, uid=found["metadata"]["uid"])
            except (NotFound, Conflict):
                pass  # it is gone, or another's by now

    async def run(self) -> None:
        """Keeps the pods in step with the ledger's mounts, and writes what could not be written, until cancelled."""
        pause = PAUSE
        while True:
            await asyncio.sleep(pause)
            pause = PAUSE
            try:
                caches = await asyncio.to_thread(self._look)
            except LedgerError as error:
                self._hear(str(error))
                continue
            for cache in caches:
                if not await self._try(_ref(cache)):
                    pause = min(2 * pause, _MOST_PAUSE)

    def _look(self) -> list[NodeCache]:
        """The caches whose statuses are due. While nothing is written to the ledger this reads nothing."""
        changes = self._ledger.changes
        if changes == self._seen and not self._due:
            return []
        pods, seen = pods_of(self._ledger.mounts()), self._ledger.seen()
        caches = {cache.uid: cache for cache in self._ledger.caches()}
        for uid, cache in caches.items():
            if uid not in self._pods or pods.get(uid, frozenset()) != self._pods[uid]:
                self._due.add(uid)
            # Numbers go up with every kernel: they are news once they mean something else.
            if _reason(_hit(seen.get((uid, cache.digest)))) != _reason(self._hits.get(uid)):
                self._due.add(uid)
        self._due &= caches.keys()
        self._seen = changes
        return [caches[uid] for uid in sorted(self._due)]

    async def _try(self, ref: CacheRef) -> bool:
        """Whether it was written; why not is told once."""
        self._due.add(ref.uid)
        try:
            async with self._turn:
                if ref.uid not in self._forgotten:
                    await self._write(ref)
            self._due.discard(ref.uid)
        except (KubeError, LedgerError) as error:
            self._hear(str(error))
            return False
        self._hear("")
        return True

    def _hear(self, trouble: str) -> None:
        if trouble and not self.trouble:
            _log.warning("what this node says about its caches cannot be written: %s", trouble)
        elif self.trouble and not trouble:
            _log.info("what this node says about its caches is written again")
        self.trouble = trouble

    async def _write(self, ref: CacheRef) -> None:
        row, mounts, seen = await asyncio.to_thread(
            lambda: (self._ledger.cache(ref.uid), self._ledger.mounts_of(ref.uid), self._ledger.seen())
        )
        pods = pods_of(mounts).get(ref.uid, frozenset())
        hit = _hit(seen.get((ref.uid, row.digest))) if row is not None else None
        resource, name, namespace = self._place(ref)
        for last in (False, True):
            before = self._written.get(ref.uid)
            if before is None:
                before = await self._object(ref)
            wanted = self._wanted(ref, row, pods, hit, before)
            if same(before, wanted):
                break
            body = {"status": wanted}
            try:
                await self._kube.apply(resource, name, namespace, body, field_manager=MANAGER, subresource="status")
                break
            except NotFound:  # somebody removed it, or with the node's object all that goes with that
                self._written.pop(ref.uid, None)
                self._node_uid = ""
                if last:
                    raise
        self._written[ref.uid] = wanted
        self._pods[ref.uid] = pods
        self._hits[ref.uid] = hit

    def _wanted(
        self, ref: CacheRef, row: NodeCache | None, pods: frozenset[Pod], hit: Check | None, before: Mapping[str, Any]
    ) -> dict[str, Any]:
        now, using, leaving = time.time(), sorted(pods, key=lambda pod: pod.uid), self._leaving.get(ref.uid)
        found = self._findings.get(ref.uid)
        if found is None:
            told: dict[ConditionType, Check] = {} if hit is None else {"HitPredicted": hit}
            if row is not None and not row.serves:  # lost while nobody looked
                before = {**before, "digest": None}
                told["Ready"] = Check("False", "NotPrepared", row.reason)
            if leaving is not None:
                told["Ready"] = leaving
            kept = with_pods(before, using, now, told) if before.get("conditions") else None
            if kept is not None:
                return kept
            found = _by_row(row, self._simulated())
        found = replace(found, hit_predicted=hit or found.hit_predicted, ready=leaving or found.ready)
        return status(found, using, before, now)

    async def _object(self, ref: CacheRef) -> dict[str, Any]:
        """The status as the API server has it; {} where the object had to be made."""
        resource, name, namespace = self._place(ref)
        try:
            found = await self._kube.get(resource, name, namespace)
            owners = [owner.get("uid") for owner in found["metadata"].get("ownerReferences") or ()]
            if _about(found) == ref.uid and owners == [await self._owner()]:
                shown = found.get("status")
                return dict(shown) if isinstance(shown, Mapping) else {}
            # Of an earlier cache of that name, or of a node that was made anew.
            await self._kube.delete(resource, name, namespace, uid=found["metadata"]["uid"])
        except (NotFound, Conflict):
            self._node_uid = ""  # it may have gone with the node's object, and that is another now
        body = document(ref, self._node, await self._owner())
        try:
            await self._kube.create(resource, body, namespace)
        except AlreadyExists:
            _log.debug("%s %s was made meanwhile", resource.kind, name)
        return {}

    async def _owner(self) -> str:
        """The UID of the node's object."""
        if not self._node_uid:
            node = await self._kube.get(NODES, self._node)
            self._node_uid = str(node["metadata"]["uid"])
        return self._node_uid

    def _place(self, ref: CacheRef) -> tuple[Resource, str, str | None]:
        name = status_name(ref.name, self._node)
        if ref.kind == CLUSTER_KIND:
            return TRITONKERNELCACHENODESTATUSCLUSTERS, name, None
        return TRITONKERNELCACHENODESTATUSES, name, ref.namespace


def _hit(seen: Seen | None) -> Check | None:
    """What pods reported, as a condition; None while there is nothing."""
    found = reported(seen)
    return None if found is None else Check("True" if found.hit else "False", found.reason, found.message)


def _reason(check: Check | None) -> str:
    return "" if check is None else check.reason


def pods_of(mounts: list[Mount]) -> dict[str, frozenset[Pod]]:
    """The pods that have each cache mounted, or are about to, by the cache's UID."""
    found: dict[str, set[Pod]] = defaultdict(set)
    for mount in mounts:
        found[mount.cache_uid].add(Pod(mount.pod_namespace, mount.pod_name, mount.pod_uid, mount.digest))
    return {uid: frozenset(pods) for uid, pods in found.items()}


def _ref(cache: NodeCache) -> CacheRef:
    return CacheRef(cache.kind, cache.namespace, cache.name, cache.uid)


def _about(raw: Mapping[str, Any]) -> object:
    """The UID of the cache that a status is about."""
    return ((raw.get("spec") or {}).get("kernelCacheRef") or {}).get("uid")


def _by_row(row: NodeCache | None, simulated: bool) -> Findings:
    """What the ledger knows, where nobody has looked since the process began and the API server has nothing."""
    serves = row is not None and bool(row.serves)
    ready = (
        Check("True", "Ready", "New pods get it.")
        if serves
        else Check("False", "NotPrepared", row.reason if row is not None else "")
    )
    return Findings(
        generation=row.generation if row is not None else 0,
        target=row.goal if row is not None else "",
        digest=row.digest if row is not None and serves else "",
        mount_path=row.mount_path if row is not None else "",
        size_bytes=row.size_bytes if row is not None else 0,
        kernels=None,
        gpus=(),
        simulated=simulated,
        verified=_NOT_CHECKED,
        compatible=_NOT_CHECKED,
        hit_predicted=_NOT_CHECKED,
        ready=ready,
    )
