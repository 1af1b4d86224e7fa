"""Decides what a GPUWorkload's status says: the whole status for every step, so that one merge patch makes it true.

For the activities that write it. Keys that no longer hold are None (a merge patch removes them). A terminal phase is
a tombstone (law 1): for a workload that has one, every function here returns None, which means "write nothing".

Phases: Pending = not in the queue (not accepted, suspended, backing off); Scheduling = in the queue for a place;
Scheduled = a Job was created on a node; Running; Succeeded; Failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from crds.gpuworkload_status import SHOWN_NODES
from planning.lifecycle import Step
from planning.model import Turn, Waiting, WorkloadView
from planning.places import on_nodes, pods_in
from planning.times import timestamp

Status = dict[str, Any]

NO_RESERVATION = "NoReservation"
WAITING_FOR_RESERVATION = "WaitingForReservation"
NOT_ACCEPTED = frozenset({"Invalid", "UnknownStrategy", "TemplateRefused", NO_RESERVATION})
SUSPENDED = "Suspended"
ACCEPTED = "Accepted"
EXAMINING = "Examining"  # the template is being dry-run; accepted or refused next

# Reasons under which different things are told, one after the other, that do not change by themselves.
_TOLD_ANEW = frozenset({NO_RESERVATION, WAITING_FOR_RESERVATION})
_MESSAGE_LIMIT = 4096
_EXPECTED = "; expected to start at "
_DECISIONS = 10
_NOTE_LIMIT = 256
_KEPT = (
    "assignedNode",
    "lastScheduleTime",
    "retryCount",
    "jobName",
    "attempt",
    "startTime",
    "strategy",
    "recommendation",
)
_OF_A_GANG = ("placedReplicas", "nodes")


def waiting(
    view: WorkloadView, entry: Waiting, now: float, *, turn: Turn | None = None, strategy: str = ""
) -> Status | None:
    """The status of a workload that stays in the queue, or outside it because it is not accepted or suspended."""
    if view.finished:
        return None
    refused = entry.reason in NOT_ACCEPTED
    outside = refused or entry.reason == SUSPENDED
    status = _start(view, "Pending" if outside else "Scheduling", entry.message)
    status["assignedNode"] = None
    if turn is not None:
        status |= {"attempt": turn.attempt, "retryCount": turn.retries}
    if strategy:
        status["strategy"] = strategy
    accepted = (False, entry.reason, entry.message) if refused else (True, ACCEPTED, "")
    if entry.reason == EXAMINING:
        accepted = (False, EXAMINING, entry.message)
    return _with_conditions(
        view, status, now, accepted=accepted, scheduled=(False, entry.reason, entry.message),
        running=(False, "NotRunning", ""), suspended=(entry.reason == SUSPENDED, entry.reason, ""),
    )  # fmt: skip


def accepted(view: WorkloadView, now: float) -> Status | None:
    """The status of a workload whose template the API server took in a dry run: it may queue."""
    if view.finished:
        return None
    message = "the template was accepted; in the queue for a place"
    return _with_conditions(
        view, _start(view, "Scheduling", message), now, accepted=(True, ACCEPTED, ""),
        scheduled=(False, "Queued", message), running=(False, "NotRunning", ""), suspended=(False, "NotSuspended", ""),
    )  # fmt: skip


def expected(view: WorkloadView, start: float, latest: float) -> Status | None:
    """What a waiting workload's status tells of its start, beside why it waits; None if it does not wait any more.
    `start` 0: nobody can tell.
    """
    before = condition(view, "Scheduled")
    if view.phase != "Scheduling" or before.get("status") != "False":
        return None
    why = str(view.status.get("message") or "").split(_EXPECTED)[0]
    if not start:
        told = [{**each, "message": why} if each is before else each for each in view.status.get("conditions") or ()]
        return {"message": why, "conditions": told, "expectedStartTime": None, "expectedStartLatest": None}
    clock = f"{_EXPECTED}{_clock(start)}, nine times in ten by {_clock(latest)}"
    message = why[: _MESSAGE_LIMIT - len(clock)] + clock
    conditions = view.status.get("conditions")
    told = [{**each, "message": message} if each is before else each for each in conditions or ()]
    times = {"expectedStartTime": timestamp(start), "expectedStartLatest": timestamp(latest)}
    return {"message": message, "conditions": told, **times}


def project(view: WorkloadView, step: Step, now: float) -> Status | None:
    """The status for a step of the workload's own workflow; None where nothing is to be written."""
    if view.finished:
        return None
    match step.kind:
        case "follow":
            return _followed(view, step, now)
        case "retry" | "again" | "suspend":
            return _back_to_the_queue(view, step, now)
        case "finish":
            return _finished(view, step, now)
        case "tear_down":
            return _tearing_down(view, step)
        case "withdrawn" | "queued" | "gone":
            return None


