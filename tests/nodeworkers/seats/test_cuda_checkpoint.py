"""The backend over a real helper, and servers that are processes on simulated GPUs: every failure of a driver that is
known from the field, and what is told of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeworkers.seats.backend import Process
from nodeworkers.seats.backends.cuda_checkpoint import CudaCheckpoint
from nodeworkers.seats.helper.client import HelperClient, HelperError
from nodeworkers.seats.world import LostError, UnsettledError, UntouchedError
from tests.nodeworkers.seats.simulated_gpu.rig import CARDS, MIB, ROOM, SIZE, Model, Rig, rig


@pytest.fixture
async def group() -> AsyncIterator[Rig]:
    async with rig() as made:
        yield made


def parked(moved_processes: tuple[tuple[int, int], ...]) -> list[Process]:
    return [Process(*each) for each in moved_processes]


async def free(group: Rig, card: str = CARDS[0]) -> int:
    return (await group.helper.memory([card]))[card].free


async def test_two_servers_take_turns(group: Rig) -> None:
    first = await group.model("first")
    held = (await group.helper.memory(CARDS[:1]))[CARDS[0]]
    assert (held.free, held.total, held.holders) == (ROOM - SIZE, ROOM, {first.process.pid: SIZE})
    moved = await group.backend.park(first.server(), 1)
    assert moved.processes == tuple((each.pid, each.started) for each in first.processes)
    assert await free(group) == ROOM
    assert (await group.backend.read(first.server())).held == "Parked"
    second = await group.model("second")
    waiting = asyncio.create_task(first.completes())
    assert await asyncio.to_thread(first.ask, "/health") == b"{}", "what does not touch the GPU goes on"
    await group.backend.park(second.server(), 1)
    assert not waiting.done(), "what touches it waits"
    await group.backend.wake(first.server(parked(moved.processes)), 1)
    await waiting
    assert (await group.backend.read(second.server())).held == "Parked"
    assert (await group.backend.read(first.server())).held == "Running"
    verdict = group.verdict()
    assert (verdict.wrong, verdict.checkpoints, verdict.restores) == ([], 2, 1)


async def test_all_ranks_or_none(group: Rig) -> None:
    model = await group.model("both", "--ranks", cards=CARDS)
    assert len(model.processes) == 2
    moved = await group.backend.park(model.server(), 1)
    assert len(moved.processes) == 2 and [await free(group, card) for card in CARDS] == [ROOM, ROOM]
    group.machine.suffer({"both": ["lock-times-out"]})
    await group.backend.wake(model.server(parked(moved.processes)), 1)
    with pytest.raises(UntouchedError, match="had work on its GPUs"):
        await group.backend.park(model.server(), 1)
    await model.completes()


async def test_one_rank_dies(group: Rig) -> None:
    model = await group.model("both", "--ranks", cards=CARDS)
    processes = parked((await group.backend.park(model.server(), 1)).processes)
    os.kill(processes[1].pid, signal.SIGKILL)
    await group.ended(processes[1].pid)
    with pytest.raises(LostError, match=rf"process {processes[1].pid} (ended while it was parked|was parked, and)"):
        await group.backend.wake(model.server(processes), 1)


async def test_to_another_card(group: Rig) -> None:
    model = await group.model("moves")
    moved = await group.backend.park(model.server(), 1)
    await group.backend.wake(model.server(parked(moved.processes)), 1, {CARDS[0]: CARDS[1]})
    assert [await free(group, card) for card in CARDS] == [ROOM, ROOM - SIZE]
    await model.completes()
    assert group.verdict().wrong == []


async def test_a_restore_without_room_is_the_end_of_it(group: Rig) -> None:
    model = await group.model("first")
    processes = parked((await group.backend.park(model.server(), 1)).processes)
    await group.model("foreign:other")
    for _ in range(2):
        with pytest.raises(LostError, match=f"process {processes[0].pid} could not be restored: CUDA_ERROR_O"):
            await group.backend.wake(model.server(processes), 1)
    assert (await group.backend.read(model.server())).held == "Parked", "for ever"
    assert "restored without room" in group.verdict().wrong[0]


async def test_out_of_memory_by_command_leaves_it_checkpointed_for_ever(group: Rig) -> None:
    model = await group.model("first")
    processes = parked((await group.backend.park(model.server(), 1)).processes)
    group.machine.suffer({"first": ["restore-out-of-memory"]})
    with pytest.raises(LostError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        await group.backend.wake(model.server(processes), 1)
    group.machine.suffer({})
    with pytest.raises(LostError, match="CUDA_ERROR_OPERATING_SYSTEM"):
        await group.backend.wake(model.server(processes), 1)
    assert group.verdict().wrong == [], "it was told to"


async def test_a_lock_that_times_out_leaves_it_running(group: Rig) -> None:
    model = await group.model("first")
    group.machine.suffer({"first": ["lock-times-out"]})
    with pytest.raises(UntouchedError, match="had work on its GPUs for 10 s"):
        await group.backend.park(model.server(), 1)
    await model.completes()
    group.machine.suffer({})
    await group.backend.park(model.server(), 1)


async def test_a_lock_that_kills(group: Rig) -> None:
    model = await group.model("first")
    server = model.server()
    group.machine.suffer({"first": ["lock-kills"]})
    with pytest.raises(LostError, match=r"died while locking|could not be locked"):
        await group.backend.park(server, 1)
    model.process.wait(10)
    assert (await group.backend.read(server)).held == "Gone"
    assert await free(group) == ROOM


async def test_a_checkpoint_that_fails_halfway(group: Rig) -> None:
    model = await group.model("first")
    group.machine.suffer({"first": ["checkpoint-fails"]})
    with pytest.raises(UntouchedError, match="could not be checkpointed: CUDA_ERROR_OUT_OF_MEMORY"):
        await group.backend.park(model.server(), 1)
    await model.completes()
    group.machine.suffer({"first": ["checkpoint-breaks"]})
    with pytest.raises(LostError, match="the driver has given it up"):
        await group.backend.park(model.server(), 1)
    assert (await group.backend.read(model.server())).held == "Failed"


@pytest.mark.parametrize("fault", ["checkpoint-hangs", "restore-hangs"])
async def test_a_call_that_hangs_is_left_to_itself(group: Rig, fault: str) -> None:
    model = await group.model("first")
    impatient = CudaCheckpoint(HelperClient(group.socket, f"simulated:{group.machine.folder}", phase=0.2))

    async def ask() -> None:
        if fault == "checkpoint-hangs":
            await impatient.park(model.server(), 1)
        else:
            await impatient.wake(model.server(), 1)

    if fault == "restore-hangs":
        await group.backend.park(model.server(), 1)
    group.machine.suffer({"first": [fault]})
    for _ in range(2):  # the second one hears of the first one's end
        with pytest.raises(UnsettledError, match="has not answered"):
            await ask()
    assert (await group.backend.read(model.server())).held == "Changing"
    group.machine.suffer({})
    await group.reads(model, "Parked" if fault == "checkpoint-hangs" else "Running")
    await ask()
    assert [group.verdict().checkpoints, group.verdict().restores] == [1, fault == "restore-hangs"], "once each"


async def test_a_helper_that_is_killed_amid_a_call(group: Rig) -> None:
    model = await group.model("first")
    group.machine.suffer({"first": ["checkpoint-hangs"]})
    parking = asyncio.create_task(group.backend.park(model.server(), 3))
    await group.driver_tells(model, "CHECKPOINTING")
    pid = (await group.helper.hello()).pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnsettledError, match="went away amid park"):
        await parking
    assert (await group.backend.read(model.server())).held == "Changing", "the next helper asks the driver"
    assert (await group.helper.hello()).pid != pid
    with pytest.raises(UnsettledError, match="is CHECKPOINTING after parking"):
        await group.backend.park(model.server(), 3)
    with pytest.raises(UntouchedError, match="the epoch 2 ended when 3 began"):
        await group.backend.wake(model.server(), 2)
    group.machine.suffer({})
    await group.reads(model, "Parked")
    await group.backend.park(model.server(), 3)
    await group.backend.wake(model.server(), 3)
    await model.completes()
    assert group.verdict().wrong == []


async def test_one_that_dies_while_parked(group: Rig) -> None:
    model = await group.model("first")
    server = model.server()
    processes = parked((await group.backend.park(server, 1)).processes)
    model.kill()
    assert (await group.backend.read(server)).held == "Gone"
    with pytest.raises(LostError, match="ended while it was parked"):
        await group.backend.wake(server.__class__("first", CARDS, (), processes), 1)


async def test_a_foreign_process_is_seen(group: Rig) -> None:
    foreign = await group.model("foreign:other", size=MIB)
    model = await group.model("first")
    await group.backend.park(model.server(), 1)
    told = (await group.helper.memory(CARDS))[CARDS[0]]
    assert (told.free, told.holders) == (ROOM - MIB, {foreign.process.pid: MIB})
    await group.backend.wake(model.server(), 1)
    assert group.verdict().wrong == []


async def test_a_server_that_never_drains_is_not_parked_halfway(group: Rig) -> None:
    model = await group.model("first", "--token", "0.01")
    requests = asyncio.create_task(model.completes(100))
    moved = await group.backend.park(model.server(), 1)
    assert moved.seconds["lock"] < 2, "a driver waits for calls, and not for requests"
    assert not requests.done()
    await group.backend.wake(model.server(), 1)
    await requests


async def test_an_engines_watchdog_ends_it_when_it_is_parked_amid_a_step(group: Rig) -> None:
    model = await group.model("first", "--watchdog", "0.5", "--token", "0.01")
    server = model.server()
    requests = asyncio.create_task(model.completes(100))
    await asyncio.to_thread(model.ask, "/metrics")
    await group.backend.park(server, 1)
    assert await asyncio.to_thread(model.process.wait, 10) == 1
    assert (await group.backend.read(server)).held == "Gone"
    await asyncio.gather(requests, return_exceptions=True)


async def test_other_memory_than_it_had_is_seen(group: Rig) -> None:
    model = await group.model("first")
    group.machine.suffer({"first": ["corrupts"]})
    await group.backend.park(model.server(), 1)
    await group.backend.wake(model.server(), 1)
    assert "got other memory back" in group.verdict().wrong[0]


async def test_a_driver_that_cannot_be_had_is_told_at_once(group: Rig) -> None:
    client = HelperClient(group.socket.with_name("other.sock"), "nonsense")
    began = time.monotonic()
    with pytest.raises(HelperError, match=r"does not answer: .*There is no driver 'nonsense'"):
        await client.hello()
    assert time.monotonic() - began < 10


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_two_hundred_switches_leak_nothing() -> None:
    async with rig(room=3 * MIB) as group:
        models = [await group.model("first", size=2 * MIB)]
        await group.backend.park(models[0].server(), 1)
        models.append(await group.model("second", size=2 * MIB))
        helper = (await group.helper.hello()).pid

        async def switch(leaves: Model, comes: Model) -> float:
            out, back = leaves.server(), comes.server()
            began = time.monotonic()
            await group.backend.park(out, 1)
            await group.backend.wake(back, 1)
            return time.monotonic() - began

        async def both() -> list[float]:
            return [await switch(models[1], models[0]), await switch(models[0], models[1])]

        for _ in range(10):
            await both()
        pids = [helper, *(each.process.pid for each in models)]
        before = [(fds(pid), memory(pid)) for pid in pids]
        took = sorted([each for _ in range(90) for each in await both()])
        for pid, (open_files, held) in zip(pids, before, strict=True):
            assert fds(pid) <= open_files + 3
            assert memory(pid) <= held + 4 * MIB
        print(f"a switch of {2} MiB: median {took[90] * 1000:.1f} ms, p99 {took[178] * 1000:.1f} ms")
        for model in models[1:]:
            await model.completes()
        verdict = group.verdict()
        assert (verdict.wrong, verdict.restores) == ([], 200)
