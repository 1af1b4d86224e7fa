"""Keeps one resource registered with the kubelet, whatever becomes of either: serves it on a socket of its own, tells
the kubelet, notices when that is lost, and does it again, for ever.

Each attempt has a generation and its socket that generation's name: a server that ends would remove the next one's
socket of the same name (grpc#17122). Three signals tell that a generation is lost, for each of them alone misses some
restarts (NVIDIA/k8s-device-plugin#1228): kubelet.sock is another, our socket is gone, nobody listens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from nodeworkers.device_plugin.plugin import DevicePlugin
from nodeworkers.devices.frontend import Devices
from nodeworkers.rpc import deviceplugin_pb2, pluginregistration_pb2
from nodeworkers.sockets import SocketError, handler, identity, serve

VERSION = "v1beta1"
PLUGINS = Path("/var/lib/kubelet/device-plugins")
REGISTRY = Path("/var/lib/kubelet/plugins_registry")
KUBELET = "kubelet.sock"
PREFIX = "berth-"  # of our sockets
NO_SOCKET = (0, 0, 0)
_REQUEST_LIMIT = 64 * 1024 * 1024  # bytes: the kubelet names every free device when it asks which to prefer
_LOOK_SECONDS = 0.25
_REGISTER_SECONDS = 20.0  # the kubelet takes up to 10 to dial back before it answers
_STREAM_SECONDS = 3.0  # the kubelet opens its stream right after it registered
_SETTLE_SECONDS = 0.25
_WATCHED_SETTLE_SECONDS = 1.5  # a kubelet that watches compares once a second what there is with what it has
_STEADY_SECONDS = 10.0  # a generation that lived so long was well: the pauses begin anew
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0  # with what else it takes, capacity is back 5 s after the kubelet can answer
_GRACE_SECONDS = 5.0  # for calls that are being answered when a server ends
_END_SECONDS = 2.0  # for the server's own end after that
_WATCHED = pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"]
_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class RegistrationError(Exception):
    """The kubelet did not register a resource. The text is a sentence with what it said."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a resource stands with the kubelet.

    `registered_since` (seconds since 1970) and `stream_seconds` (since the kubelet began to listen) are None while that
    is not so. `registrations` counts those that succeeded since the process began. `error` is the last sentence of what
    went wrong, '' once all is well again.
    """

    resource: str
    generation: int
    registrations: int
    registered_since: float | None
    stream_seconds: float | None
    error: str

    @property
    def serving(self) -> bool:
        """The kubelet has registered it and listens."""
        return self.registered_since is not None and self.stream_seconds is not None


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the kubelet looks for plugins: `plugins` has kubelet.sock, with which we register. With `watched` (its
    REGISTRY) it finds our sockets there by itself, and `plugins` is not used.
    """

    plugins: Path = PLUGINS
    watched: Path | None = None

    @property
    def sockets(self) -> Path:
        """Where our own are."""
        return self.watched or self.plugins

    @property
    def kubelet(self) -> tuple[int, int, int]:
        """Which kubelet is there, zeros for none. One that watches is the same to us always: it comes by itself."""
        return (1, 1, 1) if self.watched else identity(self.plugins / KUBELET)


class Announced:
    """pluginregistration.Registration: what a kubelet asks that found the socket by itself, and says in the end."""

    def __init__(self, resource: str, endpoint: Path) -> None:
        self._info = pluginregistration_pb2.PluginInfo(
            type="DevicePlugin", name=resource, endpoint=str(endpoint), supported_versions=[VERSION]
        )
        self.told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: Context
    ) -> pluginregistration_pb2.PluginInfo:
        """What is registered."""
        return self._info

    async def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: Context
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        """How it went; '' in `told` is well."""
        if not self.told.done():
            self.told.set_result("" if request.plugin_registered else request.error[:1024] or "no reason given")
        return pluginregistration_pb2.RegistrationStatusResponse()


