"""Good answers of nodes wait for company before their cache is looked at; others, and the last, wait for nobody."""

from __future__ import annotations

import pytest

from activities.cache_signatures import CacheState
from planning.caches.orders import CacheRef, Outcome, Report
from planning.caches.rollout import Member, Rollout
from workflows.kernel_cache import GOOD, KernelCache


def cache(nodes: int) -> KernelCache:
    """With so many nodes that were told epoch 1, and have not answered."""
    members = {f"n{i}": Member(1, "key", "sha256:a") for i in range(nodes)}
    return KernelCache(CacheState(CacheRef("TritonKernelCache", "ns", "c", "uid"), Rollout(members=members, epoch=1)))


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
