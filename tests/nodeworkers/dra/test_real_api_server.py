"""ResourceSlices and DeviceClasses at a real kube-apiserver, under the rights that a node has."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.install import manifests
from kube.client import KubeClient
from kube.errors import AccessDenied, Forbidden, KubeError
from nodeworkers.dra.plugin import RESOURCECLAIMS
from nodeworkers.dra.publisher import RESOURCESLICES, Publisher
from planning.devices.cards import Card
from planning.devices.offers import Device
from planning.devices.slices import UNHEALTHY, slices
from stack import Stack
from tests.nodeworkers.dra.rig import until
from tests.nodeworkers.dra.simulated_devices import SimulatedDevices, seat, simulated_cards, whole

pytestmark = pytest.mark.stack


@dataclass
class Place:
    """A Node object in the real cluster, and the account of berth's process on it."""

    stack: Stack
    node: str
    account: Path
    unbound: Path


def kubeconfig(stack: Stack, file: Path, token: str) -> Path:
    config = yaml.safe_load(stack.endpoints.kubeconfig("admin").read_text())
    config["users"] = [{"name": each["name"], "user": {"token": token}} for each in config["users"]]
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture
def place(stack: Stack, tmp_path: Path) -> Iterator[Place]:
    for manifest in [*manifests("rbac"), *manifests("policies")]:
        stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(manifest))
    node = f"dra-{uuid.uuid4().hex[:8]}"
    stack.kubectl(
        "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    )
    uid = json.loads(stack.kubectl("get", "node", node, "-o", "json"))["metadata"]["uid"]
    asked = ("create", "token", "berth-node", "-n", "berth-system")
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}", f"--bound-object-uid={uid}")
    yield Place(
        stack, node, kubeconfig(stack, tmp_path / "mine", stack.kubectl(*asked, *bound).strip()),
        kubeconfig(stack, tmp_path / "unbound", stack.kubectl(*asked).strip()),
    )  # fmt: skip
    stack.kubectl("delete", "resourceslices", f"--field-selector=spec.nodeName={node}")
    stack.kubectl("delete", "node", node)


@asynccontextmanager
async def publishing(place: Place, devices: SimulatedDevices, cards: dict[str, Card]) -> AsyncIterator[Publisher]:
    async with await KubeClient.connect(place.account) as kube:
        publisher = Publisher(kube, place.node, devices, lambda: cards, None)
        running = asyncio.create_task(publisher.run())
        try:
            yield publisher
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def there(place: Place) -> list[dict[str, Any]]:
    listed = place.stack.kubectl("get", "resourceslices", f"--field-selector=spec.nodeName={place.node}", "-o", "json")
    found: list[dict[str, Any]] = json.loads(listed)["items"]
    return found


def devices_of(place: Place) -> dict[str, Any]:
    return {device["name"]: device for body in there(place) for device in body["spec"]["devices"]}


def versions(place: Place) -> dict[str, str]:
    return {body["metadata"]["name"]: body["metadata"]["resourceVersion"] for body in there(place)}


async def test_the_slices_are_taken_and_come_back_as_they_were_sent(place: Place) -> None:
    cards = simulated_cards(4)
    gpu = Card(
        "GPU-8A3F12cd-1111-2222-3333-444455556666", "nvidia", "NVIDIA H200 " + "ü" * 60, "nvidia.com/gpu", 0,
        "0000:3b:00.0", 1, 143771, ("/dev/nvidia0",), "hopper", "560.35.03", "96.00.A5.00.01",
    )  # fmt: skip
    cards[gpu.id] = gpu
    devices = SimulatedDevices(*whole(cards), seat("pair0", 0, (gpu.id, min(cards))))
    ill = max(cards)
    devices.ail(ill)
    async with publishing(place, devices, cards) as publisher:
        await until(lambda: publisher.published == 1, f"published: {publisher.problem}")
        assert publisher.problem == ""
        (body,) = there(place)
        sent = slices(place.node, devices.offered(), cards)[0]["spec"]["devices"]
        (taint,) = devices_of(place)[ill]["taints"]
        came = taint.pop("timeAdded")
        assert taint == {"key": UNHEALTHY, "value": "HeartbeatStopped", "effect": "NoSchedule"} and came
        assert {each["name"] for each in sent} == set(devices_of(place))
        for each in sent:
            assert devices_of(place)[each["name"]] | {"taints": each.get("taints")} == each | {
                "taints": each.get("taints")
            }
    async with publishing(place, devices, cards) as publisher:
        await until(lambda: publisher.published == 1, "looked at after a restart")
        assert versions(place) == {body["metadata"]["name"]: body["metadata"]["resourceVersion"]}, "nothing was written"
        other = min(set(cards) - {gpu.id})
        devices.ail(other)
        await until(lambda: "taints" in devices_of(place)[other], "another taint")
        assert devices_of(place)[ill]["taints"][0]["timeAdded"] == came

        place.stack.kubectl("delete", "resourceslices", f"--field-selector=spec.nodeName={place.node}")
        await until(lambda: devices_of(place).keys() == {each["name"] for each in sent}, "what was deleted comes back")


