"""The arithmetic of the benchmark of kernel caches, and that its simulated agents write what a node may write."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest

from benchmarks import cache_agents, caches
from crds.kernelcache import TritonKernelCacheSpec
from crds.kernelcache_node import NodeCacheStatus, NodeStatusSpec
from planning.caches.orders import CacheRef
from planning.caches.warmth import CacheUse, cache_use

DIGEST = "sha256:" + 64 * "a"
REF = CacheRef("TritonKernelCache", "ns", "c", "uid")


def test_what_is_applied_is_a_cache() -> None:
    body = caches.cache("c", "127.0.0.1:5000/bench/c:v1")
    spec, refused = TritonKernelCacheSpec.parse(body["spec"])
    assert spec is not None and not refused
    assert spec.update_policy.max_unavailable == "10%" and not spec.node_selector


def test_what_agents_write_is_a_nodes_status() -> None:
    body = cache_agents.node_status(REF, "n") | {"status": cache_agents.ready_status(DIGEST, 3)}
    NodeStatusSpec.model_validate(body["spec"])
    status = NodeCacheStatus.model_validate(body["status"])
    assert (status.digest, status.observed_generation, status.simulated) == (DIGEST, 3, True)
    assert cache_use(body) == CacheUse("uid", "ns", "c", "n", ready=True, pods=0)


def test_news_of_a_cache() -> None:
    raw: dict[str, Any] = {"metadata": {"name": "c", "uid": "u"}}
    assert caches.news_of(raw) == caches.News("c", "u", False, "", 0)
    raw["status"] = {
        "conditions": [{"type": "Ready", "status": "True"}], "counts": {"ready": 4}, "lastKnownGoodDigest": DIGEST,
    }  # fmt: skip
    assert caches.news_of(raw) == caches.News("c", "u", True, DIGEST, 4)
    raw["status"]["conditions"][0]["status"] = "False"
    assert not caches.news_of(raw).ready


def test_events_count_a_caches_own_by_its_nodes() -> None:
    assert caches.Events((13, 15), {"a": 40, "b": 60}).a_node(10) == 14 + 5
    assert caches.verdict(20.0) == "within the budget of 20"
    assert caches.verdict(20.1) == "MORE than the budget of 20"


def test_it_tells_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["caches", "--help"])
    monkeypatch.delitem(sys.modules, "benchmarks.caches")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.caches", run_name="__main__")
    assert ended.value.code == 0
