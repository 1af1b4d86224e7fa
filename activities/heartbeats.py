"""A sign of life to Temporal while an activity works, so that one that was lost is begun anew soon.

What is lost with a process that was killed, the worker or Temporal itself, nobody reports: it is missed when it is
silent for as long as its workflow allows (SILENCE). Without that a lost round would keep everybody from being placed
for as long as a round may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio import activity

BEAT = timedelta(seconds=5)  # the worker, too, sends them on that often


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Begins after a while: a short activity costs no call."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT.total_seconds())
            activity.heartbeat()

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
