"""The look at a kernel cache: reads it, asks the registry what its tag stands for, decides what nodes do next, tells
them, and shows how all of it stands. And what nodes answer, on its way back.

For the workflows KernelCache and NodeKernelCache. Everything here can be repeated: an order that was sent twice has two
epochs, and the node carries out the newer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from opentelemetry import metrics
from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from activities.cache import ClusterCache, StaleCacheError
from activities.cache_signatures import (
    LOOK_AT_CACHE,
    TELL_CACHE,
    CacheLook,
    CacheLooked,
    NodeCacheState,
    TellCache,
    node_cache_attributes,
)
from activities.signatures import TASK_QUEUE
from activities.trust import credentials_of, rules_of
from crds.kernelcache import TritonKernelCacheSpec
from images.endpoints import BadSettings, settings_of
from images.errors import RegistryError
from images.reference import BadReference, Reference
from images.registry import Registry
from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound
from kube.events import EventRecorder
from kube.resources import NODES, TRITONKERNELCACHECLUSTERS, TRITONKERNELCACHES, ObjectRef, Resource
from planning.caches.grants import NoPullSecret
from planning.caches.model import FINALIZER, CacheView, cache_view
from planning.caches.orders import CacheRef, NodeOrder, cache_id, node_cache_id
from planning.caches.rollout import (
    Aim,
    Nodes,
    Refused,
    Rollout,
    Sent,
    Step,
    Target,
    Wanted,
    answered,
    applied,
    farewell,
    images,
    next_ask,
    step,
)
from planning.caches.status import Standing, cache_status, news, worth
from planning.settings import settings_refused
from planning.times import timestamp

log = logging.getLogger(__name__)

CATCH_UP = 6.0
AGAIN = 600.0  # seconds between looks at a cache of which nothing is heard
PULL_AGAIN = 30.0  # until a registry that did not answer is asked once more
RESOLVE = 20.0  # seconds for a registry's answer, mirrors and all: a look must come to its end
ASKING = 4  # registries that are waited for at once: all that a worker does in short steps shares 16 places
ASK_SOON = 5.0
CHANGED = 0.1  # seconds until a cache is looked at again that changed while something was written to it
WRITE_AGAIN = 10.0  # and until a status is that could not be written
AT_A_TIME = 16  # calls to Temporal, or to the API server
# Seconds that a look may send orders for. When many caches begin at once, Temporal is slow: a look that outlives its
# workflow task is lost, and its orders would all be sent anew.
SENDING = 1.0
_TOLD = 1024

_meter = metrics.get_meter("berth.worker")
_rollouts = _meter.create_counter("berth_cache_rollouts", description="Digests that were rolled out or given up")
_ordered = _meter.create_counter("berth_cache_orders", description="Orders to nodes, by what is to be done")


@dataclass(frozen=True, slots=True)
class _Found:
    """The world beside the cache. `trouble` says why its reference stands for nothing; `within`: when to ask again."""

    nodes: Nodes
    aim: Aim
    trouble: tuple[str, str] | None = None
    within: float = AGAIN


class KernelCaches:
    def __init__(self, cache: ClusterCache, kube: KubeClient, temporal: Client, events: EventRecorder) -> None:
        self._cache = cache
        self._kube = kube
        self._temporal = temporal
        self._events = events
        self._asking = 0

    @activity.defn(name=LOOK_AT_CACHE)
    async def look(self, look: CacheLook) -> CacheLooked:
        """One look. Raises KubeError or RPCError where API server or Temporal could not be asked, and StaleCacheError:
        it is repeated.
        """
        await self._cache.reach(look.fresh, CATCH_UP)
        view = await self._read(look.ref)
        epoch = int(time.time() * 1000)
        if view is None or (view.deleting and not view.finalizer):
            return await self._gone(look, epoch)
        if view.deleting:
            return await self._leave(view, look, epoch)
        if not view.finalizer:
            view = await self._with_finalizer(view)
            if view is None:
                return CacheLooked("Changed", "it changed while its finalizer was added", within=CHANGED)
        found = await self._look_around(view, look)
        rollout, taken = replace(look.rollout, aim=found.aim), Step(found.aim)
        if view.spec is not None:
            named = sorted(images(found.aim))
            rules = {image: await rules_of(self._cache, self._kube, image, view.ref) for image in named}
            wanted = step(rollout, Wanted(view.generation, view.spec, rules), found.nodes, epoch)
            taken = await self._send(view.ref, wanted)
            if len(taken.orders) < len(wanted.orders):
                found = replace(found, within=CHANGED)
        if taken.aim.goal != look.rollout.aim.goal and look.rollout.aim.goal.digest:
            _rollouts.add(1, {"kind": "rolled back" if taken.aim.rejected else "begun"})
        return await self._show(view, applied(rollout, taken), taken, found)

    @activity.defn(name=TELL_CACHE)
    async def tell(self, tell: TellCache) -> None:
        """A cache whose workflow is over wants to know nothing more."""
        await self._signal(cache_id(tell.ref.uid), "report", tell.report)

    async def _read(self, ref: CacheRef) -> CacheView | None:
        try:
            raw = await self._kube.get(_resource(ref), ref.name, ref.namespace or None)
        except NotFound:
            return None
        return cache_view(raw) if raw["metadata"]["uid"] == ref.uid else None

    async def _look_around(self, view: CacheView, look: CacheLook) -> _Found:
        nodes = await self._nodes(look, view)
        aim, spec = look.rollout.aim, view.spec
        if spec is None:
            return _Found(nodes, aim, ("InvalidSpec", view.problem))
        written = spec.oci_image.image
        try:
            reference = Reference.parse(written)
        except BadReference as wrong:
            return _Found(nodes, aim, ("InvalidSpec", f"spec.ociImage.image: {wrong}"))
        image = f"{reference.registry}/{reference.repository}"
        now = time.time()
        if reference.digest:
            if aim.reference != written:
                aim = answered(aim, written, Target(image, reference.digest), now, follow=True)
            return _Found(nodes, aim)
        due = next_ask(spec, aim)
        if due is not None and now >= due:
            digest = await self._ask(view, spec, reference, aim, now)
            if isinstance(digest, Refused):
                trouble = digest.reason, digest.message
                return _Found(nodes, replace(aim, refused=digest), trouble, max(1.0, digest.until - now))
            if digest is None:
                return _Found(nodes, aim, within=ASK_SOON)
            follow = spec.update_policy.type == "OnTagChange"
            aim = answered(aim, written, Target(image, digest), now, follow=follow)
            due = next_ask(spec, aim)
        elif aim.reference != written:
            told = f"pullPolicy is Never, so nobody is asked what {written} stands for: give the image with its digest"
            return _Found(nodes, aim, ("NotResolved", told))
        return _Found(nodes, aim, within=AGAIN if due is None else max(1.0, due - now))

    async def _nodes(self, look: CacheLook, view: CacheView | None) -> Nodes:
        """The nodes as they are to a cache; None: it is gone. Raises StaleCacheError where the picture is too old."""
        known = {node.name: node for node in self._cache.nodes.items.values()}
        gone = sorted(look.rollout.members.keys() - known.keys())
        await _each(partial(self._miss, node) for node in gone)
        drivers = set(self._cache.csi_nodes.items.values())
        wanted = view.spec.node_selector.items() if view is not None and view.spec is not None else ()
        selected = {
            name: node.ready and not node.out_of_service
            for name, node in known.items()
            if name in drivers and all(node.labels.get(key) == value for key, value in wanted)
        }
        holding = frozenset(use.node for use in self._cache.uses_of(look.ref.uid))
        return Nodes(selected, frozenset(known), frozenset(look.rechecked), holding)

    async def _miss(self, node: str) -> None:
        """A node that is deleted has no pods any more; that must not be said of one that this worker only has not seen
        yet, because its watch is late.
        """
        try:
            await self._kube.get(NODES, node)
        except NotFound:
            return
        raise StaleCacheError(f"node {node} is there, and this worker has not seen it yet")

    async def _ask(
        self, view: CacheView, spec: TritonKernelCacheSpec, reference: Reference, aim: Aim, now: float
    ) -> str | Refused | None:
        """The digest, or why there is none; None: others are asking, and their registries take their time."""
        written, before = spec.oci_image.image, aim.refused
        same = before is not None and (before.reference, before.generation) == (written, view.generation)
        if before is not None and same and now < before.until:
            return before
        if self._asking >= ASKING:
            return None
        self._asking += 1
        try:
            async with asyncio.timeout(RESOLVE):
                return await self._resolve(view.ref, spec, reference)
        except TimeoutError:
            slow = RegistryError("away", written, f"no answer within {RESOLVE:.0f} s")
            return _refused(written, view.generation, slow, now)
        except (RegistryError, NoPullSecret, BadSettings) as failed:
            return _refused(written, view.generation, failed, now)
        finally:
            self._asking -= 1

    async def _resolve(self, ref: CacheRef, spec: TritonKernelCacheSpec, reference: Reference) -> str:
        settings = settings_of(self._cache.settings.registries)
        credentials = await credentials_of(self._kube, spec, ref)
        async with Registry(settings, credentials) as registry:
            return (await registry.resolve(reference)).digest

    async def _gone(self, look: CacheLook, epoch: int) -> CacheLooked:
        """Somebody took the object away without waiting: nodes are told, and nobody is waited for."""
        taken = farewell(look.rollout, 0, await self._nodes(look, None), epoch, forced=True)
        await self._send(look.ref, taken)
        return CacheLooked("Deleted", "it is gone", taken, over=True)

    async def _leave(self, view: CacheView, look: CacheLook, epoch: int) -> CacheLooked:
        nodes = await self._nodes(look, view)
        wanted = farewell(look.rollout, view.generation, nodes, epoch, forced=view.forced)
        taken = await self._send(view.ref, wanted)
        if taken.over:
            if not await self._without_finalizer(view):
                return CacheLooked("Deleting", "it changed while its finalizer was removed", taken, within=CHANGED)
            return CacheLooked("Deleted", "every node has let go of it", taken, over=True)
        within = CHANGED if len(taken.orders) < len(wanted.orders) else AGAIN
        found = _Found(nodes, look.rollout.aim, within=within)
        return await self._show(view, applied(look.rollout, taken), taken, found)

    async def _send(self, ref: CacheRef, wanted: Step) -> Step:
        """The step as far as there was time for it; the next look finds the rest. A last one is taken whole."""
        until = time.monotonic() + SENDING
        sent: dict[str, Sent] = {}

        async def one(each: Sent) -> None:
            # On a machine so slow that the time is over at once every look still brings some orders further.
            if sent and not wanted.over and time.monotonic() > until:
                return
            _ordered.add(1, {"task": each.order.task})
            await self._order(ref, each.node, each.order)
            sent[each.node] = each

        await _each(partial(one, each) for each in wanted.orders)
        await _each(partial(self._signal, node_cache_id(ref.uid, node), "dismiss") for node in wanted.forgotten)
        return replace(wanted, orders=tuple(each for each in wanted.orders if each.node in sent))

    async def _order(self, ref: CacheRef, node: str, order: NodeOrder) -> None:
        await self._temporal.start_workflow(
            "NodeKernelCache",
            NodeCacheState(ref, node),
            id=node_cache_id(ref.uid, node),
            task_queue=TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=node_cache_attributes(ref, node),
            static_summary=f"{ref.told} on {node}",
            start_signal="order",
            start_signal_args=[order],
        )

    async def _signal(self, workflow_id: str, name: str, *values: object) -> None:
        try:
            await self._temporal.get_workflow_handle(workflow_id).signal(name, args=values)
        except RPCError as refused:
            if refused.status != RPCStatusCode.NOT_FOUND:
                raise

    async def _show(self, view: CacheView, rollout: Rollout, taken: Step, found: _Found) -> CacheLooked:
        pods = sum(use.pods for use in self._cache.uses_of(view.ref.uid))
        now = time.time()
        due = cache_status(Standing(view, rollout, found.nodes.selected, pods, found.trouble), now)
        ready = next(each for each in due["conditions"] if each["type"] == "Ready")
        wait, within = worth(view, due, now), found.within
        if wait == 0.0:
            again = await self._write(view, {**due, "updated": timestamp(now)})
            if again is None:
                self._tell_people(view, due)
            else:
                within = min(within, again)
        elif wait is not None:
            within = min(within, wait)
        return CacheLooked(ready["reason"], ready["message"], taken, within=within)

    async def _write(self, view: CacheView, status: dict[str, Any]) -> float | None:
        """None: it is written; else after how many seconds to look again. Never raises KubeError, for nodes were given
        their orders already: a look that failed now would give them all anew.
        """
        body = {"metadata": {"uid": view.ref.uid, "resourceVersion": view.resource_version}, "status": status}
        ref = view.ref
        try:
            await self._kube.merge_patch(_resource(ref), ref.name, ref.namespace or None, body, subresource="status")
        except (Conflict, NotFound):
            return CHANGED
        except KubeError as refused:
            log.warning("the status of %s is not written: %s", ref.told, refused)
            return WRITE_AGAIN
        return None

    def _tell_people(self, view: CacheView, due: dict[str, Any]) -> None:
        """An Event for each condition that turned."""
        for each in news(view, due):
            if each["type"] == "Verified" and each["status"] == "Unknown":
                continue
            quiet = each["status"] == "False" and each["type"] in ("Error", "Outdated")
            if quiet:
                continue
            bad = each["type"] == "Error" or (each["type"] == "Ready" and each["reason"] in ("Failing", "Incompatible"))
            bad = bad or (each["type"] == "Verified" and each["status"] == "False")
            log.info("%s: %s: %s: %s", view.ref.told, each["type"], each["reason"], each["message"])
            self._events.record(
                regarding=ObjectRef(
                    _resource(view.ref).api_version, view.ref.kind, view.ref.name, view.ref.namespace or None,
                    view.ref.uid, view.resource_version,
                ),
                type="Warning" if bad else "Normal",
                reason=each["reason"],
                action="Prepare",
                note=each["message"] or each["reason"],
            )  # fmt: skip

    async def _with_finalizer(self, view: CacheView) -> CacheView | None:
        """The cache with berth's finalizer; None: it changed meanwhile, or is gone."""
        raw = await self._set_finalizers(view, [*view.other_finalizers, FINALIZER])
        return None if raw is None else cache_view(raw)

    async def _without_finalizer(self, view: CacheView) -> bool:
        return await self._set_finalizers(view, list(view.other_finalizers)) is not None or await self._left(view)

    async def _left(self, view: CacheView) -> bool:
        return await self._read(view.ref) is None

    async def _set_finalizers(self, view: CacheView, finalizers: list[str]) -> dict[str, Any] | None:
        ref = view.ref
        body = {
            "metadata": {"uid": ref.uid, "resourceVersion": view.resource_version, "finalizers": finalizers},
        }
        try:
            return await self._kube.merge_patch(_resource(ref), ref.name, ref.namespace or None, body)
        except (Conflict, NotFound):
            return None


async def _each(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Makes all calls, a few at a time, and raises what the first of those that failed did."""
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await call()

    for failed in await asyncio.gather(*(one(call) for call in calls), return_exceptions=True):
        if failed is not None:
            raise failed


def _resource(ref: CacheRef) -> Resource:
    return TRITONKERNELCACHES if ref.namespace else TRITONKERNELCACHECLUSTERS


def _refused(written: str, generation: int, failed: RegistryError | NoPullSecret | BadSettings, now: float) -> Refused:
    reason, message, within = _told(failed)
    return Refused(written, generation, reason, message[:_TOLD], now + within)


def _told(failed: RegistryError | NoPullSecret | BadSettings) -> tuple[str, str, float]:
    """Reason and sentence for a condition, and after how many seconds to ask again."""
    if isinstance(failed, RegistryError):
        return failed.reason, str(failed), max(failed.retry_after or 0.0, PULL_AGAIN)
    if isinstance(failed, NoPullSecret):
        return failed.reason, str(failed), PULL_AGAIN
    return "SettingsRefused", settings_refused(failed), AGAIN
