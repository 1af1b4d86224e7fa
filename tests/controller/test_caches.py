"""Who hears of what concerns kernel caches: once for many changes, and in the end also where Temporal was away."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import Poke
from controller import caches
from controller.caches import CacheWatch, cache_digest
from controller.digests import NodeDigest
from crds.settings import SETTINGS_NAME
from kube.reflector import Reflector
from planning.caches.model import FORCE_ANNOTATION
from planning.caches.volumes import DRIVER
from tests.controller.fake_temporal import UNAVAILABLE, UNREACHABLE, FakeTemporal
from tests.controller.test_pokes import until


def raw(uid: str, *, generation: int = 1, selector: dict[str, str] | None = None, **meta: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": f"name-{uid}", "uid": uid, "generation": generation, **meta}
    return {"kind": "TritonKernelCache", "metadata": metadata, "spec": {"nodeSelector": selector or {}}}


class Told(FakeTemporal):
    """Signals may be without a value, as a node's are."""

    def get_workflow_handle(self, id: str) -> Any:
        temporal = self

        class Handle:
            async def signal(self, name: str, *, args: Any, **_: Any) -> None:
                await temporal._answer()
                temporal.signals.append((id, name, args))

        return Handle()


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *known: dict[str, Any]) -> None:
        monkeypatch.setattr(caches, "PAUSE", 0.01)
        monkeypatch.setattr(caches, "FLEET_PAUSE", 0.05)
        self.temporal = Told()
        self.watch = CacheWatch(cast(Any, None), cast(Any, self.temporal))
        for each in known:
            self.put(self.watch.caches, each["metadata"]["uid"], each)
        self.forget()

    def put(self, reflector: Reflector[Any], uid: str, body: dict[str, Any], version: int = 5) -> None:
        reflector._put(uid, version, reflector._project(body))

    def forget(self) -> None:
        self.watch._due = caches._Due()
        self.watch._wake.clear()
        self.watch._urgent.clear()

    def due(self) -> dict[str, dict[str, int]]:
        """Whom a change concerned, and what is to be told; from now on nobody."""
        found = {uid: dict(seen) for uid, (_, seen) in self.watch._due.caches.items()}
        self.forget()
        return found


def node(name: str = "n", *, able: bool = True, **labels: str) -> NodeDigest:
    return NodeDigest(name, able, 1, labels)


def test_a_cache_hears_of_itself_and_not_of_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.put(world.watch.caches, "u", raw("u"), 6)
    assert world.due() == {"u": {"tritonkernelcaches": 6}}
    world.put(world.watch.caches, "u", {**raw("u"), "status": {"rollout": "1/1"}}, 7)
    assert world.due() == {}
    for version, meta in enumerate(
        ({"generation": 2}, {"deletionTimestamp": "now"}, {"annotations": {FORCE_ANNOTATION: "true"}}), 8
    ):
        world.put(world.watch.caches, "u", raw("u", **cast(Any, meta)), version)
        assert world.due() == {"u": {"tritonkernelcaches": version}}
    world.watch.caches._remove("u", 20)
    assert world.due() == {"u": {"tritonkernelcaches": 20}}


def test_a_cache_of_the_cluster_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    body = raw("c")
    del body["metadata"]["namespace"]
    world.put(world.watch.cluster_caches, "c", {**body, "kind": "TritonKernelCacheCluster"}, 6)
    ref, seen = world.watch._due.caches["c"]
    assert (ref.kind, ref.namespace, seen) == ("TritonKernelCacheCluster", "", {"tritonkernelcacheclusters": 6})


def test_nodes_concern_the_caches_that_are_for_them_or_were(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, raw("h100", selector={"gpu": "h100"}), raw("all"))
    watch = world.watch
    watch.node_changed(None, node(gpu="a100"), 7)
    assert world.due() == {"all": {"nodes": 7}}
    watch.node_changed(node(gpu="a100"), node(gpu="h100"), 8)
    assert world.due().keys() == {"all", "h100"}
    watch.node_changed(node(gpu="h100"), node(gpu="a100"), 9)
    assert world.due().keys() == {"all", "h100"}
    watch.node_changed(node(gpu="h100"), node(gpu="h100", able=False), 10)
    assert world.due().keys() == {"all", "h100"}
    watch.node_changed(node(gpu="h100"), node(gpu="h100"), 11)
    assert world.due() == {}, "it is as it was to caches"


async def test_that_a_node_is_gone_concerns_all_and_its_own_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, raw("h100", selector={"gpu": "h100"}))
    world.watch.node_changed(node(gpu="a100"), None, 7)
    assert not world.watch._urgent.is_set(), "more of them may come"
    assert await world.watch._deliver()
    assert world.temporal.signals == [("node/n", "poke", ())]
    assert world.temporal.started == [("kernelcache/h100", Poke({"nodes": 7}))]


