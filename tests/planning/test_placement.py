"""Rounds of placement: who goes where, who waits and why, and what the ledger is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning import status
from planning.accelerators import AMD, SEAT
from planning.ledger import after_carrying_out, after_deciding
from planning.model import Avoided, Ledger, Resources, Turn, WorkloadView
from planning.strategies import installed
from tests.planning.builders import GIB, NOW, job, node, placed, pod, promise, round_of, snapshot, taint, workload

TEMPLATE = {"template": {"spec": {"containers": [{"name": "a", "image": "b"}]}}}


def told(view: WorkloadView, reason: str, phase: str = "Scheduling") -> WorkloadView:
    """The workload as it looks once its status tells of `reason`."""
    conditions = [{"type": "Scheduled", "status": "False", "reason": reason}]
    return replace(view, status={"phase": phase, "observedGeneration": view.generation, "conditions": conditions})


def test_priority_then_age_then_name() -> None:
    queue = [
        workload("young", created=NOW - 1),
        workload("old", created=NOW - 9),
        workload("low", spec={"priority": "low"}, created=NOW - 99),
        workload("high", spec={"priority": "high"}),
        workload("highest", spec={"priority": 101}),
        workload("b-same", created=NOW - 5),
        workload("a-same", created=NOW - 5),
    ]
    decision = round_of(snapshot([node("n", 7)], queue))
    assert [a.uid for a in decision.assignments] == ["highest", "high", "old", "a-same", "b-same", "young", "low"]


def test_what_does_not_fit_is_skipped_and_waits() -> None:
    decision = round_of(snapshot([node("m", 1), node("n", 4)], [workload("a", 3), workload("b", 2), workload("c", 1)]))
    assert placed(decision) == {"a": "n", "c": "m"}
    assert [(w.uid, w.reason) for w in decision.waiting] == [("b", "WaitingForCapacity")]
    assert "none has 2 free now" in decision.waiting[0].message and decision.queued == 1 and not decision.more


def test_who_waits_already_and_is_told_so_costs_no_write() -> None:
    view = told(workload("a", 8), "WaitingForCapacity")
    seen = snapshot([node("n")], [view], pods=[pod("p", "n", gpus=1)])
    assert round_of(seen).waiting == [] and round_of(seen).queued == 1
    edited = replace(view, generation=2)
    assert len(round_of(snapshot([node("n")], [edited], pods=[pod("p", "n", gpus=1)])).waiting) == 1


def test_a_status_that_was_written_is_what_the_next_round_expects() -> None:
    for view, reason in [
        (workload("a", 8), "WaitingForCapacity"),
        (workload("a", spec={"suspend": True}), "Suspended"),
        (workload("a", 9), "Invalid"),
        (workload("a", spec={"schedulingStrategy": "nope"}), "UnknownStrategy"),
    ]:
        seen = snapshot([node("n")], [view], pods=[pod("p", "n", gpus=1)])
        entry = round_of(seen).waiting[0]
        assert entry.reason == reason
        written = status.waiting(view, entry, NOW)
        assert written is not None
        after = replace(view, status=written)
        assert round_of(snapshot([node("n")], [after], pods=[pod("p", "n", gpus=1)])).waiting == []


def test_the_limit_cuts_a_round_and_says_so() -> None:
    queue = [workload(f"w{i}") for i in range(5)]
    decision = round_of(snapshot([node("n")], queue), limit=2)
    assert len(decision.assignments) == 2 and decision.more and decision.queued == 3
    exact = round_of(snapshot([node("n")], queue), limit=5)
    assert not exact.more and exact.queued == 0


def test_no_decision_is_too_large_for_a_history() -> None:
    queue = [workload(f"w{i:05}", spec={"x" * 200: 1}) for i in range(5000)]
    decision = round_of(snapshot([node("n")], queue))
    assert decision.more and 0 < sum(len(w.message) + 300 for w in decision.waiting) < 700_000


@pytest.mark.parametrize(
    "changes", [{"deleting": True}, {"status": {"phase": "Succeeded"}}, {"status": {"phase": "Failed"}}]
)
def test_who_is_going_or_gone_gets_nothing(changes: dict[str, Any]) -> None:
    decision = round_of(snapshot([node("n")], [workload("a", **changes)]))
    assert not decision.assignments and not decision.waiting and decision.queued == 0


@pytest.mark.parametrize("ledger", [Ledger(in_flight={"a": promise("a", "n")}), Ledger(held={"a": Turn()})])
def test_who_is_promised_or_held_is_not_placed_again(ledger: Ledger) -> None:
    decision = round_of(snapshot([node("n")], [workload("a")]), ledger)
    assert not decision.assignments and not decision.waiting


def test_who_has_a_job_is_followed_by_its_own_workflow() -> None:
    seen = snapshot([node("n")], [workload("a")], jobs=[job("a", "n", finished="Failed")])
    assert round_of(seen) == replace(round_of(seen), assignments=[], waiting=[], queued=0)


def test_the_next_job_follows_only_when_the_old_ones_pods_are_gone() -> None:
    old = job("a", "n", 0, finished="Failed")
    ledger = Ledger(turns={"a": Turn(1, 1)})
    still_a_job = snapshot([node("n")], [workload("a")], jobs=[old])
    only_its_pod = snapshot([node("n")], [workload("a")], pods=[pod("p", "n", of=old, terminating=True)])
    for seen in (still_a_job, only_its_pod):
        decision = round_of(seen, ledger)
        assert [w.reason for w in decision.waiting] == ["WaitingForPods"] and decision.queued == 1
        assert decision.seen == []
    decision = round_of(snapshot([node("n")], [workload("a")]), ledger)
    assert decision.assignments[0].turn == Turn(1, 1) and decision.assignments[0].job_name == "a-a-1"


def test_pods_of_another_namespace_cannot_pose_as_ones_own() -> None:
    stranger = pod("p", "n", of=job("a", "n"), namespace="other")
    assert placed(round_of(snapshot([node("n")], [workload("a")], pods=[stranger]))) == {"a": "n"}


def test_a_request_that_no_node_could_hold_is_a_verdict() -> None:
    decision = round_of(snapshot([node("n", 4)], [workload("a", 8, generation=3)]), Ledger(turns={"a": Turn(2, 1)}))
    verdict = decision.verdicts[0]
    assert (verdict.uid, verdict.turn, verdict.reason) == ("a", Turn(2, 1), "NoSuitableNode")
    assert verdict.message == "no node has 8 GPUs; the largest has 4" and verdict.generation == 3
    assert decision.queued == 0 and not decision.waiting


def test_a_part_of_a_gpu_goes_where_seats_are_and_is_a_verdict_where_none_are() -> None:
    part = workload("a", spec={"gpuFraction": 0.5})
    (verdict,) = round_of(snapshot([node("n")], [part])).verdicts
    assert verdict.reason == "NoSuitableNode" and "berth gives parts of GPUs only as seats" in verdict.message
    seated = node("s", allocatable=Resources(2, 64_000, 256 * GIB, 110, gpu_resource=SEAT))
    queue = [replace(part, uid=uid, name=uid) for uid in "abc"]
    decision = round_of(snapshot([node("n"), seated], queue))
    assert placed(decision) == {"a": "s", "b": "s"} and not decision.verdicts
    assert decision.waiting[0].message == f"needs 1 {SEAT} on one node; 1 of 2 nodes has 1, none has 1 free now"


def test_vendors_share_a_node_without_taking_each_others_gpus() -> None:
    both = node("n", allocatable=Resources.counting([("", 2), (AMD, 2)], 64_000, 256 * GIB, 110))
    queue = [workload(f"w{i}", spec={"gpuResource": AMD} if i % 2 else {}) for i in range(6)]
    stranger = pod("p", "n", requests=Resources(1, pods=1, other_gpus=((AMD, 1),)))
    decision = round_of(snapshot([both], queue, pods=[stranger]))
    assert placed(decision) == {"w0": "n", "w1": "n"} and decision.queued == 4
    assert [a.requests.gpu_resource for a in decision.assignments] == ["", AMD]


def test_gpu_memory_chooses_among_nodes() -> None:
    nodes = [node("a", gpu_memory=(("", 24_576),)), node("b", gpu_memory=(("", 81_559),)), node("c")]
    decision = round_of(snapshot(nodes, [workload("w", spec={"gpuMemory": "80G"})]))
    assert placed(decision) == {"w": "b"}
    (verdict,) = round_of(snapshot(nodes, [workload("w", spec={"gpuMemory": "80Gi"})])).verdicts
    assert verdict.message == (
        "it needs GPUs of 80 GiB or more, but none of 3 nodes has such: 1 whose labels do not tell their GPUs' memory, "
        "1 with GPUs of 24 GiB, 1 with GPUs of 79.6 GiB"
    )


def test_an_unready_node_is_waited_for() -> None:
    decision = round_of(snapshot([node("n", ready=False)], [workload("a", 8)]))
    assert not decision.verdicts and decision.waiting[0].message.endswith("none can take it now: 1 not ready")


def test_strategy_from_spec_then_namespace_then_installation() -> None:
    nodes = [node("n")]
    views = [
        workload("own", spec={"schedulingStrategy": "random"}),
        workload("none", namespace="other"),
        workload("ns"),
    ]
    decision = round_of(snapshot(nodes, views, namespaces={"ns": "costOptimized"}))
    assert {a.uid: a.strategy for a in decision.assignments} == {
        "own": "random", "ns": "costOptimized", "none": "leastLoaded",
    }  # fmt: skip


def test_an_unknown_strategy_of_a_namespace_is_named_with_its_place() -> None:
    decision = round_of(snapshot([node("n")], [workload("a")], namespaces={"ns": "nope"}))
    assert decision.waiting[0].message == (
        f"namespace ns: there is no strategy 'nope'; installed are {', '.join(installed())}"
    )


def test_gpus_in_resources_are_refused() -> None:
    view = workload("a", spec={"resources": {"limits": {"nvidia.com/gpu": 2}}})
    decision = round_of(snapshot([node("n")], [view]))
    assert [(w.reason, w.message) for w in decision.waiting] == [
        ("Invalid", "spec.resources: GPUs are asked for by gpuCount; remove nvidia.com/gpu")
    ]


def test_a_template_is_examined_before_it_queues_and_queues_once_accepted() -> None:
    view = workload("a", spec=TEMPLATE)
    decision = round_of(snapshot([node("n")], [view]))
    assert [entry.uid for entry in decision.examine] == ["a"] and not decision.assignments
    ledger = Ledger(accepted={"a": 1})
    assert placed(round_of(snapshot([node("n")], [view]), ledger)) == {"a": "n"}
    assert len(round_of(snapshot([node("n")], [replace(view, generation=2)]), ledger).examine) == 1


def test_a_status_that_somebody_wrote_does_not_spare_a_template_its_examination() -> None:
    view = workload("a", spec=TEMPLATE)
    written = status.accepted(view, NOW)
    assert written is not None
    assert not round_of(snapshot([node("n")], [replace(view, status=written)])).assignments


def test_a_refused_template_waits_for_an_edit() -> None:
    view = workload("a", spec=TEMPLATE)
    ledger = Ledger(rejected={"a": 1})
    decision = round_of(snapshot([node("n")], [view]), ledger)
    assert not decision.examine and [w.reason for w in decision.waiting] == ["TemplateRefused"]
    assert round_of(snapshot([node("n")], [told(view, "TemplateRefused", "Pending")]), ledger).waiting == []
    assert len(round_of(snapshot([node("n")], [replace(view, generation=2)]), ledger).examine) == 1


def test_a_job_whose_pod_finds_no_place_in_time_is_withdrawn() -> None:
    stuck = job("a", "n", 2, retries=1, created=NOW - 30)
    blocked = pod("p", of=stuck, blocked="0/1 nodes are available")
    decision = round_of(snapshot([node("n")], [workload("a")], jobs=[stuck], pods=[blocked]))
    (withdrawal,) = decision.withdrawals
    assert withdrawal.next_turn == Turn(3, 1) and withdrawal.job_uid == stuck.uid
    assert withdrawal.message == (
        "Job a-a-2 found no place on node n in 30 s (0/1 nodes are available); it is placed anew"
    )
    young = replace(stuck, created=NOW - 29)
    patient = round_of(snapshot([node("n")], [workload("a")], jobs=[young], pods=[blocked]))
    assert not patient.withdrawals and patient.wake_after == 1
    bound = pod("p", "n", of=stuck)
    assert not round_of(snapshot([node("n")], [workload("a")], jobs=[stuck], pods=[bound])).withdrawals


def test_a_pod_that_the_scheduler_has_not_tried_yet_is_waited_for() -> None:
    """A slow scheduler is no reason to take a Job back: on a busy cluster that only makes it busier."""
    stuck = job("a", "n", created=NOW - 60)
    untried = pod("p", of=stuck)
    assert not round_of(snapshot([node("n")], [workload("a")], jobs=[stuck], pods=[untried])).withdrawals
    (withdrawal,) = round_of(
        snapshot([node("n")], [workload("a")], jobs=[replace(stuck, created=NOW - 120)], pods=[untried])
    ).withdrawals
    assert withdrawal.next_turn == Turn(1, 0)


def test_a_job_whose_pod_ran_and_ended_is_not_withdrawn() -> None:
    ran = job("a", "n", created=NOW - 300, counted=True)  # its pod has ended, its own end is not visible yet
    assert not round_of(snapshot([node("n")], [workload("a")], jobs=[ran])).withdrawals
    never_made = replace(ran, counted=False, created=NOW - 60)
    assert not round_of(snapshot([node("n")], [workload("a")], jobs=[never_made])).withdrawals, "its turn may come"
    never_made = replace(never_made, created=NOW - 120, started=NOW - 119)
    (withdrawal,) = round_of(snapshot([node("n")], [workload("a")], jobs=[never_made])).withdrawals
    assert "no pod was created for it" in withdrawal.message
    assert withdrawal.next_turn == Turn(1, 1), "something refuses its pods: that counts as a failure"


def test_a_job_that_its_controller_never_looked_at_costs_no_retry() -> None:
    alone = job("a", "n", created=NOW - 120, resource_version=7)
    (withdrawal,) = round_of(snapshot([node("n")], [workload("a")], jobs=[alone])).withdrawals
    assert withdrawal.next_turn == Turn(1, 0)
    assert withdrawal.job_version == 7, "it is taken back as it was decided upon, or not at all"


def test_a_workload_whose_pods_are_refused_time_and_again_is_told_so() -> None:
    decision = round_of(snapshot([node("n")], [workload("a")]), Ledger(turns={"a": Turn(4, 4)}))
    assert not decision.assignments
    (verdict,) = decision.verdicts
    assert verdict.reason == "JobRefused" and "quota" in verdict.message


def test_a_promise_is_not_forgotten_while_its_job_may_be_there_unseen() -> None:
    ledger = Ledger(in_flight={"a": promise("a", "n")}, made={"a": 500})
    assert round_of(snapshot([node("n")], [], jobs_version=490), ledger).forget == []
    assert round_of(snapshot([node("n")], [], jobs_version=500), ledger).forget == ["a"]


@given(st.floats(-1e9, 1e9))
def test_a_clock_that_jumps_never_makes_the_next_look_late(jump: float) -> None:
    seen = snapshot([node("n")], [workload("a")], jobs=[job("a", "n")], now=NOW + jump)
    wake = round_of(seen).wake_after
    assert wake is None or 0 < wake <= 30


def test_seen_and_forgotten() -> None:
    ledger = Ledger(
        in_flight={"a": promise("a", "n"), "b": promise("b", "n"), "gone": promise("gone", "n")},
        turns={"t": Turn(1, 0), "later": Turn(5, 0), "dead": Turn(1, 1)},
        held={"ended": Turn()},
    )
    views = [workload(uid) for uid in ("a", "b", "t", "later")] + [workload("ended", status={"phase": "Failed"})]
    jobs = [job("a", "n"), job("t", "n", 1), job("later", "n", 4)]
    decision = round_of(snapshot([node("n")], views, jobs=jobs), ledger)
    assert decision.seen == ["a"] and decision.forget == ["dead", "ended", "gone"]


def test_what_is_gone_keeps_its_promise_while_its_job_is_there() -> None:
    decision = round_of(snapshot([node("n")], [], jobs=[job("a", "n", 3)]), Ledger(turns={"a": Turn(9)}))
    assert decision.forget == []


def test_a_job_that_came_and_went_unseen_ends_its_promise() -> None:
    ledger = Ledger(in_flight={"a": promise("a", "n", gpus=8)}, turns={"a": Turn(1, 1)}, made={"a": 50})
    late = round_of(snapshot([node("n")], [workload("a", 8)], jobs_version=49), ledger)
    assert not late.assignments and late.seen == []
    decision = round_of(snapshot([node("n")], [workload("a", 8)], jobs_version=50), ledger)
    assert decision.seen == ["a"] and decision.assignments[0].turn == Turn(1, 1)


@given(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())
def test_a_job_that_goes_on_is_its_workloads_present_one_whatever_turn_is_expected(
    attempt: int, ahead: int, ready: bool, bound: bool
) -> None:
    """A status told to wait would be taken back by whoever sees the Job run, round after round."""
    it = job("a", "n", attempt, ready=ready)
    pods = [pod("p", "n", of=it)] if bound else []
    seen = snapshot([node("n")], [workload("a")], jobs=[it], pods=pods)
    decision = round_of(seen, Ledger(turns={"a": Turn(attempt + ahead)}))
    assert (decision.assignments, decision.waiting, decision.queued) == ([], [], 0)


def test_withdrawing_and_seeing_in_one_round_keeps_the_next_turn() -> None:
    ledger = Ledger(in_flight={"a": promise("a", "n")})
    stuck = job("a", "n", created=NOW - 99)
    decision = round_of(
        snapshot([node("n")], [workload("a")], jobs=[stuck], pods=[pod("p", of=stuck, blocked="x")]), ledger
    )
    decided = after_deciding(ledger, decision)
    assert decided == Ledger()
    assert after_carrying_out(decided, decision.withdrawals, [], [], {}, {}, {}, {}) == Ledger(
        turns={"a": Turn(1, 0)}, avoided={"a": Avoided(1, ("n",))}
    )


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(-3, 3)), max_size=25), st.integers(0, 9))
def test_a_round_never_over_commits_and_is_replayable(wishes: list[tuple[int, int]], seed: int) -> None:
    nodes = [node("a", 8), node("b", 4), node("c", 2, taints=(taint("x"),)), node("d", 1)]
    views = [
        workload(f"w{i}", gpus, spec={"priority": priority, "schedulingStrategy": installed()[i % 3]})
        for i, (gpus, priority) in enumerate(wishes)
    ]
    seen = snapshot(nodes, views, pods=[pod("p", "a", gpus=3)])
    decision = round_of(seen, seed=seed)
    assert decision == round_of(seen, seed=seed)
    used = {"a": 3, "b": 0, "c": 0, "d": 0}
    for assignment in decision.assignments:
        used[assignment.node] += assignment.requests.gpus
    assert used["a"] <= 8 and used["b"] <= 4 and used["c"] == 0 and used["d"] <= 1
    assert len(decision.assignments) + decision.queued + len(decision.verdicts) == len(wishes)
