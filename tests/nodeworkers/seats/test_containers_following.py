"""What happens to containers is heard of, by a simulated runtime's events or by asking, whatever the runtime does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nodeworkers.rpc import cri_pb2 as cri
from nodeworkers.seats.cri import Cri
from nodeworkers.seats.following import Following
from tests.nodeworkers.seats.simulated_cri import Box, Sandbox, SimulatedCri

LONG = 30.0  # nothing here takes as long


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[SimulatedCri]:
    made = SimulatedCri(tmp_path)
    await made.start()
    yield made
    await made.stop()


@asynccontextmanager
async def following(runtime: SimulatedCri, poll: float = LONG, check: float = LONG) -> AsyncIterator[Following]:
    made = Following(runtime.socket, poll=poll, check=check)
    running = asyncio.ensure_future(made.run())
    try:
        yield made
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(holds: Callable[[], object], what: str) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < 10, f"not in 10 s: {what}"
        await asyncio.sleep(0.005)


async def settled(runtime: SimulatedCri, made: Following) -> int:
    await until(lambda: not made.trouble and runtime.listeners, "it listens")
    return made.news


async def test_an_event_wakes_whoever_waits(runtime: SimulatedCri) -> None:
    async with following(runtime) as made:
        news = await settled(runtime, made)
        waiting = [asyncio.ensure_future(made.changed(news, LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        runtime.happen("a" * 64)
        assert await asyncio.gather(*waiting) == [news + 1] * 3


async def test_what_happened_before_one_waits_is_not_missed(runtime: SimulatedCri) -> None:
    async with following(runtime) as made:
        news = await settled(runtime, made)
        runtime.happen("a" * 64)
        await until(lambda: made.news > news, "heard")
        began = time.monotonic()
        assert await made.changed(news, LONG) == news + 1
        assert time.monotonic() - began < LONG / 2
        assert await made.changed(news + 1, 0.05) == news + 1


async def test_a_runtime_without_events_is_asked_time_and_again(runtime: SimulatedCri) -> None:
    runtime.events = False
    async with following(runtime, poll=0.02) as made:
        await until(lambda: runtime.asked.count("ListContainers") > 2, "it asks")
        assert not made.trouble
        news = made.news
        runtime.boxes.append(Box("a" * 64, Sandbox("5a" * 32)))
        assert await made.changed(news, LONG) == news + 1
        runtime.boxes[0].state = cri.CONTAINER_EXITED
        assert await made.changed(news + 1, LONG) == news + 2
        assert not made.trouble


async def test_the_only_queue_of_containerd_1_is_left_to_the_kubelet(runtime: SimulatedCri) -> None:
    runtime.version = "v1.7.33"
    async with following(runtime, poll=0.02) as made:
        await until(lambda: runtime.asked.count("ListContainers") > 2, "it asks")
        assert "GetContainerEvents" not in runtime.asked and not made.trouble


async def test_events_that_stop_without_a_word_are_found_out(runtime: SimulatedCri) -> None:
    async with following(runtime, check=0.02) as made:
        news = await settled(runtime, made)
        runtime.boxes.append(Box("a" * 64, Sandbox("5a" * 32)))
        assert await made.changed(news, LONG) == news + 1


async def test_a_runtime_that_is_started_anew_is_heard_again(runtime: SimulatedCri) -> None:
    async with following(runtime) as made:
        news = await settled(runtime, made)
        await runtime.stop()
        await until(lambda: made.trouble, "told")
        assert made.news > news, "whoever waits hears of the trouble"
        await until(lambda: "UNAVAILABLE" in made.trouble, "told that it is away")
        runtime.boxes.append(Box("a" * 64, Sandbox("5a" * 32)))
        news = made.news
        await runtime.start()
        await until(lambda: not made.trouble and runtime.listeners, "it listens again")
        assert made.news >= news + 2, "what happened meanwhile, and that the trouble is over"
        runtime.happen("a" * 64)
        assert await made.changed(made.news, LONG)


async def test_a_runtime_that_was_never_there_is_told(tmp_path: Path) -> None:
    runtime = SimulatedCri(tmp_path)
    async with following(runtime) as made:
        assert made.trouble == "The container runtime has not been asked yet."
        await until(lambda: "UNAVAILABLE" in made.trouble, "told")


async def test_a_runtime_that_does_not_answer_any_more_is_told(
    runtime: SimulatedCri, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Following(runtime.socket, poll=LONG, check=0.02)
    monkeypatch.setattr(made, "_cri", Cri(runtime.socket, seconds=0.1))
    running = asyncio.ensure_future(made.run())
    await settled(runtime, made)
    runtime.hook = lambda method, request: asyncio.sleep(60)
    await until(lambda: "does not answer ListContainers" in made.trouble, "told")
    runtime.hook = lambda method, request: None
    await settled(runtime, made)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_list_of_any_size_ends_nothing(runtime: SimulatedCri) -> None:
    runtime.boxes.append(Box("a" * 64, Sandbox("5a" * 32), name="n" * (17 * 1024 * 1024)))
    async with following(runtime) as made:
        await until(lambda: "RESOURCE_EXHAUSTED" in made.trouble, "told")
        runtime.boxes.clear()
        await settled(runtime, made)


async def test_events_without_end_do_not_hold_up_what_is_heard(runtime: SimulatedCri) -> None:
    async with following(runtime) as made:
        news = await settled(runtime, made)
        for _ in range(2000):
            runtime.happen("a" * 64)
        await until(lambda: made.news >= news + 2000, "all are heard")
        assert not made.trouble
