"""The webhooks' server: TLS with certificates that change under it, and callers that mean no good."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.webhooks import server as module
from controller.webhooks.material import Material
from controller.webhooks.reviews import Answer, validate
from controller.webhooks.server import BODY_LIMIT, Server
from planning.admission import Installation
from tests.controller.webhook_rig import HOST, fresh, post, question, trusting

GOOD = fresh()


def answer(body: bytes) -> Answer:
    return validate(body, Installation())


@asynccontextmanager
async def serving(material: Material) -> AsyncIterator[tuple[Server, str]]:
    server = Server("127.0.0.1", 0, {"/validate": answer})
    server.use(material)
    await server.listen()
    try:
        yield server, f"https://{HOST}:{server.addresses[0][1]}/validate"
    finally:
        await server.close()


async def test_a_new_certificate_is_served_without_a_restart() -> None:
    first, second = fresh(), fresh()
    async with serving(first) as (server, url):
        assert (await post(url, question(), trusting(first.authorities)))[0] == 200
        server.use(second)
        assert (await post(url, question(), trusting(second.authorities)))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await post(url, question(), trusting(first.authorities))
        assert (await post(url, question(), trusting(first.authorities + second.authorities)))[0] == 200


async def test_a_certificate_that_cannot_be_used_leaves_the_last_one() -> None:
    good, other = fresh(), fresh()
    async with serving(good) as (server, url):
        for bad in (
            Material(good.authorities, "", other.certificate, good.key),
            Material(good.authorities, "", "garbage", good.key),
            Material(good.authorities, "", good.certificate, "garbage"),
        ):
            with pytest.raises((OSError, ValueError)):
                server.use(bad)
            assert (await post(url, question(), trusting(good.authorities)))[0] == 200


async def test_an_encrypted_key_is_refused_and_asks_nobody_for_a_password() -> None:
    from cryptography.hazmat.primitives import serialization

    good = fresh()
    key = serialization.load_pem_private_key(good.key.encode(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    ).decode()
    with pytest.raises((OSError, ValueError)):
        Server("127.0.0.1", 0, {}).use(Material(good.authorities, "", good.certificate, locked))


async def test_old_protocols_are_not_spoken() -> None:
    good = fresh()
    old = trusting(good.authorities)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(good) as (_, url):
        with pytest.raises(aiohttp.ClientConnectorError):
            await post(url, question(), old)


async def test_a_body_is_bounded_and_must_say_how_long_it_is() -> None:
    good = fresh()
    context = trusting(good.authorities)
    async with serving(good) as (_, url):
        fits = question(padding="x" * (BODY_LIMIT - 10_000))
        assert (await post(url, fits, context))[0] == 200
        assert (await post(url, b"x" * (BODY_LIMIT + 1), context))[0] == 413

        async def pieces() -> AsyncIterator[bytes]:
            yield question()

        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector) as session, session.post(url, data=pieces()) as told:
            assert told.status == 411
        packed = await post(url, question(), context, **{"Content-Encoding": "gzip"})
        assert packed[0] in (200, 400), "it is taken as it is, and not unpacked"


async def test_who_sends_slowly_is_let_go_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.3)
    good = fresh()
    context = trusting(good.authorities)
    async with serving(good) as (server, url):
        port = server.addresses[0][1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=HOST)
        writer.write(b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert (await post(url, question(), context))[0] == 200
        async with asyncio.timeout(5):
            assert b"408" in await reader.readline()
        writer.close()
        assert server._held == 0


async def test_a_flood_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_LIMIT", 100)
    good = fresh()
    async with serving(good) as (_, url):
        status, why = await post(url, question(), trusting(good.authorities))
        assert (status, why) == (503, b"too many at once; ask again\n")


async def test_other_paths_and_methods_are_not_there() -> None:
    good = fresh()
    context = trusting(good.authorities)
    async with serving(good) as (_, url):
        assert (await post(url.replace("/validate", "/"), question(), context))[0] == 404
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as told:
            assert told.status == 405


async def test_what_is_no_http_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(GOOD) as (server, _):
        port = server.addresses[0][1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting(GOOD.authorities), server_hostname=HOST
        )
        writer.write(b"GET / HTTP/9\r\n\r\n")
        async with asyncio.timeout(5):
            assert b" 400 " in await reader.readline()
        writer.close()
    assert caplog.records == []


heads = st.lists(
    st.sampled_from(
        [b"POST /validate HTTP/1.1\r\n", b"GET / HTTP/9\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n",
         b"Transfer-Encoding: chunked\r\n", b"Host: x\r\n", b"\r\n", b"zz\r\n", b"x" * 9000, b"\x00\xff", b"{}"]
    ) | st.binary(max_size=30),
    max_size=8,
)  # fmt: skip


@given(st.lists(heads, min_size=1, max_size=10))
@settings(max_examples=10)
def test_whatever_is_sent_the_next_one_is_answered(calls: list[list[bytes]]) -> None:
    """Bytes that are no HTTP, or nearly: answered with a refusal or a closed connection, and no error of ours."""

    async def told() -> None:
        context = trusting(GOOD.authorities)
        async with serving(GOOD) as (server, url):
            for pieces in calls:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", server.addresses[0][1], ssl=context, server_hostname=HOST
                )
                writer.write(b"".join(pieces) + b"\r\n\r\n")
                writer.write_eof() if writer.can_write_eof() else None
                try:
                    async with asyncio.timeout(0.05):
                        assert not (await reader.read(64)).startswith(b"HTTP/1.1 5")
                except (TimeoutError, ConnectionError):
                    pass  # it waits for the rest of what was announced
                writer.transport.abort()
            assert (await post(url, question(), context))[0] == 200

    asyncio.run(told())
