"""What the status says at every step, and that it never says anything again once a workload has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from crds.gpuworkload_status import GPUWorkloadStatus
from planning import status
from planning.lifecycle import Observation, Step, next_step
from planning.model import TOMBSTONES, Turn, Verdict, Waiting, WorkloadView
from planning.times import timestamp
from tests.planning.builders import NOW, job, node, workload
from tests.planning.test_lifecycle import JOBS, NODES, TURNS, VERDICTS, WORKLOADS

WAITING = Waiting("a", "ns", "a", 1, "WaitingForCapacity", "none free")


def conditions(written: dict[str, Any] | None) -> dict[str, tuple[str, str]]:
    assert written is not None
    return {item["type"]: (item["status"], item["reason"]) for item in written["conditions"]}


def valid(written: dict[str, Any] | None) -> dict[str, Any]:
    """Checks a status against the models, as the API server does against the CRD made of them."""
    assert written is not None
    GPUWorkloadStatus.model_validate({key: value for key, value in written.items() if value is not None})
    return written


def step_of(view: WorkloadView, *jobs: Any, turn: Turn | None = None, verdict: Verdict | None = None) -> Step:
    return next_step(Observation(NOW, view, jobs, (), node("n")), turn or Turn(), verdict, 0.0)


def test_waiting() -> None:
    written = valid(status.waiting(workload("a", generation=4), WAITING, NOW, turn=Turn(2, 1), strategy="random"))
    assert (written["phase"], written["message"], written["observedGeneration"]) == ("Scheduling", "none free", 4)
    assert (written["attempt"], written["retryCount"], written["strategy"]) == (2, 1, "random")
    assert conditions(written) == {
        "Accepted": ("True", "Accepted"),
        "Scheduled": ("False", "WaitingForCapacity"),
        "Running": ("False", "NotRunning"),
        "Suspended": ("False", "NotSuspended"),
        "Finished": ("False", "NotFinished"),
    }


@pytest.mark.parametrize("reason", ["Invalid", "UnknownStrategy", "TemplateRefused"])
def test_what_is_not_accepted_is_pending(reason: str) -> None:
    written = valid(status.waiting(workload("a"), replace(WAITING, reason=reason), NOW))
    assert written["phase"] == "Pending" and conditions(written)["Accepted"] == ("False", reason)


def test_suspended() -> None:
    written = valid(status.waiting(workload("a"), replace(WAITING, reason="Suspended"), NOW))
    assert written["phase"] == "Pending" and conditions(written)["Suspended"] == ("True", "Suspended")
    assert conditions(written)["Accepted"] == ("True", "Accepted")


def test_created_then_running_then_done() -> None:
    view = workload("a")
    written = valid(status.project(view, step_of(view, job("a", "n", 1, created=NOW)), NOW))
    assert (written["phase"], written["assignedNode"], written["jobName"]) == ("Scheduled", "n", "a-a-1")
    assert written["lastScheduleTime"] == "1970-01-12T13:46:40Z" and written["attempt"] == 1
    view = replace(view, status=written)
    it = job("a", "n", 1, ready=True, started=NOW + 1, strategy="leastLoaded")
    running = valid(status.project(view, step_of(view, it), NOW + 5))
    assert running["phase"] == "Running" and conditions(running)["Running"] == ("True", "Running")
    assert running["startTime"] == "1970-01-12T13:46:41Z" and running["strategy"] == "leastLoaded"
    view = replace(view, status=running)
    done = replace(it, finished="Complete", finished_at=NOW + 9)
    ended = valid(status.project(view, step_of(view, done), NOW + 10))
    assert (ended["phase"], ended["finishTime"]) == ("Succeeded", "1970-01-12T13:46:49Z")
    assert conditions(ended)["Finished"] == ("True", "Completed") and conditions(ended)["Running"][0] == "False"


def test_transition_times_move_only_when_a_condition_flips() -> None:
    view = workload("a")
    first = valid(status.waiting(view, WAITING, NOW))
    view = replace(view, status=first)
    second = valid(status.waiting(view, replace(WAITING, reason="WaitingForPods"), NOW + 60))
    assert {c["lastTransitionTime"] for c in second["conditions"]} == {timestamp(NOW)}
    view = replace(view, status=second)
    third = valid(status.project(view, step_of(view, job("a", "n")), NOW + 90))
    times = {c["type"]: c["lastTransitionTime"] for c in third["conditions"]}
    assert times["Scheduled"] == timestamp(NOW + 90) and times["Accepted"] == timestamp(NOW)


def test_a_retry_announces_its_time_once() -> None:
    view = workload("a", status={"jobName": "a-a-0", "assignedNode": "n", "retryCount": 0, "attempt": 0})
    lost = job("a", "n", finished="Failed", reason="BackoffLimitExceeded")
    first = valid(status.project(view, step_of(view, lost), NOW))
    assert (first["phase"], first["attempt"], first["retryCount"]) == ("Pending", 1, 1)
    assert first["nextRetryTime"] == timestamp(NOW + 30) and first["assignedNode"] is None
    assert conditions(first)["Scheduled"] == ("False", "JobFailed") and first["jobName"] == "a-a-0"
    view = replace(view, status=first)
    again = status.project(
        view, next_step(Observation(NOW + 9, view, (lost,), (), node("n")), Turn(), None, 0.9), NOW + 9
    )
    assert status.same(view, valid(again)), "a second look at the same failure writes nothing new"


def test_keys_that_no_longer_hold_are_removed() -> None:
    view = workload("a", status={"nextRetryTime": "x", "finishTime": "y", "assignedNode": "n"})
    written = valid(status.waiting(view, WAITING, NOW))
    assert written["nextRetryTime"] is None and written["finishTime"] is None and written["assignedNode"] is None


def test_same_and_shows() -> None:
    view = workload("a")
    written = valid(status.waiting(view, WAITING, NOW))
    view = replace(view, status=written)
    assert status.same(view, valid(status.waiting(view, WAITING, NOW + 99)))
    assert status.shows(view, "WaitingForCapacity") and not status.shows(view, "WaitingForPods")
    assert not status.shows(replace(view, generation=2), "WaitingForCapacity")


def test_messages_are_cut() -> None:
    written = valid(status.waiting(workload("a"), replace(WAITING, message="x" * 100_000), NOW))
    assert len(written["message"]) == 4096


@given(WORKLOADS, JOBS, TURNS, NODES, VERDICTS)
def test_every_step_projects_to_a_valid_status_and_tombstones_to_none(
    view: WorkloadView, it: Any, turn: Turn, where: Any, verdict: Verdict | None
) -> None:
    step = next_step(Observation(NOW, view, (it,), (), where), turn, verdict, 0.5)
    written = status.project(view, step, NOW)
    if view.finished:
        assert written is None and status.waiting(view, WAITING, NOW) is None
        assert status.accepted(view, NOW) is None
    elif written is not None:
        valid(written)
        assert (written["phase"] in TOMBSTONES) == (step.kind == "finish")


def test_the_last_ten_decisions_are_kept_and_a_recount_is_none() -> None:
    view = workload("w")
    for i in range(12):
        entry = Waiting("w", "ns", "w", 1, f"Reason{i}", "n" * 300)
        written = status.waiting(view, entry, NOW + i)
        assert written is not None
        view = replace(view, status=written)
    assert [each["reason"] for each in view.status["decisions"]] == [f"Reason{i}" for i in range(2, 12)]
    assert view.status["decisions"][-1]["time"] == timestamp(NOW + 11)
    assert all(len(each["message"]) == 256 for each in view.status["decisions"])
    again = status.waiting(view, Waiting("w", "ns", "w", 1, "Reason11", "other words"), NOW + 99)
    assert again is not None and again["decisions"] == view.status["decisions"]


@pytest.mark.parametrize("told", ["text", [1, None], [{"reason": 5}], {"a": 1}])
def test_what_others_wrote_into_decisions_harms_nobody(told: Any) -> None:
    view = replace(workload("w"), status={"decisions": told})
    written = status.waiting(view, Waiting("w", "ns", "w", 1, "WaitingForCapacity", "m"), NOW)
    assert written is not None and written["decisions"][-1]["reason"] == "WaitingForCapacity"


def test_a_recommendation_stays_until_another_is_written() -> None:
    told = {"gpuCount": 1, "confidence": 0.5, "reason": "seen"}
    view = workload("a", status={"phase": "Scheduled", "recommendation": told})
    running = valid(status.project(view, step_of(view, job("a", "n", ready=True)), NOW))
    assert (running["phase"], running["recommendation"]) == ("Running", told)