async def test_ten_thousand_devices_fill_slices_of_which_one_is_written_for_one_cards_trouble(place: Place) -> None:
    cards = simulated_cards(10_000)
    devices = SimulatedDevices(*whole(cards))
    async with publishing(place, devices, cards) as publisher:
        await until(lambda: publisher.published == 157, f"published: {publisher.problem}", seconds=120)
        bodies = there(place)
        assert {body["spec"]["pool"]["generation"] for body in bodies} == {1}
        assert sum(len(body["spec"]["devices"]) for body in bodies) == 10_000
        assert max(len(json.dumps(body, separators=(",", ":"))) for body in bodies) < 64 * 1024
        before = versions(place)
        async with await KubeClient.connect(place.account) as kube:
            _, version = await kube.list(RESOURCESLICES, metadata_only=True)
            devices.ail(min(cards))
            async with aclosing(kube.watch(RESOURCESLICES, resource_version=version)) as events:
                await anext(events)
        after = versions(place)
        assert len([name for name in after if after[name] != before[name]]) == 1 and after.keys() == before.keys()


async def test_a_node_publishes_its_own_devices_alone(place: Place) -> None:
    def body(node: str, **spec: Any) -> dict[str, Any]:
        (made,) = slices(node, {"r/x": [Device("x", "r/x", ())]}, {})
        made["metadata"]["name"] = f"{place.node}-{uuid.uuid4().hex[:8]}"
        return {**made, "spec": {**made["spec"], **spec, "pool": {**made["spec"]["pool"], "generation": 1}}}

    other = body("other-node")
    place.stack.kubectl("create", "-f", "-", stdin=json.dumps(other))
    name = other["metadata"]["name"]
    try:
        async with (
            await KubeClient.connect(place.account) as mine,
            await KubeClient.connect(place.unbound) as unbound,
        ):
            await mine.create(RESOURCESLICES, body(place.node))
            with pytest.raises(Forbidden, match="may not publish devices of other-node"):
                await mine.create(RESOURCESLICES, body("other-node"))
            with pytest.raises(Forbidden, match=r"devices of the driver gpu\.nvidia\.com"):
                await mine.create(RESOURCESLICES, body(place.node, driver="gpu.nvidia.com"))
            with pytest.raises(Forbidden, match="may not publish"):
                await mine.create(RESOURCESLICES, body(place.node, nodeName=None, allNodes=True))
            with pytest.raises(Forbidden, match="names no node"):
                await unbound.create(RESOURCESLICES, body(place.node))
            with pytest.raises(Forbidden, match="may not publish devices of other-node"):
                await mine.merge_patch(RESOURCESLICES, name, None, {"spec": {"devices": []}})
            with pytest.raises(Forbidden, match="may not publish devices of other-node"):
                await mine.delete(RESOURCESLICES, name)
            with pytest.raises(KubeError, match="not found"):
                await mine.get(RESOURCECLAIMS, "nobody", "default")
            with pytest.raises(AccessDenied):
                await mine.list(RESOURCECLAIMS, "default")
    finally:
        place.stack.kubectl("delete", "resourceslice", name)


def test_every_class_is_taken_and_chooses_by_the_resource_that_it_stands_for(stack: Stack) -> None:
    classes = manifests("dra")
    assert {each["kind"] for each in classes} == {"DeviceClass"}
    resources = [each["spec"]["extendedResourceName"] for each in classes]
    assert {"tenstorrent.com/n150", "nvidia.com/gpu", "kyb.ai/gpu-4x-seat"} <= set(resources)
    assert len(set(resources)) == len({each["metadata"]["name"] for each in classes}) == len(classes)
    for each in classes:
        (selector,) = each["spec"]["selectors"]
        assert selector["cel"]["expression"].endswith(f'.resource == "{each["spec"]["extendedResourceName"]}"')
        stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(each))
    stored = json.loads(stack.kubectl("get", "deviceclasses", "-o", "json"))["items"]
    kept = {each["metadata"]["name"]: each["spec"].get("extendedResourceName") for each in stored}
    assert {each["metadata"]["name"]: each["spec"]["extendedResourceName"] for each in classes}.items() <= kept.items()
