"""Decides whose status lags behind its running Job: what the ledger shows for all, in batches.

A workload's own workflow begins only when its Job ended or somebody must decide about it; until then nobody but the
ledger tells that its Job was created and runs. What is due follows from the cluster alone, so that a round that was
lost or came late shows the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planning.capacity import Belongings
from planning.lifecycle import Observation, next_step
from planning.model import JobView, NodeView, PodView, Turn, WorkloadView
from planning.places import amiss
from planning.status import Status, project, same


@dataclass(frozen=True, slots=True)
class Lag:
    """A workload and the status that its Job calls for."""

    view: WorkloadView
    status: Status


def lagging(
    now: float,
    workloads: Iterable[WorkloadView],
    jobs: Iterable[JobView],
    pods: Iterable[PodView],
    nodes: Iterable[NodeView],
) -> list[Lag]:
    """Workloads whose Job goes on and whose status does not say so. Everything else is for their own workflows:
    whatever ended, is being suspended or deleted, or has Jobs of several turns.
    """
    mine = Belongings.of(jobs, pods)
    # Of all that ever ended most are still there, and have no Job: they should cost as little as can be.
    owners = {uid for _, uid in mine.jobs}
    owned = [view for view in workloads if view.uid in owners]
    due = [(view, job) for view in owned if (job := _due(view, mine.jobs.get((view.namespace, view.uid), ())))]
    by_name = {node.name: node for node in nodes} if due else {}
    found = []
    for view, job in due:
        pods_of = tuple(mine.pods.get((view.namespace, view.uid), ()))
        name, node = amiss(job, by_name.get)
        seen = Observation(now=now, workload=view, jobs=(job,), pods=pods_of, node=node, node_name=name)
        step = next_step(seen, Turn(), None, 0.0)
        if step.kind != "follow" or (step.patch_deadline and view.generation > 1):
            continue  # its own workflow has something to do there (an edited deadline), and tells of it
        status = project(view, step, now)
        if status is not None and not same(view, status):
            found.append(Lag(view, status))
    return found


def _due(view: WorkloadView, jobs: Sequence[JobView]) -> JobView | None:
    """Its Job, if it is worth a closer look: the only one, which goes on, and a status that may not say so."""
    if len(jobs) != 1 or view.finished or view.deleting:
        return None
    job = jobs[0]
    told = view.status.get("attempt")
    if job.finished or job.deleting or (isinstance(told, int) and told > job.attempt):
        return None  # or told already that this turn is over, by somebody who saw its Job end before this cache did
    shown = view.status.get("jobName") == job.name and view.status.get("observedGeneration") == view.generation
    shown = shown and told == job.attempt  # a Job that was stopped goes on under its name
    # Once shown as running it stays so until its own workflow tells more: a Job has no ready pod either while its pod
    # is being terminated, or has ended and is yet to be counted.
    if shown and (view.phase == "Running" or (view.phase == "Scheduled" and not job.ready)):
        return None
    return job
