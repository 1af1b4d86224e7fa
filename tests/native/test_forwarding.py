"""What goes through an open seat of the proxy, byte by byte: nothing is gathered, nothing is added but who asked."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os

import aiohttp
import pytest
from aiohttp import web

from tests.native.rig import PATIENCE, Proxy, Request, ask, connected, free_port, reply, request_bytes, serving, until

MEGABYTE = 1024 * 1024


async def test_a_request_arrives_as_it_was_but_for_what_concerns_one_hop(proxy: Proxy) -> None:
    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            reply(
                b'{"a":1}',
                "201 Created",
                more="Keep-Alive: timeout=5\r\nConnection: x-hop\r\nX-Hop: 1\r\nX-Kept: 2\r\n",
            )
        )

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        more = (
            "Connection: keep-alive, X-Private\r\nX-Private: 1\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\nTE: gzip\r\n"
            "Proxy-Authorization: x\r\nX-Forwarded-For: 10.1.2.3\r\nX-Forwarded-For: 10.4.5.6\r\nAuthorization: b\r\n"
        )
        got = await ask(seat, "POST", "/v1/Completions%20?q=%2F..#no", more, b'{"x": 1}')
        (sent,) = server.requests
    assert (got.status, got.body) == (201, b'{"a":1}')
    assert got.one("x-kept") == "2" and not got.all("x-hop") and not got.all("keep-alive")
    assert (sent.line, sent.body) == ("POST /v1/Completions%20?q=%2F.. HTTP/1.1", b'{"x": 1}')
    assert sent.all("host") == ["model.example"] and sent.all("content-length") == ["8"]
    assert sent.all("authorization") == ["b"]
    assert sent.all("x-forwarded-for") == ["10.1.2.3, 10.4.5.6, 127.0.0.1"]
    for name in ("x-private", "keep-alive", "proxy-connection", "proxy-authorization", "te", "connection"):
        assert not sent.all(name), name


async def test_an_absolute_target_names_the_host(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        assert (await ask(seat, target="http://other.example/a?b")).status == 200
        assert (await ask(seat, "OPTIONS", "*")).status == 200
    assert [each.target for each in server.requests] == ["/a?b", "*"]
    assert server.requests[0].all("host") == ["other.example"]


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_responses_without_a_body_leave_the_connection_usable(proxy: Proxy, status: str) -> None:
    async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.method == "HEAD":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4711\r\n\r\n")
        else:
            writer.write(f"HTTP/1.1 {status}\r\nETag: x\r\n\r\n".encode())

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            assert (await wire.ask("HEAD")).one("content-length") == "4711"
            for _ in range(3):
                assert f"{(await wire.ask()).status}" == status.split()[0]
        await until(lambda: server.connections <= 2, "connections are used again")


async def test_http_1_0_and_chunked_bodies(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            await wire.send(b"GET /old HTTP/1.0\r\n\r\n")
            assert (await wire.response()).status == 200
            assert await wire.rest() == b""
        async with connected(seat) as wire:
            await wire.send(b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await wire.send(b"2;ext=1\r\nde\r\n0\r\n\r\n")
            assert (await wire.response()).status == 200
    assert server.requests[1].body == b"abcde" and not server.requests[1].all("content-length")


async def test_events_go_on_as_they_come(proxy: Proxy) -> None:
    more = asyncio.Event()

    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(3):
            data = f"data: {number}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            await asyncio.wait_for(more.wait(), PATIENCE)
            more.clear()
        writer.write(b"0\r\n\r\n")

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        async with aiohttp.ClientSession() as session, session.post(f"{seat.url}/v1/chat/completions") as response:
            for number in range(3):
                # The server says nothing more until this one has come.
                assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), PATIENCE) == b"data: %d\n\n" % number
                more.set()
            assert await response.content.read() == b""


async def test_large_bodies_come_whole_in_both_directions(proxy: Proxy) -> None:
    data = os.urandom(24 * MEGABYTE)

    async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(request.body))

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        before = proxy.memory()
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{seat.url}/echo", data=io.BytesIO(data)) as response,
        ):
            echoed = hashlib.sha256(await response.read())
        grown = proxy.memory() - before
    assert echoed.digest() == hashlib.sha256(data).digest()
    assert grown < 8 * MEGABYTE, f"the proxy grew by {grown} bytes"


async def test_who_reads_slowly_slows_the_other_down(proxy: Proxy) -> None:
    """Neither direction piles up in the proxy: the sender stops once the kernel's buffers are full."""
    written = 0
    release = asyncio.Event()

    async def handler(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        if request.method == "POST":
            await asyncio.wait_for(release.wait(), PATIENCE)
            await reader.readexactly(64 * MEGABYTE)
            writer.write(reply())
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * MEGABYTE))
        for _ in range(64):
            writer.write(bytes(MEGABYTE))
            await writer.drain()
            written += 1

    async def stalls(counter: list[int]) -> None:
        last = (-1, 0)

        def same() -> bool:
            nonlocal last
            last = (counter[0], last[1] + 1) if counter[0] == last[0] else (counter[0], 0)
            return last[1] > 100 and counter[0] > 0

        await until(same, "the sender is stopped")

    async with serving(handler, read_bodies=False) as server:
        seat = await proxy.seat(server)
        before = proxy.memory()
        async with connected(seat) as wire:
            head = b"POST /up HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (64 * MEGABYTE)
            await wire.send(head)
            sent = [0]

            async def push() -> None:
                for _ in range(64):
                    await wire.send(bytes(MEGABYTE))
                    sent[0] += 1

            pushing = asyncio.create_task(push())
            await stalls(sent)
            assert sent[0] < 48 and proxy.memory() - before < 8 * MEGABYTE
            release.set()
            await pushing
            assert (await wire.response()).status == 200
        async with connected(seat) as wire:
            await wire.send(request_bytes())
            await wire.head()
            await until(lambda: written > 0, "the server writes")
            last = -1
            while last != written:
                last = written
                await asyncio.sleep(0.3)
            assert written < 48 and proxy.memory() - before < 8 * MEGABYTE


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_is_seen_by_the_server_at_once(proxy: Proxy, begun: bool) -> None:
    gone = asyncio.Event()

    async def handler(_: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if begun:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
            await writer.drain()
        assert await reader.read(1) == b""
        gone.set()

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            await wire.send(request_bytes("POST", body=b"{}"))
            await seat.carries(1)
            if begun:
                await wire.head()
        await asyncio.wait_for(gone.wait(), PATIENCE)
        await seat.carries(0)


async def test_a_server_that_wants_no_body_is_not_sent_one(proxy: Proxy) -> None:
    async def handler(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target == "/small":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            writer.write(reply(await reader.readexactly(4)))
        else:
            writer.write(reply(b"{}", "413 Content Too Large", more="Connection: close\r\n"))
            await writer.drain()
            assert await reader.read() == b""

    async with serving(handler, read_bodies=False) as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            await wire.send(b"POST /small HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
            assert (await wire.head()).status == 100
            await wire.send(b"body")
            assert (await wire.response()).body == b"body"
        async with connected(seat) as wire:
            await wire.send(b"POST /large HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9999\r\n\r\n")
            assert (await wire.head()).status == 413, "the client was asked for a body that nobody wants"


async def test_a_server_that_breaks_off_is_told_apart_from_one_that_ended(proxy: Proxy) -> None:
    async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target == "/midway":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            await writer.drain()
        writer.transport.abort()

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        got = await ask(seat, "POST", body=b"{}")
        assert (got.status, got.error["code"]) == (502, "server_broke_off") and not got.all("retry-after")
        async with connected(seat) as wire:
            await wire.send(request_bytes(target="/midway"))
            assert (await wire.head()).status == 200
            assert b"0\r\n\r\n" not in await wire.rest()
        assert len(server.requests) == 2, "something was sent twice"
    got = await ask(seat, "POST", body=b"{}")
    assert (got.status, got.error["code"], got.one("retry-after")) == (503, "server_unreachable", "8")
    traffic = await seat.traffic()
    assert (traffic.failed, traffic.in_flight) == (2, 0)


async def test_connections_are_used_again(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            for _ in range(50):
                assert (await wire.ask()).status == 200
    assert server.connections < 10 and len(server.requests) == 50


async def test_a_server_may_close_connections_without_a_word(proxy: Proxy) -> None:
    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply())
        await writer.drain()
        writer.close()

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            for _ in range(50):
                assert (await wire.ask()).status == 200
                await until(lambda: server.open == 0, "the server has closed")
    assert len(server.requests) == 50


async def test_websockets_go_through_and_count_until_they_end(proxy: Proxy) -> None:
    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("chat",))
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data)
        return socket

    application = web.Application()
    application.router.add_get("/v1/realtime", echo)
    runner = web.AppRunner(application)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        seat = await proxy.seat()
        await seat.set(backend=f"127.0.0.1:{port}", state="open")
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(f"{seat.url}/v1/realtime", protocols=("chat",)) as socket:
                assert socket.protocol == "chat"
                for size in (0, 5, 200_000):
                    data = os.urandom(size)
                    await socket.send_bytes(data)
                    assert (await socket.receive(timeout=PATIENCE)).data == data
                assert (await seat.traffic()).in_flight == 1
                assert await seat.count("upgraded") == 1
            await seat.carries(0)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("protocol", ["h2c", "H2C, websocket", "HTTP/2.0"])
async def test_no_upgrade_hides_what_a_client_asks_for(proxy: Proxy, protocol: str) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        more = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAMAAABk\r\n"
        assert (await ask(seat, more=more)).status == 200
    (sent,) = server.requests
    assert not sent.all("upgrade") and not sent.all("http2-settings") and not sent.all("connection")


async def test_a_server_that_upgrades_unasked_is_not_believed(proxy: Proxy) -> None:
    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        assert (await ask(seat)).status == 502


async def test_connect_is_no_way_through(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        got = await ask(seat, "CONNECT", "internal.example:22")
        assert got.status == 405 and json.loads(got.body)["error"]["type"] == "invalid_request_error"
    assert not server.requests
