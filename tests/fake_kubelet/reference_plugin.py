"""A device plugin as it should be, for the fake kubelet's own tests; and, on demand, one that does one thing wrong.

Its devices are simulated: names without hardware. `python -m tests.fake_kubelet.reference_plugin --help` runs it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio

from nodeworkers.rpc import deviceplugin_pb2 as api
from tests.fake_kubelet.registration import identity_of
from tests.fake_kubelet.wire import Caller, CallFailed, Context, served_by

FAULTS = (
    "wrong-version", "bad-resource-name", "bad-endpoint", "register-before-serving", "short-register-deadline",
    "socket-reused", "registered-over-open-stream", "options-failed", "options-differ", "resent-list",
    "message-too-large", "large-response", "empty-device-id", "long-device-id", "doubled-device-id", "health-string",
    "negative-numa-node", "empty-topology", "wrong-response-count", "foreign-device", "malformed-response",
    "allocate-failed", "preference-failed", "bad-preference", "pre-start-failed", "vanished-while-asked",
    "never-registers-again", "loses-a-device", "calls-by-changed-answers",
)  # fmt: skip
"""What it can do wrong: a rule that it breaks, or a behaviour that a scenario finds."""
_SERVICE = api.DESCRIPTOR.services_by_name["DevicePlugin"]
_REGISTER = api.DESCRIPTOR.services_by_name["Registration"].methods_by_name["Register"]
_generations = itertools.count()


class ReferencePlugin:
    """`folder` is the kubelet's device plugin folder. `healthy` by device may be changed, then `changed` be called."""

    def __init__(
        self,
        folder: Path,
        resource: str = "example.com/card",
        devices: Iterable[str] | int = 4,
        faults: Iterable[str] = (),
        look_seconds: float = 0.05,
    ) -> None:
        self.folder, self.resource, self.faults = folder, resource, frozenset(faults)
        if unknown := self.faults - set(FAULTS):
            raise ValueError(f"The reference plugin knows no fault {', '.join(sorted(unknown))}.")
        names = (
            (f"{resource.rpartition('/')[2]}-{at}" for at in range(devices)) if isinstance(devices, int) else devices
        )
        self.healthy = dict.fromkeys(names, True)
        self.look_seconds = look_seconds
        self.allocations: list[list[str]] = []
        self._news = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._path = folder
        self._streams = 0
        self._stream_lost = False
        self._registrations = 0

    # What the kubelet calls.

    async def GetDevicePluginOptions(self, request: Any, context: Context) -> Any:
        """Both calls are wanted."""
        if "options-failed" in self.faults:
            raise RuntimeError("no options")
        return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """A list now, and at each change."""
        self._streams += 1
        try:
            while True:
                news = self._news
                yield self._list()
                if "resent-list" in self.faults:
                    yield self._list()
                await news.wait()
        finally:
            self._streams -= 1
            self._stream_lost = True

    async def GetPreferredAllocation(self, request: Any, context: Context) -> Any:
        """The first by name."""
        if "preference-failed" in self.faults:
            raise RuntimeError("no preference")
        answers = []
        for each in request.container_requests:
            others = sorted(set(each.available_deviceIDs) - set(each.must_include_deviceIDs))
            chosen = [*each.must_include_deviceIDs, *others][: each.allocation_size]
            if "bad-preference" in self.faults:
                chosen = ["nobody's", *chosen[1:]]
            answers.append(api.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return api.PreferredAllocationResponse(container_responses=answers)

    async def Allocate(self, request: Any, context: Context) -> Any:
        """An environment variable with the devices' names, and a device each."""
        if "allocate-failed" in self.faults:
            raise RuntimeError("no devices today")
        answers = [self._given(sorted(each.devices_ids)) for each in request.container_requests]
        if "vanished-while-asked" in self.faults:
            self.healthy = {"another-card": True}
            self.changed()
            await asyncio.sleep(0.5)
        if "wrong-response-count" in self.faults:
            answers = []
        return api.AllocateResponse(container_responses=answers)

    async def PreStartContainer(self, request: Any, context: Context) -> Any:
        """Nothing is to be done."""
        if "pre-start-failed" in self.faults:
            raise RuntimeError("the card does not wake up")
        return api.PreStartContainerResponse()

    # Its life.

    def changed(self) -> None:
        """`healthy` says something else: the kubelet is told."""
        self._news.set()
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Serves and registers once. Raises CallFailed."""
        endpoint = "same.sock" if "socket-reused" in self.faults else f"r{os.getpid()}-{next(_generations)}.sock"
        self._path = self.folder / endpoint
        if "register-before-serving" in self.faults:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._register(endpoint))
                await asyncio.sleep(0.3)
                both.create_task(self._serve())
        else:
            await self._serve()
            await self._register(endpoint)
        if "registered-over-open-stream" in self.faults:
            while not self._streams:
                await asyncio.sleep(0.01)
            await self._register(endpoint)

    async def stop(self) -> None:
        """Ends the server; the kubelet sees the stream end."""
        if self._server is not None:
            await self._server.stop(grace=0)
            self._server = None

    async def run(self) -> None:
        """Keeps itself registered until cancelled: whenever its stream ends or its socket or the kubelet's is not the
        one it knew, a new server takes the old one's place.
        """
        try:
            while True:
                kubelet = identity_of(self.folder / "kubelet.sock")
                try:
                    await self.start()
                except CallFailed:
                    await self.stop()
                    await asyncio.sleep(4 * self.look_seconds)
                    continue
                ours, self._stream_lost = identity_of(self._path), False
                while "never-registers-again" in self.faults or (
                    not self._stream_lost
                    and identity_of(self._path) == ours
                    and identity_of(self.folder / "kubelet.sock") == kubelet
                ):
                    await asyncio.sleep(self.look_seconds)
                await self.stop()
        finally:
            await self.stop()

    async def _serve(self) -> None:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers([served_by(_SERVICE, self)])
        self._server.add_insecure_port(f"unix:{self._path}")
        starting = asyncio.ensure_future(self._server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # a server that is left midway cannot be stopped
            raise

    async def _register(self, endpoint: str) -> None:
        self._registrations += 1
        if "loses-a-device" in self.faults and self._registrations == 2:
            self.healthy.popitem()
        options = api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
        if "options-differ" in self.faults:
            options.pre_start_required = False
        request = api.RegisterRequest(
            version="v1alpha1" if "wrong-version" in self.faults else "v1beta1",
            endpoint=f"./{endpoint}" if "bad-endpoint" in self.faults else endpoint,
            resource_name="cards" if "bad-resource-name" in self.faults else self.resource,
            options=options,
        )
        caller = Caller(self.folder / "kubelet.sock")
        try:
            await caller.call(_REGISTER, request, 5.0 if "short-register-deadline" in self.faults else 30.0)
        finally:
            await caller.close()

    def _list(self) -> Any:
        devices = [
            api.Device(ID=name, health="Healthy" if healthy else "Unhealthy") for name, healthy in self.healthy.items()
        ]
        first = devices[0] if devices else api.Device()
        if "message-too-large" in self.faults:
            devices += [api.Device(ID=f"{at:063}", health="Healthy") for at in range(70_000)]
        if "empty-device-id" in self.faults:
            first.ID = ""
        if "long-device-id" in self.faults:
            first.ID = "x" * 64
        if "doubled-device-id" in self.faults:
            devices.append(first)
        if "health-string" in self.faults:
            first.health = "healthy"
        if "negative-numa-node" in self.faults:
            first.topology.nodes.add(ID=-1)
        if "empty-topology" in self.faults:
            first.topology.SetInParent()
        return api.ListAndWatchResponse(devices=devices)

    def _given(self, names: list[str]) -> Any:
        self.allocations.append(names)
        answer = api.ContainerAllocateResponse(envs={"CARDS": ",".join(names)})
        for name in names:
            answer.devices.add(host_path=f"/dev/by-id/{name}", container_path=f"/dev/{name}", permissions="rw")
        if "foreign-device" in self.faults:
            answer.envs["CARDS"] = ",".join(self.healthy)
        if "malformed-response" in self.faults:
            answer.devices[0].permissions = "all"
        if "large-response" in self.faults:
            answer.envs["PADDING"] = "x" * (5 * 1024 * 1024)
        if "calls-by-changed-answers" in self.faults:
            answer.envs["CALL"] = str(len(self.allocations))
        return answer


@asynccontextmanager
async def running(plugin: ReferencePlugin) -> AsyncIterator[None]:
    """It keeps itself registered until the block ends."""
    task = asyncio.create_task(plugin.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_kubelet.reference_plugin")
    parser.add_argument("--folder", type=Path, required=True, help="the kubelet's device plugin folder")
    parser.add_argument("--resource", default="example.com/card")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--fault", action="append", default=[], choices=FAULTS, help="what it does wrong")
    given = parser.parse_args()
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with suppress(asyncio.CancelledError):
        await ReferencePlugin(given.folder, given.resource, given.devices, given.fault).run()


if __name__ == "__main__":
    asyncio.run(_main())
