"""Who is stopped for whom: the fewest, the cheapest, those whom one is entitled to, and nobody for nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.accelerators import AMD, SEAT
from planning.model import NodeView, QuotaView, Resources, WorkloadView
from tests.planning.builders import GIB, NOW, node, quota, round_of, snapshot, workload
from tests.planning.cluster import Cluster

LOW: dict[str, Any] = {"priority": "low"}
HIGH: dict[str, Any] = {"priority": "high"}
FREE: dict[str, Any] = {"preemptible": True}


def cluster(*nodes: NodeView, quotas: list[QuotaView] | None = None) -> Cluster:
    return Cluster(list(nodes), quotas or [])


def running(*views: WorkloadView, on: Cluster, for_: float = 100.0) -> Cluster:
    """The workloads run already, since so many seconds."""
    on.add(*views)
    on.settle()
    assert on.running.keys() >= {view.uid for view in views}
    on.now += for_
    return on


def named(uid: str, gpus: int = 1, namespace: str = "ns", age: float = 100.0, **spec: Any) -> WorkloadView:
    return workload(uid, gpus, spec=spec, namespace=namespace, created=NOW - age)


def after(on: Cluster, *views: WorkloadView) -> Cluster:
    """What became of it when these were added and all that is stopped is gone."""
    on.add(*views)
    for _ in range(4):
        on.settle()
        on.check()
        on.tick(1)
    return on


def test_a_higher_priority_stops_preemptible_work_of_its_tenant() -> None:
    there = running(named("low", 8, **LOW), on=cluster(node("n", 8)))
    there.add(named("high", 8, **HIGH))
    decision = there.round()
    assert [p.uid for p in decision.preemptions] == ["low"] and "goes to ns/high" in decision.preemptions[0].message
    (entry,) = decision.waiting
    assert (entry.uid, entry.reason) == ("high", "Preempting") and "ns/low must stop" in entry.message
    assert not there.round().preemptions, "it is being stopped already"
    there.tick(1)
    there.settle()
    assert there.running == {"high": "n"} and there.ledger.turns["low"].attempt == 1


@pytest.mark.parametrize(
    ("victim", "comes"),
    [
        ({"priority": "normal"}, HIGH),  # may not be preempted
        ({"priority": "low", "preemptible": False}, HIGH),
        ({"priority": "normal", "preemptible": True}, {"priority": "normal"}),  # no higher
        (LOW, {"priority": -101}),
    ],
)
def test_nobody_else_is_stopped(victim: dict[str, Any], comes: dict[str, Any]) -> None:
    there = running(named("a", 8, **victim), on=cluster(node("n", 8)))
    after(there, named("b", 8, **comes))
    assert there.running == {"a": "n"} and not there.stopped


def test_what_has_just_begun_is_left_alone_for_a_while() -> None:
    there = running(named("low", 8, **LOW), on=cluster(node("n", 8)), for_=20)
    there.add(named("high", 8, **HIGH))
    decision = there.round()
    assert not decision.preemptions and decision.wake_after == pytest.approx(40)
    there.tick(41)
    assert there.round().preemptions


def test_the_lowest_then_the_fewest_then_the_youngest() -> None:
    there = running(named("a", 4, priority=-300), named("b", 4, **LOW), on=cluster(node("n", 8)))
    after(there, named("c", 4, **HIGH))
    assert [uid for uid, _ in there.stopped] == ["a"]

    there = cluster(node("n", 4), node("z", 4))
    running(*(named(f"s{i}", 1, nodeSelector={"kubernetes.io/hostname": "n"}, **LOW) for i in range(4)), on=there)
    running(named("l", 4, **LOW), on=there)
    after(there, named("c", 4, **HIGH))
    assert [uid for uid, _ in there.stopped] == ["l"]

    there = running(named("old", 4, **LOW), on=cluster(node("n", 8)), for_=1000)
    running(named("new", 4, **LOW), on=there)
    after(there, named("c", 4, **HIGH))
    assert [uid for uid, _ in there.stopped] == ["new"]


def test_only_those_who_are_in_the_way() -> None:
    there = running(*(named(f"s{i}", size, **LOW) for i, size in enumerate((1, 2, 5))), on=cluster(node("n", 8)))
    after(there, named("c", 5, **HIGH))
    assert [uid for uid, _ in there.stopped] == ["s2"], "the cheaper ones are spared, for without them it does not fit"


def test_only_those_who_hold_gpus_of_the_same_resource() -> None:
    both = node("n", allocatable=Resources.counting([("", 2), (AMD, 2)], 64_000, 256 * GIB, 110))
    there = running(named("n1", 2, **LOW), named("a1", 2, gpuResource=AMD, **LOW), on=cluster(both))
    after(there, named("high", 1, gpuResource=AMD, **HIGH))
    assert [uid for uid, _ in there.stopped] == ["a1"] and there.running == {"n1": "n", "high": "n"}


AMD_ONLY = node("a", allocatable=Resources.counting([(AMD, 2)], 64_000, 256 * GIB, 110))
BOTH = Resources.counting([("", 8), (AMD, 2)], 64_000, 256 * GIB, 110)
# More than may be stopped for one; they are the cheapest, and hold nothing of what it lacks.
MANY_SEATS = [named(f"s{i}", gpuFraction=0.25, priority=-200) for i in range(80)]


@pytest.mark.parametrize("gang", [{}, {"replicas": 2}, {"replicas": 2, "minReplicas": 1}])
def test_cheap_ones_who_free_nothing_of_what_it_lacks_do_not_protect_the_others(gang: dict[str, Any]) -> None:
    both = Resources.counting([("", 8), (SEAT, 64)], 640_000, 2560 * GIB, 110)
    there = cluster(*(node(name, allocatable=both) for name in "nm"))
    running(*(named(f"low{i}", 8, **LOW) for i in range(2)), *MANY_SEATS, on=there)
    after(there, named("high", 8, **gang, **HIGH))
    assert "high" in there.running
    assert {uid for uid, _ in there.stopped} == ({"low0", "low1"} if gang == {"replicas": 2} else {"low0"})


def test_who_gives_back_some_of_each_that_is_lacking_is_stopped() -> None:
    cpu: dict[str, Any] = {"resources": {"requests": {"cpu": "6"}}}
    there = running(
        *(named(f"c{i}", gpuFraction=0.25, priority=-200, **cpu) for i in range(8)), named("g", 8, **LOW),
        on=cluster(node("n", allocatable=Resources.counting([("", 8), (SEAT, 64)], 64_000, 256 * GIB, 110))),
    )  # fmt: skip
    after(there, named("high", 8, resources={"requests": {"cpu": "24"}}, **HIGH))
    assert sorted(uid for uid, _ in there.stopped) == ["c0", "c1", "g"]
    assert "high" in there.running


@pytest.mark.parametrize(
    ("nodes", "first", "waits_alone"),
    [
        ((AMD_ONLY, node("n")), {"gpuResource": AMD}, True),
        ((node("n", allocatable=BOTH),), {"gpuResource": AMD}, True),
        ((node("m", 2), node("n")), {"nodeSelector": {"kubernetes.io/hostname": "m"}}, True),
        ((node("n", allocatable=BOTH),), {"gpuResource": AMD, "resources": {"requests": {"cpu": "60"}}}, False),
    ],
)
def test_who_cannot_use_what_is_kept_for_another_has_room_kept_too(
    nodes: tuple[NodeView, ...], first: dict[str, Any], waits_alone: bool
) -> None:
    """Else small ones of its own kind would overtake it for as long as that other one waits."""
    cpu: dict[str, Any] = {"resources": {"requests": {"cpu": "8"}}}
    there = cluster(*nodes)
    running(named("old", 1, age=500, **{k: first[k] for k in first if k != "resources"}), on=there)
    running(named("n1", 4, age=500, nodeSelector={"kubernetes.io/hostname": "n"}), on=there)
    there.add(named("first", 2, age=400, **first), named("big", 8, age=300, **cpu))
    there.settle()
    there.add(*(named(f"s{i}", 1, age=10 - i) for i in range(4)))
    there.settle()
    assert set(there.running) == {"old", "n1"} | (set() if waits_alone else {f"s{i}" for i in range(4)})


def test_what_is_kept_of_one_resource_is_kept_of_no_other() -> None:
    both = node("n", allocatable=Resources.counting([("", 2), (AMD, 2)], 64_000, 256 * GIB, 110))
    there = running(named("a1", 1, gpuResource=AMD), on=cluster(both))
    small = named("small", 1, gpuResource=AMD, age=9)
    after(there, named("large", 2, gpuResource=AMD, age=90), small, named("nvidia", 2, age=9))
    assert there.running == {"a1": "n", "nvidia": "n"}, "the other one is kept for the large one"


def test_never_for_nothing() -> None:
    there = running(named("firm", 4), named("low", 4, **LOW), on=cluster(node("n", 8)))
    after(there, named("c", 8, **HIGH))
    assert not there.stopped, "with the low one gone it would still not fit"


def test_who_has_room_made_for_it_goes_first_until_it_has_the_place() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=1, cohort="c"), quota("q", "b", gpus=0, cohort="c")]
    there = running(named("guest", 1, "b", **FREE), on=cluster(node("n", 8), quotas=quotas))
    # The older one of its tenant cannot be had, and would hide the younger one behind whoever holds less.
    there.add(named("too-much", 2, "a", age=50, **LOW), named("own", 1, "a", age=1, **LOW))
    assert [stop.uid for stop in there.round().preemptions] == ["guest"]
    assert not there.round().assignments and there.ledger.clearing.keys() == {"own"}
    there.tick(1)
    decision = there.round()
    assert [place.uid for place in decision.assignments] == ["own"]
    assert [each.uid for each in decision.withdrawals] == ["guest"] and there.ledger.clearing == {}
    after(there)
    assert there.running == {"own": "n"} and len(there.stopped) == 1


def test_if_it_goes_away_itself_they_queue_again_when_their_pods_are_gone() -> None:
    there = running(named("low", 8, **LOW), on=cluster(node("n", 8)))
    there.add(named("high", 8, **HIGH))
    there.settle()
    del there.workloads["high"]
    assert not there.round().withdrawals and there.ledger.clearing == {}
    assert not there.round().withdrawals, "its pods still end"
    there.tick(1)
    assert [each.reason for each in there.round().withdrawals] == ["Preempted"]
    there.settle()
    assert there.running == {"low": "n"}


def test_a_round_that_is_cut_short_forgets_nobody_for_whom_room_is_made() -> None:
    there = running(named("low", 8, **LOW), on=cluster(node("n", 8)))
    there.add(named("high", 8, **HIGH))
    there.round()
    seen = snapshot(there.nodes, list(there.workloads.values()), jobs=list(there.jobs.values()))
    assert round_of(seen, there.ledger, limit=0).cleared == []


def test_one_victim_makes_way_for_one() -> None:
    there = running(named("low", 8, **LOW), on=cluster(node("n", 8)))
    there.add(named("b", 8, age=2, **HIGH), named("c", 8, age=1, **HIGH))
    assert [stop.uid for stop in there.round().preemptions] == ["low"]
    there.settle()
    assert len(there.stopped) == 1


def test_what_is_being_cleared_is_given_to_nobody_else() -> None:
    there = running(named("low", 6, **LOW), on=cluster(node("n", 8)))
    there.add(named("high", 8, **HIGH), named("small", 1, age=1, **FREE))
    assert there.round().preemptions
    assert "small" not in there.running
    after(there)
    assert there.running == {"high": "n"}


def test_who_stays_within_its_nominal_stops_who_borrows() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=4, cohort="c"), quota("q", "b", gpus=4, cohort="c")]
    there = running(*(named(f"b{i}", 2, "b", **FREE) for i in range(4)), on=cluster(node("n", 8), quotas=quotas))
    after(there, named("a", 3, "a"))
    assert len(there.stopped) == 2 and there.running["a"] == "n"
    after(there, named("a2", 2, "a", **FREE))
    assert len(there.stopped) == 2 and "a2" not in there.running, "it would have to borrow itself"


def test_who_borrows_is_never_stopped_below_its_nominal() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=6, cohort="c"), quota("q", "b", gpus=2, cohort="c")]
    there = running(*(named(f"b{i}", 1, "b", **FREE) for i in range(8)), on=cluster(node("n", 8), quotas=quotas))
    after(there, named("a", 6, "a"))
    assert len(there.stopped) == 6 and there.running["a"] == "n"
    assert sum(uid.startswith("b") for uid in there.running) == 2


def test_two_of_a_tenant_do_not_each_count_on_the_same_nominal() -> None:
    quotas = [quota("c", gpus=1), quota("p", "a", gpus=2, cohort="c"), quota("q", "b", gpus=1, cohort="c")]
    there = running(*(named(f"b{i}", 1, "b", **FREE) for i in range(4)), on=cluster(node("n", 4), quotas=quotas))
    there.add(named("a1", 2, "a", age=2), named("a2", 1, "a", age=1, **FREE))
    assert len(there.round().preemptions) == 2


def test_who_would_borrow_stops_nobody_of_another_tenant() -> None:
    quotas = [quota("c", gpus=4), quota("p", "a", gpus=0, cohort="c"), quota("q", "b", gpus=0, cohort="c")]
    there = running(*(named(f"b{i}", 1, "b", **FREE) for i in range(4)), on=cluster(node("n", 4), quotas=quotas))
    after(there, named("a", 1, "a", priority="high", preemptible=True))
    assert not there.stopped


def test_only_those_of_its_cohort_are_stopped_for_its_quota() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=2, cohort="c"), quota("q", "b", gpus=0, cohort="c")]
    quotas += [quota("d"), quota("r", "0", gpus=1, cohort="d"), quota("s", "y", gpus=1, cohort="d")]
    there = cluster(node("n", 8), quotas=quotas)
    running(named("stranger", 2, "0", **FREE), named("guest", 2, "b", age=99, **FREE), on=there)
    after(there, named("a", 2, "a"))
    assert [uid for uid, _ in there.stopped] == ["guest"]


def test_room_is_kept_for_the_first_who_finds_none() -> None:
    there = running(named("a", 6), on=cluster(node("n", 8)))
    there.runs["a"] = 150
    there.add(named("large", 4, age=50), named("small", 1, age=1))
    told = {entry.uid: entry.message for entry in there.round().waiting}
    assert there.running == {"a": "n"} and "is kept for ns/large, which is before it" in told["small"]
    there.tick(100)
    there.settle()
    assert there.running == {"large": "n", "small": "n"}


def test_preemptible_work_uses_what_is_kept_and_makes_way() -> None:
    for asked, stopped in ((4, []), (8, ["small"])):
        there = running(named("a", 6), on=cluster(node("n", 8)))
        there.runs["a"] = 300
        after(there, named("large", asked, age=50), named("small", 2, age=1, **FREE))
        assert there.running == {"a": "n", "small": "n"} and there.jobs["small"].backfill == 0
        there.tick(250)
        after(there)
        assert "large" in there.running and [uid for uid, _ in there.stopped] == stopped


def test_who_ends_in_time_uses_what_is_kept() -> None:
    there = running(named("a", 4, activeDeadlineSeconds=500), on=cluster(node("n", 8)))
    short, long = (
        named("short", 2, age=2, activeDeadlineSeconds=300),
        named("long", 2, age=1, activeDeadlineSeconds=900),
    )
    after(there, named("large", 8, age=50), short, long)
    assert there.running == {"a": "n", "short": "n"} and there.jobs["short"].backfill == NOW + 500


def test_room_beside_what_is_kept_is_everybodys() -> None:
    there = running(named("a", 4, activeDeadlineSeconds=500), on=cluster(node("n", 8)))
    after(there, named("large", 6, age=50), named("small", 2, age=2), named("more", 1, age=1))
    assert there.running == {"a": "n", "small": "n"}, "4 that come free and 2 that are kept make 6"


def test_who_uses_what_is_kept_leaves_less_for_the_next() -> None:
    there = running(named("a", 4, activeDeadlineSeconds=500), on=cluster(node("n", 8)))
    there.add(named("large", 6, age=50), named("free", 3, age=2, **FREE), named("small", 2, age=1))
    there.round()
    there.check()
    assert there.running == {"a": "n", "free": "n"}


def test_who_is_behind_the_first_of_its_tenant_stops_nobody_for_it() -> None:
    quotas = [quota("q", "a", gpus=6)]
    there = cluster(node("n", 8), quotas=quotas)
    running(named("firm", 5, "a"), named("low", 1, "a", **LOW), on=there)
    after(there, named("first", 2, "a", age=9, **HIGH), named("second", 1, "a", age=8))
    assert not there.stopped


def test_the_quota_of_the_first_is_kept_too_and_had_back() -> None:
    quotas = [quota("q", "a", gpus=8)]
    there = running(named("r", 5, "a"), on=cluster(node("n", 8), node("m", 8), quotas=quotas))
    there.runs["r"] = 300
    after(there, named("large", 8, "a", age=50), named("small", 2, "a", age=1, **FREE))
    assert there.running.keys() == {"r", "small"} and there.jobs["small"].backfill == 0
    there.tick(250)
    after(there)
    assert there.running.keys() == {"large"} and [uid for uid, _ in there.stopped] == ["small"]


# --- what nobody gets by being clever, or by bad luck ---------------------------------------------------------------


def edited(on: Cluster, uid: str, **spec: Any) -> None:
    """The workload's spec is edited while it runs or waits; a deadline reaches its Job."""
    view = on.workloads[uid]
    assert view.spec is not None
    changed = named(uid, spec.pop("gpus", view.spec.gpu_count), view.namespace, **spec)
    on.workloads[uid] = replace(changed, created=view.created, generation=view.generation + 1)
    if uid in on.jobs and "activeDeadlineSeconds" in spec:
        on.jobs[uid] = replace(on.jobs[uid], active_deadline=spec["activeDeadlineSeconds"])


