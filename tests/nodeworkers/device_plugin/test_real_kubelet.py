"""The device plugin under a real kubelet: what it advertises, what a pod gets, and how soon it is back after a kill.
The devices are simulated, and a container gets of them no more than their names.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.device_plugin.registration import Folders
from nodeworkers.device_plugin.supervisor import Supervisor
from nodeworkers.devices.holdings import Holding, PodResourcesError
from planning.devices.offers import Injection, Refused
from stack import Stack, UpOptions
from stack.node_images import BUSYBOX
from stack.realnode import kubelet_root, unavailable
from tests.nodeworkers.device_plugin.simulated_devices import GPU, N150, SimulatedDevices, simulated
from tests.nodeworkers.pods import NODE

pytestmark = [
    pytest.mark.node,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]
MakeStack = Callable[..., Stack]
WHOLE = {N150: 4, GPU: 8}


class NamedDevices(SimulatedDevices):
    """Devices that no container has to open: their names alone are given to it."""

    def allocate(self, resource: str, ids: Sequence[str], claim: str = "", admin: bool = False) -> Injection:
        return Injection(env=super().allocate(resource, ids, claim).env)


class Node:
    """A stack with a real kubelet."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.root = kubelet_root(stack.layout.root)
        self.told = PodResources(self.root / "pod-resources" / "kubelet.sock")

    async def kubectl(self, *arguments: str, body: dict[str, Any] | None = None) -> str:
        stdin = None if body is None else json.dumps(body)
        return await asyncio.to_thread(self.stack.kubectl, *arguments, stdin=stdin, check=False)

    async def advertised(self) -> dict[str, int] | None:
        """None while it does not say."""
        try:
            return {resource: len(ids) for resource, ids in (await self.told.allocatable()).items()}
        except PodResourcesError:
            return None

    async def until(self, advertised: dict[str, int], seconds: float) -> None:
        began = time.monotonic()
        while (now := await self.advertised()) != advertised:
            assert time.monotonic() - began < seconds, f"{now} is not {advertised} after {seconds} s"
            await asyncio.sleep(0.05)

    async def pod(self, name: str, resource: str) -> None:
        container = {
            "name": "c",
            "image": BUSYBOX,
            "command": ["sh", "-c", "echo got $SIMULATED_DEVICES; sleep 100000"],
            "resources": {"limits": {resource: 1}},
        }
        metadata = {"name": name, "namespace": "default"}
        spec = {"nodeName": NODE, "terminationGracePeriodSeconds": 0, "containers": [container]}
        await self.kubectl(
            "apply", "-f", "-", body={"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        )

    async def until_says(self, expected: str, *arguments: str) -> None:
        began = time.monotonic()
        while expected not in (said := await self.kubectl(*arguments)):
            assert time.monotonic() - began < 90, f"{expected!r} is not in {said!r}"
            await asyncio.sleep(0.3)

    async def until_held(self, holdings: tuple[Holding, ...]) -> None:
        began = time.monotonic()
        while (now := await self.told.list()) != holdings:
            assert time.monotonic() - began < 60, now
            await asyncio.sleep(0.2)

    async def kill(self) -> None:
        """Until the kubelet that follows answers."""
        killed = await asyncio.to_thread(self.stack.kill, "kubelet")
        began = time.monotonic()
        while await self.advertised() is None:
            assert time.monotonic() - began < 90
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.stack.wait_restarted, "kubelet", killed, timeout=60)


@asynccontextmanager
async def supervised(node: Node, devices: SimulatedDevices, folders: Folders) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(devices, node.told, folders)
    running = asyncio.ensure_future(supervisor.run())
    try:
        yield supervisor
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_real_kubelet_advertises_what_is_served(make_stack: MakeStack) -> None:
    node = Node(await asyncio.to_thread(make_stack, UpOptions(real_node=True)))
    devices = NamedDevices()
    for resource, count in WHOLE.items():
        devices.offer(*simulated(count, resource, resource.partition("/")[2]), resource=resource)
    await node.until_says("default", "get", "serviceaccount", "default", "-o", "name")
    async with supervised(node, devices, Folders()) as supervisor:
        await node.until(WHOLE, 10)
        await node.until_says('"tenstorrent.com/n150":"4"', "get", "node", NODE, "-o", "jsonpath={.status.allocatable}")
        await node.pod("first", N150)
        await node.until_says("got n150-", "logs", "first")
        (holding,) = await node.told.list()
        assert (holding.pod, holding.container, holding.resource) == ("first", "c", N150)
        assert devices.allocated == [(N150, (holding.device_id,))]

        devices.sicken(holding.device_id)
        await node.until({**WHOLE, N150: 3}, 5)
        devices.sicken(holding.device_id, healthy=True)
        await node.until(WHOLE, 5)

        devices.fault = Refused("No n150 can be had: the card is being reset.")
        await node.pod("refused", N150)
        await node.until_says("the card is being reset", "get", "pod", "refused", "-o", "jsonpath={.status.message}")
        devices.fault = None

        for round in range(5):  # the swap while a kubelet listens
            for registration in supervisor._registrations.values():
                registration.renew(f"Round {round}.")
            await asyncio.sleep(1)  # the end of the old stream is behind it
            await node.until(WHOLE, 5)
        assert [each.registrations for each in supervisor.statuses()] == [6, 6], "an old stream's end took the new one"
        assert await supervisor.check() == ()

        for _ in range(3):
            await node.kill()
            await node.until(WHOLE, 5)
        # It tells of nobody at first: until it has heard of its pods from the API server.
        await node.until_held((Holding("default", "first", "c", N150, holding.device_id),))
        assert len(devices.allocated) == 1, "the kubelet has what it was given, and does not ask again"
        await node.pod("second", GPU)
        await node.until_says("got gpu-", "logs", "second")


async def test_a_real_kubelet_finds_what_is_in_its_registry(make_stack: MakeStack) -> None:
    node = Node(await asyncio.to_thread(make_stack, UpOptions(real_node=True)))
    devices = NamedDevices()
    for resource, count in WHOLE.items():
        devices.offer(*simulated(count, resource, resource.partition("/")[2]), resource=resource)
    async with supervised(node, devices, Folders(watched=node.root / "plugins_registry")) as supervisor:
        await node.until(WHOLE, 15)
        for registration in supervisor._registrations.values():
            registration.renew("Again.")
        await asyncio.sleep(4)
        await node.until(WHOLE, 5)
        assert [each.registrations for each in supervisor.statuses()] == [2, 2], "an old socket's end took the new one"
        await node.kill()
        await node.until(WHOLE, 5)
