"""A gang gets all of its places or none, near to each other where it must; and is told what it lacks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crds.gpuworkload import GPUWorkloadSpec
from planning.capacity import Room
from planning.filters import slots
from planning.floor import Floor, Wish
from planning.gangs import explain_now, kept_for, never, place
from planning.jobs import shape_of
from planning.memory import Memory
from planning.model import Assignment, Avoided, Gap, Ledger, NodeView, Resources, Turn, WorkloadView
from planning.places import Gang, gang_of, pods_in
from planning.strategies import StrategyError, installed
from tests.planning.builders import NOW, SETTINGS, node, placed, quota, round_of, snapshot, taint, workload
from tests.planning.cluster import Cluster

RACK = "example.com/rack"
NEAR: dict[str, Any] = {"level": RACK}
NEARBY: dict[str, Any] = {"level": RACK, "mode": "Preferred"}


def gang(uid: str, pods: int, gpus: int = 1, **spec: Any) -> WorkloadView:
    return workload(uid, gpus, spec={"replicas": pods, **spec})


def racked(name: str, rack: str, gpus: int = 8) -> NodeView:
    return node(name, gpus, labels={"kubernetes.io/hostname": name, **({RACK: rack} if rack else {})})


def places_of(nodes: list[NodeView], view: WorkloadView, ledger: Ledger | None = None) -> dict[str, int]:
    """Where the only workload's pods go; nowhere if it waits."""
    found = round_of(snapshot(nodes, [view]), ledger).assignments
    return dict(found[0].places) if found else {}


def told(nodes: list[NodeView], view: WorkloadView) -> tuple[str, str]:
    """Why the only workload waits, or cannot run at all: reason and message."""
    decision = round_of(snapshot(nodes, [view]))
    assert not decision.assignments
    said = [(entry.reason, entry.message) for entry in decision.waiting]
    said += [(entry.reason, entry.message) for entry in decision.verdicts]
    assert len(said) == 1
    return said[0]


def wish_of(view: WorkloadView) -> Wish:
    assert view.spec is not None
    return Wish(view, Turn(), shape_of(view.spec, SETTINGS), "leastLoaded", 3, gang_of(view.spec))


def floor_of(nodes: list[NodeView], left: dict[str, int]) -> Floor:
    rooms = {n.name: Room(left[n.name], 64_000, 2**38, 110) for n in nodes}
    return Floor(snapshot(nodes), SETTINGS, rooms, Memory())


# --- all or nothing -------------------------------------------------------------------------------------------------


@st.composite
def asked(draw: st.DrawFn) -> Gang:
    pods = draw(st.integers(1, 12))
    level = draw(st.sampled_from(["", RACK]))
    return Gang(pods, draw(st.integers(1, pods)), level, bool(level) and draw(st.booleans()))


FLEET = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.sampled_from(["", "x", "y", "z"]), st.booleans()), max_size=8
)


@settings(max_examples=300)
@given(asked(), st.integers(1, 8), FLEET, st.sampled_from(installed()), st.data())
def test_all_find_a_place_or_nothing_is_taken(
    it: Gang, gpus: int, fleet: list[tuple[int, int, str, bool]], strategy: str, data: st.DataObject
) -> None:
    nodes = [
        node(f"n{i}", whole, labels={RACK: rack} if rack else {}, unschedulable=off)
        for i, (whole, _, rack, off) in enumerate(fleet)
    ]
    before = {n.name: min(free, n.allocatable.gpus) for n, (_, free, _, _) in zip(nodes, fleet, strict=True)}
    floor, wish = floor_of(nodes, before), wish_of(workload("a", gpus))
    most = data.draw(st.integers(it.least, it.pods))
    avoided = data.draw(st.lists(st.sampled_from([n.name for n in nodes]), max_size=2)) if nodes else []
    found = place(floor, wish, it, most, strategy, 7, avoided)

    taken = {name: before[name] - floor.left[name].gpus for name in before}
    assert taken == {name: gpus * dict(found).get(name, 0) for name in before}
    holds = {
        n.name: slots(Resources(gpus), Resources(before[n.name]))
        for n in nodes if not n.unschedulable and n.name not in avoided
    }  # fmt: skip
    sums: Counter[str] = Counter()
    for n in nodes:
        sums[n.labels.get(RACK, "") if it.level else ""] += holds.get(n.name, 0)
    able = max((sums[rack] for rack in sums if rack), default=0) if it.required else sums.total()
    if able < it.least:
        assert found == ()
        return
    assert pods_in(found) == min(most, able), "as many as may and can"
    racks = Counter(dict.fromkeys(sums, 0))
    for name, count in found:
        assert name not in avoided and count <= holds[name]
        racks[next(n.labels.get(RACK, "") for n in nodes if n.name == name)] += count
    if it.level:
        used = [rack for rack, count in racks.items() if count]
        largest = sorted((sums[rack] for rack in sums if rack), reverse=True)
        fewest = next((k for k in range(1, len(largest) + 1) if sum(largest[:k]) >= pods_in(found)), len(largest) + 1)
        assert len(used) <= fewest and not (it.required and "" in used), "in as few domains as can be"
    # What the fleet knows is what the floor knows: the same room is there to be given afterwards.
    for n in nodes:
        if not n.unschedulable:
            alone = workload("b", 1, spec={"nodeSelector": n.labels}) if n.labels else workload("b", 1)
            left = floor.left[n.name].gpus
            again = place(floor, wish_of(alone), Gang(left, left), left, strategy, 7, [m.name for m in nodes if m != n])
            assert pods_in(again) == left


