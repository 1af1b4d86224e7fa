"""Where a workload goes after a node that looked free was none for it, and when that is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning import status
from planning.ledger import after_carrying_out, after_deciding
from planning.lifecycle import Step
from planning.model import Avoided, Decision, JobView, Ledger, NodeView, PodView, Turn, WorkloadView
from planning.strategies import installed
from tests.planning.builders import NOW, job, node, placed, pod, round_of, snapshot, workload

WORDS = "0/3 nodes are available: 1 node(s) had volume node affinity conflict"


def stuck_on(name: str, attempt: int = 0) -> tuple[JobView, PodView]:
    it = job("a", name, attempt, created=NOW - 60, counted=True)
    return it, pod("p", of=it, blocked=WORDS)


def apply(ledger: Ledger, decision: Decision) -> Ledger:
    return after_carrying_out(after_deciding(ledger, decision), decision.withdrawals, [], [], {}, {}, {}, {})


def withdrawn_from(name: str, ledger: Ledger, nodes: list[NodeView], view: WorkloadView) -> Ledger:
    """The ledger once the workload's present Job, on that node, was taken back."""
    it, blocked = stuck_on(name, ledger.turns.get("a", Turn()).attempt)
    decision = round_of(snapshot(nodes, [view], jobs=[it], pods=[blocked]), ledger)
    assert [w.uid for w in decision.withdrawals] == ["a"]
    return apply(ledger, decision)


@pytest.mark.parametrize("strategy", installed())
@settings(max_examples=40)
@given(count=st.integers(1, 20), pick=st.integers(0, 19), seed=st.integers(0, 2**40))
def test_a_workload_gets_to_the_only_node_that_does_whatever_its_strategy_prefers(
    strategy: str, count: int, pick: int, seed: int
) -> None:
    nodes, good = [node(f"n{i:02}") for i in range(count)], f"n{pick % count:02}"
    view, ledger = workload("a", spec={"schedulingStrategy": strategy}), Ledger()
    for cycle in range(400):
        decision = round_of(snapshot(nodes, [view]), ledger, seed=seed + cycle)
        where = placed(decision)["a"]
        if where == good:
            assert cycle < count or count > 9, "as long as all nodes are remembered, each is tried once"
            return
        ledger = withdrawn_from(where, apply(ledger, replace(decision, assignments=[])), nodes, view)
    raise AssertionError(f"it never got to {good}")


def test_where_no_other_node_has_room_it_begins_anew_and_nobody_starves() -> None:
    nodes, view = [node("m"), node("n")], workload("a", 8)
    ledger = Ledger(turns={"a": Turn(2)}, avoided={"a": Avoided(1, ("m", "n"))})
    decision = round_of(snapshot(nodes, [view]), ledger)
    assert placed(decision) == {"a": "m"} and decision.reconsidered == ["a"]
    assert apply(ledger, decision).avoided == {}
    full = [pod("s", "n", gpus=1)]
    only_m = replace(ledger, avoided={"a": Avoided(1, ("m",))})
    decision = round_of(snapshot(nodes, [view], pods=full), only_m)
    assert placed(decision) == {"a": "m"} and decision.reconsidered == ["a"]
    decision = round_of(snapshot(nodes, [view]), only_m)
    assert placed(decision) == {"a": "n"} and decision.reconsidered == []


def test_others_are_not_kept_from_a_node_that_one_avoids() -> None:
    ledger = Ledger(avoided={"a": Avoided(1, ("m",))})
    decision = round_of(snapshot([node("m", 1), node("n", 1)], [workload("a"), workload("b")]), ledger)
    assert placed(decision) == {"a": "n", "b": "m"}


def test_who_chose_a_node_by_chance_is_told() -> None:
    avoided = Avoided(1, tuple(f"n{i}" for i in range(8)))
    nodes = [node(f"n{i}") for i in range(12)]
    (made,) = round_of(snapshot(nodes, [workload("a")]), Ledger(avoided={"a": avoided})).assignments
    assert made.strategy == "random" and made.node in {"n8", "n9", "n10", "n11"}
    (made,) = round_of(snapshot(nodes[:8], [workload("a")]), Ledger(avoided={"a": avoided})).assignments
    assert made.strategy == "leastLoaded"


BOUND = job("a", "n", 1)


@pytest.mark.parametrize(
    ("jobs", "pods", "changes", "over"),
    [
        ([BOUND], [pod("p", "n", of=BOUND)], {}, True),
        ([replace(BOUND, ready=True)], [], {}, True),
        ([replace(BOUND, finished="Failed")], [], {}, True),
        ([], [], {"generation": 2}, True),
        ([BOUND], [pod("p", of=BOUND, blocked=WORDS)], {}, False),
        ([replace(BOUND, withdrawn=True, deleting=True, finished="Failed")], [], {}, False),
    ],
)
def test_a_node_is_avoided_until_a_pod_found_its_place_or_the_spec_was_edited(
    jobs: list[JobView], pods: list[PodView], changes: dict[str, Any], over: bool
) -> None:
    ledger = Ledger(turns={"a": Turn(1)}, avoided={"a": Avoided(1, ("m",))})
    decision = round_of(snapshot([node("m"), node("n")], [workload("a", **changes)], jobs=jobs, pods=pods), ledger)
    assert decision.reconsidered == (["a"] if over else [])
    assert placed(decision) == ({"a": "m"} if changes else {}), "for the edited one all nodes are alike again"


def test_what_is_avoided_is_forgotten_with_its_workload() -> None:
    ledger = Ledger(avoided={"a": Avoided(1, ("m",))})
    assert round_of(snapshot([node("m")], []), ledger).forget == ["a"]


def test_only_a_node_that_is_there_and_was_tried_is_remembered() -> None:
    it, blocked = stuck_on("n")
    view = workload("a")

    def avoided(jobs: JobView, pods: list[PodView]) -> list[str]:
        decision = round_of(snapshot([node("n")], [view], jobs=[jobs], pods=pods))
        return [withdrawal.avoid for withdrawal in decision.withdrawals]

    assert avoided(it, [blocked]) == ["n"]
    assert avoided(replace(it, node="x" * 100_000), [blocked]) == [""], "anybody may write anything on a Job"
    late = replace(it, created=NOW - 999)
    assert avoided(late, [replace(blocked, blocked="")]) == [""], "the scheduler is behind"
    assert avoided(replace(late, counted=False, started=NOW), []) == [""], "its pods are refused, wherever it goes"


def test_that_it_was_withdrawn_stands_until_there_is_more_to_tell() -> None:
    view = workload("a", 8)
    step = Step("again", Turn(1), phase="Scheduling", reason="Withdrawn", message=WORDS)
    written = status.project(view, step, NOW)
    assert written is not None and written["message"] == WORDS and written["attempt"] == 1
    view, ledger = replace(view, status=written), Ledger(turns={"a": Turn(1)})
    going = job("a", "n", withdrawn=True, deleting=True)
    decision = round_of(snapshot([node("n")], [view], jobs=[going]), ledger)
    assert decision.waiting == [] and decision.queued == 1
    decision = round_of(snapshot([node("n")], [view], pods=[pod("s", "n", gpus=1)]), ledger)
    assert [w.reason for w in decision.waiting] == ["WaitingForCapacity"]
