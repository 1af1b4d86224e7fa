"""Seats are switched on real parts: processes with memory on simulated GPUs, the helper, the proxy; and an independent
witness reads the GPUs' own log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeworkers.seats import node_world
from nodeworkers.seats.records import SeatRecords
from nodeworkers.seats.reporting import picture
from planning.seats.choosing import choose
from planning.seats.group import Choice, GroupView, Phase, Policy
from tests.nodeworkers.seats.simulated_node import SimulatedNode, seat, simulated_node

EAGER = Policy(lost=0.9)  # whoever waits gets the slot at once, nearly


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[SimulatedNode]:
    async with simulated_node(tmp_path, EAGER) as made:
        yield made
    assert not made.verdict().wrong


async def until_active(node: SimulatedNode, number: int, run: str = "run") -> None:
    """Turns of the workflow, until this seat has the slot."""
    async with asyncio.timeout(30):
        while await node.switch(run) != seat(number):
            await asyncio.sleep(0.02)


async def test_three_servers_share_a_group_and_whoever_is_asked_is_woken(node: SimulatedNode) -> None:
    for number in (1, 2, 3):
        node.add(number)
    for number in (1, 2, 3):
        asking = asyncio.create_task(node.ask(number))
        await until_active(node, number)
        assert (await asking) == (
            200,
            {"model": seat(number), "id": f"u{number}", "choices": [{"index": 0, "text": "0"}]},
        )
    for number in (1, 3, 2, 1):
        asking = asyncio.create_task(node.ask(number))
        await until_active(node, number)
        assert (await asking)[0] == 200
    assert [pod.restarts for pod in node.pods.values() if pod is not None] == [0, 0, 0]
    verdict = node.verdict()
    assert verdict.restores == 2 * 4 and len(verdict.servers) == 3


async def test_requests_of_a_seat_that_moves_go_to_the_other_and_back(node: SimulatedNode) -> None:
    for number in (1, 2):
        node.add(number, drain_seconds="0.2")
        asking = asyncio.create_task(node.ask(number))
        await until_active(node, number)
        await asking
    there = f"127.0.0.1:{node.records.of(seat(2)).port}"
    assert await node.world.pass_on(seat(1), "another pod", there) == (
        f"the pod that is to move does not have {seat(1)} (any more)"
    )
    assert await node.world.pass_on(seat(1), "uid-1", there) == ""
    status, told = await node.ask(1)
    assert (status, told["model"], told["id"]) == (200, seat(2), "u1"), "whoever serves now answers in its stead"
    facts = node.world.facts("G01", None, simulated=True)
    assert facts is not None and picture(facts).seats[0].passed_on == there
    # It asks for the slot no more, whatever goes through its door; and that outlives the process.
    assert (await node.world.choose("G01", seat(2))).seat == ""
    assert SeatRecords(node.ledger).held_by(seat(1), "uid-1").known.passed_on == there
    assert await node.world.pass_on(seat(1), "uid-1", "") == ""
    asking = asyncio.create_task(node.ask(1))
    await until_active(node, 1)
    assert (await asking)[1]["model"] == seat(1)
    # After a restart nobody knows at first whose the seat is: it is taken back all the same, for the record stays.
    await node.world.pass_on(seat(1), "uid-1", there)
    pod = node.pods[seat(1)]
    assert pod is not None
    pod.uid = ""
    await node.world.look("G01")
    assert "does not have" in await node.world.pass_on(seat(1), "uid-1", there)
    assert await node.world.pass_on(seat(1), "uid-1", "") == ""
    assert node.records.of(seat(1)).known.passed_on == ""
    pod.uid = "uid-1"
    # Another pod that gets the seat is asked itself.
    await node.world.pass_on(seat(1), "uid-1", there)
    assert node.records.held_by(seat(1), "uid-9").known.passed_on == ""


async def test_a_server_with_requests_that_do_not_end_keeps_them_all(node: SimulatedNode) -> None:
    node.add(1, "--token", "0.05", drain_seconds="0.2")
    first = asyncio.create_task(node.ask(1, tokens=1))
    await until_active(node, 1)
    await first
    long = asyncio.create_task(node.ask(1, tokens=60))
    async with asyncio.timeout(10):
        while (await node.control.state())[seat(1)].traffic.in_flight == 0:
            await asyncio.sleep(0.01)
    why = await node.world.pass_on(seat(1), "uid-1", "127.0.0.1:9")
    assert why == "1 request is still in flight after 0 s (kyb.ai/drain-seconds)"
    assert (await node.ask(1))[0] == 200, "it is asked as before"
    assert (await long)[0] == 200


async def test_a_seat_whose_requests_go_elsewhere_keeps_the_slot_from_nobody(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 1):
        node.add(number)
        asking = asyncio.create_task(node.ask(number))
        await until_active(node, number)
        await asking
    assert await node.world.pass_on(seat(1), "uid-1", f"127.0.0.1:{node.records.of(seat(2)).port}") == ""
    asking = asyncio.create_task(node.ask(1))
    async with asyncio.timeout(10):
        while (await node.control.state())[seat(1)].traffic.in_flight == 0:
            await asyncio.sleep(0.01)
    views = list[GroupView]()

    def seen(view: GroupView, now: float) -> Choice:
        views.append(view)
        return choose(view, now)

    monkeypatch.setattr(node_world, "choose", seen)
    await node.world.choose("G01", seat(1))
    (mine,) = [each for each in views[0].seats if each.seat == seat(1)]
    assert (mine.phase, mine.running, mine.held, mine.idle) == (Phase.ACTIVE, 0, 0, mine.resident)
    await until_active(node, 2)
    assert (await asking)[1]["model"] == seat(2)
