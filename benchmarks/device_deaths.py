"""How soon the kubelet knows of a card that died: berth's simulated cards, beside a peer's files on the same node.

For whoever changes how hardware is watched. A real kubelet runs here. Of berth's a card's driver lets go of it, a card
is gone, or a GPU falls off the bus; of the peer, generic-device-plugin, whose program is given, a device's file goes,
for it knows nothing else of health. Each round does all of that at once, at a moment of no meaning. It asserts nothing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Report, arguments, progress
from kube.client import KubeClient
from kube.resources import NODES, RESOURCESLICES
from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.devices.holdings import PodResourcesError
from stack import kubelet_root
from stack.realnode import DEVICE_PLUGINS, unavailable
from tests.nodeworkers.devices.kills import BY_DRA, BY_PLUGIN, FRONTS, offered
from tests.nodeworkers.devices.whole import CARDS, GPU, GPUS, N150, Machine, machine
from tests.nodeworkers.pods import NODE

PEER = "squat.ai/card"
FILES = 4
ROUNDS = 6
LOST = {"fault": "lost"}
_LONGEST = 60.0
Count = Callable[[], Awaitable[int]]


class Told:
    """What there is of a resource, as the kubelet has it, as the API server has of the node, and in ResourceSlices."""

    def __init__(self, node: Machine, kube: KubeClient) -> None:
        self._asking = PodResources(kubelet_root(node.stack.layout.root) / "pod-resources" / "kubelet.sock")
        self._kube = kube

    def kubelet(self, resource: str) -> Count:
        async def count() -> int:
            try:
                return len((await self._asking.allocatable()).get(resource, ()))
            except PodResourcesError:
                return -1

        return count

    def node(self, resource: str) -> Count:
        async def count() -> int:
            status = (await self._kube.get(NODES, NODE)).get("status", {})
            return int(status.get("allocatable", {}).get(resource, 0))

        return count

    def slices(self, resource: str) -> Count:
        async def count() -> int:
            found, _ = await self._kube.list(RESOURCESLICES, field_selector=f"spec.nodeName={NODE}")
            return offered(found).get(resource, 0)

        return count


async def until(count: Count, wanted: int) -> float:
    """Seconds until there are so many; more than a minute is an error."""
    began = time.monotonic()
    while (now := await count()) != wanted:
        if time.monotonic() - began > _LONGEST:
            raise SystemExit(f"After {_LONGEST:.0f} s there are {now} instead of {wanted}.")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@contextmanager
def peer(program: Path | None, folder: Path) -> Iterator[list[Path]]:
    """The peer with files as its devices, which it gives; none without a program."""
    if program is None:
        yield []
        return
    files = [folder / f"card{number}" for number in range(FILES)]
    for file in files:
        file.touch()
    device = f'{{"name": "card", "groups": [{{"paths": [{{"path": "{folder}/card*"}}]}}]}}'
    serving = subprocess.Popen(
        [program, "--device", device, "--plugin-directory", DEVICE_PLUGINS, "--listen", "127.0.0.1:0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield files
    finally:
        serving.kill()
        serving.wait()


async def measure(node: Machine, files: list[Path], rounds: int, report: Report) -> None:
    """Both ways of a card's death in turn, with the GPU's and the peer's."""
    taken: dict[str, list[float]] = {}
    models: list[dict[str, Any]] = [{"product": "H100"} for _ in range(8)]
    async with await KubeClient.connect(node.stack.endpoints.kubeconfig("admin"), user_agent="benchmark") as kube:
        told = Told(node, kube)
        whole = {told.kubelet(N150): BY_PLUGIN[N150], told.slices(GPU): BY_DRA[GPU], told.node(N150): BY_PLUGIN[N150]}
        if files:
            whole |= {told.kubelet(PEER): FILES, told.node(PEER): FILES}
        for number in range(rounds):
            for fault, meaning in (("detached", "its driver let go of it"), ("gone", "it is gone")):
                await asyncio.gather(*(until(count, wanted) for count, wanted in whole.items()))
                await asyncio.sleep(random.uniform(0, 5))
                progress(f"round {number + 1} of {rounds}: {fault} ...")
                waits = {
                    f"berth, a card ({meaning}), to the kubelet": until(told.kubelet(N150), 3),
                    f"berth, a card ({meaning}), to the Node": until(told.node(N150), 3),
                    "berth, a GPU (lost), to its taint by DRA": until(told.slices(GPU), 3),
                }
                if files:
                    waits["peer, a file removed, to the kubelet"] = until(told.kubelet(PEER), FILES - 1)
                    waits["peer, a file removed, to the Node"] = until(told.node(PEER), FILES - 1)
                    files[0].unlink()
                node.has([{**CARDS[0], "fault": fault}, *CARDS[1:]], {**GPUS, "gpus": [*models[:7], models[7] | LOST]})
                for title, seconds in zip(waits, await asyncio.gather(*waits.values()), strict=True):
                    taken.setdefault(title, []).append(seconds)
                node.has()
                for file in files:
                    file.touch()
    for title, all_seconds in sorted(taken.items()):
        p50, most = statistics.median(all_seconds), max(all_seconds)
        report.row(title, f"{p50:.1f} / {most:.1f} s", f"p50 / max of {len(all_seconds)}")
        report.note({title: {"p50": round(p50, 2), "max": round(most, 2), "all": all_seconds}})


def main() -> None:
    parser = arguments("device_deaths", str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--peer", type=Path, metavar="PROGRAM", help="generic-device-plugin, built; left out: no peer")
    options = parser.parse_args()
    if why := unavailable():
        raise SystemExit(f"No real kubelet can run here: {why}")
    report = Report("From a card's death to the kubelet, simulated cards and GPUs")
    with (
        tempfile.TemporaryDirectory(prefix="berth-deaths-") as folder,
        machine(Path(folder), *FRONTS) as node,
        peer(options.peer, Path(folder)) as files,
    ):
        asyncio.run(measure(node, files, options.rounds, report))
    report.finish(options.json)


if __name__ == "__main__":
    main()
