"""Servers of one group that are parked each in another way take turns, on real processes and simulated GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from planning.seats.group import Policy
from planning.seats.parking import TRIES, Way
from tests.nodeworkers.seats.simulated_node import GROUP, SimulatedNode, seat, simulated_node

EAGER = Policy(lost=0.9)
SLEEP: Way = "engine-sleep"
BOTH: Way = "engine-sleep+cuda-checkpoint"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[SimulatedNode]:
    async with simulated_node(tmp_path, EAGER) as made:
        yield made
    assert not made.verdict().wrong


async def asked(node: SimulatedNode, number: int) -> None:
    """A request of this seat is answered by its own server, however many turns that takes."""
    request = asyncio.create_task(node.ask(number, seconds=40))
    async with asyncio.timeout(40):
        while not request.done():
            await node.switch()
            await asyncio.sleep(0.02)
    status, said = await request
    assert (status, said["model"]) == (200, seat(number))


async def state(node: SimulatedNode, number: int) -> str:
    looks = await node.world.look(GROUP)
    assert looks is not None
    return looks[seat(number)].state


async def test_each_is_woken_the_way_it_was_parked(node: SimulatedNode) -> None:
    node.add(1)
    node.add(2, park=SLEEP, engine="vllm")
    node.add(3, park=BOTH, engine="vllm")
    for number in (1, 2, 3, 1, 3, 2, 1):
        await asked(node, number)
    assert [await state(node, number) for number in (1, 2, 3)] == ["Running", "Parked", "Parked"]
    ways = [node.records.of(seat(number)).known.way for number in (1, 2, 3)]
    assert ways == ["cuda-checkpoint", SLEEP, BOTH]
    assert [pod.restarts for pod in node.pods.values() if pod is not None] == [0, 0, 0]


async def test_one_that_is_parked_cold_starts_anew_when_it_is_asked_and_not_before(node: SimulatedNode) -> None:
    node.add(1, park="cold")
    node.add(2)
    await asked(node, 1)
    await asked(node, 2)
    assert await state(node, 1) == "Waiting" and node.records.of(seat(1)).known.ended
    async with asyncio.timeout(10):
        while seat(1) not in node.gate.waiting(GROUP):
            await asyncio.sleep(0.01)
    assert await node.switch() == seat(2)
    facts = node.world.facts(GROUP, None, simulated=True)
    assert facts is not None and facts.phases[seat(1)] == "Lost", "its container wants to start, and nobody asks for it"
    await asked(node, 1)
    pod = node.pods[seat(1)]
    assert pod is not None and pod.restarts == 1 and not node.records.of(seat(1)).known.ended


async def test_a_sleep_that_frees_nothing_is_tried_thrice_and_then_the_next_way_taken(node: SimulatedNode) -> None:
    node.add(1, park=SLEEP, engine="vllm")
    node.add(2)
    await asked(node, 1)
    node.machine.suffer({seat(1): ["sleeps-falsely"]})
    await asked(node, 2)
    known = node.records.of(seat(1)).known
    assert known.way == "cuda-checkpoint" and known.parkable, "what its pod did not ask for, where that does not do"
    assert "frees nothing" in known.failed[SLEEP] and TRIES == 3
    await asked(node, 1)


async def test_without_a_driver_that_can_checkpoint_a_server_is_put_to_sleep_or_ended(node: SimulatedNode) -> None:
    node.missing = ["Driver 550.54.14 can only toggle a process."]
    node.add(1, engine="vllm")
    node.add(2)
    await asked(node, 1)
    await asked(node, 2)
    await asked(node, 1)
    assert [node.records.of(seat(number)).known.way for number in (1, 2)] == [SLEEP, "cold"]


async def test_what_was_parked_one_way_is_woken_the_same_whatever_is_said_meanwhile(node: SimulatedNode) -> None:
    node.add(1)
    node.add(2)
    await asked(node, 1)
    await asked(node, 2)
    node.missing = ["Driver 550.54.14 can only toggle a process."]
    await asked(node, 1)
    pod = node.pods[seat(1)]
    assert pod is not None and pod.restarts == 0


async def test_a_server_that_dies_in_its_sleep_starts_cold(node: SimulatedNode) -> None:
    node.add(1, park=SLEEP, engine="vllm")
    node.add(2)
    await asked(node, 1)
    await asked(node, 2)
    pod = node.pods[seat(1)]
    assert pod is not None and pod.process is not None
    pod.process.kill()
    pod.process.wait()
    await asked(node, 1)
    assert pod.restarts == 1


async def test_one_that_is_half_asleep_goes_on_from_there(node: SimulatedNode) -> None:
    """The node's process died between the engine's sleep and the driver's checkpoint."""
    node.add(1, park=BOTH, engine="vllm")
    node.add(2)
    await asked(node, 1)
    await asked(node, 2)
    await asked(node, 1)
    pod = node.pods[seat(1)]
    assert pod is not None
    async with node.session.post(f"http://127.0.0.1:{pod.port}/sleep") as slept:
        assert slept.status == 200
    assert await state(node, 1) == "Locked"
    await asked(node, 1)
    await asked(node, 2)
    assert await state(node, 1) == "Parked"


async def test_who_asks_for_what_cannot_be_had_is_told(node: SimulatedNode) -> None:
    node.add(1, park=SLEEP)
    node.add(2, park="freezer")
    await node.world.look(GROUP)
    facts = node.world.facts(GROUP, None, simulated=True)
    assert facts is not None and facts.backends[seat(1)] == "cuda-checkpoint"
    assert "instead of engine-sleep. Its pod does not say which engine serves" in facts.notes[seat(1)]
    assert "kyb.ai/park: 'freezer' is no way to park" in facts.notes[seat(2)]
