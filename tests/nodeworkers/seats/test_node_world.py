"""Seats are switched on real parts: processes with memory on simulated GPUs, the helper, the proxy; and an independent
witness reads the GPUs' own log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from planning.seats.group import Policy
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
