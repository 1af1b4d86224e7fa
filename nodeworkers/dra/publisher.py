"""Keeps the node's ResourceSlices equal to what its devices are: the scheduler's view of them. Tries for ever, and
nobody waits for it.

What the API server has is read when the process starts, when somebody else changed it (a kubelet deletes them all when
it starts), after an error and every ten minutes; between these a change of the devices writes only what it changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound
from kube.resources import NODES, Resource
from nodeworkers.devices.frontend import Devices
from planning.devices.cards import Card
from planning.devices.offers import Device
from planning.devices.slices import DRIVER, Changes, Stored, changes, keeps_taints, probe, slices, stored

RESOURCESLICES: Final = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", False)

_RESYNC_SECONDS = 600.0
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 60.0  # between tries
_log = logging.getLogger(__name__)


class Publisher:
    """`problem` says why the slices are not as they should be, '' when they are; `published` how many there are, None
    before they were written for the first time.
    """

    def __init__(
        self,
        kube: KubeClient,
        node: str,
        devices: Devices,
        cards: Callable[[], Mapping[str, Card]],
        sysfs: Path | None = Path("/sys"),
        *,
        simulated: bool = False,
    ) -> None:
        """`cards` by id, whenever asked. `sysfs`: where PCI's tree tells a card's root complex; None where the cards
        are simulated and their addresses somebody else's. `simulated`: the slices say so.
        """
        self._simulated = simulated
        self._kube, self._node, self._devices, self._cards, self._sysfs = kube, node, devices, cards, sysfs
        self._selector = f"spec.nodeName={node},spec.driver={DRIVER}"
        self._wake = asyncio.Event()
        self._there: dict[str, Stored] | None = None  # None: to be read
        self._owner, self._taints = "", True
        self.problem = ""
        self.published: int | None = None

    def poke(self) -> None:
        """The slices may not be what they were: they are looked at."""
        self._there = None
        self._wake.set()

    async def run(self) -> None:
        """Publishes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_devices())
            group.create_task(self._follow_slices())
            group.create_task(self._publish())

    async def _follow_devices(self) -> None:
        version = self._devices.version
        while True:
            version = await self._devices.changed(version)
            self._wake.set()

    async def _follow_slices(self) -> None:
        failures = 0
        while True:
            try:
                # Only what comes after it is of interest here: `poke` has them read.
                _, version = await self._kube.list(RESOURCESLICES, field_selector=self._selector, metadata_only=True)
                self.poke()
                while True:
                    events = self._kube.watch(
                        RESOURCESLICES, resource_version=version, field_selector=self._selector, metadata_only=True
                    )
                    async with aclosing(events):
                        async for kind, body in events:
                            failures = 0
                            version = int(body["metadata"]["resourceVersion"])
                            if kind != "BOOKMARK" and not self._is_known(body["metadata"]["name"], version):
                                self.poke()
            except KubeError as error:
                failures += 1
                _log.debug("ResourceSlices are not watched: %s", error)
                await asyncio.sleep(_pause(failures))

    def _is_known(self, name: str, version: int) -> bool:
        known = (self._there or {}).get(name)
        return known is not None and known.version >= version

    async def _publish(self) -> None:
        failures = 0
        self._wake.set()
        while True:
            try:
                async with asyncio.timeout(_RESYNC_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                self._there = None
            self._wake.clear()
            try:
                await self._settle()
            except KubeError as error:
                failures += 1
                self.poke()
                # Somebody else was faster: nothing is wrong as long as that does not go on.
                if not isinstance(error, Conflict | NotFound) or failures > 3:
                    self._say(f"ResourceSlices of {self._node} cannot be published: {error}")
                await asyncio.sleep(_pause(failures))
            else:
                failures = 0
                self._say("")

    async def _settle(self) -> None:
        there = self._there
        if there is None:
            there = await self._read()
            self._there = there
        offered, cards = self._devices.offered(), self._cards()
        # Ten thousand devices take it half a second, in which the kubelet's calls are answered.
        todo = await asyncio.to_thread(self._changes, offered, dict(cards), tuple(there.values()))
        for gone in todo.delete:
            try:
                await self._kube.delete(RESOURCESLICES, gone.name, resource_version=gone.version)
            except NotFound:
                _log.debug("The ResourceSlice %s was deleted before.", gone.name)
            del there[gone.name]
        for body in todo.update:
            name = body["metadata"]["name"]
            there[name] = stored(await self._kube.merge_patch(RESOURCESLICES, name, None, body))
        for body in todo.create:
            made = stored(await self._kube.create(RESOURCESLICES, body))
            there[made.name] = made
        self.published = len(there)

    def _changes(
        self, offered: Mapping[str, Sequence[Device]], cards: Mapping[str, Card], there: Collection[Stored]
    ) -> Changes:
        roots: dict[str, str] = {}
        if self._sysfs is not None:
            found = {card.id: pcie_root(self._sysfs, card.address) for card in cards.values()}
            roots = {card: root for card, root in found.items() if root}
        wanted = slices(
            self._node, offered, cards, taints=self._taints, roots=roots, owner=self._owner, simulated=self._simulated
        )
        return changes(wanted, there)

    async def _read(self) -> dict[str, Stored]:
        """What there is, and what has to be known to write it."""
        node = await self._kube.get(NODES, self._node)
        self._owner = node["metadata"]["uid"]
        kept = keeps_taints(await self._kube.create(RESOURCESLICES, probe(self._node), dry_run=True))
        if self._taints and not kept:
            _log.warning(
                "The API server keeps no taints of devices (feature DRADeviceTaints): unhealthy ones are left out of "
                "the ResourceSlices."
            )
        self._taints = kept
        there: dict[str, Stored] = {}
        async for page, _ in self._kube.list_pages(RESOURCESLICES, field_selector=self._selector):
            there |= {each.name: each for each in map(stored, page)}
        return there

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.warning("%s", problem)
        elif self.problem and not problem:
            _log.info("ResourceSlices of %s are published again.", self._node)
        self.problem = problem


def pcie_root(sysfs: Path, address: str) -> str:
    """The root complex of a PCI address (pci0000:3a), '' where there is none (Kubernetes' attribute pcieRoot)."""
    if not address:
        return ""
    try:
        target = os.readlink(sysfs / "bus/pci/devices" / address)
    except OSError:
        return ""
    parts = os.path.normpath(os.path.join("bus/pci/devices", target)).split("/")
    found = parts[1] if len(parts) > 2 and parts[0] == "devices" and parts[-1] == address else ""
    return found if found.startswith("pci") else ""


def _pause(failures: int) -> float:
    """Seconds until the next try: twice as many each time, and not all nodes at once."""
    return float(min(_MOST_SECONDS, _LEAST_SECONDS * 2 ** min(failures - 1, 10)) * random.uniform(0.75, 1.25))
