"""What a workload's own workflow asks for: a look at its Job with the step that follows from it, and the way back to
the queue. Looks read the cache, which has first caught up with the news that the poke was about.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from opentelemetry import metrics
from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy

from activities.cache import ClusterCache, restored_to
from activities.endings import tell
from activities.messages import PlacementState, Requeue, placement_attributes, placement_id
from activities.signatures import FOLLOW, HAND_BACK, TASK_QUEUE, Followed, FollowRequest, HandBack
from activities.writes import delete_job, delete_job_before, remove_finalizer, write_status
from kube.client import KubeClient
from kube.errors import NotFound
from kube.events import EventRecorder
from kube.resources import GPUWORKLOADS, JOBS, PODS
from planning import status
from planning.failures import failure_detail
from planning.lifecycle import FailureDetail, Observation, Step, next_step
from planning.model import JobView, Turn, WorkloadView
from planning.naming import WORKLOAD_UID_LABEL, label_value
from planning.recommendation import advised
from planning.views import job_view, workload_view

log = logging.getLogger(__name__)

# Just under the eight seconds after which the SDK extends a workflow task: giving up earlier costs a timer and one more
# look, six events, and a busy worker's watches may well be some seconds behind.
CATCH_UP = 6.0
# Deletion waits for pods to go; a lost poke should not make it wait for the next sweep.
LOOK_AGAIN = 30.0

_meter = metrics.get_meter("berth.worker")
_seconds = _meter.create_histogram(
    "warp_gpuworkload_reconcile_duration", unit="s", description="Duration of one look at a GPUWorkload, by result"
)


class Workloads:
    def __init__(self, cache: ClusterCache, kube: KubeClient, temporal: Client, events: EventRecorder) -> None:
        self._cache = cache
        self._kube = kube
        self._temporal = temporal
        self._events = events

    @activity.defn(name=FOLLOW)
    async def follow(self, request: FollowRequest) -> Followed:
        """One look: read, decide, project. Raises KubeError when a write could not be made; it is then repeated."""
        began = time.perf_counter()
        result = "error"
        try:
            missing = await self._cache.reach(request.fresh, CATCH_UP)
            restored = await restored_to(self._kube, missing) is not None
            followed = await self._look(request, behind=bool(missing))
            result = followed.next
            soon = missing and followed.next == "wait"
            return replace(followed, within=2.0 if soon else followed.within, restored=restored)
        finally:
            _seconds.record(time.perf_counter() - began, {"result": result})

    async def _look(self, request: FollowRequest, *, behind: bool, anew: bool = False) -> Followed:
        """`behind`: the cache has not seen the news that the poke was about. `anew`: read the workload from the API
        server, because it changed since the cache looked.
        """
        view, jobs = await self._workload(request.ref.uid, request.ref.namespace, request.ref.name, anew=anew)
        if view is not None and view.deleting and not jobs:
            # A Job that nobody saw would be left to Kubernetes' garbage collector, and without its workload it claims
            # nothing while it still holds its GPUs. So a teardown believes the API server alone that none is left.
            jobs = await self._jobs_left(view)
        verdict = request.verdict
        if verdict is not None and view is not None and view.generation > verdict.generation > 0:
            # The spec was edited since: whatever the verdict was about is no more. Back to the queue, uncounted.
            turn = Turn(verdict.turn.attempt + 1, verdict.turn.retries)
            return Followed("retry", "Scheduling", "the spec was edited; it is looked at anew", turn, 0.0)
        newest = max(jobs, key=lambda job: job.attempt, default=None)
        name, node = self._cache.amiss(newest) if newest else ("", None)
        seen = Observation(
            now=time.time(),
            workload=view,
            jobs=jobs,
            pods=self._cache.pods_of(request.ref.namespace, request.ref.uid),
            node=node,
            node_name=name,
            failure=await self._failure(newest) if newest and newest.finished == "Failed" else None,
        )
        step = next_step(seen, request.turn, verdict, request.jitter)
        if step.kind == "queued" and not anew:
            # Without a Job it may also have ended, in a look whose result was lost, and tombstones are not poked.
            return await self._look(request, behind=behind, anew=True)
        return await self._carry_out(step, view, request, behind=behind, anew=anew)

    async def _carry_out(
        self, step: Step, view: WorkloadView | None, request: FollowRequest, *, behind: bool, anew: bool
    ) -> Followed:
        namespace = request.ref.namespace
        raw: dict[str, Any] | None = None
        patch = status.project(view, step, time.time()) if view is not None else None
        if view is not None and patch is not None and step.kind == "finish":
            patch = advised(patch, view, self._cache.recommendation(view))
        if view is not None and patch is not None and not status.same(view, patch):
            raw = await write_status(self._kube, view, patch)
            if raw is None:
                # Somebody wrote meanwhile: decide again on what is there now.
                if not anew:
                    return await self._look(request, behind=behind, anew=True)
                return Followed("wait", view.phase, step.message, request.turn, 2.0, step.node)
            self._cache.workloads.observe(raw)
            tell(self._events, step, view)
        match step.kind:
            case "follow":
                await self._delete(step, namespace, request.ref.uid)
                if step.patch_deadline:
                    body = {"spec": {"activeDeadlineSeconds": step.deadline}}
                    await self._kube.merge_patch(JOBS, step.job_name, namespace, body)
                return Followed("wait", step.phase, step.message, step.turn, node=step.node)
            case "queued":
                left_over = {job.uid for job in step.delete}
                for job in self._cache.jobs_of(namespace, request.ref.uid):
                    if job.uid in left_over:
                        await delete_job_before(
                            self._kube, job, request.turn.attempt, self._cache.settings.gpu_resource
                        )
                if request.turn.attempt > 0:
                    # Should the ledger have lost count (somebody ended it), it must not begin at 0 again.
                    await self._requeue(request.ref.uid, request.turn, "default")
                return Followed("wait", view.phase if view else "", step.message, request.turn)
            case "retry" | "again" | "withdrawn" | "suspend":
                # The Jobs go only after the ledger knows the next turn (hand_back), lest it give this turn again.
                return Followed("retry", step.phase, step.message, step.turn, step.delay)
            case "finish":
                await self._delete(step, namespace, request.ref.uid)
                if view is not None and not await remove_finalizer(self._kube, view, raw):
                    return Followed("wait", step.phase, step.message, step.turn, 2.0, step.node)
                return Followed("end", step.phase, step.message, step.turn, node=step.node)
            case "tear_down":
                await self._delete(step, namespace, request.ref.uid)
                if step.done and behind:
                    message = "deleting: this worker has not seen the latest news of it; it looks again"
                    return Followed("wait", "Deleting", message, step.turn)
                if step.done and view is not None and await remove_finalizer(self._kube, view, raw):
                    log.info("GPUWorkload %s/%s: Deleted, its Jobs and pods are gone", namespace, view.name)
                    return Followed("end", "Deleted", step.message, step.turn)
                return Followed("wait", "Deleting", step.message, step.turn, LOOK_AGAIN)
            case "gone":
                await self._delete(step, namespace, request.ref.uid)
                return Followed("end", "Deleted", step.message, step.turn)

    @activity.defn(name=HAND_BACK)
    async def hand_back(self, back: HandBack) -> None:
        """The ledger hears of the next turn first; only then may the old Jobs go."""
        await self._requeue(back.ref.uid, back.turn, back.pool)
        for job in self._cache.jobs_of(back.ref.namespace, back.ref.uid):
            if job.attempt < back.turn.attempt:
                await delete_job_before(self._kube, job, back.turn.attempt, self._cache.settings.gpu_resource)

    async def _requeue(self, uid: str, turn: Turn, pool: str) -> None:
        await self._temporal.start_workflow(
            "Placement",
            PlacementState(pool=pool),
            id=placement_id(pool),
            task_queue=TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=placement_attributes(pool),
            static_summary=f"Placement ledger of pool {pool}",
            start_signal="requeue",
            start_signal_args=[Requeue(uid, turn)],
        )

    async def _workload(
        self, uid: str, namespace: str, name: str, *, anew: bool
    ) -> tuple[WorkloadView | None, tuple[JobView, ...]]:
        """The workload and its Jobs from the cache; before it counts as gone, the API server is asked."""
        jobs = self._cache.jobs_of(namespace, uid)
        view = self._cache.workloads.items.get(uid)
        if view is not None and view.namespace != namespace:
            return None, jobs  # somebody labelled a Job of theirs with another namespace's workload
        if not name or (view is not None and not anew):
            return view, jobs
        try:
            raw = await self._kube.get(GPUWORKLOADS, name, namespace)
        except NotFound:
            return None, jobs
        return (workload_view(raw) if raw["metadata"]["uid"] == uid else None), jobs

    async def _jobs_left(self, view: WorkloadView) -> tuple[JobView, ...]:
        """The workload's Jobs as the API server has them. Only deletions pay for this list."""
        selector = f"{WORKLOAD_UID_LABEL}={label_value(view.uid)}"
        found, _ = await self._kube.list(JOBS, view.namespace, label_selector=selector)
        return tuple(job for raw in found if (job := job_view(raw, self._cache.settings.gpu_resource)) is not None)

    async def _failure(self, job: JobView) -> FailureDetail | None:
        """What the failed container left. Only failures pay for this list."""
        pods, _ = await self._kube.list(PODS, job.namespace, label_selector=f"batch.kubernetes.io/job-name={job.name}")
        return failure_detail(pods)

    async def _delete(self, step: Step, namespace: str, uid: str) -> None:
        finished = {job.uid for job in self._cache.jobs_of(namespace, uid) if job.finished}
        for job in step.delete:
            await delete_job(self._kube, namespace, job.name, job.uid, finished=job.uid in finished)
