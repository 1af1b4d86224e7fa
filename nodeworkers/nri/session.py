"""One connection of an NRI plugin to containerd, from its registration to its end, for `plugin.py`: answers every
request on it, whatever it holds, and lets no container's trouble reach another.

Sources: github.com/containerd/nri v0.12.0, pkg/api/api.proto, pkg/stub/stub.go (a plugin's side) and
pkg/adaptation/plugin.go (containerd's); github.com/containerd/ttrpc v1.2.8, PROTOCOL.md. NRI uses unary calls only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from nodeworkers.nri import wire
from nodeworkers.nri.values import (
    Adjustment,
    Container,
    Happening,
    Pod,
    Refused,
    Removed,
    Started,
    Stopped,
    container_of,
    pod_of,
    synchronized,
)
from nodeworkers.rpc import nri_pb2 as nri
from nodeworkers.rpc import ttrpc_pb2 as ttrpc

PLUGIN_SERVICE, RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Plugin", "nri.pkg.api.v1alpha1.Runtime"
# Codes of google.rpc.Code.
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL = 3, 8, 9, 12, 13

_EVENTS = (nri.CREATE_CONTAINER, nri.START_CONTAINER, nri.STOP_CONTAINER, nri.REMOVE_CONTAINER)
_MASK = sum(1 << (event - 1) for event in _EVENTS)  # event.go's Set
_REGISTRATION_SECONDS = 30.0  # containerd takes plugins one after the other, and waits 5 s for one that says nothing
_READ = 1 << 16
_MOST_WAITING = 1000  # requests under way: containerd has a few
_MOST_SYNCHRONIZED = 100_000  # pods and containers
_log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=Message)


class SessionError(Exception):
    """A connection that cannot go on. The text is a sentence."""


class _Answer(Exception):
    """An error as the answer to one request."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Runtime:
    """Who is at the other end. `request_seconds` is how long it waits for an answer."""

    name: str
    version: str
    request_seconds: float


