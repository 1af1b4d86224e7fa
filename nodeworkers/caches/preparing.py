"""The two activities of a node's queue: prepare a kernel cache, and let go of one.

Preparing is verify, preflight, pull, extract, in this order: nothing is unpacked that nobody who counts has signed, and
nothing is pulled that no GPU of the node can run. Each step can be repeated; what worked before stays in place until
the new is whole, but for an image whose own signature is good no more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from temporalio import activity

from images.credentials import Credentials
from images.endpoints import Settings as Endpoints
from images.endpoints import settings_of
from images.reference import Reference, is_digest
from images.registry import Registry
from images.signatures.repository import ImageRepository
from images.signatures.verify import verify
from nodeworkers import metrics
from nodeworkers.caches.carrying import beating, in_thread
from nodeworkers.caches.look import TOLD, Look
from nodeworkers.caches.obtaining import Images
from nodeworkers.caches.pulling import About
from nodeworkers.caches.reporting import Statuses
from nodeworkers.caches.rules import Asked, Rules, knobs
from nodeworkers.caches.stopped import LATER, Stopped, later, stopping
from nodeworkers.caches.turns import Late, Turns
from nodeworkers.inventory import GPUs
from nodeworkers.ledger import Ledger
from nodeworkers.store import Store
from planning.caches import labels
from planning.caches.hits import predict
from planning.caches.node_status import Check, cut
from planning.caches.orders import PREPARE, REMOVE, SUPERSEDED, CacheRef, NodeOrder, NodeTask, Outcome, Report
from planning.caches.trust import REFUSALS, Findings, Knobs, Verdict, demand, judge, roots_of
from planning.caches.volumes import NodeCache

OpenRegistry = Callable[[Endpoints, Credentials], AbstractAsyncContextManager[Registry]]

_PAUSE = 1.0  # seconds between two looks at who has a cache mounted
_NAMED = 3  # pods in a message
_log = logging.getLogger(__name__)


class Caches:
    """The activities, over what one node has. One instance for the process."""

    def __init__(
        self,
        node: str,
        rules: Rules,
        ledger: Ledger,
        store: Store,
        images: Images,
        hardware: GPUs,
        statuses: Statuses,
        open_registry: OpenRegistry = Registry,
    ) -> None:
        self._node = node
        self._rules = rules
        self._ledger = ledger
        self._store = store
        self._images = images
        self._hardware = hardware
        self._statuses = statuses
        self._open = open_registry
        self._turns: Turns[Report] = Turns()
        metrics.begin(REFUSALS)

    @activity.defn(name=PREPARE)
    async def prepare(self, task: NodeTask) -> Report:
        """Verifies, preflights, extracts and marks the cache Ready. Raises ApplicationError (SUPERSEDED) for an order
        that a newer one overtakes; whatever else stands in the way is in the report.
        """
        return await self._take(task, lambda: self._prepare(task.ref, task.order))

    @activity.defn(name=REMOVE)
    async def remove(self, task: NodeTask) -> Report:
        """New pods no longer get the cache; gone once no pod has it mounted. `busy` is answered at once, or, with
        `task.pods` >= 0, as soon as they are not that many any more. Raises as `prepare` does.
        """
        return await self._take(task, lambda: self._remove(task))

    async def _take(self, task: NodeTask, work: Callable[[], Coroutine[Any, Any, Report]]) -> Report:
        """The order's turn. One that is too old is answered with the epoch that the next one must be above: where the
        control plane lost what it carried and its clock is behind, it cannot know.
        """
        ref, order = task.ref, task.order
        row = await in_thread(self._ledger.cache, ref.uid) or NodeCache(ref.uid, ref.kind, ref.namespace, ref.name)
        try:
            return await self._turns.take(ref.uid, order.epoch, row.epoch, work)
        except Late as late:
            report = await self._report(order, row, "retrying", SUPERSEDED, str(late), LATER)
            return replace(report, newest=late.newest)

    # ---- prepare

    async def _prepare(self, ref: CacheRef, order: NodeOrder) -> Report:
        row = NodeCache(ref.uid, ref.kind, ref.namespace, ref.name)
        try:
            with stopping():
                row = await in_thread(self._begin, row, order)
        except Stopped as stopped:  # without a note of the epoch nothing is done
            return await self._report(order, row, stopped.outcome, stopped.reason, stopped.message, stopped.within)
        look = Look(row)
        async with AsyncExitStack() as held, beating(lambda: look.doing()):
            try:
                with stopping():
                    verdict, row = await self._carry_out(ref, order, look, held)
            except Stopped as stopped:
                return await self._stopped(ref, order, look, stopped)
            await self._tell(ref, order, look, row)
            return await self._report(order, row, "ready", verdict.reason, verdict.message)

    def _begin(self, fresh: NodeCache, order: NodeOrder) -> NodeCache:
        """Notes the order's epoch, from which on no older one is carried out."""
        with self._ledger.transaction():
            row = self._ledger.cache(fresh.uid) or fresh
            if row.epoch < order.epoch:
                row = replace(row, epoch=order.epoch)
                self._ledger.put_cache(row)
        return row

    async def _carry_out(
        self, ref: CacheRef, order: NodeOrder, look: Look, held: AsyncExitStack
    ) -> tuple[Verdict, NodeCache]:
        asked = await self._rules.cache(ref)
        if asked is None:
            await self._statuses.forget(ref)
            await in_thread(self._ledger.remove_cache, ref.uid)
            raise Stopped("failed", "Gone", f"{ref.told} is no more.")
        look.generation = asked.generation
        if not is_digest(order.digest):
            raise Stopped("failed", "InvalidSpec", f"{order.digest[:80]!r} is no digest.")
        named = Reference.parse(order.image)
        image = Reference(named.registry, named.repository)
        settings = await self._rules.settings()
        credentials = await self._rules.credentials(ref, asked.spec)
        async with self._open(settings_of(settings.registries), credentials) as registry:
            look.doing = lambda: "verifying signatures"
            verdict = await self._verify(ref, order, asked, image, registry, knobs(settings), look)
            look.trusted(verdict)
            if self._hardware.gpus is None:
                raise later("HardwareUnknown", self._hardware.problem)
            policy = asked.spec.oci_image.pull_policy
            cached = await self._images.obtain(order.digest, policy, image, registry, look, held)
        mount_path = asked.spec.mount_path or look.about.capture_path or ""
        hit = predict(labels.read(look.about.labels), asked.spec.runtime, mount_path or None, None)
        look.hit = Check("Unknown" if hit.hit is None else "True" if hit.hit else "False", hit.reason, hit.message)
        row = look.served(order, cached, mount_path)
        await in_thread(self._ledger.put_cache, row)
        await in_thread(self._store.used, cached.digest)
        if (look.row.serves, look.row.digest) != (row.serves, row.digest):
            _log.info("%s: new pods get %s", ref.told, row.digest)
        return verdict, row

    async def _verify(
        self, ref: CacheRef, order: NodeOrder, asked: Asked, image: Reference, registry: Registry, wanted: Knobs,
        look: Look,
    ) -> Verdict:  # fmt: skip
        named, namespace = f"{image.registry}/{image.repository}", ref.namespace or None
        due = demand(named, namespace, await self._rules.policies(), wanted, asked.spec.validate_signature)
        found = Findings()
        if due.verdict is None:
            roots = await self._rules.roots(roots_of(due.policies))
            repository, seed = ImageRepository(registry, image), secrets.randbits(64)
            found = await verify(
                repository, order.digest, due.policies, roots, time.time(), seed=seed, good=look.row.signatures
            )
        look.signatures = tuple(each.place for each in found.signatures if each.satisfies)
        return judge(named, namespace, due, found, wanted)

    async def _stopped(self, ref: CacheRef, order: NodeOrder, look: Look, stopped: Stopped) -> Report:
        level = logging.INFO if stopped.outcome == "retrying" else logging.WARNING
        _log.log(level, "%s is not prepared: %s: %s", ref.told, stopped.reason, stopped.message)
        row = look.row
        if stopped.reason == "Gone":
            row = replace(row, state="Removing")
        else:
            if stopped.outcome == "failed":
                metrics.refused(stopped.reason)
            if stopped.outcome == "incompatible" and look.compatible.status != "False":
                look.compatible = Check("False", stopped.reason, stopped.message)
            row = look.stopped(order, stopped)
            if row != look.row:
                with suppress(Stopped), stopping():  # where the disk takes nothing the report says so already
                    await in_thread(self._ledger.put_cache, row)
            await self._tell(ref, order, look, row, stopped)
        return await self._report(order, row, stopped.outcome, stopped.reason, stopped.message, stopped.within)

    async def _tell(
        self, ref: CacheRef, order: NodeOrder, look: Look, row: NodeCache, stopped: Stopped | None = None
    ) -> None:
        served = await in_thread(self._store.get, row.digest) if row.serves else None
        kernels = About.of(served).kernels if served is not None else None
        ready = look.ready(order, row, stopped)
        await self._statuses.tell(ref, look.findings(order, row, ready, kernels, self._hardware.simulated))

    async def _report(
        self, order: NodeOrder, row: NodeCache, outcome: Outcome, reason: str, message: str, within: float = 0.0
    ) -> Report:
        mounts = await in_thread(self._ledger.mounts_of, row.uid)
        pods = len({mount.pod_uid for mount in mounts})
        metrics.carried_out(outcome)
        return Report(self._node, order.epoch, outcome, row.serves, reason, cut(message, TOLD), pods, within)

    # ---- remove

    async def _remove(self, task: NodeTask) -> Report:
        ref, order = task.ref, task.order
        row = NodeCache(ref.uid, ref.kind, ref.namespace, ref.name, state="Removing")
        async with beating(lambda: "waiting for the pods that have it mounted"):
            try:
                with stopping():
                    known = await in_thread(self._mark, ref, order)
                    pods = await self._using(ref)
                    if known and pods:
                        await self._statuses.leave(ref, Check("False", "Removing", _used_by(pods)))
                    while pods and len(pods) == task.pods:
                        await asyncio.sleep(_PAUSE)
                        pods = await self._using(ref)
                    if pods:
                        return await self._report(order, row, "busy", "InUse", _used_by(pods))
                    await self._statuses.forget(ref)
                    await in_thread(self._ledger.remove_cache, ref.uid)
                    return await self._report(order, row, "removed", "Removed", f"{ref.told} is off the node.")
            except Stopped as stopped:
                return await self._report(order, row, stopped.outcome, stopped.reason, stopped.message, stopped.within)

    async def _using(self, ref: CacheRef) -> dict[str, str]:
        """Pods that have it mounted, or are about to: by UID, as people name them."""
        mounts = await in_thread(self._ledger.mounts_of, ref.uid)
        return {mount.pod_uid: f"{mount.pod_namespace}/{mount.pod_name}" for mount in mounts}

    def _mark(self, ref: CacheRef, order: NodeOrder) -> bool:
        """From here on the kubelet is told that new pods do not get the cache. Whether it is on record at all."""
        with self._ledger.transaction():
            row = self._ledger.cache(ref.uid)
            if row is not None:
                self._ledger.put_cache(replace(row, state="Removing", epoch=max(row.epoch, order.epoch)))
        return row is not None


def _used_by(pods: dict[str, str]) -> str:
    names = sorted(pods.values())
    few = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return f"1 pod has it mounted: {few}." if len(names) == 1 else f"{len(names)} pods have it mounted: {few}."
