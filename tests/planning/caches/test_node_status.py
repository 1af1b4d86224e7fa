"""The status of a cache on a node: valid whatever was found, and changed only where something changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from crds.gpuworkload import ObjectName
from crds.kernelcache_node import MOST_GPUS, MOST_PODS, NodeCacheStatus, NodeStatusSpec
from planning.caches.compatibility import GPU, Verdict
from planning.caches.node_status import CONDITIONS, Check, Findings, Pod, document, same, status, status_name, with_pods
from planning.caches.orders import CacheRef

DIGEST = "sha256:" + "ab" * 32
H100 = GPU("GPU-1", "NVIDIA H100", "cuda", "90", 32, "580.10")
YES = Check("True", "Fine", "all is well")
FOUND = Findings(
    generation=3, target=DIGEST, digest=DIGEST, mount_path="/cache", size_bytes=5, kernels=2,
    gpus=(Verdict(H100, True), Verdict(replace(H100, id="GPU-2"), False, "it is another")), simulated=False,
    verified=YES, compatible=YES, hit_predicted=Check("Unknown", "RuntimeNotGiven"), ready=YES,
)  # fmt: skip
POD = Pod("team-a", "server", "p-1", DIGEST)
REF = CacheRef("TritonKernelCache", "team-a", "llama", "c-1")

texts = st.text(st.characters(), max_size=140) | st.text(st.characters(), max_size=20)
checks = st.builds(Check, st.sampled_from(["True", "False", "Unknown"]), texts, texts.map(lambda text: text * 12))
verdicts = st.builds(Verdict, st.builds(GPU, texts, texts, texts, texts, st.integers(), texts), st.booleans(), texts)
findings = st.builds(
    Findings, st.integers(), texts | st.just(DIGEST), texts | st.just(DIGEST), texts | st.just("/cache"), st.integers(),
    st.none() | st.integers(), st.lists(verdicts, max_size=9).map(tuple), st.booleans(), checks, checks, checks, checks,
)  # fmt: skip
pods = st.lists(
    st.builds(Pod, texts | st.just("team-a"), texts | st.just("server"), texts, texts | st.just(DIGEST)), max_size=9
)
names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?){0,4}", fullmatch=True)


@given(findings, pods, st.floats() | st.integers(0, 2**40))
def test_whatever_was_found_the_status_is_valid(found: Findings, using: list[Pod], now: float) -> None:
    made = status(found, using, None, now)
    model = NodeCacheStatus.model_validate(made)
    assert [each.type for each in model.conditions or ()] == list(CONDITIONS)
    assert len({each.id for each in model.gpus or ()}) == len(model.gpus or ()) <= MOST_GPUS
    assert len({each.uid for each in model.pods or ()}) == len(model.pods or ()) <= (model.pods_using or 0)
    assert all(len(each.message) <= 1024 and each.message.isprintable() for each in model.conditions or ())
    again = status(found, using, made, now + 100)
    assert same(made, again), "nothing changed, so the conditions are as old as they were"
    assert with_pods(made, using, now, {}) == made


json = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("conditions"), inner, max_size=3),
    max_leaves=9,
)


@given(findings, json)
def test_whatever_it_was_before(found: Findings, before: Any) -> None:
    NodeCacheStatus.model_validate(status(found, [], before, 1e9))
    if isinstance(before, dict):
        made = with_pods(before, [POD], 1e9, {"Ready": YES})
        if made is not None:
            NodeCacheStatus.model_validate(made)


def test_what_a_person_reads() -> None:
    made = status(FOUND, [POD, replace(POD, uid="p-0", name="other"), POD], None, 1_800_000_000)
    assert made["gpuType"] == "NVIDIA H100" and made["driverVersion"] == "580.10" and made["simulated"] is False
    assert [each["name"] for each in made["pods"]] == ["other", "server"] and made["podsUsing"] == 2
    assert made["conditions"][3] == {
        "type": "Ready", "status": "True", "reason": "Fine", "message": "all is well", "observedGeneration": 3,
        "lastTransitionTime": "2027-01-15T08:00:00Z",
    }  # fmt: skip


def test_a_condition_is_as_old_as_its_truth() -> None:
    first = status(FOUND, [], None, 1000)
    later = status(replace(FOUND, ready=Check("False", "Gone"), verified=Check("True", "Else")), [], first, 2000)
    since = {each["type"]: (each["status"], each["lastTransitionTime"]) for each in later["conditions"]}
    assert since["Verified"] == ("True", "1970-01-01T00:16:40Z")
    assert since["Ready"] == ("False", "1970-01-01T00:33:20Z")
    assert not same(first, later)


def test_pods_come_and_go_without_another_look() -> None:
    first = status(FOUND, [], None, 1000)
    second = with_pods(first, [POD], 2000, {})
    assert second is not None and not same(first, second)
    assert second["podsUsing"] == 1 and second["conditions"] == first["conditions"]
    leaving = with_pods(second, [POD], 3000, {"Ready": Check("False", "Removing", "it goes")})
    assert leaving is not None
    assert [(each["type"], each["reason"]) for each in leaving["conditions"]] == [
        ("Verified", "Fine"), ("Compatible", "Fine"), ("HitPredicted", "RuntimeNotGiven"), ("Ready", "Removing"),
    ]  # fmt: skip


def test_more_gpus_than_a_status_holds() -> None:
    gpus = [Verdict(replace(H100, id=f"{'x' * 300}{number}"), True) for number in range(MOST_GPUS + 5)]
    made = status(replace(FOUND, gpus=(*gpus, gpus[0])), [], None, 0)
    assert len({each["id"] for each in made["gpus"]}) == MOST_GPUS


def test_many_pods_are_counted_and_some_are_shown() -> None:
    made = status(FOUND, [replace(POD, uid=f"p-{number}") for number in range(MOST_PODS + 5)], None, 0)
    assert len(made["pods"]) == MOST_PODS and made["podsUsing"] == MOST_PODS + 5


@given(names, names)
def test_its_name_is_a_name(cache: str, node: str) -> None:
    TypeAdapter(ObjectName).validate_python(status_name(cache, node))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b.c"), ("a.b", "c")),
        (("a" * 253, "node-1"), ("a" * 253, "node-2")),
        (("a" * 252, "b" * 253), ("a" * 253, "b" * 252)),
    ],
)
def test_two_pairs_have_two_names(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert status_name(*one) != status_name(*other)
    assert max(len(status_name(*one)), len(status_name(*other))) <= 253


def test_the_object_says_what_it_is_about_and_goes_with_its_node() -> None:
    assert status_name("llama", "ip-10.example") == "llama.ip-10.example"
    made = document(REF, "node-1", "n-uid")
    assert made["metadata"] == {
        "name": "llama.node-1", "namespace": "team-a",
        "labels": {"tkm.io/cache-uid": "c-1", "tkm.io/node": "node-1"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "n-uid"}],
    }  # fmt: skip
    assert (made["apiVersion"], made["kind"]) == ("tkm.io/v1alpha1", "TritonKernelCacheNodeStatus")
    NodeStatusSpec.model_validate(made["spec"])
    whole = document(CacheRef("TritonKernelCacheCluster", "", "llama", "c-2"), "n" * 70, "n-uid")
    assert whole["kind"] == "TritonKernelCacheNodeStatusCluster"
    assert "namespace" not in whole["metadata"] and len(whole["metadata"]["labels"]["tkm.io/node"]) == 63
