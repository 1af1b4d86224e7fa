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
from nodeworkers.hardware.machine_reset import MARKER
from nodeworkers.hardware.resetter import Outcome
from nodeworkers.hardware.simulated import Simulated
from nodeworkers.inventory import Hardware
from nodeworkers.ledger import Ledger
from tests.fake_kubelet.kubelet import FakeKubelet
from tests.fake_kubelet.pods import Pod

N150 = "tenstorrent.com/n150"
DEADLINE = 60.0


class Node:
    def __init__(self, folder: Path, reset: bool) -> None:
        self.file = folder / "machine.yaml"
        self.be()
        self.tree = folder / "simulated-machine" / "tenstorrent"
        self.kubelet = FakeKubelet(folder / "k", seed=1)
        options = DeviceOptions(
            FrontEnds((N150,)), simulated=self.file, seats=folder / "none.yaml", cdi=folder / "cdi",
            plugins=folder / "k" / "device-plugins", reset=reset,
        )  # fmt: skip
        self.ledger = Ledger(folder / "ledger")
        self.service = DeviceService(
            "n", folder / "k", folder, self.ledger, cast("KubeClient", None), options, Hardware(Simulated("1xT4"), "a")
        )

    def be(self, more: str = "") -> None:
        """The machine has one card from now on, and this is said of it."""
        new = self.file.with_suffix(".new")
        new.write_text(f"tenstorrent: {{cards: [{{type: n150, {more}}}]}}\n")
        new.rename(self.file)

    async def start(self, pod: Pod) -> str:
        """Starts the container of a pod again. Why it did not start, as the kubelet was told."""
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
                await node.kubelet.until_allocatable(N150, 1, DEADLINE)
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
        first = await kubelet.admit("first", [{N150: 1}])
        assert first.phase == "Running", first.containers[0].error
        ((card, run),) = runs.items()
        assert run.outcome == Outcome(0, begun=True)
        assert [device.id for device in node.service.core.state.offering.devices[N150]] == [card]

        node.be("pids: [4711]")
        await kubelet.until(lambda: bool((node.tree / "proc/driver/tenstorrent/0/pids").read_text()), DEADLINE, "held")
        assert f"{card} is not reset: a process holds it" in await node.start(first)

        node.be("reset: fails")
        marker = node.tree / "sys/class/tenstorrent/tenstorrent!0" / MARKER
        await kubelet.until(marker.exists, DEADLINE, "a reset that fails")
        assert f"{card} has reset itself but does not start again" in await node.start(first)
        await kubelet.until_allocatable(N150, 0, DEADLINE)
        assert f"{card} is not well (ResetFailed)" in await node.start(first)


async def test_a_card_that_died_keeps_a_container_from_starting_again_where_that_is_asked_for() -> None:
    async with served(reset=True) as node:
        first = await node.kubelet.admit("first", [{N150: 1}])
        assert first.phase == "Running", first.containers[0].error
        (run,) = node.service._resets._runs.values()
        await node.kubelet.until(lambda: run.seen, DEADLINE, "the card is seen well after its reset")
        node.be("fault: detached")
        await node.kubelet.until_allocatable(N150, 0, DEADLINE)
        assert "is not well (Detached)" in await node.start(first)


async def test_without_the_option_no_start_depends_on_this_process() -> None:
    async with served(reset=False) as node:
        assert not node.kubelet.options(N150).pre_start_required
        first = await node.kubelet.admit("first", [{N150: 1}])
        assert first.phase == "Running" and not node.service._resets._runs
