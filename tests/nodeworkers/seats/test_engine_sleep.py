"""An engine is asked to sleep and to wake: what it answers, does not answer, and what is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web

from nodeworkers.seats.backend import Process, Server
from nodeworkers.seats.backends import engine_sleep
from nodeworkers.seats.backends.engine_sleep import EngineSleep
from nodeworkers.seats.backends.engines import SGLANG, VLLM
from nodeworkers.seats.helper.driver import CardMemory
from nodeworkers.seats.world import LostError, UnsettledError, UntouchedError

PROCESS = Process(7, 70)


@dataclass
class Engine:
    """A server in the manner of vLLM, or SGLang's; `status`: what its calls answer; `hangs`: until then; `says`: a call
    that fails leaves it asleep all the same.
    """

    asleep: bool = False
    status: int = 200
    frees: bool = True
    hangs: asyncio.Event | None = None
    says: bool = False
    calls: list[str] = field(default_factory=list)
    address: str = ""

    async def change(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        if self.hangs is not None:
            await self.hangs.wait()
        if self.status == 200:
            self.asleep = request.path in ("/sleep", "/release_memory_occupation")
        elif self.says:
            self.asleep = True
        return web.Response(status=self.status, text="why")

    async def asks(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    async def memory(self, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        held = 10 if self.asleep and self.frees else 100
        return {card: CardMemory(1000 - held, 1000, {PROCESS.pid: held, 8: 5}) for card in cards}

    @property
    def server(self) -> Server:
        return Server("s1", ["GPU-0"], [PROCESS], address=self.address)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    app = web.Application()
    for path in ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"):
        app.router.add_post(path, made.change)
    app.router.add_get("/is_sleeping", made.asks)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.address = "{}:{}".format(*runner.addresses[0])
    yield made
    await runner.cleanup()


@pytest.fixture
def backend(engine: Engine) -> EngineSleep:
    return EngineSleep(VLLM, engine.memory)


async def test_it_sleeps_and_wakes_and_what_is_done_is_not_done_again(engine: Engine, backend: EngineSleep) -> None:
    assert (await backend.read(engine.server)).held == "Running"
    moved = await backend.park(engine.server, 1)
    assert (moved.bytes, moved.processes) == (90, ((7, 70),))
    assert (await backend.read(engine.server)).held == "Parked"
    await backend.park(engine.server, 1)
    assert (await backend.wake(engine.server, 1)).bytes == 90
    await backend.wake(engine.server, 1)
    assert engine.calls == ["/sleep", "/wake_up"]


async def test_sglang_does_not_tell_and_is_known_by_its_memory(engine: Engine) -> None:
    backend = EngineSleep(SGLANG, engine.memory)
    server = replace(engine.server, had=100)
    await backend.park(server, 1)
    assert (await backend.read(server)).held == "Parked"
    await backend.wake(server, 1)
    assert (await backend.read(server)).held == "Running"
    assert engine.calls == ["/release_memory_occupation", "/resume_memory_occupation"]


async def test_a_sleep_that_frees_nothing_is_taken_back(engine: Engine, backend: EngineSleep) -> None:
    engine.frees = False
    with pytest.raises(UntouchedError, match="frees nothing"):
        await backend.park(engine.server, 1)
    assert not engine.asleep and engine.calls == ["/sleep", "/wake_up"]


async def test_a_server_without_sleep_mode_says_what_it_needs(engine: Engine, backend: EngineSleep) -> None:
    engine.status = 404
    with pytest.raises(UntouchedError, match="--enable-sleep-mode"):
        await backend.park(engine.server, 1)


async def test_a_waking_that_fails_loses_the_server(engine: Engine, backend: EngineSleep) -> None:
    await backend.park(engine.server, 1)
    engine.status = 500
    with pytest.raises(LostError, match=r"status 500 \(why\)"):
        await backend.wake(engine.server, 1)


async def test_a_sleep_that_fails_is_read_again(engine: Engine, backend: EngineSleep) -> None:
    engine.status = 500
    with pytest.raises(UntouchedError, match=r"status 500 \(why\)"):
        await backend.park(engine.server, 1)
    engine.says = True
    with pytest.raises(UnsettledError):
        await backend.park(engine.server, 1)


async def test_a_call_that_hangs_goes_on_and_is_never_sent_again(
    engine: Engine, backend: EngineSleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hangs = asyncio.Event()
    first = asyncio.create_task(backend.park(engine.server, 1))
    async with asyncio.timeout(10):
        while not engine.calls:
            await asyncio.sleep(0.005)
    assert (await backend.read(engine.server)).held == "Changing"
    first.cancel()
    await asyncio.wait([first])
    assert (await backend.read(engine.server)).held == "Changing", "whoever waited is gone, the call is not"
    second = asyncio.create_task(backend.park(engine.server, 1))
    engine.hangs.set()
    assert (await second).processes == ((7, 70),)
    assert engine.calls == ["/sleep"]
    engine.hangs = asyncio.Event()
    monkeypatch.setattr(engine_sleep, "CALL", 0.1)
    with pytest.raises(UnsettledError, match="did not answer"):
        await backend.wake(engine.server, 1)
    engine.hangs.set()


async def test_who_is_older_is_refused_and_nothing_sent(engine: Engine, backend: EngineSleep) -> None:
    await backend.park(engine.server, 5)
    with pytest.raises(UntouchedError, match="epoch 5"):
        await backend.wake(engine.server, 4)
    assert engine.calls == ["/sleep"]


async def test_a_server_that_does_not_listen_yet_loads_and_one_that_ended_is_gone(backend: EngineSleep) -> None:
    nobody = Server("s1", ["GPU-0"], [PROCESS], address="127.0.0.1:1")
    assert (await backend.read(nobody)).held == "Running"
    assert (await backend.read(replace(nobody, parked=[Process(3, 30)]))).held == "Gone"
    assert (await backend.read(replace(nobody, processes=[]))).held == "Gone"
    with pytest.raises(UntouchedError, match="takes no connection"):
        await backend.park(nobody, 1)
    with pytest.raises(LostError):
        await backend.wake(replace(nobody, processes=[]), 1)
