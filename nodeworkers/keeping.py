"""Keeps the parts of a node's work going, each by itself: a mistake of ours in one ends neither the others nor the
process, which answers the kubelet as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

AGAIN = 10.0  # seconds until what failed is begun anew
_log = logging.getLogger(__name__)


class Keeping:
    """Of one room's parts. `broken`: a sentence for each that failed and has not been begun anew."""

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}

    async def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Does it until cancelled, again and again if it ends."""
        while True:
            try:
                await work()
            except Exception as error:
                self.broken[name] = f"{name}: {error!r:.256}"
                _log.exception("%s: it failed and is started again in %.0f s", name, AGAIN)
            await asyncio.sleep(AGAIN)
            self.broken.pop(name, None)
