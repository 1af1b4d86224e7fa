"""When gates are lifted and what is written on a pod then; which gangs are taken back, and whether that counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.gates import due
from planning.jobs import job_manifest, lifted
from planning.ledger import after_carrying_out, after_deciding
from planning.lifecycle import Observation, next_step
from planning.model import Avoided, Decision, JobView, Ledger, NodeView, Places, PodView, Turn, WorkloadView
from planning.naming import GATE, INDEX_KEY, PLACES_ANNOTATION
from planning.places import amiss, on_nodes, places_from, places_text, pods_in, ranks
from planning.status import project
from planning.views import job_view, pod_view
from tests.planning.builders import NOW, SETTINGS, job, node, pod, promise, round_of, snapshot, workload

PRINTABLE = st.characters(min_codepoint=32, max_codepoint=126)

NODES = [node("a"), node("b")]
PLACES: Places = (("a", 2), ("b", 1))
GANG = workload("g", 1, spec={"replicas": 3})


def made(**changes: Any) -> JobView:
    return job("g", "a", **{"places": PLACES, "counted": True, "started": NOW, **changes})


def pods_of(it: JobView, gated: str = "ggg", *, nodes: str = "...", **changes: Any) -> list[PodView]:
    """A pod for each letter: `g` is gated, `l` lifted, `-` is not there; and its node where it is bound."""
    return [
        pod(f"p{i}", "" if nodes[i] == "." else nodes[i], of=it, index=i, gated=kind == "g", **changes)
        for i, kind in enumerate(gated)
        if kind != "-"
    ]


def decided(
    it: JobView, pods: list[PodView], *, nodes: list[NodeView] = NODES, ledger: Ledger | None = None
) -> Decision:
    return round_of(snapshot(nodes, [GANG], jobs=[it], pods=pods), ledger)


# --- lifting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gated", "nodes", "lifts"),
    [
        ("ggg", "...", True),
        ("gg-", "...", False),
        ("-gg", "...", False),
        ("lgg", "...", True),  # half of it was done before a crash
        ("llg", "ab.", True),
        ("lll", "...", False),
        ("lll", "aab", False),
        ("---", "...", False),
    ],
)
def test_gates_are_lifted_when_all_pods_are_there(gated: str, nodes: str, lifts: bool) -> None:
    it = made(missing=gated.count("-"))
    decision = decided(it, pods_of(it, gated, nodes=nodes))
    assert [(pin.job_uid, pin.places) for pin in decision.pins] == ([(it.uid, PLACES)] if lifts else [])
    assert not decision.withdrawals and not decision.assignments


def test_a_pod_that_goes_is_not_there_and_one_that_ended_is() -> None:
    it = made()
    first, second, third = pods_of(it)
    assert not decided(it, [replace(first, terminating=True), second, third]).pins
    assert decided(replace(it, done=frozenset({0})), [second, third]).pins
    assert not decided(it, [replace(first, index=1), second, third]).pins
    assert not decided(it, [replace(first, index=-1), second, third]).pins, "not one of the Job's"


@pytest.mark.parametrize("change", [{"deleting": True}, {"preempted": True}, {"finished": "Failed"}, {"ready": True}])
def test_nothing_is_lifted_of_a_job_that_goes(change: dict[str, Any]) -> None:
    it = made(**change)
    assert not decided(it, pods_of(it)).pins


def test_it_is_looked_again_soon_and_then_ever_less_often() -> None:
    it = made(missing=1)
    young = decided(it, pods_of(it, "gg-"))
    assert young.wake_after == 1.0
    old = replace(it, created=NOW - 40)
    assert decided(old, pods_of(old, "gg-")).wake_after == 10.0
    it = made()
    assert decided(it, pods_of(it, "lll", nodes="aa.")).wake_after == pytest.approx(4 * 30 + 0.3)
    assert decided(replace(it, ready=True), pods_of(it, "lll", nodes="aab")).wake_after is None


def raw_pod(index: int, *, gates: tuple[str, ...] = (GATE,), **more: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"p{index}",
            "uid": f"u{index}",
            "resourceVersion": "7",
            "labels": {INDEX_KEY: str(index)},
        },
        "spec": {"schedulingGates": [{"name": name} for name in gates]},
        **more,
    }


def test_each_pod_is_told_the_node_of_its_index_and_nothing_unless_all_are_there() -> None:
    pods = [raw_pod(2), raw_pod(0), raw_pod(1)]
    assert {pod["metadata"]["name"]: where for pod, where in due(PLACES, pods)} == {"p0": "a", "p1": "a", "p2": "b"}
    assert due(PLACES, pods[:2]) == []
    assert due(PLACES, [pods[0], pods[1], raw_pod(1, status={"phase": "Failed"})]) == []
    gone = raw_pod(1)
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert due(PLACES, [pods[0], pods[1], gone]) == []
    again = due(PLACES, [pods[0], pods[1], raw_pod(1, gates=())])
    assert [pod["metadata"]["name"] for pod, _ in again] == ["p2", "p0"], "what was lifted is left alone"
    assert [pod["metadata"]["name"] for pod, _ in due(PLACES, [*pods, raw_pod(3), {}])] == ["p2", "p0", "p1"]


def test_a_lifted_pod_keeps_what_it_demands_and_other_gates() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, {}, {"matchFields": [{"key": "x"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
    pod = raw_pod(0, gates=("mine", GATE))
    pod["spec"]["affinity"] = {"nodeAffinity": {**required, **preferred}, "podAffinity": {"a": "b"}}
    patch = lifted(pod, "n")
    pin = {"key": "metadata.name", "operator": "In", "values": ["n"]}
    assert patch == {
        "metadata": {"uid": "u0", "resourceVersion": "7"},
        "spec": {
            "schedulingGates": [{"name": "mine"}],
            "affinity": {
                "podAffinity": {"a": "b"},
                "nodeAffinity": {
                    **preferred,
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {**terms[0], "matchFields": [pin]}, {}, {"matchFields": [{"key": "x"}, pin]},
                        ]
                    },
                },
            },
        },
    }  # fmt: skip
    assert pod["spec"]["affinity"]["nodeAffinity"] == {**required, **preferred}, "the pod itself is left as it is"


# --- taking back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node("a")], "node b is gone"),
        ([node("a"), node("b", unschedulable=True)], "node b is cordoned"),
        ([node("a", ready=False), node("b")], "node a is not ready"),
    ],
)
def test_a_node_that_takes_no_pods_any_more_takes_the_gang_back(nodes: list[NodeView], why: str) -> None:
    it = made()
    decision = decided(it, pods_of(it, "lgg"), nodes=nodes)
    (back,) = decision.withdrawals
    assert back.message == f"Job {it.name} was not started: {why}; it is placed anew"
    assert (back.next_turn, back.avoid, back.job_version) == (Turn(1, 0), "", it.resource_version)
    assert not decision.pins
    assert not decided(it, pods_of(it, "lll", nodes="aab"), nodes=nodes).withdrawals, "all are lifted: it may run"


def late(**changes: Any) -> JobView:
    return made(**{"created": NOW - 35, **changes})


def test_a_pod_without_a_place_takes_all_of_them_back() -> None:
    it = late()
    bound, other, stuck = pods_of(it, "lll", nodes="aa.")
    stuck = replace(stuck, blocked="0/2 nodes are available")
    (back,) = decided(it, [bound, other, stuck]).withdrawals
    assert back.message == (
        f"Job {it.name} did not start in 30 s: pod 2 found no place on node b (0/2 nodes are available); "
        "it is placed anew"
    )
    assert (back.next_turn, back.avoid) == (Turn(1, 0), "b")
    young = replace(it, created=NOW - 30.2)
    assert not decided(young, [bound, other, stuck]).withdrawals, "each pod has a moment of its own"
    ledger = after_deciding(Ledger(), Decision())
    ledger = after_carrying_out(ledger, [back], [], [], {}, {}, {}, {})
    assert ledger.avoided == {"g": Avoided(1, ("b",))} and ledger.turns == {"g": Turn(1, 0)}
    # Its bound pods still go, which proves nothing of a place.
    going = decided(replace(it, deleting=True), [replace(bound, terminating=True)], ledger=ledger)
    assert going.reconsidered == []


@pytest.mark.parametrize(
    ("gated", "nodes", "change", "message", "retries"),
    [
        ("gg-", "...", {"missing": 1}, "2 of its 3 pods were created", 1),
        ("gg-", "...", {"missing": 1, "started": None}, "2 of its 3 pods were created", 0),
        ("---", "...", {"missing": 3, "counted": False}, "0 of its 3 pods were created", 1),
        ("ggg", "...", {}, "the gates of its pods could not be lifted (the worker's log says why)", 1),
        ("lll", "a..", {}, "2 of its 3 pods are not bound", 0),
    ],
)
def test_what_nobody_tried_is_given_longer(
    gated: str, nodes: str, change: dict[str, Any], message: str, retries: int
) -> None:
    it = late(**change)
    assert not decided(it, pods_of(it, gated, nodes=nodes)).withdrawals
    it = replace(it, created=NOW - 121)
    (back,) = decided(it, pods_of(it, gated, nodes=nodes)).withdrawals
    assert back.message == f"Job {it.name} did not start in 30 s: {message}; it is placed anew"
    assert back.next_turn == Turn(1, retries)


@pytest.mark.parametrize(
    ("gated", "nodes", "change"),
    [
        ("lll", "aab", {"ready": True}),
        ("lll", "aab", {}),
        ("ll-", "aa.", {}),  # it has ended, and its Job does not tell yet
        ("---", "...", {}),
        ("-ll", "aab", {"done": frozenset({0})}),
    ],
)
def test_what_runs_or_ended_is_left_alone(gated: str, nodes: str, change: dict[str, Any]) -> None:
    it = made(**{"created": NOW - 10_000, **change})
    assert not decided(it, pods_of(it, gated, nodes=nodes)).withdrawals


def test_a_stopped_gang_is_queued_again_when_its_pods_are_gone() -> None:
    it = made(preempted=True, ready=True)
    assert not decided(it, pods_of(it, "lll", nodes="aab", terminating=True)).withdrawals
    assert not decided(it, []).withdrawals, "its controller may still count one"
    (back,) = decided(replace(it, halted=True), []).withdrawals
    assert back.reason == "Preempted" and not back.keep and "was stopped on 2 nodes (a, b)" in back.message


# --- what its Job tells ---------------------------------------------------------------------------------------------


def manifest(view: WorkloadView = GANG, **status: Any) -> dict[str, Any]:
    raw = job_manifest(view, replace(promise("g", "a"), places=PLACES), SETTINGS)
    return {**raw, "status": status}


def test_the_job_alone_tells_its_places() -> None:
    raw = manifest()
    spec = raw["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    pod = spec["template"]["spec"]
    assert pod["schedulingGates"] == [{"name": GATE}] and "affinity" not in pod
    assert pod["containers"][0]["env"][0] == {"name": "REPLICAS", "value": "3"}
    read = job_view(raw, SETTINGS.gpu_resource)
    assert read is not None and (read.places, read.node, read.missing) == (PLACES, "a", 3)


def test_a_template_keeps_its_own_gates_and_number_of_pods() -> None:
    template = {"spec": {"schedulingGates": [{"name": "mine"}], "containers": [
        {"name": "a", "image": "b", "env": [{"name": "REPLICAS", "value": "x"}]}, {"name": "c", "image": "d"},
    ]}}  # fmt: skip
    pod = manifest(workload("g", 1, spec={"replicas": 3, "template": template}))["spec"]["template"]["spec"]
    assert pod["schedulingGates"] == [{"name": "mine"}, {"name": GATE}]
    values = [[item["value"] for item in c["env"] if item["name"] == "REPLICAS"] for c in pod["containers"]]
    assert values == [["x"], ["3"]]


def test_a_single_ones_job_is_what_it_was() -> None:
    raw = job_manifest(workload("a", 1), promise("a", "n"), SETTINGS)
    assert "completionMode" not in raw["spec"] and "schedulingGates" not in raw["spec"]["template"]["spec"]
    assert PLACES_ANNOTATION not in raw["metadata"]["annotations"]
    assert "REPLICAS" not in json.dumps(raw)


@pytest.mark.parametrize(
    ("status", "ready", "done", "missing"),
    [
        ({}, False, set(), 3),
        ({"active": 2}, False, set(), 1),
        ({"active": 3, "ready": 2}, False, set(), 0),
        ({"active": 3, "ready": 3}, True, set(), 0),
        ({"active": 1, "ready": 1, "succeeded": 2, "completedIndexes": "0,2"}, True, {0, 2}, 0),
        ({"succeeded": 3, "completedIndexes": "0-2"}, False, {0, 1, 2}, 0),
        ({"active": 1, "failed": 1}, False, set(), 0),
        ({"active": 1, "conditions": [{"type": "FailureTarget", "status": "True"}]}, False, set(), 0),
        ({"active": 1, "uncountedTerminatedPods": {"failed": ["u"]}}, False, set(), 0),
        ({"completedIndexes": "0-999999,x,-1,5-2,1e3"}, False, {0, 1, 2}, 3),
    ],
)
def test_a_gangs_job_says_how_far_it_is(status: dict[str, Any], ready: bool, done: set[int], missing: int) -> None:
    read = job_view(manifest(**status), SETTINGS.gpu_resource)
    assert read is not None and (read.ready, set(read.done), read.missing) == (ready, done, missing)


@pytest.mark.parametrize(
    "text",
    [None, 7, "", "{}", "[", "[" * 5000, '[["a",3,1]]', '[["a",0],["b",3]]', '[["a",-1],["b",4]]', '[["a",true]]',
     '[["",3]]', '[["a",1],["a",2]]', '[["a",2]]', '[["a",4]]', json.dumps([["n" * 254, 3]]), '[["a",3.0]]', "[]",
     json.dumps([[f"n{i}", 1] for i in range(513)])],
)  # fmt: skip
def test_a_damaged_annotation_is_no_place(text: object) -> None:
    assert places_from(text, 3) == ()
    raw = manifest()
    raw["metadata"]["annotations"][PLACES_ANNOTATION] = text
    read = job_view(raw, SETTINGS.gpu_resource)
    assert read is not None and read.places == ()
    old = replace(read, created=NOW - 121)
    (back,) = decided(old, pods_of(old)).withdrawals
    assert back.next_turn == Turn(1, 0), "nobody lifts its gates, so it is taken back like any"


@given(
    st.lists(
        st.tuples(st.text(PRINTABLE, min_size=1, max_size=9), st.integers(1, 60)),
        min_size=1,
        max_size=8,
        unique_by=lambda p: p[0],
    )
)
def test_places_read_back_as_they_were(found: list[tuple[str, int]]) -> None:
    places = tuple(found)
    assert places_from(places_text(places), pods_in(places)) == places
    assert len(ranks(places)) == pods_in(places)


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "ü", "", "x" * 254, 7, None])
def test_no_node_is_called_what_no_history_can_hold(name: object) -> None:
    assert places_from(json.dumps([[name, 2]]), 2) == ()


def test_a_gated_pod_was_tried_by_nobody() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
    raw = raw_pod(4, status={"phase": "Pending", "conditions": [condition]})
    view = pod_view(raw, "nvidia.com/gpu")
    assert view is not None and (view.gated, view.index, view.blocked) == (True, 4, "")
    told = pod_view({**raw, "status": {"conditions": [{**condition, "reason": "Unschedulable"}]}}, "nvidia.com/gpu")
    assert told is not None and told.blocked == "gated"


# --- what is told of it ---------------------------------------------------------------------------------------------


def shown(it: JobView, pods: list[PodView], nodes: list[NodeView] = NODES) -> dict[str, Any]:
    name, worst = amiss(it, {n.name: n for n in nodes}.get)
    seen = Observation(NOW, GANG, (it,), tuple(pods), worst, node_name=name)
    status = project(GANG, next_step(seen, Turn(), None, 0.0), NOW)
    assert status is not None
    return status


def test_it_runs_when_all_its_pods_are_ready() -> None:
    it = made()
    started = shown(it, pods_of(it, "lll", nodes="aab", running=True))
    assert started["phase"] == "Scheduled"
    running = shown(replace(it, ready=True), [])
    assert running["message"] == "running on 2 nodes (a, b), 3 of 3 pods" and running["phase"] == "Running"
    assert (running["placedReplicas"], running["assignedNode"]) == (3, "a")
    assert running["nodes"] == [{"name": "a", "pods": 2}, {"name": "b", "pods": 1}]
    again = project(replace(GANG, status=running), next_step(Observation(NOW, GANG, (replace(
        it, finished="Failed", reason="BackoffLimitExceeded"),)), Turn(), None, 0.0), NOW)  # fmt: skip
    assert again is not None and again["placedReplicas"] is None and again["nodes"] is None


def test_of_its_nodes_the_one_that_is_amiss_is_told() -> None:
    it = made(ready=True)
    away = shown(it, [], [node("a"), node("b", ready=False)])
    assert away["message"].startswith("node b has not been ready") and away["phase"] == "Running"
    assert shown(it, [], [node("a")])["message"].startswith("node b is gone")
    lost = replace(it, finished="Failed", reason="PodFailurePolicy", ready=False)
    assert shown(lost, [], [node("a")])["message"].startswith(f"node b was deleted while Job {lost.name} ran there")
    assert "lost its place on 2 nodes (a, b)" in shown(lost, [])["message"]


def test_many_nodes_are_cut_short() -> None:
    assert on_nodes("a") == "node a"
    assert on_nodes("abcde") == "5 nodes (a, b, c and 2 more)"
    places = tuple((f"n{i}", 1) for i in range(100))
    it = made(places=places, ready=True)
    told = shown(it, [], [node(name) for name, _ in places])
    assert len(told["nodes"]) == 32 and told["placedReplicas"] == 100