def test_a_strategy_that_fails_half_way_leaves_nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("m", 4), node("n", 4)]
    floor, wish = floor_of(nodes, {"m": 4, "n": 4}), wish_of(workload("a", 1))
    put, calls = floor.put, [0]

    def fails(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise StrategyError("it did not rank node n")
        return put(*args)

    monkeypatch.setattr(floor, "put", fails)
    with pytest.raises(StrategyError):
        place(floor, wish, Gang(6, 6), 6, "leastLoaded", 7, ())
    assert [floor.left[name].gpus for name in "mn"] == [4, 4]
    monkeypatch.undo()
    assert pods_in(place(floor, wish, Gang(8, 8), 8, "leastLoaded", 7, ())) == 8


def test_consecutive_pods_share_nodes_and_domains() -> None:
    nodes = [racked("a", "y", 2), racked("b", "x", 2), racked("c", "y", 2), racked("d", "x", 3)]
    (found,) = round_of(snapshot(nodes, [gang("g", 8, topology=NEARBY)])).assignments
    assert found.places == (("b", 2), ("d", 3), ("a", 2), ("c", 1)) or found.places == (
        ("b", 2), ("d", 3), ("a", 1), ("c", 2),
    )  # fmt: skip
    assert found.node == "b" and found.requests.gpus == 1


# --- in a round -----------------------------------------------------------------------------------------------------


def test_the_smallest_domain_that_takes_all_of_it() -> None:
    nodes = [racked("a", "x", 8), racked("b", "y", 4), racked("c", "z", 2)]
    assert places_of(nodes, gang("g", 4, topology=NEAR)) == {"b": 4}
    assert places_of(nodes, gang("g", 4, topology=NEARBY)) == {"b": 4}
    assert places_of(nodes, gang("g", 10, topology=NEARBY)) == {"a": 8, "c": 2}
    assert places_of([*nodes, racked("d", "", 8)], gang("g", 16, topology=NEARBY)) == {"a": 8, "b": 4, "c": 2, "d": 2}
    labelled = node("d", 8, labels={RACK: ""})
    assert places_of([labelled], gang("g", 4, topology=NEARBY)) == {"d": 4}


def test_what_can_never_run_is_told_so_with_numbers() -> None:
    full = [node("a", 8), node("b", 8), node("c", 4)]
    assert told(full, gang("g", 10, 8)) == (
        "NoSuitableNode", "needs 10 pods with 8 GPUs each; all nodes together could hold 2 even if empty",
    )  # fmt: skip
    assert told(full, gang("g", 10, 8, minReplicas=3))[1].startswith("needs at least 3 of 10 pods with 8 GPUs each;")
    assert told([node("c", 4)], gang("g", 2, 8))[1] == (
        "of 2 pods with 8 GPUs each not one finds a place: no node has 8 GPUs; the largest has 4"
    )
    racks = [racked("a", "x"), racked("b", "y"), racked("c", "y")]
    assert told(racks, gang("g", 3, 8, topology=NEAR))[1] == (
        "needs 3 pods with 8 GPUs each in one rack; the largest, y, could hold 2 even if empty"
    )
    assert told(full, gang("g", 1 + 1, 8, topology=NEAR))[1] == (
        "needs 2 pods with 8 GPUs each in one rack; no node that could hold one has the label example.com/rack"
    )
    assert places_of(racks, gang("g", 3, 8, topology=NEARBY)) == {"a": 1, "b": 1, "c": 1}
    # A node that is away for now may come back.
    assert told([node("a"), node("b", ready=False)], gang("g", 2, 8))[0] == "WaitingForCapacity"
    unreported = node("b", 0, ready=False, allocatable=Resources(0, 0, 0, 0), gaps=(Gap(8, "none is registered"),))
    assert told([node("a"), unreported], gang("g", 2, 8))[0] == "WaitingForCapacity"


def test_who_waits_is_told_how_many_would_fit() -> None:
    nodes = [node(f"n{i}", unschedulable=i > 6) for i in range(10)]
    assert told(nodes, gang("g", 10, 8)) == ("WaitingForCapacity", "needs 10 pods with 8 GPUs each: 7 would fit now")
    racks = [racked("a", "x"), racked("b", "y"), node("c", labels={RACK: "y"}, taints=(taint("node.kubernetes.io/x"),))]
    assert told(racks, gang("g", 2, 8, topology=NEAR))[1] == (
        "needs 2 pods with 8 GPUs each in one rack: 1 would fit now in x, 2 in all"
    )


def test_fewer_start_where_that_is_enough() -> None:
    assert places_of([node("a", 4)], gang("g", 6, minReplicas=3)) == {"a": 4}
    assert told([node("a", 4), node("b", unschedulable=True)], gang("g", 6, minReplicas=5))[0] == "WaitingForCapacity"


def test_a_node_where_it_was_withdrawn_goes_last() -> None:
    nodes = [node("a", 4), node("b", 4)]
    ledger = Ledger(avoided={"g": Avoided(1, ("a",))})
    assert places_of(nodes, gang("g", 4), ledger) == {"b": 4}
    decision = round_of(snapshot(nodes, [gang("g", 6)]), ledger)
    assert pods_in(decision.assignments[0].places) == 6 and decision.reconsidered == ["g"]


@pytest.mark.parametrize(("nominal", "pods"), [(4, 4), (7, 6), (3, 3), (2, 0)])
def test_its_quota_counts_for_the_whole_of_it(nominal: int, pods: int) -> None:
    seen = snapshot([node("a", 8)], [gang("g", 6, minReplicas=3)], quotas=[quota("q", "ns", gpus=nominal)])
    decision = round_of(seen)
    if not pods:
        (verdict,) = decision.waiting
        assert verdict.reason == "WaitingForQuota" and "needs 3 GPUs" in verdict.message
        return
    (found,) = decision.assignments
    assert pods_in(found.places) == pods


def test_two_in_one_round_share_no_place() -> None:
    there = Cluster([node("a", 4), node("b", 4)])
    there.add(gang("g", 5), gang("h", 4), workload("s", 2))
    there.settle()
    there.check()
    assert there.running.keys() == {"g"}, "what is left is kept for the second"
    del there.workloads["h"]
    there.settle()
    assert there.running.keys() == {"g", "s"}


def test_a_round_tells_only_as_many_places_as_a_history_takes() -> None:
    names = [f"node-{'x' * 60}-{i:04}" for i in range(600)]
    nodes = [node(name, 3) for name in names]
    views = [gang(f"g{i}", 500, minReplicas=1) for i in range(3)]
    decision = round_of(snapshot(nodes, views))
    assert len(decision.assignments) == 2 and decision.more and decision.reasons == {"NextRound": 1}
    promised = {f"p{i}": _promise(f"p{i}", names[:500]) for i in range(12)}
    later = round_of(snapshot([*nodes, node("z", 8)], [gang("g", 4), workload("s")]), Ledger(in_flight=promised))
    assert placed(later).keys() == {"s"} and not later.more, "more is promised when some of it was seen"


def _promise(uid: str, names: list[str]) -> Assignment:
    places = tuple((name, 1) for name in names)
    return Assignment(uid, "ns", uid, 1, 1, Turn(), names[0], Resources(0), "random", uid, places=places)


# --- the head of the queue ------------------------------------------------------------------------------------------


def test_room_is_kept_on_as_many_nodes_as_it_needs() -> None:
    there = Cluster([node("a", 4), node("b", 4), node("c", 4)])
    there.add(workload("x", 4, spec={"activeDeadlineSeconds": 100}), run=90.0)
    there.settle()
    there.add(gang("g", 3, 4), workload("s", 1, created=NOW), workload("t", 1, created=NOW))
    there.settle()
    assert there.running.keys() == {"x"}, "what is free on the others is kept"
    (waits,) = [w for w in round_of(_seen(there)).waiting if w.uid == "s"]
    assert "kept for ns/g" in waits.message
    there.tick(95)
    there.settle()
    assert there.running.keys() == {"g"}


def _seen(there: Cluster) -> Any:
    return snapshot(
        there.nodes, list(there.workloads.values()), jobs=list(there.jobs.values()), pods=list(there.pods.values())
    )


def test_it_is_kept_where_it_comes_free_first() -> None:
    nodes = [racked("a", "x", 2), racked("b", "x", 2), racked("c", "y", 2), racked("d", "y", 2)]
    floor = floor_of(nodes, {"a": 2, "b": 0, "c": 0, "d": 0})
    held = Resources(2, 0, 0, 1)
    releases = {"b": [(300.0, held)], "c": [(100.0, held)], "d": [(200.0, held)]}
    it = Gang(2, 2, RACK, required=True)
    kept = kept_for(wish_of(workload("g", 2)), it, floor, releases)
    assert [(k.node, k.amount.gpus, k.start) for k in kept] == [("c", 0, 200.0), ("d", 0, 200.0)]
    anywhere = kept_for(wish_of(workload("g", 2)), Gang(2, 2), floor, releases)
    assert [(k.node, k.amount.gpus, k.start) for k in anywhere] == [("a", 2, 100.0), ("c", 0, 100.0)]
    unknown = kept_for(wish_of(workload("g", 2)), Gang(4, 4), floor, {**releases, "b": [(float("inf"), held)]})
    assert {(k.node, k.start) for k in unknown} == {(name, None) for name in "abcd"}


def test_what_never_fits_keeps_nothing() -> None:
    floor = floor_of([node("a", 2)], {"a": 0})
    assert kept_for(wish_of(workload("g", 2)), Gang(2, 2), floor, {}) == []
    assert kept_for(wish_of(workload("g", 2)), Gang(1, 1, RACK, required=True), floor, {}) == []
    (kept,) = kept_for(wish_of(workload("g", 2)), Gang(1, 1), floor, {})
    assert (kept.node, kept.amount.gpus, kept.start) == ("a", 2, None), "what holds it was promised in this round"


def test_explanations_count_what_is_there() -> None:
    nodes = [node("a", 4), node("b", 4)]
    wish = wish_of(workload("g", 3))
    assert never(nodes, wish.shape, Gang(2, 2)) == ""
    text = explain_now(floor_of(nodes, {"a": 4, "b": 2}), wish.shape, Gang(2, 2))
    assert text == "needs 2 pods with 3 GPUs each: 1 would fit now"


# --- what may be asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"replicas": 0}, "spec.replicas: must be at least 1, not 0"),
        ({"replicas": 513}, "spec.replicas: must be at most 512, not 513"),
        ({"replicas": 2, "minReplicas": 3}, "spec: minReplicas must be at most replicas (2), not 3"),
        ({"minReplicas": 2}, "spec: minReplicas must be at most replicas (1), not 2"),
        ({"replicas": 2, "topology": {}}, "spec.topology.level: is required"),
        ({"replicas": 2, "topology": {"level": "-"}}, "spec.topology.level: is not a label key"),
        ({"replicas": 2, "topology": {"level": "a", "mode": "Near"}}, "spec.topology.mode: must be 'Required' or"),
    ],
)
def test_a_wrong_gang_says_where_and_why(spec: dict[str, Any], message: str) -> None:
    parsed, refused = GPUWorkloadSpec.parse({"modelName": "m", "gpuCount": 1, **spec})
    assert parsed is None and refused.startswith(message)


def test_one_pod_is_no_gang_whatever_is_said_of_its_topology() -> None:
    view = workload("a", 1, spec={"replicas": 1, "minReplicas": 1, "topology": NEAR})
    (found,) = round_of(snapshot([node("n")], [view])).assignments
    assert found.places == () and found.node == "n"
