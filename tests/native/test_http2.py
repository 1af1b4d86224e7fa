"""HTTP/2 with prior knowledge on both sides of the proxy, and gRPC, which needs it and its trailers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

from nodeworkers.seats.proxy_words import State
from tests.native.rig import PATIENCE, Proxy, Request, Seat, reply, serving, until

Header = tuple[str, str]


@dataclass
class Stream:
    """What has come on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset: bool = False


class Client:
    """A connection of HTTP/2."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.state = H2Connection(H2Configuration(client_side=True, validate_outbound_headers=False))
        self.streams: dict[int, Stream] = {}
        self.closed = False
        self._reader, self._writer = reader, writer
        self.state.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self._writer.write(self.state.data_to_send())

    async def read(self) -> None:
        """Takes what comes, until the connection ends."""
        while data := await self._reader.read(65536):
            for event in self.state.receive_data(data):
                found = self.streams.get(getattr(event, "stream_id", 0) or 0, Stream())
                if isinstance(event, (ResponseReceived, TrailersReceived)):
                    found.headers |= {_text(name): _text(value) for name, value in event.headers}
                elif isinstance(event, DataReceived):
                    found.body += event.data
                    self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, StreamEnded):
                    found.ended = True
                elif isinstance(event, StreamReset):
                    found.reset = True
            self.flush()
        self.closed = True

    def send(self, method: str, path: str, body: bytes = b"", more: list[Header] | None = None) -> Stream:
        """Begins a request."""
        number = self.state.get_next_available_stream_id()
        head = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "model.example")]
        self.state.send_headers(number, [*head, *(more or [])], end_stream=not body)
        if body:
            for at in range(0, len(body), 16_384):
                self.state.send_data(number, body[at : at + 16_384], end_stream=at + 16_384 >= len(body))
        self.flush()
        self.streams[number] = Stream()
        return self.streams[number]

    def reset(self) -> None:
        """Breaks off the last request."""
        self.state.reset_stream(max(self.streams))
        self.flush()

    async def ask(self, method: str, path: str, body: bytes = b"", more: list[Header] | None = None) -> Stream:
        """A request and its response."""
        stream = self.send(method, path, body, more)
        await until(lambda: stream.ended or stream.reset or self.closed, f"{path} is answered")
        return stream


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()


@asynccontextmanager
async def speaking(seat: Seat) -> AsyncIterator[Client]:
    """A client of a seat."""
    reader, writer = await asyncio.open_connection("127.0.0.1", seat.port)
    client = Client(reader, writer)
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        reading.cancel()
        writer.transport.abort()


async def test_a_server_of_the_older_protocol_answers_clients_of_the_newer(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        async with speaking(seat) as client:
            cookies = [("cookie", "a=1"), ("cookie", "b=2")]
            answered = [client.ask("POST", f"/v1/x?{number}", b"{}", cookies) for number in range(20)]
            for stream in await asyncio.gather(*answered):
                assert (stream.headers[":status"], stream.body, stream.ended) == ("200", b"{}", True)
            blocked = await client.ask("POST", "/v1/..//%53leep")
            assert blocked.headers[":status"] == "403"
    assert len(server.requests) == 20
    sent = server.requests[0]
    assert sent.line.endswith("HTTP/1.1") and sent.all("host") == ["model.example"]
    assert sent.all("cookie") == ["a=1; b=2"] and sent.body == b"{}"
    assert sent.all("x-forwarded-for") == ["127.0.0.1"] and not [name for name, _ in sent.headers if name[0] == ":"]


async def test_a_stream_that_is_reset_ends_its_request_and_no_other(proxy: Proxy) -> None:
    gone = 0

    async def handler(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal gone
        if request.target == "/waits":
            assert await reader.read(1) == b""
            gone += 1
            raise ConnectionError
        writer.write(reply())

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        async with speaking(seat) as client:
            client.send("GET", "/waits")
            await seat.carries(1)
            client.reset()
            await until(lambda: gone == 1, "the server sees it")
            await seat.carries(0)
            assert (await client.ask("GET", "/next")).headers[":status"] == "200"
            await seat.set(state=State.HELD)
            client.send("POST", "/held")
            await seat.holds(1)
            client.reset()
            await seat.holds(0)
            client.send("GET", "/held")
            await seat.holds(1)
        await seat.holds(0)


async def test_a_route_may_speak_http_2_to_its_server(proxy: Proxy) -> None:
    """The server of the newer protocol is another seat of the proxy."""
    async with serving() as server:
        inner = await proxy.seat(server)
        outer = await proxy.seat()
        await outer.set(backend=inner.route.listen, h2c=True, state=State.OPEN)
        async with speaking(outer) as client:
            assert (await client.ask("POST", "/v1/x", bytes(60_000))).headers[":status"] == "200"
        traffic = await proxy.control.metrics()
        assert traffic[inner.route.seat].counts["requests"] == 1
    assert server.requests[0].all("x-forwarded-for") == ["127.0.0.1, 127.0.0.1"]
    assert server.requests[0].all("host") == ["model.example"] and len(server.requests[0].body) == 60_000


class Models(grpc.GenericRpcHandler):
    """A service of bytes: `One` answers once, `Many` to each message, `Fails` with a status."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        self.calls.append(details.method)
        if details.method == "/models.Models/One":
            return grpc.unary_unary_rpc_method_handler(self.one)
        if details.method == "/models.Models/Many":
            return grpc.stream_stream_rpc_method_handler(self.many)
        return grpc.unary_unary_rpc_method_handler(self.fails)

    async def one(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        context.set_trailing_metadata((("x-tokens", str(len(request))),))
        return request[::-1]

    async def many(
        self, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request * 2

    async def fails(self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no tokens are left – really")
        return b""


@asynccontextmanager
async def models_served() -> AsyncIterator[tuple[str, Models]]:
    """A gRPC server and its address."""
    server, service = grpc.aio.server(), Models()
    server.add_generic_rpc_handlers([service])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", service
    finally:
        await server.stop(0)


Streaming = grpc.aio.StreamStreamMultiCallable[bytes, bytes]


def unary(channel: grpc.aio.Channel, method: str, message: bytes) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
    """A call of one message."""
    calls: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    return calls(message, timeout=PATIENCE)


async def test_grpc_goes_through_with_its_trailers(proxy: Proxy) -> None:
    async with models_served() as (address, service):
        seat = await proxy.seat()
        await seat.set(backend=address, state=State.OPEN)
        async with grpc.aio.insecure_channel(seat.route.listen) as channel:
            call = unary(channel, "/models.Models/One", b"abc")
            assert await call == b"cba"
            assert dict(await call.trailing_metadata() or ())["x-tokens"] == "3"

            streaming: Streaming = channel.stream_stream("/models.Models/Many")
            many = streaming(timeout=PATIENCE)
            for number in range(3):  # each answer comes before the next message goes
                await many.write(b"%d" % number)
                assert await many.read() == b"%d" % number * 2
            await many.done_writing()
            assert await many.read() == grpc.aio.EOF

            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await unary(channel, "/models.Models/Fails", b"")
            assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failure.value.details() == "no tokens are left – really"

            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await unary(channel, "/vllm.Control/Sleep", b"")
            assert failure.value.code() == grpc.StatusCode.PERMISSION_DENIED
        await seat.carries(0)
    assert "/vllm.Control/Sleep" not in service.calls


async def test_grpc_is_held_and_refused_in_its_own_words(proxy: Proxy) -> None:
    async with models_served() as (address, _):
        seat = await proxy.seat(backend=address)
        async with grpc.aio.insecure_channel(seat.route.listen) as channel:
            held = unary(channel, "/models.Models/One", b"abc")
            reading = asyncio.ensure_future(_awaited(held))
            await seat.holds(1)
            await seat.set(state=State.OPEN)
            assert await reading == b"cba"
            await seat.set(state=State.AWAY)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await unary(channel, "/models.Models/One", b"")
            assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "try again in 8 s" in str(failure.value.details())


async def _awaited(call: Awaitable[bytes]) -> bytes:
    return await call


def headers_of_every_kind() -> Iterator[tuple[list[Header], str]]:
    """Heads that RFC 9113 forbids, and why."""
    yield [("connection", "close")], "a field of one hop"
    yield [("transfer-encoding", "chunked")], "a coding of HTTP/1.1"
    yield [("Upper", "x")], "upper case"
    yield [("x", "a\r\nx-injected: b")], "a line break in a value"
    yield [("x y", "a")], "a blank in a name"
    yield [("content-length", "5")], "a length that is not the body's"
    yield [(":path", "/second")], "a pseudo field twice"


@pytest.mark.parametrize("more", [pytest.param(more, id=why) for more, why in headers_of_every_kind()])
async def test_nothing_is_smuggled_from_http_2_to_http_1(proxy: Proxy, more: list[Header]) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)
        async with speaking(seat) as client:
            client.state.config.normalize_outbound_headers = False
            stream = await client.ask("POST", "/v1/x", b"{}", more)
            assert stream.headers.get(":status") != "200" or not server.requests[0].all(more[0][0].lower())
        async with speaking(seat) as client:
            assert (await client.ask("GET", "/fine")).headers[":status"] == "200"
    for sent in server.requests:
        assert sent.target in ("/v1/x", "/fine") and not sent.all("x-injected")
