"""What the node says about its caches: written once, kept in step with mounts, and written later where it must be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kube.resources import NODES, TRITONKERNELCACHENODESTATUSCLUSTERS, TRITONKERNELCACHENODESTATUSES
from nodeworkers.caches import reporting
from nodeworkers.caches.pulling import Incoming
from nodeworkers.caches.reporting import MANAGER, Statuses
from nodeworkers.caches.startup import put_in_order
from planning.caches.orders import CacheRef
from planning.caches.volumes import NodeCache
from tests.nodeworkers.caches.rig import NODE, Rig
from tests.nodeworkers.caches.test_preparing import kernels

DEADLINE = 20.0
STATUS = TRITONKERNELCACHENODESTATUSES


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "PAUSE", 0.05)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def keeping(statuses: Statuses) -> AsyncIterator[None]:
    task = asyncio.create_task(statuses.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def ready(rig: Rig, tmp_path: Path) -> CacheRef:
    ref = rig.cache()
    assert (await rig.prepare(ref, await rig.push(kernels(tmp_path / "cache")))).outcome == "ready"
    return ref


def writes(rig: Rig) -> list[tuple[str, str]]:
    return [(method, path) for method, path, _ in rig.api.requests if method != "GET" and STATUS.plural in path]


def owners(rig: Rig) -> list[str]:
    """Of the status, by UID; none while there is no such object."""
    made = rig.api.objects(STATUS).get(("team-a", f"llama.{NODE}"), {"metadata": {}})
    return [owner["uid"] for owner in made["metadata"].get("ownerReferences", [])]


async def test_the_object_is_the_nodes_and_its_status_is_applied(rig: Rig, ready: CacheRef) -> None:
    made = rig.told(ready)
    assert made["metadata"]["name"] == f"llama.{NODE}"
    (owner,) = made["metadata"]["ownerReferences"]
    node = rig.api.objects(NODES)["", NODE]
    assert (owner["kind"], owner["uid"]) == ("Node", node["metadata"]["uid"])
    (create, apply) = writes(rig)
    assert create[0] == "POST" and apply[0] == "PATCH"
    assert f"/llama.{NODE}/status?" in apply[1] and f"fieldManager={MANAGER}" in apply[1]


async def test_pods_come_and_go_and_an_idle_node_says_nothing(rig: Rig, ready: CacheRef) -> None:
    async with keeping(rig.statuses):
        mounts = [rig.mount(ready, f"pod-{number}") for number in range(3)]
        await until(lambda: rig.told(ready)["status"]["podsUsing"] == 3)
        assert [pod["name"] for pod in rig.told(ready)["status"]["pods"]] == [f"name-pod-{n}" for n in range(3)]
        rig.ledger.remove_mount(mounts[0].volume_id)
        await until(lambda: rig.told(ready)["status"]["podsUsing"] == 2)
        seen, before = rig.ledger.changes, len(rig.api.requests)
        await until(lambda: rig.statuses._seen == seen)
        rig.ledger.put_cache(rig.row(ready))  # a change that nobody is to hear of
        await until(lambda: rig.statuses._seen == rig.ledger.changes)
        assert len(rig.api.requests) == before


async def test_while_nothing_is_written_the_ledger_is_not_even_read(
    rig: Rig, ready: CacheRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeping(rig.statuses):
        await until(lambda: rig.statuses._seen == rig.ledger.changes and not rig.statuses._due)

    def read() -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(rig.ledger, "mounts", read)
    assert rig.statuses._look() == []
    rig.mount(ready)
    with pytest.raises(AssertionError, match="it was read"):
        rig.statuses._look()


async def test_after_a_restart_what_was_said_stays_and_the_pods_are_right(rig: Rig, ready: CacheRef) -> None:
    before = rig.told(ready)["status"]
    rig.mount(ready)
    async with keeping(Statuses(rig.kube, rig.ledger, NODE)):
        await until(lambda: rig.told(ready)["status"]["podsUsing"] == 1)
    after = rig.told(ready)["status"]
    assert {**after, "pods": [], "podsUsing": 0, "updated": ""} == {**before, "updated": ""}


async def test_an_image_that_was_lost_under_the_process_is_shown_as_such(rig: Rig, ready: CacheRef) -> None:
    rig.store.remove(rig.row(ready).digest)
    put_in_order(rig.ledger, rig.store, Incoming(rig.folder / "incoming"))
    async with keeping(Statuses(rig.kube, rig.ledger, NODE)):
        await until(lambda: rig.conditions(ready)["Ready"][0] == "False")
    assert rig.conditions(ready)["Ready"][1] == "NotPrepared" and "digest" not in rig.told(ready)["status"]
    assert rig.conditions(ready)["Verified"][:2] == ("True", "Verified")


async def test_what_the_api_server_has_lost_is_written_from_the_ledger(rig: Rig, ready: CacheRef) -> None:
    rig.api.remove(STATUS, f"llama.{NODE}", "team-a")
    async with keeping(Statuses(rig.kube, rig.ledger, NODE)):
        await until(lambda: ("team-a", f"llama.{NODE}") in rig.api.objects(STATUS))
        await until(lambda: "status" in rig.told(ready))
    assert rig.conditions(ready)["Ready"][:2] == ("True", "Ready")
    assert rig.conditions(ready)["Verified"][:2] == ("Unknown", "NotChecked")


async def test_removed_by_somebody_it_is_made_again(rig: Rig, ready: CacheRef) -> None:
    rig.api.remove(STATUS, f"llama.{NODE}", "team-a")
    rig.mount(ready)
    async with keeping(rig.statuses):
        await until(lambda: ("team-a", f"llama.{NODE}") in rig.api.objects(STATUS))
        await until(lambda: rig.told(ready).get("status", {}).get("podsUsing") == 1)
    assert rig.conditions(ready)["Verified"][:2] == ("True", "Verified")


async def test_the_next_look_restores_what_was_removed_while_nothing_else_changed(rig: Rig, ready: CacheRef) -> None:
    """As when the node's object was made anew under a process that goes on: its statuses went with the old one."""
    before = rig.told(ready)["status"]
    rig.api.remove(STATUS, f"llama.{NODE}", "team-a")
    rig.api.remove(NODES, NODE)
    rig.api.put(NODES, NODE)
    assert (await rig.prepare(ready, rig.row(ready).goal, epoch=2)).outcome == "ready"
    assert owners(rig) == [rig.api.objects(NODES)["", NODE]["metadata"]["uid"]]
    untimed = [{**each, "lastTransitionTime": ""} for each in before["conditions"]]
    after = rig.told(ready)["status"]
    assert [{**each, "lastTransitionTime": ""} for each in after["conditions"]] == untimed
    assert after["digest"] == before["digest"]


