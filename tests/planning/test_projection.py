"""Whose status lags behind a running Job, and that showing it once is enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.model import JobView, WorkloadView
from planning.projection import Lag, lagging
from tests.planning.builders import NOW, job, node, pod, workload
from tests.planning.test_lifecycle import JOBS, NODES, WORKLOADS

RUNNING = job("a", "n", ready=True, started=NOW - 5)


def lags(view: WorkloadView, *jobs: JobView, **more: Any) -> list[Lag]:
    return lagging(NOW, [view], jobs, more.get("pods", ()), more.get("nodes", [node("n")]))


def shown(view: WorkloadView, *jobs: JobView) -> WorkloadView:
    (lag,) = lags(view, *jobs)
    return replace(view, status={key: value for key, value in lag.status.items() if value is not None})


def test_a_new_job_is_shown_and_then_that_it_runs() -> None:
    created = shown(workload("a"), job("a", "n"))
    assert (created.status["phase"], created.status["assignedNode"]) == ("Scheduled", "n")
    running = shown(created, RUNNING)
    assert running.status["phase"] == "Running"
    assert lags(running, RUNNING) == []


def test_a_job_that_goes_on_in_a_later_turn_is_shown_though_nobody_told_that_it_was_stopped() -> None:
    running = shown(workload("a"), RUNNING)
    again = replace(RUNNING, attempt=1, node="m", created=NOW + 60)
    nodes = [node("n"), node("m")]
    (lag,) = lags(running, again, nodes=nodes)
    assert (lag.status["attempt"], lag.status["assignedNode"]) == (1, "m")
    waiting = replace(again, ready=False, resumed=True)
    (lag,) = lags(replace(running, status={**running.status, "phase": "Scheduling"}), waiting, nodes=nodes)
    assert lag.status["message"] == f"Job {again.name} was resumed on node m"


def test_a_job_of_a_spec_that_was_edited_is_not_shown_as_the_edited_one() -> None:
    view = workload("a", spec={"image": "y"}, generation=2)
    assert lags(view, RUNNING) != []
    assert lags(view, replace(RUNNING, spec_hash="another")) == []


def test_a_job_that_runs_already_is_told_in_one_write() -> None:
    assert shown(workload("a"), RUNNING).status["phase"] == "Running"


def test_a_pod_may_run_before_its_job_counts_it_ready() -> None:
    waiting = job("a", "n")
    (lag,) = lags(workload("a"), waiting, pods=[pod("p", "n", of=waiting, running=True)])
    assert lag.status["phase"] == "Running"


def test_what_ran_is_not_shown_as_scheduled_again_while_its_pod_ends() -> None:
    running = shown(workload("a"), RUNNING)
    ending = replace(RUNNING, ready=False)
    assert lags(running, ending) == [], "the pod has ended and the Job does not count it yet"
    assert lags(running, ending, pods=[pod("p", "n", of=ending, running=True, terminating=True)]) == []
    assert lags(running, ending, nodes=[node("n", ready=False)]) == [], "its own workflow tells that, with an Event"


def test_a_deadline_that_a_policy_set_hides_nothing() -> None:
    (lag,) = lags(workload("a"), replace(RUNNING, active_deadline=60))
    assert lag.status["phase"] == "Running"


def test_a_node_that_cannot_be_relied_on_is_named() -> None:
    (lag,) = lags(workload("a"), RUNNING, nodes=[node("n", ready=False)])
    assert "has not been ready" in lag.status["message"]


@pytest.mark.parametrize(
    ("view", "jobs"),
    [
        pytest.param(workload("a"), (), id="no Job"),
        pytest.param(workload("a"), (replace(RUNNING, finished="Complete"),), id="ended"),
        pytest.param(workload("a"), (replace(RUNNING, finished="Failed"),), id="failed"),
        pytest.param(workload("a"), (replace(RUNNING, deleting=True),), id="taken away"),
        pytest.param(workload("a"), (RUNNING, job("a", "n", 1)), id="two turns"),
        pytest.param(workload("a", deleting=True), (RUNNING,), id="being deleted"),
        pytest.param(workload("a", status={"phase": "Succeeded"}), (RUNNING,), id="a tombstone"),
        pytest.param(workload("a", spec={"suspend": True}), (RUNNING,), id="being suspended"),
        pytest.param(
            workload("a", spec={"activeDeadlineSeconds": 9}, generation=2), (RUNNING,), id="an edited deadline"
        ),
        pytest.param(
            workload("a", status={"phase": "Pending", "attempt": 1}), (RUNNING,), id="told that this turn is over"
        ),
        pytest.param(workload("a"), (replace(RUNNING, namespace="other"),), id="another namespace's Job"),
    ],
)
def test_what_needs_a_decision_is_left_to_its_own_workflow(view: WorkloadView, jobs: tuple[JobView, ...]) -> None:
    assert lags(view, *jobs) == []


@given(WORKLOADS, st.lists(JOBS, max_size=2), NODES)
def test_once_shown_nothing_lags(view: WorkloadView, jobs: list[JobView], where: Any) -> None:
    nodes = [where] if where is not None else []
    for lag in lags(view, *jobs, nodes=nodes):
        assert lag.status["phase"] in ("Scheduled", "Running")
        told = replace(view, status={key: value for key, value in lag.status.items() if value is not None})
        assert lags(told, *jobs, nodes=nodes) == []
