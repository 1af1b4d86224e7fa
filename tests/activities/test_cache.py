"""What the worker's cache keeps of each object, and what equal objects share."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, cast

from activities.cache import ByOwner, ClusterCache, Specs
from kube.reflector import Change
from planning.caches.warmth import CacheUse
from planning.devices import counted
from planning.model import PodView, Resources
from planning.views import workload_view
from tests.planning.builders import job, node, workload

SPEC = {"modelName": "m", "gpuCount": 1, "retryPolicy": {"maxRetries": 2, "backoffSeconds": 5}}


def test_equal_specs_are_one_object_whatever_the_order_of_their_keys() -> None:
    specs = Specs()
    first, second = specs.parse(SPEC), specs.parse(dict(reversed(SPEC.items())))
    assert first[0] is second[0] is not None
    other, _ = specs.parse({**SPEC, "gpuCount": 2})
    assert other is not None
    assert other.gpu_count == 2


def test_a_spec_that_is_refused_is_refused_every_time() -> None:
    specs = Specs()
    for _ in range(2):
        spec, invalid = specs.parse({"modelName": "m", "gpuCount": 9})
        assert spec is None
        assert "gpuCount" in invalid
    assert specs.parse(None) == (None, "spec: must be an object")


def test_a_bottomless_spec_is_refused_in_words() -> None:
    template: dict[str, object] = {}
    for _ in range(600):
        template = {"a": template}
    spec, invalid = Specs().parse({**SPEC, "template": template})
    assert spec is None
    assert "spec.template: must" in invalid


async def test_of_another_namespace_nobody_can_pose_as_ones_own() -> None:
    cache = ClusterCache(cast(Any, None))
    real = PodView("1", "a", "p", 1, "n", Resources(), workload_uid="u")
    forged = replace(real, uid="2", namespace="b")
    for pod in (real, forged, replace(real, uid="3", workload_uid="")):
        cache.pods._put(pod.uid, 1, pod)
    assert (cache.pods_of("a", "u"), cache.pods_of("b", "u"), cache.pods_of("c", "u")) == ((real,), (forged,), ())
    assert cache.pods_of("a", "") == ()


async def test_a_job_that_ended_with_its_workload_costs_the_rounds_nothing_any_more() -> None:
    cache = ClusterCache(cast(Any, None))
    done = job("a", "n", finished="Complete")
    for each in (done, job("b", "n"), replace(done, uid="forged", namespace="other")):
        cache.jobs._put(each.uid, 1, each)
    for uid in "ab":
        cache.workloads._put(uid, 2, workload(uid))
    assert set(cache.live_jobs) == {done.uid, "b-job-0", "forged"}
    for uid in "ab":
        cache.workloads._put(uid, 3, workload(uid, status={"phase": "Succeeded"}))
    assert set(cache.live_jobs) == {"b-job-0", "forged"}, "one that goes on still has its place"
    cache.jobs._put(done.uid, 4, done)
    assert set(cache.live_jobs) == {"b-job-0", "forged"} and cache.jobs_of("ns", "a") == (done,)
    cache.jobs._remove("b-job-0", 5)
    assert set(cache.live_jobs) == {"forged"}


async def test_a_node_is_found_by_its_name_also_where_it_was_made_anew() -> None:
    cache = ClusterCache(cast(Any, None))
    old, new, other = (replace(node(name), uid=uid) for name, uid in (("n", "1"), ("n", "2"), ("o", "3")))
    for each in (old, other):
        cache.nodes._put(each.uid, 1, each)
    assert (cache.node("n"), cache.node("o"), cache.node("p")) == (old, other, None)
    cache.nodes._put(new.uid, 2, new)
    assert cache.node("n") == new
    cache.nodes._remove(old.uid, 3)
    assert cache.node("n") == new
    cache.nodes._remove(new.uid, 4)
    assert cache.node("n") is None


def test_who_changes_hands_or_goes_is_its_former_owners_no_more() -> None:
    mine: ByOwner[str, str] = ByOwner(lambda item: item[0])
    mine.change(Change("added", "1", None, "a", 1))
    mine.change(Change("added", "2", None, "a'", 2))
    mine.change(Change("modified", "1", "a", "b", 3))
    assert (mine.of("a"), mine.of("b")) == (("a'",), ("b",))
    for uid, item in (("2", "a'"), ("1", "b")):
        mine.change(Change("deleted", uid, item, None, 4))
    assert mine._index == {}


def test_a_spec_goes_with_the_last_workload_that_has_it() -> None:
    specs = Specs()
    spec, _ = specs.parse(SPEC)
    assert len(specs._known) == 1
    del spec
    gc.collect()
    assert len(specs._known) == 0


def test_of_a_tombstone_little_is_kept() -> None:
    status = {"phase": "Failed", "message": "why", "conditions": [{"type": "Finished"}], "jobName": "j"}
    view = workload_view({"metadata": {"uid": "u"}, "spec": SPEC, "status": status})
    assert view.finished
    assert view.status == {"phase": "Failed", "message": "why"}
    going = workload_view({"metadata": {"uid": "u"}, "spec": SPEC, "status": {**status, "phase": "Running"}})
    assert going.status["jobName"] == "j"


async def test_where_kernel_caches_are_ready_a_snapshot_tells_and_keeps() -> None:
    cache = ClusterCache(cast(Any, None))
    use = CacheUse("c", "a", "k", "n", True, 0)
    cache.cache_uses._put("1", 1, use)
    cache.cluster_cache_uses._put("2", 1, replace(use, cache_uid="d", namespace="", node="o"))
    before = cache.snapshot()
    assert before.warm == {("a", "k"): {"n"}, ("", "k"): {"o"}} and cache.uses_of("c") == (use,)
    cache.cache_uses._put("1", 2, replace(use, pods=2))
    assert cache.snapshot().warm is before.warm
    cache.cache_uses._put("1", 3, replace(use, ready=False, pods=2))
    cache.cluster_cache_uses._remove("2", 3)
    assert cache.snapshot().warm == {} and len(before.warm) == 2


async def test_a_node_has_what_it_offers_through_dra_and_is_the_same_object_while_that_is_the_same() -> None:
    cache = ClusterCache(cast(Any, None))
    for name in "ab":
        cache.nodes._put(name, 1, node(name, 1))
    before = {each.name: each for each in cache.snapshot().nodes}
    device = {"name": "d", "attributes": {}}
    raw = {"spec": {"driver": "x", "nodeName": "a", "pool": {"name": "a", "generation": 1}, "devices": [device]}}
    view = counted.slice_view(raw)
    assert view is not None
    cache.slices._put("s", 2, view)
    assert {each.name: each for each in cache.snapshot().nodes} == before, "nobody says what such a device is"
    cache.device_classes._put("c", 3, counted.ClassView("nvidia.com/gpu", ((("", "driver"), "x"),)))
    now = {each.name: each for each in cache.snapshot().nodes}
    assert (now["a"].allocatable.gpus, now["b"]) == (2, before["b"])
    assert cache.snapshot().nodes[0] is now["a"]
    cache.claims._put("k", 4, (("x", "a", "d"),))
    assert [each.allocatable.gpus for each in cache.snapshot().nodes] == [1, 1]
    cache.claims._remove("k", 5)
    cache.slices._remove("s", 6)
    assert {each.name: each for each in cache.snapshot().nodes} == before