def test_what_was_borrowed_cannot_be_kept_by_an_edit() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=8, cohort="c"), quota("q", "b", gpus=0, cohort="c")]
    there = running(named("guest", 8, "b", **FREE), on=cluster(node("n", 8), quotas=quotas))
    edited(there, "guest", preemptible=False)
    after(there, named("owner", 8, "a"))
    assert there.running == {"owner": "n"}


def test_a_deadline_that_is_extended_does_not_keep_what_is_kept_for_another() -> None:
    there = running(named("a", 4, activeDeadlineSeconds=500), on=cluster(node("n", 8)))
    there.runs["a"] = 450
    after(there, named("large", 8, age=50), named("short", 2, age=2, activeDeadlineSeconds=300))
    assert there.running == {"a": "n", "short": "n"}
    edited(there, "short", activeDeadlineSeconds=90_000)
    there.tick(390)
    there.settle()
    assert there.running == {"short": "n"}, "it was promised its place until then"
    there.tick(200)
    after(there)
    assert there.running == {"large": "n"}


def test_a_stream_of_short_preemptible_work_does_not_keep_the_first_waiting() -> None:
    there = running(named("a", 6), on=cluster(node("n", 8)), for_=0)
    there.runs["a"] = 120
    there.add(named("large", 8, age=50))
    for i in range(40):
        there.add(named(f"s{i}", 1, age=-i, **FREE), run=50.0)
        there.settle()
        there.check()
        there.tick(10)
        if "large" in there.running:
            break
    assert there.now - NOW <= 200


