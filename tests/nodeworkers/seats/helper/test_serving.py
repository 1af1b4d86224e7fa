"""The helper's socket: epochs, hostile frames, clients that go away, and one thing at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nodeworkers.seats.backend import Process
from nodeworkers.seats.helper.client import HelperClient, HelperError
from nodeworkers.seats.helper.driver import CHECKPOINTED, FAILED, RUNNING, CardMemory, DriverError
from nodeworkers.seats.helper.frames import HEAD, MOST, packed
from nodeworkers.seats.helper.serving import MOST_TALKING, Helper
from nodeworkers.seats.processes import started
from nodeworkers.seats.world import UnsettledError
from tests.nodeworkers.seats.helper.scripted_driver import ScriptedDriver

ME = Process(os.getpid(), started(os.getpid()) or 0)
KEY = f"{ME.pid}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("helper.sock")  # socket paths are short


@pytest.fixture
def driver() -> Iterator[ScriptedDriver]:
    made = ScriptedDriver({ME.pid: RUNNING})
    yield made
    made.go_on.set()


@pytest.fixture
async def client(place: Path, driver: ScriptedDriver) -> AsyncIterator[HelperClient]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(MOST_TALKING)
        serving = threading.Thread(target=Helper(driver, place).serve, args=(listener,), daemon=True)
        serving.start()
        yield HelperClient(place, "none:", phase=20.0)
        listener.shutdown(socket.SHUT_RDWR)
        serving.join(10)


def speak(place: Path, *sent: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as spoken:
        spoken.settimeout(10)
        spoken.connect(str(place))
        for each in sent:
            spoken.sendall(each)
        spoken.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while more := spoken.recv(65536):
                answer += more
        except ConnectionResetError:
            pass
        return answer


async def until(true: threading.Event) -> None:
    assert await asyncio.to_thread(true.wait, 10)


async def test_reads_and_measures(client: HelperClient) -> None:
    assert (await client.read([ME])).held == "Running"
    assert (await client.read([Process(ME.pid, ME.started + 1)])).held == "Gone", "another process has its pid"
    assert await client.memory(["GPU-a"]) == {"GPU-a": CardMemory(3, 10, {7: 7})}


async def test_parks_and_wakes(client: HelperClient, driver: ScriptedDriver) -> None:
    parked = await client.park([ME], 1)
    assert (parked.outcome, parked.processes) == ("done", (ME,))
    assert parked.seconds.keys() == {"lock", "checkpoint"}
    assert (await client.read([ME])).held == "Parked"
    assert (await client.wake([ME], [ME], 1, {})).outcome == "done"
    assert driver.states[ME.pid] == RUNNING


async def test_an_older_epoch_is_refused_before_the_driver_is_touched(
    client: HelperClient, driver: ScriptedDriver, place: Path
) -> None:
    await client.park([ME], 7)
    driver.calls.clear()
    with pytest.raises(HelperError, match="the epoch 6 ended when 7 began"):
        await client.wake([ME], [ME], 6, {})
    assert not driver.calls
    assert place.with_suffix(".epoch").read_text() == "7"
    again = Helper(driver, place)
    answer = again._answer({"op": "wake", "processes": [], "parked": [], "devices": {}, "epoch": 6})
    assert answer["code"] == "stale", "the helper that comes after it knows as well"


async def test_an_epoch_that_cannot_be_written_down_changes_nothing(
    client: HelperClient, driver: ScriptedDriver, place: Path
) -> None:
    place.with_suffix(".epoch").mkdir()
    with pytest.raises(HelperError, match="the epoch cannot be written down"):
        await client.park([ME], 7)
    assert not driver.calls
    place.with_suffix(".epoch").rmdir()
    assert (await client.park([ME], 7)).outcome == "done"


async def test_what_a_client_left_goes_on_and_who_asks_next_hears_how_it_ends(
    client: HelperClient, driver: ScriptedDriver, place: Path
) -> None:
    driver.held_up = f"checkpoint {KEY}"
    left = asyncio.create_task(client.park([ME], 1))
    await until(driver.began)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    reading = await client.read([ME])
    assert reading.held == "Changing" and reading.told.startswith("parking for")
    with pytest.raises(UnsettledError, match="parking for 0 s already"):
        await client.wake([ME], [ME], 1, {})
    joined = asyncio.create_task(client.park([ME], 2))
    async with asyncio.timeout(10):
        while not joined.done() and place.with_suffix(".epoch").read_text() != "2":
            await asyncio.sleep(0.01)
    driver.go_on.set()
    result = await joined
    assert result.outcome == "done" and result.seconds.keys() == {"lock", "checkpoint"}
    assert driver.calls == [f"lock {KEY}", f"checkpoint {KEY}"], "each was made once"


async def test_how_it_ended_is_kept_for_who_asks_next(client: HelperClient, driver: ScriptedDriver) -> None:
    driver.held_up = f"checkpoint {KEY}"
    driver.fails[driver.held_up] = (FAILED, DriverError("CUDA_ERROR_UNKNOWN"))
    impatient = HelperClient(client._socket, "none:", phase=0.2)
    with pytest.raises(UnsettledError, match="has not answered park for 0 s"):
        await impatient.park([ME], 1)
    driver.go_on.set()
    async with asyncio.timeout(10):
        while (await client.read([ME])).held == "Changing":
            await asyncio.sleep(0.01)
    result = await client.park([ME], 1)
    assert result.outcome == "lost" and "could not be checkpointed: CUDA_ERROR_UNKNOWN" in result.told


async def test_a_mistake_amid_a_phase_is_no_refusal(client: HelperClient, driver: ScriptedDriver) -> None:
    driver.fails[f"checkpoint {KEY}"] = (FAILED, KeyError("a mistake"))  # type: ignore[assignment]
    with pytest.raises(UnsettledError, match="the helper failed amid parking: KeyError"):
        await client.park([ME], 1)
    assert (await client.read([ME])).held == "Failed"


async def test_ending_waits_for_what_goes_on(client: HelperClient, driver: ScriptedDriver, place: Path) -> None:
    helper = Helper(driver, place)
    driver.held_up = f"lock {KEY}"
    asked = {"op": "park", "processes": [[ME.pid, ME.started]], "epoch": 1}
    phase = asyncio.create_task(asyncio.to_thread(helper._answer, asked))
    await until(driver.began)
    ending = asyncio.create_task(asyncio.to_thread(helper.end))
    done, _ = await asyncio.wait([ending], timeout=0.3)
    assert not done
    driver.go_on.set()
    await ending
    assert (await phase)["outcome"] == "done"
    assert driver.states[ME.pid] == CHECKPOINTED
    assert helper._answer(asked)["code"] == "ending"


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MOST + 1).to_bytes(HEAD, "big"),
        b"\xff" * 100,
        b"\0\0\0\2[]",
        b"\0\0\0\7{}",
        b"\0\1\0\0" + b"[" * 65536,
    ],
)
async def test_who_sends_no_frames_is_sent_away(client: HelperClient, place: Path, junk: bytes) -> None:
    assert await asyncio.to_thread(speak, place, junk) == b""
    assert (await client.read([ME])).held == "Running"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"op": None},
        {"op": ["park"]},
        {"op": "\ud800"},
        {"op": "destroy"},
        {"op": "read"},
        {"op": "read", "processes": 7},
        {"op": "read", "processes": [[1]]},
        {"op": "read", "processes": [["1", "2"]]},
        {"op": "read", "processes": [[-1, 0]]},
        {"op": "memory", "cards": None},
        {"op": "park", "processes": [], "epoch": "9"},
        {"op": "park", "processes": [], "epoch": True},
        {"op": "park", "processes": []},
        {"op": "wake", "processes": [], "parked": [], "epoch": 1, "devices": []},
    ],
)
async def test_what_makes_no_sense_is_answered(
    client: HelperClient, place: Path, driver: ScriptedDriver, asked: dict[str, object]
) -> None:
    answer = await asyncio.to_thread(speak, place, packed(asked))
    assert b'"ok": false' in answer and b'"code": "bad"' in answer
    assert not driver.calls
    assert (await client.read([Process(2**70, 0), ME])).held == "Running"


async def test_those_who_say_nothing_keep_nobody_out_for_long(client: HelperClient, place: Path) -> None:
    silent = []
    for _ in range(MOST_TALKING):
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].connect(str(place))
    try:
        with pytest.raises(HelperError):
            await client.read([ME])
    finally:
        for each in silent:
            each.close()
    async with asyncio.timeout(10):
        while True:
            try:
                assert (await client.read([ME])).held == "Running"
                return
            except HelperError:
                await asyncio.sleep(0.01)
