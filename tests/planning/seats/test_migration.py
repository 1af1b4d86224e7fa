"""Moves of seats: what is decided of pods as the API server has them, and of what nodes say of their seats."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from crds.seatmigration import SeatMigrationSpec
from planning.devices.prefer_group import ANNOTATION as PREFER_GROUP
from planning.devices.prefer_group import SeatClass, preference
from planning.seats.migration import (
    CLAIM,
    COST,
    HASH,
    RECORD,
    REPLACES,
    Around,
    Move,
    Progress,
    Refusal,
    SeatAt,
    decide,
    fits,
    kept_out,
    leads_to,
    progress,
    replacement,
    replacement_name,
    seats_of,
    serves_still,
)
from planning.seats.migration_status import Told, status
from tests.planning.test_admission import json_values

UID = "m-uid"
SEAT = SeatAt("n1", "G01", "kyb-G01-s1", "Active", "team", "c", 23001)
FREE = SeatAt("n1", "G23", "kyb-G23-s1")
MOVE = Move(UID, "team", "m", "c", "c-uid", "n1", "G01", SEAT.seat, "n1", "G23", "c-m123456", 100.0)


def pod(name: str = "c", **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "name": name, "uid": f"{name}-uid", "resourceVersion": "1"} | meta,
        "spec": {"nodeName": "n1", "containers": [{"name": "server", "image": "i"}]},
        "status": {"phase": "Running"},
    }


def spec(**told: Any) -> SeatMigrationSpec:
    found, problem = SeatMigrationSpec.parse({"pod": "c", "to": {"group": "G23"}} | told)
    assert found is not None, problem
    return found


def around(*pods: dict[str, Any], seats: tuple[SeatAt, ...] = (SEAT, FREE), **more: Any) -> Around:
    return Around(pods or (pod(),), seats, more.get("claims", {}), more.get("sets", {}))


def refused(found: Move | Refusal) -> Refusal:
    assert isinstance(found, Refusal)
    return found


def moved(found: Move | Refusal) -> Move:
    assert isinstance(found, Move), found
    return found


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"to": {"group": "G23"}}, "either a pod or a workload"),
        ({"pod": "c", "workload": {"kind": "Deployment", "name": "c"}, "to": {"group": "G23"}}, "either a pod or a"),
        ({"pod": "c", "to": {}}, "a group, a node, or both"),
        ({"pod": "c", "to": {"group": "G 23"}}, "spec.to.group"),
        ({"pod": "c", "to": {"group": "G23"}, "deadlineSeconds": 1}, "at least 10"),
        ({"workload": {"kind": "StatefulSet", "name": "c"}, "to": {"group": "G23"}}, "spec.workload.kind"),
        ([], "must be an object"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_with_its_path(told: Any, problem: str) -> None:
    found, said = SeatMigrationSpec.parse(told)
    assert found is None and problem in said


def test_a_pod_without_an_owner_is_moved_under_another_name() -> None:
    move = moved(decide(spec(), "team", "m", UID, around()))
    assert move == replace(MOVE, replacement=replacement_name("c", UID), patience=600)
    assert moved(decide(spec(), "team", "m", UID, around())).replacement == move.replacement, "however often"
    assert move.replacement != moved(decide(spec(), "team", "m", "other", around())).replacement


def test_it_goes_to_another_node_by_itself_to_any_group() -> None:
    there = SeatAt("n2", "G45", "kyb-G45-s1")
    move = moved(decide(spec(to={"node": "n2"}), "team", "m", UID, around(seats=(SEAT, there))))
    assert (move.to_node, move.to_group) == ("n2", "")
    full = replace(there, namespace="team", pod="other")
    assert refused(decide(spec(to={"node": "n2"}), "team", "m", UID, around(seats=(SEAT, full)))).reason == "Full"


def test_a_group_of_another_size_is_none_for_it() -> None:
    pair, single = replace(SEAT, resource="kyb.ai/gpu-2x-seat"), replace(FREE, resource="kyb.ai/gpu-1x-seat")
    found = refused(decide(spec(), "team", "m", UID, around(seats=(pair, single))))
    assert found.reason == "OtherSize" and "kyb.ai/gpu-1x-seat" in found.message
    elsewhere = replace(single, node="n2")
    found = refused(decide(spec(to={"node": "n2"}), "team", "m", UID, around(seats=(pair, elsewhere))))
    assert found.reason == "Full"


def test_its_own_new_server_does_not_fill_the_group() -> None:
    mine = replace(FREE, namespace="team", pod=replacement_name("c", UID))
    moved(decide(spec(), "team", "m", UID, around(seats=(SEAT, mine))))


@pytest.mark.parametrize(
    ("pods", "seats", "more", "reason"),
    [
        ([pod("other")], (SEAT, FREE), {}, "NoPod"),
        ([pod()], (FREE,), {}, "NoSeat"),
        ([pod()], (SEAT, replace(SEAT, seat="kyb-G01-s2"), FREE), {}, "NoSeat"),
        ([pod()], (replace(SEAT, node="n2"), FREE), {}, "NoSeat"),  # a node speaks for its own pods alone
        ([pod(deletionTimestamp="now")], (SEAT, FREE), {}, "PodEnds"),
        ([pod(annotations={CLAIM: "live"})], (SEAT, FREE), {"claims": {"live": "first"}}, "MovesAlready"),
        ([pod(ownerReferences=[{"kind": "Job", "name": "j", "uid": "j", "controller": True}])], (SEAT, FREE), {},
         "OwnerUnsupported"),
        ([pod(ownerReferences=[{"kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}])], (SEAT, FREE),
         {"sets": {"r": {}}}, "OwnerUnsupported"),  # nobody's template
        ([pod() | {"spec": {"nodeName": "n1", "resourceClaims": [{"name": "seat"}]}}], (SEAT, FREE), {}, "HasClaims"),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_in_a_word_and_a_sentence(
    pods: list[dict[str, Any]], seats: tuple[SeatAt, ...], more: dict[str, Any], reason: str
) -> None:
    found = refused(decide(spec(), "team", "m", UID, around(*pods, seats=seats, **more)))
    assert found.reason == reason and found.message and not found.message.endswith(".")


def test_a_claim_of_one_that_has_ended_counts_for_nothing() -> None:
    moved(decide(spec(), "team", "m", UID, around(pod(annotations={CLAIM: "ended"}))))


def test_a_deployments_only_pod_is_found_by_its_replica_set() -> None:
    owner = {"kind": "ReplicaSet", "name": "web-1", "uid": "rs", "controller": True}
    sets = {"rs": {"metadata": {"ownerReferences": [{"kind": "Deployment", "name": "web", "controller": True}]}}}
    mine = pod(ownerReferences=[owner], labels={HASH: "1"}, annotations={COST: "7"})
    workload = spec(pod=None, workload={"kind": "Deployment", "name": "web"})
    move = moved(decide(workload, "team", "m", UID, around(mine, pod("x"), sets=sets)))
    assert (move.pod, move.replica_set, move.template_hash, move.cost) == ("c", "web-1", "1", "7")
    twice = (SEAT, replace(SEAT, seat="kyb-G01-s2", pod="d"), FREE)
    second = pod("d", ownerReferences=[owner], labels={HASH: "1"})
    found = decide(workload, "team", "m", UID, around(mine, second, seats=twice, sets=sets))
    assert refused(found).reason == "SeveralPods" and "c, d" in refused(found).message
    # The one that it has started itself, gone on with later, is not a second one.
    mine["metadata"]["annotations"][CLAIM] = UID
    own = pod("d", ownerReferences=[owner], labels={HASH: "1"}, annotations={CLAIM: UID, REPLACES: "c"})
    assert moved(decide(workload, "team", "m", UID, around(mine, own, seats=twice, sets=sets))).pod == "c"


NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True)


@given(NAMES, st.text(min_size=1), st.text(min_size=1))
def test_a_name_is_one_and_does_not_grow(name: str, first: str, second: str) -> None:
    once = replacement_name(name, first)
    assert len(once) <= 63 and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", once)
    twice = replacement_name(once, second)
    assert len(twice) == len(once) and (twice == once) == (first == second or once[-6:] == twice[-6:])


def test_the_new_pod_is_the_old_one_elsewhere() -> None:
    old = pod(labels={"app": "c", HASH: "1"}, annotations={"a": "b", "kyb.ai/prefer-group": "G01", COST: "7"})
    token = {"name": "kube-api-access-x1", "projected": {}}
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]}
    old["spec"] |= {
        "volumes": [{"name": "models", "emptyDir": {}}, token],
        "containers": [{"name": "server", "image": "i", "volumeMounts": [{"name": "models"}, {"name": token["name"]}]}],
        "priority": 5, "priorityClassName": "high", "preemptionPolicy": "Never", "ephemeralContainers": [{}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}},
    }  # fmt: skip
    before = copy.deepcopy(old)
    made = replacement(old, replace(MOVE, to_node="n2", replica_set="web-1", template_hash="1"), "{}")
    assert old == before
    assert made["metadata"]["labels"] == {"app": "c"}, "its ReplicaSet does not know it yet"
    assert made["metadata"]["annotations"] == {
        "a": "b", "kyb.ai/prefer-group": "G23", CLAIM: UID, REPLACES: "c", RECORD: "{}"
    }  # fmt: skip
    told = made["spec"]
    assert told["volumes"] == [{"name": "models", "emptyDir": {}}]
    assert told["containers"][0]["volumeMounts"] == [{"name": "models"}]
    assert {"nodeName", "priority", "preemptionPolicy", "ephemeralContainers"}.isdisjoint(told)
    (only,) = told["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert only == term | {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}


def test_where_seats_are_claimed_the_group_is_preferred_by_the_claim_of_the_new_pod() -> None:
    move = replace(MOVE, resource="kyb.ai/gpu-2x-seat")
    old = pod()
    old["spec"]["containers"][0]["resources"] = {"limits": {"kyb.ai/gpu-2x-seat": "1", "memory": "1Gi"}}
    assert PREFER_GROUP not in replacement(old, move, "{}")["metadata"]["annotations"], "by device plugin"
    old["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "c-extended-resources-x"}
    first = replacement(old, move, "{}")
    assert first["metadata"]["annotations"][PREFER_GROUP] == "G23"
    # The webhook makes a claim of it; moved on, that pod asks for the resource again, and prefers the next group.
    seat = SeatClass("berth-seat-2x", "kyb.ai/gpu-2x-seat")
    wanted = preference(first, [seat])
    assert wanted is not None
    claimed = pod("c-m1", annotations=first["metadata"]["annotations"])
    claimed["spec"] |= {
        "resourceClaims": [{"name": "preferred-seat", "resourceClaimTemplateName": wanted.template}],
        "containers": [
            {"name": "server", "image": "i",
             "resources": {"limits": {"memory": "1Gi"}, "claims": [{"name": "preferred-seat"}]}}
        ],
    }  # fmt: skip
    held = replace(SEAT, pod="c-m1", group="G23", seat="kyb-G23-s1", resource=seat.resource)
    back = replace(FREE, group="G01", seat="kyb-G01-s1", resource=seat.resource)
    again = moved(decide(spec(pod="c-m1", to={"group": "G01"}), "team", "m", "u2", around(claimed, seats=(held, back))))
    made = replacement(claimed, again, "{}")
    assert made["spec"]["containers"][0]["resources"] == {"limits": {"memory": "1Gi", "kyb.ai/gpu-2x-seat": "1"}}
    assert "resourceClaims" not in made["spec"] and made["metadata"]["annotations"][PREFER_GROUP] == "G01"
    assert preference(made, [seat]) is not None, "which the webhook takes as it took the first"


def new(name: str = MOVE.replacement, node: str = "n1", *, ready: bool = True, **told: Any) -> dict[str, Any]:
    found = pod(name, creationTimestamp="1970-01-01T00:00:00Z")
    found["spec"]["nodeName"] = node
    found["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}
    ]  # fmt: skip
    return found | told


THERE = replace(FREE, phase="Active", namespace="team", pod=MOVE.replacement, port=23011)


def after(
    old: dict[str, Any] | None = None, fresh: dict[str, Any] | None = None, *seats: SeatAt, now: float = 50.0
) -> Progress:
    return progress(MOVE, old if old is not None else pod(), fresh if fresh is not None else new(), seats, now)


def test_it_serves_once_its_node_says_so_and_it_is_ready() -> None:
    assert (after(None, None, THERE).kind, after(None, None, THERE).seat) == ("serves", THERE)
    assert after(None, None, replace(THERE, phase="Parked")).kind == "serves", "it has served, and is asked for nothing"
    assert after(None, new(ready=False), THERE).kind == "wait"
    assert after(None, None, replace(THERE, phase="Waiting", message="its turn comes")).message == (
        "pod c-m123456 has kyb-G23-s1 on node n1, which is Waiting: its turn comes"
    )
    assert after(None, None, THERE, now=101.0).kind == "serves", "late is not never"


@pytest.mark.parametrize(
    ("old", "fresh", "seat", "reason"),
    [
        (pod(uid="another"), new(), THERE, "PodGone"),
        (pod(deletionTimestamp="now"), new(), THERE, "PodGone"),
        (pod(), new(metadata={"uid": "u", "deletionTimestamp": "now"}), THERE, "ReplacementGone"),
        (pod(), new(status={"phase": "Failed", "message": "UnexpectedAdmissionError"}), THERE, "ReplacementEnded"),
        (pod(), new(node="n2"), THERE, "OtherNode"),
        (pod(), new(), replace(THERE, group="G01", seat="kyb-G01-s2"), "OtherGroup"),
        (pod(), new(ready=False), replace(THERE, phase="Starting"), "DeadlineExceeded"),
    ],
)
def test_what_has_gone_wrong_is_told(old: dict[str, Any], fresh: dict[str, Any], seat: SeatAt, reason: str) -> None:
    found = after(old, fresh, seat, now=101.0)
    assert (found.kind, found.reason) == ("failed", reason)
    assert progress(MOVE, pod(), None, (), 0.0).reason == "ReplacementGone"


def test_what_it_waits_for_is_told_by_whoever_keeps_it_waiting() -> None:
    unbound = new(node="")
    unbound["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    ]
    assert after(None, unbound).message == "pod c-m123456 has no node yet: 0/3 nodes are available"
    refused_by = {"state": {"waiting": {"reason": "CreateContainerError", "message": "kyb-G23-s1 waits"}}}
    held = new()
    held["status"]["containerStatuses"] = [refused_by]
    assert after(None, held).message == "pod c-m123456 has no seat yet: kyb-G23-s1 waits"


@given(st.lists(json_values), st.lists(json_values), json_values)
def test_nothing_that_a_node_or_a_service_says_is_too_strange(groups: list[Any], ends: list[Any], told: Any) -> None:
    objects = [each for each in groups if isinstance(each, dict)]
    found = seats_of([*objects, {"spec": told, "status": {"seats": groups}}])
    assert all(0 <= each.port < 65536 for each in found)
    leads_to([{"metadata": told, "endpoints": ends}], "uid")
    raw = {"metadata": {"generation": told}, "status": {"steps": groups, "destination": told, "conditions": ends}}
    assert status(raw, Told("Starting", "Starting", "it starts", MOVE), 0.0)["phase"] == "Starting"


def test_steps_that_were_taken_stay_and_ends_are_dated() -> None:
    raw: dict[str, Any] = {"metadata": {"generation": 1}}
    raw["status"] = status(raw, Told("Starting", "Starting", "it starts", MOVE), 60.0)
    raw["status"] = status(raw, Told("Switching", "Serves", "it serves", MOVE, THERE), 120.0)
    raw["status"] = status(raw, Told("RollingBack", "Deleted", "it was deleted", MOVE), 180.0)
    last = status(raw, Told("RolledBack", "Deleted", "it was deleted", MOVE), 240.0)
    assert [each["name"] for each in last["steps"]] == ["Starting", "Switching", "RollingBack", "RolledBack"]
    assert [each["at"][14:16] for each in last["steps"]] == ["01", "02", "03", "04"]
    assert last["destination"] == {"node": "n1", "group": "G23", "seat": THERE.seat, "pod": MOVE.replacement}
    assert last["finished"].startswith("1970-01-01T00:04") and "finished" not in raw["status"]
    (said,) = last["conditions"]
    assert (said["type"], said["status"], said["reason"]) == ("Completed", "False", "Deleted")


def test_a_replica_set_ends_one_that_is_not_ready_before_the_one_that_costs_least() -> None:
    move = replace(MOVE, replica_set="web-1", template_hash="1")
    both = [pod(), new()]
    assert kept_out(both, move) == "", "the one that moves need not be"
    assert "pod d is not ready, and its ReplicaSet would end that" in kept_out([*both, pod("d")], move)
    assert kept_out([*both, new("d")], move) == ""
    assert kept_out([*both, pod("d", deletionTimestamp="now")], move) == ""
    assert kept_out([pod(), new(ready=False)], move), "nor would the new one stay"


def test_the_new_server_does_without_the_old_one_as_long_as_it_serves() -> None:
    assert serves_still(MOVE, new(), ())
    assert not serves_still(MOVE, new(ready=False), ()) and not serves_still(MOVE, None, (THERE,))
    assert serves_still(MOVE, new(ready=False), (replace(THERE, phase="Parked"),)), "its container may be parked cold"
    assert not serves_still(MOVE, new(ready=False), (replace(THERE, phase="Lost"),))


def test_a_record_that_anybody_may_have_written_counts_where_it_says_what_was_ordered() -> None:
    move = moved(decide(spec(), "team", "m", UID, around()))
    assert fits(move, spec())
    for strange in (
        replace(move, pod="other"), replace(move, to_group="G45"), replace(move, patience=1e9),
        replace(move, replacement="other"),
    ):  # fmt: skip
        assert not fits(strange, spec())
    assert not fits(replace(move, to_node="n2"), spec(to={"node": "n1", "group": "G23"}))


def test_a_move_survives_being_written_down() -> None:
    adapter = TypeAdapter(Move)
    assert adapter.validate_json(adapter.dump_json(MOVE)) == MOVE
