"""The kubelet's registration server and connections to plugins: it calls back inside Register, and never reconnects.

After pkg/kubelet/cm/devicemanager/plugin/v1beta1/{server,handler,client}.go of Kubernetes 1.36.3, and kubernetes#135437
(merged for 1.37) for what happens without `disconnect_race`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from nodeworkers.rpc import deviceplugin_pb2
from tests.fake_kubelet import checks
from tests.fake_kubelet.manager import DeviceManager
from tests.fake_kubelet.transcript import Transcript
from tests.fake_kubelet.wire import Caller, CallFailed, Context

DIAL_SECONDS = 10.0
_METHODS = deviceplugin_pb2.DESCRIPTOR.services_by_name["DevicePlugin"].methods_by_name


class RegistrationRefused(Exception):
    """A plugin is not registered. The text is what it is told."""


class Client:
    """One registration's connection to its plugin."""

    def __init__(self, resource: str, path: Path) -> None:
        self.resource, self.path = resource, path
        self.streaming = False
        self._caller = Caller(path)

    async def dial(self) -> bool:
        """False if the first attempt was in vain. Raises CallFailed."""
        return await self._caller.dial(DIAL_SECONDS)

    async def call(self, name: str, request: Any, seconds: float | None = None) -> Any:
        """One of the plugin's methods. Raises CallFailed."""
        return await self._caller.call(_METHODS[name], request, seconds)

    async def run(self, manager: DeviceManager, transcript: Transcript) -> None:
        """Reads ListAndWatch until it ends, and takes each list for the resource's, whoever else serves it by now."""
        before = None
        self.streaming = True
        transcript.note("ListAndWatch", self.resource, f"opened on {self.path.name}")
        why = "the plugin ended it"
        try:
            async for message in self._caller.stream(_METHODS["ListAndWatch"], deviceplugin_pb2.Empty()):
                held = manager.allocations.held().get(self.resource, set())
                transcript.note("list", self.resource, f"{len(message.devices)} devices", bytes=message.ByteSize())
                others = manager.others(self.resource)
                for rule, text in checks.devices(message.devices, before, others, held):
                    transcript.violated(rule, self.resource, text)
                before = message.devices
                manager.received(self.resource, message.devices)
        except CallFailed as error:
            why = str(error)
            if checks.too_large(error.code, error.details):
                transcript.violated("message-too-large", self.resource, f"a list is too large: {error.details}")
        finally:
            self.streaming = False
        transcript.note("stream ended", self.resource, f"{self.path.name}: {why}")

    async def close(self) -> None:
        """Ends the stream and all calls."""
        await self._caller.close()


class RegistrationServer:
    """Serves v1beta1.Registration for one life of the kubelet. `sockets` remembers, over all its lives, which file each
    path was when it was registered.
    """

    def __init__(
        self,
        folder: Path,
        manager: DeviceManager,
        transcript: Transcript,
        disconnect_race: bool,
        sockets: dict[Path, tuple[int, int]],
    ) -> None:
        self.folder, self.manager, self.transcript = folder, manager, transcript
        self.disconnect_race = disconnect_race
        self.clients: dict[str, Client] = {}
        self._sockets = sockets
        self._everyone: list[Client] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def Register(self, request: deviceplugin_pb2.RegisterRequest, context: Context) -> deviceplugin_pb2.Empty:
        """v1beta1.Registration/Register: the answer comes after the plugin was called back."""
        name = request.resource_name
        left = context.time_remaining()
        self.transcript.note("Register", name, f"{request.endpoint}, {request.version}", seconds_left=left)
        for rule, text in checks.registration(request, left):
            self.transcript.violated(rule, name, text)
        try:
            if request.version != checks.VERSION:
                raise RegistrationRefused(
                    f"requested API version {request.version!r} is not supported by kubelet. Supported version is"
                    f" {checks.VERSION!r}"
                )
            if not checks.is_extended_resource(name):
                raise RegistrationRefused(
                    f"the ResourceName {name!r} is invalid: it must be domain/name, and not in kubernetes.io"
                )
            await self.connect(name, self.folder / request.endpoint.lstrip("/"), request.options)
        except RegistrationRefused as refused:
            self.transcript.note("refused", name, str(refused))
            await context.abort(grpc.StatusCode.UNKNOWN, str(refused))
        return deviceplugin_pb2.Empty()

    async def connect(self, resource: str, path: Path, announced: Any = None) -> None:
        """connectClient: dials, asks for options, then reads the stream in the background. Raises RegistrationRefused.

        A failed attempt forgets the client of the resource, also one that was there before: when that one's stream
        ends, nobody tells the manager, whose devices stay healthy for ever.
        """
        self._check_socket(resource, path)
        client = Client(resource, path)
        self._everyone.append(client)
        self.clients[resource] = client
        try:
            if not await client.dial():
                self.transcript.violated("register-before-serving", resource, f"nobody served {path.name} yet")
            options = await client.call("GetDevicePluginOptions", deviceplugin_pb2.Empty())
        except CallFailed as error:
            serves = error.code not in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
            self.transcript.violated("options-failed" if serves else "register-before-serving", resource, str(error))
            raise RegistrationRefused(f"failed to connect to the device plugin {resource}: {error}") from error
        else:
            for rule, text in () if announced is None else checks.options(announced, options):
                self.transcript.violated(rule, resource, text)
            self.manager.connected(resource, client, options)
            self.transcript.note("registered", resource, path.name, options=options)
            task = asyncio.create_task(self._run(resource, client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        finally:
            if self.manager.endpoints.get(resource) is None or self.manager.endpoints[resource].plugin is not client:
                self.clients.pop(resource, None)
                await client.close()

    async def disconnect(self, resource: str) -> None:
        """disconnectClient for whoever serves the resource now, as when its stream has ended."""
        client = self.clients.pop(resource, None)
        if client is not None:
            await client.close()
            self.manager.disconnected(resource)
            self.transcript.note("disconnected", resource, client.path.name)

    async def stop(self) -> None:
        """All connections end; the manager learns of it."""
        for resource in list(self.clients):
            await self.disconnect(resource)
        for client in self._everyone:
            await client.close()
        for task in list(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, resource: str, client: Client) -> None:
        await client.run(self.manager, self.transcript)
        newest = self.clients.get(resource)
        if newest is client:
            await self.disconnect(resource)
        elif newest is not None and (self.disconnect_race or newest.path == client.path):
            self.transcript.note("disconnect race", resource, f"the end of {client.path.name} ends {newest.path.name}")
            await self.disconnect(resource)
        elif newest is not None:
            await client.close()

    def _check_socket(self, resource: str, path: Path) -> None:
        for other, client in self.clients.items():
            if other != resource and client.path == path and client.streaming:
                self.transcript.violated("endpoint-shared", resource, f"{other} is registered on {path.name} as well")
        older = self.clients.get(resource)
        if older is not None and older.streaming:
            text = f"the stream on {older.path.name} was still open when {path.name} was registered"
            self.transcript.violated("registered-over-open-stream", resource, text)
        identity = identity_of(path)
        if identity is not None:
            if self._sockets.get(path, identity) != identity:
                self.transcript.violated("socket-reused", resource, f"{path.name} is another server than before")
            self._sockets[path] = identity


def identity_of(path: Path) -> tuple[int, int] | None:
    """What tells a file from another of its name; None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
