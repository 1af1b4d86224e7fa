"""Orders a node from the cluster's autoscaler, says how far it is, and takes the order back.

For the workflow of an order. Requests are read from the API server at every look, for there are few of them and no
cluster need have the kind; the workload, its Job and its pods come from the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from opentelemetry import metrics
from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy

from activities.cache import ClusterCache
from activities.messages import OrderNews, PlacementState, placement_attributes, placement_id
from activities.patience import cut
from activities.signatures import ARRANGE, TAKE_BACK, TASK_QUEUE, Arranged, ArrangeRequest, TakeBack, WorkloadRef
from activities.writes import reference, write_status
from kube.client import KubeClient
from kube.errors import AccessDenied, AlreadyExists, Conflict, KubeError, NotFound, Unauthorized, Unavailable
from kube.events import EventRecorder
from kube.resources import GPUWORKLOADS, PODTEMPLATES, PROVISIONINGREQUESTS
from planning import status
from planning.arrivals import coming_for
from planning.jobs import shape_of
from planning.model import Booking, Provisioning, RequestView, Stage, Waiting, WorkloadView
from planning.naming import WORKLOAD_UID_LABEL, label_value, request_name
from planning.places import gang_of
from planning.provisioning import PROVISIONING
from planning.requests import Observation, Step, failed, next_step, order_manifests
from planning.views import request_view, workload_view

log = logging.getLogger(__name__)

CATCH_UP = 6.0

_meter = metrics.get_meter("berth.worker")
_ordered = _meter.create_counter("berth_nodes_ordered", description="ProvisioningRequests made")
_provisioned = _meter.create_counter("berth_nodes_provisioned", description="ProvisioningRequests that found room")
_failed = _meter.create_counter("berth_node_orders_failed", description="ProvisioningRequests in vain, by reason")

# Event and action at each stage of an order.
_STAGES: dict[Stage, str] = {"ordered": "NodeOrdered", "accepted": "OrderAccepted", "provisioned": "NodeProvisioned"}


class Orders:
    def __init__(self, cache: ClusterCache, kube: KubeClient, temporal: Client, events: EventRecorder) -> None:
        self._cache = cache
        self._kube = kube
        self._temporal = temporal
        self._events = events

    @activity.defn(name=ARRANGE)
    async def arrange(self, request: ArrangeRequest) -> Arranged:
        """One look. Raises KubeError or RPCError when the API server or Temporal could not be asked; it is repeated."""
        await self._cache.reach(request.fresh, CATCH_UP)
        view = await self._workload(request.ref, request.generation)
        requests = await self._requests(request.ref, known=request.known)
        # Before the first try the round has just looked what is coming, and for whom.
        again = request.attempt > 0 and not any(each.attempt == request.attempt for each in requests)
        seen = Observation(
            now=time.time(),
            generation=request.generation,
            attempt=request.attempt,
            workload=view,
            jobs=self._cache.jobs_of(request.ref.namespace, request.ref.uid),
            pods=self._cache.pods_of(request.ref.namespace, request.ref.uid),
            requests=requests,
            known=request.known,
            coming=again and await self._coming(view),
            jitter=request.jitter,
            gpu_resource=self._cache.settings.gpu_resource,
        )
        step = next_step(seen, self._cache.settings.provisioning)
        if step.kind == "order" and view is not None:
            step = await self._order(view, seen)
        attempt = request.attempt if step.request is None else step.request.attempt
        if view is not None and step.kind != "over":
            await self._tell(view, step, request.told)
        if step.kind in ("retry", "fail", "over"):
            return Arranged(step.kind, step.message, attempt, step.within)
        if step.stage == "provisioned" and request.told != "provisioned" and step.request is not None:
            booking = Booking(step.request.name, step.request.class_name)
            await self._inform(
                request.ref.uid, request.generation, Provisioning(request.generation, "provisioned", seen.now, booking)
            )
        return Arranged("wait", step.message, attempt, step.within, step.stage)

    @activity.defn(name=TAKE_BACK)
    async def take_back(self, back: TakeBack) -> None:
        """First all that was made goes, then the ledger hears of it: what it has ordered anew is never mistaken for
        this.
        """
        ref = back.ref
        names = {request_name(ref.name, ref.uid, back.generation, back.attempt)}
        for request in await self._requests(ref, known=back.known):
            names.add(request.name)
            await self._delete(request, ref.namespace)
        for name in sorted(names):
            try:
                await self._kube.delete(PODTEMPLATES, name, ref.namespace)
            except NotFound:
                continue
            except AccessDenied:
                if back.known:
                    raise  # else nothing was made: that would have been refused too
        match back.state:
            case "over":
                await self._inform(ref.uid, back.generation, None, back.pool)
            case "failed" | "ordered":
                now = Provisioning(back.generation, back.state, back.at)
                await self._inform(ref.uid, back.generation, now, back.pool)

    async def _workload(self, ref: WorkloadRef, generation: int) -> WorkloadView | None:
        """From the cache; the API server is asked before it counts as gone, or as edited because the cache is behind
        the order.
        """
        view = self._cache.workloads.items.get(ref.uid)
        if view is not None and view.generation >= generation:
            return view
        try:
            raw = await self._kube.get(GPUWORKLOADS, ref.name, ref.namespace)
        except NotFound:
            return None
        return workload_view(raw) if raw["metadata"]["uid"] == ref.uid else None

    async def _requests(self, ref: WorkloadRef, *, known: bool) -> tuple[RequestView, ...]:
        """All that were made for the workload. `known`: there should be some, so it matters if they cannot be read."""
        selector = f"{WORKLOAD_UID_LABEL}={label_value(ref.uid)}"
        try:
            found, _ = await self._kube.list(PROVISIONINGREQUESTS, ref.namespace, label_selector=selector)
        except NotFound:  # the cluster does not have the kind
            return ()
        except AccessDenied:
            if known:
                raise
            return ()  # to make one will be refused too, and tell why
        return tuple(request_view(raw) for raw in found)

    async def _coming(self, view: WorkloadView | None) -> bool:
        if view is None or view.spec is None:
            return False
        settings = self._cache.settings
        shape, gang = shape_of(view.spec, settings), gang_of(view.spec)
        return await asyncio.to_thread(coming_for, shape, gang, self._cache.snapshot(), settings)

    async def _order(self, view: WorkloadView, seen: Observation) -> Step:
        """Makes the attempt's request, and what is to be waited for then."""
        settings = self._cache.settings
        rules = settings.provisioning
        if rules is None:
            return Step("over")
        try:
            template, request = order_manifests(view, seen.attempt, settings, rules)
            with contextlib.suppress(AlreadyExists):  # made by an earlier try
                await self._kube.create(PODTEMPLATES, template, view.namespace)
            made = request_view(await self._kube.create(PROVISIONINGREQUESTS, request, view.namespace))
        except (Unavailable, Unauthorized, Conflict):
            raise
        except NotFound:
            return failed(seen, rules, "Refused", "the cluster has no such kind, or the namespace is going")
        except (KubeError, ValueError) as refused:
            return failed(seen, rules, "Refused", cut(refused))
        _ordered.add(1)
        return next_step(replace(seen, requests=(made,)), rules)

    async def _delete(self, request: RequestView, namespace: str) -> None:
        try:
            await self._kube.delete(PROVISIONINGREQUESTS, request.name, namespace, uid=request.uid)
        except (NotFound, Conflict):
            return

    async def _tell(self, view: WorkloadView, step: Step, told: Stage) -> None:
        """An Event and a count where something happened; the status while it says that the workload waits for this."""
        if step.kind in ("retry", "fail"):
            _failed.add(1, {"reason": step.reason})
            self._record(view, "OrderFailed" if step.kind == "retry" else "OrderGivenUp", step.message, bad=True)
        elif step.stage and step.stage != told:
            if step.stage == "provisioned":
                _provisioned.add(1)
            self._record(view, _STAGES[step.stage], step.message)
        # What is told already may have been added to: when the workload is expected to start.
        if not status.shows(view, PROVISIONING) or str(view.status.get("message")).startswith(step.message):
            return
        entry = Waiting(view.uid, view.namespace, view.name, view.resource_version, PROVISIONING, step.message)
        patch = status.waiting(view, entry, time.time())
        if patch is not None:
            raw = await write_status(self._kube, view, patch)
            if raw is not None:
                self._cache.workloads.observe(raw)

    def _record(self, view: WorkloadView, reason: str, message: str, *, bad: bool = False) -> None:
        log.info("GPUWorkload %s/%s: %s: %s", view.namespace, view.name, reason, message)
        self._events.record(
            regarding=reference(view), type="Warning" if bad else "Normal", reason=reason, action="Provision",
            note=message,
        )  # fmt: skip

    async def _inform(self, uid: str, generation: int, now: Provisioning | None, pool: str = "default") -> None:
        await self._temporal.start_workflow(
            "Placement",
            PlacementState(pool=pool),
            id=placement_id(pool),
            task_queue=TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=placement_attributes(pool),
            static_summary=f"Placement ledger of pool {pool}",
            start_signal="provisioning",
            start_signal_args=[OrderNews(uid, generation, now)],
        )
