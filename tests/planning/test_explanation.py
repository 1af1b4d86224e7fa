"""What `berth explain` says of a workload: the same that placement would decide, and what would change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.settings import Settings
from planning.accelerators import AMD
from planning.capacity import Belongings, holdings, room
from planning.explanation import Explanation, explain, keeps_off
from planning.jobs import shape_of
from planning.model import Gap, NodeView, Resources, Snapshot, WorkloadView
from planning.naming import spec_hash
from tests.planning.builders import (
    ASKED,
    NOW,
    SETTINGS,
    job,
    node,
    placed,
    pod,
    quota,
    reservation,
    round_of,
    snapshot,
    taint,
    workload,
)


def told(seen: Snapshot, name: str = "w") -> Explanation:
    found = explain(seen, SETTINGS, "ns", name)
    assert found is not None
    return found


def test_nobody_of_that_name() -> None:
    assert explain(snapshot([node("n")], [workload("w")]), SETTINGS, "other", "w") is None


@pytest.mark.parametrize(
    ("view", "state", "message"),
    [
        (workload("w", status={"phase": "Succeeded", "message": "done"}), "ended", "done"),
        (workload("w", 99), "invalid", "gpuCount"),
        (workload("w", spec={"suspend": True}), "suspended", ""),
    ],
)
def test_who_is_not_in_the_queue(view: WorkloadView, state: str, message: str) -> None:
    found = told(snapshot([node("n")], [view]))
    assert found.state == state and message in found.message and found.nodes == ()


def test_a_job_that_goes_on_is_named_with_its_node() -> None:
    ended = job("w", "b", 0, finished="Failed")
    found = told(snapshot([node("n")], [workload("w")], jobs=[ended, job("w", "n", 1)]))
    assert (found.state, found.job, found.node) == ("placed", job("w", "n", 1).name, "n")
    assert told(snapshot([node("n")], [workload("w")], jobs=[ended])).state == "outside", "until that Job is gone"
    assert told(snapshot([node("n")], [workload("w")])).state == "queued"


def test_who_was_stopped_is_in_the_queue_once_its_job_may_go_on() -> None:
    made_from = workload("w").spec
    assert made_from is not None
    stopped = job("w", "n", preempted=True, spec_hash=spec_hash(made_from))
    seen = snapshot([node("n")], [workload("w")], jobs=[stopped])
    assert told(seen).state == "outside", "its pods are still going"
    found = told(replace(seen, jobs=(replace(stopped, halted=True),)))
    assert (found.state, found.position, found.next_node) == ("queued", 1, "n")
    assert told(replace(seen, jobs=(replace(stopped, halted=True, started=NOW),))).state == "outside", "it is replaced"


def test_who_backs_off_or_names_a_strategy_that_nobody_has_is_not_promised_a_place() -> None:
    backing_off = workload("w", status={"phase": "Pending", "message": "retry 1 of 3 in 30 s"})
    found = told(snapshot([node("n")], [backing_off]))
    assert (found.state, found.message, found.queued) == ("outside", "retry 1 of 3 in 30 s", 0)
    unknown = told(snapshot([node("n")], [workload("w", spec={"schedulingStrategy": "nope"})]))
    assert unknown.state == "outside" and "'nope' is not installed" in unknown.message


def test_every_node_is_counted_by_what_keeps_it_out() -> None:
    nodes = [
        node("cordoned", unschedulable=True),
        node("small", 2),
        node("none", 0),
        node("tainted", taints=(taint("team", value="a"),)),
        node("busy"),
        node("coming", 0, gaps=(Gap(8, "its driver is not ready"),)),
        node("full-of-cpu", allocatable=Resources(8, 1000, 2**40, 110)),
    ]
    asks = {"resources": {"requests": {"cpu": "8"}}}
    found = told(snapshot(nodes, [workload("w", 4, spec=asks)], pods=[pod("p", "busy", gpus=5)]))
    assert dict(found.reasons) == {
        "cordoned": 1,
        "too few GPUs": 1,
        "no GPUs": 1,
        "tainted team=a:NoSchedule": 1,
        "short of free GPUs": 1,
        "its driver is not ready": 1,
        "short of free CPU": 1,
    }
    assert found.asks == Resources(4, 8000, 0, 1) and found.strategy == "leastLoaded"
    assert set(found.helps) == {
        "asking for 3 GPUs instead of 4: fits busy now",
        "asking for at most 1 CPU: fits full-of-cpu now",
        "tolerating team=a:NoSchedule: fits tainted now",
        "cordoned uncordoned: it would fit there",
    }


def test_a_node_that_is_not_ready_or_not_selected_is_among_what_would_help() -> None:
    away = node("away", ready=False, taints=(taint("node.kubernetes.io/unreachable", "NoExecute"),))
    found = told(
        snapshot([away, node("other")], [workload("w", spec={"nodeSelector": {"kubernetes.io/hostname": "away"}})])
    )
    assert "away ready: it would fit there" in found.helps
    assert "without its nodeSelector and node affinity: fits other now" in found.helps


def test_gpu_memory_and_other_vendors_are_told_apart() -> None:
    nodes = [
        node("small", gpu_memory=(("", 24_576),)),
        node("amd", allocatable=Resources(8, 64_000, 2**38, 110, gpu_resource=AMD)),
        node("busy", gpu_memory=(("", 81_559),)),
    ]
    found = told(snapshot(nodes, [workload("w", 4, spec={"gpuMemory": "40Gi"})], pods=[pod("p", "busy", gpus=8)]))
    assert dict(found.reasons) == {
        "with GPUs of 24 GiB (it needs 40 GiB)": 1, "no GPUs": 1, "short of free GPUs": 1,
    }  # fmt: skip
    assert found.helps == ("without gpuMemory: fits small now",)
    assert {each.name: (each.free.gpus, each.gpus) for each in found.nodes}["amd"] == (0, 0)
    asks = told(snapshot(nodes, [workload("w", 4, spec={"gpuResource": AMD})]))
    assert asks.next_node == "amd" and dict(asks.reasons) == {"": 1, f"no {AMD}": 2}
    assert {each.name: (each.free.gpus, each.gpus) for each in asks.nodes} == {
        "amd": (8, 8), "busy": (0, 0), "small": (0, 0),
    }  # fmt: skip


def test_its_place_in_the_queue_and_who_is_before_it() -> None:
    queue = [
        workload("young", 8, created=NOW - 1),
        workload("high", 8, spec={"priority": "high"}),
        workload("w", 8, created=NOW - 9),
        workload("runs", 8, created=NOW - 99),
        workload("asleep", 8, spec={"suspend": True}, created=NOW - 99),
        workload("done", 8, status={"phase": "Failed"}, created=NOW - 99),
    ]
    found = told(snapshot([node("n")], queue, jobs=[job("runs", "n", gpus=8)]))
    assert (found.position, found.queued, found.ahead) == (2, 3, ("ns/high",))


def test_nodes_that_hold_it_come_first_in_the_strategys_order() -> None:
    nodes = [node("a", 2), node("b", 4), node("c", 8), node("d", 1)]
    view = workload("w", 2, spec={"schedulingStrategy": "mostAllocated"})
    found = told(snapshot(nodes, [view]))
    assert [(each.name, each.rank) for each in found.nodes] == [
        ("a", (2000,)), ("b", (4000,)), ("c", (8000,)), ("d", None),
    ]  # fmt: skip
    assert found.helps == () and dict(found.reasons)[""] == 3


clusters = st.lists(
    st.tuples(st.integers(0, 8), st.booleans(), st.booleans(), st.sampled_from([(), (taint("x"),)]), st.integers(0, 8)),
    min_size=1,
    max_size=5,
)


@given(clusters, st.integers(1, 8), st.sampled_from(["leastLoaded", "headroom", "random"]))
def test_what_it_says_is_what_placement_does(
    cluster: list[tuple[int, bool, bool, tuple[object, ...], int]], gpus: int, strategy: str
) -> None:
    nodes: list[NodeView] = [
        node(f"n{i}", whole, ready=ready, unschedulable=cordoned, taints=taints)
        for i, (whole, ready, cordoned, taints, _) in enumerate(cluster)
    ]
    pods = [pod(f"p{i}", f"n{i}", gpus=min(used, whole)) for i, (whole, *_, used) in enumerate(cluster)]
    seen = snapshot(nodes, [workload("w", gpus, spec={"schedulingStrategy": strategy})], pods=pods)
    found, decided = told(seen), placed(round_of(seen))
    assert bool(decided) == any(not each.why for each in found.nodes)
    if decided and strategy != "random":
        assert decided["w"] == found.nodes[0].name, "the first is the one that it gets"
    assert sum(count for _, count in found.reasons) == len(nodes)


def test_each_help_alone_is_enough() -> None:
    nodes = [node("a", 4), node("b", 8, unschedulable=True), node("c", 8, taints=(taint("x"),))]
    view = workload("w", 8)
    found = told(snapshot(nodes, [view]))
    assert [help_.split(":")[0] for help_ in found.helps] == [
        "asking for 4 GPUs instead of 8", "tolerating x", "b uncordoned",
    ]  # fmt: skip
    assert placed(round_of(snapshot(nodes, [workload("w", 4)])))
    assert placed(round_of(snapshot(nodes, [workload("w", 8, spec={"tolerations": [{"key": "x"}]})]))) == {"w": "c"}
    mended = [replace(each, unschedulable=False) for each in nodes]
    assert placed(round_of(snapshot(mended, [view]))) == {"w": "b"}


def test_keeps_off_agrees_with_what_is_left() -> None:
    seen = snapshot([node("n", 4)], [workload("w", 4)], pods=[pod("p", "n", gpus=1)])
    left = room(seen.nodes, holdings(seen, {}, Belongings.of((), seen.pods), ASKED, 30))["n"]
    spec = seen.workloads[0].spec
    assert spec is not None and keeps_off(shape_of(spec, SETTINGS), seen.nodes[0], left) == "short of free GPUs"


def test_it_tells_the_start_and_the_quota_of_who_waits() -> None:
    there = job("r", "n", gpus=8, started=NOW - 100, ready=True, counted=True)
    mine = workload("w", 4, namespace="ns", created=NOW - 9)
    bound = workload("r", 8, spec={"activeDeadlineSeconds": 700})
    seen = snapshot(
        [node("n", 8)], [bound, mine], jobs=[there], pods=[pod("p", "n", of=there)], quotas=[quota("q", "ns", gpus=16)]
    )
    told = explain(seen, SETTINGS, "ns", "w")
    assert told is not None and told.state == "queued" and told.next_node == ""
    assert told.start == (600.0, 600.0)
    assert told.quota == ("GPUQuota q: 8 GPUs of 16 GPUs used, 8 GPUs to be had",)
    assert "none has 4 free now" in told.message
    free = explain(replace(seen, jobs=(), pods=(), workloads=(mine,)), SETTINGS, "ns", "w")
    assert free is not None and free.next_node == "n" and free.start == (0.0, 0.0)


def test_a_gangs_arithmetic_is_told_by_node_and_by_domain() -> None:
    rack = "example.com/rack"
    nodes = [
        node("a", 8, labels={rack: "x"}),
        node("b", 8, labels={rack: "y"}),
        node("c", 8, labels={rack: "y"}),
        node("d", 8, labels={rack: "y"}, unschedulable=True),
    ]
    near = {"replicas": 5, "minReplicas": 4, "topology": {"level": rack}}
    view = workload("w", 4, spec=near)
    busy = [pod("p", "b", gpus=4)]
    found = told(snapshot(nodes, [view], pods=busy))
    assert (found.pods, found.least, found.asks.gpus) == (5, 4, 4)
    assert {report.name: report.fits for report in found.nodes} == {"a": 2, "b": 1, "c": 2, "d": 0}
    assert [(each.name, each.fits, each.empty) for each in found.domains] == [("y", 3, 6), ("x", 2, 2)]
    assert found.helps == (
        "minReplicas: 3 or less: so many of its pods fit now",
        "topology.mode: Preferred: 5 of its pods fit now in several domains",
    )
    for spec in ({**near, "minReplicas": 3}, {**near, "topology": {"level": rack, "mode": "Preferred"}}):
        helped = told(snapshot(nodes, [workload("w", 4, spec=spec)], pods=busy))
        assert helped.helps == () and helped.next_places and helped.next_node == helped.next_places[0][0]
    placed_ = job("w", "a", places=(("a", 2), ("b", 1)))
    assert told(snapshot(nodes, [view], jobs=[placed_])).places == (("a", 2), ("b", 1))


def test_how_far_a_node_is_that_was_ordered_for_it_its_status_tells() -> None:
    settings, _ = Settings.parse({"provisioning": {"className": "c"}})
    assert settings is not None
    conditions = [{"type": "Scheduled", "status": "False", "reason": "Provisioning"}]
    status = {"phase": "Scheduling", "observedGeneration": 1, "message": "accepted", "conditions": conditions}
    seen = snapshot([node("n", 4)], [workload("w", 8, status=status), workload("v", 8)])
    asked = {name: explain(seen, settings, "ns", name) for name in "wv"}
    assert {name: found.message for name, found in asked.items() if found is not None} == {
        "w": "accepted",
        "v": "no node has 8 GPUs; the largest has 4; a node is ordered for it",
    }


def test_it_tells_what_reservations_keep_it_off_and_when_a_window_begins() -> None:
    keeps = reservation("r", gpus=8, start=600, end=1200)
    shown = replace(keeps, status={"nodes": [{"name": "b", "gpus": 8}]})
    nodes = [node("a", 8), node("b", 8)]
    held = job("f", "a", gpus=8)
    there: dict[str, Any] = {"jobs": [held], "pods": [pod("p", "a", of=held)], "reservations": [shown]}
    found = told(snapshot(nodes, [workload("w", 4), workload("f", 8)], **there))
    assert {each.name: each.why for each in found.nodes} == {
        "a": "short of free GPUs",
        "b": "kept for GPUReservation r",
    }
    assert "what is free on node b is kept for GPUReservation r from" in found.message
    assert found.start == (1200.0, 1200.0), "when it is over"
    assert not found.helps, "fewer GPUs would not help"
    free = told(snapshot(nodes, [workload("w", 4, spec={"preemptible": True}), workload("f", 8)], **there))
    assert (free.next_node, free.start) == ("b", (0.0, 0.0))
    named = told(snapshot(nodes, [workload("w", 4, spec={"reservation": "r"}), workload("f", 8)], **there))
    assert {each.name: each.why for each in named.nodes} == {"a": "without 4 GPUs left of GPUReservation r", "b": ""}
    assert named.message.startswith("GPUReservation r begins at") and named.start == (600.0, 600.0)


def test_of_a_gang_that_names_a_reservation_it_tells_how_many_fit_there() -> None:
    keeps = reservation("r", gpus=5, start=0, end=1200)
    shown = replace(keeps, status={"nodes": [{"name": "b", "gpus": 5}]})
    gang = workload("w", 2, spec={"reservation": "r", "replicas": 3})
    found = told(snapshot([node("a", 8), node("b", 8)], [gang], reservations=[shown]))
    assert {each.name: (each.why, each.fits) for each in found.nodes} == {
        "a": ("without 2 GPUs left of GPUReservation r", 0),
        "b": ("", 2),
    }
    assert found.message == (
        "needs 3 pods with 2 GPUs each; what is left of the 5 GPUs of GPUReservation r has room for 2 of them, now for "
        "2; 5 GPUs are kept on node b"
    )


def test_of_kernel_caches_it_tells_where_they_are_and_what_the_next_round_makes_of_that() -> None:
    volumes = [
        {"name": name, "csi": {"driver": "csi.tkm.io", "volumeAttributes": {"kernel-name": name, "scope": scope}}}
        for name, scope in (("k", "namespace"), ("l", "cluster"))
    ]
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in "kl"]
    pod_spec = {"containers": [{"name": "c", "image": "i", "volumeMounts": mounts}], "volumes": volumes}
    view = workload("w", 2, spec={"template": {"spec": pod_spec}})
    warm = {("ns", "k"): frozenset("bcd"), ("", "l"): frozenset("d"), ("other", "k"): frozenset("a")}
    nodes = [node("a"), node("b", 4), node("c", 2), node("d", 1)]
    found = told(snapshot(nodes, [view], warm=warm))
    assert found.caches == (("k", 3), ("l of the cluster", 1))
    assert [(each.name, each.warm) for each in found.nodes] == [("b", 1), ("c", 1), ("a", 0), ("d", 2)]
    assert found.next_node == "b", "leastLoaded, of the two that are as warm"
    assert found.next_warmth == "1 of its 2 kernel caches is ready there: no node with more could take it"
    plain = told(snapshot(nodes, [workload("w", 2)], warm=warm))
    assert (plain.next_node, plain.caches, plain.next_warmth) == ("a", (), "")
    assert plain.nodes[0].rank is not None and len(plain.nodes[0].rank) == len(found.nodes[0].rank or ())
