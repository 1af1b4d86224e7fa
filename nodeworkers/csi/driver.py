"""The whole CSI driver of a node: its sockets where the kubelet looks for them, after a look at what the last run left.

For the node process, which opens the ledger and the store and runs this beside its other work.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from nodeworkers.csi.identity import Identity
from nodeworkers.csi.node import Node
from nodeworkers.csi.registration import Registration
from nodeworkers.csi.spares import Spares
from nodeworkers.csi.uppers import Uppers
from nodeworkers.csi.volumes import Layers, Volumes
from nodeworkers.ledger import Ledger
from nodeworkers.listener import lay_out
from nodeworkers.rpc import csi_pb2, pluginregistration_pb2
from nodeworkers.sockets import Sockets
from planning.caches.volumes import DRIVER, UPPER_BYTES

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie. `kubelet_root` is what the kubelet has as --root-dir, under the same path in its own file
    system and ours; `folder` is ours, on a disk with room for writable layers, and mounts below both must be seen by
    the host and by us (Bidirectional).
    """

    kubelet_root: Path
    folder: Path

    @property
    def endpoint(self) -> Path:
        """The socket of CSI's services."""
        return self.kubelet_root / "plugins" / DRIVER / "csi.sock"

    @property
    def registration(self) -> Path:
        """The socket by which the kubelet finds the driver."""
        return self.kubelet_root / "plugins_registry" / f"{DRIVER}-reg.sock"


class Driver:
    """CSI on one node."""

    def __init__(
        self, places: Places, node_name: str, ledger: Ledger, layers: Layers, upper_bytes: int = UPPER_BYTES
    ) -> None:
        """`upper_bytes` is the cap of each pod's writable layer."""
        self.uppers = Uppers(places.folder / "volumes", upper_bytes)
        self._listener = places.folder / "listener"
        self.volumes = Volumes(ledger, layers, self.uppers, places.kubelet_root)
        self.node = Node(self.volumes, node_name)
        self.spares = Spares(self.uppers, ledger, self.node)
        self.registration = Registration(places.endpoint)
        self._sockets = Sockets(
            (
                (
                    places.endpoint,
                    (
                        (csi_pb2.DESCRIPTOR.services_by_name["Identity"], Identity(ledger, version("berth"))),
                        (csi_pb2.DESCRIPTOR.services_by_name["Node"], self.node),
                    ),
                ),
                (
                    places.registration,
                    ((pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"], self.registration),),
                ),
            )
        )

    async def start(self) -> None:
        """Puts in order what is there, then serves. Raises SocketError."""
        wrong = await asyncio.to_thread(self.uppers.prepare)
        if wrong:
            _log.error("Volumes can be read only on this node: %s.", wrong)
        try:
            self.volumes.offered = await asyncio.to_thread(lay_out, self._listener)
        except OSError as error:
            _log.error(
                "Pods cannot report hits and misses on this node: %s cannot be written (%s). Its disk must take "
                "extended attributes (trusted.*).",
                self._listener,
                error.strerror,
            )
        for sentence in await asyncio.to_thread(self.volumes.sweep):
            _log.warning("After the last run: %s.", sentence)
        await self._sockets.start()

    async def watch(self) -> None:
        """Looks after the sockets, at what pods report, and that layers are spare, until cancelled."""
        beside = [asyncio.create_task(work()) for work in (self.volumes.reports.watch, self.spares.watch)]
        try:
            await self._sockets.watch()
        finally:
            for task in beside:
                task.cancel()
            for task in beside:
                with suppress(asyncio.CancelledError):
                    await task

    async def stop(self) -> None:
        """Ends after the calls that are being answered. Mounts stay: pods use them."""
        await self._sockets.stop()
        await self.spares.close()
        self.node.close()
