"""A kernel cache before its look: an API server that keeps it, nodes, a registry and Temporal, all in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities.cache import ClusterCache
from activities.cache_signatures import CacheLook, CacheLooked
from activities.kernel_caches import (
    KernelCaches,
)
from kube.errors import Conflict, NotFound
from planning.caches.orders import CacheRef, NodeOrder, Report, node_cache_id
from planning.caches.rollout import Rollout, applied, reported
from tests.planning.builders import node

REF = CacheRef("TritonKernelCache", "ns", "llama", "u")
A = "sha256:" + "a" * 64
IMAGE = "registry.example/team/cache"


class Server:
    """One cache, and whatever else is put in `objects` by kind and name, as the API server keeps them. `fails`: raised
    by the next call of that name; `refuses`: by all of them.
    """

    def __init__(self) -> None:
        self.version = 10
        self.cache: dict[str, Any] | None = {
            "kind": "TritonKernelCache",
            "metadata": {"namespace": "ns", "name": "llama", "uid": "u", "generation": 1, "resourceVersion": "10"},
            "spec": {"ociImage": {"image": f"{IMAGE}:v1"}},
        }
        self.objects: dict[tuple[str, str], dict[str, Any] | Exception] = {}
        self.fails: dict[str, Exception] = {}
        self.refuses: dict[str, Exception] = {}
        self.statuses: list[dict[str, Any]] = []

    def delete(self) -> None:
        assert self.cache is not None
        self.cache["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def spec(self, **changes: Any) -> None:
        assert self.cache is not None
        self.cache["spec"] = {**self.cache["spec"], **changes}
        self.cache["metadata"]["generation"] += 1

    @property
    def finalizers(self) -> list[str]:
        assert self.cache is not None
        return list(self.cache["metadata"].get("finalizers") or [])

    def _call(self, name: str) -> None:
        if name in self.fails:
            raise self.fails.pop(name)
        if name in self.refuses:
            raise self.refuses[name]

    async def get(self, resource: Any, name: str, namespace: str | None = None) -> dict[str, Any]:
        self._call(f"get {resource.kind}")
        if resource.kind == "TritonKernelCache":
            found: Any = self.cache
        else:
            found = self.objects.get((resource.kind, name))
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise NotFound("gone", request="get")
        return cast(dict[str, Any], found)

    async def merge_patch(
        self, _: object, name: str, namespace: str | None, body: Mapping[str, Any], *, subresource: str = ""
    ) -> dict[str, Any]:
        self._call(subresource or "finalizers")
        if self.cache is None:
            raise NotFound("gone", request="patch")
        meta = self.cache["metadata"]
        if (meta["uid"], meta["resourceVersion"]) != (body["metadata"]["uid"], body["metadata"]["resourceVersion"]):
            raise Conflict("changed", request="patch")
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        if subresource:
            self.statuses.append(dict(body["status"]))
            self.cache["status"] = {key: value for key, value in body["status"].items() if value is not None}
            return self.cache
        meta["finalizers"] = body["metadata"]["finalizers"]
        answer = self.cache
        if "deletionTimestamp" in meta and not meta["finalizers"]:
            self.cache = None
        return answer


class Temporal:
    """What nodes were ordered, and who was signalled; `most`: how many calls there were at once."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, NodeOrder]] = []
        self.signals: list[tuple[str, str]] = []
        self.refuses: dict[str, Exception] = {}
        self.now = self.most = 0

    async def start_workflow(self, _: str, state: Any, *, id: str, **options: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if state.node in self.refuses:
            raise self.refuses[state.node]
        assert id == node_cache_id("u", state.node)
        (order,) = options["start_signal_args"]
        self.orders.append((state.node, order))

    def get_workflow_handle(self, id: str) -> Any:
        temporal = self

        class Handle:
            async def signal(self, name: str, *, args: Any) -> None:
                if id in temporal.refuses:
                    raise temporal.refuses[id]
                temporal.signals.append((id, name))

        return Handle()


class Events:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def record(self, *, type: str, reason: str, **_: Any) -> None:
        self.told.append((type, reason))


class World:
    """A worker that looks at one cache, and the workflow that carries its rollout."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.server, self.temporal, self.events = Server(), Temporal(), Events()
        self.cache = ClusterCache(cast(Any, None))
        for reflector in self.cache.reflectors.values():
            reflector.synced.set()
        for name in names:
            self.join(name)
        self.rollout = Rollout()
        self.asked = 0
        self.registry: str | Exception = A
        self.slow = 0.0
        self.caches = KernelCaches(self.cache, cast(Any, self.server), cast(Any, self.temporal), cast(Any, self.events))
        monkeypatch.setattr(self.caches, "_resolve", self._resolve)

    def join(self, name: str, **changes: Any) -> None:
        self.cache.nodes._put(f"uid-{name}", 1, node(name, **changes))
        self.cache.csi_nodes._put(f"uid-{name}", 1, name)
        self.server.objects["Node", name] = {}

    def leave(self, name: str) -> None:
        self.cache.nodes._remove(f"uid-{name}", 2)
        del self.server.objects["Node", name]

    async def _resolve(self, *_: object) -> str:
        self.asked += 1
        if self.slow:
            await asyncio.sleep(self.slow)
        if isinstance(self.registry, Exception):
            raise self.registry
        return self.registry

    async def look(self, *rechecked: str) -> CacheLooked:
        given = CacheLook(REF, self.rollout, {}, list(rechecked))
        looked: CacheLooked = await ActivityEnvironment().run(self.caches.look, given)
        if looked.step is not None:
            self.rollout = applied(self.rollout, looked.step)
        return looked

    def answer(self, name: str, outcome: Any = "ready", pods: int = 0) -> None:
        member = self.rollout.members[name]
        serves = member.digest if outcome == "ready" else ""
        report = Report(name, member.epoch, outcome, serves, "Verified" if serves else "", "signed", pods)
        self.rollout = reported(self.rollout, report)

    async def ready(self) -> None:
        await self.look()
        for name in self.rollout.members:
            self.answer(name)
        assert (await self.look()).phase == "Ready"

    def condition(self, kind: str) -> tuple[str, str]:
        (found,) = (each for each in self.server.statuses[-1]["conditions"] if each["type"] == kind)
        return found["status"], found["reason"]