def test_a_large_borrower_is_not_starved_by_small_ones_of_its_cohort() -> None:
    quotas = [quota("c", gpus=8), quota("p", "a", gpus=0, cohort="c"), quota("q", "b", gpus=0, cohort="c")]
    there = running(named("b0", 1, "b", **FREE), on=cluster(node("n", 8), node("m", 8), quotas=quotas))
    there.add(named("large", 8, "a", age=90, **FREE))
    for i in range(40):
        there.add(named(f"b{i + 1}", 1, "b", age=-i, **FREE), run=70.0)
        there.runs["b0"] = 150.0
        there.settle()
        there.tick(10)
        if "large" in there.running:
            break
    assert "large" in there.running


def test_somebody_who_waits_in_front_and_may_stop_nobody_disables_no_reclaim() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=8, cohort="c"), quota("q", "b", gpus=0, cohort="c")]
    there = running(named("guest", 8, "b", **FREE), on=cluster(node("n", 8), quotas=quotas))
    after(there, named("stranger", 1, "elsewhere", age=99), named("owner", 8, "a", age=1))
    assert there.running == {"owner": "n"}


def test_many_who_search_in_vain_leave_others_their_search() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=8, cohort="c"), quota("q", "b", gpus=0, cohort="c")]
    there = running(named("guest", 8, "b", **FREE), on=cluster(node("n", 8), node("m", 1), quotas=quotas))
    running(named("x", 1, "elsewhere", nodeSelector={"kubernetes.io/hostname": "m"}), on=there)
    elsewhere: dict[str, Any] = {"nodeSelector": {"kubernetes.io/hostname": "m"}}
    there.add(*(named(f"s{i}", 1, "elsewhere", priority=i, **elsewhere) for i in range(100)))
    after(there, named("owner", 8, "a", age=1))
    assert "owner" in there.running


