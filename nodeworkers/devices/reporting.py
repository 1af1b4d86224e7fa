"""Keeps the node's NodeDevices as its process sees its devices, by server-side apply. Nobody else writes it.

Nothing waits for these writes: what cannot be written now is written once the API server answers again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from kube.resources import NODEDEVICES, NODES
from planning.devices.report import Picture, document, same, status

MANAGER = "berth-node"
PAUSE = 2.0  # seconds between two looks: pods that start together are one write
_MOST_PAUSE = 30.0  # while the API server is away
_RECHECK = 600.0  # somebody may have removed or edited it
_log = logging.getLogger(__name__)


class Reporting:
    """The NodeDevices of one node. `look` gives the picture of the moment."""

    def __init__(self, kube: KubeClient, node: str, look: Callable[[], Picture]) -> None:
        self._kube = kube
        self._node = node
        self._look = look
        self._written: dict[str, Any] | None = None
        self._at = 0.0
        self.trouble = ""
        """Why the API server does not take it; '' while it does."""

    async def run(self) -> None:
        """Until cancelled."""
        pause = PAUSE
        while True:
            await asyncio.sleep(pause)
            pause = PAUSE if await self.write() else min(2 * pause, _MOST_PAUSE)

    async def write(self) -> bool:
        """Writes what is due; False where that could not be done."""
        wanted = status(self._look(), time.time())
        recheck = time.monotonic() - self._at > _RECHECK
        if self._written is not None and not recheck and same(self._written, wanted):
            return True
        try:
            before = await self._object()
            if not same(before, wanted):
                body = {"status": wanted}
                await self._kube.apply(NODEDEVICES, self._node, None, body, field_manager=MANAGER, subresource="status")
        except KubeError as error:
            self._hear(str(error))
            return False
        self._written, self._at = wanted, time.monotonic()
        self._hear("")
        return True

    async def _object(self) -> dict[str, Any]:
        """The status as the API server has it; {} where the object had to be made."""
        owner = str((await self._kube.get(NODES, self._node))["metadata"]["uid"])
        try:
            found = await self._kube.get(NODEDEVICES, self._node)
            if [each.get("uid") for each in found["metadata"].get("ownerReferences") or ()] == [owner]:
                shown = found.get("status")
                return dict(shown) if isinstance(shown, Mapping) else {}
            # Of a node that was made anew under its name.
            await self._kube.delete(NODEDEVICES, self._node, uid=found["metadata"]["uid"])
        except (NotFound, Conflict):
            _log.debug("NodeDevices %s is to be made", self._node)
        try:
            await self._kube.create(NODEDEVICES, document(self._node, owner))
        except AlreadyExists:
            _log.debug("NodeDevices %s was made meanwhile", self._node)
        return {}

    def _hear(self, trouble: str) -> None:
        if trouble and not self.trouble:
            _log.warning("what this node says about its devices cannot be written: %s", trouble)
        elif self.trouble and not trouble:
            _log.info("what this node says about its devices is written again")
        self.trouble = trouble
