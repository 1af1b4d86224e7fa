"""A node with the DRA driver on real sockets, a pretended API server and simulated devices, and the kubelet's calls."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kube.client import KubeClient
from kube.resources import NODES
from nodeworkers.dra.driver import Driver, Places
from nodeworkers.dra.plugin import RESOURCECLAIMS
from nodeworkers.rpc import dra_health_pb2, dra_pb2, pluginregistration_pb2
from planning.devices.cards import Card
from planning.devices.slices import DRIVER, names
from tests.kube.fake_api import FakeApi
from tests.nodeworkers.dra.simulated_devices import SimulatedDevices

NODE = "node-1"
# The names that a kubelet calls (ServiceName in k8s.io/kubelet's *_grpc.pb.go).
SERVICES: dict[str, ServiceDescriptor] = {
    "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin": dra_pb2.DESCRIPTOR.services_by_name["DRAPlugin"],
    "v1alpha1.DRAResourceHealth": dra_health_pb2.DESCRIPTOR.services_by_name["DRAResourceHealth"],
    "pluginregistration.Registration": pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"],
}


async def until(seen: Callable[[], Any], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def result(request: str, device: str, **more: Any) -> dict[str, Any]:
    """One of status.allocation.devices.results, by device id."""
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": names([device])[device], **more}


class Kubelet:
    """The kubelet's calls, by the names it uses."""

    def __init__(self, places: Places) -> None:
        self._plugin = grpc.aio.insecure_channel(f"unix:{places.endpoint}")
        self._registration = grpc.aio.insecure_channel(f"unix:{places.registration}")

    async def prepare(self, *claims: dict[str, str]) -> Any:
        request = dra_pb2.NodePrepareResourcesRequest(claims=[dra_pb2.Claim(**claim) for claim in claims])
        return await self._call("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources", request)

    async def unprepare(self, *claims: dict[str, str]) -> Any:
        request = dra_pb2.NodeUnprepareResourcesRequest(claims=[dra_pb2.Claim(**claim) for claim in claims])
        return await self._call("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources", request)

    async def info(self) -> Any:
        return await self._call("pluginregistration.Registration/GetInfo", pluginregistration_pb2.InfoRequest())

    async def notify(self, registered: bool, error: str = "") -> None:
        status = pluginregistration_pb2.RegistrationStatus(plugin_registered=registered, error=error)
        await self._call("pluginregistration.Registration/NotifyRegistrationStatus", status)

    def health(self) -> Any:
        """A stream that is iterated over."""
        call: Any = self._plugin.unary_stream(
            "/v1alpha1.DRAResourceHealth/NodeWatchResources",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=dra_health_pb2.NodeWatchResourcesResponse.FromString,
        )
        return call(dra_health_pb2.NodeWatchResourcesRequest(), timeout=60)

    async def close(self) -> None:
        await self._plugin.close()
        await self._registration.close()

    async def _call(self, name: str, request: Message) -> Any:
        service, _, method = name.partition("/")
        answer = GetMessageClass(SERVICES[service].methods_by_name[method].output_type)
        channel = self._registration if service.startswith("pluginregistration") else self._plugin
        call: Any = channel.unary_unary(
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return await call(request, timeout=30)


class Rig:
    """One node. `start` and `stop` as its process does; what lies in `places` stays."""

    def __init__(self, folder: Path, kubelet: Path, api: FakeApi, kube: KubeClient, devices: SimulatedDevices) -> None:
        self.places = Places(kubelet, folder / "berth", folder / "cdi")
        self.api, self.kube, self.devices = api, kube, devices
        self.cards: dict[str, Card] = {}
        self.kubelet = Kubelet(self.places)
        api.put(NODES, NODE)

    async def start(self) -> None:
        self.driver = Driver(self.places, NODE, self.kube, self.devices, lambda: self.cards, None)
        await self.driver.start()
        self._watching = asyncio.create_task(self.driver.watch())

    async def stop(self) -> None:
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await self.driver.stop()

    def claim(self, name: str, *results: dict[str, Any], uid: str | None = None) -> dict[str, str]:
        """Puts a claim as the scheduler leaves it; what the kubelet says of it."""
        status = {"allocation": {"devices": {"results": list(results)}}}
        metadata = {} if uid is None else {"uid": uid}
        body = self.api.put(RESOURCECLAIMS, name, "team-a", status=status, metadata=metadata)
        return {"namespace": "team-a", "name": name, "uid": body["metadata"]["uid"]}


@asynccontextmanager
async def serving(folder: Path, devices: SimulatedDevices, timeout: float = 30.0) -> AsyncIterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="dra-") as kubelet:  # short, for a socket's name has at most 107 bytes
        async with FakeApi() as api, await api.client(timeout=timeout) as kube:
            rig = Rig(folder, Path(kubelet), api, kube, devices)
            await rig.start()
            try:
                yield rig
            finally:
                await rig.kubelet.close()
                await rig.stop()