class Session:
    """Serves one connection. `decide` answers CreateContainer, by an adjustment or by raising Refused; None leaves the
    container as it is. `observe` must return at once. `ready` is told when no container is created without `decide` any
    more.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decide: Callable[[Pod, Container], Awaitable[Adjustment | None]],
        observe: Callable[[Happening], None],
        ready: Callable[[Runtime], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._decide, self._observe, self._ready = decide, observe, ready
        self._runtime = Runtime("", "", 2.0)  # pkg/api/timeouts.go
        self._registered = False
        self._refused = ""  # why the registration failed
        self._answering: set[asyncio.Task[None]] = set()
        self._pods: list[nri.PodSandbox] = []
        self._containers: list[nri.Container] = []

    async def run(self, name: str, index: str) -> None:
        """Registers, and serves until the connection ends. Raises SessionError when it ends, and OSError."""
        request = nri.RegisterPluginRequest(plugin_name=name, plugin_idx=index)
        call = ttrpc.Request(service=RUNTIME_SERVICE, method="RegisterPlugin", payload=request.SerializeToString())
        self._send(wire.RUNTIME, wire.Frame(1, wire.REQUEST, 0, call.SerializeToString()))
        late = asyncio.get_running_loop().call_later(_REGISTRATION_SECONDS, self._give_up)
        try:
            await self._read()
            raise SessionError(self._refused or "containerd closed the connection")
        except wire.ProtocolError as error:
            raise SessionError(f"What answers is no NRI: it {error}") from error
        finally:
            late.cancel()
            for task in self._answering:
                task.cancel()
            self._writer.close()

    def _give_up(self) -> None:
        if not self._registered:
            self._refused = f"containerd did not answer the registration in {_REGISTRATION_SECONDS:.0f} s"
            self._writer.transport.abort()

    async def _read(self) -> None:
        unpacker = wire.Unpacker()
        while not self._refused and (data := await self._reader.read(_READ)):
            for connection, frame in unpacker.feed(data):
                if connection == wire.RUNTIME:
                    self._take_response(frame)
                elif frame.kind == wire.REQUEST:
                    self._take_request(frame)
            await self._writer.drain()  # whoever does not read its answers is not asked for more

    def _take_response(self, frame: wire.Frame) -> None:
        if frame.kind != wire.RESPONSE or frame.stream != 1 or self._registered:
            return
        try:
            response = ttrpc.Response.FromString(frame.data or b"")
        except DecodeError:
            self._refused = "containerd's answer to the registration cannot be read"
            return
        if response.status.code:
            self._refused = f"containerd refused the registration: {response.status.message:.300}"
        else:
            self._registered = True

    def _take_request(self, frame: wire.Frame) -> None:
        if len(self._answering) >= _MOST_WAITING:
            self._reply(frame.stream, error=_Answer(RESOURCE_EXHAUSTED, "too many requests are under way"))
            return
        task = asyncio.get_running_loop().create_task(self._answer(frame))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, frame: wire.Frame) -> None:
        try:
            if frame.data is None:
                raise _Answer(RESOURCE_EXHAUSTED, f"a request is larger than {wire.MOST_DATA} bytes")
            if frame.flags & wire.REMOTE_OPEN:
                raise _Answer(UNIMPLEMENTED, "streams are not served here")
            request = _parsed(ttrpc.Request, frame.data)
            if request.service != PLUGIN_SERVICE:
                raise _Answer(UNIMPLEMENTED, f"service {request.service!r:.100} is not served here")
            self._reply(frame.stream, await self._call(request.method, request.payload))
        except _Answer as error:
            self._reply(frame.stream, error=error)
        except Exception as error:
            _log.exception("A request of containerd's could not be answered.")
            self._reply(frame.stream, error=_Answer(INTERNAL, f"berth failed: {error!r:.200}"))

    async def _call(self, method: str, payload: bytes) -> Message:
        match method:
            case "Configure":
                return self._configure(_parsed(nri.ConfigureRequest, payload))
            case "Synchronize":
                return self._synchronize(_parsed(nri.SynchronizeRequest, payload))
            case "CreateContainer":
                return await self._create(_parsed(nri.CreateContainerRequest, payload))
            case "StartContainer":
                self._tell(Started, _parsed(nri.StartContainerRequest, payload))
                return nri.StartContainerResponse()
            case "StopContainer":
                self._tell(Stopped, _parsed(nri.StopContainerRequest, payload))
                return nri.StopContainerResponse()
            case "RemoveContainer":
                self._tell(Removed, _parsed(nri.RemoveContainerRequest, payload))
                return nri.RemoveContainerResponse()
            case "StateChange":  # instead of the two before until NRI 0.11
                change = _parsed(nri.StateChangeEvent, payload)
                if change.event == nri.START_CONTAINER:
                    self._tell(Started, change)
                elif change.event == nri.REMOVE_CONTAINER:
                    self._tell(Removed, change)
                return nri.Empty()
            case "Shutdown":
                return nri.Empty()
        raise _Answer(UNIMPLEMENTED, f"method {method!r:.100} is not served here")

    def _configure(self, request: nri.ConfigureRequest) -> nri.ConfigureResponse:
        seconds = request.request_timeout / 1000 if request.request_timeout > 0 else 2.0
        self._runtime = Runtime(request.runtime_name[:100], request.runtime_version[:100], seconds)
        return nri.ConfigureResponse(events=_MASK)

    def _synchronize(self, request: nri.SynchronizeRequest) -> nri.SynchronizeResponse:
        self._pods += request.pods
        self._containers += request.containers
        if len(self._pods) + len(self._containers) > _MOST_SYNCHRONIZED:
            self._pods, self._containers = [], []
            raise _Answer(RESOURCE_EXHAUSTED, f"more than {_MOST_SYNCHRONIZED} pods and containers")
        if not request.more:
            self._observe(synchronized(self._pods, self._containers))
            self._pods, self._containers = [], []
            self._ready(self._runtime)
        return nri.SynchronizeResponse(more=request.more)

    async def _create(self, request: nri.CreateContainerRequest) -> nri.CreateContainerResponse:
        try:
            adjustment = await self._decide(pod_of(request.pod), container_of(request.container))
        except Refused as refused:
            raise _Answer(FAILED_PRECONDITION, str(refused)) from refused
        return nri.CreateContainerResponse(adjust=adjustment.message() if adjustment is not None else None)

    def _tell(
        self,
        kind: type[Started | Stopped | Removed],
        request: nri.StartContainerRequest
        | nri.StopContainerRequest
        | nri.RemoveContainerRequest
        | nri.StateChangeEvent,
    ) -> None:
        self._observe(kind(pod_of(request.pod), container_of(request.container)))

    def _reply(self, stream: int, message: Message | None = None, error: _Answer | None = None) -> None:
        response = ttrpc.Response(payload=b"" if message is None else message.SerializeToString())
        if error is not None:
            response.status.code, response.status.message = error.code, str(error)
        data = response.SerializeToString()
        if len(data) > wire.MOST_DATA:
            self._reply(stream, error=_Answer(RESOURCE_EXHAUSTED, "berth's answer is larger than NRI takes"))
            return
        self._send(wire.PLUGIN, wire.Frame(stream, wire.RESPONSE, 0, data))

    def _send(self, connection: int, frame: wire.Frame) -> None:
        self._writer.write(wire.packed(connection, frame))


def _parsed(kind: type[_M], data: bytes) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise _Answer(INVALID_ARGUMENT, f"what was sent is no {kind.DESCRIPTOR.name}") from error
