"""Carries out a recorded decision: Jobs, Events, verdicts to the workloads they concern, and what statuses tell.

Every effect can be repeated, for the activity is: this very turn's Job counts as made if it exists, a workload that
changed since it was decided upon is left alone and reported stale. The statuses of all whose Job was made or runs are
written last and together: by then many a new Job runs, and is told in one write.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from opentelemetry import metrics
from opentelemetry.trace import get_tracer
from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy
from temporalio.service import RPCError

from activities.cache import ClusterCache
from activities.endings import Endings
from activities.heartbeats import beating
from activities.lifting import lift
from activities.messages import (
    ProvisioningState,
    WorkloadState,
    provisioning_attributes,
    provisioning_id,
    workload_attributes,
    workload_id,
)
from activities.patience import ATTEMPTS, TRANSIENT, cut, may_pass
from activities.resuming import Changed, Replaced, resume
from activities.signatures import CARRY_OUT, STATUS_LIMIT, TASK_QUEUE, CarriedOut, CarryOut, Versions, WorkloadRef
from activities.taking_back import TakingBack
from activities.tracing import workload_span
from activities.writes import add_finalizer, delete_job, reference, write_cluster_status, write_status
from crds.gpureservation import KIND as RESERVATION
from crds.gpuworkload import API_VERSION
from kube.client import KubeClient
from kube.errors import AlreadyExists, Invalid, KubeError, NotFound, TooLarge
from kube.events import EventRecorder
from kube.resources import GPUQUOTAS, GPURESERVATIONS, GPUWORKLOADS, JOBS, ObjectRef
from planning import jobs, status
from planning.caches.preference import told
from planning.lifecycle import JOB_REFUSED, NOT_RESUMED
from planning.model import (
    Assignment,
    Completion,
    Expectation,
    JobView,
    Order,
    Verdict,
    Waiting,
    Withdrawal,
    WorkloadView,
)
from planning.placement import TEMPLATE_REFUSED, WAITING_FOR_PODS
from planning.places import on_nodes, pods_in
from planning.projection import Lag, lagging
from planning.provisioning import PROVISIONING
from planning.quota_status import QuotaLag, lagging_quotas
from planning.recommendation import advised
from planning.reservation_status import ReservationLag, lagging_reservations
from planning.strategy_names import strategy_name
from planning.turns import PREEMPTING, WAITING_FOR_CAPACITY, WAITING_FOR_QUOTA
from planning.views import job_view, workload_view

log = logging.getLogger(__name__)

CONCURRENCY = 32

_meter = metrics.get_meter("berth.worker")
_scheduled = _meter.create_counter("warp_gpuworkload_scheduled", description="Jobs created or resumed, by strategy")
_wait = _meter.create_histogram(
    "warp_gpuworkload_time_to_placement", unit="s", description="From a workload's creation to its first Job"
)
_tracer = get_tracer("berth.worker")

T = TypeVar("T")

# How long new Jobs may take to show up in the cache before their statuses are left to the next round.
VISIBLE_WAIT = 1.0


# Reasons to wait that are nobody's mistake.
_NORMAL = (
    WAITING_FOR_CAPACITY,
    WAITING_FOR_QUOTA,
    WAITING_FOR_PODS,
    PREEMPTING,
    PROVISIONING,
    status.SUSPENDED,
    status.WAITING_FOR_RESERVATION,
)


def _refusal(assignment: Assignment, refused: Exception) -> Verdict:
    return Verdict(
        assignment.uid,
        assignment.namespace,
        assignment.name,
        assignment.turn,
        JOB_REFUSED,
        f"Job {assignment.job_name} was refused: {cut(refused)}",
        assignment.generation,
    )


def _on(assignment: Assignment) -> str:
    where = on_nodes(node for node, _ in assignment.places or ((assignment.node, 1),))
    return f"for {pods_in(assignment.places)} pods on {where}" if assignment.places else f"on {where}"


class Placements:
    def __init__(self, cache: ClusterCache, kube: KubeClient, temporal: Client, events: EventRecorder) -> None:
        self._cache = cache
        self._kube = kube
        self._temporal = temporal
        self._events = events
        self._taking_back = TakingBack(cache, kube, events, self._write)
        self._endings = Endings(cache, kube, events, self._write)

    @activity.defn(name=CARRY_OUT)
    async def carry_out(self, request: CarryOut) -> CarriedOut:
        """Raises what is TRANSIENT, or RPCError, when the API server or Temporal could not be asked; the whole is then
        repeated.
        """
        done, decision = CarriedOut(), request.decision
        async with beating():
            await self._cache.wait_synced()
            # What ends concerns nobody who is placed; whoever fails, the others are done before it is told.
            ends = self._each(decision.completions, lambda completion: self._end(completion, done))
            failed = await asyncio.gather(self._place(request, done), ends, return_exceptions=True)
            for each in failed:
                if each is not None:
                    raise each
        return done

    async def _place(self, request: CarryOut, done: CarriedOut) -> None:
        decision, withdrawn = request.decision, set[str]()
        # First what is taken back: what that frees, later rounds give away.
        await self._each(decision.preemptions, lambda p: self._taking_back.preempt(p, done))
        await self._each(decision.withdrawals, lambda w: self._withdraw(w, withdrawn))
        done.stale += [w.uid for w in decision.withdrawals if w.uid not in withdrawn]
        await self._each(decision.pins, lambda pin: lift(self._kube, pin))
        await self._each(decision.assignments, lambda a: self._assign(a, done))
        await self._each([*decision.verdicts, *done.refused], lambda v: self._tell(v, done))
        await self._each(decision.examine, lambda entry: self._examine(entry, done))
        # For whom somebody goes on, the next round finds out what else there is.
        disappointed = {p.winner for p in decision.preemptions if p.uid in done.spared}
        await self._each((w for w in decision.waiting if w.uid not in disappointed), self._tell_waiting)
        await self._each(decision.orders, lambda o: self._order(o, done))
        await self._each(decision.expected, self._tell_expected)
        await self._show(decision.assignments, done)
        if self._cache.quotas.items:
            lags, _ = await asyncio.to_thread(
                lagging_quotas, self._cache.snapshot(), request.lately, self._cache.settings
            )
            await self._each(lags, self._show_quota)
        if request.reserved is not None:
            kept, _ = await asyncio.to_thread(
                lagging_reservations, self._cache.snapshot(), request.reserved, self._cache.settings
            )
            await self._each(kept, self._show_reservation)

    async def _each(self, entries: Iterable[T], do: Callable[[T], Awaitable[None]]) -> None:
        """Does all, some at a time. One that fails does not keep the others from being done, and one that is refused
        (by a policy, a webhook) is logged and left: it must not stop everybody else's placement.
        """
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(entry: T) -> None:
            async with gate:
                try:
                    await do(entry)
                except TRANSIENT as failed:
                    # An assignment is a promise: it must end as made, stale or refused, however long that takes.
                    if isinstance(entry, Assignment) or may_pass(failed):
                        raise
                    log.exception("%s: given up after %d tries", type(entry).__name__, ATTEMPTS)
                except KubeError as refused:
                    log.warning("%s: %s", type(entry).__name__, refused)
                except RPCError:
                    raise  # a verdict: the ledger holds its workload, which must therefore hear of it
                except Exception:  # a defect, at one object: all others should still be placed and told
                    if isinstance(entry, Assignment):
                        raise
                    log.exception("%s: left as it is", type(entry).__name__)

        results = await asyncio.gather(*(one(entry) for entry in entries), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _assign(self, assignment: Assignment, done: CarriedOut) -> None:
        try:
            job = await self._make(assignment)
        except (KubeError, ValueError) as failed:
            # What fails for this one entry time and again, by a server's error, should not hold up the others.
            if isinstance(failed, TRANSIENT) and activity.info().attempt < ATTEMPTS:
                raise
            job = await self._made_before(assignment)
            if job is None:
                done.refused.append(_refusal(assignment, failed))
                return
        if job is None:
            done.stale.append(assignment.uid)
        else:
            done.made[assignment.uid] = job.resource_version

    async def _make(self, assignment: Assignment) -> JobView | None:
        """The assignment's Job, made now or by an earlier try. None: the workload changed and nothing was made."""
        view = await self._unchanged(assignment)
        if view is None:
            return await self._job(assignment)
        with workload_span(_tracer, "create Job", view.uid, {"k8s.node.name": assignment.node}):
            manifest = jobs.job_manifest(view, assignment, self._cache.settings)
            try:
                raw = await resume(self._kube, assignment, manifest)
                how = "created" if raw is None else "resumed"
                job = job_view(
                    raw or await self._kube.create(JOBS, manifest, view.namespace), self._cache.settings.gpu_resource
                )
            except NotFound:  # the namespace is going
                return None
            except Replaced as why:
                about = reference(view)
                self._events.record(regarding=about, type="Normal", reason=NOT_RESUMED, action="Place", note=str(why))
                return None
            except (AlreadyExists, Changed):
                return await self._job(assignment)
        _scheduled.add(1, {"strategy": assignment.strategy})
        if assignment.turn.attempt == 0:
            _wait.record(max(0.0, time.time() - view.created), {"strategy": assignment.strategy})
        placed = f"Job {job.name if job else ''} was {how} {_on(assignment)} ({assignment.strategy})"
        self._events.record(
            regarding=reference(view),
            type="Normal",
            reason="Scheduled",
            action="Place",
            note="; ".join(filter(None, (placed, told(assignment)))),
        )
        return job

    async def _unchanged(self, assignment: Assignment) -> WorkloadView | None:
        """The workload as it was decided upon, now with berth's finalizer."""
        view = self._cache.workloads.items.get(assignment.uid)
        if view is not None and view.resource_version == assignment.resource_version:
            raw = await add_finalizer(self._kube, view)
            if raw is not None:
                return self._observe(raw)
        # Something was written since the cache looked: a status of ours perhaps, and then the decision stands.
        view = await self._read(assignment)
        if view is None or view.deleting or view.finished or view.generation != assignment.generation:
            return None
        raw = await add_finalizer(self._kube, view)
        return None if raw is None else self._observe(raw)

    def _observe(self, raw: dict[str, Any]) -> WorkloadView:
        """What a write of ours made of a workload; the cache should not wait for the watch to tell it."""
        self._cache.workloads.observe(raw)
        return workload_view(raw)

    async def _read(self, assignment: Assignment) -> WorkloadView | None:
        try:
            raw = await self._kube.get(GPUWORKLOADS, assignment.name, assignment.namespace)
        except NotFound:
            return None
        view = workload_view(raw)
        return view if view.uid == assignment.uid else None

    async def _job(self, assignment: Assignment) -> JobView | None:
        """This very turn's Job, if it exists and is there to stay. ValueError: the name is somebody else's."""
        meant = assignment.turn.attempt, assignment.node, assignment.places
        for name in assignment.job_names:
            try:
                job = job_view(
                    await self._kube.get(JOBS, name, assignment.namespace), self._cache.settings.gpu_resource
                )
            except NotFound:
                continue
            if job is None or job.workload_uid != assignment.uid:
                raise ValueError("a Job of that name exists and is not this workload's; delete or rename it")
            if (job.attempt, job.node, job.places) == meant and not job.deleting:
                return job
        return None

    async def _made_before(self, assignment: Assignment) -> JobView | None:
        """The Job of an assignment that is refused now, if an earlier try made it, whose result was lost. Raises what
        is TRANSIENT: then it is the API server that is away.
        """
        if activity.info().attempt == 1:
            return None
        try:
            return await self._job(assignment)
        except TRANSIENT:
            raise
        except (KubeError, ValueError):
            return None

    async def _show(self, assignments: Iterable[Assignment], done: CarriedOut) -> None:
        """Brings statuses up to date that lag behind their Job. Where the workload is gone, its new Job goes too."""
        unseen: Versions = {}
        if done.made:
            unseen = await self._cache.reach({"jobs": max(done.made.values())}, VISIBLE_WAIT)
        found = lagging(
            time.time(),
            self._cache.workloads.items.values(),
            self._cache.live_jobs.values(),
            self._cache.pods.items.values(),
            self._cache.nodes.items.values(),
        )
        done.lagging += len(found) + bool(unseen)

        async def write(lag: Lag) -> None:
            if await self._write(lag.view, advised(lag.status, lag.view, self._cache.recommendation(lag.view))):
                done.lagging -= 1
                done.shown += 1

        # In no order: 200 that cannot be written, for whatever reason, must not keep the others out for ever.
        random.shuffle(found)
        await self._each(found[:STATUS_LIMIT], write)
        for made in assignments:
            if made.uid in done.made and made.uid not in self._cache.workloads.items and await self._read(made) is None:
                job = await self._job(made)
                if job is not None:
                    await delete_job(self._kube, job.namespace, job.name, job.uid, finished=False)

    async def _write(self, view: WorkloadView, patch: Mapping[str, Any]) -> dict[str, Any] | None:
        raw = await write_status(self._kube, view, patch)
        if raw is not None:
            self._cache.workloads.observe(raw)
        return raw

    async def _end(self, completion: Completion, done: CarriedOut) -> None:
        ended = await self._endings.end(completion)
        done.shown += ended
        done.lagging += not ended

    async def _withdraw(self, withdrawal: Withdrawal, withdrawn: set[str]) -> None:
        if await self._taking_back.withdraw(withdrawal):
            withdrawn.add(withdrawal.uid)

    async def _show_quota(self, lag: QuotaLag) -> None:
        raw = await write_cluster_status(self._kube, GPUQUOTAS, lag.view, lag.status)
        if raw is not None:
            self._cache.quotas.observe(raw)

    async def _show_reservation(self, lag: ReservationLag) -> None:
        raw = await write_cluster_status(self._kube, GPURESERVATIONS, lag.view, lag.status)
        if raw is None:
            return
        self._cache.reservations.observe(raw)
        if lag.news:
            phase = lag.status["phase"]
            kept = lag.status["conditions"][0]["reason"] != "Invalid" and phase != "Pending"
            ref = ObjectRef(API_VERSION, RESERVATION, lag.view.name, None, lag.view.uid, str(lag.view.resource_version))
            self._events.record(
                regarding=ref, type="Normal" if kept else "Warning", reason=phase, action="Reserve", note=lag.news
            )

    async def _tell(self, verdict: Verdict, done: CarriedOut) -> None:
        """Hands the workload to its own workflow, which counts the verdict and waits out the back-off. If Temporal
        keeps refusing that, the ledger must not go on holding a workload that will never come back to it.
        """
        ref = WorkloadRef(verdict.uid, verdict.namespace, verdict.name)
        try:
            await self._temporal.start_workflow(
                "GPUWorkload",
                WorkloadState(ref, turn=verdict.turn),
                id=workload_id(verdict.uid),
                task_queue=TASK_QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                search_attributes=workload_attributes(ref, "", "Pending"),
                static_summary=f"{verdict.namespace}/{verdict.name}",
                start_signal="verdict",
                start_signal_args=[verdict],
            )
        except RPCError as refused:
            if activity.info().attempt < ATTEMPTS:
                raise
            log.warning("the verdict about %s/%s is decided anew: %s", verdict.namespace, verdict.name, refused)
            done.stale.append(verdict.uid)

    async def _order(self, order: Order, done: CarriedOut) -> None:
        """Has a workflow of its own see to the order. One that is about to end takes it up by the signal."""
        ref = WorkloadRef(order.uid, order.namespace, order.name)
        try:
            await self._temporal.start_workflow(
                "Provisioning",
                ProvisioningState(ref),
                id=provisioning_id(order.uid),
                task_queue=TASK_QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                search_attributes=provisioning_attributes(ref),
                static_summary=f"A node for {order.namespace}/{order.name}",
                start_signal="order",
                start_signal_args=[order],
            )
        except RPCError as refused:
            if activity.info().attempt < ATTEMPTS:
                raise
            log.warning("the node for %s/%s is ordered anew: %s", order.namespace, order.name, refused)
            done.stale.append(order.uid)

    async def _examine(self, entry: Waiting, done: CarriedOut) -> None:
        """Asks the API server, by a Job that is not made, whether a template would do."""
        view = self._cache.workloads.items.get(entry.uid)
        if view is None or view.resource_version != entry.resource_version:
            return  # changed since: the next round looks at what it is now
        try:
            await self._kube.create(
                JOBS, jobs.examination_manifest(view, self._cache.settings), view.namespace, dry_run=True
            )
        except TRANSIENT:
            raise
        except NotFound:  # the namespace is going
            return
        except (Invalid, TooLarge, ValueError) as refused:
            done.rejected[view.uid] = view.generation
            told = Waiting(
                view.uid, view.namespace, view.name, view.resource_version, TEMPLATE_REFUSED,
                f"spec.template was refused: {cut(refused)}",
            )  # fmt: skip
            patch = status.waiting(view, told, time.time())
            self._events.record(
                regarding=reference(view), type="Warning", reason=TEMPLATE_REFUSED, action="Examine", note=told.message
            )
        except KubeError as later:
            # A quota that is used up, say: what a dry run cannot settle, the real creation will.
            log.info("the dry run for %s/%s was inconclusive: %s", view.namespace, view.name, later)
            done.accepted[view.uid] = view.generation
            patch = status.accepted(view, time.time())
        else:
            done.accepted[view.uid] = view.generation
            patch = status.accepted(view, time.time())
        if patch is not None:
            await self._write(view, patch)

    async def _tell_expected(self, expected: Expectation) -> None:
        view = self._cache.workloads.items.get(expected.uid)
        patch = status.expected(view, expected.start, expected.latest) if view is not None else None
        if view is None or patch is None or await self._write(view, patch) is None:
            return
        if not view.status.get("expectedStartTime"):
            about, why = reference(view), patch["message"]
            self._events.record(regarding=about, type="Normal", reason="StartExpected", action="Predict", note=why)

    async def _tell_waiting(self, entry: Waiting) -> None:
        view = self._cache.workloads.items.get(entry.uid)
        if view is None or view.resource_version != entry.resource_version:
            return
        strategy, _ = strategy_name(view.spec, view.namespace, self._cache.defaults) if view.spec else ("", "")
        patch = status.waiting(view, entry, time.time(), strategy=strategy)
        if patch is None or status.same(view, patch):
            return
        if await self._write(view, patch):
            normal = entry.reason in _NORMAL
            self._events.record(
                regarding=reference(view),
                type="Normal" if normal else "Warning",
                reason=entry.reason,
                action="Place",
                note=entry.message,
            )
