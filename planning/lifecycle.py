"""Decides what a GPUWorkload's own workflow does next, once the workload has left the queue: follow its Job, retry,
finish, suspend or tear down. For `activities` (which observe and carry out) and `workflows` (which wait).

Everything is decided from the Jobs themselves (attempt and retries stand in their annotations), so that a repeated or
late look gives the same step: a failure is counted once however often it is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from crds.gpuworkload import RetryPolicy
from planning.backoff import delay
from planning.model import JobView, NodeView, Places, PodView, Turn, Verdict, WorkloadView
from planning.naming import spec_hash
from planning.places import on_nodes, pods_in

StepKind = Literal["follow", "finish", "retry", "again", "suspend", "withdrawn", "queued", "tear_down", "gone"]

NO_SUITABLE_NODE = "NoSuitableNode"
JOB_REFUSED = "JobRefused"
NODE_LOST = "NodeLost"
JOB_FAILED = "JobFailed"
EVICTED = "Evicted"
JOB_DELETED = "JobDeleted"
SPEC_EDITED = "SpecEdited"
WITHDRAWN = "Withdrawn"
PREEMPTED = "Preempted"
NOT_STOPPED = "NotStopped"
NOT_RESUMED = "NotResumed"
DEADLINE_EXCEEDED = "DeadlineExceeded"
MAX_RETRIES_EXCEEDED = "MaxRetriesExceeded"

_METRIC = {
    NO_SUITABLE_NODE: "no_suitable_node",
    JOB_REFUSED: "job_creation_failed",
    NODE_LOST: "node_lost",
    JOB_FAILED: "job_failed",
    DEADLINE_EXCEEDED: "deadline_exceeded",
}
_CAUSE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class FailureDetail:
    """What the failed container left: its exit code, why it ended (`OOMKilled`, `Error`), its last words."""

    exit_code: int | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a workload. `node` is that of its newest Job (None: deleted, or no Job), of a gang's nodes the first
    that is amiss, by the name of `node_name` ('' for a single one); `pods` are the live ones.
    """

    now: float
    workload: WorkloadView | None
    jobs: tuple[JobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    node: NodeView | None = None
    failure: FailureDetail | None = None
    node_name: str = ""


@dataclass(frozen=True, slots=True)
class JobRef:
    """A Job to delete, with its UID as the precondition."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next, and what to tell.

    follow     the Job goes on; set its deadline to `deadline` when `patch_deadline`
    finish     write the tombstone (`phase`), then delete `delete` and remove the finalizer; the Job that ended last
               stays with its pods, whose logs somebody will want, until the workload goes
    retry      a failure was counted: back to the queue with `turn` after `delay` seconds, and delete `delete`
    again      nothing was counted: back to the queue with `turn` at once, and delete `delete`
    withdrawn  the same, but the ledger took the Job back and tells of it itself
    suspend    delete `delete`; `turn` comes after the suspension
    queued     the ledger's turn; delete `delete` (left over from turns before)
    tear_down  delete `delete`; the finalizer may go when `done`
    gone       the workload is no more; delete `delete`

    `turn` is the turn of the Job followed, or the next one where the workload goes back to the queue. `failure` is the
    metric's reason label when this step counts a failure.
    """

    kind: StepKind
    turn: Turn
    phase: str = ""
    reason: str = ""
    message: str = ""
    delay: float = 0.0
    failure: str = ""
    delete: tuple[JobRef, ...] = ()
    done: bool = False
    job_name: str = ""
    node: str = ""
    strategy: str = ""
    created: float | None = None
    started: float | None = None
    finished_at: float | None = None
    patch_deadline: bool = False
    deadline: int | None = None
    places: Places = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """One look with the questions that most rules ask answered."""

    seen: Observation
    turn: Turn
    jitter: float
    policy: RetryPolicy
    refs: tuple[JobRef, ...]


def next_step(observation: Observation, turn: Turn, verdict: Verdict | None, jitter: float) -> Step:
    """The next step. `turn` is the turn the workflow was started for or handed back last; `jitter` is in [0, 1).

    `verdict` is the ledger's, if it sent one; it counts unless a Job of that turn or a later one exists.
    """
    workload = observation.workload
    refs = tuple(JobRef(job.name, job.uid) for job in observation.jobs)
    if workload is None:
        return Step("gone", turn, reason="Deleted", message="the workload is gone", delete=refs, done=not refs)
    if workload.finished:
        return _tombstone_again(workload, turn, _litter(observation.jobs))
    if workload.deleting:
        return _tear_down(observation, workload, turn, refs)

    case = _Case(observation, turn, jitter, workload.spec.retry_policy if workload.spec else RetryPolicy(), refs)
    newest = max(observation.jobs, key=lambda job: (job.attempt, job.created, job.name), default=None)
    if newest is not None and newest.finished == "Complete":
        step = _of(newest, "finish", case, phase="Succeeded", reason="Completed", message=_done(newest))
        return replace(step, delete=_litter(observation.jobs))
    reached = newest.attempt if newest else -1
    if verdict is not None and verdict.turn.attempt >= turn.attempt and verdict.turn.attempt > reached:
        counted = Turn(verdict.turn.attempt, max(verdict.turn.retries, turn.retries))
        return _count(case, counted, verdict.reason, verdict.message, Step("retry", counted))
    if newest is None:
        if verdict is not None and verdict.turn.attempt < turn.attempt:
            # The ledger judged a turn that is over: it lost count. Told the turn, it looks anew.
            return Step("again", turn, phase="Scheduling", reason="Queued", message="back in the queue for a place")
        return Step("queued", turn, reason="Queued", message="in the queue for a place")
    suspended, edited = workload.spec is not None and workload.spec.suspend, _edited(workload, newest)
    # An older Job that goes on is one that the ledger made after it lost count; it is as good as any. If the workload
    # was suspended or edited, it has most likely been taken back already, and the cache is behind: handed back again,
    # it would be so for ever.
    if newest.attempt < turn.attempt and (newest.finished or newest.deleting or suspended or edited):
        return Step(
            "queued", turn, phase="Scheduling", reason="WaitingForPods", delete=refs,
            message=f"waiting for the pods of Job {newest.name} to go",
        )  # fmt: skip
    if newest.finished and not newest.deleting:
        return _failed(case, newest)
    if newest.deleting:
        # Also when it has failed meanwhile: taking a Job back kills its pod, and that is nobody's failure.
        if newest.withdrawn or newest.preempted:  # one that the ledger stopped is its own to take back
            return replace(_again(newest, case, WITHDRAWN, f"Job {newest.name} was withdrawn"), kind="withdrawn")
        message = f"Job {newest.name} was deleted before it finished; the workload goes back to the queue"
        return _again(newest, case, JOB_DELETED, message)
    if suspended:
        place = "" if newest.preempted else f" from {where(newest)}"  # it has left that to others
        return replace(
            _of(newest, "suspend", case, phase="Pending", reason="Suspended", delete=refs),
            turn=_after(newest, case),
            message=f"suspended; Job {newest.name} is taken back" + place,
        )
    if newest.preempted:
        # The ledger takes it back when its pods are gone, and tells of it itself.
        return Step("queued", turn, phase="Scheduling", reason=PREEMPTED, message=f"Job {newest.name} is being stopped")
    if edited:
        message = (
            f"the spec was edited after Job {newest.name} had been made from it; the Job is taken back from "
            f"{where(newest)} and the workload is placed anew with the spec as it is now"
        )
        return _again(newest, case, SPEC_EDITED, message)
    return _follow(case, workload, newest)


def _edited(workload: WorkloadView, job: JobView) -> bool:
    """Whether the Job was made from another spec. The API server refuses such edits only once the status tells of the
    Job, a moment after it was made; followed, it would run a spec that is not in force, and a retry another one.
    """
    return bool(job.spec_hash) and workload.spec is not None and job.spec_hash != spec_hash(workload.spec)


def _litter(jobs: tuple[JobView, ...]) -> tuple[JobRef, ...]:
    """What an end removes: all Jobs but the one that ended last."""
    ended = [job for job in jobs if job.finished and not job.deleting]
    last = max(ended, key=lambda job: (job.attempt, job.created, job.name), default=None)
    return tuple(JobRef(job.name, job.uid) for job in jobs if job is not last)


def _tombstone_again(workload: WorkloadView, turn: Turn, refs: tuple[JobRef, ...]) -> Step:
    """What was decided once stays decided; only what it left behind is removed."""
    status = workload.status
    message = status.get("message")
    return Step(
        "finish", turn, phase=workload.phase, reason="Finished", delete=refs,
        message=message if isinstance(message, str) else "",
    )  # fmt: skip


def _tear_down(seen: Observation, workload: WorkloadView, turn: Turn, refs: tuple[JobRef, ...]) -> Step:
    left = []
    if seen.jobs:
        left.append("Job " + ", ".join(sorted(job.name for job in seen.jobs)[:3]))
    if seen.pods:
        nodes = sorted({pod.node for pod in seen.pods if pod.node})[:3]
        left.append(f"{len(seen.pods)} pod(s)" + (f" on {', '.join(nodes)}" if nodes else ""))
    message = "deleting: waiting for " + " and ".join(left) + " to go" if left else "deleted; nothing is left behind"
    if left and seen.node is not None and not seen.node.ready:
        message += f"; node {seen.node.name} is not ready"
    return Step(
        "tear_down", turn, phase=workload.phase or "Pending", reason="Deleting", message=message,
        delete=refs, done=not left,
    )  # fmt: skip


def _failed(case: _Case, job: JobView) -> Step:
    """A Job that failed: which cause, and whether it is counted."""
    node, name = case.seen.node, case.seen.node_name or job.node
    if job.reason == "DeadlineExceeded":
        limit = f" of {job.active_deadline} s" if job.active_deadline else ""
        message = f"Job {job.name} ran beyond its activeDeadlineSeconds{limit} on {where(job)}; this is not retried"
        step = _of(job, "finish", case, phase="Failed", reason=DEADLINE_EXCEEDED, message=message)
        return replace(step, failure=_METRIC[DEADLINE_EXCEEDED], delete=_litter(case.seen.jobs))
    base = _of(job, "retry", case)
    if job.reason == "PodFailurePolicy":
        if node is None:
            message = f"node {name} was deleted while Job {job.name} ran there"
            return _count(case, base.turn, NODE_LOST, message, base)
        if node.out_of_service:
            message = f"node {name} was taken out of service while Job {job.name} ran there"
            return _count(case, base.turn, NODE_LOST, message, base)
        why = _cut(job.message) or "its pod was evicted, preempted or drained"
        message = f"Job {job.name} lost its place on {where(job)}: {why}; no retry is counted"
        return _again(job, case, EVICTED, message)
    return _count(case, base.turn, JOB_FAILED, f"Job {job.name} failed on {where(job)}: {_cause(case, job)}", base)


def _count(case: _Case, turn: Turn, reason: str, cause: str, base: Step) -> Step:
    """A failure that costs a retry: the next Job after a back-off, or the end."""
    failure = _METRIC.get(reason, "job_failed")
    limit = case.policy.max_retries
    if turn.retries >= limit:
        used = "the only retry is used" if limit == 1 else f"all {limit} retries are used"
        return replace(
            base, kind="finish", phase="Failed", reason=MAX_RETRIES_EXCEEDED, turn=turn, failure=failure,
            message=f"{used}; the last cause: {cause}", delete=_litter(case.seen.jobs),
            finished_at=base.finished_at or case.seen.now,
        )  # fmt: skip
    wait = delay(case.policy.backoff_seconds, turn.retries, case.jitter)
    return replace(
        base, kind="retry", phase="Pending", reason=reason, turn=Turn(turn.attempt + 1, turn.retries + 1),
        delay=wait, failure=failure, delete=case.refs,
        message=f"{cause}; retry {turn.retries + 1} of {limit} in {wait:.0f} s",
    )  # fmt: skip


def _again(job: JobView, case: _Case, reason: str, message: str) -> Step:
    step = _of(job, "again", case, phase="Scheduling", reason=reason, message=message, delete=case.refs)
    return replace(step, turn=_after(job, case))


def _follow(case: _Case, workload: WorkloadView, job: JobView) -> Step:
    seen, node, name = case.seen, case.seen.node, case.seen.node_name or job.node
    mine = [pod for pod in seen.pods if pod.job_name == job.name]
    running = job.ready or (not job.places and any(pod.running and not pod.terminating for pod in mine))
    blocked = next((pod.blocked for pod in mine if pod.blocked and not pod.node), "")
    reason = "Running" if running else "JobCreated"
    if node is None:
        reason, message = (
            "NodeGone",
            f"node {name} is gone; " + ("its pods are not removed yet" if mine else "waiting for the Job to notice"),
        )
    elif node.out_of_service:
        reason, message = "NodeOutOfService", f"node {name} is out of service; its pods are not removed yet"
    elif not node.ready:
        since = f" since {_moment(node.not_ready_since)}" if node.not_ready_since is not None else ""
        reason, message = "NodeNotReady", f"node {name} has not been ready{since}; waiting for it"
    elif running:
        message = f"running on {where(job)}" + _part(workload, job)
    elif blocked:
        message = f"Job {job.name} waits for its place on {where(job)}: {_cut(blocked)}"
    else:
        message = f"Job {job.name} was {'resumed' if job.resumed else 'created'} on {where(job)}" + _part(workload, job)
    if workload.spec is None:
        message += f"; the spec is not valid any more ({_cut(workload.invalid)})"
    step = _of(job, "follow", case, phase="Running" if running else "Scheduled", reason=reason, message=message)
    older = tuple(JobRef(other.name, other.uid) for other in seen.jobs if other.uid != job.uid)
    deadline = workload.spec.active_deadline_seconds if workload.spec else job.active_deadline
    return replace(step, delete=older, patch_deadline=deadline != job.active_deadline, deadline=deadline)


def _of(
    job: JobView, kind: StepKind, case: _Case, *, phase: str = "", reason: str = "", message: str = "",
    delete: tuple[JobRef, ...] = (),
) -> Step:  # fmt: skip
    """A step about this Job, with all that the status tells of it."""
    return Step(
        kind, Turn(job.attempt, max(job.retries, case.turn.retries)),
        phase=phase, reason=reason, message=message, delete=delete,
        job_name=job.name, node=job.node, strategy=job.strategy, created=job.created, started=job.started,
        finished_at=(job.finished_at or case.seen.now) if job.finished else None, places=job.places,
    )  # fmt: skip


def _after(job: JobView, case: _Case) -> Turn:
    """The turn after this Job where no failure is counted; neither number ever goes back."""
    return Turn(max(job.attempt + 1, case.turn.attempt), max(job.retries, case.turn.retries))


def _done(job: JobView) -> str:
    if job.started is not None and job.finished_at is not None and job.finished_at >= job.started:
        return f"Job {job.name} completed on {where(job)} in {job.finished_at - job.started:.0f} s"
    return f"Job {job.name} completed on {where(job)}"


def where(job: JobView) -> str:
    """`node a`; of a gang's nodes the first few."""
    return on_nodes(node for node, _ in job.places or ((job.node, 1),))


def _part(workload: WorkloadView, job: JobView) -> str:
    """How many of a gang's pods were placed."""
    pods = pods_in(job.places)
    return f", {pods} of {workload.spec.replicas if workload.spec else pods} pods" if pods else ""


def _cause(case: _Case, job: JobView) -> str:
    """The most telling words there are: the container's own end, else the Job's message."""
    detail = case.seen.failure
    if detail is None or (detail.exit_code is None and not detail.reason and not detail.message):
        return _cut(job.message or job.reason) or "no reason given"
    text = f"exit code {detail.exit_code}" if detail.exit_code is not None else detail.reason or "ended"
    if detail.reason and detail.reason != "Error" and detail.exit_code is not None:
        text += f" ({detail.reason})"
    words = _cut(detail.message.strip())
    return f"{text}: {words}" if words else text


def _cut(text: str) -> str:
    return text if len(text) <= _CAUSE_LIMIT else text[: _CAUSE_LIMIT - 1] + "…"


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return "an unknown time"
