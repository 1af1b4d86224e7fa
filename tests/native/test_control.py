"""The node's word with its proxy: whose word counts, what stays when nobody speaks, and what no word can do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_words import News, ProxyAway, ProxyError, Quiet, StaleEpoch, State
from tests.native.rig import PATIENCE, Proxy, Request, ask, connected, free_port, reply, request_bytes, serving, until


async def test_the_socket_is_its_owners_alone(proxy: Proxy) -> None:
    assert stat.S_IMODE(os.stat(proxy.socket).st_mode) == 0o600
    assert sorted(each.suffix for each in proxy.socket.parent.iterdir()) == [".lock", ".sock"]


async def ended(proxy: Proxy, *arguments: str | Path) -> tuple[int | None, str]:
    """How the program ends with these arguments, and what it says."""
    process = await asyncio.create_subprocess_exec(proxy.program, *arguments, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode, errors.decode()


async def test_a_second_proxy_does_not_take_the_socket(proxy: Proxy) -> None:
    code, errors = await ended(proxy, "--control", proxy.socket)
    assert code == 1 and "served by another proxy" in errors
    assert (await proxy.control.hello()).pid == proxy.pid


@pytest.mark.parametrize("arguments", [[], ["--control"], ["--what", "x"], ["--control", "x", "--grace", "soon"]])
async def test_wrong_arguments_are_explained(proxy: Proxy, arguments: list[str]) -> None:
    code, errors = await ended(proxy, *arguments)
    assert code == 2 and "Usage" in errors


async def test_an_older_word_does_not_count(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server, epoch=5)
        old = replace(seat.route, epoch=4, state=State.AWAY)
        for refused in (
            proxy.control.set(old),
            proxy.control.set(replace(old, listen=f"127.0.0.1:{free_port()}")),
            proxy.control.drain(seat.route.seat, 4, 0),
            proxy.control.remove(seat.route.seat, 4),
        ):
            with pytest.raises(StaleEpoch, match="epoch 5"):
                await refused
        assert (await ask(seat)).status == 200 and not (await seat.traffic()).draining
        await proxy.control.remove(seat.route.seat, 6)
        with pytest.raises(StaleEpoch, match="removed in epoch 6"):
            await proxy.control.set(seat.route)
        await seat.set(epoch=6)
        assert (await ask(seat)).status == 200


async def test_a_seat_moves_to_another_port_and_keeps_the_old_one_where_that_fails(proxy: Proxy) -> None:
    async with serving() as server:
        seat, other = await proxy.seat(server), await proxy.seat(server)
        before = seat.route
        with pytest.raises(ProxyError, match=f"cannot be served on {other.route.listen}: Address"):
            await proxy.control.set(replace(before, listen=other.route.listen, epoch=2))
        assert (await ask(seat)).status == 200
        old_port = seat.port
        await seat.set(listen=f"127.0.0.1:{free_port()}")
        assert (await ask(seat)).status == 200

        def closed() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", old_port)) != 0

        await until(closed, "the old port is closed")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seat": ""}, "name"),
        ({"seat": "a b"}, "name"),
        ({"seat": "x" * 129}, "name"),
        ({"listen": "127.0.0.1:0"}, "port 0"),
        ({"listen": "model.example:80"}, "socket address"),
        ({"listen": "127.0.0.1"}, "socket address"),
        ({"backend": "127.0.0.1:99999"}, "socket address"),
        ({"state": State.OPEN}, "no backend"),
        ({"state": "asleep"}, "unknown variant"),
        ({"retry_after": -1.0}, "retry_after"),
        ({"deadline": 1e9}, "deadline"),
        ({"keepalive": 0.0}, "keepalive"),
        ({"queue": 10**9}, "queue"),
        ({"connections": 0}, "connections"),
        ({"epoch": -1}, "integer"),
        ({"blocked": ("sleep",)}, "plain path"),
        ({"blocked": ("/a/../b",)}, "plain path"),
        ({"quiet": (Quiet("/%2e"),)}, "plain path"),
        ({"blocked": tuple(f"/{n}" for n in range(300))}, "more than 256"),
    ],
)
async def test_a_route_that_cannot_be_is_refused_with_the_reason(
    proxy: Proxy, changes: dict[str, Any], why: str
) -> None:
    seat = await proxy.seat()
    with pytest.raises(ProxyError, match=why):
        await proxy.control.set(replace(seat.route, **changes))
    assert (await proxy.control.state())[seat.route.seat].route == seat.route


async def test_a_seat_that_is_not_there(proxy: Proxy) -> None:
    with pytest.raises(ProxyError, match="no seat kyb-G09-s1") as refused:
        await proxy.control.drain("kyb-G09-s1", 1, 0)
    assert refused.value.code == "unknown"


async def test_a_node_that_comes_back_goes_on_from_what_the_proxy_knows(proxy: Proxy) -> None:
    async with serving() as server:
        open_seat = await proxy.seat(server, quiet=(Quiet("/health"),), keepalive=2.5)
        held = await proxy.seat(deadline=3600.0)
        await proxy.control.close()
        assert (await ask(open_seat)).status == 200, "an open seat is served while the node is away"
        waiting = asyncio.create_task(ask(held, "POST", body=b"{}"))
        async with ProxyControl(proxy.socket) as back:

            async def told() -> bool:
                return (await back.state())[held.route.seat].traffic.held == 1

            await until(told, "a node that comes back sees who waits")
            found = await back.state()
            assert found[open_seat.route.seat].route == open_seat.route
            assert found[held.route.seat].route == held.route
            await back.set(replace(held.route, epoch=2, backend=server.address, state=State.OPEN))
        assert (await waiting).status == 200


async def test_news_tell_of_every_seat_first_and_of_its_end(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        latest: dict[str, Any] = {}
        removed: list[str] = []

        async def follow() -> None:
            async for news in proxy.control.watch():
                latest.update({each.seat: each for each in news.traffic})
                removed.extend(news.removed)

        following = asyncio.create_task(follow())
        await until(lambda: seat.route.seat in latest, "the seat is told of")
        await ask(seat)
        await until(lambda: latest[seat.route.seat].ended is not None, "its traffic is told of")
        assert latest[seat.route.seat].in_flight == 0
        await proxy.control.remove(seat.route.seat, 1)
        await until(lambda: removed == [seat.route.seat], "its end is told of")
        await proxy.kill()
        with pytest.raises(ProxyAway):
            await following


async def test_news_are_gathered(proxy: Proxy) -> None:
    """Five hundred requests in a row make a few events, and the last one tells how it stands in the end."""
    async with serving() as server:
        seat = await proxy.seat(server)
        told: list[News] = []

        async def follow() -> None:
            async for news in proxy.control.watch(0.2):
                told.append(news)  # noqa: PERF401 - they are looked at while they come

        following = asyncio.create_task(follow())
        started = time.monotonic()
        async with connected(seat) as wire:
            for _ in range(500):
                await wire.ask()
        await seat.carries(0)
        await until(lambda: bool(told) and bool(told[-1].traffic) and told[-1].traffic[0].in_flight == 0, "the last")
        assert len(told) <= 3 + (time.monotonic() - started) / 0.2
        following.cancel()


LINES = {
    b"": "malformed",
    b"no json": "malformed",
    b"[]": "malformed",
    b"null": "malformed",
    b"{}": "version",
    b'{"v": 2, "id": 1, "op": "hello"}': "version",
    b'{"v": "1", "op": "hello"}': "version",
    b'{"v": 1}': "malformed",
    b'{"v": 1, "op": "dance"}': "malformed",
    b'{"v": 1, "op": 7}': "malformed",
    b'{"v": 1, "op": "hello", "extra": 1}': "malformed",
    b'{"v": 1, "op": "set"}': "malformed",
    b'{"v": 1, "op": "set", "route": {"seat": "a"}}': "malformed",
    b'{"v": 1, "op": "drain", "seat": "a", "epoch": 1e400, "seconds": 0, "cut": false}': "malformed",
    b'{"v": 1, "op": "drain", "seat": "a", "epoch": 1, "seconds": -1, "cut": false}': "invalid",
    b'{"v": 1, "op": "watch", "interval": -1}': "invalid",
    b"\xff\xfe": "malformed",
    b"[" * 10_000: "malformed",
}


async def test_lines_that_are_no_requests_are_answered_as_such_and_do_no_harm(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_unix_connection(proxy.socket)
    for line, code in LINES.items():
        writer.write(line + b"\n")
        answer = json.loads(await asyncio.wait_for(reader.readline(), PATIENCE))
        assert (answer["ok"], answer["code"]) == (False, code), (line[:80], answer)
    writer.write(b'{"v": 1, "id": 77, "op": "hello"}\n')
    answer = json.loads(await asyncio.wait_for(reader.readline(), PATIENCE))
    assert (answer["ok"], answer["id"], answer["pid"]) == (True, 77, proxy.pid)
    writer.close()


async def test_a_line_without_end_costs_its_sender_the_connection(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_unix_connection(proxy.socket)
    writer.write(b"a" * 300_000)
    answer = json.loads(await asyncio.wait_for(reader.readline(), PATIENCE))
    assert answer["code"] == "too_long"
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), PATIENCE)
    writer.close()
    assert await proxy.answers()


async def test_who_reads_no_answers_hinders_nobody(proxy: Proxy) -> None:
    _, writer = await asyncio.open_unix_connection(proxy.socket)
    writer.write(b'{"v": 1, "id": 1, "op": "watch", "interval": 0}\n' + b'{"v": 1, "id": 2, "op": "state"}\n' * 5000)
    seat = await proxy.seat()
    for number in range(2, 50):
        await seat.set(epoch=number)
    assert (await seat.traffic()).epoch == 49
    writer.close()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(sorted(LINES))), max_size=8).map(b"\n".join))
def test_no_bytes_of_a_node_end_the_proxy(there: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as node:
        node.settimeout(PATIENCE)
        node.connect(str(there))
        node.sendall(data)
    with socket.socket(socket.AF_UNIX) as node:
        node.settimeout(PATIENCE)
        node.connect(str(there))
        node.sendall(b'{"v": 1, "id": 1, "op": "hello"}\n')
        assert b'"ok":true' in node.recv(4096)


@pytest.fixture
async def there(proxy: Proxy) -> Path:
    return proxy.socket


async def test_it_ends_when_told_to_after_what_is_in_flight(proxy: Proxy) -> None:
    go = asyncio.Event()

    async def handler(_: Request, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(go.wait(), PATIENCE)
        writer.write(reply(b"done"))

    async with serving(handler) as server:
        seat, parked = await proxy.seat(server), await proxy.seat()
        async with connected(seat) as busy, connected(seat) as idle, connected(parked) as held:
            await busy.send(request_bytes("POST", body=b"{}"))
            await held.send(request_bytes("POST", body=b"{}"))
            await seat.carries(1)
            await parked.holds(1)
            os.kill(proxy.pid, signal.SIGTERM)
            got = await held.response()
            assert (got.status, got.error["code"], got.one("retry-after")) == (503, "proxy_ending", "8")
            assert await idle.rest() == b""
            assert proxy.process is not None and proxy.process.returncode is None
            go.set()
            assert (await busy.response()).body == b"done"
            assert await asyncio.wait_for(proxy.process.wait(), PATIENCE) == 0
    assert not proxy.socket.exists()


async def test_it_ends_at_the_end_of_the_grace_whatever_is_in_flight(tmp_path: Path, proxy: Proxy) -> None:
    await proxy.kill()
    await proxy.start(grace=0.2)

    async def handler(_: Request, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read(1)
        raise ConnectionError

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            await wire.send(request_bytes())
            await seat.carries(1)
            os.kill(proxy.pid, signal.SIGTERM)
            assert await wire.rest() == b""
            assert proxy.process is not None
            assert await asyncio.wait_for(proxy.process.wait(), PATIENCE) == 0


async def test_it_is_there_again_after_a_kill_and_the_same_client_goes_on(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        await proxy.kill()
        with pytest.raises(ProxyAway, match="Is it running"):
            await proxy.control.hello()
        await proxy.start()
        assert await proxy.control.state() == {}
        await seat.set()
        assert (await ask(seat)).status == 200


async def test_a_node_that_goes_midway_leaves_no_drain_behind_that_hinders_the_next(proxy: Proxy) -> None:
    async def handler(_: Request, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read(1)
        raise ConnectionError

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        waiting = asyncio.create_task(ask(seat))
        await seat.carries(1)
        leaving = ProxyControl(proxy.socket)
        draining = asyncio.create_task(leaving.drain(seat.route.seat, 1, PATIENCE))

        async def drains() -> bool:
            return (await seat.traffic()).draining

        await until(drains, "the seat drains")
        draining.cancel()
        await leaving.close()
        assert (await seat.traffic()).draining, "what it said last stays"
        await seat.set(epoch=2)
        assert not (await seat.traffic()).draining
    assert (await waiting).status == 502
