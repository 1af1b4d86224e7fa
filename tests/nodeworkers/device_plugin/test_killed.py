"""Either side is killed time and again while containers are admitted: the kubelet advertises all devices soon after."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.devices.holdings import PodResourcesError
from tests.nodeworkers.device_plugin import plugin_process, small_kubelet

ROUNDS = 20
LOST_SECONDS = 5.0  # what nobody may lose capacity for once both sides are up
_PROCESSES = multiprocessing.get_context("forkserver")


class Node:
    """A kubelet and a plugin, each of which can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.violations = folder / "violations"
        self._told = PodResources(folder / "pod-resources" / "kubelet.sock")
        self._lives: dict[Callable[[Path], None], BaseProcess] = {}

    def start(self, program: Callable[[Path], None]) -> None:
        self._lives[program] = _PROCESSES.Process(target=program, args=(self.folder,), daemon=True)
        self._lives[program].start()

    def kill(self, program: Callable[[Path], None]) -> None:
        self._lives[program].kill()
        self._lives[program].join()

    async def advertised(self) -> dict[str, int] | None:
        """What the kubelet says; None while it does not."""
        try:
            told = await self._told.allocatable()
        except PodResourcesError:
            return None
        return {resource: len(ids) for resource, ids in told.items()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    _PROCESSES.set_forkserver_preload([small_kubelet.__name__, plugin_process.__name__])
    node = Node(tmp_path)
    node.start(small_kubelet.live)
    node.start(plugin_process.live)
    yield node
    for program in (small_kubelet.live, plugin_process.live):
        node.kill(program)


async def until(true: Callable[[], Awaitable[bool]], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not await true():
            await asyncio.sleep(0.02)


async def whole(node: Node) -> bool:
    return await node.advertised() == plugin_process.OFFERED


async def test_the_kubelet_is_killed(node: Node) -> None:
    chance = random.Random(7)
    await until(lambda: whole(node), 60)
    for round in range(ROUNDS):
        node.kill(small_kubelet.live)
        await asyncio.sleep(chance.choice([0, 0, 0.3]))  # the plugin has seen that it is away, or has not
        node.start(small_kubelet.live)
        if round % 4 == 3:  # while it is being registered
            await asyncio.sleep(chance.uniform(0, 0.5))
            continue
        await until(lambda: answers(node), 60)
        await until(lambda: whole(node), LOST_SECONDS)
    await until(lambda: answers(node), 60)
    await until(lambda: whole(node), LOST_SECONDS)
    assert not node.violations.exists(), node.violations.read_text()


async def test_the_plugin_is_killed(node: Node) -> None:
    chance = random.Random(8)
    await until(lambda: whole(node), 60)
    for round in range(ROUNDS):
        node.kill(plugin_process.live)
        await until(lambda: nothing(node), 10)
        node.start(plugin_process.live)
        if round % 4 == 3:
            await asyncio.sleep(chance.uniform(0, 0.5))
            continue
        await until(lambda: whole(node), LOST_SECONDS)
    await until(lambda: whole(node), LOST_SECONDS)
    assert not node.violations.exists(), node.violations.read_text()
    left = [path.name for path in node.folder.iterdir() if path.name.startswith("berth-")]
    assert len(left) == len(plugin_process.OFFERED), f"sockets of killed lives are still there: {left}"


async def test_both_are_killed_at_once(node: Node) -> None:
    for _ in range(5):
        await until(lambda: whole(node), 60)
        node.kill(plugin_process.live)
        node.kill(small_kubelet.live)
        node.start(plugin_process.live)
        node.start(small_kubelet.live)
    await until(lambda: whole(node), 60)
    assert not node.violations.exists(), node.violations.read_text()


async def answers(node: Node) -> bool:
    return await node.advertised() is not None


async def nothing(node: Node) -> bool:
    return not any((await node.advertised() or {}).values())
