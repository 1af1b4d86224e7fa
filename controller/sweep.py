"""Repairs what lost pokes left behind, on both sides: workloads nobody follows, workflows whose workload is gone.

Runs when the controller starts leading, when Temporal comes back after an outage, and every resync period. It also
keeps the tombstones tidy: a leftover Job or finalizer of a finished workload is removed, and a finished workload whose
time to live is over is deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import metrics
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import PlacementState, Requeue, placement_id, workload_id
from activities.writes import delete_job, remove_finalizer
from controller.digests import JobDigest, WorkloadDigest
from controller.outage import reason
from controller.routing import Route, WorkloadPoke, ends_plainly
from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound
from kube.resources import GPUWORKLOADS
from planning.model import Turn
from planning.views import workload_view

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
            if uid in followed:
                pokes.append(WorkloadPoke(uid, workload.namespace, workload.name, begin=False, ended=True))
            continue
        mine = [job for job in jobs.get(uid, ()) if job.namespace == workload.namespace]
        if uid not in followed and len(mine) == 1 and ends_plainly(mine[0], workload):
            continue  # the ledger is poked in any case
        telling = any(job.telling for job in mine)
        unseen = not workload.caught_up or telling
        # Of a first spec's Job that goes on, the ledger tells; an edit is for the workload's own workflow.
        edited = bool(mine) and workload.generation > 1 and not workload.caught_up
        begin = (workload.deleting and workload.finalizer) or telling or edited
        if begin and (uid not in followed or unseen or workload.deleting):
            node, done = (mine[0].node, mine[0].complete) if mine else ("", False)
            phase = "Succeeded" if done else "Running"
            pokes.append(WorkloadPoke(uid, workload.namespace, workload.name, begin=True, node=node, phase=phase))
        elif uid in followed and (unseen or workload.deleting):
            pokes.append(WorkloadPoke(uid, workload.namespace, workload.name, begin=False))
    pokes += [WorkloadPoke(uid, "", "", begin=False) for uid in followed - workloads.keys()]
    return Route(ledger=True, workloads=tuple(pokes))


@dataclass(frozen=True, slots=True)
class Suspect:
    """A verdict whose workflow was not found; `since` by the monotonic clock."""

    turn: Turn
    since: float


async def unheard_verdicts(client: Client, pool: str, followed: set[str]) -> dict[str, Turn] | None:
    """Workloads that the ledger handed to their own workflow and whose workflow is not open, with the verdict's turn.
    None: the ledger could not be asked.

    Visibility is a moment behind, so a workflow counts as ended only when Temporal itself says so. A verdict is in the
    ledger before it is delivered: what is found here may also be in the making.
    """
    try:
        state = await client.get_workflow_handle(placement_id(pool)).query("ledger", result_type=PlacementState)
    except (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError) as away:
        log.info("the sweep could not ask the ledger: %s", reason(away))
        return None
    found: dict[str, Turn] = {}
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
        found[uid] = turn
    return found


def confirmed(
    found: Mapping[str, Turn], before: Mapping[str, Suspect], now: float, second_look: float
) -> tuple[dict[str, Turn], dict[str, Suspect]]:
    """Parts what was `found` into verdicts that are lost, and suspects for the next sweep. Pure.

    Lost is a verdict whose workflow was missing `second_look` seconds ago too, and for the very same turn.
    """
    lost: dict[str, Turn] = {}
    suspects: dict[str, Suspect] = {}
    for uid, turn in found.items():
        known = before.get(uid)
        if known is None or known.turn != turn:
            suspects[uid] = Suspect(turn, now)
        elif now - known.since >= second_look:
            lost[uid] = turn
        else:
            suspects[uid] = known
    return lost, suspects


async def requeue(client: Client, pool: str, lost: Mapping[str, Turn]) -> None:
    """Back to the ledger's queue, for the turn after the one whose verdict was lost."""
    ledger = client.get_workflow_handle(placement_id(pool))
    for uid, turn in lost.items():
        await ledger.signal("requeue", Requeue(uid, Turn(turn.attempt + 1, turn.retries)))
        _swept.add(1, {"kind": "verdict"})


def littered(workload: WorkloadDigest | None, jobs: Iterable[JobDigest]) -> bool:
    """Whether this is a tombstone that somebody deletes and that something of ours keeps from going."""
    return (
        workload is not None
        and workload.finished
        and workload.deleting
        and (workload.finalizer or any(not job.finished for job in jobs))
    )


async def tidy_tombstones(
    kube: KubeClient, workloads: Mapping[str, WorkloadDigest], jobs: Mapping[str, list[JobDigest]], followed: set[str]
) -> int:
    """Removes leftovers of finished workloads that no open workflow will remove. Returns how many were repaired."""
    repaired = 0
    for uid, workload in list(workloads.items()):  # a copy: the watch goes on meanwhile
        if not workload.finished or uid in followed:
            continue
        try:
            for job in jobs.get(uid, []):
                if job.deleting or job.finished or job.namespace != workload.namespace:
                    continue  # one that ended stays as long as its workload
                await delete_job(kube, job.namespace, job.name, job.uid, finished=False)
                repaired += 1
            if workload.finalizer:
                raw = await kube.get(GPUWORKLOADS, workload.name, workload.namespace)
                view = workload_view(raw)
                if view.uid == uid:
                    repaired += await remove_finalizer(kube, view, raw)
        except NotFound:
            continue
        except KubeError as trouble:
            log.warning("tidying %s/%s: %s; the next sweep tries again", workload.namespace, workload.name, trouble)
    _swept.add(repaired, {"kind": "tombstone"})
    return repaired


async def expire(kube: KubeClient, workloads: Mapping[str, WorkloadDigest]) -> float | None:
    """Deletes finished workloads whose time to live is over. Returns seconds until the next is due."""
    now, due = time.time(), None
    for uid, workload in list(workloads.items()):  # a copy: the watch goes on meanwhile
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
