"""Repairs what lost pokes left behind, on both sides: workloads nobody follows, workflows whose workload is gone.

Runs when the controller starts leading, when Temporal comes back after an outage, and every resync period. It also
keeps the tombstones tidy: a leftover Job or finalizer of a finished workload is removed, and a finished workload whose
time to live is over is deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from opentelemetry import metrics
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.service import RPCError, RPCStatusCode

from controller.digests import JobDigest, WorkloadDigest
from controller.routing import Route, WorkloadPoke
from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound
from kube.resources import GPUWORKLOADS, JOBS
from planning.model import Turn
from planning.naming import FINALIZER
from workflows.messages import PlacementState, Requeue, placement_id, workload_id

log = logging.getLogger(__name__)
_swept = metrics.get_meter("berth.controller").create_counter(
    "berth_sweep_repairs", description="What a sweep found and repaired, by kind"
)

OPEN_WORKLOADS = 'BerthKind = "GPUWorkload" AND ExecutionStatus = "Running"'


async def open_workflows(client: Client) -> set[str]:
    """UIDs of workloads whose workflow is open, as Temporal's visibility (a moment behind) shows them."""
    prefix = workload_id("")
    return {
        execution.id.removeprefix(prefix)
        async for execution in client.list_workflows(OPEN_WORKLOADS, page_size=1000)
        if execution.id.startswith(prefix)
    }


def repairs(workloads: Mapping[str, WorkloadDigest], jobs: Mapping[str, list[JobDigest]], followed: set[str]) -> Route:
    """Pokes that are missing. Pure; one poke too many costs four history events, so those well followed get none."""
    pokes: list[WorkloadPoke] = []
    for uid, workload in workloads.items():
        if workload.finished:
            continue
        mine = jobs.get(uid, [])
        unseen = any(job.finished or job.deleting for job in mine) or not workload.caught_up
        begin = (workload.deleting and workload.finalizer) or any(job.telling for job in mine)
        if begin and (uid not in followed or unseen or workload.deleting):
            node = mine[0].node if mine else ""
            pokes.append(WorkloadPoke(uid, workload.namespace, workload.name, begin=True, node=node))
        elif uid in followed and (unseen or workload.deleting):
            pokes.append(WorkloadPoke(uid, workload.namespace, workload.name, begin=False))
    pokes += [WorkloadPoke(uid, "", "", begin=False) for uid in followed - workloads.keys()]
    return Route(ledger=True, workloads=tuple(pokes))


async def lost_verdicts(client: Client, pool: str, followed: set[str]) -> list[Requeue]:
    """Workloads that the ledger handed to their own workflow and whose workflow somebody ended: back to the queue.

    Visibility is a moment behind, so a workflow counts as ended only when Temporal itself says so.
    """
    ledger = client.get_workflow_handle(placement_id(pool))
    try:
        state = await ledger.query("ledger", result_type=PlacementState)
    except (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError) as away:
        log.info("the sweep could not ask the ledger: %s", away)
        return []
    lost = []
    for uid, turn in state.ledger.held.items():
        if uid in followed:
            continue
        try:
            described = await client.get_workflow_handle(workload_id(uid)).describe()
        except RPCError as missing:
            if missing.status != RPCStatusCode.NOT_FOUND:
                raise
        else:
            if described.status == WorkflowExecutionStatus.RUNNING:
                continue
        lost.append(Requeue(uid, Turn(turn.attempt + 1, turn.retries)))
    for back in lost:
        await ledger.signal("requeue", back)
    _swept.add(len(lost), {"kind": "verdict"})
    return lost


async def tidy_tombstones(
    kube: KubeClient, workloads: Mapping[str, WorkloadDigest], jobs: Mapping[str, list[JobDigest]], followed: set[str]
) -> int:
    """Removes leftovers of finished workloads that no open workflow will remove. Returns how many were repaired."""
    repaired = 0
    for uid, workload in workloads.items():
        if not workload.finished or uid in followed:
            continue
        try:
            for job in jobs.get(uid, []):
                await _delete_job(kube, job)
                repaired += 1
            if workload.finalizer:
                await _drop_finalizer(kube, uid, workload)
                repaired += 1
        except KubeError as trouble:
            log.warning("tidying %s/%s: %s; the next sweep tries again", workload.namespace, workload.name, trouble)
    _swept.add(repaired, {"kind": "tombstone"})
    return repaired


async def expire(kube: KubeClient, workloads: Mapping[str, WorkloadDigest]) -> float | None:
    """Deletes finished workloads whose time to live is over. Returns seconds until the next is due."""
    now, due = time.time(), None
    for uid, workload in workloads.items():
        if workload.expires is None or workload.deleting:
            continue
        if workload.expires > now:
            due = min(due or workload.expires, workload.expires)
            continue
        try:
            await kube.delete(GPUWORKLOADS, workload.name, workload.namespace, uid=uid)
            _swept.add(1, {"kind": "expired"})
        except (NotFound, Conflict):
            pass  # gone already, or another object of that name
        except KubeError as trouble:
            log.warning("deleting the expired %s/%s: %s", workload.namespace, workload.name, trouble)
            due = min(due or now + 30, now + 30)
    return None if due is None else max(1.0, due - now)


def by_workload(jobs: Iterable[JobDigest]) -> dict[str, list[JobDigest]]:
    """Jobs by the workload they belong to, the newest attempt first."""
    grouped: dict[str, list[JobDigest]] = {}
    for job in sorted(jobs, key=lambda j: -j.attempt):
        grouped.setdefault(job.workload_uid, []).append(job)
    return grouped


async def _delete_job(kube: KubeClient, job: JobDigest) -> None:
    try:
        await kube.delete(JOBS, job.name, job.namespace)
    except NotFound:
        return


async def _drop_finalizer(kube: KubeClient, uid: str, workload: WorkloadDigest) -> None:
    try:
        raw = await kube.get(GPUWORKLOADS, workload.name, workload.namespace)
        meta = raw["metadata"]
        if meta["uid"] != uid:
            return
        left = [f for f in meta.get("finalizers", []) if f != FINALIZER]
        body = {"metadata": {"finalizers": left, "resourceVersion": meta["resourceVersion"]}}
        await kube.merge_patch(GPUWORKLOADS, workload.name, workload.namespace, body)
    except (NotFound, Conflict):
        return  # gone, or changed meanwhile: the next sweep looks again
