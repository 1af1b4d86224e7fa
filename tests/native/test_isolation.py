"""That no seat ever gets another's data: not by the connections that are kept, not by a port that another server has
now, not by bytes that a server sent too many, and not by anything that a client says.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

from nodeworkers.seats.proxy_words import State
from tests.native.rig import (
    PATIENCE,
    Proxy,
    Request,
    Seat,
    Server,
    ask,
    connected,
    free_port,
    reply,
    request_bytes,
    serving,
    until,
)


def names_itself(name: str) -> Server:
    """A server whose every answer says who it is and what it was asked."""

    async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target.endswith("slow"):
            await asyncio.sleep(random.random() / 50)
        writer.write(reply(f"{name} {request.target}".encode(), more=f"X-Server: {name}\r\n"))

    return Server(handler)


async def test_the_port_alone_says_whose_a_request_is(proxy: Proxy) -> None:
    async with AsyncExitStack() as stack:
        seats: list[Seat] = []
        for name in ("a", "b"):
            server = names_itself(name)
            await server.start()
            stack.push_async_callback(server.stop)
            seats.append(await proxy.seat(server))
        a, b = seats
        for target, more in [
            (f"http://{b.route.listen}/x", ""),
            ("/x", f"Host: {b.route.listen}\r\n"),
            ("/x", f"X-Forwarded-Host: {b.route.listen}\r\nX-Seat: {b.route.seat}\r\nForwarded: host=b\r\n"),
            (f"//{b.route.listen}/x", ""),
        ]:
            assert (await ask(a, target=target, more=more)).one("x-server") == "a"


async def test_three_seats_switched_hundreds_of_times_under_load(proxy: Proxy) -> None:
    """Seats swap servers, epochs and states while clients ask on connections that they keep. Each answer must come from
    the server that the seat had in the epoch in which the request was let in: the server of an epoch serves one seat.
    """
    randomness = random.Random(7)
    switches = 150
    owner: dict[
        str, str
    ] = {}  # server → seat: each server is given to one seat for good, or to the next one when parked
    wrong: list[str] = []
    answered = 0
    stop = False

    async with AsyncExitStack() as stack:
        seats = [await proxy.seat() for _ in range(3)]
        servers: dict[str, list[Server]] = {}
        for seat in seats:
            servers[seat.route.seat] = []
            for number in range(2):
                server = names_itself(f"{seat.route.seat}/{number}")
                await server.start()
                stack.push_async_callback(server.stop)
                servers[seat.route.seat].append(server)
                owner[f"{seat.route.seat}/{number}"] = seat.route.seat

        async def client(seat: Seat, number: int) -> None:
            nonlocal answered
            count = 0
            async with connected(seat) as wire:
                while not stop:
                    count += 1
                    target = f"/{seat.route.seat}/{number}/{count}/{randomness.choice(['slow', 'fast'])}"
                    got = await wire.ask("POST", target, body=target.encode())
                    answered += 1
                    server, _, asked = got.body.decode().partition(" ")
                    if got.status != 200 or owner.get(server) != seat.route.seat or asked != target:
                        wrong.append(f"{target}: {got}")

        clients = [asyncio.create_task(client(seat, number)) for seat in seats for number in range(4)]
        for _ in range(switches):
            seat = randomness.choice(seats)
            backend = randomness.choice(servers[seat.route.seat]).address
            if seat.route.state == State.OPEN:
                await proxy.control.drain(seat.route.seat, seat.route.epoch, randomness.choice([0.0, PATIENCE]))
                await seat.set(state=State.HELD, epoch=seat.route.epoch + 1)
            else:
                await seat.set(state=State.OPEN, epoch=seat.route.epoch + 1, backend=backend)
            await asyncio.sleep(randomness.random() / 100)
        for seat in seats:
            await seat.set(state=State.OPEN, backend=servers[seat.route.seat][0].address)
        stop = True
        await asyncio.wait_for(asyncio.gather(*clients), PATIENCE)
    assert not wrong, wrong[:3]
    assert answered > switches


async def test_a_connection_is_not_used_again_in_another_epoch_or_after_parking(proxy: Proxy) -> None:
    async with serving() as server:
        seat = await proxy.seat(server)

        async def connection() -> int:
            assert (await ask(seat)).status == 200
            return server.requests[-1].connection

        async def kept() -> bool:
            return await connection() == await connection()

        await until(kept, "connections are used again at all")
        first = await connection()
        await seat.set(retry_after=3.0)
        assert await connection() <= first + 1, "a route that says the same keeps its connections"
        used = max(each.connection for each in server.requests)
        await seat.set(epoch=seat.route.epoch + 1)
        assert await connection() > used
        used = max(each.connection for each in server.requests)
        await seat.set(state=State.HELD)
        await seat.set(state=State.OPEN)
        assert await connection() > used
        used = max(each.connection for each in server.requests)
        await proxy.control.drain(seat.route.seat, seat.route.epoch, PATIENCE)
        await seat.set()
        assert await connection() > used


async def test_parking_closes_what_is_idle_and_keeps_nothing_of_what_ends_later(proxy: Proxy) -> None:
    """Also while an old request is still in flight."""
    go = {"/first": asyncio.Event(), "/last": asyncio.Event()}

    async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request.target in go:
            await asyncio.wait_for(go[request.target].wait(), PATIENCE)
        writer.write(reply())

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        tasks = [asyncio.create_task(ask(seat, target=target)) for target in go]
        await seat.carries(2)
        assert (await ask(seat)).status == 200
        assert server.open == 3
        await seat.set(state=State.HELD)
        await until(lambda: server.open == 2, "the idle connection is closed")
        go["/first"].set()
        assert (await tasks[0]).status == 200
        await until(lambda: server.open == 1, "a connection is not kept that ended its request after that")
        go["/last"].set()
        assert (await tasks[1]).status == 200
        await until(lambda: server.open == 0, "nor is the last")


async def test_a_port_that_another_server_has_now_is_connected_to_anew(proxy: Proxy) -> None:
    """A seat's server goes and another one's takes over its port, as pods' addresses are used again."""
    port = free_port()
    old, new = names_itself("old"), names_itself("new")
    await old.start(port)
    seat = await proxy.seat(old)
    other = await proxy.seat()
    assert (await ask(seat)).one("x-server") == "old"
    await seat.set(state=State.HELD, backend=None)
    await old.stop()
    await new.start(port)
    await other.set(backend=new.address, state=State.OPEN)
    assert (await ask(other)).one("x-server") == "new"
    assert not old.requests[1:]
    await new.stop()


