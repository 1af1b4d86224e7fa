"""Decides which Jobs are taken back because their pod found no place in time, and when the next one may be; and what
becomes of those that were stopped for another workload: they wait, suspended, for their next turn, or go.

For the placement round; of gangs `planning.gates` decides it. Planning does not count all that the kube-scheduler
checks (volumes, devices, pods' affinity to each other), so a node that looks free may be none for this workload. The
ledger remembers where that was so; here is also said when it may forget it.
"""

from __future__ import annotations

from dataclasses import replace

from crds.settings import Settings
from planning.capacity import Belongings, patience
from planning.gates import is_gang
from planning.lifecycle import PREEMPTED
from planning.model import JobView, Ledger, PodView, Snapshot, Turn, Withdrawal, WorkloadView
from planning.naming import spec_hash
from planning.places import on_nodes


def _unbound(snapshot: Snapshot, mine: Belongings) -> list[JobView]:
    """Unfinished Jobs none of whose pods is known to be on a node."""
    return [
        job
        for job in snapshot.jobs
        if not job.finished and not job.deleting and not mine.bound(job.namespace, job.workload_uid, job.name)
    ]


def withdrawals(snapshot: Snapshot, mine: Belongings, settings: Settings, ledger: Ledger) -> list[Withdrawal]:
    """Jobs whose pod found no place in time: somebody else took it; and those that were stopped for another workload,
    once their pods are gone. That one goes first, so they cannot take its place. One that may go on elsewhere is kept;
    only its turn is over, which is said once.

    A Job without any visible pod counts only if its controller never counted one as going: a pod that ran and ended
    is not live any more, and the Job's own end may just not be visible yet.
    """
    living = {view.uid: view for view in snapshot.workloads if not view.finished and not view.deleting}
    nodes = {node.name for node in snapshot.nodes}
    found = []
    for job in _unbound(snapshot, mine):
        if job.workload_uid not in living:
            continue
        pods = _pods_of(job, mine)
        if job.preempted:
            view = living[job.workload_uid]
            keep = resumable(view, job)
            if job.halted and not pods and not (keep and turn_is_over(job, ledger)):
                found.append(replace(_stopped(job, view), keep=keep))
            continue
        if is_gang(living[job.workload_uid], job) or job.ready or (not pods and job.counted):
            continue
        if snapshot.now - job.created < _patience(pods, settings):
            continue
        why = next((pod.blocked for pod in pods if pod.blocked), "" if pods else "no pod was created for it")
        message = f"Job {job.name} found no place on node {job.node} in {settings.bind_deadline_seconds} s"
        found.append(
            Withdrawal(
                uid=job.workload_uid,
                namespace=job.namespace,
                name=living[job.workload_uid].name,
                generation=living[job.workload_uid].generation,
                job_name=job.name,
                job_uid=job.uid,
                # Without a pod nobody took the place: something refuses its pods, and that counts as a failure. A Job
                # that was never looked at (it has no start time) waits for its controller, and that is nobody's.
                next_turn=Turn(job.attempt + 1, job.retries + (0 if pods or job.started is None else 1)),
                message=f"{message} ({why}); it is placed anew" if why else f"{message}; it is placed anew",
                job_version=job.resource_version,
                # A node that is there: anybody may write anything on a Job, and this will be remembered.
                avoid=job.node if job.node in nodes and any(pod.blocked for pod in pods) else "",
            )
        )
    return found


def resumable(view: WorkloadView, job: JobView) -> bool:
    """Whether a Job that was stopped may go on on another node.

    Kubernetes lets the pod template of a suspended Job change while it has no start time, and Job controllers of late
    (from 1.36 on) take that back when they suspend one. Where they do not, a deadline would also count from the earlier
    run. Nor does one go on that was made from another spec: a merge patch leaves what only that one has.
    """
    if not job.halted or job.started is not None or job.deleting or job.finished:
        return False
    # Of a gang, some pods may have ended well and would stay so while the others begin anew; and how many it begins
    # with may be another number.
    if view.spec is None or view.spec.replicas != 1 or job.places:
        return False
    return job.spec_hash == spec_hash(view.spec)


def turn_is_over(job: JobView, ledger: Ledger) -> bool:
    """Whether the ledger knows of a turn after this Job's."""
    return ledger.turns.get(job.workload_uid, Turn()).attempt > job.attempt


def _stopped(job: JobView, view: WorkloadView) -> Withdrawal:
    """The end of the turn of a Job that was suspended for another workload, and whose pods are gone."""
    names = [node for node, _ in job.places] or [job.node]
    return Withdrawal(
        uid=job.workload_uid,
        namespace=job.namespace,
        name=view.name,
        generation=view.generation,
        job_name=job.name,
        job_uid=job.uid,
        next_turn=Turn(job.attempt + 1, job.retries),
        message=f"Job {job.name} was stopped on {on_nodes(names)} for another workload; it is queued again",
        job_version=job.resource_version,
        reason=PREEMPTED,
    )


def to_reconsider(snapshot: Snapshot, mine: Belongings, ledger: Ledger) -> list[str]:
    """Workloads for which no node need be avoided any more: a pod of theirs found its place since, or their spec was
    edited, and with it perhaps what stood in the way. A Job that is taken back may fail of that, and proves nothing.
    """
    found = []
    for view in snapshot.workloads:
        avoided = ledger.avoided.get(view.uid)
        if avoided is not None:
            key = view.namespace, view.uid
            alone = view.spec is None or view.spec.replicas == 1  # some of a gang's may, and not all
            placed = alone and any(pod.node for pod in mine.pods.get(key, ()))
            ran = any((job.ready or job.finished) and not job.deleting for job in mine.jobs.get(key, ()))
            if placed or ran or avoided.generation != view.generation:
                found.append(view.uid)
    return found


def next_deadline(snapshot: Snapshot, mine: Belongings, settings: Settings, promised: bool) -> float | None:
    """Seconds until the next bind deadline; a promise whose Job is not visible has its whole deadline before it."""
    deadline = float(settings.bind_deadline_seconds)
    unbound = [job for job in _unbound(snapshot, mine) if not job.preempted and not job.places]
    due = [job.created + _patience(_pods_of(job, mine), settings) - snapshot.now for job in unbound]
    waits = [min(seconds, deadline) for seconds in due if seconds > 0]  # a clock that jumped back must not add to it
    if promised:
        waits.append(deadline)
    return min(waits, default=None)


def _pods_of(job: JobView, mine: Belongings) -> list[PodView]:
    return [pod for pod in mine.pods.get((job.namespace, job.workload_uid), ()) if pod.job_name == job.name]


def _patience(pods: list[PodView], settings: Settings) -> float:
    """Seconds from a Job's creation after which it is taken back if nothing of it is on a node."""
    tried = any(pod.blocked for pod in pods)
    return patience(settings.bind_deadline_seconds, 0, tried=tried)