async def test_a_node_that_was_made_anew_owns_it(rig: Rig, ready: CacheRef) -> None:
    rig.api.remove(NODES, NODE)
    rig.api.put(NODES, NODE)
    fresh = Statuses(rig.kube, rig.ledger, NODE)
    async with keeping(fresh):
        uid = rig.api.objects(NODES)["", NODE]["metadata"]["uid"]
        await until(lambda: owners(rig) == [uid])
        await until(lambda: "status" in rig.told(ready))


async def test_while_the_api_server_is_away_it_is_told_once_and_written_later(
    rig: Rig, ready: CacheRef, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fault = rig.api.fail(status=503, contains=STATUS.plural, count=1000)
    async with keeping(rig.statuses):
        rig.mount(ready)
        await until(lambda: fault.count < 997)
        assert "503" in rig.statuses.trouble
        rig.api.faults.clear()
        await until(lambda: rig.told(ready)["status"]["podsUsing"] == 1)
        await until(lambda: rig.statuses.trouble == "")
    told = [record.message for record in caplog.records if "says about its caches" in record.message]
    assert len(told) == 2, told


async def test_a_failing_status_does_not_fail_the_preparation(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    rig.api.fail(status=500, contains=STATUS.plural, count=1000)
    assert (await rig.prepare(ref, digest)).outcome == "ready"
    assert not rig.api.objects(STATUS)
    rig.api.faults.clear()
    async with keeping(rig.statuses):
        await until(lambda: ("team-a", f"llama.{NODE}") in rig.api.objects(STATUS))
        await until(lambda: "status" in rig.told(ref))
    assert rig.conditions(ref)["Verified"][:2] == ("True", "Verified")


async def test_another_caches_status_is_left_alone(rig: Rig, ready: CacheRef) -> None:
    other = CacheRef(ready.kind, ready.namespace, ready.name, "another-uid")
    await rig.statuses.forget(other)
    assert rig.told(ready)
    rig.ledger.put_cache(NodeCache("cl-1", "TritonKernelCacheCluster", "", "whole", reason="not yet"))
    async with keeping(rig.statuses):
        whole = TRITONKERNELCACHENODESTATUSCLUSTERS
        await until(lambda: "status" in rig.api.objects(whole).get(("", f"whole.{NODE}"), {}))
