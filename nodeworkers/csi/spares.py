"""Has a few writable layers ready before a pod asks for one: making it takes most of the time that a publish would.

For the driver. A node without a cache that a pod could have keeps none, and the kubelet's calls come first: a spare is
made when none is under way or was just now. What a killed process left is swept at the next start, as any layer of no
volume.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from nodeworkers.csi.node import Node
from nodeworkers.csi.uppers import Uppers
from nodeworkers.ledger import Ledger
from planning.caches.volumes import NodeCache

SPARES = 4  # pods come a few at a time; each spare is a loop device, a mount and some hundred kilobytes of disk
_SECONDS = 5.0  # between two looks at which caches there are
_QUIET_SECONDS = 0.02  # without a call, before one is made: both would want the same locks of the kernel's
_log = logging.getLogger(__name__)


class Spares:
    """The spare layers of one node."""

    def __init__(self, uppers: Uppers, ledger: Ledger, node: Node) -> None:
        self._uppers = uppers
        self._ledger = ledger
        self._node = node
        self._wanted = 0
        self._looked = float("-inf")
        self._wrong = ""
        self._step: asyncio.Future[bool] | None = None

    async def watch(self) -> None:
        """Keeps as many as are wanted until cancelled. What goes wrong is logged, once for each streak."""
        while True:
            while not self._node.busy and not self._node.calm.is_set() and await self._next():
                pass
            with suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS):
                    await self._node.calm.wait()
            while self._node.calm.is_set():  # the kubelet's next call may be close behind
                self._node.calm.clear()
                await asyncio.sleep(_QUIET_SECONDS)

    async def close(self) -> None:
        """Takes all of them away. To be called when `watch` has been cancelled."""
        if self._step is not None:
            await asyncio.wait([self._step])
        try:
            await asyncio.to_thread(self._drop, 0)
        except OSError as error:
            _log.warning("Spare writable layers cannot be removed (%s): they are at the next start.", error)

    async def _next(self) -> bool:
        """One step, which is carried to its end though `watch` may be cancelled meanwhile."""
        self._step = asyncio.ensure_future(asyncio.to_thread(self._one))
        return await asyncio.shield(self._step)

    def _one(self) -> bool:
        """Makes one that lacks, or takes away what is too much; whether there may be more to do. Blocks."""
        try:
            if time.monotonic() - self._looked >= _SECONDS:
                self._wanted = SPARES if any(map(_mountable, self._ledger.caches())) else 0
                self._looked = time.monotonic()
            self._drop(self._wanted)
            if self._uppers.spares < self._wanted:
                self._uppers.add_spare()
                self._wrong = ""
        except Exception as error:  # pods are served without, and a defect of ours must be found
            if str(error) != self._wrong:
                _log.warning(
                    "No writable layer can be made ahead, so pods wait for theirs to be made: %s", error, exc_info=True
                )
            self._wrong = str(error)
            return False
        return self._uppers.spares < self._wanted

    def _drop(self, most: int) -> None:
        while self._uppers.spares > most:
            self._uppers.drop_spare()


def _mountable(cache: NodeCache) -> bool:
    return cache.state == "Ready" and bool(cache.compatible and cache.digest)
