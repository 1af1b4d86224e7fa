"""One order's steps: each condition of a ProvisioningRequest is answered once, and nobody has one who needs none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.settings import Provisioning as Rules
from crds.settings import Settings
from planning import naming
from planning.accelerators import AMD, NVIDIA, SEAT
from planning.filters import Constraints, affine
from planning.jobs import job_manifest
from planning.model import Booking, RequestView
from planning.podspecs import node_terms
from planning.requests import LONGEST_BACKOFF, LOOK_AGAIN, Observation, Step, failed, next_step, order_manifests
from planning.views import request_view
from tests.planning.builders import NOW, SETTINGS, job, node, pod, promise, workload

RULES = Rules(class_name="c", parameters={"a": "b"}, retries=2, backoff_seconds=60)


def request(attempt: int = 0, **changes: Any) -> RequestView:
    name = naming.request_name("w", "w", 1, attempt)
    return replace(RequestView(name, f"uid-{attempt}", attempt, 1, "c", NOW - 10), **changes)


def seen(*requests: RequestView, **changes: Any) -> Observation:
    view = Observation(
        NOW, 1, 0, workload("w", 4), (), (), requests,
        known=bool(requests), coming=False, jitter=0.0, gpu_resource=SETTINGS.gpu_resource,
    )  # fmt: skip
    return replace(view, **changes)


def step(*requests: RequestView, **changes: Any) -> Step:
    return next_step(seen(*requests, **changes), RULES)


def test_a_request_is_made_where_there_is_none() -> None:
    assert step().kind == "order"


def test_an_open_one_is_waited_for_and_told_of() -> None:
    made = step(request())
    assert (made.kind, made.stage, made.within) == ("wait", "ordered", LOOK_AGAIN)
    name = naming.request_name("w", "w", 1, 0)
    assert made.message == (
        f"ordered 1 node for 4 GPUs (ProvisioningRequest {name}) at 1970-01-12T13:46:30Z; not accepted yet"
    )
    accepted = step(request(accepted=NOW - 5))
    assert accepted.stage == "accepted" and accepted.message.endswith("; accepted at 1970-01-12T13:46:35Z")
    provisioned = step(request(accepted=NOW - 5, provisioned=NOW - 2))
    assert provisioned.stage == "provisioned" and "; provisioned at 1970-01-12T13:46:38Z" in provisioned.message


@pytest.mark.parametrize(
    ("asks", "told"),
    [
        ({"gpuResource": AMD, "gpuCount": 4}, "1 node for 4 amd.com/gpu ("),
        ({"gpuFraction": 0.5}, f"1 node for 1 {SEAT} ("),
        ({"gpuResource": AMD, "replicas": 2}, "nodes for 2 pods of 1 amd.com/gpu each ("),
        ({"gpuResource": NVIDIA}, "1 node for 1 GPU ("),
    ],
)
def test_the_order_names_what_is_ordered(asks: dict[str, Any], told: str) -> None:
    assert step(request(), workload=workload("w", spec=asks)).message.startswith(f"ordered {told}")


def test_a_look_is_due_when_its_time_is_over() -> None:
    assert step(request(created=NOW - RULES.timeout_seconds + 7)).within == 7
    assert step(request(provisioned=NOW - RULES.booking_seconds + 7)).within == 7


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"failed": "sold out"}, "Failed", "sold out"),
        ({"provisioned": NOW, "revoked": "gone"}, "CapacityRevoked", "gone"),
        ({"provisioned": NOW, "expired": "ten minutes"}, "BookingExpired", "ten minutes"),
        ({"provisioned": NOW - 600}, "BookingExpired", "the workload found no place in the 600 s"),
        ({"created": NOW - 900}, "TimedOut", "it was not provisioned in 900 s"),
        ({"created": NOW - 900, "accepted": NOW - 890}, "TimedOut", "it was not provisioned in 900 s"),
        ({"deleting": True}, "RequestDeleted", "somebody deleted it"),
    ],
)
def test_one_in_vain_is_followed_by_another_until_retries_are_used_up(
    changes: dict[str, Any], reason: str, said: str
) -> None:
    first = step(request(**changes))
    assert (first.kind, first.reason, first.within) == ("retry", reason, 60)
    assert said in first.message and first.message.endswith("; retry 1 of 2 in 60 s")
    second = step(request(1, **changes), attempt=1)
    assert (second.kind, second.within) == ("retry", 120)
    last = step(request(2, **changes), attempt=2)
    assert (last.kind, last.reason) == ("fail", reason)
    assert last.message.endswith("; given up after 3 tries")


def test_one_that_vanished_is_not_simply_made_again() -> None:
    gone = step(known=True)
    assert (gone.kind, gone.reason) == ("retry", "RequestDeleted")


def test_the_backoff_has_an_end() -> None:
    patient = Rules(class_name="c", retries=20, backoff_seconds=60)
    assert failed(seen(attempt=19), patient, "Failed", "x").within == LONGEST_BACKOFF


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"workload": None}, "gone"),
        ({"workload": workload("w", deleting=True)}, "gone"),
        ({"workload": workload("w", status={"phase": "Failed"})}, "gone"),
        ({"workload": workload("w", generation=2)}, "edited"),
        ({"workload": workload("w", spec={"suspend": True})}, "suspended"),
        ({"jobs": (job("w", "n", ready=True),)}, "has a place"),
        ({"jobs": (job("w", "n", finished="Failed"),)}, "has a place"),
        ({"jobs": (job("w", "n"),), "pods": (pod("p", "n", of=job("w", "n")),)}, "has a place"),
    ],
)
@pytest.mark.parametrize("requests", [(), (request(),), (request(failed="x"),), (request(provisioned=NOW),)])
def test_who_needs_no_node_has_none_on_order(requests: tuple[RequestView, ...], changes: Any, why: str) -> None:
    ended = next_step(seen(*requests, **changes), RULES)
    assert ended.kind == "over" and why in ended.message


def test_orders_end_with_the_settings() -> None:
    assert next_step(seen(request()), None).kind == "over"


def test_a_job_whose_pod_is_not_bound_yet_still_needs_its_booking() -> None:
    waits = step(request(provisioned=NOW), jobs=(job("w", "n"),), pods=(pod("p", of=job("w", "n")),))
    assert waits.kind == "wait" and waits.within < LOOK_AGAIN


def test_while_a_node_is_coming_none_is_ordered() -> None:
    assert step(attempt=1, coming=True).kind == "wait"
    assert step(request(1), attempt=1, coming=True).stage == "ordered"


def test_what_is_there_already_is_taken_over_when_nobody_remembers_it() -> None:
    """Temporal's data was lost: the request is not, and another would be a second node."""
    found = step(request(2, accepted=NOW), known=False)
    assert found.kind == "wait" and found.request is not None and found.request.attempt == 2
    assert step(request(2, failed="x"), known=False).kind == "fail", "its retries are not given anew"
    assert step(request(2, generation=7), known=False).kind == "order", "of another spec"
    assert step(request(2, deleting=True), known=False).kind == "order"


