"""Whose end the ledger tells: only where nothing is left to decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning import endings
from planning.lifecycle import Observation, next_step
from planning.model import Completion, JobView, Turn, WorkloadView
from tests.planning.builders import NOW, job, node, round_of, snapshot, workload

DONE = job("a", "n", finished="Complete", started=NOW - 9, finished_at=NOW - 1)


def ended(view: WorkloadView, *jobs: JobView, **more: Any) -> list[str]:
    return [each.uid for each in round_of(snapshot([node("n")], [view], jobs=jobs, **more)).completions]


def test_a_first_job_that_completed_ends_its_workload() -> None:
    decision = round_of(snapshot([node("n")], [workload("a"), workload("b")], jobs=[DONE, job("b", "n")]))
    assert decision.completions == [Completion("a", "ns", "a", DONE.name)]
    assert not decision.more


@pytest.mark.parametrize(
    ("view", "jobs"),
    [
        pytest.param(workload("a"), (replace(DONE, finished="Failed"),), id="it failed"),
        pytest.param(workload("a"), (replace(DONE, finished=""),), id="it goes on"),
        pytest.param(workload("a"), (replace(DONE, deleting=True),), id="it is taken away"),
        pytest.param(workload("a"), (replace(DONE, attempt=1),), id="a later turn, which its workflow waits for"),
        pytest.param(workload("a"), (DONE, job("a", "n", 1)), id="another Job beside it"),
        pytest.param(workload("a", generation=2), (DONE,), id="edited, which its workflow was told"),
        pytest.param(workload("a", deleting=True), (DONE,), id="torn down"),
        pytest.param(workload("a", status={"phase": "Failed"}), (DONE,), id="a tombstone"),
        pytest.param(workload("a"), (replace(DONE, namespace="other"),), id="another namespace's Job"),
    ],
)
def test_all_else_is_for_the_workloads_own_workflow(view: WorkloadView, jobs: tuple[JobView, ...]) -> None:
    assert ended(view, *jobs) == []


def test_an_end_is_the_one_that_the_workloads_own_workflow_would_come_to() -> None:
    step = next_step(Observation(NOW, workload("a"), (DONE,)), Turn(), None, 0.0)
    assert (step.kind, step.phase, step.delete) == ("finish", "Succeeded", ())


def test_of_many_ends_the_rest_is_for_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_ENDINGS", 2)
    views = [workload(uid) for uid in "abc"]
    jobs = [replace(job(uid, "n"), finished="Complete") for uid in "abc"]
    seen = snapshot([node("n")], views, jobs=jobs)
    found = {frozenset(each.uid for each in round_of(seen, seed=seed).completions) for seed in range(40)}
    assert found == {frozenset("ab"), frozenset("ac"), frozenset("bc")}, "none keeps another out for ever"
    assert not round_of(seen).more, "whoever wrote them looks again"
