"""As much of a kubelet as the registration of device plugins needs, with the manners of 1.36.3: what it does in
Register, on a stream's end and at its start, and what it then says on podresources. It runs no pods.

In the test's process, or as one of its own that can be killed (`live`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from nodeworkers.rpc import deviceplugin_pb2 as plugins
from nodeworkers.rpc import pluginregistration_pb2 as watching
from nodeworkers.rpc import podresources_pb2 as resources
from nodeworkers.sockets import handler

_SERVICE = "/v1beta1.DevicePlugin/"


class Client:
    """The kubelet's side of one registered plugin."""

    def __init__(self, resource: str, path: Path) -> None:
        self.resource = resource
        self.path = path
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(f"unix:{path}", options=options)

    def call(self, name: str, request: Any, answer: type, seconds: float | None = None) -> Any:
        kind = self.channel.unary_stream if name == "ListAndWatch" else self.channel.unary_unary
        made: Callable[..., Any] = kind(
            _SERVICE + name,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,  # type: ignore[attr-defined]
        )
        return made(request, timeout=seconds)


class SmallKubelet:
    """`healthy` are the allocatable devices by resource. What a test sets: `refuse` is what it says to Register, `deaf`
    lets it register and not listen, `stuck` lets Register hang, `slow` are the seconds after which it sees that a
    stream ended; `ended` counts these. `watched` is the folder where it looks for sockets.
    """

    def __init__(self, folder: Path, watched: Path | None = None) -> None:
        self.folder = folder
        self.pod_resources = folder / "pod-resources" / "kubelet.sock"
        self.watched = watched
        self.healthy: dict[str, frozenset[str]] = {}
        self.snapshots: dict[str, int] = {}
        self.registered: list[tuple[str, str]] = []
        self.deadlines: list[float] = []
        self.violations: list[str] = []
        self.refuse = ""
        self.deaf = False
        self.stuck = False
        self.slow = 0.0
        self.ended = 0
        self._wiped: set[str] = set()
        self._clients: dict[str, Client] = {}
        self._servers: list[grpc.aio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, wipe: bool = True) -> None:
        """Removes every socket of its folder, as a kubelet does, and serves; without `wipe` only its own."""
        self.pod_resources.parent.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_socket() and (wipe or path.name == "kubelet.sock"):
                path.unlink()
                self._wiped.add(path.name)
        await self._serve(self.folder / "kubelet.sock", plugins.DESCRIPTOR.services_by_name["Registration"], self)
        self.pod_resources.unlink(missing_ok=True)
        await self._serve(
            self.pod_resources, resources.DESCRIPTOR.services_by_name["PodResourcesLister"], _PodResources(self)
        )
        if self.watched:
            self._begin(self._look(self.watched))

    async def stop(self) -> None:
        """As at SIGTERM: streams end, kubelet.sock goes, all that it knew is forgotten."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.channel.close()
        self._clients.clear()
        self.healthy.clear()
        for server in self._servers:
            await server.stop(grace=0)
        self._servers.clear()

    async def restart(self) -> None:
        """Comes back at once."""
        await self.stop()
        await self.start()

    async def until(self, healthy: dict[str, int], seconds: float = 10) -> None:
        """Waits until so many devices are allocatable."""
        try:
            async with asyncio.timeout(seconds):
                while {resource: len(ids) for resource, ids in self.healthy.items()} != healthy:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{self.healthy} is not {healthy} after {seconds} s; {self.registered}") from None

    async def Register(self, request: plugins.RegisterRequest, context: Any) -> plugins.Empty:
        self.deadlines.append(context.time_remaining())
        if self.stuck:
            await asyncio.Event().wait()
        if request.version != "v1beta1":
            self.violations.append(f"version {request.version}")
        if self.refuse:
            await context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        try:
            await self._connect(request.resource_name, self.folder / request.endpoint)
        except (grpc.aio.AioRpcError, OSError) as error:
            await context.abort(grpc.StatusCode.UNKNOWN, f"cannot dial back: {error}")
        return plugins.Empty()

    async def _connect(self, resource: str, path: Path) -> None:
        # A plugin whose socket a kubelet removes just as it speaks to it could not know.
        if not _is_socket(path) and path.name not in self._wiped:
            self.violations.append(f"{path.name} is registered before it is served")
        if not self.watched and str(path) in dict(self.registered):
            self.violations.append(f"{path.name} is registered twice")
        client = self._clients[resource] = Client(resource, path)
        options = await client.call("GetDevicePluginOptions", plugins.Empty(), plugins.DevicePluginOptions, 10)
        if not options.get_preferred_allocation_available:
            self.violations.append(f"{resource} has no preferred allocation")
        self.registered.append((str(path), resource))
        if not self.deaf:
            self._begin(self._listen(client))

    async def _listen(self, client: Client) -> None:
        before = None
        with suppress(grpc.aio.AioRpcError):
            async for snapshot in client.call("ListAndWatch", plugins.Empty(), plugins.ListAndWatchResponse):
                if snapshot == before:
                    self.violations.append(f"{client.resource} told the same twice")
                before = snapshot
                self.snapshots[client.resource] = self.snapshots.get(client.resource, 0) + 1
                healthy = frozenset(each.ID for each in snapshot.devices if each.health == "Healthy")
                self.healthy[client.resource] = healthy
        await asyncio.sleep(self.slow)
        # Whoever is registered by now is taken for the one that ended, as up to 1.36.3.
        self.ended += 1
        present = self._clients.pop(client.resource, None)
        if present is not None:
            await present.channel.close()
            self.healthy[client.resource] = frozenset()

    async def _look(self, folder: Path) -> None:
        known: set[Path] = set()
        while True:
            there = {Path(each.path) for each in os.scandir(folder) if _is_socket(Path(each.path))}
            for path in there - known:
                with suppress(grpc.aio.AioRpcError):  # of a process that was killed
                    await self._found(path)
            known = there
            await asyncio.sleep(0.05)

    async def _found(self, path: Path) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            info = await channel.unary_unary(
                "/pluginregistration.Registration/GetInfo",
                request_serializer=watching.InfoRequest.SerializeToString,
                response_deserializer=watching.PluginInfo.FromString,
            )(watching.InfoRequest(), timeout=1)
            if (info.type, list(info.supported_versions)) != ("DevicePlugin", ["v1beta1"]):
                self.violations.append(f"{path.name} is {info}")
            if not self.refuse:
                await self._connect(info.name, Path(info.endpoint))
            status = watching.RegistrationStatus(plugin_registered=not self.refuse, error=self.refuse)
            await channel.unary_unary(
                "/pluginregistration.Registration/NotifyRegistrationStatus",
                request_serializer=watching.RegistrationStatus.SerializeToString,
                response_deserializer=watching.RegistrationStatusResponse.FromString,
            )(status, timeout=5)

    async def allocate_always(self) -> None:
        """The load of a node whose pods come and go: an Allocate at a time, for each resource in turn. An error of a
        plugin that is there is a violation.
        """
        while True:
            for resource, client in list(self._clients.items()):
                for device in sorted(self.healthy.get(resource, ()))[:1]:
                    request = plugins.AllocateRequest(
                        container_requests=[plugins.ContainerAllocateRequest(devices_ids=[device])]
                    )
                    try:
                        await client.call("Allocate", request, plugins.AllocateResponse, 5)
                    except grpc.aio.AioRpcError as error:
                        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                            self.violations.append(f"Allocate of {resource}: {error.code()} {error.details()}")
                    except (asyncio.CancelledError, grpc.aio.UsageError):
                        if client is self._clients.get(resource):
                            raise
            await asyncio.sleep(0.005)

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, path: Path, service: Any, servicer: object) -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([handler(service, servicer)])
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)


def _is_socket(path: Path) -> bool:
    return path.is_socket()


class _PodResources:
    def __init__(self, kubelet: SmallKubelet) -> None:
        self._kubelet = kubelet

    async def GetAllocatableResources(
        self, request: resources.AllocatableResourcesRequest, context: Any
    ) -> resources.AllocatableResourcesResponse:
        return resources.AllocatableResourcesResponse(
            devices=[
                resources.ContainerDevices(resource_name=resource, device_ids=[device])
                for resource, ids in self._kubelet.healthy.items()
                for device in sorted(ids)
            ]
        )


def live(folder: Path) -> None:
    """A process of its own, until it is killed; what a plugin did wrong is in the file `violations`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        kubelet = SmallKubelet(folder)
        await kubelet.start()
        load = asyncio.ensure_future(kubelet.allocate_always())
        while not load.done() and os.getppid() != 1:
            if kubelet.violations:
                with (folder / "violations").open("a") as file:
                    file.writelines(f"{each}\n" for each in kubelet.violations)
                kubelet.violations.clear()
            await asyncio.sleep(0.02)
        load.result()

    asyncio.run(main())