def test_policies_settings_and_drivers_concern_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, raw("a"), raw("b"))
    watch = world.watch
    world.put(watch.policies, "p", {"metadata": {"generation": 1}}, 6)
    assert world.due() == {"a": {"kernelcachepolicies": 6}, "b": {"kernelcachepolicies": 6}}
    world.put(watch.policies, "p", {"metadata": {"generation": 1}, "status": {}}, 7)
    assert world.due() == {}
    world.put(watch.settings, "s", {"metadata": {"name": SETTINGS_NAME}, "data": {"a": "1"}}, 8)
    assert world.due()["a"] == {"configmaps": 8}
    world.put(watch.settings, "s", {"metadata": {"name": SETTINGS_NAME, "labels": {}}, "data": {"a": "1"}}, 9)
    assert world.due() == {}
    world.put(watch.settings, "root", {"metadata": {"name": "trusted-root"}, "data": {"a": "1"}}, 10)
    assert world.due() == {"a": {}, "b": {}}, "a worker reads it anew, and does not watch it"
    watch.settings._remove("root", 11)
    assert world.due() == {"a": {}, "b": {}}
    drivers = {"metadata": {"name": "n"}, "spec": {"drivers": [{"name": DRIVER}]}}
    world.put(watch.drivers, "n", drivers, 12)
    assert world.due()["b"] == {"csinodes": 12}
    world.put(watch.drivers, "n", drivers, 13)
    assert world.due() == {}
    watch.drivers._remove("n", 14)
    assert world.due()["b"] == {"csinodes": 14}


async def test_many_changes_are_told_once_with_the_newest_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, raw("u"))
    running = asyncio.create_task(world.watch.run())
    for version in range(10, 20):
        world.watch.node_changed(None, node(f"n{version}"), version)
    world.put(world.watch.caches, "u", raw("u", generation=2), 7)
    await until(lambda: bool(world.temporal.started))
    running.cancel()
    assert world.temporal.started == [("kernelcache/u", Poke({"nodes": 19, "tritonkernelcaches": 7}))]


async def test_news_of_nodes_waits_for_company_and_a_persons_change_takes_it_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, raw("u"), raw("v"))
    monkeypatch.setattr(caches, "FLEET_PAUSE", 600.0)
    running = asyncio.create_task(world.watch.run())
    world.watch.node_changed(None, node(), 10)
    await asyncio.sleep(0.05)
    assert world.temporal.started == []
    world.put(world.watch.caches, "u", raw("u", generation=2), 7)
    await until(lambda: len(world.temporal.started) == 2)
    running.cancel()
    monkeypatch.setattr(caches, "FLEET_PAUSE", 0.05)
    running = asyncio.create_task(world.watch.run())
    world.watch.node_changed(None, node(), 11)
    await until(lambda: len(world.temporal.started) == 4)
    running.cancel()


@pytest.mark.parametrize("away", [UNAVAILABLE, UNREACHABLE])
async def test_what_temporal_does_not_take_stays_due(monkeypatch: pytest.MonkeyPatch, away: Exception) -> None:
    world = World(monkeypatch, raw("u"), raw("v"))
    world.temporal.away = away
    running = asyncio.create_task(world.watch.run())
    world.put(world.watch.caches, "u", raw("u", generation=2), 7)
    world.watch.node_changed(node(), None, 8)
    await until(lambda: bool(world.watch.trouble))
    world.temporal.away = None
    await until(lambda: not world.watch.trouble)
    told = dict(world.temporal.started)
    assert told["kernelcache/u"] == Poke({"tritonkernelcaches": 7, "nodes": 8})
    assert ("node/n", "poke", ()) in world.temporal.signals
    again = len(world.temporal.started)
    await until(lambda: len(world.temporal.started) >= again + 2)
    running.cancel()
    assert {id for id, _ in world.temporal.started[again:]} == {"kernelcache/u", "kernelcache/v"}, "it may know nothing"


async def test_who_is_cancelled_midway_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, raw("u"), raw("v"))
    world.temporal.gate = asyncio.Event()
    world.put(world.watch.caches, "u", raw("u", generation=2), 7)
    world.watch.node_changed(node(), None, 8)
    delivering = asyncio.create_task(world.watch._deliver())
    await until(lambda: world.temporal.calls == 3)
    delivering.cancel()
    await asyncio.wait({delivering})
    async with asyncio.timeout(1.0):
        await world.watch.flush(0.05)  # it does not wait for one that is silent
    world.temporal.gate.set()
    await world.watch.flush(2.0)
    assert dict(world.temporal.started) == {
        "kernelcache/u": Poke({"tritonkernelcaches": 7, "nodes": 8}),
        "kernelcache/v": Poke({"nodes": 8}),
    }
    assert world.temporal.signals == [("node/n", "poke", ())]


async def test_a_cache_that_is_gone_begins_no_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, raw("u"))
    world.watch.caches._remove("u", 9)
    assert await world.watch._deliver()
    assert world.temporal.started == []
    assert world.temporal.signals == [("kernelcache/u", "poke", (Poke({"tritonkernelcaches": 9}),))]
    world.put(world.watch.caches, "v", raw("v"), 10)
    world.watch.caches._remove("v", 11)
    world.temporal.away = RPCError("not found", RPCStatusCode.NOT_FOUND, b"")
    assert await world.watch._deliver(), "nobody follows it, and that is no failure"
    assert world.due() == {}


def test_the_sweep_is_for_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, raw("u"), raw("v"))
    world.watch.sweep()
    assert world.due() == {"u": {}, "v": {}}


def test_a_digest_is_made_of_whatever_stands_there() -> None:
    assert cache_digest({"metadata": {"uid": "u"}, "spec": "none"}).selector == {}
    assert cache_digest({"spec": {"nodeSelector": 7}}).ref.uid == ""
