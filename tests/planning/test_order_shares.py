"""Who may have a node ordered where several want one: by their tenants, and by their quotas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.ledger import after_deciding, after_provisioning
from planning.model import Ledger, Provisioning, WorkloadView
from tests.planning.builders import NOW, job, node, pod, quota, snapshot, workload
from tests.planning.test_provisioning import WAIT, busy, ordered, round_of


def test_one_quota_orders_no_more_than_it_suffices_for() -> None:
    views = [workload(f"w{i}", 8, created=NOW - 200 + i) for i in range(10)]
    waited = Ledger(provisioning={view.uid: Provisioning(1, "waiting", NOW - WAIT) for view in views})
    seen = snapshot([node("n", 4)], views, quotas=[quota("q", "ns", gpus=16)])
    first = round_of(seen, waited)
    assert ordered(first) == ["w0", "w1"]
    second = round_of(replace(seen, now=NOW + 60), after_deciding(waited, first))
    assert ordered(second) == []
    free = replace(seen, quotas=())
    assert len(ordered(round_of(free, waited))) == 10, "without one only maxOrders bounds them"


@pytest.mark.parametrize("quotas", [[], [quota("qa", "a", gpus=100), quota("qb", "b", gpus=100)]])
def test_one_tenant_leaves_orders_to_others_who_come_later(quotas: list[Any]) -> None:
    """Those of a are first, and none of theirs is ever done."""
    greedy = [workload(f"a{i}", 8, namespace="a", created=NOW - 200) for i in range(20)]
    runs = replace(job("running", "n"), namespace="b")
    seen = snapshot([node("n", 4)], [*greedy, workload("running", namespace="b")], jobs=[runs], quotas=quotas)
    first = round_of(seen, maxOrders=10)
    assert len(ordered(first)) == 5
    assert "the rest of the 10 that may be open at once is for other tenants" in first.waiting[-1].message
    ledger = after_deciding(Ledger(), first)
    theirs = [workload(f"{tenant}{i}", 8, namespace=tenant) for tenant in "bc" for i in range(9)]
    later = round_of(replace(seen, workloads=(*greedy, *theirs)), ledger, maxOrders=10)
    assert ordered(later) == ["b0", "b1", "b2", "c0"]


def test_who_is_alone_may_have_all_orders_and_is_the_last_to_have_another_when_somebody_comes() -> None:
    alone = [workload(f"a{i}", 8, namespace="a", created=NOW - 200) for i in range(6)]
    first = round_of(snapshot([], alone), maxOrders=4)
    assert ordered(first) == ["a0", "a1", "a2", "a3"]
    ledger = after_provisioning(after_deciding(Ledger(), first), "a0", 1, None)
    both = round_of(snapshot([], [*alone, workload("b", 8, namespace="b")]), ledger, maxOrders=4)
    assert ordered(both) == ["b"]


@pytest.mark.parametrize(
    "idle",
    [
        {"status": {"phase": "Succeeded"}},
        {"status": {"phase": "Failed"}},
        {"deleting": True},
        {"spec": {"suspend": True}},
        {"spec": {"gpuCount": -1}},
    ],
)
def test_who_has_nothing_left_that_could_want_a_node_has_no_orders_left_free(idle: dict[str, Any]) -> None:
    greedy = [workload(f"a{i}", 8, namespace="a", created=NOW - 200) for i in range(6)]
    assert len(ordered(round_of(snapshot([], [*greedy, workload("b", namespace="b", **idle)]), maxOrders=4))) == 4


def test_one_tenant_alone_does_not_use_up_what_is_remembered_of_waits() -> None:
    full, running, its_pod = busy("n")
    greedy = [workload(f"a{i}", 8, namespace="a", created=NOW - 200) for i in range(20)]
    seen = snapshot([full], [workload("on-n", 8), *greedy], jobs=[running], pods=[its_pod])
    ledger = after_deciding(Ledger(), round_of(seen))
    seen = replace(seen, workloads=(*seen.workloads, workload("b", 8, namespace="b")))
    ledger = after_deciding(ledger, round_of(seen, ledger))
    assert "b" in ledger.provisioning


def two_tenants(*sizes: int) -> list[WorkloadView]:
    """Preemptible workloads, in turn of tenants a and b."""
    return [
        workload(f"w{i}", gpus, namespace="ab"[i % 2], spec={"priority": "low"}, created=NOW - 200 + i)
        for i, gpus in enumerate(sizes)
    ]


def test_tenants_of_one_cohort_order_together_no_more_than_it_has_to_lend() -> None:
    cohort = [quota("c", gpus=16), *(quota(f"q{name}", name, gpus=0, cohort="c") for name in "ab")]
    seen = snapshot([node("n", 4)], two_tenants(8, 8, 8, 8), quotas=cohort)
    first = round_of(seen, waitSeconds=0)
    assert ordered(first) == ["w0", "w1"]
    later = round_of(replace(seen, now=NOW + 60), after_deciding(Ledger(), first), waitSeconds=0)
    assert ordered(later) == []


def test_an_order_that_would_borrow_keeps_back_nobody_who_need_not() -> None:
    cohort = [quota("c", gpus=0), *(quota(f"q{name}", name, gpus=8, cohort="c") for name in "ab")]
    running = job("r", "n", gpus=8, namespace="a", started=NOW, ready=True)
    there = replace(workload("r", 8), namespace="a")
    seen = snapshot([node("n", 8)], [there, *two_tenants(8, 8)], jobs=[running], quotas=cohort,
                    pods=[pod("p", "n", of=running, namespace="a")])  # fmt: skip
    known = Ledger(provisioning={"w0": Provisioning(1, "ordered", NOW)})
    assert ordered(round_of(seen, known, waitSeconds=0)) == ["w1"]


def test_an_order_whose_quota_is_gone_keeps_back_nobody_who_borrows() -> None:
    """Of 12, four are left to lend: b may have them, though a once ordered for eight."""
    cohort = [quota("c", gpus=12), *(quota(f"q{name}", name, gpus=0, cohort="c") for name in "ab")]
    running = job("r", "n", gpus=8, namespace="a", started=NOW, ready=True)
    there = replace(workload("r", 8, spec={"priority": "low"}), namespace="a")
    seen = snapshot([node("n", 8)], [there, *two_tenants(8, 4)], jobs=[running], quotas=cohort,
                    pods=[pod("p", "n", of=running, namespace="a")])  # fmt: skip
    known = Ledger(provisioning={"w0": Provisioning(1, "ordered", NOW)})
    assert ordered(round_of(seen, known, waitSeconds=0)) == ["w1"]


def test_an_order_whose_workload_finds_its_place_counts_once() -> None:
    views = [workload(f"w{i}", 8, created=NOW - 200 + i) for i in range(2)]
    known = Ledger(provisioning={"w0": Provisioning(1, "provisioned", NOW)})
    decision = round_of(snapshot([node("n")], views, quotas=[quota("q", "ns", gpus=16)]), known, waitSeconds=0)
    assert [each.uid for each in decision.assignments] == ["w0"] and ordered(decision) == ["w1"]
