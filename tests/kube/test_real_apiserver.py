"""Client, reflector, Events and leases against a real kube-apiserver: what the fake one only pretends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, Forbidden, Gone, Invalid, NotFound, Unavailable
from kube.events import EventRecorder, ObjectRef
from kube.lease import LeaderElector
from kube.reflector import Reflector
from kube.resources import CONFIGMAPS, CRDS, EVENTS, JOBS, LEASES, NAMESPACES, PODS, Resource
from stack import Stack, UpOptions
from tests.kube.reflector_rig import Seen

pytestmark = pytest.mark.stack

WIDGETS = Resource("test.berth.dev", "v1", "widgets", "Widget", True)
WIDGET_CRD: dict[str, Any] = {
    "spec": {
        "group": WIDGETS.group,
        "scope": "Namespaced",
        "names": {"plural": WIDGETS.plural, "singular": "widget", "kind": WIDGETS.kind},
        "versions": [
            {
                "name": WIDGETS.version,
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {"type": "object", "properties": {"n": {"type": "integer"}}},
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(stack.endpoints.kubeconfig()) as client:
        yield client


@pytest_asyncio.fixture
async def namespace(client: KubeClient) -> AsyncIterator[str]:
    name = f"kube-{uuid4().hex[:8]}"
    await client.create(NAMESPACES, {"metadata": {"name": name}})
    await client.apply(CRDS, f"{WIDGETS.plural}.{WIDGETS.group}", None, WIDGET_CRD, field_manager="test")
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(NotFound):
                await client.list(WIDGETS, name)
                break
            await asyncio.sleep(0.1)
    yield name
    await client.delete(NAMESPACES, name)


def widget(name: str, n: int = 1, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": WIDGETS.api_version,
        "kind": WIDGETS.kind,
        "metadata": {"name": name, **metadata},
        "spec": {"n": n},
    }


def project(obj: dict[str, Any]) -> tuple[str, int]:
    return obj["metadata"]["name"], obj["spec"]["n"]


async def test_preconditions_of_patches_and_deletes(client: KubeClient, namespace: str) -> None:
    made = await client.create(WIDGETS, widget("w"), namespace)
    uid, version = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    for sub in (None, "status"):
        await client.merge_patch(
            WIDGETS, "w", namespace, {"metadata": {"uid": uid}, "status": {"a": sub}, "spec": {"n": 2}}, subresource=sub
        )
        for stale in ({"resourceVersion": version}, {"uid": str(uuid4())}):
            body = {"metadata": stale, "spec": {"n": 9}, "status": {"a": "stale"}}
            with pytest.raises(Conflict):
                await client.merge_patch(WIDGETS, "w", namespace, body, subresource=sub)
    got = await client.get(WIDGETS, "w", namespace)
    assert got["spec"] == {"n": 2} and got["status"] == {"a": "status"}
    with pytest.raises(Conflict):
        await client.delete(WIDGETS, "w", namespace, uid=str(uuid4()))
    with pytest.raises(AlreadyExists):
        await client.create(WIDGETS, widget("w"), namespace)
    await client.merge_patch(WIDGETS, "w", namespace, {"metadata": {"finalizers": ["test.berth.dev/f"]}})
    await client.delete(WIDGETS, "w", namespace, uid=uid)
    assert "deletionTimestamp" in (await client.get(WIDGETS, "w", namespace))["metadata"]
    await client.merge_patch(WIDGETS, "w", namespace, {"metadata": {"uid": uid, "finalizers": None}})
    with pytest.raises(NotFound):
        await client.get(WIDGETS, "w", namespace)


async def test_refusals_say_what_is_wrong(client: KubeClient, namespace: str, stack: Stack) -> None:
    with pytest.raises(Invalid, match=r"spec\.n"):
        await client.create(WIDGETS, {**widget("w"), "spec": {"n": "many"}}, namespace)
    with pytest.raises(NotFound, match="CustomResourceDefinition installed"):
        await client.list(Resource("test.berth.dev", "v1", "gadgets", "Gadget", True))
    await client.create(WIDGETS, widget("w"), namespace, dry_run=True)
    with pytest.raises(NotFound, match='"w" not found'):
        await client.get(WIDGETS, "w", namespace)
    async with await KubeClient.connect(stack.endpoints.kubeconfig("kwok")) as stranger:
        with pytest.raises(Forbidden, match="auth can-i"):
            await stranger.create(WIDGETS, widget("w"), namespace)


async def test_server_side_apply_owns_fields(client: KubeClient, namespace: str) -> None:
    first = await client.apply(CONFIGMAPS, "c", namespace, {"data": {"x": "1", "y": "1"}}, field_manager="one")
    assert first["data"] == {"x": "1", "y": "1"}
    await client.apply(CONFIGMAPS, "c", namespace, {"data": {"x": "2", "z": "2"}}, field_manager="two")
    last = await client.apply(CONFIGMAPS, "c", namespace, {"data": {"x": "1"}}, field_manager="one")
    assert last["data"] == {"x": "1", "z": "2"}


async def test_lists_in_pages_selected_and_as_metadata(client: KubeClient, namespace: str) -> None:
    for n in range(7):
        await client.create(WIDGETS, widget(f"w{n}", n, labels={"odd": str(n % 2)}), namespace)
    items, version = await client.list(WIDGETS, namespace, page_size=3)
    assert [project(item)[1] for item in items] == list(range(7))
    assert version >= max(int(item["metadata"]["resourceVersion"]) for item in items)
    assert len((await client.list(WIDGETS, namespace, label_selector="odd=1"))[0]) == 3
    assert len((await client.list(WIDGETS, namespace, field_selector="metadata.name=w3"))[0]) == 1
    only, _ = await client.list(WIDGETS, namespace, metadata_only=True, page_size=2)
    assert len(only) == 7 and all(set(item) == {"apiVersion", "kind", "metadata"} for item in only)
    events = client.watch(WIDGETS, namespace, resource_version=version, metadata_only=True, timeout_seconds=20)
    async with aclosing(events):
        await client.delete(WIDGETS, "w0", namespace)
        kind, obj = await anext(events)
        assert kind == "DELETED" and "spec" not in obj and obj["metadata"]["name"] == "w0"
    assert (await client.list(JOBS, namespace))[0] == (await client.list(PODS, namespace))[0] == []


async def test_the_reflector_keeps_up_and_relists_when_history_is_gone(client: KubeClient, namespace: str) -> None:
    with pytest.raises(Gone):
        async for _ in client.watch(WIDGETS, namespace, resource_version=1):
            pass
    seen = Seen()
    reflector = Reflector(client, WIDGETS, namespace=namespace, project=project, on_change=seen, watch_seconds=3)
    task = asyncio.create_task(reflector.run())
    try:
        await asyncio.wait_for(reflector.synced.wait(), 10)
        for n in range(30):
            made = await client.create(WIDGETS, widget(f"w{n}", n), namespace)
            if n % 3 == 0:
                await client.delete(WIDGETS, f"w{n}", namespace)
            elif n % 3 == 1:
                made = await client.merge_patch(WIDGETS, f"w{n}", namespace, {"spec": {"n": -n}})
        assert await reflector.wait_for(int(made["metadata"]["resourceVersion"]), 10)
        await client.delete(WIDGETS, "w1", namespace)
        made = await client.create(WIDGETS, widget("last"), namespace)
        async with asyncio.timeout(20):
            while reflector.relists == 0:
                reflector.resource_version = (
                    1  # as if it had slept for an hour: the watch of 3 s ends, the next is refused
                )
                await asyncio.sleep(0.05)
        assert await reflector.wait_for(int(made["metadata"]["resourceVersion"]), 10)
        items, _ = await client.list(WIDGETS, namespace)
        assert dict(reflector.items) == {item["metadata"]["uid"]: project(item) for item in items} == seen.state
        assert not seen.wrong
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.faults
async def test_the_reflector_outlives_the_api_server(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(UpOptions(etcd_fsync=False))
    seen = Seen()
    async with await KubeClient.connect(stack.endpoints.kubeconfig(), timeout=5) as client:
        reflector: Reflector[tuple[str, int]] = Reflector(
            client,
            CONFIGMAPS,
            namespace="default",
            label_selector="test",
            project=lambda obj: (obj["metadata"]["name"], int(obj["data"]["n"])),
            on_change=seen,
        )
        task = asyncio.create_task(reflector.run())

        async def write(n: int) -> dict[str, Any]:
            while True:
                body = {"metadata": {"labels": {"test": "yes"}}, "data": {"n": str(n)}}
                try:
                    if n % 4 == 3:
                        with contextlib.suppress(NotFound):
                            await client.delete(CONFIGMAPS, f"c{(n - 3) % 8}", "default")
                    return await client.apply(CONFIGMAPS, f"c{n % 8}", "default", body, field_manager="test")
                except Unavailable:
                    await asyncio.sleep(0.1)

        for n in range(120):
            if n in (30, 80):
                await asyncio.to_thread(stack.kill, "kube-apiserver")
            last = await write(n)
        assert await reflector.wait_for(int(last["metadata"]["resourceVersion"]), 40), reflector.last_error
        items, _ = await client.list(CONFIGMAPS, "default", label_selector="test")
        truth = {item["metadata"]["uid"]: (item["metadata"]["name"], int(item["data"]["n"])) for item in items}
        assert dict(reflector.items) == truth == seen.state and not seen.wrong
        assert reflector.watch_restarts + reflector.relists > 0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_events_and_leases_are_accepted(client: KubeClient, namespace: str) -> None:
    made = (await client.create(WIDGETS, widget("w"), namespace))["metadata"]
    about = ObjectRef(WIDGETS.api_version, WIDGETS.kind, "w", namespace, made["uid"], made["resourceVersion"])
    recorder = EventRecorder(client, "berth.dev/controller", "host-1", repeat_seconds=0.1)
    for _ in range(3):
        recorder.record(regarding=about, type="Warning", reason="Pending", action="Place", note="ü" * 2000)
    assert await recorder.flush(5)
    for _ in range(2):
        recorder.record(regarding=about, type="Warning", reason="Pending", action="Place", note="ü" * 2000)
    recorder.record(regarding=ObjectRef("v1", "Node", "n"), type="Normal", reason="Seen", action="Look", note="")
    assert await recorder.flush(5) and recorder.dropped == 0
    (event,), _ = await client.list(EVENTS, namespace)
    assert event["series"]["count"] == 5

    led = []

    async def lead(elector: LeaderElector) -> None:
        assert elector.is_leader
        led.append(elector.identity)
        await asyncio.sleep(2.5)

    electors = [
        LeaderElector(client, namespace, "l", name, lease_seconds=3, renew_deadline=2, retry=0.3) for name in "ab"
    ]
    async with asyncio.timeout(20):
        await asyncio.gather(*(elector.run(lambda e=elector: lead(e)) for elector in electors))  # type: ignore[misc]
    assert sorted(led) == ["a", "b"]
    spec = (await client.get(LEASES, "l", namespace))["spec"]
    assert "holderIdentity" not in spec and spec["leaseTransitions"] >= 1
