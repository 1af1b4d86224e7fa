"""A simulated containerd, as far as an NRI plugin sees it: it listens, takes the registration, and asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from nodeworkers.nri import wire
from nodeworkers.nri.session import PLUGIN_SERVICE
from nodeworkers.rpc import nri_pb2 as nri
from nodeworkers.rpc import ttrpc_pb2 as ttrpc

_M = TypeVar("_M", bound=Message)
DEADLINE = 15.0


class CallError(Exception):
    """An answer with a status."""

    def __init__(self, status: ttrpc.Status) -> None:
        super().__init__(status.message)
        self.code = status.code


class Connection:
    """A plugin that connected."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accepts: ttrpc.Status) -> None:
        self.reader, self.writer, self.accepts = reader, writer, accepts
        self.registered: asyncio.Future[nri.RegisterPluginRequest] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, asyncio.Future[ttrpc.Response]] = {}
        self._stream = 1

    async def serve(self) -> None:
        unpacker = wire.Unpacker()
        while data := await self.reader.read(1 << 16):
            for connection, frame in unpacker.feed(data):
                if connection == wire.RUNTIME:
                    request = ttrpc.Request.FromString(frame.data or b"")
                    assert request.method == "RegisterPlugin" and frame.stream % 2 == 1
                    answer = ttrpc.Response(status=self.accepts).SerializeToString()
                    self.send(wire.RUNTIME, wire.Frame(frame.stream, wire.RESPONSE, 0, answer))
                    self.registered.set_result(nri.RegisterPluginRequest.FromString(request.payload))
                elif (waiting := self._answers.pop(frame.stream, None)) is not None and not waiting.done():
                    waiting.set_result(ttrpc.Response.FromString(frame.data or b""))
        for waiting in self._answers.values():
            waiting.cancel()

    def send(self, connection: int, frame: wire.Frame) -> None:
        self.writer.write(wire.packed(connection, frame))

    async def raw(self, data: bytes, flags: int = 0) -> ttrpc.Response:
        """What is answered to a request frame that holds `data`."""
        stream, self._stream = self._stream, self._stream + 2
        waiting: asyncio.Future[ttrpc.Response] = asyncio.get_running_loop().create_future()
        self._answers[stream] = waiting
        self.send(wire.PLUGIN, wire.Frame(stream, wire.REQUEST, flags, data))
        async with asyncio.timeout(DEADLINE):
            return await waiting

    async def call(self, method: str, request: Message, answer: type[_M], service: str = PLUGIN_SERVICE) -> _M:
        asked = ttrpc.Request(service=service, method=method, payload=request.SerializeToString())
        response = await self.raw(asked.SerializeToString())
        if response.status.code:
            raise CallError(response.status)
        return answer.FromString(response.payload)

    async def begin(self, *containers: nri.Container, pods: tuple[nri.PodSandbox, ...] = ()) -> nri.ConfigureResponse:
        """What containerd does with a plugin first."""
        await asyncio.wait_for(asyncio.shield(self.registered), DEADLINE)
        configured = await self.call(
            "Configure",
            nri.ConfigureRequest(runtime_name="containerd", runtime_version="v2.3.7", request_timeout=2000),
            nri.ConfigureResponse,
        )
        await self.call(
            "Synchronize", nri.SynchronizeRequest(pods=pods, containers=containers), nri.SynchronizeResponse
        )
        return configured

    async def create(self, container: nri.Container, pod: nri.PodSandbox | None = None) -> nri.ContainerAdjustment:
        request = nri.CreateContainerRequest(pod=pod or POD, container=container)
        return (await self.call("CreateContainer", request, nri.CreateContainerResponse)).adjust


class SimulatedRuntime:
    """Its socket, and the plugins that came, in their order."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.accepts = ttrpc.Status()  # of registrations
        self._came: asyncio.Queue[Connection] = asyncio.Queue()
        self._connections: list[Connection] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self.socket)

    async def stop(self) -> None:
        """As one that was killed: the socket stays."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.writer.close()
        self._connections.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, self.accepts)
        self._connections.append(connection)
        self._came.put_nowait(connection)
        with suppress(OSError):
            await connection.serve()
        writer.close()

    async def plugin(self) -> Connection:
        """The next that connects."""
        return await asyncio.wait_for(self._came.get(), DEADLINE)


@asynccontextmanager
async def simulated_runtime(folder: Path) -> AsyncIterator[SimulatedRuntime]:
    runtime = SimulatedRuntime(folder / "nri.sock")
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.stop()


POD = nri.PodSandbox(
    id="sandbox-1", uid="uid-1", namespace="team-a", name="llama", ips=["10.0.0.7"],
    labels={"app": "llama"}, annotations={"kyb.ai/port": "80"},
)  # fmt: skip


def container(seat: str = "kyb-G01-s1", name: str = "server", number: int = 1) -> nri.Container:
    return nri.Container(
        id=f"container-{number}", pod_sandbox_id="sandbox-1", name=name, args=["vllm", "serve"], pid=4000 + number,
        env=["PATH=/bin", *([f"KYB_GPU_SEAT={seat}"] if seat else [])], state=nri.CONTAINER_RUNNING,
        linux=nri.LinuxContainer(cgroups_path="/pods/1"),
    )  # fmt: skip
