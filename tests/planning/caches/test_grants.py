"""Which Secret a cache is pulled by, and what people read where it cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from planning.caches.grants import NoPullSecret, PullSecret, pull_secret
from planning.caches.orders import CacheRef

HERE = CacheRef("TritonKernelCache", "team-a", "llama", "u")
WHOLE = CacheRef("TritonKernelCacheCluster", "", "llama", "u")


def spec(whole: bool, **image: Any) -> TritonKernelCacheSpec:
    parse = (TritonKernelCacheClusterSpec if whole else TritonKernelCacheSpec).parse
    parsed, problem = parse({"ociImage": {"image": "registry.example/team/cache:v1", **image}})
    assert parsed is not None, problem
    return parsed


def test_a_cache_names_a_secret_of_its_own_namespace_and_one_of_the_cluster_of_any() -> None:
    assert pull_secret(spec(False), HERE) is None and pull_secret(spec(True), WHOLE) is None
    assert pull_secret(spec(False, pullSecret="pull"), HERE) == PullSecret("team-a", "pull", HERE.told)
    elsewhere = spec(True, pullSecret="pull", pullSecretNamespace="platform")
    assert pull_secret(elsewhere, WHOLE) == PullSecret("platform", "pull", WHOLE.told)


def test_a_secret_of_no_namespace_is_nobodys() -> None:
    """The schema demands both; what came around it is not asked for anonymously."""
    with pytest.raises(NoPullSecret, match="needs a pullSecretNamespace") as raised:
        pull_secret(spec(True, pullSecret="pull"), WHOLE)
    assert raised.value.reason == "PullSecretMissing"


def test_each_says_what_to_do() -> None:
    secret = PullSecret("team-a", "pull", HERE.told)
    told = {each.reason: str(each) for each in (secret.not_granted(), secret.missing(), secret.refused("no JSON"))}
    names = "There is no Secret team-a/pull, which TritonKernelCache team-a/llama names"
    assert told["PullSecretMissing"] == f"{names}: create it"
    assert told["PullSecretRefused"] == "Secret team-a/pull cannot be used: no JSON"
    for part in ("-n team-a create role", "--resource-name=pull", "system:berth-worker", "system:berth-node"):
        assert part in told["PullSecretNotGranted"]