def same(view: WorkloadView, status: Mapping[str, Any]) -> bool:
    """Whether the workload's status already says all of this, so that the write can be spared."""
    return all(view.status.get(key) == value for key, value in status.items())


def shows(view: WorkloadView, reason: str) -> bool:
    """Whether the status already tells that the workload waits for this reason; messages may be stale."""
    if view.status.get("observedGeneration") != view.generation:
        return False
    outside = reason in NOT_ACCEPTED or reason == SUSPENDED
    if view.phase != ("Pending" if outside else "Scheduling"):
        return False
    return condition(view, "Scheduled").get("reason") == reason


def tells(view: WorkloadView, reason: str, message: Callable[[], str]) -> bool:
    """Whether the status need not be written to tell that: it shows the reason, and the message where that matters."""
    if not shows(view, reason):
        return False
    return reason not in _TOLD_ANEW or str(view.status.get("message") or "").split(_EXPECTED)[0] == message()


def condition(view: WorkloadView, kind: str) -> Mapping[str, Any]:
    """The condition of that type as the status shows it, or an empty mapping."""
    conditions = view.status.get("conditions")
    if isinstance(conditions, list):
        for item in conditions:
            if isinstance(item, dict) and item.get("type") == kind:
                return item
    return {}


def _followed(view: WorkloadView, step: Step, now: float) -> Status:
    running = step.phase == "Running"
    status = _start(view, step.phase, step.message) | _of_job(step)
    told = f"on {on_nodes(node for node, _ in step.places or ((step.node, 1),))}"
    if step.created is not None:
        status["lastScheduleTime"] = timestamp(step.created)
    return _with_conditions(
        view, status, now, accepted=_still_accepted(view), scheduled=(True, "JobCreated", told),
        running=(running, step.reason if step.reason != "JobCreated" else "NotRunning", step.message),
        suspended=(False, "NotSuspended", ""),
    )  # fmt: skip


def _back_to_the_queue(view: WorkloadView, step: Step, now: float) -> Status:
    status = _start(view, step.phase, step.message)
    status |= {"assignedNode": None, "attempt": step.turn.attempt, "retryCount": step.turn.retries, "startTime": None}
    if step.job_name:
        status["jobName"] = step.job_name
    if step.kind == "retry":
        status["nextRetryTime"] = timestamp(now + step.delay)
        told = view.status
        if (told.get("attempt"), told.get("retryCount")) == (step.turn.attempt, step.turn.retries) and told.get(
            "nextRetryTime"
        ):  # a later look at the same failure: the announced time stands
            status |= {"nextRetryTime": told["nextRetryTime"], "message": told.get("message") or status["message"]}
    message = status["message"]
    suspended = step.kind == "suspend"
    return _with_conditions(
        view, status, now, accepted=_still_accepted(view), scheduled=(False, step.reason, message),
        running=(False, step.reason, ""), suspended=(suspended, SUSPENDED if suspended else "NotSuspended", ""),
    )  # fmt: skip


def _finished(view: WorkloadView, step: Step, now: float) -> Status:
    ended = step.finished_at if step.finished_at is not None else now
    status = _start(view, step.phase, step.message) | _of_job(step)
    status |= {"retryCount": step.turn.retries, "attempt": step.turn.attempt, "finishTime": timestamp(ended)}
    placed = bool(step.job_name)
    return _with_conditions(
        view, status, now, accepted=_still_accepted(view),
        scheduled=(placed, "JobCreated" if placed else step.reason, "" if placed else step.message),
        running=(False, "Finished", ""), suspended=(False, "NotSuspended", ""),
        finished=(True, step.reason, step.message),
    )  # fmt: skip