def test_a_name_that_is_being_freed_is_waited_for() -> None:
    waits = step(request(0, deleting=True), known=False)
    assert waits.kind == "wait" and not waits.stage


# --- what is made, and read back -----------------------------------------------------------------------------------


def test_what_is_made_is_the_pod_as_its_job_will_make_it() -> None:
    view = workload("w", 4, spec={"nodeSelector": {"pool": "a"}, "resources": {"requests": {"cpu": "2"}}})
    template, order = order_manifests(view, 3, SETTINGS, RULES)
    name = naming.request_name("w", "w", 1, 3)
    assert template["metadata"]["name"] == order["metadata"]["name"] == name
    assert order["spec"] == {
        "provisioningClassName": "c",
        "parameters": {"a": "b"},
        "podSets": [{"count": 1, "podTemplateRef": {"name": name}}],
    }
    assert order["metadata"]["ownerReferences"][0]["uid"] == "w"
    real = job_manifest(view, replace(promise("w", "n", gpus=4), booking=Booking(name, "c")), SETTINGS)
    wanted = real["spec"]["template"]
    del wanted["spec"]["affinity"]  # the node is not chosen yet
    booked = {naming.CONSUME_ANNOTATION: name, naming.CLASS_ANNOTATION: "c"}
    assert wanted["metadata"]["annotations"].items() >= booked.items()
    assert template["template"]["spec"] == wanted["spec"]
    found = request_view(order)
    assert (found.name, found.attempt, found.generation, found.class_name) == (name, 3, 1, "c")


@pytest.mark.parametrize(
    ("asks", "label", "large", "small"),
    [
        ({"gpuMemory": "80Gi"}, "nvidia.com/gpu.memory", 81920, 81919),
        ({"gpuMemory": "1Mi", "gpuFraction": 0.5}, "nvidia.com/gpu.memory", 1, 0),
        ({"gpuMemory": "80Gi", "gpuResource": AMD}, "amd.com/gpu.memory", 81920, 81919),
    ],
)
def test_an_order_asks_for_gpus_with_enough_memory(asks: dict[str, Any], label: str, large: int, small: int) -> None:
    """Else an idle node whose GPUs are too small answers it, for ever; the Job itself is placed by berth."""
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    required = {"nodeSelectorTerms": [{}, {"matchExpressions": [zone]}]}
    own = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}
    containers = {"containers": [{"name": "main", "image": "i"}]}
    for more, labels in ({}, {}), ({"template": {"spec": {**containers, **own}}}, {"zone": "a"}):
        view = workload("w", spec={**asks, **more})
        template, _ = order_manifests(view, 0, SETTINGS, RULES)
        taken = Constraints(affinity=node_terms(template["template"]["spec"]["affinity"]))
        assert not affine(taken, node("large", labels={**labels, label: str(large)}))
        assert affine(taken, node("small", labels={**labels, label: str(small)}))
        assert not affine(taken, node("untold", labels=labels)), "a group at zero often does not show its labels"
        assert affine(taken, node("elsewhere", labels={label: str(large)})) == ("its node affinity" if labels else "")
        assert label not in str(job_manifest(view, promise("w", "n"), SETTINGS))