@dataclass
class _Generation:
    path: Path
    plugin: DevicePlugin
    server: grpc.aio.Server
    ours: tuple[int, int, int]
    announced: Announced | None
    wrong: str = ""

    @property
    def removed(self) -> bool:
        return identity(self.path) != self.ours

    @property
    def used(self) -> bool:
        """A kubelet has seen it, and may hold something of it: it cannot be registered a second time."""
        return self.plugin.asked or (self.announced is not None and self.announced.told.done())


class Registration:
    """One resource. `plugin` is what the kubelet talks to now."""

    def __init__(self, resource: str, devices: Devices, folders: Folders, life: str, gated: bool = False) -> None:
        """`life` is this process's name in its sockets' names, another for each process."""
        self.resource = resource
        self._devices = devices
        self._folders = folders
        self._gated = gated
        self._name = hashlib.sha256(f"{resource} {life}".encode()).hexdigest()[:12]
        self._number = 0
        self._generation: _Generation | None = None
        self._kubelet = NO_SOCKET
        self._registrations = 0
        self._registered_since: float | None = None
        self._error = ""

    @property
    def plugin(self) -> DevicePlugin | None:
        """What the kubelet has registered now."""
        return self._generation.plugin if self._generation and self._registered_since is not None else None

    @property
    def status(self) -> Status:
        """How it stands now."""
        opened = self.plugin.opened if self.plugin is not None and self.plugin.streams else None
        return Status(
            self.resource,
            self._number,
            self._registrations,
            self._registered_since,
            None if opened is None else time.monotonic() - opened,
            self._error,
        )

    def renew(self, why: str) -> None:
        """Registers anew what is registered now; `why` is a sentence."""
        if self._generation is not None:
            self._generation.wrong = why

    async def run(self) -> None:
        """Until cancelled; then the server is ended, and its socket gone."""
        failures = 0
        try:
            while True:
                while self._folders.kubelet == NO_SOCKET:  # for hours, maybe: this look is all that it costs
                    await asyncio.sleep(_LOOK_SECONDS)
                began = time.monotonic()
                self._tell(await self._attempt())
                failures = 0 if time.monotonic() - began > _STEADY_SECONDS else failures + 1
                if await self._pause(failures):
                    failures = 0
        finally:
            await self._end()

    async def _pause(self, failures: int) -> bool:
        """Waits the longer the more often it failed, but never while the kubelet is another one: whether it is."""
        longest = min(_FIRST_PAUSE * 2 ** min(failures - 1, 10), _LONGEST_PAUSE) if failures else 0.0
        until = time.monotonic() + longest * random.uniform(0.5, 1)
        while self._folders.kubelet == self._kubelet and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK_SECONDS))
        return self._folders.kubelet != self._kubelet

    def _tell(self, why: str) -> None:
        if why != self._error:  # once for each streak
            _log.warning("%s", why)
        self._error = why

    async def _attempt(self) -> str:
        """Registers once, and watches over it: the sentence why that ended."""
        try:
            # Which kubelet it is comes before whether our socket is there: a kubelet removes sockets first, and then
            # makes its own, so that this one removes ours no more.
            self._kubelet = self._folders.kubelet
            generation = self._generation
            if generation is None or generation.used or generation.removed:
                await self._end()
                generation = await self._serve()
            await self._register(generation)
            return await self._lost(generation)
        except (RegistrationError, SocketError) as error:
            return str(error)
        except Exception as error:
            _log.exception("Registering %s.", self.resource)
            return f"{self.resource} cannot be registered, by an error of berth's: {error!r}. It is tried again."
        finally:
            self._registered_since = None

    async def _serve(self) -> _Generation:
        self._number += 1
        path = self._folders.sockets / f"{PREFIX}{self._name}-{self._number}.sock"
        plugin = DevicePlugin(self.resource, self._devices, self._gated)
        plugin.snapshot()  # before the kubelet waits for it
        announced = Announced(self.resource, path) if self._folders.watched else None
        services = [plugin.service()]
        if announced is not None:
            services.append(handler(_WATCHED, announced))
        server = await serve(path, services, _REQUEST_LIMIT)
        self._generation = _Generation(path, plugin, server, identity(path), announced)
        return self._generation

    async def _end(self) -> None:
        """First the streams and the server end, then comes the next one: the kubelet takes the end of an old stream for
        the end of whatever is registered by then (kubernetes#121994; so does 1.36.3).
        """
        generation, self._generation = self._generation, None
        if generation is None:
            return
        heard = generation.plugin.streams > 0
        generation.plugin.close()
        try:
            async with asyncio.timeout(_GRACE_SECONDS + _END_SECONDS):
                await generation.server.stop(grace=_GRACE_SECONDS)
        except TimeoutError:
            # gRPC sets no limit of its own for the end of calls that it has cancelled; capacity waits for the next one.
            _log.warning("The server of %s on %s does not end: it is left.", self.resource, generation.path.name)
        generation.path.unlink(missing_ok=True)
        if heard:
            # Nothing tells when the kubelet has seen it. Where this is too short the kubelet ends the new stream too,
            # and that is noticed.
            await asyncio.sleep(_WATCHED_SETTLE_SECONDS if self._folders.watched else _SETTLE_SECONDS)

    async def _register(self, generation: _Generation) -> None:
        """Returns when the kubelet has registered it. Raises RegistrationError."""
        told = generation.announced.told if generation.announced else asyncio.ensure_future(self._call(generation))
        try:
            while not (await asyncio.wait([told], timeout=_LOOK_SECONDS))[0]:
                if generation.removed:  # the kubelet would try for 10 s to reach it
                    raise RegistrationError(f"The socket {generation.path} of {self.resource} was removed.")
        finally:
            told.cancel()
        if refusal := told.result():
            raise RegistrationError(f"The kubelet did not register {self.resource}: {refusal}. It is tried again.")
        self._registrations += 1
        self._registered_since = time.time()
        self._error = ""
        _log.info("The kubelet has registered %s on %s.", self.resource, generation.path.name)

    async def _call(self, generation: _Generation) -> str:
        """What the kubelet has against it, '' if nothing."""
        request = deviceplugin_pb2.RegisterRequest(
            version=VERSION,
            endpoint=generation.path.name,
            resource_name=self.resource,
            options=generation.plugin.options(),
        )
        # A channel for each attempt: one that is kept has pauses of its own, of up to two minutes.
        options = [("grpc.use_local_subchannel_pool", 1)]
        socket = self._folders.plugins / KUBELET
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
            call = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=deviceplugin_pb2.RegisterRequest.SerializeToString,
                response_deserializer=deviceplugin_pb2.Empty.FromString,
            )
            try:
                await call(request, timeout=_REGISTER_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    return f"nobody answers on {socket}"
                return f"{(error.details() or 'no reason given').rstrip('.')[:500]} ({error.code().name})"
        return ""

    async def _lost(self, generation: _Generation) -> str:
        """Watches over it until it is lost: the sentence how."""
        until = time.monotonic() + _STREAM_SECONDS
        while True:
            if self._folders.kubelet != self._kubelet:
                return f"The kubelet was restarted: {self.resource} is registered anew."
            if generation.removed:
                return f"The socket {generation.path.name} was removed: {self.resource} is registered anew."
            if generation.wrong:
                return generation.wrong
            if not generation.plugin.streams:
                if generation.plugin.opened is not None:
                    return f"The kubelet stopped listening to {self.resource}, which is registered anew."
                if time.monotonic() > until:
                    return (
                        f"The kubelet registered {self.resource} and does not listen to it after "
                        f"{_STREAM_SECONDS:.0f} s: it is registered anew."
                    )
            await asyncio.sleep(_LOOK_SECONDS)
