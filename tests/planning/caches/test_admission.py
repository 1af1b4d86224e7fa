"""Kernel caches and policies at the door: what can never work is refused, what does nothing is warned of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.kernelcache import CLUSTER_KIND, KIND, TritonKernelCacheSpec
from crds.kernelcachepolicy import KIND as POLICY
from crds.kernelcachepolicy import KernelCachePolicySpec
from images.reference import BadReference, Reference
from planning.admission import Installation, Review, refusal, warnings
from planning.caches.rollout import Aim, next_ask
from planning.caches.trust import pattern_matches
from tests.planning.caches.test_pem import CERTIFICATE, KEYS, PRIVATE

DIGEST = "sha256:" + "a" * 64
TAG = "registry.example/team/cache:v1"
PINNED = f"registry.example/team/cache@{DIGEST}"
NEVER = f"spec.ociImage.pullPolicy: is Never, so nobody is asked what {TAG} stands for: give the image with its digest"
KEY = KEYS[0]


def cache(image: str = TAG, pull: str | None = None, **spec: Any) -> dict[str, Any]:
    return {"ociImage": {"image": image, **({"pullPolicy": pull} if pull else {})}, **spec}


def policy(
    *signers: dict[str, Any], images: tuple[str, ...] = ("registry.example/team/*",), **spec: Any
) -> dict[str, Any]:
    return {"images": list(images), "signers": list(signers) or [{"name": "release", "key": KEY}], **spec}


def asked(kind: str, spec: object, old: object = None, **metadata: Any) -> tuple[str, list[str]]:
    """What is refused, and what is warned of."""
    new = {"metadata": metadata, "spec": spec}
    review = Review(kind, "ns" if kind == KIND else "", new, None if old is None else {"spec": old})
    return refusal(review, Installation()), warnings(review, Installation())


CACHES = pytest.mark.parametrize("kind", [KIND, CLUSTER_KIND])


@CACHES
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (cache(), ""),
        (cache(PINNED, "Never"), ""),
        (cache(pull="Always"), ""),
        (cache(pull="Never"), NEVER),
        (
            cache("team/cache:v1"),
            "spec.ociImage.image: 'team/cache:v1' names no registry: write it with its host, such as "
            "'registry.example/team/cache:v1'",
        ),
        (
            cache("registry.example/Team/cache"),
            "spec.ociImage.image: 'registry.example/Team/cache': 'Team' cannot be a part of a repository's name, which "
            "has lower case letters and digits, and single . or _ between them (or __, or any number of -)",
        ),
        (
            cache(mountPath="cache"),
            "spec.mountPath: must be an absolute path without empty parts, . or .. (such as /home/app/.triton/cache)",
        ),
        (cache(runtime={"environment": {"A-B": "1"}}), "spec.runtime.environment.A-B: is not the name of an"
                                                       " environment variable"),
        ({}, "spec.ociImage: is required"),
        (None, "spec: must be an object"),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_cache_that_can_never_work_is_refused(kind: str, spec: object, said: str) -> None:
    assert asked(kind, spec)[0] == said


def test_each_kind_is_read_by_its_own_model() -> None:
    spec = {"ociImage": {"image": TAG, "pullSecret": "s", "pullSecretNamespace": "platform"}}
    assert asked(CLUSTER_KIND, spec)[0] == ""
    assert "pullSecretNamespace" in asked(KIND, spec)[0]


@CACHES
def test_what_stood_there_may_be_edited(kind: str) -> None:
    for stood in (cache("team/cache:v1"), cache(pull="Never")):
        assert asked(kind, {**stood, "mountPath": "/cache"}, stood)[0] == ""
    unreadable = cache(mountPath="cache")
    assert asked(kind, {**unreadable, "validateSignature": False}, unreadable)[0] == ""
    assert asked(kind, cache("team/cache:v2"), cache("team/cache:v1"))[0] != ""
    both = cache("team/cache:v1", mountPath="cache")
    assert asked(kind, cache("team/cache:v1"), both)[0] == "", "an edit may mend one of two things"
    assert asked(kind, cache(mountPath="cache"), cache())[0] != ""


@CACHES
def test_never_keeps_the_digest_that_a_tag_was_found_to_stand_for(kind: str) -> None:
    assert asked(kind, cache(pull="Never"), cache())[0] == ""
    assert asked(kind, cache(pull="Never"), cache("registry.example/team/cache:v0", "Never"))[0] == NEVER


@CACHES
def test_what_is_being_deleted_is_never_held_up(kind: str) -> None:
    assert asked(kind, cache("x"), cache(), deletionTimestamp="2026-11-21T10:00:00Z")[0] == ""


@CACHES
def test_a_tag_that_is_followed_where_there_is_none_is_a_warning(kind: str) -> None:
    follow: dict[str, Any] = {"updatePolicy": {"type": "OnTagChange"}}
    told = "spec.updatePolicy.type: OnTagChange follows nothing here, for "
    assert asked(kind, cache(**follow)) == ("", [])
    assert asked(kind, cache(PINNED, **follow)) == ("", [f"{told}the image names its digest"])
    was = cache(**follow)
    assert asked(kind, cache(pull="Never", **follow), was) == ("", [f"{told}with pullPolicy Never nobody is asked"])


pieces = st.lists(
    st.sampled_from(
        ["registry.example", "localhost", ":5000", "/", "team", "Team", "a_b", ":v1", ".", "-", f"@{DIGEST}"]
    ),
    min_size=1,
    max_size=7,
).map("".join)


@given(pieces | st.text(min_size=1, max_size=30), st.sampled_from(["Always", "IfNotPresent", "Never"]), st.booleans())
def test_the_door_lets_in_what_can_be_asked_for_and_nothing_else(image: str, pull: str, follow: bool) -> None:
    """Let in is what can be read, whose reference is one, and whose digest is there or will be asked for."""
    raw = cache(image, pull, updatePolicy={"type": "OnTagChange" if follow else "Manual"})
    spec, _ = TritonKernelCacheSpec.parse(raw)
    said, told = asked(KIND, raw)
    if spec is None:
        assert said
        return
    wrong = ""
    try:
        reference = Reference.parse(image)
    except BadReference as error:
        wrong = str(error)
    if wrong:
        assert said == f"spec.ociImage.image: {wrong}"
        return
    assert (said == "") == (bool(reference.digest) or next_ask(spec, Aim()) is not None)
    again = next_ask(spec, Aim(image)) is not None
    assert said or bool(told) == (follow and not again)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (policy(), ""),
        (policy({"name": "ci", "certificate": {"authorities": CERTIFICATE, "identity": "ci@example.com"}}), ""),
        (
            policy({"name": "a", "key": KEY}, {"name": "b", "key": KEY.replace("M", "!", 1)}),
            "spec.signers[b].key: it is no public key as PEM: what lies between BEGIN and END is not whole",
        ),
        (
            policy({"name": "a", "key": PRIVATE}),
            "spec.signers[a].key: it is a private key, which nobody but its owner may see: give the public one, and "
            "replace the pair",
        ),
        (
            policy({"name": "ci", "certificate": {"authorities": KEY, "identity": "ci@example.com"}}),
            "spec.signers[ci].certificate.authorities: they are no certificates as PEM (-----BEGIN CERTIFICATE-----)",
        ),
        (
            policy({"name": "ci", "certificate": {"authorities": CERTIFICATE, "identityPattern": "ci@.*"}}),
            "spec.signers[0].certificate.identityPattern: must begin with ^ and end with $, so that it says the whole",
        ),
        (policy(images=("*",)), "spec.images[0]: fits no image: * stands for no /; write ** for all, or "
                                "registry.example/team/*"),
        ([], "spec: must be an object"),
    ],
    ids=range(8),
)  # fmt: skip
def test_a_policy_that_cannot_be_read_is_refused(spec: object, said: str) -> None:
    assert asked(POLICY, spec)[0] == said


def test_a_policy_that_was_wrong_before_may_be_edited_and_new_wrong_may_not() -> None:
    bad = {"name": "b", "key": KEY.replace("M", "!", 1)}
    other = {"name": "c", "key": PRIVATE}
    assert asked(POLICY, policy({"name": "a", "key": KEY}, bad), policy(bad))[0] == "", "whatever its place in the list"
    assert asked(POLICY, policy(bad, other), policy(bad))[0].startswith("spec.signers[c].key: ")
    star = policy(images=("*",))
    assert asked(POLICY, {**star, "allowSkipping": True}, star)[0] == ""
    assert asked(POLICY, star, policy())[0] != ""
    assert asked(POLICY, policy(bad), star)[0].startswith("spec.signers[b].key: ")


WIDE = (
    "spec.allowSkipping: {} fits every image, so any cache may skip its signature (validateSignature: false) where no "
    "stricter KernelCachePolicy is about its image"
)


def test_patterns_that_fit_more_or_less_than_they_seem_to_are_warnings() -> None:
    assert asked(POLICY, policy(images=("**",))) == ("", [])
    assert asked(POLICY, policy(images=("registry.example/**",), allowSkipping=True)) == ("", [])
    for pattern in ("**", "*/**", "**/*"):
        narrow_too = policy(images=("registry.example/a", pattern), allowSkipping=True)
        assert asked(POLICY, narrow_too) == ("", [WIDE.format(pattern)])
    assert asked(POLICY, policy(images=("*/*",), allowSkipping=True)) == ("", [])
    told = "spec.images: team/* fits no image, for it names no registry: write it with its host"
    assert asked(POLICY, policy(images=("team/*", "localhost/x", "[::1]:5000/x"))) == ("", [told])


@given(st.text("*/", min_size=1, max_size=6), pieces)
def test_what_is_warned_of_as_fitting_everything_does(pattern: str, image: str) -> None:
    _, told = asked(POLICY, policy(images=(pattern,), allowSkipping=True))
    if told:
        try:
            reference = Reference.parse(image)
        except BadReference:
            return
        assert pattern_matches(pattern, f"{reference.registry}/{reference.repository}")


@given(st.sampled_from(["team", "localhost", "a.b", "a:1"]), st.sampled_from(["*", "**", "cache", "a/*"]), pieces)
def test_what_is_warned_of_as_fitting_nothing_does_not(host: str, rest: str, image: str) -> None:
    pattern = f"{host}/{rest}"
    _, told = asked(POLICY, policy(images=(pattern,)))
    try:
        reference = Reference.parse(image)
    except BadReference:
        return
    assert not (told and pattern_matches(pattern, f"{reference.registry}/{reference.repository}"))


def test_a_warning_is_not_cut() -> None:
    """The API server passes on 256 characters of each."""
    long = "team/" + "a" * 500
    _, told = asked(POLICY, policy(images=(long, "*/" + "*" * 500), allowSkipping=True))
    assert len(told) == 2 and max(map(len, told)) <= 256


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
near_specs = st.fixed_dictionaries(
    {},
    optional={
        "ociImage": st.fixed_dictionaries({"image": pieces | json_values}, optional={"pullPolicy": json_values})
        | json_values,
        "updatePolicy": json_values,
        "images": st.lists(pieces | json_values, max_size=3) | json_values,
        "signers": st.lists(
            st.fixed_dictionaries({"name": st.text(max_size=5)}, optional={"key": st.sampled_from(KEYS) | json_values}),
            max_size=3,
        ),
    },
)


@given(st.sampled_from([KIND, CLUSTER_KIND, POLICY]), near_specs | json_values, near_specs | json_values | st.none())
def test_nothing_that_somebody_writes_is_an_error(kind: str, new: Any, old: Any) -> None:
    said, told = asked(kind, new, old)
    assert all(isinstance(each, str) for each in (said, *told))
    model = KernelCachePolicySpec if kind == POLICY else TritonKernelCacheSpec
    if model.parse(new)[0] is None and old is None and kind != CLUSTER_KIND:
        assert said.startswith("spec")
