"""KernelCachePolicy as a model: what a platform engineer may demand, and refusals that say what to write."""

from __future__ import annotations

from typing import Any

import pytest

from crds.kernelcachepolicy import KernelCachePolicySpec

KEY = "-----BEGIN PUBLIC KEY-----\nread by whoever verifies\n-----END PUBLIC KEY-----\n"
ROOT = {"name": "sigstore", "key": "trusted_root.json"}
GOOD: dict[str, Any] = {"images": ["registry.example/team/**"], "signers": [{"name": "release", "key": KEY}]}


@pytest.mark.parametrize(
    "image", ["**", "*/team/cache", "registry.example:5000/a_b/*", "[::1]:5000/**", "docker.io/library/x"]
)
def test_patterns_of_images(image: str) -> None:
    assert KernelCachePolicySpec.parse(GOOD | {"images": [image]})[1] == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images": []}, "spec.images"),
        ({"images": ["*"]}, "fits no image: * stands for no /"),
        ({"images": ["registry.example"]}, "fits no image"),
        ({"images": ["registry.example/team/cache?"]}, "is no pattern of images"),
        ({"images": ["registry.example/Team/*"]}, "is no pattern of images"),
        ({"images": ["registry.example/team/cache@sha256:00"]}, "is no pattern of images"),
        ({"signers": []}, "spec.signers"),
        (
            {"signers": [{"name": "x", "keyless": {"issuerPattern": "accounts", "trustedRoot": ROOT}}]},
            "must begin with ^",
        ),
        (
            {"signers": [{"name": "x", "keyless": {"issuerPattern": "^($", "trustedRoot": ROOT}}]},
            "is no regular expression",
        ),
    ],
    ids=range(9),
)
def test_refusals_say_where_and_why(change: dict[str, Any], told: str) -> None:
    spec, refused = KernelCachePolicySpec.parse(GOOD | change)
    assert spec is None and told in refused and refused.startswith("spec.")


def test_a_certificate_may_name_a_trusted_root_for_time_stamps() -> None:
    certificate = {"authorities": KEY.replace("PUBLIC KEY", "CERTIFICATE"), "identity": "ci@example.com"}
    for fields in ({}, {"trustedRoot": ROOT}):
        spec, refused = KernelCachePolicySpec.parse(
            GOOD | {"signers": [{"name": "ci", "certificate": {**certificate, **fields}}]}
        )
        assert spec is not None, refused
        found = spec.signers[0].certificate
        assert found is not None and (found.trusted_root is not None) == bool(fields)
