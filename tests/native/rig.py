"""A proxy process, servers that do exactly what a test says, and clients that see every byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_words import ProxyAway, Route, State, Traffic
from stack.ports import choose

_T = TypeVar("_T")
PATIENCE = 20.0
"""Seconds within which what a test waits for happens, on any machine."""


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, patience: float = PATIENCE) -> None:
    """Waits for a condition. Fails with what was waited for."""
    deadline = time.monotonic() + patience
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < deadline, f"{what}: not within {patience} s"
        await asyncio.sleep(0.005)


def free_port() -> int:
    """A port of loopback that nobody has."""
    return choose(["one"], {})["one"]


class Proxy:
    """The program in a process, and the node's word with it."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.socket = folder / "proxy.sock"
        self.control = ProxyControl(self.socket)
        self.process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self, grace: float = 5.0) -> None:
        """Starts it and waits until it answers."""
        self.process = await asyncio.create_subprocess_exec(
            self.program, "--control", self.socket, "--grace", str(grace), stderr=asyncio.subprocess.PIPE
        )
        await until(self.answers, "the proxy answers")

    async def answers(self) -> bool:
        """Whether it answers."""
        assert self.process is not None and self.process.returncode is None, "the proxy has ended"
        try:
            await self.control.hello()
        except ProxyAway:
            return False
        return True

    async def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        """Ends it. It must have been there until now, and have had no panic."""
        await self.control.close()
        if self.process is None:
            return
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        _, errors = await self.process.communicate()
        assert b"panicked" not in errors, errors.decode()

    def memory(self) -> int:
        """Bytes that are its own."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")

    async def seat(self, server: Server | None = None, **changes: Any) -> Seat:
        """A new seat, open where it has a server."""
        name = f"kyb-G01-s{len(await self.control.state()) + 1}"
        route = Route(
            seat=name,
            epoch=1,
            listen=f"127.0.0.1:{free_port()}",
            backend=server.address if server else None,
            state=State.OPEN if server else State.HELD,
            retry_after=7.2,
            deadline=PATIENCE,
        )
        seat = Seat(self, replace(route, **changes))
        await self.control.set(seat.route)
        return seat


@dataclass
class Seat:
    """A seat as a test sees it."""

    proxy: Proxy
    route: Route

    @property
    def port(self) -> int:
        return int(self.route.listen.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://{self.route.listen}"

    async def set(self, **changes: Any) -> None:
        """Changes its route."""
        self.route = replace(self.route, **changes)
        await self.proxy.control.set(self.route)

    async def traffic(self) -> Traffic:
        """What goes on now."""
        return (await self.proxy.control.state())[self.route.seat].traffic

    async def count(self, name: str) -> int:
        """One of its counters."""
        return (await self.proxy.control.metrics())[self.route.seat].counts[name]

    async def holds(self, count: int) -> None:
        """Waits until so many requests are held."""

        async def held() -> bool:
            return (await self.traffic()).held == count

        await until(held, f"{count} requests are held")

    async def carries(self, count: int) -> None:
        """Waits until so many requests are in flight."""

        async def carried() -> bool:
            return (await self.traffic()).in_flight == count

        await until(carried, f"{count} requests are in flight")


@dataclass
class Request:
    """A request as a server got it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    connection: int = 0

    @property
    def method(self) -> str:
        return self.line.split(" ")[0]

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key.lower() == name]


Handler = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes = b"{}", status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    """A whole response."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


async def read_head(reader: asyncio.StreamReader) -> Request:
    """A request's head. Raises IncompleteReadError where none comes."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines[1:] if line]
    return Request(lines[0], [(name, value.strip()) for name, _, value in pairs])


async def read_body(request: Request, reader: asyncio.StreamReader) -> bytes:
    """A request's body, by length or in chunks."""
    if "chunked" in request.all("transfer-encoding"):
        body = b""
        while size := int(await reader.readuntil(b"\n"), 16):
            body += await reader.readexactly(size)
            await reader.readuntil(b"\n")
        await reader.readuntil(b"\n")
        return body
    return await reader.readexactly(int((request.all("content-length") or ["0"])[0]))


@dataclass
class Server:
    """A server of HTTP/1.1 that answers with what `handler` writes, or with `reply()`. It keeps all that it got."""

    handler: Handler | None = None
    read_bodies: bool = True
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    failure: Exception | None = None
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1024 * 1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listens no more and breaks all connections."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self._writers.add(writer)
        number = self.connections
        try:
            while True:
                request = await read_head(reader)
                request.connection = number
                if self.read_bodies:
                    request.body = await read_body(request, reader)
                self.requests.append(request)
                if self.handler is None:
                    writer.write(reply())
                else:
                    await self.handler(request, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            self.failure = error
        finally:
            self.open -= 1
            self._writers.discard(writer)
            writer.close()


@asynccontextmanager
async def serving(handler: Handler | None = None, read_bodies: bool = True, port: int = 0) -> AsyncIterator[Server]:
    """A server while the block runs; what went wrong in it fails the test."""
    server = Server(handler, read_bodies)
    await server.start(port)
    try:
        yield server
    finally:
        await server.stop()
    if server.failure is not None:
        raise server.failure


@dataclass
class Response:
    """A response as a client got it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key.lower() == name]

    def one(self, name: str) -> str:
        """A header that is there once."""
        (value,) = self.all(name)
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


class Wire:
    """A client's connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Response:
        """Reads a response up to its body."""
        lines = (await self.read(self.reader.readuntil(b"\r\n\r\n"))).decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines[1:] if line]
        return Response(int(lines[0].split(" ")[1]), [(name, value.strip()) for name, _, value in pairs], b"")

    async def response(self, bodiless: bool = False) -> Response:
        """Reads a whole response."""
        found = await self.head()
        if bodiless:
            return found
        if "chunked" in found.all("transfer-encoding"):
            while size := int(await self.read(self.reader.readline()), 16):
                found.body += await self.read(self.reader.readexactly(size))
                await self.read(self.reader.readline())
            await self.read(self.reader.readline())
        elif found.all("content-length"):
            found.body = await self.read(self.reader.readexactly(int(found.one("content-length"))))
        return found

    async def rest(self) -> bytes:
        """What comes until the connection ends."""
        with contextlib.suppress(ConnectionError):
            return await self.read(self.reader.read())
        return b""

    async def read(self, reading: Awaitable[_T]) -> _T:
        return await asyncio.wait_for(reading, PATIENCE)

    async def ask(self, method: str = "GET", target: str = "/v1/x", more: str = "", body: bytes = b"") -> Response:
        """A request and its response."""
        await self.send(request_bytes(method, target, more, body))
        return await self.response(bodiless=method == "HEAD")

    def abort(self) -> None:
        """Breaks it off."""
        self.writer.transport.abort()


def request_bytes(method: str = "GET", target: str = "/v1/x", more: str = "", body: bytes = b"") -> bytes:
    """A whole request."""
    length = f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
    return f"{method} {target} HTTP/1.1\r\nHost: model.example\r\n{length}{more}\r\n".encode("latin-1") + body


@asynccontextmanager
async def connected(seat: Seat | Server) -> AsyncIterator[Wire]:
    """A connection to a seat."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", seat.port))
    try:
        yield wire
    finally:
        wire.abort()


async def ask(seat: Seat, method: str = "GET", target: str = "/v1/x", more: str = "", body: bytes = b"") -> Response:
    """One request on a connection of its own."""
    async with connected(seat) as wire:
        return await wire.ask(method, target, more, body)
