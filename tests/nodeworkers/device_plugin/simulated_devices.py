"""A simulated allocation core: devices by name alone, without hardware, a ledger or anything that can be had with them.

For the tests and the benchmark of the device plugin front end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planning.devices.offers import Device, Injection, Mount, Node, Refused

N150 = "tenstorrent.com/n150"
GPU = "nvidia.com/gpu"


def simulated(count: int, resource: str = N150, name: str = "tt") -> tuple[Device, ...]:
    """So many devices, on two NUMA nodes."""
    return tuple(
        Device(f"{name}-{number:016x}", resource, (f"card-{number}",), numa=(number % 2,)) for number in range(count)
    )


class SimulatedDevices:
    """Implements `Devices`. `fault` is raised by every call that hands something out; `held` lets those of `preferred`
    and `before_start` hang until it is set.
    """

    def __init__(self) -> None:
        self._offered: dict[str, tuple[Device, ...]] = {}
        self._version = 1
        self._stirred = asyncio.Event()
        self.fault: Exception | None = None
        self.held: threading.Event | None = None
        self.allocated: list[tuple[str, tuple[str, ...]]] = []
        self.waiting = 0

    @property
    def version(self) -> int:
        return self._version

    def offered(self) -> Mapping[str, tuple[Device, ...]]:
        return self._offered

    def offer(self, *devices: Device, resource: str = N150) -> None:
        """These are the devices of the resource from now on."""
        self._offered = {**self._offered, resource: devices}
        self._version += 1
        self._stirred.set()
        self._stirred = asyncio.Event()

    def sicken(self, device: str, healthy: bool = False) -> None:
        """A device becomes unhealthy, or healthy again."""
        for resource, devices in self._offered.items():
            if any(each.id == device for each in devices):
                changed = [replace(each, healthy=healthy) if each.id == device else each for each in devices]
                self.offer(*changed, resource=resource)

    async def changed(self, version: int) -> int:
        self.waiting += 1
        try:
            while self._version == version:
                await self._stirred.wait()
        finally:
            self.waiting -= 1
        return self._version

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        self._hang()
        return [*must, *(each for each in sorted(available) if each not in must)][:size]

    def allocate(self, resource: str, ids: Sequence[str], claim: str = "", admin: bool = False) -> Injection:
        if self.fault:
            raise self.fault
        known = {each.id: each for each in self._offered.get(resource, ())}
        for device in ids:
            if device not in known:
                raise Refused(f"{device} is no device of {resource} on this node.")
            if not known[device].healthy:
                raise Refused(f"{device} is unhealthy: Hot.")
        self.allocated.append((resource, tuple(ids)))
        return Injection(
            env={"SIMULATED_DEVICES": ",".join(ids)},
            mounts=(Mount("/dev/hugepages-1G", "/dev/hugepages-1G", read_only=False),),
            nodes=tuple(Node(f"/dev/simulated/by-id/{each}", f"/dev/simulated/{each}") for each in ids),
            cdi=tuple(f"berth.dev/simulated={each}" for each in ids),
            annotations={"berth.dev/simulated": "true"},
        )

    def before_start(self, resource: str, ids: Sequence[str]) -> None:
        self._hang()

    def holds(self, claim: str) -> bool:
        raise AssertionError("the device plugin has no claims")

    def release(self, claim: str) -> None:
        raise AssertionError("the device plugin has no claims")

    def _hang(self) -> None:
        if self.held:
            self.held.wait(30)
        if self.fault:
            raise self.fault