def test_nobody_waits_for_what_is_stuck() -> None:
    there = cluster(node("n", 8), node("m", 8))
    running(named("stuck", 8, nodeSelector={"kubernetes.io/hostname": "n"}), named("low", 8, **LOW), on=there)
    (name,) = [key for key, pod in there.pods.items() if pod.workload_uid == "stuck"]
    there.pods[name] = replace(there.pods[name], terminating=True, gone_by=there.now - 3600)
    after(there, named("high", 8, **HIGH))
    assert there.running["high"] == "m" and [uid for uid, _ in there.stopped] == ["low"]


def test_no_more_are_stopped_for_a_quota_than_it_needs() -> None:
    quotas = [quota("q", "a", gpus=9)]
    there = cluster(node("n", 8), node("m", 8), quotas=quotas)
    running(named("l1", 1, "a", **LOW), named("l8", 8, "a", **LOW), on=there)
    after(there, named("high", 8, "a", **HIGH))
    assert [uid for uid, _ in there.stopped] == ["l8"]
    there = cluster(node("n", 4), node("m", 4), quotas=[quota("q", "a", gpus=8)])
    pinned: dict[str, Any] = {"nodeSelector": {"kubernetes.io/hostname": "m"}}
    running(named("la", 4, "a", nodeSelector={"kubernetes.io/hostname": "n"}, **LOW), on=there)
    running(named("lb", 4, "a", **pinned, **LOW), on=there)
    after(there, named("high", 4, "a", **pinned, **HIGH))
    assert [uid for uid, _ in there.stopped] == ["lb"]


