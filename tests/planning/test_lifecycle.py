"""A workload's life: every state of its Job has one next step, failures are counted once, and it always ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.lifecycle import FailureDetail, JobRef, Observation, Step, next_step
from planning.model import TOMBSTONES, JobView, Turn, Verdict, WorkloadView
from planning.naming import spec_hash
from planning.status import project
from tests.planning.builders import NOW, job, node, pod, taint, workload

HERE = node("n")


def look(
    view: WorkloadView | None, *jobs: JobView, turn: Turn | None = None, verdict: Verdict | None = None, **seen: Any
) -> Step:
    seen.setdefault("node", HERE)
    return next_step(Observation(NOW, view, jobs, **seen), turn or Turn(), verdict, 0.0)


def failed(reason: str = "BackoffLimitExceeded", attempt: int = 0, retries: int = 0) -> JobView:
    return job("a", "n", attempt, retries=retries, finished="Failed", reason=reason, finished_at=NOW - 1, counted=True)


def refs(*jobs: JobView) -> tuple[JobRef, ...]:
    return tuple(JobRef(it.name, it.uid) for it in jobs)


def test_a_job_on_its_way_is_followed() -> None:
    it = job("a", "n")
    step = look(workload("a"), it)
    assert (step.kind, step.phase, step.message) == ("follow", "Scheduled", "Job a-a-0 was created on node n")
    step = look(workload("a"), replace(it, ready=True))
    assert (step.kind, step.phase, step.message) == ("follow", "Running", "running on node n")
    step = look(workload("a"), it, pods=(pod("p", of=it, blocked="0/3 nodes are available"),))
    assert step.message == "Job a-a-0 waits for its place on node n: 0/3 nodes are available"


def test_a_node_that_is_merely_not_ready_is_waited_for() -> None:
    it = job("a", "n", ready=True)
    step = look(workload("a"), it, node=node("n", ready=False, not_ready_since=60.0))
    assert step.kind == "follow" and step.phase == "Running"
    assert step.message == "node n has not been ready since 1970-01-01T00:01:00Z; waiting for it"


def test_a_node_that_is_gone_is_told_until_its_job_ends() -> None:
    it = job("a", "n")
    step = look(workload("a"), it, node=None, pods=(pod("p", "n", of=it),))
    assert (step.kind, step.message) == ("follow", "node n is gone; its pods are not removed yet")
    out = node("n", taints=(taint("node.kubernetes.io/out-of-service"),))
    assert look(workload("a"), it, node=out).message == "node n is out of service; its pods are not removed yet"


def test_success_is_final() -> None:
    it = job("a", "n", 2, retries=1, finished="Complete", started=NOW - 90, finished_at=NOW - 30)
    step = look(workload("a"), it)
    assert (step.kind, step.phase, step.message) == ("finish", "Succeeded", "Job a-a-2 completed on node n in 60 s")
    assert step.turn == Turn(2, 1) and step.delete == ()


def test_an_end_leaves_the_job_that_ended_last_whose_logs_somebody_will_want() -> None:
    last, other = job("a", "n", 2, finished="Complete", finished_at=NOW), failed(attempt=1)
    going = job("a", "n", 3, deleting=True, finished="Failed")
    assert look(workload("a"), other, last).delete == refs(other)
    assert look(workload("a", status={"phase": "Failed"}), other, going).delete == refs(going)
    assert look(workload("a", status={"phase": "Failed"}), job("a", "n")).delete == refs(job("a", "n"))


def test_a_failure_costs_a_retry_and_tells_the_containers_last_words() -> None:
    detail = FailureDetail(137, "OOMKilled", "out of memory\n")
    step = look(workload("a"), failed(retries=1, attempt=4), failure=detail)
    assert (step.kind, step.turn, step.delay, step.failure) == ("retry", Turn(5, 2), 60.0, "job_failed")
    assert step.message == (
        "Job a-a-4 failed on node n: exit code 137 (OOMKilled): out of memory; retry 2 of 3 in 60 s"
    )


def test_the_last_failure_ends_it_and_names_the_cause() -> None:
    step = look(workload("a"), failed(retries=3, attempt=7), failure=FailureDetail(1, "Error", "boom"))
    assert (step.kind, step.phase, step.reason) == ("finish", "Failed", "MaxRetriesExceeded")
    assert step.message == "all 3 retries are used; the last cause: Job a-a-7 failed on node n: exit code 1: boom"
    assert step.turn == Turn(7, 3) and step.failure == "job_failed"
    once = look(workload("a", spec={"retryPolicy": {"maxRetries": 1}}), failed(retries=1))
    assert once.message.startswith("the only retry is used; the last cause: ")


def test_the_deadline_is_not_retried() -> None:
    it = replace(failed("DeadlineExceeded"), active_deadline=60)
    step = look(workload("a"), it)
    assert (step.kind, step.phase, step.reason, step.failure) == (
        "finish", "Failed", "DeadlineExceeded", "deadline_exceeded",
    )  # fmt: skip
    assert step.message == "Job a-a-0 ran beyond its activeDeadlineSeconds of 60 s on node n; this is not retried"


def test_an_eviction_costs_no_retry() -> None:
    step = look(workload("a"), failed("PodFailurePolicy", attempt=1, retries=3))
    assert (step.kind, step.turn, step.delay, step.failure) == ("again", Turn(2, 3), 0.0, "")


@pytest.mark.parametrize("lost", [None, node("n", taints=(taint("node.kubernetes.io/out-of-service", "NoExecute"),))])
def test_a_lost_node_costs_a_retry(lost: Any) -> None:
    step = look(workload("a"), failed("PodFailurePolicy", attempt=1, retries=0), node=lost)
    assert (step.kind, step.turn, step.reason, step.failure) == ("retry", Turn(2, 1), "NodeLost", "node_lost")


def test_suspension_takes_the_job_back_without_a_retry() -> None:
    it = job("a", "n", 1, retries=1)
    step = look(workload("a", spec={"suspend": True}), it)
    assert (step.kind, step.phase, step.turn, step.delete) == ("suspend", "Pending", Turn(2, 1), refs(it))
    done = replace(it, finished="Complete")
    assert look(workload("a", spec={"suspend": True}), done).kind == "finish"


def test_a_suspended_job_is_handed_back_once_however_long_its_end_stays_unseen() -> None:
    it = job("a", "n", 1, retries=1)
    step = look(workload("a", spec={"suspend": True}), it, turn=Turn(2, 1))
    assert (step.kind, step.turn, step.delete) == ("queued", Turn(2, 1), refs(it))


def made_from(view: WorkloadView, attempt: int = 0, **changes: Any) -> JobView:
    assert view.spec is not None
    return job(view.uid, "n", attempt, spec_hash=spec_hash(view.spec), **changes)


def test_a_job_of_a_spec_that_was_edited_is_taken_back_without_a_retry() -> None:
    before, now = workload("a", spec={"image": "x"}), workload("a", spec={"image": "y"}, generation=2)
    it = made_from(before, 1, retries=1, ready=True)
    step = look(now, it)
    assert (step.kind, step.phase, step.reason, step.turn, step.delete) == (
        "again", "Scheduling", "SpecEdited", Turn(2, 1), refs(it),
    )  # fmt: skip
    assert step.message == (
        "the spec was edited after Job a-a-1 had been made from it; the Job is taken back from node n "
        "and the workload is placed anew with the spec as it is now"
    )
    assert look(before, it).kind == "follow"
    assert look(now, replace(it, spec_hash="")).kind == "follow", "made by an older build"
    assert look(now, replace(it, finished="Complete")).phase == "Succeeded"
    assert look(replace(now, spec=None, invalid="x"), it).kind == "follow"
    handed_back = look(now, it, turn=Turn(2, 1))
    assert (handed_back.kind, handed_back.turn) == ("queued", Turn(2, 1)), "once, however long its end stays unseen"


def test_what_may_change_while_there_is_a_job_takes_none_back() -> None:
    it = made_from(workload("a", spec={"image": "x"}))
    mutable = {"image": "x", "priority": "high", "activeDeadlineSeconds": 9}
    assert look(workload("a", spec=mutable, generation=2), it).kind == "follow"
    assert look(workload("a", spec={**mutable, "suspend": True}, generation=2), it).kind == "suspend"


def test_a_job_deleted_by_hand_sends_the_workload_back_without_a_retry() -> None:
    step = look(workload("a"), job("a", "n", 3, retries=2, deleting=True))
    assert (step.kind, step.turn, step.reason) == ("again", Turn(4, 2), "JobDeleted")


def test_a_withdrawn_job_sends_the_workload_back_and_the_ledger_tells_why() -> None:
    it = job("a", "n", 3, retries=2, withdrawn=True, deleting=True)
    for newest in (it, replace(failed(attempt=3, retries=2), withdrawn=True, deleting=True)):
        step = look(workload("a"), newest)
        assert (step.kind, step.turn, step.delay, step.failure) == ("withdrawn", Turn(4, 2), 0.0, "")
        assert step.delete == refs(newest) and project(workload("a"), step, NOW) is None
    assert look(workload("a"), replace(it, deleting=False)).kind == "follow", "it may still find its place"


def test_a_verdict_costs_a_retry_with_its_reason() -> None:
    verdict = Verdict("a", "ns", "a", Turn(1, 1), "NoSuitableNode", "no node has 8 GPUs; the largest has 4")
    step = look(workload("a", 8), turn=Turn(1, 1), verdict=verdict, node=None)
    assert (step.kind, step.turn, step.delay, step.failure) == ("retry", Turn(2, 2), 60.0, "no_suitable_node")
    assert step.message == "no node has 8 GPUs; the largest has 4; retry 2 of 3 in 60 s"
    last = replace(verdict, turn=Turn(3, 3), reason="JobRefused")
    step = look(workload("a", 8), turn=Turn(3, 3), verdict=last, node=None)
    assert (step.kind, step.reason, step.failure) == ("finish", "MaxRetriesExceeded", "job_creation_failed")


def test_a_verdict_is_void_once_its_turn_has_passed() -> None:
    verdict = Verdict("a", "ns", "a", Turn(1, 1), "NoSuitableNode", "x")
    step = look(workload("a"), turn=Turn(2, 2), verdict=verdict)
    assert (step.kind, step.turn, step.failure) == ("again", Turn(2, 2), ""), "the ledger is told the turn it forgot"
    assert look(workload("a"), job("a", "n", 1), turn=Turn(1, 1), verdict=verdict).kind == "follow"
    assert look(workload("a"), job("a", "n", 2), turn=Turn(1, 1), verdict=verdict).kind == "follow"


def test_without_a_job_it_is_the_ledgers_turn() -> None:
    assert look(workload("a"), turn=Turn(1, 1), node=None).kind == "queued"


def test_a_job_that_was_taken_back_and_so_failed_costs_no_retry() -> None:
    step = look(workload("a"), replace(failed(), deleting=True))
    assert (step.kind, step.reason, step.failure) == ("again", "JobDeleted", "")


def test_a_job_made_by_a_ledger_that_lost_count_is_followed_and_its_failure_counts_on() -> None:
    lost_count = job("a", "n", 0)
    assert look(workload("a"), lost_count, turn=Turn(2, 2)).kind == "follow"
    suspended = look(workload("a", spec={"suspend": True}), lost_count, turn=Turn(2, 2))
    assert suspended.turn == Turn(2, 2), "no turn ever goes back"
    finished = look(workload("a"), replace(lost_count, finished="Complete"), turn=Turn(2, 2))
    assert finished.phase == "Succeeded"


def test_a_failure_that_was_handed_back_is_not_counted_again() -> None:
    step = look(workload("a"), failed(attempt=1, retries=1), turn=Turn(2, 2))
    assert step.kind == "queued" and step.turn == Turn(2, 2) and step.failure == ""


def test_a_repeated_look_at_a_failure_gives_the_same_turn() -> None:
    first, second = look(workload("a"), failed(retries=1)), look(workload("a"), failed(retries=1))
    assert first == second and first.turn == Turn(1, 2)


def test_older_jobs_are_removed() -> None:
    old, new = job("a", "n", 0), job("a", "n", 1)
    step = look(workload("a"), old, new)
    assert step.kind == "follow" and step.delete == refs(old) and step.turn == Turn(1, 0)


def test_deletion_waits_for_jobs_and_pods_and_then_lets_go() -> None:
    it = job("a", "n")
    gone = workload("a", deleting=True)
    step = look(gone, it, pods=(pod("p", "n", of=it),))
    assert (step.kind, step.done, step.delete) == ("tear_down", False, refs(it))
    assert step.message == "deleting: waiting for Job a-a-0 and 1 pod(s) on n to go"
    assert not look(gone, pods=(pod("p", "n", of=it),)).done
    assert look(gone, node=None).done
    assert (look(None, it).kind, look(None, it).delete, look(None, it).done) == ("gone", refs(it), False)


def test_a_tombstone_only_removes_what_it_left() -> None:
    it = job("a", "n", 5)
    step = look(workload("a", status={"phase": "Failed", "message": "m"}, deleting=True), it)
    assert (step.kind, step.phase, step.message, step.delete) == ("finish", "Failed", "m", refs(it))


def test_the_deadline_is_patched_when_the_spec_differs() -> None:
    view = workload("a", spec={"activeDeadlineSeconds": 9})
    step = look(view, job("a", "n"))
    assert step.patch_deadline and step.deadline == 9
    assert not look(view, job("a", "n", active_deadline=9)).patch_deadline
    step = look(workload("a"), job("a", "n", active_deadline=9))
    assert step.patch_deadline and step.deadline is None


def test_an_edit_that_makes_the_spec_invalid_leaves_the_job_alone() -> None:
    step = look(workload("a", 99), job("a", "n", active_deadline=7))
    assert step.kind == "follow" and not step.patch_deadline and "not valid any more" in step.message
    assert look(workload("a", 99), failed()).kind == "retry"


JOBS = st.builds(
    lambda attempt, retries, finished, reason, ready, deleting, withdrawn: job(
        "a", "n", attempt, retries=retries, finished=finished, reason=reason, ready=ready, deleting=deleting,
        withdrawn=withdrawn,
    ),
    st.integers(0, 9), st.integers(0, 12), st.sampled_from(["", "Complete", "Failed"]),
    st.sampled_from(["", "DeadlineExceeded", "PodFailurePolicy", "BackoffLimitExceeded", "Strange"]),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
WORKLOADS = st.builds(
    lambda spec, deleting, phase: workload("a", spec=spec, deleting=deleting, status={"phase": phase}),
    st.sampled_from([{}, {"suspend": True}, {"retryPolicy": {"maxRetries": 1}}, {"gpuCount": 99}]),
    st.booleans(),
    st.sampled_from(["", "Pending", "Running", *TOMBSTONES]),
)
TURNS = st.builds(Turn, st.integers(0, 9), st.integers(0, 12))
NODES = st.sampled_from(
    [None, HERE, node("n", ready=False), node("n", taints=(taint("node.kubernetes.io/out-of-service"),))]
)
VERDICTS = st.none() | TURNS.map(lambda turn: Verdict("a", "ns", "a", turn, "NoSuitableNode", "m"))


@given(st.none() | WORKLOADS, st.lists(JOBS, max_size=3), TURNS, NODES, VERDICTS, st.floats(0, 0.999))
def test_every_state_has_a_step_that_keeps_the_rules(
    view: WorkloadView | None, jobs: list[JobView], turn: Turn, where: Any, verdict: Verdict | None, jitter: float
) -> None:
    step = next_step(Observation(NOW, view, tuple(jobs), (), where), turn, verdict, jitter)
    limit = view.spec.retry_policy.max_retries if view and view.spec else 3
    all_jobs = {it.uid for it in jobs}
    if step.kind == "retry":
        assert 1 <= step.turn.retries <= limit and 0 < step.delay <= 300 and step.failure
        assert step.turn.attempt > max((it.attempt for it in jobs), default=-1)
    if step.kind in ("retry", "again", "withdrawn", "suspend", "gone", "tear_down"):
        assert {ref.uid for ref in step.delete} == all_jobs, "nothing may be left behind"
    if step.kind == "finish":
        stays = all_jobs - {ref.uid for ref in step.delete}
        assert len(stays) <= 1 and all(it.finished for it in jobs if it.uid in stays), "only what has ended may stay"
    if step.kind in ("again", "withdrawn"):
        assert step.failure == "" and step.delay == 0
    if step.kind == "finish":
        assert step.phase in TOMBSTONES
    if step.kind == "follow":
        newest = max(jobs, key=lambda it: it.attempt)
        assert not newest.finished, "a finished Job is never merely followed"
        assert newest.attempt >= turn.attempt or not newest.deleting
    if step.kind == "tear_down":
        assert step.done == (not jobs)
    if view is not None and view.finished:
        assert step.kind == "finish" and step.phase == view.phase, "a tombstone is never undone"


@given(st.lists(st.sampled_from(["fail", "lose", "evict", "verdict"]), max_size=40), st.integers(1, 10))
def test_failures_end_after_max_retries_and_evictions_never_do(story: list[str], limit: int) -> None:
    view = workload("a", spec={"retryPolicy": {"maxRetries": limit, "backoffSeconds": 1}})
    turn, counted = Turn(), 0
    for event in story:
        if event == "verdict":
            step = look(view, turn=turn, verdict=Verdict("a", "ns", "a", turn, "NoSuitableNode", "m"), node=None)
        else:
            it = failed("BackoffLimitExceeded" if event == "fail" else "PodFailurePolicy", turn.attempt, turn.retries)
            step = look(view, it, turn=turn, node=None if event == "lose" else HERE)
        counted += event != "evict"
        if counted > limit:
            assert (step.kind, step.phase) == ("finish", "Failed")
            return
        assert step.turn == Turn(turn.attempt + 1, counted) and step.kind == ("again" if event == "evict" else "retry")
        turn = step.turn


def test_a_job_that_makes_way_is_left_to_the_ledger_unless_it_ended_or_is_not_wanted() -> None:
    stopped = job("a", "n", preempted=True)
    left = next_step(Observation(NOW, workload("a"), (stopped,)), Turn(), None, 0.0)
    assert (left.kind, left.reason, left.delete) == ("queued", "Preempted", ())
    done = next_step(Observation(NOW, workload("a"), (replace(stopped, finished="Complete"),)), Turn(), None, 0.0)
    assert (done.kind, done.phase) == ("finish", "Succeeded")
    for unwanted in (workload("a", deleting=True), workload("a", spec={"suspend": True})):
        assert next_step(Observation(NOW, unwanted, (stopped,)), Turn(), None, 0.0).delete
    told = next_step(Observation(NOW, workload("a", spec={"suspend": True}), (stopped,)), Turn(), None, 0.0).message
    assert told == f"suspended; Job {stopped.name} is taken back", "it holds nothing on its node"
    going = next_step(Observation(NOW, workload("a"), (replace(stopped, deleting=True),)), Turn(), None, 0.0)
    assert (going.kind, going.turn) == ("withdrawn", Turn(1)), "the ledger replaces it, and told why it was stopped"
