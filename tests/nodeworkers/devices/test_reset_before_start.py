"""`berth node --reset-before-start`: a container starts with cards that were reset, or does not, and says why. All of a
node's device work, over a simulated machine, with a kubelet that is simulated as well.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from kube.client import KubeClient
from nodeworkers.devices.core import FrontEnds
from nodeworkers.devices.service import DeviceOptions, DeviceService
from nodeworkers.hardware.simulated import Simulated
from nodeworkers.inventory import Hardware
from nodeworkers.ledger import Ledger
from tests.fake_kubelet.kubelet import FakeKubelet

N150 = "tenstorrent.com/n150"
DEADLINE = 60.0


class Node:
    def __init__(self, folder: Path, reset: bool) -> None:
        self.file = folder / "machine.yaml"
        self.be()
        self.kubelet = FakeKubelet(folder / "k", seed=1)
        options = DeviceOptions(
            FrontEnds((N150,)), simulated=self.file, seats=folder / "none.yaml", cdi=folder / "cdi",
            plugins=folder / "k" / "device-plugins", reset=reset,
        )  # fmt: skip
        self.ledger = Ledger(folder / "ledger")
        self.service = DeviceService(
            "n", folder / "k", folder, self.ledger, cast("KubeClient", None), options, Hardware(Simulated("1xT4"), "a")
        )

    def be(self, first: str = "") -> None:
        """The machine is this from now on: two cards, the first with what is said of it."""
        new = self.file.with_suffix(".new")
        new.write_text(f"tenstorrent: {{cards: [{{type: n150, {first}}}, {{type: n150}}]}}\n")
        new.rename(self.file)

    async def start(self, name: str) -> str:
        """Starts the container of a pod (again), until it runs or the kubelet was told why not: that."""
        (pod,) = [each for each in self.kubelet.pods if each.name == name]
        await self.kubelet.restart_container(pod, "c0")
        return pod.containers[0].error


@asynccontextmanager
async def served(*, reset: bool) -> AsyncIterator[Node]:
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # a socket's path is short
        node = Node(Path(folder), reset)
        works = node.service._works()
        async with node.kubelet:
            tasks = [
                asyncio.create_task(works[name]()) for name in ("watching tenstorrent", "allocation", "device plugin")
            ]
            try:
                await node.kubelet.until_allocatable(N150, 2, DEADLINE)
                yield node
                assert not any(task.done() for task in tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                node.ledger.close()


async def test_a_container_starts_with_a_card_that_was_reset_or_says_why_not() -> None:
    async with served(reset=True) as node:
        kubelet, runs = node.kubelet, node.service._resets._runs
        assert kubelet.options(N150).pre_start_required
        first = await kubelet.admit("first", [{N150: 2}])
        assert first.phase == "Running", first.containers[0].error
        assert (
            all(run.outcome is not None and run.outcome.number is not None for run in runs.values()) and len(runs) == 2
        )
        cards = {device.id for device in node.service.core.state.offering.devices[N150]}
        assert set(runs) == cards
        mine = next(card for card in cards if node.service.core.state.cards[card].index == 0)

        node.be("pids: [4711]")
        until = asyncio.get_running_loop().time() + DEADLINE
        while "a process holds it" not in (error := await node.start("first")):
            assert asyncio.get_running_loop().time() < until, error
        assert f"{mine} is not reset" in error

        node.be("reset: fails")
        while "ResetFailed" not in (error := await node.start("first")):
            assert asyncio.get_running_loop().time() < until, error
        await kubelet.until_allocatable(N150, 1, DEADLINE)
        assert f"{mine} is not well (ResetFailed)" in error


async def test_a_card_that_died_keeps_a_container_from_starting_again_where_that_is_asked_for() -> None:
    async with served(reset=True) as node:
        pod = await node.kubelet.admit("first", [{N150: 2}])
        assert pod.phase == "Running", pod.containers[0].error
        node.be("fault: detached")
        await node.kubelet.until_allocatable(N150, 1, DEADLINE)
        assert "is not well (Detached)" in await node.start("first")


async def test_without_the_option_no_start_depends_on_this_process() -> None:
    async with served(reset=False) as node:
        assert not node.kubelet.options(N150).pre_start_required
        pod = await node.kubelet.admit("first", [{N150: 1}])
        assert pod.phase == "Running" and not node.service._resets._runs