async def test_bytes_too_many_are_no_other_seats_answer(proxy: Proxy) -> None:
    """Servers that send a second response unasked, with the first or after it. Their own clients may get it, as from
    any proxy that uses connections again; those of another seat never, nor those of a later epoch.
    """
    async with AsyncExitStack() as stack:

        async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = reply(request.target.encode())
            writer.write(said + said if request.target.endswith("at-once") else said)
            await writer.drain()
            if request.target.endswith("late"):
                await asyncio.sleep(0.002)
                writer.write(said)

        server = await stack.enter_async_context(serving(handler))
        seats = [await proxy.seat(server), await proxy.seat(server)]
        for epoch in range(1, 21):
            for seat in seats:
                await seat.set(epoch=epoch)
            for number in range(6):
                for seat in seats:
                    target = f"/{seat.route.seat}/{epoch}/{number}/{'at-once' if number % 2 else 'late'}"
                    got = await ask(seat, "POST", target, body=b"{}")
                    if got.status == 200:
                        assert got.body.startswith(f"/{seat.route.seat}/{epoch}/".encode()), (target, got.body)
                await asyncio.sleep(0.003 if number % 3 == 0 else 0)


async def test_what_a_client_left_behind_is_not_the_next_ones(proxy: Proxy) -> None:
    """Clients go midway through requests and responses, and the connections to the server with them."""

    async def handler(request: Request, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = request.target.encode() * 1000
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 1000):
            writer.write(body[at : at + 1000])
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(handler) as server:
        seat = await proxy.seat(server)
        for number in range(40):
            async with connected(seat) as wire:
                await wire.send(request_bytes(target=f"/left/{number}"))
                if number % 2:
                    await wire.head()
            got = await ask(seat, target=f"/stays/{number}")
            assert got.body == f"/stays/{number}".encode() * 1000
