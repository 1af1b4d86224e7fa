"""A reflector over the fake API server, and a listener that judges the changes it tells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kube.client import KubeClient
from kube.reflector import Backoff, Change, Reflector
from kube.resources import PODS
from tests.kube.fake_api import FakeApi

Value = tuple[str, int]  # name, spec.n


def project(obj: dict[str, Any]) -> Value | None:
    n = obj["spec"]["n"]
    return None if n < 0 else (obj["metadata"]["name"], n)


@dataclass
class Seen:
    """Checks each change against the ones before it: added → modified* → deleted for every UID, and nothing twice."""

    state: dict[str, Value] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    changes: list[Change[Value]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __call__(self, change: Change[Value]) -> None:
        self.changes.append(change)
        uid = change.uid
        kind = "deleted" if change.new is None else "modified" if uid in self.state else "added"
        if change.kind != kind or change.old != self.state.get(uid) or (kind == "deleted" and uid not in self.state):
            self.wrong.append(f"{change} after {self.state.get(uid)}")
        if change.resource_version <= self.versions.get(uid, 0):
            self.wrong.append(f"{change} after version {self.versions[uid]}")
        self.versions[uid] = change.resource_version
        if change.new is None:
            self.state.pop(uid, None)
        else:
            self.state[uid] = change.new

    @property
    def kinds(self) -> list[str]:
        return [change.kind for change in self.changes]


@dataclass(frozen=True)
class Impatient(Backoff):
    base: float = 0.001
    cap: float = 0.004
    asked: list[int] = field(default_factory=list)

    def delay(self, failures: int) -> float:
        self.asked.append(failures)
        return super().delay(failures)


@dataclass
class Rig:
    api: FakeApi
    client: KubeClient
    reflector: Reflector[Value]
    seen: Seen
    backoff: Impatient

    def put(self, name: str, n: int = 0, **metadata: Any) -> str:
        uid: str = self.api.put(PODS, name, "a", spec={"n": n}, metadata=metadata)["metadata"]["uid"]
        return uid

    def remove(self, name: str) -> None:
        self.api.remove(PODS, name, "a")

    async def caught_up(self) -> None:
        self.put("marker", self.api.version)
        assert await self.reflector.wait_for(self.api.version, 5), self.reflector.last_error

    async def watching(self) -> None:
        async with asyncio.timeout(5):
            await self.reflector.synced.wait()
            while not self.api.watching:
                await asyncio.sleep(0.002)

    def count(self, watch: bool) -> int:
        return len([path for _, path, _ in self.api.requests if ("watch=1" in path) == watch])


@asynccontextmanager
async def running(api: FakeApi | None = None, **options: Any) -> AsyncIterator[Rig]:
    async with api or FakeApi() as api, await api.client() as client:
        seen, backoff = Seen(), Impatient()
        options = {"project": project, "on_change": seen, "backoff": backoff, "page_size": 2, **options}
        reflector: Reflector[Value] = Reflector(client, PODS, **options)
        task = asyncio.create_task(reflector.run())
        try:
            yield Rig(api, client, reflector, seen, backoff)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    assert not seen.wrong
