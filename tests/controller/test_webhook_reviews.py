"""AdmissionReview in and out: an answer for every review, a reason for everything else, an error for nothing."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.webhooks.reviews import Answer, fill_in, validate
from planning.admission import Installation
from tests.controller.webhook_rig import PLAIN, cache_question, question

TEAM = Installation(namespace_strategies={"team-a": "headroom"})
DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=15,
)


def response(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    told = orjson.loads(answer.body)
    assert (told["apiVersion"], told["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert told["response"]["uid"] == "a-b-c"
    return dict(told["response"])


def test_a_good_workload_is_let_in() -> None:
    assert response(validate(question(), TEAM)) == {"uid": "a-b-c", "allowed": True}


def test_a_bad_one_is_refused_in_words() -> None:
    answer = validate(question({**PLAIN, "schedulingStrategy": "nope"}), TEAM)
    told = response(answer)
    assert (told["allowed"], told["status"]["code"], told["status"]["reason"]) == (False, 422, "Invalid")
    assert told["status"]["message"].startswith("spec.schedulingStrategy: there is no strategy 'nope'; installed are")
    assert (answer.kind, answer.result) == ("GPUWorkload", "refused")


def test_an_edit_is_held_against_what_was() -> None:
    bad = {**PLAIN, "schedulingStrategy": "nope"}
    assert response(validate(question({**bad, "suspend": True}, bad), TEAM))["allowed"]
    assert not response(validate(question(bad, PLAIN), TEAM))["allowed"]


@pytest.mark.parametrize(
    ("kind", "bad", "where"),
    [
        ("TritonKernelCache", {"ociImage": {"image": "team/cache"}}, "spec.ociImage.image: "),
        (
            "TritonKernelCacheCluster",
            {"ociImage": {"image": "r.example/a", "pullPolicy": "Never"}},
            "spec.ociImage.pull",
        ),
        (
            "KernelCachePolicy",
            {"images": ["r.example/*"], "signers": [{"name": "a", "key": "x"}]},
            "spec.signers[0].key",
        ),
    ],
)
def test_kernel_caches_and_their_policies_are_refused_in_words(kind: str, bad: dict[str, Any], where: str) -> None:
    answer = validate(cache_question(bad, kind), TEAM)
    told = response(answer)
    assert (told["allowed"], answer.kind, answer.result) == (False, kind, "refused")
    assert told["status"]["message"].startswith(where)
    assert response(validate(cache_question(bad, kind, old=bad), TEAM))["allowed"]
    assert response(fill_in(cache_question(bad, kind), TEAM)) == {"uid": "a-b-c", "allowed": True}


def test_a_warning_comes_with_leave() -> None:
    image = "r.example/a@sha256:" + "0" * 64
    answer = validate(cache_question({"ociImage": {"image": image}, "updatePolicy": {"type": "OnTagChange"}}), TEAM)
    (told,) = response(answer)["warnings"]
    assert told.startswith("spec.updatePolicy.type: OnTagChange follows nothing")


def test_what_is_filled_in_is_a_patch() -> None:
    answer = fill_in(question(), TEAM)
    told = response(answer)
    assert (told["allowed"], told["patchType"], answer.result) == (True, "JSONPatch", "filled_in")
    (change,) = orjson.loads(base64.b64decode(told["patch"]))
    assert change == {"op": "add", "path": "/spec/schedulingStrategy", "value": "headroom"}
    assert response(fill_in(question(PLAIN, PLAIN), TEAM)) == {"uid": "a-b-c", "allowed": True}, "creations only"


@pytest.mark.parametrize(
    "more",
    [
        {"kind": {"group": "", "version": "v1", "kind": "ConfigMap"}, "object": "anything"},
        {"kind": {"group": "gpu.warp.dev", "version": "v1", "kind": "Other"}, "object": None},
        {"kind": {"group": "gpu.warp.dev", "version": "v1", "kind": "TritonKernelCache"}, "object": None},
        {"kind": {"group": "tkm.io", "version": "v1", "kind": "GPUWorkload"}, "object": None},
        {"kind": {"group": "tkm.io", "version": "v1", "kind": "TritonKernelCacheNodeStatus"}, "object": None},
        {"operation": "DELETE", "object": None},
        {"operation": "CONNECT"},
    ],
)
def test_what_is_none_of_ours_is_let_through_and_counted_together(more: dict[str, Any]) -> None:
    answer = validate(question(**more), TEAM)
    assert response(answer)["allowed"]
    assert answer.kind == "other", "whoever asks chooses the name: it must not become a series of a metric"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (DEEP, "it is not JSON"),
        (b'"text"', "it must be an object"),
        (b"{}", "apiVersion and kind are others"),
        (question().replace(b"k8s.io/v1", b"k8s.io/v1beta1"), "apiVersion and kind are others"),
        (question(uid=""), "request.uid must not be empty"),
        (question(uid=7), "uid must be a string"),
        (question(uid="x" * 1000), "uid must be a string of at most 256 characters"),
        (question(kind=None), "request.kind must be an object"),
        (question(object=[]), "request.object must be an object"),
        (question(operation="UPDATE"), "request.oldObject must be an object"),
        (question(namespace=["a"]), "namespace must be a string"),
    ],
)
def test_what_is_no_review_is_told_why(body: bytes, why: str) -> None:
    for answer in (validate(body, TEAM), fill_in(body, TEAM)):
        assert (answer.status, answer.result) == (400, "malformed")
        assert why in answer.body.decode()


@given(st.binary(max_size=200) | json_values.map(orjson.dumps))
def test_no_body_is_an_error(body: bytes) -> None:
    assert {validate(body, TEAM).status, fill_in(body, TEAM).status} <= {200, 400}


requests = st.dictionaries(
    st.sampled_from(["uid", "kind", "operation", "object", "oldObject", "namespace", "name"]), json_values
)


@given(requests, json_values, json_values)
def test_no_review_is_an_error(more: dict[str, Any], new: Any, old: Any) -> None:
    """Somebody who knows what a review looks like, and changes what it holds."""
    for body in (question(new, **more), question(new, old), question({**PLAIN, "template": new}, {"template": old})):
        for answer in (validate(body, TEAM), fill_in(body, TEAM)):
            assert answer.status in (200, 400)
            if answer.status == 200:
                assert isinstance(orjson.loads(answer.body)["response"]["allowed"], bool)
