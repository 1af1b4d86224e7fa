"""What clients send to get more than their due: two readings of one request, blocked paths in disguise, and floods."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.seats.proxy_words import ENGINE_CONTROL
from tests.native.rig import PATIENCE, Proxy, ask, connected, request_bytes, serving, until

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
REFUSED = {
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "a length that is none": b"Content-Length: +5\r\n\r\nabcde",
    "a length in hex": b"Content-Length: 0x5\r\n\r\nabcde",
    "a negative length": b"Content-Length: -1\r\n\r\n",
    "a list of lengths": b"Content-Length: 5, 6\r\n\r\nabcde",
    "an endless length": b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a coding that is not chunked": b"Transfer-Encoding: gzip\r\n\r\n",
    "chunked and then another": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked misspelt": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a folded line": b"X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
    "a blank before the colon": b"Content-Length : 5\r\n\r\nabcde",
    "a line without a colon": b"Content-Length\r\n\r\n",
    "a null byte": b"X-A: a\0b\r\n\r\n",
    "a bare carriage return": b"X-A: a\rContent-Length: 5\r\n\r\nabcde",
    "no name": b": x\r\n\r\n",
}
CHUNKS = {
    "a size that is none": b"x\r\nabc\r\n0\r\n\r\n",
    "a negative size": b"-1\r\nabc\r\n0\r\n\r\n",
    "a size in 0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "a size too large": b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "more than the size": b"3\r\nabcdef\r\n0\r\n\r\n",
    "an endless extension": b"3;" + b"a" * 20_000 + b"\r\nabc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("head", [pytest.param(head, id=name) for name, head in REFUSED.items()])
async def test_a_head_with_two_readings_is_refused(proxy: Proxy, head: bytes) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            await wire.send(b"POST /first HTTP/1.1\r\nHost: x\r\n" + head + SMUGGLED)
            answers = await wire.rest()
        assert answers.startswith(b"HTTP/1.1 400"), answers
        assert answers.count(b"HTTP/1.1") == 1
    assert not server.requests


@pytest.mark.parametrize("chunks", [pytest.param(chunks, id=name) for name, chunks in CHUNKS.items()])
async def test_chunks_with_two_readings_end_the_connection(proxy: Proxy, chunks: bytes) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            await wire.send(
                b"POST /first HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + SMUGGLED
            )
            answers = await wire.rest()
        assert b"HTTP/1.1 200" not in answers
        assert (await ask(seat)).status == 200
    assert [each.target for each in server.requests] == ["/v1/x"]


@pytest.mark.parametrize("length_first", [True, False])
async def test_of_length_and_chunks_the_chunks_count_and_the_server_sees_them_alone(
    proxy: Proxy, length_first: bool
) -> None:
    """RFC 9112, section 6.3: Transfer-Encoding overrides; whoever forwards must take Content-Length off."""
    fields = [b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"]
    async with serving() as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            head = b"".join(fields if length_first else reversed(fields))
            await wire.send(b"POST /first HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n5\r\nabcde\r\n0\r\n\r\n")
            await wire.send(SMUGGLED)
            assert (await wire.response()).status == 200
            assert await wire.rest() == b"", "the connection was used on"
    (first,) = server.requests
    assert (first.target, first.body, first.all("content-length")) == ("/first", b"abcde", [])


DISGUISES: list[Callable[[str], str]] = [
    lambda path: path,
    lambda path: path.upper(),
    lambda path: "/" + path,
    lambda path: "/." + path,
    lambda path: "/v1/.." + path,
    lambda path: "/v1/%2e%2E" + path,
    lambda path: "/v1%2F.." + path,
    lambda path: path + "/",
    lambda path: path + "/more",
    lambda path: path + ";x=1",
    lambda path: path + "%3Flevel=1",
    lambda path: path + "?level=1",
    lambda path: path + "%00",
    lambda path: path + "%20",
    lambda path: "/%5c" + path[1:],
    lambda path: "http://model.example" + path,
    lambda path: "".join(f"%{ord(letter):02x}" if letter != "/" else letter for letter in path),
    lambda path: "".join(f"%25{ord(letter):02x}" if letter != "/" else letter for letter in path),
]


async def test_engines_are_not_controlled_by_clients_however_they_spell_it(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        async with connected(seat) as wire:
            for path in ENGINE_CONTROL:
                for disguise in DISGUISES:
                    got = await wire.ask("POST", disguise(path))
                    assert (got.status, got.error["code"]) == (403, "path_blocked"), disguise(path)
            assert (await wire.ask(target="/v1/sleep")).status == 200
        assert await seat.count("blocked") == len(ENGINE_CONTROL) * len(DISGUISES)
    assert [each.target for each in server.requests] == ["/v1/sleep"]


async def test_large_heads_are_refused_and_large_targets(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        assert (await ask(seat, more=f"X-A: {'a' * 30_000}\r\n")).status == 200
        async with connected(seat) as wire:
            await wire.send(request_bytes(more="X-A: " + "a" * 100_000 + "\r\n"))
            assert (await wire.response()).status == 431
        async with connected(seat) as wire:
            await wire.send(request_bytes(more="".join(f"X-{number}: a\r\n" for number in range(500))))
            assert (await wire.response()).status == 431
        async with connected(seat) as wire:
            await wire.send(request_bytes(target="/" + "a" * 70_000))
            assert (await wire.response()).status in (400, 414, 431)
    assert len(server.requests) == 1


async def test_connections_of_a_seat_are_bounded(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server, connections=2)
        other = await proxy.seat(server)
        async with connected(seat) as first, connected(seat) as second:
            assert (await first.ask()).status == 200
            assert (await second.ask()).status == 200
            async with connected(seat) as third:
                got = await third.response()
                assert (got.status, got.error["code"]) == (503, "seat_connections_full")
                assert got.one("retry-after") == "8" and await third.rest() == b""
            assert (await ask(other)).status == 200
            first.abort()

            async def free() -> bool:
                return (await ask(seat)).status == 200

            await until(free, "a place is free again")


async def test_connections_that_say_nothing_or_half_of_it_hold_nobody_up(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        silent = [socket.create_connection(("127.0.0.1", seat.port)) for _ in range(50)]
        for number, each in enumerate(silent):
            each.sendall([b"", b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n", b"GET / HTTP/1.1\r\nHost"][number % 4])
        async with connected(seat) as wire:
            for _ in range(20):
                assert (await wire.ask()).status == 200
        for each in silent:
            each.close()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from(
                [
                    b"GET /v1/x HTTP/1.1\r\n",
                    b"POST /v1/x HTTP/1.1\r\n",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    b"Host: x\r\n",
                    b"Content-Length: 3\r\n",
                    b"Transfer-Encoding: chunked\r\n",
                    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
                    b"Expect: 100-continue\r\n",
                    b"\r\n",
                    b"abc",
                    b"0\r\n\r\n",
                    b"\0\0\0\4\0\0\0\0\0",
                    b"\0\0\1\1\5\0\0\0\1\xff",
                ]
            ),
            max_size=12,
        ).map(b"".join),
    )
)
def test_no_bytes_of_a_client_end_the_proxy(shared: tuple[int, int], data: bytes) -> None:
    port, pid = shared
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        try:
            while client.recv(65536):
                pass
        except ConnectionError:
            pass
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(request_bytes(target="/health"))
        assert client.recv(65536).startswith(b"HTTP/1.1 503")
    assert pid


@pytest.fixture
async def shared(proxy: Proxy) -> tuple[int, int]:
    seat = await proxy.seat(deadline=0.0)
    return seat.port, proxy.pid


async def test_an_error_is_json_whatever_the_path_has_in_it(proxy: Proxy) -> None:
    seat = await proxy.seat()
    got = await ask(seat, target='/sleep/"}<script>\\x')
    assert got.status in (400, 403) and (got.status == 400 or "script" in json.loads(got.body)["error"]["message"])


async def test_many_clients_at_once(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        answers = await asyncio.wait_for(asyncio.gather(*(ask(seat, "POST", body=b"{}") for _ in range(300))), PATIENCE)
    assert {each.status for each in answers} == {200}
