"""The upstream controller's defects 2-13 (scheduling.md 2.3), as far as planning can have them: each fails here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning import status
from planning.jobs import job_manifest
from planning.ledger import after_carrying_out, after_deciding
from planning.lifecycle import Observation, next_step
from planning.model import Ledger, Turn, Verdict
from planning.strategies import installed, least_loaded
from planning.views import node_view, workload_view
from tests.planning.builders import NOW, SETTINGS, job, node, placed, pod, promise, round_of, snapshot, taint, workload


@pytest.mark.parametrize("gpus", range(1, 9))
def test_defect_2_the_gpu_quantity_is_the_number_and_not_its_length(gpus: int) -> None:
    made = job_manifest(workload("a", gpus), promise("a", "n", gpus=gpus), SETTINGS)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": str(gpus)}
    assert node_view({"status": {"allocatable": {"nvidia.com/gpu": "16"}}}, "nvidia.com/gpu").allocatable.gpus == 16


def test_defect_3_capacity_is_less_what_runs_and_equal_nodes_share_the_load() -> None:
    nodes = [node("a", 8), node("b", 8)]
    full = [pod("p", "a", gpus=8)]
    assert placed(round_of(snapshot(nodes, [workload("w", 4)], pods=full))) == {"w": "b"}
    spread = placed(round_of(snapshot(nodes, [workload(f"w{i}", 4) for i in range(4)])))
    assert sorted(spread.values()) == ["a", "a", "b", "b"]


def test_defect_4_two_rounds_never_promise_one_gpu_though_nothing_is_visible_between_them() -> None:
    seen = snapshot([node("n", 8)], [workload(f"w{i}", 3) for i in range(4)])
    ledger, given = Ledger(), []
    for _ in range(3):
        decision = round_of(seen, ledger, limit=1)
        ledger = after_carrying_out(after_deciding(ledger, decision), [], [], [], {}, {}, {}, {})
        given += [assignment.uid for assignment in decision.assignments]
    assert given == ["w0", "w1"]


def test_defect_5_the_phase_follows_the_job() -> None:
    view = workload("a", status={"phase": "Scheduled"})
    for it, phase in [
        (job("a", "n"), "Scheduled"),
        (job("a", "n", ready=True), "Running"),
        (job("a", "n", finished="Complete"), "Succeeded"),
        (job("a", "n", finished="Failed", reason="DeadlineExceeded"), "Failed"),
    ]:
        step = next_step(Observation(NOW, view, (it,), (), node("n")), Turn(), None, 0.0)
        written = status.project(view, step, NOW)
        assert written is not None and written["phase"] == phase


@pytest.mark.parametrize("phase", ["Pending", "Scheduling", "Scheduled", "Running", "Succeeded", "Failed"])
def test_defect_6_deletion_ends_from_every_phase(phase: str) -> None:
    view = workload("a", deleting=True, status={"phase": phase})
    step = next_step(Observation(NOW, view, (job("a", "n"),), (), node("n")), Turn(), None, 0.0)
    assert step.kind in ("tear_down", "finish") and step.delete
    step = next_step(Observation(NOW, view), Turn(), None, 0.0)
    assert step.done or step.kind == "finish"


def test_defect_7_no_suitable_node_ends_at_the_retry_limit_and_failed_is_final() -> None:
    view, turn = workload("a", 8), Turn()
    for _ in range(10):
        decision = round_of(snapshot([node("n", 4)], [view]), Ledger(turns={"a": turn}))
        (verdict,) = decision.verdicts
        step = next_step(Observation(NOW, view), turn, verdict, 0.0)
        written = status.project(view, step, NOW)
        assert written is not None
        view, turn = replace(view, status=written), step.turn
        if step.kind == "finish":
            break
    assert (view.phase, turn.retries) == ("Failed", 3)
    after = round_of(snapshot([node("n", 8)], [view]))
    assert not after.assignments and not after.waiting and not after.verdicts
    assert status.project(view, next_step(Observation(NOW, view), turn, None, 0.0), NOW) is None


def test_defect_8_priority_orders_the_queue_and_scheduling_is_shown() -> None:
    views = [workload("first", 8, created=NOW - 99), workload("urgent", 8, spec={"priority": "high"})]
    decision = round_of(snapshot([node("n", 8)], views))
    assert placed(decision) == {"urgent": "n"}
    written = status.waiting(views[0], decision.waiting[0], NOW)
    assert written is not None and written["phase"] == "Scheduling"


def test_defect_9_retries_come_from_the_job_itself_so_no_lost_write_forgets_them() -> None:
    stale = workload("a", status={"phase": "Running", "retryCount": 0})
    failed = job("a", "n", 4, retries=2, finished="Failed", reason="BackoffLimitExceeded")
    step = next_step(Observation(NOW, stale, (failed,), (), node("n")), Turn(), None, 0.0)
    assert step.turn == Turn(5, 3)
    assert promise("a", "n").resource_version == 1  # and every assignment is bound to the version it was decided at


@pytest.mark.parametrize(
    "closed",
    [
        node("bad", 8, ready=False),
        node("bad", 8, unschedulable=True),
        node("bad", 8, taints=(taint("dedicated", value="others"),)),
        node("bad", 8, labels={"gpu": "t4"}),
        node("bad", 8, allocatable=replace(node("x").allocatable, cpu_milli=100)),
        node("bad", 8, allocatable=replace(node("x").allocatable, memory=100)),
        node("bad", 0, labels={"gpu": "a100", "nvidia.com/gpu": "8"}),
    ],
)
def test_defect_10_taints_cordon_selectors_cpu_and_memory_count_and_labels_do_not(closed: Any) -> None:
    view = workload("a", spec={"nodeSelector": {"gpu": "a100"}, "resources": {"requests": {"cpu": 1, "memory": "1Gi"}}})
    opened = node("good", 1, labels={"gpu": "a100"})
    if not closed.labels.get("gpu"):
        closed = replace(closed, labels={"gpu": "a100"})
    assert placed(round_of(snapshot([closed, opened], [view]))) == {"a": "good"}
    assert not round_of(snapshot([closed], [view])).assignments


def test_defect_11_no_model_name_and_no_cr_name_can_break_a_job() -> None:
    import re

    name = ".".join(["n" * 63] * 3 + ["n" * 61])
    raw = {
        "metadata": {"name": name, "namespace": "ns", "uid": "0a1b2c3d-9"},
        "spec": {"modelName": "meta-llama/Llama-2 " + "é" * 200, "gpuCount": 1},
    }
    view = workload_view(raw)
    decision = round_of(snapshot([node("n")], [view]))
    made = job_manifest(view, decision.assignments[0], SETTINGS)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", made["metadata"]["name"])
    for value in made["metadata"]["labels"].values():
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)
    assert made["metadata"]["annotations"]["gpu.warp.dev/model-name"] == raw["spec"]["modelName"]  # type: ignore[index]


def test_defect_12_an_unknown_strategy_is_said_and_never_replaced() -> None:
    decision = round_of(snapshot([node("n")], [workload("a", spec={"schedulingStrategy": "bestGuess"})]))
    assert not decision.assignments
    assert decision.waiting[0].reason == "UnknownStrategy"
    assert f"'bestGuess'; installed are {', '.join(installed())}" in decision.waiting[0].message


def test_defect_13_least_loaded_does_not_claim_to_avoid_fragmentation() -> None:
    assert "leaves more GPUs stranded than any packing strategy" in " ".join((least_loaded.__doc__ or "").split())


def test_a_verdict_for_the_last_turn_is_the_end() -> None:
    verdict = Verdict("a", "ns", "a", Turn(3, 3), "NoSuitableNode", "no node has 8 GPUs")
    step = next_step(Observation(NOW, workload("a", 8)), Turn(3, 3), verdict, 0.0)
    assert step.message == "all 3 retries are used; the last cause: no node has 8 GPUs"