def _tearing_down(view: WorkloadView, step: Step) -> Status | None:
    if step.done:
        return None  # the finalizer goes next, and the resource with it
    status = _start(view, view.phase or "Pending", step.message)
    return status | {"nextRetryTime": None}


def _of_job(step: Step) -> Status:
    """What a status says of the Job that a step is about; nothing where there was none."""
    if not step.job_name:
        return {}
    status: Status = {
        "assignedNode": step.node or None,
        "jobName": step.job_name,
        "attempt": step.turn.attempt,
        "retryCount": step.turn.retries,
        "startTime": timestamp(step.started) if step.started is not None else None,
    }
    if step.strategy:
        status["strategy"] = step.strategy
    if step.places:
        status["placedReplicas"] = pods_in(step.places)
        status["nodes"] = [{"name": node, "pods": pods} for node, pods in step.places[:SHOWN_NODES]]
    return status


def _start(view: WorkloadView, phase: str, message: str) -> Status:
    """A status with what is kept from before, and every other key cleared."""
    cut = message if len(message) <= _MESSAGE_LIMIT else message[: _MESSAGE_LIMIT - 1] + "…"
    kept = {key: view.status.get(key) for key in _KEPT}
    if kept["retryCount"] is None:
        kept["retryCount"] = 0
    return {
        "phase": phase,
        "message": cut,
        "observedGeneration": view.generation,
        **kept,
        **{key: None for key in _OF_A_GANG if key in view.status},
        "nextRetryTime": None,
        "finishTime": None,
        "expectedStartTime": None,
        "expectedStartLatest": None,
    }


def _clock(moment: float) -> str:
    return timestamp(moment)[:16].replace("T", " ") + " UTC"


Fact = tuple[bool, str, str]


def _still_accepted(view: WorkloadView) -> Fact:
    """An edit may make a spec invalid while its Job runs: the Job goes on, the condition tells."""
    return (True, ACCEPTED, "") if view.spec is not None else (False, "Invalid", view.invalid)


def _with_conditions(
    view: WorkloadView, status: Status, now: float, *, accepted: Fact, scheduled: Fact, running: Fact,
    suspended: Fact, finished: Fact = (False, "NotFinished", ""),
) -> Status:  # fmt: skip
    facts = {
        "Accepted": accepted,
        "Scheduled": scheduled,
        "Running": running,
        "Suspended": suspended if suspended[0] else (False, "NotSuspended", ""),
        "Finished": finished,
    }
    status["conditions"] = [_condition(view, kind, fact, now) for kind, fact in facts.items()]
    telling = finished if finished[0] else running if running[0] else scheduled
    status["decisions"] = _decisions(view, status, telling[1], now)
    return status


def _decisions(view: WorkloadView, status: Status, reason: str, now: float) -> list[dict[str, Any]]:
    """The last decisions, with this one unless the last was the same: a message that counts anew is no decision."""
    told = view.status.get("decisions")
    known = [each for each in told if isinstance(each, dict)] if isinstance(told, list) else []
    what = {"reason": reason, "attempt": status.get("attempt"), "node": status.get("assignedNode")}
    if known and all(known[-1].get(key) == value for key, value in what.items()):
        return known[-_DECISIONS:]
    message = str(status.get("message") or "")
    note = {key: value for key, value in what.items() if value is not None}
    note["message"] = message if len(message) <= _NOTE_LIMIT else message[: _NOTE_LIMIT - 1] + "…"
    return [*known, {"time": timestamp(now), **note}][-_DECISIONS:]


def _condition(view: WorkloadView, kind: str, fact: Fact, now: float) -> dict[str, Any]:
    holds, reason, message = fact
    value = "True" if holds else "False"
    before = condition(view, kind)
    changed = before.get("lastTransitionTime") if before.get("status") == value else None
    return {
        "type": kind,
        "status": value,
        "observedGeneration": view.generation,
        "lastTransitionTime": changed if isinstance(changed, str) and changed else timestamp(now),
        "reason": reason,
        "message": message if len(message) <= _MESSAGE_LIMIT else message[: _MESSAGE_LIMIT - 1] + "…",
    }