def test_a_pod_without_a_booking_names_none() -> None:
    made = job_manifest(workload("w"), promise("w", "n"), SETTINGS)
    assert not made["spec"]["template"]["metadata"]["annotations"].keys() & {
        naming.CONSUME_ANNOTATION, naming.CLASS_ANNOTATION,
    }  # fmt: skip


def test_of_conditions_only_the_true_ones_count() -> None:
    def read(*conditions: Any) -> RequestView:
        return request_view({"metadata": {"name": "r"}, "status": {"conditions": list(conditions)}})

    at = "2026-01-01T00:00:00Z"
    not_found = {"type": "Provisioned", "status": "False", "lastTransitionTime": at, "message": "later"}
    assert read(not_found) == read()
    told = read(
        {"type": "Accepted", "status": "True", "lastTransitionTime": at},
        {"type": "Failed", "status": "True", "lastTransitionTime": at, "reason": "Expired", "message": ""},
    )
    assert told.accepted == 1767225600.0 and told.failed == "Expired" and told.expired is None


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda children: st.lists(
    children, max_size=3) | st.dictionaries(st.sampled_from(["metadata", "status", "conditions", "type", "labels"]),
                                            children, max_size=3)))  # fmt: skip
def test_any_object_can_be_read(raw: Any) -> None:
    assert request_view(raw).attempt == 0


@given(st.text("abc-.", min_size=1, max_size=253), st.integers(1, 10**6), st.integers(0, 99))
def test_names_are_valid_and_differ(name: str, generation: int, attempt: int) -> None:
    made = naming.request_name(name, "0a1b2c3d-e4f5", generation, attempt)
    assert len(made) <= 63 and made.strip("-") == made and set(made) <= set("abcdefgw0123456789-")
    assert made != naming.request_name(name, "0a1b2c3d-e4f5", generation + 1, attempt)
    assert made != naming.request_name(name, "0a1b2c3d-e4f5", generation, attempt + 1)
    assert made != naming.request_name(name, "1a1b2c3d-e4f5", generation, attempt)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "settings.yaml.provisioning.className: is required"),
        ({"className": "No Class"}, "settings.yaml.provisioning.className: must match"),
        ({"className": "c", "retries": -1}, "settings.yaml.provisioning.retries: must be at least 0, not -1"),
        ({"className": "c", "parameters": {"a": 1}}, "settings.yaml.provisioning.parameters.a: must be a string"),
        ({"className": "c", "parameters": {"a": "x" * 256}}, "settings.yaml.provisioning.parameters.a: must have at"),
        ({"className": "c", "backoffSeconds": 1801}, "settings.yaml.provisioning.backoffSeconds: must be at most"),
        ({"className": "c", "class": "d"}, "settings.yaml.provisioning.class: is not a field that berth knows"),
        ("c", "settings.yaml.provisioning: must be an object"),
    ],
)
def test_wrong_settings_are_refused_with_place_and_reason(given: Any, message: str) -> None:
    settings, wrong = Settings.parse({"provisioning": given})
    assert settings is None and wrong.startswith(message), wrong


def test_a_gang_orders_room_for_all_of_its_pods_and_no_gate_hides_them_from_the_autoscaler() -> None:
    template, made = order_manifests(workload("w", 8, spec={"replicas": 10}), 0, SETTINGS, RULES)
    assert made["spec"]["podSets"][0]["count"] == 10
    elastic = workload("w", 8, spec={"replicas": 512, "minReplicas": 2})
    _, made = order_manifests(elastic, 0, SETTINGS, RULES)
    assert made["spec"]["podSets"][0]["count"] == 2, "what its quota was asked for"
    assert "schedulingGates" not in template["template"]["spec"]


def test_a_gang_has_its_place_when_all_of_its_pods_have() -> None:
    gang, running = workload("w", 8, spec={"replicas": 2}), job("w", "n", ready=True)
    bound, waits = pod("a", "n", of=running), pod("b", of=running)
    half = step(request(provisioned=NOW), workload=gang, jobs=(running,), pods=(bound, waits))
    assert half.kind == "wait" and half.message.startswith("ordered nodes for 2 pods of 8 GPUs each (")
    whole = step(request(provisioned=NOW), workload=gang, jobs=(running,), pods=(bound, pod("b", "m", of=running)))
    assert whole.kind == "over"
