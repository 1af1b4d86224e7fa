"""The supervisor with simulated devices as a process of its own, for tests that kill it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.device_plugin.registration import Folders
from nodeworkers.device_plugin.supervisor import Supervisor
from tests.nodeworkers.device_plugin.simulated_devices import GPU, N150, SimulatedDevices, simulated

SEAT = "kyb.ai/gpu-2x-seat"
OFFERED = {N150: 4, GPU: 8, SEAT: 16}


def live(folder: Path) -> None:
    """Until it is killed."""

    async def main() -> None:
        devices = SimulatedDevices()
        for resource, count in OFFERED.items():
            devices.offer(*simulated(count, resource, resource.split("/")[1]), resource=resource)
        supervisor = Supervisor(devices, PodResources(folder / "pod-resources" / "kubelet.sock"), Folders(folder))
        running = asyncio.ensure_future(supervisor.run())
        while not running.done() and os.getppid() != 1:
            await asyncio.sleep(0.1)
        running.result()

    asyncio.run(main())
