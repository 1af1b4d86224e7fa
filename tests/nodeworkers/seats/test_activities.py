"""The activity of a group's switching, as a worker runs them: one at a time of a group, for the newest run only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from nodeworkers.ledger import Ledger
from nodeworkers.seats import activities
from nodeworkers.seats.activities import Switches
from nodeworkers.seats.slots import Slots
from nodeworkers.seats.world import SeatLook
from planning.seats.orders import SUPERSEDED_RUN, GroupTask, Turned
from tests.nodeworkers.seats.simulated_world import GROUP, SimulatedWorld

A, B = "kyb-G01-s1", "kyb-G01-s2"


def task(run: str = "r1", group: str = GROUP) -> GroupTask:
    return GroupTask("n", group, run)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimulatedWorld]:
    ledger = Ledger(tmp_path / "berth")
    yield SimulatedWorld(Slots(ledger))
    ledger.close()


async def test_a_switch(world: SimulatedWorld) -> None:
    switches = Switches(world.slots, world)
    world.add(A, "Running")
    world.add(B, "Parked")
    world.wanted = B
    turned: Turned = await ActivityEnvironment().run(switches.turn, task())
    assert (turned.active, turned.switched) == (B, True) and world.violations == []
    assert {"drain", "park", "verify free", "wake"} <= turned.seconds.keys(), "both halves' stages"
    again: Turned = await ActivityEnvironment().run(switches.turn, task())
    assert (again.active, again.switched) == (B, False), "it has the slot already"


async def test_a_run_that_another_followed_is_refused(world: SimulatedWorld) -> None:
    switches = Switches(world.slots, world)
    await ActivityEnvironment().run(switches.turn, task("r1"))
    await ActivityEnvironment().run(switches.turn, task("r2"))
    with pytest.raises(ApplicationError, match="r1 of its workflow was followed by r2") as refused:
        await ActivityEnvironment().run(switches.turn, task("r1"))
    assert refused.value.type == SUPERSEDED_RUN and refused.value.non_retryable


async def test_what_a_node_does_is_told_and_groups_wait_for_nobody_but_themselves(
    world: SimulatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activities, "BEAT", 0.01)
    held, seen = asyncio.Event(), list[str]()
    look = world.look

    async def slow(group: str) -> Mapping[str, SeatLook] | None:
        seen.append(group)
        if group == GROUP:
            await held.wait()
        return await look(group)

    monkeypatch.setattr(world, "look", slow)
    switches = Switches(world.slots, world)
    told = list[str]()
    environments = [ActivityEnvironment() for _ in range(3)]
    environments[1].on_heartbeat = lambda *details: told.extend(map(str, details))
    tasks = [asyncio.create_task(each.run(switches.turn, task())) for each in environments[:2]]
    async with asyncio.timeout(10):
        while not seen:
            await asyncio.sleep(0.005)
    other = await environments[2].run(switches.turn, task(group="G23"))
    assert other.phase == "Empty" and not any(each.done() for each in tasks) and seen == [GROUP, "G23"]
    async with asyncio.timeout(10):
        while not told:
            await asyncio.sleep(0.005)
    assert "waiting for what this node does to the group already" in told
    held.set()
    await asyncio.gather(*tasks)
    assert seen.count(GROUP) == 2
