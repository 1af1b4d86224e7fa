"""The whole DRA driver of a node: its sockets where the kubelet looks for them, its claims and its ResourceSlices.

For the node process, which hands it the allocation core and runs it beside its other work. A resource is DRA's or the
device plugin's on a node, never both (KEP-5004): the core that is handed in offers what is DRA's and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kube.client import KubeClient
from nodeworkers.devices.frontend import Devices
from nodeworkers.dra.health import Health
from nodeworkers.dra.plugin import Plugin
from nodeworkers.dra.prepared import PreparedClaims
from nodeworkers.dra.publisher import Publisher
from nodeworkers.dra.registration import Registration
from nodeworkers.rpc import dra_health_pb2, dra_pb2, pluginregistration_pb2
from nodeworkers.sockets import Sockets
from planning.devices.cards import Card
from planning.devices.slices import DRIVER


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie. `kubelet_root` is what the kubelet has as --root-dir, under the same path in its own file
    system and ours; `folder` is ours and lasts; `cdi` is where the container runtime looks for CDI specs.
    """

    kubelet_root: Path
    folder: Path
    cdi: Path = Path("/var/run/cdi")

    @property
    def endpoint(self) -> Path:
        """The socket of the driver's services."""
        return self.kubelet_root / "plugins" / DRIVER / "dra.sock"

    @property
    def registration(self) -> Path:
        """The socket by which the kubelet finds the driver."""
        return self.kubelet_root / "plugins_registry" / f"{DRIVER}-reg.sock"


class Driver:
    """DRA on one node."""

    def __init__(
        self,
        places: Places,
        node: str,
        kube: KubeClient,
        devices: Devices,
        cards: Callable[[], Mapping[str, Card]],
        sysfs: Path | None = Path("/sys"),
        *,
        simulated: bool = False,
    ) -> None:
        """`cards`, `sysfs` and `simulated` as in Publisher."""
        self.claims = PreparedClaims(places.folder / "claims", places.cdi)
        self.publisher = Publisher(kube, node, devices, cards, sysfs, simulated=simulated)
        self.health = Health(node, devices)
        self.registration = Registration(places.endpoint, self.publisher.poke)
        plugin = Plugin(kube, node, devices, self.claims)
        self._sockets = Sockets(
            (
                (
                    places.endpoint,
                    (
                        (dra_pb2.DESCRIPTOR.services_by_name["DRAPlugin"], plugin),
                        (dra_health_pb2.DESCRIPTOR.services_by_name["DRAResourceHealth"], self.health),
                    ),
                ),
                (
                    places.registration,
                    ((pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"], self.registration),),
                ),
            )
        )

    async def start(self) -> None:
        """Puts in order what the last run left, then serves. Raises SocketError, and OSError where claims cannot be
        kept.
        """
        await asyncio.to_thread(self.claims.open)
        await self._sockets.start()

    async def watch(self) -> None:
        """Looks after the sockets and the ResourceSlices until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sockets.watch())
            group.create_task(self.publisher.run())

    async def stop(self) -> None:
        """Ends after the calls that are being answered. Claims stay prepared and slices published: pods use them, and
        the kubelet deletes the slices of a driver that stays away.
        """
        self.health.close()
        await self._sockets.stop()
