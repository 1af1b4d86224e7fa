"""Whether a seat's server answers: servers that do, that do not, and that mean harm."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.seats.serving import serves

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NO_HTTP = "is no HTTP"


@asynccontextmanager
async def server(serve: Serve, host: str = "127.0.0.1") -> AsyncIterator[str]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    made = await asyncio.start_server(one, host, 0)
    address, port = made.sockets[0].getsockname()[:2]
    try:
        yield f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    finally:
        made.close()


def says(answer: bytes, then: float = 0.0) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(then)

    return serve


@pytest.mark.parametrize("status", [200, 204, 301, 401, 404, 499])
async def test_a_server_that_answers_serves(status: int) -> None:
    asked: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path_qs, request.headers["Host"]))
        return web.Response(status=status)

    application = web.Application()
    application.router.add_get("/{any:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = "{}:{}".format(*runner.addresses[0])
    try:
        assert await serves(address, "/ready?x=1") == ""
        assert asked == [("/ready?x=1", address)]
    finally:
        await runner.cleanup()


async def test_a_server_of_ipv6_is_asked_too() -> None:
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    async with server(says(b"HTTP/1.1 200 OK\r\n\r\n"), "::1") as address:
        assert await serves(address) == ""


async def test_a_server_of_grpc_serves() -> None:
    made = grpc.aio.server()
    port = made.add_insecure_port("127.0.0.1:0")
    await made.start()
    assert await serves(f"127.0.0.1:{port}") == ""
    await made.stop(grace=0)


@pytest.mark.parametrize("status", [500, 502, 503, 599, 999])
async def test_a_server_that_is_not_ready_does_not_serve(status: int) -> None:
    async with server(says(b"HTTP/1.1 %d No\r\n\r\n" % status)) as address:
        assert await serves(address) == f"The server on {address} answers /health with status {status}."


async def test_what_is_only_announced_is_waited_for() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with server(says(early * 3 + b"HTTP/1.1 503 No\r\n\r\n")) as address:
        assert "status 503" in await serves(address)
    async with server(says(early * 3 + b"HTTP/1.0 200\r\n\r\n")) as address:
        assert await serves(address) == ""


async def test_a_server_that_announces_without_end_is_not_waited_for() -> None:
    async def announces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 100)
            await writer.drain()

    async with server(announces) as address:
        assert NO_HTTP in await serves(address, timeout=5)


async def test_nobody_who_listens_is_told() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert await serves(address) == f"The server on {address} does not listen."


async def test_a_connection_that_is_reset_is_told() -> None:
    async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain: socket.socket = writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with server(resets) as address:
        assert "reset" in (await serves(address)).lower()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"HTTP", b"HTTP/1.1", b"HTTP/1.1 \r\n\r\n", b"HTTP/1.1 2000 OK\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n", b"HTTP/2 200 OK\r\n\r\n", b"HTTP/1.1 200 OK", b"SSH-2.0-OpenSSH_9.2\r\n",
        b"220 mail ready\r\n", b"\x00\x00\x00\x04\x01\x00\x00\x00\x00", b"\x00\x00\x07\x04\x00\x00\x00\x00\x00",
        b"\x15\x03\x01\x00\x02\x02\x46\x00\x00", b"HTTP/1.1 200 " + b"a" * 100_000 + b"\r\n", b"\xff" * 100,
        b"HTTP/1.1 103 x\r\n" + b"a" * 100_000, b"HTTP/1.1 200\x00 OK\r\n\r\n",
    ],
    ids=lambda answer: repr(answer[:16]),
)  # fmt: skip
async def test_what_is_no_answer_is_told(answer: bytes) -> None:
    async with server(says(answer)) as address:
        assert NO_HTTP in await serves(address)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 20", b"HTTP/1.1 103 x\r\n"])
async def test_a_server_that_says_nothing_more_is_not_waited_for(answer: bytes) -> None:
    async with server(says(answer, then=60)) as address:
        began = time.monotonic()
        assert await serves(address, timeout=0.2) == f"The server on {address} does not answer /health within 0.2 s."
        assert time.monotonic() - began < 5


async def test_a_server_that_talks_without_end_costs_a_line() -> None:
    sent = 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(b"a" * 65536)
            await writer.drain()
            sent += 65536

    async with server(floods) as address:
        assert NO_HTTP in await serves(address, timeout=30)
    assert sent < 64 * 2**20


async def test_a_server_that_drips_has_the_same_time() -> None:
    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 x\r\n")
        while True:
            writer.write(b"a: b\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with server(drips) as address:
        began = time.monotonic()
        assert "within 0.2 s" in await serves(address, timeout=0.2)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        "10.0.0.1",
        "10.0.0.1:",
        ":80",
        "10.0.0.1:y",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:-1",
        "10.0.0.1:²",
        "a-name:80",
        "[::1:80",
    ],
)
async def test_an_address_that_is_none_is_told(address: str) -> None:
    assert "is no address of a server" in await serves(address)


@pytest.mark.parametrize("path", ["", "health", "/a b", "/a\r\nX: y", "/ä", "/\x00"])
async def test_a_path_that_is_none_is_told(path: str) -> None:
    assert "is no path" in await serves("127.0.0.1:1", path)


@given(answer=st.binary(max_size=60) | st.binary(max_size=30).map(lambda rest: b"HTTP/1.1 " + rest))
@settings(max_examples=100, deadline=None)
def test_any_bytes_get_a_sentence_or_a_status(answer: bytes) -> None:
    async def run() -> str:
        async with server(says(answer)) as address:
            return await serves(address, timeout=5)

    told = asyncio.run(run())
    assert told == "" or told.startswith(("The server on", "What the server on"))
