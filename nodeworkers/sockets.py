"""gRPC servers on unix sockets, as the kubelet wants them: of a service, each method that an object has is served, and
the others answer that they are not implemented.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

Service = tuple[ServiceDescriptor, object]
"""A service of a .proto file, and the object whose coroutines of the methods' names serve it."""

_PATH_LIMIT = 107  # bytes of a socket's name (unix(7))
_MESSAGE_LIMIT = 4 * 1024 * 1024
_WATCH_SECONDS = 5.0
_log = logging.getLogger(__name__)


class SocketError(Exception):
    """A socket cannot be served. The text says why."""


class Sockets:
    """Servers that come back when somebody removes their socket, as a kubelet's reset or an old process's end does."""

    def __init__(self, served: Sequence[tuple[Path, Sequence[Service]]]) -> None:
        """`served` in the order of starting: what others announce comes before what announces it."""
        self._served = served
        self._servers: dict[Path, tuple[grpc.aio.Server, tuple[int, int, int]]] = {}

    async def start(self) -> None:
        """Serves all of them. Raises SocketError."""
        for path, services in self._served:
            await self._serve(path, services)

    async def watch(self) -> None:
        """Looks after the sockets until cancelled."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            await self.mend()

    async def mend(self) -> None:
        """Serves anew where the socket is not ours any more."""
        for path, services in self._served:
            server, ours = self._servers[path]
            if identity(path) == ours:
                continue
            _log.warning("The socket %s was taken away: it is served anew.", path)
            try:
                await server.stop(grace=0)
                await self._serve(path, services)
            except (SocketError, OSError) as error:
                _log.warning("%s", error)

    async def stop(self) -> None:
        """Ends all of them, the last first, and waits for calls that are being answered."""
        for path, _ in reversed(self._served):
            if path in self._servers:
                server, _ = self._servers.pop(path)
                await server.stop(grace=10)

    async def _serve(self, path: Path, services: Sequence[Service]) -> None:
        handlers = [handler(descriptor, servicer) for descriptor, servicer in services]
        self._servers[path] = await serve(path, handlers), identity(path)


async def serve(path: Path, handlers: Sequence[grpc.GenericRpcHandler], limit: int = _MESSAGE_LIMIT) -> grpc.aio.Server:
    """A server on a socket that only root reaches, with requests of at most `limit` bytes. Raises SocketError."""
    _make_room(path)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", limit)])
    server.add_generic_rpc_handlers(handlers)
    starting: asyncio.Future[None] | None = None
    try:
        server.add_insecure_port(f"unix:{path}")
        starting = asyncio.ensure_future(server.start())
        await asyncio.shield(starting)
        os.chmod(path, 0o600)
    except (RuntimeError, OSError) as error:
        await server.stop(grace=0)
        raise SocketError(f"{path} cannot be served: {error}.") from error
    except asyncio.CancelledError:
        # A server that is left midway can neither be stopped nor forgotten.
        if starting is not None:
            await asyncio.wait([starting])
        await server.stop(grace=0)
        raise
    return server


def _make_room(path: Path) -> None:
    if len(os.fsencode(path)) > _PATH_LIMIT:
        raise SocketError(f"{path} is too long for a socket, which has at most {_PATH_LIMIT} bytes.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        if path.is_socket():
            path.unlink()  # of a process that was killed
    except OSError as error:
        raise SocketError(f"{path} cannot be served: {error.strerror}.") from error


def identity(path: Path) -> tuple[int, int, int]:
    """What tells a socket from another of its name: device, inode, ctime in ns; zeros where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_dev, found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else (0, 0, 0)


def handler(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Serves those methods of a service that the object has."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        served = getattr(servicer, method.name, None)
        if served is not None:
            kind = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            methods[method.name] = kind(
                served,
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(service.full_name, methods)
