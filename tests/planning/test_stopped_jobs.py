"""What becomes of Jobs that are stopped for others: they go on, are replaced, or could not be stopped at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.model import JobView, Stopped, Turn
from planning.preemption import SPARED, no_longer_spared
from tests.planning.builders import NOW, node, pod, round_of, snapshot
from tests.planning.cluster import Cluster
from tests.planning.test_preemption import HIGH, LOW, after, cluster, named, running


def stopped(there: Cluster) -> JobView:
    """The Job of `low`, once `high` has its place."""
    running(named("low", 8, **LOW), on=there)
    after(there, named("high", 8, **HIGH))
    assert there.running == {"high": "a"}
    return there.jobs["low"]


def test_a_stopped_job_goes_on_elsewhere_with_all_that_a_new_one_would_have() -> None:
    there = cluster(node("a", 8))
    first = stopped(there)
    assert first.halted and there.ledger.turns["low"] == Turn(1, 0)
    assert not there.round().withdrawals, "that its turn is over is said once"
    there.nodes.append(node("b", 8))
    (place,) = there.round().assignments
    assert place.resumes == Stopped(first.name, first.uid, first.resource_version)
    assert (place.node, place.turn, place.job_name) == ("b", Turn(1, 0), "low-low-1")
    there.settle()
    again = there.jobs["low"]
    assert (again.uid, again.name, again.attempt, again.node) == (first.uid, first.name, 1, "b")
    assert there.running == {"high": "a", "low": "b"}


@pytest.mark.parametrize(("modern", "lets_go_on"), [(False, True), (True, False)])
def test_a_stopped_job_is_replaced_where_it_cannot_go_on(modern: bool, lets_go_on: bool) -> None:
    there = cluster(node("a", 8))
    there.modern, there.lets_go_on = modern, lets_go_on
    running(named("low", 8, **LOW), on=there)
    uid = there.jobs["low"].uid
    after(there, named("high", 8, **HIGH))
    assert ("low" in there.jobs) is modern, "where its controller keeps the start time, it goes at once"
    there.nodes.append(node("b", 8))
    there.settle()
    assert there.jobs["low"].uid != uid and there.jobs["low"].attempt == 1
    assert there.running == {"high": "a", "low": "b"}


def test_until_its_controller_has_let_go_of_a_stopped_job_nothing_is_done_about_it() -> None:
    there = cluster(node("a", 8))
    job = stopped(there)
    there.ledger = replace(there.ledger, turns={})
    for halted, kept in ((False, []), (True, [True])):
        there.jobs["low"] = replace(job, halted=halted)
        there.pods["low"] = pod("late", of=job)
        assert not there.round().withdrawals, "a pod is seen that no controller counted"
        del there.pods["low"]
        assert [withdrawal.keep for withdrawal in there.round().withdrawals] == kept


def test_a_turn_that_ends_without_a_write_asks_for_another_round() -> None:
    """Of a Job that is kept comes no news that would wake the ledger; of one that is deleted comes some."""
    for modern in (True, False):
        there = cluster(node("a", 8))
        there.modern = modern
        running(named("low", 8, **LOW), on=there)
        there.add(named("high", 8, **HIGH))
        assert not there.round().more
        there.tick(1)
        ends = there.round()
        assert [withdrawal.keep for withdrawal in ends.withdrawals] == [modern] and ends.more is modern
        assert not there.round().more


def test_a_stopped_job_that_was_made_from_another_spec_is_replaced() -> None:
    """A patch would leave in it what the spec of now has not."""
    there = cluster(node("a", 8))
    first = stopped(there)
    there.workloads["low"] = named("low", 8, **LOW, nodeSelector={"kubernetes.io/hostname": "b"})
    there.nodes.append(node("b", 8))
    assert [withdrawal.keep for withdrawal in there.round().withdrawals] == [False]
    there.settle()
    assert there.jobs["low"].uid != first.uid and there.running == {"high": "a", "low": "b"}


@pytest.mark.parametrize(
    "change",
    [{"uid": "other", "halted": False}, {"attempt": 1}, {"deleting": True}, {"finished": "Failed"}, {"halted": False}],
)
def test_what_became_of_a_stopped_job_is_waited_for(change: dict[str, Any]) -> None:
    """Its turn is over, and it is no longer what it was: resumed by somebody, deleted, or not alone."""
    there = cluster(node("a", 8))
    job = stopped(there)
    seen = [replace(job, **change)] + [job] * ("uid" in change)
    there.nodes.append(node("b", 8))
    decision = round_of(snapshot(there.nodes, list(there.workloads.values()), jobs=seen), there.ledger)
    assert "low" not in [place.uid for place in decision.assignments]


def test_while_it_is_stopped_it_is_counted_once_among_those_who_wait() -> None:
    there = cluster(node("a", 8))
    running(named("low", 8, **LOW), on=there)
    there.add(named("high", 8, **HIGH))
    assert there.round().reasons == {"Preempting": 1}
    assert there.round().reasons == {"Preempting": 1, "Preempted": 1}
    there.tick(1)
    assert there.round().reasons == {"Preempted": 1}, "its turn is about to end"
    assert there.round().reasons == {"WaitingForCapacity": 1}
    there.workloads["low"] = named("low", 8, **LOW, suspend=True)
    assert there.round().reasons == {}, "suspended, it waits for nothing"


def test_who_cannot_be_stopped_is_left_alone_for_a_while_and_another_stopped() -> None:
    there = running(named("firm", 4, priority=-300), named("other", 4, **LOW), on=cluster(node("n", 8)))
    there.unstoppable = {"firm"}
    there.add(named("high", 4, **HIGH))
    assert [stop.uid for stop in there.round().preemptions] == ["firm"], "it is the cheaper one"
    assert [stop.uid for stop in there.round().preemptions] == ["other"]
    after(there)
    assert there.running == {"firm": "n", "high": "n"}


def test_if_nobody_else_can_be_stopped_it_is_tried_again_later() -> None:
    there = running(named("firm", 8, **LOW), on=cluster(node("n", 8)))
    there.unstoppable = {"firm"}
    there.add(named("high", 8, **HIGH))
    assert there.round().preemptions and there.ledger.clearing.keys() == {"high"}
    decision = there.round()
    assert not decision.preemptions and there.ledger.clearing == {}
    assert [(each.uid, each.reason) for each in decision.waiting] == [("high", "WaitingForCapacity")]
    there.tick(SPARED - 1)
    assert not there.round().preemptions
    there.unstoppable = set()
    there.tick(1)
    assert there.round().preemptions and there.ledger.spared == {}
    after(there)
    assert there.running == {"high": "n"}


def test_a_clock_that_was_set_back_spares_nobody_for_longer() -> None:
    spared = {"over": NOW, "goes on": NOW + SPARED, "ahead of us": NOW + SPARED + 1, "set back": NOW + 2 * SPARED + 1}
    assert no_longer_spared(spared, NOW) == ["over", "set back"]


def test_that_one_who_is_gone_could_not_be_stopped_is_forgotten() -> None:
    there = running(named("firm", 8, **LOW), on=cluster(node("n", 8)))
    there.unstoppable = {"firm"}
    there.add(named("high", 8, **HIGH))
    there.round()
    assert there.ledger.spared.keys() == {"firm"}
    there.runs["firm"] = 0
    there.tick(1)
    there.settle()
    assert there.ledger.spared == {} and there.running == {"high": "n"}
