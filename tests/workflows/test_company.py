"""Good answers of nodes wait for company before their cache is looked at; others, and the last, wait for nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from activities.cache_signatures import CacheLooked, CacheState
from planning.caches.orders import CacheRef, NodeOrder, Outcome, Report
from planning.caches.rollout import Aim, Member, Rollout, Sent, Step
from workflows import kernel_cache
from workflows.kernel_cache import GOOD, KernelCache

REF = CacheRef("TritonKernelCache", "ns", "c", "uid")


def cache(nodes: int) -> KernelCache:
    """With so many nodes that were told epoch 1, and have not answered."""
    members = {f"n{i}": Member(1, "key", "sha256:a") for i in range(nodes)}
    return KernelCache(CacheState(REF, Rollout(members=members, epoch=1)))


def looks(workflow: KernelCache, reports: list[Report]) -> int:
    """How many looks follow, if there is one as soon as it is time."""
    count = 0
    for report in reports:
        workflow.report(report)
        if workflow._poked or (workflow._heard and workflow._enough):
            workflow._poked, workflow._heard = False, 0
            count += 1
    return count


@pytest.mark.parametrize("outcome", GOOD)
def test_good_answers_wait_for_company_but_the_last(outcome: Outcome) -> None:
    workflow = cache(100)
    assert looks(workflow, [Report(f"n{i}", 1, outcome) for i in range(19)]) == 0
    assert looks(workflow, [Report("n19", 1, outcome)]) == 1, "20 are a quarter of the 80 that are awaited"
    assert looks(workflow, [Report(f"n{i}", 1, outcome) for i in range(20, 99)]) < 79 / 4
    assert looks(workflow, [Report("n99", 1, outcome)]) == 1


@pytest.mark.parametrize("nodes", range(1, 6))
def test_few_nodes_wait_for_nobody(nodes: int) -> None:
    assert looks(cache(nodes), [Report(f"n{i}", 1, "ready") for i in range(nodes)]) == nodes


@pytest.mark.parametrize("outcome", ["failed", "retrying", "busy"])
def test_what_is_not_good_is_looked_at_at_once(outcome: Outcome) -> None:
    assert looks(cache(100), [Report("n0", 1, outcome)]) == 1


def test_an_answer_to_an_older_order_is_no_news() -> None:
    assert looks(cache(1), [Report("n0", 0, "failed"), Report("stranger", 1, "failed")]) == 0


async def test_an_answer_that_comes_while_its_order_is_being_sent_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long look lets signals in before the workflow knows what was ordered."""
    looked = cache(0)
    order = NodeOrder(7, "prepare", "r/i", "sha256:a")

    async def look(*_: Any, **__: Any) -> CacheLooked:
        looked.report(Report("n0", 7, "ready", "sha256:a"))
        return CacheLooked("Ready", "", Step(Aim(), orders=(Sent("n0", "key", order),)), over=True)

    stands_in = SimpleNamespace(
        execute_local_activity=look,
        info=lambda: SimpleNamespace(is_continue_as_new_suggested=lambda: False),
        set_current_details=lambda _: None,
        upsert_search_attributes=lambda _: None,
    )
    monkeypatch.setattr(kernel_cache, "workflow", stands_in)
    assert await looked.run(CacheState(REF)) == "Ready"
    assert looked._state.rollout.members["n0"].outcome == "ready" and looked._heard == 1
