"""How the node's activities work: disk work in threads, carried to its end though the order was taken back meanwhile,
and a sign of life for Temporal as long as it lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from temporalio import activity

from nodeworkers.store import Store

P = ParamSpec("P")
T = TypeVar("T")
BEAT = 5.0  # seconds


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Disk work, so that the kubelet's calls need not wait for it. Whoever is cancelled meanwhile goes on once it is
    done: what was decided is recorded, and no folder is taken from under it.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


@asynccontextmanager
async def beating(doing: Callable[[], str]) -> AsyncIterator[None]:
    """Tells Temporal what the activity is doing, again and again. By its answers a cancellation comes here."""

    async def beat() -> None:
        while True:
            activity.heartbeat(doing())
            await asyncio.sleep(BEAT)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def staged(store: Store) -> AsyncIterator[Path]:
    """`Store.staged` without its disk work on the event loop."""
    staging = store.staged()
    content = await in_thread(staging.__enter__)
    try:
        yield content
    finally:
        await in_thread(staging.__exit__, None, None, None)
