"""Views: whatever JSON the API server hands over, they read what is there, refuse what is wrong, and never raise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.failures import failure_detail
from planning.model import Resources
from planning.views import job_view, node_view, pod_view, requests_text, workload_view

GPU = "nvidia.com/gpu"

KEYS = st.sampled_from(
    [
        *("metadata", "spec", "status", "name", "uid", "labels", "annotations", "conditions", "containers", "template"),
        *("initContainers", "resources", "requests", "limits", "taints", "allocatable", "capacity", "type", "phase"),
        *("key", "value", "effect", "reason", "finalizers", "ownerReferences", "modelName", "gpuCount", "env", "args"),
        *("nodeSelector", "retryPolicy", "priority", "affinity", "tolerations", "generation", "resourceVersion", "cpu"),
        *("nvidia.com/gpu", "gpu.warp.dev/workload-uid", "gpu.warp.dev/attempt", "gpu.warp.dev/requests"),
        "creationTimestamp",
    ]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
    st.sampled_from(["True", "Ready", "Failed", "9e99", "1Gi", "-1", "2026-01-01T00:00:00Z", "0000-00-00T99:99:99Z"]),
)  # fmt: skip
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=6),
    max_leaves=30,
)  # fmt: skip
OBJECTS = st.fixed_dictionaries({}, optional={"metadata": JSON, "spec": JSON, "status": JSON})


@given(JSON | OBJECTS)
def test_no_json_makes_a_view_raise(raw: object) -> None:
    node_view(raw, GPU)
    pod_view(raw, GPU)
    job_view(raw, GPU)
    view = workload_view(raw)
    assert (view.spec is None) == bool(view.invalid)
    assert isinstance(view.phase, str)
    assert isinstance(view.finished, bool)
    failure_detail([raw])


def test_a_bottomless_spec_is_refused_and_not_kept() -> None:
    deep: Any = "x"
    for _ in range(200_000):
        deep = {"a": deep}
    view = workload_view({"metadata": {"uid": "u"}, "spec": {"modelName": "m", "gpuCount": 1, "template": deep}})
    assert view.spec is None and "64 KiB" in view.invalid
    while isinstance(deep, dict):  # take it apart by hand: the interpreter would recurse
        deep = deep["a"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "spec: must be an object"),
        ({}, "spec.modelName: is required; spec.gpuCount: is required"),
        ({"modelName": "m", "gpuCount": 9}, "spec.gpuCount: must be at most 8, not 9"),
        ({"modelName": "m", "gpuCount": 0}, "spec.gpuCount: must be at least 1, not 0"),
        ({"modelName": "m", "gpuCount": "1"}, "spec.gpuCount: must be an integer, not '1'"),
        ({"modelName": "m", "gpuCount": 1, "gpus": 2}, "spec.gpus: is not a field that berth knows"),
        ({"modelName": "m" * 256, "gpuCount": 1}, "spec.modelName: must have at most 255 characters"),
        ({"modelName": "m", "gpuCount": 1, "args": ["x" * 1_400_000]}, "spec: must be at most 128 KiB as JSON"),
    ],
)
def test_an_invalid_spec_says_where_and_why(spec: object, message: str) -> None:
    view = workload_view({"metadata": {"uid": "u"}, "spec": spec})
    assert view.spec is None and view.invalid == message


def node(**parts: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n", "labels": parts.pop("labels", {})}, "status": parts}


def test_allocatable_alone_counts() -> None:
    view = node_view(
        node(allocatable={GPU: "4", "cpu": "7910m", "memory": "1Gi", "pods": "110"}, capacity={GPU: "8"}), GPU
    )
    assert view.allocatable == Resources(4, 7910, 2**30, 110) and view.gaps == ()


@pytest.mark.parametrize(
    ("raw", "gap", "expected"),
    [
        (node(allocatable={GPU: "0"}, capacity={GPU: "8"}), "capacity shows 8 GPUs but allocatable 0", 8),
        (node(capacity={GPU: "8"}, labels={"nvidia.com/gpu.count": "4"}), "capacity shows 8", 8),
        (node(labels={"nvidia.com/gpu.count": "4"}), "label nvidia.com/gpu.count=4 but no GPU", 4),
        (node(labels={"nvidia.com/gpu.present": "true"}), "label nvidia.com/gpu.present=true", 0),
        (node(labels={"nvidia.com/gpu": "yes"}), "label nvidia.com/gpu=yes", 0),
        (node(labels={"nvidia.com/gpu.present": "false"}), "", 0),
        (node(), "", 0),
    ],
)
def test_why_a_gpu_node_counts_zero(raw: dict[str, Any], gap: str, expected: int) -> None:
    view = node_view(raw, GPU)
    assert [(found.why.startswith(gap), found.expected) for found in view.gaps] == [(True, expected)] * bool(gap)
    assert view.allocatable.gpus == 0


def test_readiness_cordon_and_taints() -> None:
    raw = {
        "metadata": {"name": "n"},
        "spec": {
            "unschedulable": True,
            "taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}],
        },
        "status": {
            "conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "1970-01-01T00:01:00Z"}]
        },
    }
    view = node_view(raw, GPU)
    assert (view.ready, view.unschedulable, view.out_of_service, view.not_ready_since) == (False, True, True, 60.0)


def pod(phase: str, **spec: Any) -> dict[str, Any]:
    meta = {"name": "p", "labels": {"gpu.warp.dev/workload-uid": "u"}}
    return {"metadata": meta, "spec": spec, "status": {"phase": phase}}


def test_a_pod_may_prefer_a_group_of_gpus() -> None:
    for said, prefers in (("G01", "G01"), ("no group!", ""), (7, "")):
        raw = pod("Running")
        raw["metadata"]["annotations"] = {"kyb.ai/prefer-group": said}
        view = pod_view(raw, GPU)
        assert view is not None and view.prefers == prefers


def test_ended_pods_hold_nothing_and_terminating_ones_do() -> None:
    assert pod_view(pod("Succeeded"), GPU) is None and pod_view(pod("Failed"), GPU) is None
    raw = pod("Running", nodeName="n", containers=[{"resources": {"limits": {GPU: "2"}}}])
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    view = pod_view(raw, GPU)
    assert view is not None and view.terminating and view.node == "n" and view.requests.gpus == 2


def test_why_a_pod_is_not_bound() -> None:
    raw = pod("Pending")
    raw["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
    view = pod_view(raw, GPU)
    assert view is not None and view.blocked == "0/3 nodes are available" and view.node == ""


def test_a_job_is_read_back_from_itself_and_a_damaged_one_from_its_template() -> None:
    raw: dict[str, Any] = {
        "metadata": {
            "name": "j", "uid": "x", "labels": {"gpu.warp.dev/workload-uid": "u", "gpu.warp.dev/attempt": "4"},
            "annotations": {
                "gpu.warp.dev/retries": "2", "gpu.warp.dev/node": "n",
                "gpu.warp.dev/requests": requests_text(Resources(2, 3, 4, 1)),
            },
        },
        "spec": {
            "activeDeadlineSeconds": 9,
            "template": {"spec": {"containers": [{"resources": {"limits": {GPU: 7}}}]}},
        },
        "status": {
            "conditions": [
                {"type": "FailureTarget", "status": "True", "reason": "X"},
                {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "evicted"},
            ]
        },
    }  # fmt: skip
    view = job_view(raw, GPU)
    assert view is not None and view.requests == Resources(2, 3, 4, 1)
    assert (view.attempt, view.retries, view.node, view.active_deadline) == (4, 2, "n", 9)
    assert (view.finished, view.reason, view.message) == ("Failed", "PodFailurePolicy", "evicted")
    raw["metadata"]["annotations"]["gpu.warp.dev/requests"] = '{"gpus":-1}'
    damaged = job_view(raw, GPU)
    assert damaged is not None and damaged.requests.gpus == 7


@pytest.mark.parametrize(
    ("status", "counted"),
    [
        ({}, False),
        ({"active": 0, "ready": 0, "uncountedTerminatedPods": {}}, False),
        ({"active": 1}, True),
        ({"active": 0, "terminating": 1}, True),
        ({"active": 0, "failed": 1}, True),
        # What the Job controller writes when a pod has ended, before it says that the Job has.
        ({"active": 0, "ready": 0, "uncountedTerminatedPods": {"succeeded": ["uid"]}}, True),
        ({"active": 0, "conditions": [{"type": "SuccessCriteriaMet", "status": "True"}]}, True),
        ({"active": 0, "conditions": [{"type": "FailureTarget", "status": "True"}]}, True),
    ],
)
def test_a_job_whose_pod_was_ever_counted_is_known(status: dict[str, Any], counted: bool) -> None:
    raw = {"metadata": {"uid": "j", "labels": {"gpu.warp.dev/workload-uid": "u"}}, "status": status}
    view = job_view(raw, GPU)
    assert view is not None and view.counted is counted


def test_a_job_that_the_ledger_takes_back_is_known_by_its_mark() -> None:
    meta: dict[str, Any] = {"uid": "j", "labels": {"gpu.warp.dev/workload-uid": "u"}}
    for given_marks, withdrawn in [({}, False), ({"gpu.warp.dev/withdrawn": "no place"}, True)]:
        view = job_view({"metadata": meta | {"annotations": given_marks}}, GPU)
        assert view is not None and view.withdrawn is withdrawn


@pytest.mark.parametrize(
    ("status", "halted"),
    [
        ({}, False),
        ({"conditions": [{"type": "Suspended", "status": "False"}]}, False),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, True),
        ({"conditions": [{"type": "Suspended", "status": "True"}], "active": 1}, False),
        ({"conditions": [{"type": "Suspended", "status": "True"}], "active": 0, "terminating": 1}, False),
        ({"conditions": "Suspended"}, False),
    ],
)
def test_a_stopped_job_is_halted_once_its_controller_counts_no_pod(status: dict[str, Any], halted: bool) -> None:
    marks = {"gpu.warp.dev/preempted": "for another"}
    meta = {"uid": "j", "labels": {"gpu.warp.dev/workload-uid": "u"}, "annotations": marks}
    for suspend in (True, False, None):
        view = job_view({"metadata": meta, "spec": {"suspend": suspend}, "status": status}, GPU)
        assert view is not None and (view.preempted, view.halted) == (suspend is True, halted and suspend is True)
        assert view.suspended == (suspend is True)


@pytest.mark.parametrize(
    ("mark", "resumed", "created"),
    [
        ("1800000000", True, 1.8e9),
        ("5", True, 1767225600.0),
        ("soon", False, 1767225600.0),
        ("9" * 20, False, 1767225600.0),
    ],
)
def test_a_resumed_job_counts_from_then(mark: str, resumed: bool, created: float) -> None:
    meta = {"uid": "j", "labels": {"gpu.warp.dev/workload-uid": "u"}, "creationTimestamp": "2026-01-01T00:00:00Z"}
    marked, stopped = meta | {"annotations": {"gpu.warp.dev/resumed": mark}}, {"type": "Suspended", "status": "True"}
    view = job_view({"metadata": marked, "status": {"conditions": [stopped]}}, GPU)
    assert view is not None and (view.resumed, view.created) == (resumed, created)
    never = job_view({"metadata": marked}, GPU)
    assert never is not None and (never.resumed, never.created) == (False, 1767225600.0), "its controller never had it"


@pytest.mark.parametrize(
    ("mark", "suspended", "at", "created"),
    [
        ("99999999999", "False", "2026-02-01T00:00:00Z", 1769904000.0),
        ("1769900000", "False", "2026-02-01T00:00:00Z", 1769900000.0),
        ("1769900000", "True", "2026-01-02T00:00:00Z", 1769900000.0),  # of the suspension that is over
        ("1769900000", "False", "then", 1769900000.0),
        ("soon", "False", "2026-02-01T00:00:00Z", 1767225600.0),
    ],
)
def test_no_mark_puts_off_the_deadline_of_a_job_that_its_controller_let_go_on(
    mark: str, suspended: str, at: str, created: float
) -> None:
    meta = {"uid": "j", "labels": {"gpu.warp.dev/workload-uid": "u"}, "creationTimestamp": "2026-01-01T00:00:00Z"}
    told = {"conditions": [{"type": "Suspended", "status": suspended, "lastTransitionTime": at}]}
    view = job_view({"metadata": meta | {"annotations": {"gpu.warp.dev/resumed": mark}}, "status": told}, GPU)
    assert view is not None and view.created == created


def test_numbers_that_no_status_can_hold_are_cut() -> None:
    labels = {"gpu.warp.dev/workload-uid": "u", "gpu.warp.dev/attempt": "9" * 20}
    view = job_view(
        {"metadata": {"uid": "j", "labels": labels, "annotations": {"gpu.warp.dev/retries": "9" * 20}}}, GPU
    )
    assert view is not None and view.attempt == view.retries == 2**31 - 1


def test_a_template_may_be_deep_but_not_bottomless() -> None:
    def deep(levels: int) -> dict[str, Any]:
        template: dict[str, Any] = {}
        for _ in range(levels - 1):
            template = {"a": template}
        return {"metadata": {"uid": "u"}, "spec": {"modelName": "m", "gpuCount": 1, "template": template}}

    refused = "spec.template: must not be nested deeper than 64 levels"
    assert workload_view(deep(64)).invalid != refused
    for levels in (65, 251, 400):
        assert workload_view(deep(levels)).invalid == refused


def test_jobs_of_others_are_not_ours() -> None:
    assert job_view({"metadata": {"name": "j", "labels": {"app": "x"}}}, GPU) is None


def test_a_tombstone_stays_one_however_large_its_status() -> None:
    view = workload_view({"spec": {}, "status": {"phase": "Failed", "message": "x" * 100_000}})
    assert view.finished and "message" not in view.status
