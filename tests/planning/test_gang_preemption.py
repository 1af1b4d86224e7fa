"""Gangs give way as a whole, and for a gang others make way on as many nodes as it needs: the fewest and cheapest."""

from __future__ import annotations

from typing import Any

import pytest

from planning.model import NodeView, QuotaView, WorkloadView
from planning.places import pods_in
from tests.planning.builders import NOW, node, quota, workload
from tests.planning.cluster import Cluster

RACK = "rack"
LOW: dict[str, Any] = {"priority": "low"}
HIGH: dict[str, Any] = {"priority": "high"}


def named(uid: str, gpus: int = 1, pods: int = 1, namespace: str = "ns", **spec: Any) -> WorkloadView:
    return workload(uid, gpus, spec={"replicas": pods, **spec}, namespace=namespace, created=NOW - 100)


def on(name: str, gpus: int = 1, **spec: Any) -> WorkloadView:
    """A single one of low priority on that node; it is called after it."""
    return named(f"s-{name}", gpus, nodeSelector={"name": name}, **{**LOW, **spec})


def labelled(name: str, gpus: int = 8, rack: str = "") -> NodeView:
    return node(name, gpus, labels={"name": name, RACK: rack})


def there(nodes: list[NodeView], *running: WorkloadView, quotas: list[QuotaView] | None = None) -> Cluster:
    found = Cluster(nodes, quotas or [])
    found.add(*running)
    found.settle()
    assert found.running.keys() == {view.uid for view in running}
    found.now += 100
    return found


def after(cluster: Cluster, *views: WorkloadView) -> list[str]:
    """Who was stopped in the end."""
    cluster.add(*views)
    for _ in range(4):
        cluster.settle()
        cluster.check()
        cluster.tick(1)
    return sorted(uid for uid, _ in cluster.stopped)


def test_a_gang_gives_way_as_a_whole_and_all_of_its_room_is_given_away() -> None:
    cluster = there([labelled("a", 4), labelled("b", 4)], named("low", 4, 2, **LOW))
    cluster.add(named("high", 4, **HIGH))
    decision = cluster.round()
    (stop,) = decision.preemptions
    assert stop.uid == "low" and "its place on 2 nodes (a, b) goes to ns/high" in stop.message
    assert after(cluster, named("other", 4)) == ["low"]
    assert cluster.running.keys() == {"high", "other"} and cluster.ledger.turns["low"].attempt == 1


def test_for_a_gang_others_make_way_on_several_nodes() -> None:
    nodes = [labelled(name) for name in "abc"]
    cluster = there(nodes, *(on(name, 8) for name in "abc"))
    cluster.add(named("gang", 8, 2, **HIGH))
    decision = cluster.round()
    assert sorted(stop.uid for stop in decision.preemptions) == ["s-a", "s-b"]
    (told,) = [each for each in decision.waiting if each.uid == "gang"]
    assert told.reason == "Preempting" and told.message.startswith("room is being made on 2 nodes (a, b): ns/s-a, ns/s")
    assert after(cluster) == ["s-a", "s-b"] and cluster.running.keys() == {"gang", "s-c"}


def test_the_fewest_and_the_cheapest_go() -> None:
    nodes = [labelled(name, 4) for name in "abc"]
    small = [named(f"t{i}", 1, nodeSelector={"name": "a"}, **LOW) for i in range(4)]
    cluster = there(nodes, *small, on("b", 4), on("c", 4, priority=-300))
    assert after(cluster, named("gang", 4, 2, **HIGH)) == ["s-b", "s-c"]
    cluster = there(nodes, on("a", 3), on("b", 4), named("c", 4, nodeSelector={"name": "c"}))
    assert after(cluster, named("gang", 2, 2, **HIGH)) == ["s-a"], "one is enough, and of two the cheaper"


def test_one_gang_in_the_way_of_another_is_stopped_once() -> None:
    cluster = there([labelled(name, 4) for name in "abc"], named("low", 4, 3, **LOW))
    assert after(cluster, named("high", 2, 6, **HIGH)) == ["low"] and cluster.running.keys() == {"high"}