def test_a_request_that_is_edited_loses_what_was_cleared_for_it() -> None:
    there = running(*(named(f"l{i}", 1, priority=-200) for i in range(8)), on=cluster(node("n", 8)))
    there.add(named("sly", 1, priority=-50))
    assert len(there.round().preemptions) == 1
    edited(there, "sly", gpus=8, priority=-50)
    there.add(named("high", 8, **HIGH))
    after(there)
    assert there.running == {"high": "n"}


def test_what_no_node_could_hold_keeps_no_quota() -> None:
    there = running(named("r", 1, "a"), on=cluster(node("n", 8), node("m", 8), quotas=[quota("q", "a", gpus=8)]))
    never = named("never", 8, "a", nodeSelector={"no": "where"})
    there.add(never, named("small", 1, "a", age=1))
    decision = there.round()
    assert [each.reason for each in decision.verdicts] == ["NoSuitableNode"] and "small" in there.running


def test_what_a_job_says_of_itself_does_not_protect_it() -> None:
    there = running(named("low", 8, **LOW), on=cluster(node("n", 8)))
    there.jobs["low"] = replace(there.jobs["low"], requests=replace(there.jobs["low"].requests, gpus=0))
    after(there, named("high", 8, **HIGH))
    assert there.running == {"high": "n"}


def test_while_somebody_is_being_stopped_the_ledger_looks_again() -> None:
    there = running(named("low", 8, **LOW), on=cluster(node("n", 8)))
    there.add(named("high", 8, **HIGH))
    there.round()
    del there.workloads["high"]
    assert there.round().queued == 1
