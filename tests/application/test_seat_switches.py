"""A group's workflow switches seats by a real Temporal, on a simulated node: every request is answered once, and what
switching takes beyond the backend's own time stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from berth.node_seats import SeatNews
from berth.process import ProcessOptions, connect_temporal
from nodeworkers.seats.activities import Switches
from nodeworkers.seats.attention import Attention
from planning.seats.group import Policy
from planning.seats.orders import group_id, seat_queue
from stack import Stack
from tests.nodeworkers.seats.simulated_node import GROUP, PATIENCE, SimulatedNode, seat, simulated_node

SWITCHES = 200
OVERHEAD = 0.1  # seconds, p99
EAGER = Policy(lost=0.9)
NODE = "seat-switches"


@dataclass
class Switching:
    """What was seen: of each switch the seconds from when it was asked for, less what the backend took."""

    node: SimulatedNode
    temporal: Client
    overheads: list[float] = field(default_factory=list)


@asynccontextmanager
async def switching(folder: Path, stack: Stack) -> AsyncIterator[Switching]:
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
        worker = Worker(temporal, task_queue=seat_queue(NODE), activities=[switches.clear, switches.fill])
        async with worker:
            tasks = [asyncio.create_task(each.run()) for each in (news, attention)]
            try:
                yield Switching(node, temporal)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                with contextlib.suppress(Exception):
                    await temporal.get_workflow_handle(group_id(NODE, GROUP)).terminate("the test is over")


async def test_two_hundred_switches_lose_no_request(deployed: Stack, tmp_path: Path) -> None:
    async with switching(tmp_path, deployed) as seen:
        node = seen.node
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
        began = time.monotonic()
        async with asyncio.timeout(240):
            while node.slots.slot(GROUP).switches < SWITCHES:
                await asyncio.wait(clients, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                assert not any(task.done() for task in clients), [t for t in clients if t.done()]
        print(f"{time.monotonic() - began:.1f} s for {node.slots.slot(GROUP).switches} switches, answered {answered}")
        over.set()
        await asyncio.gather(*clients)
        assert all(each.running and not each.restarts for each in node.pods.values() if each is not None)
        verdict = node.verdict()
        assert not verdict.wrong
        assert verdict.restores >= 2 * (SWITCHES - 5)