def test_never_for_nothing() -> None:
    nodes = [labelled(name, 4) for name in "ab"]
    cluster = there(nodes, on("a", 4), named("firm", 1, nodeSelector={"name": "b"}))
    assert after(cluster, named("gang", 4, 2, **HIGH)) == []


@pytest.mark.parametrize(("pods", "stopped"), [(2, ["s-c", "s-d"]), (3, [])])
def test_only_within_one_domain_where_it_must_be_in_one(pods: int, stopped: list[str]) -> None:
    nodes = [labelled("a", 4, "x"), labelled("b", 4, "x"), labelled("c", 4, "y"), labelled("d", 4, "y")]
    firm = named("firm", 4, nodeSelector={"name": "b"})
    cluster = there(nodes, on("a", 4), firm, on("c", 4), on("d", 4))
    assert after(cluster, named("gang", 4, pods, topology={"level": RACK}, **HIGH)) == stopped


def test_the_least_is_made_room_for() -> None:
    cluster = there([labelled(name, 4) for name in "abc"], *(on(name, 4) for name in "abc"))
    assert after(cluster, named("gang", 4, 3, minReplicas=2, **HIGH)) == ["s-a", "s-b"]
    assert sum(pods for _, pods in cluster.jobs["gang"].places) == 2


def test_what_it_may_have_of_its_quota_is_given_back_by_a_whole_gang() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=4, cohort="c"), quota("q", "b", gpus=4, cohort="c")]
    guest = named("guest", 2, 4, namespace="b", preemptible=True)
    cluster = there([labelled("n"), labelled("m")], guest, quotas=quotas)
    assert after(cluster, named("own", 2, 2, namespace="a")) == ["guest"]
    assert cluster.running.keys() == {"own"}


def test_of_two_for_whom_room_is_made_neither_takes_the_others() -> None:
    """The first could have either node, the second only one of them."""
    cluster = there([labelled("a", 8), labelled("b", 4)], on("a", 8), on("b", 4))
    first, second = named("first", 4, **HIGH), named("second", 8, **HIGH)
    cluster.add(first, second)
    decision = cluster.round()
    assert {stop.winner for stop in decision.preemptions} == {"first", "second"}
    assert cluster.ledger.rooms == {"first": (("b", 1),), "second": (("a", 1),)}
    cluster.tick(1)
    cluster.settle()
    assert cluster.running == {"first": "b", "second": "a"} and cluster.ledger.rooms == {}


def test_a_large_gang_may_stop_more_than_a_single_one() -> None:
    nodes = [labelled(f"n{i}", 8) for i in range(6)]
    small = [named(f"s{i}-{k}", 1, nodeSelector={"name": f"n{i}"}, **LOW) for i in range(6) for k in range(8)]
    cluster = there(nodes, *small)
    assert len(after(cluster, named("gang", 8, 6, **HIGH))) == 48 and "gang" in cluster.running


def test_a_gang_that_was_stopped_is_replaced_as_soon_as_its_pods_are_gone() -> None:
    cluster = there([labelled("n", 8)], named("gang", 2, 4, **LOW))
    cluster.add(named("high", 8, **HIGH))
    cluster.settle()
    cluster.tick(1)
    (withdrawal,) = cluster.round().withdrawals
    assert (withdrawal.uid, withdrawal.keep) == ("gang", False) and "gang" not in cluster.jobs


def test_gangs_that_may_grow_do_not_stop_each_other_in_turn() -> None:
    """Who stops another takes no more than it was entitled to: else the other could have it back, and so on."""
    granted = [quota("all"), quota("a", "a", gpus=4, cohort="all"), quota("b", "b", gpus=4, cohort="all")]
    cluster = Cluster([node("n", 8)], granted)
    elastic = {"replicas": 8, "minReplicas": 1, "preemptible": True}
    cluster.add(workload("a", 1, spec=elastic, namespace="a", created=NOW - 100))
    cluster.settle()
    cluster.now += 100
    cluster.add(workload("b", 1, spec=elastic, namespace="b", created=NOW - 50))
    for _ in range(40):
        cluster.settle()
        cluster.check()
        cluster.tick(30)
    assert [uid for uid, _ in cluster.stopped] == ["a"]
    assert {uid: pods_in(job.places) for uid, job in cluster.jobs.items()} == {"a": 4, "b": 4}
