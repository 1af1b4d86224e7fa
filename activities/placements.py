"""Carries out a recorded decision: Jobs, statuses, Events, and verdicts to the workloads they concern.

Every effect can be repeated, for the activity is: a Job that exists already counts as made, a workload that changed
since it was decided upon is left alone and reported stale.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from opentelemetry import metrics
from opentelemetry.trace import get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy

from activities.cache import ClusterCache
from activities.signatures import CARRY_OUT, TASK_QUEUE, CarriedOut, CarryOut, WorkloadRef
from activities.writes import add_finalizer, delete_job, reference, write_status
from kube.client import KubeClient
from kube.errors import AlreadyExists, KubeError, NotFound, Unauthorized, Unavailable
from kube.events import EventRecorder
from kube.resources import JOBS
from planning import jobs, status
from planning.lifecycle import JOB_REFUSED
from planning.model import Assignment, Verdict, Waiting, Withdrawal
from planning.views import job_view
from workflows.messages import WorkloadState, workload_attributes, workload_id

CONCURRENCY = 32

_meter = metrics.get_meter("berth.worker")
_scheduled = _meter.create_counter("warp_gpuworkload_scheduled", description="Jobs created, by strategy")
_wait = _meter.create_histogram(
    "warp_gpuworkload_time_to_placement", unit="s", description="From a workload's creation to its first Job"
)
_tracer = get_tracer("berth.worker")
_traces = TraceContextTextMapPropagator()

T = TypeVar("T")


class Placements:
    def __init__(self, cache: ClusterCache, kube: KubeClient, temporal: Client, events: EventRecorder) -> None:
        self._cache = cache
        self._kube = kube
        self._temporal = temporal
        self._events = events

    @activity.defn(name=CARRY_OUT)
    async def carry_out(self, request: CarryOut) -> CarriedOut:
        """Raises Unavailable when the API server or Temporal could not be asked; the whole is then repeated."""
        done, decision = CarriedOut(), request.decision
        await self._cache.wait_synced()
        # Withdrawals first: what they free, later rounds give away.
        await self._each(decision.withdrawals, self._withdraw)
        await self._each(decision.assignments, lambda a: self._assign(a, request.traces.get(a.uid), done))
        await self._each(decision.verdicts, self._tell)
        await self._each(done.refused, self._tell)
        await self._each(decision.examine, lambda entry: self._examine(entry, done))
        await self._each(decision.waiting, self._tell_waiting)
        return done

    async def _each(self, entries: Iterable[T], do: Callable[[T], Awaitable[None]]) -> None:
        """Does all, some at a time; one that fails does not keep the others from being done."""
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(entry: T) -> None:
            async with gate:
                await do(entry)
                activity.heartbeat()

        results = await asyncio.gather(*(one(entry) for entry in entries), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _assign(self, assignment: Assignment, trace: str | None, done: CarriedOut) -> None:
        view = self._cache.workloads.items.get(assignment.uid)
        version = None
        if view is not None and view.resource_version == assignment.resource_version:
            version = await add_finalizer(self._kube, view)
        if view is None or version is None:
            # Changed since; or this is a repetition and the change was our own: then the Job tells.
            await self._settle(assignment, done)
            return
        with _tracer.start_as_current_span(
            "create Job",
            context=_traces.extract({"traceparent": trace}) if trace else None,
            attributes={"gpuworkload.uid": view.uid, "k8s.node.name": assignment.node},
        ):
            try:
                manifest = jobs.job_manifest(view, assignment, self._cache.settings)
                job = await self._kube.create(JOBS, manifest, view.namespace)
            except AlreadyExists:
                if not await self._settle(assignment, done):
                    return
            except (Unavailable, Unauthorized):
                raise
            except NotFound:  # the namespace is going
                done.stale.append(assignment.uid)
                return
            except (KubeError, ValueError) as refused:
                done.refused.append(
                    Verdict(
                        view.uid, view.namespace, view.name, assignment.turn, JOB_REFUSED,
                        f"Job {assignment.job_name} was refused: {refused}", view.generation,
                    )
                )  # fmt: skip
                return
            else:
                done.made[assignment.uid] = int(job["metadata"]["resourceVersion"])
        now = time.time()
        patch = status.assigned(view, assignment, now)
        if patch is not None:
            await write_status(self._kube, view, patch, resource_version=version)
        _scheduled.add(1, {"strategy": assignment.strategy})
        if assignment.turn.attempt == 0:
            _wait.record(max(0.0, now - view.created))
        self._events.record(
            regarding=reference(view),
            type="Normal",
            reason="Scheduled",
            action="Place",
            note=f"Job {assignment.job_name} was created on node {assignment.node} ({assignment.strategy})",
        )

    async def _settle(self, assignment: Assignment, done: CarriedOut) -> bool:
        """Notes what is: this very turn's Job exists and is there to stay, or the assignment is stale."""
        try:
            raw = await self._kube.get(JOBS, assignment.job_name, assignment.namespace)
        except NotFound:
            raw = {}
        job = job_view(raw)
        if (
            job is not None
            and (job.workload_uid, job.attempt, job.node) == (assignment.uid, assignment.turn.attempt, assignment.node)
            and not job.deleting
        ):
            done.made[assignment.uid] = job.resource_version
            return True
        done.stale.append(assignment.uid)
        return False

    async def _withdraw(self, withdrawal: Withdrawal) -> None:
        await delete_job(self._kube, withdrawal.namespace, withdrawal.job_name, withdrawal.job_uid, finished=False)
        view = self._cache.workloads.items.get(withdrawal.uid)
        if view is not None:
            self._events.record(
                regarding=reference(view), type="Warning", reason="Withdrawn", action="Place", note=withdrawal.message
            )

    async def _tell(self, verdict: Verdict) -> None:
        """Hands the workload to its own workflow, which counts the verdict and waits out the back-off."""
        ref = WorkloadRef(verdict.uid, verdict.namespace, verdict.name)
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

    async def _examine(self, entry: Waiting, done: CarriedOut) -> None:
        """Asks the API server, by a Job that is not made, whether a template would do."""
        view = self._cache.workloads.items.get(entry.uid)
        if view is None or view.resource_version != entry.resource_version:
            return  # changed since: the next round looks at what it is now
        try:
            await self._kube.create(
                JOBS, jobs.examination_manifest(view, self._cache.settings), view.namespace, dry_run=True
            )
        except (Unavailable, Unauthorized):
            raise
        except NotFound:  # the namespace is going
            return
        except (KubeError, ValueError) as refused:
            done.rejected[view.uid] = view.generation
            told = Waiting(
                view.uid, view.namespace, view.name, view.resource_version, "TemplateRefused",
                f"spec.template was refused: {refused}",
            )  # fmt: skip
            patch = status.waiting(view, told, time.time())
            self._events.record(
                regarding=reference(view), type="Warning", reason="TemplateRefused", action="Examine", note=told.message
            )
        else:
            patch = status.accepted(view, time.time())
        if patch is not None:
            await write_status(self._kube, view, patch)

    async def _tell_waiting(self, entry: Waiting) -> None:
        view = self._cache.workloads.items.get(entry.uid)
        if view is None or view.resource_version != entry.resource_version:
            return
        patch = status.waiting(view, entry, time.time())
        if patch is None or status.same(view, patch):
            return
        if await write_status(self._kube, view, patch) is not None:
            normal = entry.reason in ("WaitingForCapacity", "WaitingForPods", status.SUSPENDED)
            self._events.record(
                regarding=reference(view),
                type="Normal" if normal else "Warning",
                reason=entry.reason,
                action="Place",
                note=entry.message,
            )
