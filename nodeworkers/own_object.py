"""Keeps the status of an object that is the node's own as its process sees it, by server-side apply: NodeDevices, or a
GPUSeatGroup. Nobody else writes it, and it goes with the Node.

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
from kube.resources import NODES, Resource

MANAGER = "berth-node"
PAUSE = 2.0  # seconds between two looks: pods that start together are one write
_MOST_PAUSE = 30.0  # while the API server is away
_RECHECK = 600.0  # somebody may have removed or edited it
_log = logging.getLogger(__name__)


class OwnObject:
    """One object. `document` makes it, without a status, of the uid of the node's Node; `look` gives the status that it
    should have now, whose `updated` is when that was.
    """

    def __init__(
        self,
        kube: KubeClient,
        node: str,
        resource: Resource,
        document: Callable[[str], dict[str, Any]],
        look: Callable[[], dict[str, Any]],
    ) -> None:
        self._kube = kube
        self._node = node
        self._resource = resource
        self._document = document
        self._name = str(document("")["metadata"]["name"])
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
        wanted = self._look()
        recheck = time.monotonic() - self._at > _RECHECK
        if self._written is not None and not recheck and _same(self._written, wanted):
            return True
        try:
            before = await self._object()
            if not _same(before, wanted):
                body = {"status": wanted}
                await self._kube.apply(
                    self._resource, self._name, None, body, field_manager=MANAGER, subresource="status"
                )
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
            found = await self._kube.get(self._resource, self._name)
            if [each.get("uid") for each in found["metadata"].get("ownerReferences") or ()] == [owner]:
                shown = found.get("status")
                return dict(shown) if isinstance(shown, Mapping) else {}
            # Of a node that was made anew under its name.
            await self._kube.delete(self._resource, self._name, uid=found["metadata"]["uid"])
        except (NotFound, Conflict):
            _log.debug("%s %s is to be made", self._resource.kind, self._name)
        try:
            await self._kube.create(self._resource, self._document(owner))
        except AlreadyExists:
            _log.debug("%s %s was made meanwhile", self._resource.kind, self._name)
        return {}

    def _hear(self, trouble: str) -> None:
        if trouble and not self.trouble:
            _log.warning("%s %s of this node cannot be written: %s", self._resource.kind, self._name, trouble)
        elif self.trouble and not trouble:
            _log.info("%s %s of this node is written again", self._resource.kind, self._name)
        self.trouble = trouble


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a write would change nothing but its time."""
    return {**one, "updated": ""} == {**other, "updated": ""}
