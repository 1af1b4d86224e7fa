"""The DRA driver with simulated devices as a process of its own, which a test may kill:
`python -m tests.nodeworkers.dra.dra_process FOLDER KUBELET_ROOT NODE KUBECONFIG CDI_FOLDER`.

FOLDER/ill holds the ids of devices that are not well. Who holds what is forgotten with the process: the record of
prepared claims is what is looked at here.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path

from kube.client import KubeClient
from nodeworkers.dra.driver import Driver, Places
from tests.nodeworkers.dra.simulated_devices import SimulatedDevices, seat, simulated_cards, whole

CARDS = simulated_cards(4)
IDS = sorted(CARDS)
SEAT = seat("pair0", 0, ("GPU-1", "GPU-2"))


def words(file: Path) -> set[str]:
    return set(file.read_text().split()) if file.exists() else set()


async def ailing(devices: SimulatedDevices, file: Path) -> None:
    known: set[str] = set()
    while True:
        now = await asyncio.to_thread(words, file)
        for each in now - known:
            devices.ail(each)
        for each in known - now:
            devices.recover(each)
        known = now
        await asyncio.sleep(0.1)


async def main(folder: Path, kubelet_root: Path, node: str, kubeconfig: Path, cdi: Path) -> None:
    devices = SimulatedDevices(*whole(CARDS), SEAT)
    async with await KubeClient.connect(kubeconfig) as kube:
        driver = Driver(Places(kubelet_root, folder, cdi), node, kube, devices, lambda: CARDS, None)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await driver.start()
        print("serving", flush=True)
        beside = [asyncio.create_task(driver.watch()), asyncio.create_task(ailing(devices, folder / "ill"))]
        await ended.wait()
        for task in beside:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await driver.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5])))
