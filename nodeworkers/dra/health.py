"""DRAResourceHealth, by which the kubelet learns how devices are and writes it into the status of the pods that have
them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from nodeworkers.devices.frontend import Devices
from nodeworkers.rpc import dra_health_pb2
from planning.devices.slices import names

AGAIN_SECONDS: Final = 30.0
TIMEOUT_SECONDS: Final = 90
"""After this long without a word of a device the kubelet calls it Unknown, so each is told of every 30 s; what says
nothing new makes it write nothing.
"""

MESSAGE_BYTES: Final = 1024
_PER_MESSAGE = 1000  # devices: with a message each, well below the 4 MiB that the kubelet takes

Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """v1alpha1.DRAResourceHealth. `streams` is how many kubelets listen now."""

    def __init__(self, node: str, devices: Devices) -> None:
        self._node, self._devices = node, devices
        self._closing = asyncio.Event()
        self.streams = 0

    def close(self) -> None:
        """Ends the streams, which would hold up the server's end."""
        self._closing.set()

    async def NodeWatchResources(
        self, request: dra_health_pb2.NodeWatchResourcesRequest, context: Context
    ) -> AsyncIterator[dra_health_pb2.NodeWatchResourcesResponse]:
        """All devices at once, then again whenever something changes."""
        self.streams += 1
        closing = asyncio.create_task(self._closing.wait())
        try:
            while not closing.done():
                version = self._devices.version
                for message in self._messages():
                    yield message
                changed = asyncio.create_task(self._devices.changed(version))
                try:
                    await asyncio.wait((changed, closing), timeout=AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
        finally:
            closing.cancel()
            self.streams -= 1

    def _messages(self) -> list[dra_health_pb2.NodeWatchResourcesResponse]:
        everything = [device for devices in self._devices.offered().values() for device in devices]
        called, now = names(device.id for device in everything), int(time.time())
        told = [
            dra_health_pb2.DeviceHealth(
                device=dra_health_pb2.DeviceIdentifier(pool_name=self._node, device_name=called[device.id]),
                health=dra_health_pb2.HEALTHY if device.healthy else dra_health_pb2.UNHEALTHY,
                last_updated_time=now,
                health_check_timeout_seconds=TIMEOUT_SECONDS,
                message="" if device.healthy else _message(device.reason, device.message),
            )
            for device in everything
        ]
        return [
            dra_health_pb2.NodeWatchResourcesResponse(devices=told[start : start + _PER_MESSAGE])
            for start in range(0, max(len(told), 1), _PER_MESSAGE)
        ]


def _message(reason: str, message: str) -> str:
    """Within the kubelet's limit, which it counts in bytes: it would cut a letter in two."""
    text = f"{reason}: {message}" if reason and message else reason or message
    data = text.encode()
    return text if len(data) <= MESSAGE_BYTES else data[: MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."
