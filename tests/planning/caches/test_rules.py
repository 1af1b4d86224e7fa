"""Whether anything changed that decides about trust in an image is told by one word."""

from __future__ import annotations

from typing import Any

from planning.caches.rules import concerning, fingerprint, policy_of
from planning.caches.trust import Knobs, Policy

KEY = (
    "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEg4NuJe/v+hoEsPGQcU1eVLSOyFb9\n"
    "7H4fmJMCCpA/n0rsNCfz8yX81poKDmQMrmcB7tVpkJZggrD8N3nhyy6q1g==\n-----END PUBLIC KEY-----\n"
)
IMAGE = "registry.example/team/cache"


def policy(name: str, images: str = "registry.example/team/*", signer: str = "release", **spec: Any) -> Policy:
    body = {"images": [images], "signers": [{"name": signer, "key": KEY}], **spec}
    found = policy_of({"metadata": {"name": name}, "spec": body})
    assert found.spec is not None, found.problem
    return found


def test_a_policy_that_cannot_be_read_may_be_about_any_image() -> None:
    broken = policy_of({"metadata": {"name": "broken"}, "spec": {"images": []}})
    assert broken.spec is None and broken.problem
    other = policy("other", "registry.example/else/*")
    assert concerning(IMAGE, "ns", [policy("b"), other, broken, policy("a")]) == [policy("a"), policy("b"), broken]
    for odd in (None, 7, {"metadata": 7, "spec": None}):
        assert policy_of(odd).spec is None


def test_the_word_is_another_where_anything_is() -> None:
    roots = {("root", "trusted_root.json"): "5"}
    first = fingerprint([policy("a")], roots, Knobs())
    assert fingerprint([policy("a")], dict(roots), Knobs()) == first
    others = [
        fingerprint([], roots, Knobs()),
        fingerprint([policy("b")], roots, Knobs()),
        fingerprint([policy("a", signer="other")], roots, Knobs()),
        fingerprint([policy("a"), policy("b")], roots, Knobs()),
        fingerprint([policy("a")], {}, Knobs()),
        fingerprint([policy("a")], {("root", "trusted_root.json"): "6"}, Knobs()),
        fingerprint([policy("a")], {("root", "trusted_root.json"): "missing"}, Knobs()),
        fingerprint([policy("a")], roots, Knobs(verify_enabled=False)),
        fingerprint([policy("a")], roots, Knobs(allow_unsigned=True)),
    ]
    assert len({first, *others}) == 1 + len(others)
    assert len(first) == 16
