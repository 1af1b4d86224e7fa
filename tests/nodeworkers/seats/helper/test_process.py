"""The helper as a process: one for a socket, for its owner only, outliving who began it, and ending between calls."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeworkers.seats.helper.client import HelperClient, HelperError
from tests.nodeworkers.seats.simulated_gpu.rig import CARDS, Rig, rig


@pytest.fixture
async def group() -> AsyncIterator[Rig]:
    async with rig() as made:
        yield made


async def test_is_begun_once_and_knows_its_gpus(group: Rig) -> None:
    others = [HelperClient(group.socket, f"simulated:{group.machine.folder}") for _ in range(4)]
    told = await asyncio.gather(*(each.hello() for each in [group.helper, *others]))
    assert len({each.pid for each in told}) == 1
    assert (told[0].version, tuple(told[0].devices)) == ("simulated", CARDS)
    assert stat.S_IMODE(group.socket.stat().st_mode) == 0o600
    assert os.getsid(told[0].pid) != os.getsid(0), "a signal to who began it does not reach it"
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert str(told[0].pid) not in (await asyncio.to_thread(children.read_text)).split(), "nor is it its child"


async def test_a_second_one_ends_at_once(group: Rig) -> None:
    pid = (await group.helper.hello()).pid
    command = [sys.executable, "-m", "nodeworkers.seats.helper", "--socket", str(group.socket), "--driver", "nonsense"]
    second = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await second.communicate()
    assert second.returncode == 1 and b"Another helper serves" in said
    assert (await group.helper.hello()).pid == pid


async def test_it_begins_anew_where_one_was_killed(group: Rig) -> None:
    pid = (await group.helper.hello()).pid
    os.kill(pid, signal.SIGKILL)
    await group.ended(pid)
    assert group.socket.exists(), "nobody removed it"
    assert (await group.helper.hello()).pid != pid


async def test_one_whose_socket_is_gone_ends_and_makes_room_for_another(group: Rig) -> None:
    pid = (await group.helper.hello()).pid
    group.socket.unlink()
    again = await group.helper.hello()
    assert again.pid != pid
    await group.ended(pid)
    assert group.socket.exists(), "it leaves the other's alone"


async def test_it_ends_when_what_is_under_way_has_ended(group: Rig) -> None:
    model = await group.model("first")
    group.machine.suffer({"first": ["checkpoint-hangs"]})
    parking = asyncio.create_task(group.backend.park(model.server(), 1))
    await group.driver_tells(model, "CHECKPOINTING")
    pid = (await group.helper.hello()).pid
    os.kill(pid, signal.SIGTERM)
    done, _ = await asyncio.wait([parking], timeout=0.3)
    assert not done and (await group.helper.hello()).pid == pid
    group.machine.suffer({})
    await group.ended(pid)
    await asyncio.gather(parking, return_exceptions=True)
    assert (await group.backend.read(model.server())).held == "Parked"
    assert (await group.helper.hello()).pid != pid


async def test_reading_and_measuring_take_a_few_milliseconds(group: Rig) -> None:
    model = await group.model("first")
    server, loop = model.server(), asyncio.get_running_loop()
    await group.backend.read(server)
    took = []
    for _ in range(50):
        began = loop.time()
        await group.backend.read(server)
        await group.helper.memory(CARDS)
        took.append(loop.time() - began)
    print(f"read and memory: {sorted(took)[25] * 1000:.1f} ms")
    assert sorted(took)[25] < 0.1


async def test_a_socket_that_cannot_be_is_told(group: Rig) -> None:
    client = HelperClient(group.socket.with_name("x" * 120), f"simulated:{group.machine.folder}")
    with pytest.raises(HelperError, match="Nobody can be served on"):
        await client.hello()
