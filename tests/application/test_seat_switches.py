"""A group's workflow switches seats two hundred times by a real Temporal, on a simulated node: every request is
answered once, by whom it was meant for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.worker import Worker

from berth.node_seats import SeatNews
from berth.process import ProcessOptions, connect_temporal
from nodeworkers.seats.activities import Switches
from nodeworkers.seats.attention import Attention
from planning.seats.group import Policy
from planning.seats.orders import group_id, seat_queue
from stack import Stack
from tests.nodeworkers.seats.simulated_node import GROUP, PATIENCE, SimulatedNode, seat, simulated_node

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

SWITCHES = 200
EAGER = Policy(lost=0.9)
NODE = "seat-switches"


@asynccontextmanager
async def switching(folder: Path, stack: Stack) -> AsyncIterator[SimulatedNode]:
    """A simulated node whose group is switched by the stack's Temporal."""
    endpoints = stack.endpoints
    temporal = await connect_temporal(
        ProcessOptions(temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace),
        lazy=False,
    )
    async with simulated_node(folder, EAGER) as node:
        news = SeatNews(NODE, lambda: temporal, lambda: [GROUP])
        attention = Attention(GROUP, node.world, node.slots, news.poke)
        node.touched = lambda: attention.touch(requests=True)
        switches = Switches(node.slots, node.world, PATIENCE)
        worker = Worker(temporal, task_queue=seat_queue(NODE), activities=[switches.turn])
        async with worker:
            tasks = [asyncio.create_task(each.run()) for each in (news, attention)]
            try:
                yield node
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                workflow = temporal.get_workflow_handle(group_id(NODE, GROUP))
                await workflow.signal("dismiss")
                await workflow.result()


async def test_two_hundred_switches_lose_no_request(deployed: Stack, tmp_path: Path) -> None:
    async with switching(tmp_path, deployed) as node:
        for number in (1, 2, 3):
            node.add(number)
        answered = [0, 0, 0]
        over = asyncio.Event()

        async def client(number: int) -> None:
            while not over.is_set():
                status, said = await node.ask(number, seconds=60)
                assert (status, said["model"]) == (200, seat(number))
                answered[number - 1] += 1

        clients = [asyncio.create_task(client(number)) for number in (1, 2, 3)]
        async with asyncio.timeout(240):
            while node.slots.slot(GROUP).switches < SWITCHES:
                await asyncio.wait(clients, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                assert not any(task.done() for task in clients), [t for t in clients if t.done()]
        over.set()
        await asyncio.gather(*clients)
        assert all(each.running and not each.restarts for each in node.pods.values() if each is not None)
        verdict = node.verdict()
        assert not verdict.wrong
        assert verdict.restores >= 2 * (SWITCHES - 5)
