"""The simulated model server: its API, its memory, and how soon it is there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.nodeworkers.seats.simulated_gpu.rig import CARDS, MIB, ROOM, SIZE, Rig, rig

ROOT = Path(__file__).parents[4]


@pytest.fixture
async def group() -> AsyncIterator[Rig]:
    async with rig() as made:
        yield made


async def test_speaks_as_model_servers_do(group: Rig) -> None:
    model = await group.model("first")

    def ask(path: str, body: bytes | None = None) -> bytes:
        return model.ask(path, body)

    answer = json.loads(await asyncio.to_thread(ask, "/v1/completions", b'{"max_tokens": 3, "user": "u"}'))
    assert (answer["model"], answer["id"], answer["choices"][0]["text"]) == ("first", "u", "0 1 2")
    events = (await asyncio.to_thread(ask, "/v1/completions", b'{"max_tokens": 2, "stream": true}')).decode()
    told = [each.removeprefix("data: ") for each in events.strip().split("\n\n")]
    assert [json.loads(each)["choices"][0]["text"] for each in told[:2]] == ["0", "1"] and told[2:] == ["[DONE]"]
    assert json.loads(await asyncio.to_thread(ask, "/v1/models"))["data"][0]["id"] == "first"
    assert b"simulated_requests_total 3" in await asyncio.to_thread(ask, "/metrics")
    for path, body in (("/nothing", None), ("/v1/completions", b"["), ("/v1/completions", b"[]")):
        with pytest.raises(urllib.error.HTTPError, match=r"40[04]"):
            await asyncio.to_thread(ask, path, body)


async def test_sleeps_and_wakes(group: Rig) -> None:
    model = await group.model("first")

    async def free() -> int:
        return (await group.helper.memory(CARDS[:1]))[CARDS[0]].free

    await asyncio.to_thread(model.ask, "/sleep?level=1", b"")
    assert (await asyncio.to_thread(model.ask, "/is_sleeping"), await free()) == (b'{"is_sleeping": true}', ROOM)
    foreign = await group.model("foreign:other")
    with pytest.raises(urllib.error.HTTPError, match="500"):
        await asyncio.to_thread(model.ask, "/wake_up", b"")
    foreign.kill()
    await asyncio.to_thread(model.ask, "/wake_up", b"")
    assert (await asyncio.to_thread(model.ask, "/is_sleeping"), await free()) == (
        b'{"is_sleeping": false}',
        ROOM - SIZE,
    )
    group.machine.suffer({"first": ["sleeps-falsely"]})
    await asyncio.to_thread(model.ask, "/sleep", b"")
    assert await free() == ROOM - SIZE
    assert group.verdict().wrong == []


async def test_no_room_is_its_end(group: Rig) -> None:
    await group.model("first")
    with pytest.raises(AssertionError, match="second ended with 1"):
        await group.model("second")
    assert group.verdict().wrong == []


async def test_the_dead_have_no_memory(group: Rig) -> None:
    model = await group.model("first")
    model.kill()
    await group.model("second")
    assert group.verdict().wrong == []


async def test_a_fault_that_is_none_is_refused(group: Rig) -> None:
    with pytest.raises(ValueError, match="explodes: no such fault"):
        group.machine.suffer({"first": ["explodes"]})


async def test_it_is_soon_there(group: Rig) -> None:
    await group.model("warms-caches", size=MIB)
    began = time.monotonic()
    await group.model("foreign:quick", size=MIB)
    took = time.monotonic() - began
    print(f"a server is there after {took:.2f} s")
    assert took < 3, "half a second where nothing else runs"


def test_any_python_runs_it(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import nodeworkers.seats.simulated_gpu.server"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, ROOT], check=True, cwd=tmp_path)


async def test_memory_of_many_pieces_comes_back_whole() -> None:
    async with rig(room=40 * MIB) as group:
        model = await group.model("odd", size=37 * MIB + 5)
        await group.backend.park(model.server(), 1)
        await group.backend.wake(model.server(), 1)
        assert (group.verdict().wrong, group.verdict().restores) == ([], 1)
