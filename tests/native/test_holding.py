"""Requests for a parked seat: kept in order within bounds, let in when it opens, refused with the truth otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from nodeworkers.seats.proxy_words import Answer, News, Overruled, Quiet, State, models
from tests.native.rig import (
    PATIENCE,
    Proxy,
    Request,
    Response,
    Seat,
    ask,
    connected,
    reply,
    request_bytes,
    serving,
    until,
)


def asks(seat: Seat, count: int = 1) -> list[asyncio.Task[Response]]:
    """Requests /0, /1, … on connections of their own."""
    return [asyncio.create_task(ask(seat, "POST", f"/{number}", body=b"{}")) for number in range(count)]


async def answers(tasks: list[asyncio.Task[Response]]) -> list[Response]:
    return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)


async def test_held_requests_are_let_in_together_when_the_seat_opens(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(backend=server.address)
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(ask(seat, "POST", f"/{number}", body=b"%d" % number)))
            await seat.holds(number + 1)
        assert not server.requests
        traffic = await seat.traffic()
        assert traffic.oldest is not None and 0 < traffic.oldest < PATIENCE and traffic.in_flight == 0
        await seat.set(state=State.OPEN, epoch=2)
        assert [each.status for each in await answers(tasks)] == [200] * 5
        assert sorted((each.target, each.body) for each in server.requests) == [(f"/{n}", b"%d" % n) for n in range(5)]
    metrics = (await proxy.control.metrics())[seat.route.seat]
    assert (metrics.counts["held"], metrics.counts["released"], metrics.counts["forwarded"]) == (5, 5, 5)
    assert sum(metrics.held_seconds.buckets) == 5 and metrics.held_seconds.sum > 0
    traffic = await seat.traffic()
    assert (traffic.held, traffic.oldest, traffic.in_flight) == (0, None, 0) and traffic.ended is not None


async def test_the_node_is_told_at_once_that_a_seat_is_wanted(proxy: Proxy) -> None:
    """Also where it asked to be told once a minute."""
    seat = await proxy.seat()
    news: list[News] = []

    async def watch() -> None:
        async for each in proxy.control.watch(60):
            news.append(each)  # noqa: PERF401 - they are looked at while they come

    watching = asyncio.create_task(watch())
    await until(lambda: bool(news), "the first event")
    (task,) = asks(seat)
    await until(lambda: len(news) == 2, "the event of the first held request", 5)
    assert (news[1].traffic[0].held, news[1].traffic[0].seat) == (1, seat.route.seat)
    tasks = asks(seat, 3)
    await seat.holds(4)
    assert len(news) == 2, "the others were not gathered"
    await proxy.control.remove(seat.route.seat, 1)
    assert {each.error["code"] for each in await answers([task, *tasks])} == {"seat_removed"}
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_the_queue_is_bounded(proxy: Proxy) -> None:
    seat = await proxy.seat(queue=2, retry_after=0.2)
    tasks = asks(seat, 2)
    await seat.holds(2)
    got = await ask(seat, "POST", body=b"{}")
    assert (got.status, got.error["code"], got.one("retry-after")) == (503, "seat_queue_full", "1")
    assert got.error["type"] == "server_error" and "2 requests wait" in got.error["message"]
    await seat.set(state=State.AWAY, retry_after=30.0)
    for each in await answers(tasks):
        assert (each.status, each.error["code"], each.one("retry-after")) == (503, "seat_away", "30")
    got = await ask(seat)
    assert (got.status, got.one("retry-after")) == (503, "30")


async def test_a_request_is_held_until_its_deadline_also_while_the_node_is_away(proxy: Proxy) -> None:
    seat = await proxy.seat(deadline=0.3, retry_after=11.01)
    await proxy.control.close()
    started = time.monotonic()
    got = await ask(seat, "POST", body=b"{}")
    assert 0.3 <= time.monotonic() - started < PATIENCE
    assert (got.status, got.error["code"], got.one("retry-after")) == (503, "seat_wait_timeout", "12")
    await seat.set(deadline=0.0)
    assert (await ask(seat)).error["code"] == "seat_wait_timeout"
    assert await seat.count("refused_deadline") == 2


async def test_who_leaves_while_held_is_forgotten(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(backend=server.address)
        async with connected(seat) as whole, connected(seat) as half, connected(seat) as stays:
            await whole.send(request_bytes("POST", "/whole", body=b"{}"))
            await half.send(b"POST /half HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await stays.send(request_bytes("POST", "/stays", body=b"{}"))
            await seat.holds(3)
            whole.abort()
            half.writer.close()
            await seat.holds(1)
            await seat.set(state=State.OPEN)
            assert (await stays.response()).status == 200
    assert [each.target for each in server.requests] == ["/stays"]
    assert await seat.count("left") == 2


async def test_a_held_body_takes_little_memory_and_arrives_whole(proxy: Proxy) -> None:
    size = 8 * 1024 * 1024
    async with serving() as server:
        seat = await proxy.seat(backend=server.address)
        before = proxy.memory()
        wires, sending = [], []
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                wire = await stack.enter_async_context(connected(seat))
                wires.append(wire)
                sending.append(asyncio.create_task(wire.send(request_bytes("POST", body=bytes(size)))))
            await seat.holds(8)
            await asyncio.sleep(0.3)
            grown = proxy.memory() - before
            assert grown < 8 * 1024 * 1024, f"8 bodies of {size} bytes took {grown} bytes"
            await seat.set(state=State.OPEN)
            for wire in wires:
                assert (await wire.response()).status == 200
            await asyncio.gather(*sending)
    assert [len(each.body) for each in server.requests] == [size] * 8


async def test_quiet_paths_neither_wake_nor_wait(proxy: Proxy) -> None:
    listed = models(["llama-3.1-8b", "org/odd name"], 1_700_000_000)
    quiet = (Quiet("/health"), Quiet("/metrics", Answer(503, "text/plain", "parked")), *listed)
    async with serving() as server:
        seat = await proxy.seat(backend=server.address, quiet=quiet, state=State.HELD)
        assert (await ask(seat, target="//HEALTH/?x")).status == 200
        got = await ask(seat, target="/metrics")
        assert (got.status, got.body, got.one("content-type")) == (503, b"parked", "text/plain")
        got = await ask(seat, target="/v1/models")
        assert [each["id"] for each in json.loads(got.body)["data"]] == ["llama-3.1-8b", "org/odd name"]
        assert json.loads((await ask(seat, target="/v1/models/llama-3.1-8b")).body)["object"] == "model"
        assert (await ask(seat, "HEAD", "/v1/models")).body == b""
        assert [each.target for each in server.requests] == ["//HEALTH/?x"]
        assert server.requests[0].all("x-forwarded-for") == ["127.0.0.1"]
        await seat.set(state=State.OPEN)
        assert (await ask(seat, target="/v1/models")).body == b"{}"
    await seat.set(state=State.HELD, backend=None)
    got = await ask(seat, target="/health")
    assert (got.status, got.error["code"]) == (503, "seat_away")
    assert await seat.count("held") == 0 and await seat.count("quiet") == 6


async def test_keep_alives_go_to_held_streams_alone(proxy: Proxy) -> None:
    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"data: a\n\ndata: [DONE]\n\n", kind="text/event-stream"))

    async with serving(handler) as server:
        seat = await proxy.seat(backend=server.address, keepalive=0.02)
        async with connected(seat) as stream, connected(seat) as other:
            await stream.send(
                request_bytes("POST", "/v1/chat", "Accept-Encoding: gzip\r\n", b'{"n": 1, "stream": true}')
            )
            head = await stream.head()
            assert head.status == 200 and head.one("content-type").startswith("text/event-stream")
            await other.send(request_bytes("POST", "/v1/chat", body=b'{"stream": false}'))
            for _ in range(3):
                assert b": waiting" in await stream.read(stream.reader.readuntil(b"\n\n"))
            await seat.holds(2)
            await seat.set(state=State.OPEN)
            rest = await stream.read(stream.reader.readuntil(b"0\r\n\r\n"))
            assert b"data: a\n\ndata: [DONE]\n\n" in rest
            assert (await other.response()).one("content-length") == "23"
    assert not server.requests[0].all("accept-encoding")
    await seat.carries(0)


@pytest.mark.parametrize(
    ("how", "code"), [("late", "seat_wait_timeout"), ("refused", "server_refused"), ("gone", "seat_away")]
)
async def test_what_goes_wrong_with_a_stream_that_has_begun_is_said_within_it(
    proxy: Proxy, how: str, code: str
) -> None:
    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"error": "too long"}', "400 Bad Request"))

    async with serving(handler) as server:
        deadline = 0.2 if how == "late" else PATIENCE
        seat = await proxy.seat(backend=server.address, keepalive=10.0, deadline=deadline)
        async with connected(seat) as stream:
            await stream.send(request_bytes(target="/v1/chat", more="Accept: text/event-stream\r\n"))
            assert (await stream.head()).status == 200
            if how != "late":
                await seat.set(state=State.OPEN if how == "refused" else State.AWAY)
            events = await stream.read(stream.reader.readuntil(b"0\r\n\r\n"))
    said = next(line for line in events.splitlines() if line.startswith(b"data: {"))
    error = json.loads(said.removeprefix(b"data: "))["error"]
    assert error["code"] == code and b"data: [DONE]\n\n" in events
    assert how != "refused" or "too long" in error["message"]


async def test_who_leaves_a_held_stream_is_forgotten(proxy: Proxy) -> None:
    seat = await proxy.seat(keepalive=0.05)
    async with connected(seat) as stream:
        await stream.send(request_bytes("POST", body=b'{"stream": true}'))
        await stream.head()
        await seat.holds(1)
    await seat.holds(0)
    assert await seat.count("left") == 1


async def test_a_drain_ends_with_the_last_request_and_lets_none_slip_in(proxy: Proxy) -> None:
    go = asyncio.Event()

    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(go.wait(), PATIENCE)
        writer.write(reply())

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        before = asks(seat, 3)
        await until(lambda: len(server.requests) == 3, "three requests")
        draining = asyncio.create_task(proxy.control.drain(seat.route.seat, 1, PATIENCE))

        async def drains() -> bool:
            return (await seat.traffic()).draining

        await until(drains, "the seat drains")
        after = asks(seat, 3)
        await seat.holds(3)
        assert not draining.done()
        go.set()
        drained = await draining
        assert (drained.left, drained.cut) == (0, 0)
        assert [each.status for each in await answers(before)] == [200] * 3
        assert len(server.requests) == 3
        await seat.set(epoch=2)
        assert [each.status for each in await answers(after)] == [200] * 3


async def test_a_drain_says_how_many_are_left_and_breaks_them_off_if_asked_to(proxy: Proxy) -> None:
    async def handler(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target == "/upgrade":
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
        elif request.target == "/begun":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await writer.drain()
        assert await reader.read(1) == b""
        raise ConnectionError

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        async with (
            connected(seat) as silent,
            connected(seat) as begun,
            connected(seat) as upgraded,
            connected(seat) as held,
        ):
            await silent.send(request_bytes())
            await begun.send(request_bytes(target="/begun"))
            await begun.head()
            await upgraded.send(request_bytes(target="/upgrade", more="Connection: upgrade\r\nUpgrade: x\r\n"))
            assert (await upgraded.head()).status == 101
            await seat.carries(3)
            drained = await proxy.control.drain(seat.route.seat, 1, 0.1)
            assert (drained.left, drained.cut) == (3, 0)
            await held.send(request_bytes(target="/held"))
            await seat.holds(1)
            drained = await proxy.control.drain(seat.route.seat, 1, 0.1, cut=True)
            assert (drained.left, drained.cut) == (0, 3)
            await until(lambda: server.open == 0, "the server sees that they are gone")
            for wire in (silent, begun, upgraded):
                assert b"HTTP/1.1 200" not in await wire.rest()
            assert (await seat.traffic()).held == 1, "a held request was broken off too"
        assert await seat.count("cut") == 3


async def test_a_drain_that_is_overruled_says_so(proxy: Proxy) -> None:
    async def handler(_: Request, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read(1)
        raise ConnectionError

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        asked = asks(seat)
        await seat.carries(1)
        draining = asyncio.create_task(proxy.control.drain(seat.route.seat, 1, PATIENCE))

        async def drains() -> bool:
            return (await seat.traffic()).draining

        await until(drains, "the seat drains")
        await seat.set()
        with pytest.raises(Overruled, match="new route"):
            await draining
    assert (await answers(asked))[0].status == 502


async def test_no_request_is_forwarded_after_a_drain_under_load(proxy: Proxy) -> None:
    """Twelve clients, thirty drains: after each the server must get nothing until the seat opens again."""
    parked = False
    late: list[str] = []
    statuses: list[int] = []
    stop = False

    async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if parked:
            late.append(request.target)
        writer.write(reply())

    async with serving(handler) as server:
        seat = await proxy.seat(server)

        async def client() -> None:
            async with connected(seat) as wire:
                while not stop:
                    statuses.append((await wire.ask("POST", body=b"{}")).status)

        clients = [asyncio.create_task(client()) for _ in range(12)]
        for _ in range(30):
            count = len(statuses)
            await until(lambda count=count: len(statuses) > count + 20, "clients are answered")  # type: ignore[misc]
            assert (await proxy.control.drain(seat.route.seat, seat.route.epoch, PATIENCE)).left == 0
            parked = True
            await seat.holds(12)
            parked = False
            await seat.set(epoch=seat.route.epoch + 1)
        stop = True
        await asyncio.wait_for(asyncio.gather(*clients), PATIENCE)
    assert not late and set(statuses) == {200} and len(server.requests) == len(statuses)
