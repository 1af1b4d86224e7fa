"""Forecasts when those that wait will start: now and then, beside the rounds, for it takes longer than they may."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from crds.settings import Settings
from planning.expectations import expectations
from planning.model import Expectation, Snapshot
from planning.prediction import starts

log = logging.getLogger(__name__)

# Seconds between two forecasts, and how many times longer than the last one took: nobody pays for more than that.
PAUSE = 60.0
_REST = 3.0
# Seconds after which a round looks whether one that was begun is ready.
SOON = 5.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds to the start by UID, from the moment `at` on."""

    at: float
    early: dict[str, float]
    late: dict[str, float]


def forecast(snapshot: Snapshot, settings: Settings) -> Forecast:
    """Takes a round of placement for each moment at which something ends: half a minute for 7,500 that wait."""
    return Forecast(snapshot.now, starts(snapshot, settings, 0.5), starts(snapshot, settings, 0.9))


class Forecasts:
    """`make` makes one, where it is in nobody's way."""

    def __init__(self, make: Callable[[Snapshot, Settings], Awaitable[Forecast]]) -> None:
        self._make = make
        self._last: Forecast | None = None
        self._next = 0.0  # when one may begin, by the monotonic clock
        self._running: asyncio.Task[None] | None = None

    def told(self, snapshot: Snapshot, settings: Settings, queued: int) -> tuple[list[Expectation], float | None]:
        """What statuses should tell by the last forecast, and in how many seconds to look for a newer one, if one was
        begun. It is if somebody waits and the last is old.
        """
        if not queued:
            return [], None
        if self._running is None and time.monotonic() >= self._next:
            self._running = asyncio.create_task(self._run(snapshot, settings))
        found = expectations(snapshot, self._last.early, self._last.late, self._last.at) if self._last else []
        return found, SOON if self._running is not None else None

    async def _run(self, snapshot: Snapshot, settings: Settings) -> None:
        began = time.monotonic()
        try:
            self._last = await self._make(snapshot, settings)
        except Exception:  # nobody's place depends on it
            log.exception("no forecast of starts could be made")
        finally:
            self._next = time.monotonic() + max(PAUSE, _REST * (time.monotonic() - began))
            self._running = None
