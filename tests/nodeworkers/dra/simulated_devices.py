"""Simulated devices behind the interface that DRA's front end sees, for tests: an allocation core in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planning.devices.cards import Card
from planning.devices.offers import Device, Held, Injection, Mount, Node, Refused

N150 = "tenstorrent.com/n150"
SEAT = "kyb.ai/gpu-2x-seat"


def card(number: int) -> Card:
    return Card(
        id=f"tt-0100014511{number:06d}", vendor="tenstorrent", product="n150", resource=N150, index=number,
        address=f"0000:{number % 256:02x}:00.0", numa=number % 2, memory_mib=12288, arch="wormhole",
        driver="2.10.1", firmware="18.2.0.0", nodes=(f"/dev/tenstorrent/{number}",),
    )  # fmt: skip


def simulated_cards(count: int) -> dict[str, Card]:
    return {each.id: each for each in map(card, range(count))}


def whole(cards: Mapping[str, Card]) -> tuple[Device, ...]:
    """Each card as a device."""
    numas = {each.id: () if each.numa is None else (each.numa,) for each in cards.values()}
    return tuple(Device(each.id, each.resource, (each.id,), numa=numas[each.id]) for each in cards.values())


def seat(group: str, number: int, cards: tuple[str, ...]) -> Device:
    return Device(f"kyb-{group}-s{number}", SEAT, cards, group=group)


class SimulatedDevices:
    """The protocol Devices. `held` has the claim of each device, `started` what was asked of `before_start`, which
    waits for the Event of a card in `going`.
    """

    def __init__(self, *devices: Device, node: str = "/dev/null") -> None:
        self.version = 1
        self.held: dict[str, str] = {}
        self.started: list[tuple[str, ...]] = []
        self.admin: list[str] = []
        self.going: dict[str, threading.Event] = {}
        self._node = node
        self._devices = {device.id: device for device in devices}
        self._news = asyncio.Event()

    def offered(self) -> Mapping[str, tuple[Device, ...]]:
        resources = sorted({device.resource for device in self._devices.values()})
        by_id = sorted(self._devices.values(), key=lambda device: device.id)
        return {resource: tuple(each for each in by_id if each.resource == resource) for resource in resources}

    async def changed(self, version: int) -> int:
        while self.version == version:
            await self._news.wait()
        return self.version

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        return list(available[:size])

    def allocate(self, resource: str, ids: Sequence[str], claim: str = "", admin: bool = False) -> Injection:
        for each in ids:
            device = self._devices[each]
            assert device.resource == resource
            if not admin and not device.healthy:
                raise Refused(f"The card {each} is not well: {device.message}")
            if not admin and self.held.get(each, claim) != claim:
                raise Held(f"The card {each} is held by another claim.")
        if admin:
            self.admin += ids
        else:
            self.held |= dict.fromkeys(ids, claim)
        # The device node that it gets under its card's name is one that every machine has.
        nodes = tuple(Node(self._node, f"/dev/simulated/{each}", "rw") for each in ids)
        mounts = (Mount("/etc/hostname", "/etc/simulated"),)
        return Injection(env={"SIMULATED_DEVICES": ",".join(ids)}, mounts=mounts, nodes=nodes)

    def before_start(self, resource: str, ids: Sequence[str]) -> None:
        self.started.append(tuple(ids))
        if (going := self.going.get(ids[0])) is not None and not going.wait(60.0):
            raise Refused(f"The card {ids[0]} is still being reset.")

    def holds(self, claim: str) -> bool:
        return claim in self.held.values()

    def release(self, claim: str) -> None:
        self.held = {each: holder for each, holder in self.held.items() if holder != claim}

    # ---- what a test does to them

    def put(self, *devices: Device) -> None:
        self._devices |= {device.id: device for device in devices}
        self._told()

    def remove(self, name: str) -> None:
        del self._devices[name]
        self._told()

    def ail(self, name: str, reason: str = "HeartbeatStopped", message: str = "Its heartbeat stands still.") -> None:
        self.put(replace(self._devices[name], healthy=False, reason=reason, message=message))

    def recover(self, name: str) -> None:
        self.put(replace(self._devices[name], healthy=True, reason="", message=""))

    def _told(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()
