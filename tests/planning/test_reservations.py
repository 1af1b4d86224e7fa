"""GPUReservations in rounds: which nodes they get, whom they keep off, to whom they are lent, and that they are had on
time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.accelerators import AMD, NVIDIA, SEAT
from planning.model import NodeView, Resources, WorkloadView
from planning.windows import ReservationView
from tests.planning.builders import (
    GIB,
    NOW,
    job,
    node,
    placed,
    pod,
    quota,
    reservation,
    round_of,
    snapshot,
    workload,
)
from tests.planning.cluster import Cluster

FREE: dict[str, Any] = {"preemptible": True}
HOUR = 3600.0


def cluster(*nodes: NodeView, keeps: list[ReservationView]) -> Cluster:
    return Cluster(list(nodes), reservations=keeps)


def named(uid: str, gpus: int = 1, namespace: str = "ns", age: float = 100.0, **spec: Any) -> WorkloadView:
    return workload(uid, gpus, spec=spec, namespace=namespace, created=NOW - age)


def holder(uid: str, gpus: int = 1, of: str = "r", **spec: Any) -> WorkloadView:
    return named(uid, gpus, reservation=of, **spec)


def chosen(on: Cluster, name: str = "r") -> dict[str, int]:
    return on.ledger.reserved.get(f"uid-{name}", {})


def reasons(on: Cluster) -> dict[str, tuple[str, str]]:
    return {entry.uid: (entry.reason, entry.message) for entry in on.round().waiting}


def later(on: Cluster, seconds: float) -> Cluster:
    """So long after `NOW`, with all that is stopped gone."""
    on.tick(NOW + seconds - on.now)
    on.settle()
    on.tick(0)
    on.settle()
    on.check()
    return on


# --- whom it keeps off ----------------------------------------------------------------------------------------------


def test_firm_work_is_kept_off_from_its_creation_on_and_told() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("firm", 1), named("long", 1, activeDeadlineSeconds=3590))
    decision = there.round()
    told = {entry.uid: entry.message for entry in decision.waiting}
    assert told.keys() == {"firm", "long"} and not decision.assignments
    assert "what is free on node a is kept for GPUReservation r from 1970-01-12T14:46:40Z on" in told["firm"]


def test_firm_work_that_ends_in_time_may_have_it() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("short", 8, activeDeadlineSeconds=3500))
    (place,) = there.round().assignments
    assert place.backfill == NOW + HOUR - 60 and chosen(there) == {"a": 8}
    there.settle()
    assert chosen(there) == {"a": 8}, "that it is there changes nothing"


def test_beside_it_there_is_room_for_all() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=5, start=HOUR, end=2 * HOUR)])
    there.add(*(named(f"w{i}", 1) for i in range(5)))
    there.settle()
    assert len(there.running) == 3


def test_who_uses_it_leaves_the_rest_to_others() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("lent", 4, **FREE))
    there.settle()
    there.add(named("firm", 4))
    there.settle()
    assert there.running == {"lent": "a", "firm": "a"}, "the one is on the reserved GPUs, the other beside them"


def test_the_part_of_cpu_that_goes_with_its_gpus_is_kept_too() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("hungry", 4, resources={"requests": {"cpu": "40"}}), named("modest", 4, age=1))
    there.settle()
    assert there.running == {"modest": "a"}


def test_seats_on_a_node_take_nothing_of_what_goes_with_its_gpus() -> None:
    """They lie on GPUs that count already: firm work on them leaves the CPU that whoever has the window will need."""
    shared = node("a", allocatable=Resources.counting([("", 8), (SEAT, 64)], 64_000, 256 * GIB, 110))
    there = cluster(shared, keeps=[reservation("r", gpus=8, start=600, end=HOUR)])
    there.add(*(named(f"seat-{i}", gpuFraction=0.5, resources={"requests": {"cpu": "8"}}) for i in range(8)))
    there.add(holder("mine", 8, resources={"requests": {"cpu": "32"}}))
    assert later(there, 700).running == {"mine": "a"}
    halved = cluster(shared, keeps=[reservation("r", gpus=4, start=600, end=HOUR)])
    halved.add(*(named(f"seat-{i}", gpuFraction=0.5, resources={"requests": {"cpu": "8"}}) for i in range(8)))
    halved.settle()
    assert len(halved.running) == 4, "the other half of the CPU is theirs"


def test_nobody_is_stopped_for_what_is_reserved() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("lent", 8, priority="low"))
    there.settle()
    there.now += 200
    there.add(named("high", 8, priority="high"))
    there.settle()
    assert there.running == {"lent": "a"} and not there.stopped


def test_beside_it_the_usual_rules_hold() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("x", 4, priority="low"), named("y", 4, priority="low"))
    there.settle()
    there.now += 200
    there.add(named("high", 4, priority="high"))
    later(there, 300)
    assert len(there.stopped) == 1 and there.running["high"] == "a"
    there.add(named("another", 4, priority="high"))
    later(there, 600)
    assert len(there.stopped) == 1, "the other four are reserved"


# --- to whom it is lent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [HOUR, -10])
def test_preemptible_work_has_it_while_nobody_wants_it(start: float) -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=start, end=2 * HOUR)])
    there.add(named("lent", 8, **FREE))
    (place,) = there.round().assignments
    assert place.lent and place.backfill is None, "to all but the reservation's it is work like any other"
    there.add(holder("h", 8))
    later(there, max(start, 0) + 1)
    assert there.running == {"h": "a"}, "at once, whatever it ran for"


def test_what_was_lent_to_it_does_not_become_its_own_by_an_edit() -> None:
    there = cluster(node("a", 8), node("b", 8), keeps=[reservation("r", gpus=16, start=100, end=HOUR)])
    there.add(named("sly", 8, **FREE), named("late", 8, activeDeadlineSeconds=30))
    there.settle()
    assert len(there.running) == 2
    edits: dict[str, dict[str, Any]] = {"sly": {"preemptible": False}, "late": {"activeDeadlineSeconds": 99999}}
    for uid, spec in edits.items():
        edited = named(uid, 8, **spec)
        there.add(replace(edited, generation=2))
        there.jobs[uid] = replace(there.jobs[uid], active_deadline=spec.get("activeDeadlineSeconds"))
    before = chosen(there)
    there.add(holder("h", 8), holder("g", 8))
    later(there, 101)
    assert there.running.keys() == {"h", "g"} and chosen(there) == before


# --- that it is had on time -----------------------------------------------------------------------------------------


def test_who_waits_for_it_is_told_when_and_where() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(holder("h", 8))
    decision = there.round()
    (entry,) = decision.waiting
    assert (entry.reason, entry.message) == (
        "WaitingForReservation",
        "GPUReservation r begins at 1970-01-12T14:46:40Z; 8 GPUs are kept on node a",
    )
    assert decision.queued == 0, "nobody looks every minute until then"
    assert decision.wake_after == HOUR - 60


def test_those_who_borrowed_are_stopped_before_it_begins_and_it_runs_when_it_does() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("lent", 8, **FREE), holder("h", 8))
    there.settle()
    later(there, HOUR - 61)
    assert there.running == {"lent": "a"} and not there.stopped
    there.tick(1)
    decision = there.round()
    assert [stop.uid for stop in decision.preemptions] == ["lent"] and decision.wake_after == 60
    there.tick(30)
    there.add(named("another", 8, **FREE))
    there.settle()
    assert there.running == {}, "neither goes in now: it is not time, and it is not theirs"
    there.tick(30)
    (place,) = there.round().assignments
    assert (place.uid, place.strategy, place.backfill) == ("h", "reservation", NOW + 2 * HOUR)


def test_nobody_is_stopped_while_nobody_waits_for_it() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("lent", 8, **FREE))
    later(there, HOUR + 10)
    assert there.running == {"lent": "a"}


def test_only_as_many_are_stopped_as_are_needed() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=100, end=HOUR)])
    there.add(*(named(f"p{i}", 1, **FREE) for i in range(8)), holder("h", 3))
    there.settle()
    later(there, 110)
    assert len(there.stopped) == 3 and there.running["h"] == "a" and len(there.running) == 6


def test_more_than_is_reserved_waits_though_there_is_room() -> None:
    there = cluster(node("a", 8), node("b", 8), keeps=[reservation("r", gpus=2, start=10, end=HOUR)])
    there.add(*(holder(f"h{i}", 1) for i in range(3)))
    there.settle()
    there.tick(20)
    told = reasons(there)
    assert len(there.running) == 2
    assert list(told.values()) == [("WaitingForReservation", "all 2 GPUs of GPUReservation r are in use")]


def test_what_does_not_fit_its_pieces_is_told() -> None:
    there = cluster(node("a", 2), node("b", 4), keeps=[reservation("r", gpus=4, gpusPerNode=2, start=10, end=HOUR)])
    there.nodes[1] = replace(there.nodes[1], allocatable=replace(there.nodes[1].allocatable, gpus=2))
    there.nodes.append(node("c", 4, unschedulable=True))
    there.add(holder("h", 3))
    there.settle()
    there.tick(20)
    ((reason, message),) = reasons(there).values()
    assert reason == "WaitingForReservation"
    assert message == (
        "needs 3 GPUs on one node; of the 4 GPUs of GPUReservation r no node has more than 2 left that it can have now"
        "; 4 GPUs are kept on nodes a, b"
    )


def test_a_status_that_tells_something_else_of_it_is_written_anew() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    view = holder("h", 8)
    there.add(view)
    ((reason, message),) = reasons(there).values()
    conditions = [{"type": "Scheduled", "status": "False", "reason": reason}]
    shown = {"phase": "Scheduling", "observedGeneration": 1, "conditions": conditions, "message": message}
    there.add(replace(view, status=shown))
    assert reasons(there) == {}
    there.add(replace(view, status={**shown, "message": f"{message}; expected to start at 14:46"}))
    assert reasons(there) == {}, "that is told beside it"
    there.reservations[0] = reservation("r", gpus=8, start=2 * HOUR, end=3 * HOUR)
    assert "begins at 1970-01-12T15:46:40Z" in reasons(there)["h"][1]


@pytest.mark.parametrize(
    ("keeps", "message"),
    [
        ([], "spec.reservation: there is no GPUReservation r"),
        ([reservation("r", "other", gpus=1, start=0, end=9)],
         "spec.reservation: GPUReservation r is not for namespace ns; its spec.namespaces names other"),
        ([reservation("r", gpus=1, start=-9, end=-1)],
         "spec.reservation: GPUReservation r ended at 1970-01-12T13:46:39Z"),
        ([reservation("r", gpus=0, start=0, end=9)],
         "spec.reservation: GPUReservation r is not valid: spec.gpus: must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_whoever_cannot_have_it_is_told_why(keeps: list[ReservationView], message: str) -> None:
    there = cluster(node("a", 8), keeps=keeps)
    there.add(holder("h", 1))
    assert reasons(there) == {"h": ("NoReservation", message)}


def test_they_count_in_their_tenants_quota() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=4, start=10, end=HOUR)])
    there.quotas.append(quota("q", "ns", gpus=3))
    there.add(*(holder(f"h{i}", 2) for i in range(2)))
    there.settle()
    there.tick(20)
    assert [reason for reason, _ in reasons(there).values()] == ["WaitingForQuota"] and len(there.running) == 1


def test_who_runs_in_its_window_is_stopped_by_nobody() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=10, end=HOUR)])
    there.add(holder("h", 8, priority="low"))
    later(there, 20)
    there.add(named("high", 8, priority="high"))
    later(there, 900)
    assert there.running == {"h": "a"} and not there.stopped


# --- when it is over ------------------------------------------------------------------------------------------------


def test_after_its_end_who_still_runs_goes_on_until_others_need_the_room() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=10, end=HOUR)])
    there.add(holder("h", 8))
    later(there, 20)
    later(there, HOUR + 1)
    assert there.running == {"h": "a"} and chosen(there) == {}
    there.add(replace(named("next", 8), created=NOW - 200))
    later(there, HOUR + 2)
    assert there.running == {"next": "a"}
    assert reasons(there)["h"] == ("NoReservation", "spec.reservation: GPUReservation r ended at 1970-01-12T14:46:40Z")


def test_one_that_follows_directly_has_the_room_of_the_one_before() -> None:
    keeps = [reservation("r", gpus=8, start=10, end=HOUR), reservation("s", gpus=8, start=HOUR, end=2 * HOUR)]
    there = cluster(node("a", 8), keeps=keeps)
    there.add(holder("h", 8))
    later(there, 20)
    there.add(holder("g", 8, of="s"))
    later(there, HOUR - 10)
    assert there.running == {"h": "a"}, "to its end it is its own"
    later(there, HOUR)
    assert there.running == {"g": "a"}


def test_one_that_is_about_to_begin_takes_nothing_from_the_one_that_goes_on() -> None:
    keeps = [reservation("r", gpus=8, start=10, end=HOUR), reservation("s", gpus=8, start=HOUR + 20, end=2 * HOUR)]
    there = cluster(node("a", 8), keeps=keeps)
    there.add(holder("soon", 8, of="s", age=200))
    later(there, HOUR - 10)
    there.add(holder("now", 8))
    later(there, HOUR - 5)
    assert there.running == {"now": "a"}


def test_one_that_is_cut_short_protects_nobody_any_more() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=10, end=HOUR)])
    there.add(holder("h", 8))
    later(there, 20)
    there.reservations[0] = reservation("r", gpus=8, start=10, end=30)
    there.add(replace(named("next", 8), created=NOW - 200))
    later(there, 31)
    assert there.running == {"next": "a"}


def test_one_that_is_deleted_keeps_nothing() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("firm", 8))
    there.settle()
    assert not there.running
    there.reservations.clear()
    there.settle()
    assert there.running == {"firm": "a"} and there.ledger.reserved == {}


def test_one_that_is_not_valid_keeps_nothing_and_harms_nobody() -> None:
    there = cluster(node("a", 8), keeps=[replace(reservation("r", gpus=8, start=9, end=99), spec=None, invalid="spec")])
    there.add(named("firm", 8))
    there.settle()
    assert there.running == {"firm": "a"}


def test_a_promise_that_is_not_visible_yet_counts_as_what_it_is() -> None:
    """While its Job is on the way, work that was let in until the window does not make the reservation move."""
    there = cluster(node("a", 8), node("b", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("filler", 8, **FREE))
    there.settle()
    there.add(named("short", 8, activeDeadlineSeconds=600))
    (place,) = there.round().assignments
    before = chosen(there)
    assert before == {place.node: 8}
    running = there.jobs["filler"]
    seen = snapshot(
        there.nodes, list(there.workloads.values()), jobs=[running], pods=[there.pods["filler"]],
        reservations=there.reservations,
    )  # fmt: skip
    assert round_of(seen, there.ledger).reserved is None


def test_pods_of_strangers_on_its_nodes_make_it_move() -> None:
    keeps = reservation("r", gpus=8, gpusPerNode=8, start=HOUR, end=2 * HOUR)
    there = cluster(node("a", 8), node("b", 8), keeps=[keeps])
    there.settle()
    assert chosen(there) == {"a": 8}
    seen = snapshot(there.nodes, pods=[pod("p", "a", gpus=1)], reservations=there.reservations)
    assert round_of(seen, there.ledger).reserved == {"uid-r": {"b": 8}}


def test_jobs_that_say_of_themselves_that_they_are_in_a_window_are_not() -> None:
    """Whoever may create Jobs can write anything on one: what counts is what the workload names, and its namespace."""
    stranger = job("x", "a", gpus=8, namespace="other")
    seen = snapshot(
        [node("a", 8)], [holder("h", 8)], jobs=[stranger], pods=[pod("p", "a", of=stranger, namespace="other")],
        reservations=[reservation("r", gpus=8, start=-10, end=HOUR)],
    )  # fmt: skip
    assert placed(round_of(seen)) == {}


def test_in_one_round_nobody_gets_twice_what_is_there_once() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("first", 4, **FREE), named("second", 8, age=1, **FREE))
    there.round()
    there.check()
    assert there.running == {"first": "a"}


def test_in_one_round_room_is_made_only_for_as_many_as_there_is_room_for() -> None:
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("x", 4, priority="low"), named("y", 4, priority="low"))
    there.settle()
    there.now += 200
    there.add(named("one", 4, priority="high"), named("two", 4, priority="high", age=1))
    assert len(there.round().preemptions) == 1


def test_firm_work_beside_it_that_comes_after_lent_work_is_not_lent() -> None:
    """Within a round the free room is reckoned low once somebody borrows; what was beside it is found all the same."""
    there = cluster(node("a", 8), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("lent", 4, **FREE), named("firm", 4, age=1))
    there.round()
    assert {uid: each.lent for uid, each in there.jobs.items()} == {"lent": False, "firm": False}
    there.settle()
    assert there.running.keys() == {"lent", "firm"} and chosen(there) == {"a": 4}


# --- beside GPUs of other resources -----------------------------------------------------------------------------------


def both(name: str, amd: int) -> NodeView:
    return node(name, allocatable=Resources.counting([("", 4), (AMD, amd)], 64_000, 256 * GIB, 110))


def test_gpus_of_another_resource_are_neither_reserved_nor_kept_off() -> None:
    there = cluster(both("a", 8), keeps=[reservation("r", gpus=8, start=HOUR, end=2 * HOUR)])
    there.add(named("amd", 6, gpuResource=AMD), named("nvidia", 1))
    there.settle()
    assert chosen(there) == {"a": 4} and there.running == {"amd": "a"}
    there.add(named("more", 2, gpuResource=AMD), named("lent", 4, **FREE))
    there.settle()
    assert there.running == {"amd": "a", "more": "a", "lent": "a"}


def test_for_gpus_of_another_resource_others_are_stopped_as_ever() -> None:
    there = cluster(both("a", 2), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("low", 2, gpuResource=AMD, priority="low"))
    there.settle()
    there.now += 200
    there.add(named("high", 2, gpuResource=AMD, priority="high"))
    there.settle()
    assert later(there, 300).running == {"high": "a"}


def test_in_one_round_nobody_gets_gpus_of_another_resource_twice() -> None:
    """Who borrows of the CPU that is kept takes GPUs that are not: they are nobody else's from then on."""
    there = cluster(both("a", 2), keeps=[reservation("r", gpus=4, start=HOUR, end=2 * HOUR)])
    there.add(named("lent", 2, gpuResource=AMD, resources={"requests": {"cpu": "40"}}, **FREE))
    there.add(named("firm", 2, gpuResource=AMD, age=1))
    there.round()
    there.check()
    assert there.jobs.keys() == {"lent"}


def test_a_reservation_is_not_named_for_gpus_of_another_resource() -> None:
    there = cluster(both("a", 2), keeps=[reservation("r", gpus=4, start=0, end=HOUR)])
    there.add(holder("w", 1, gpuResource=AMD))
    assert reasons(there)["w"] == (
        "Invalid", f"spec.reservation: reserved are GPUs of {NVIDIA}, and this workload asks for {AMD}",
    )  # fmt: skip
