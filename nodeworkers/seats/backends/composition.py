"""Parks by the engine's sleep and then by the driver: what the engine can do without is dropped, and what it keeps on
its GPUs all the same (contexts, graphs, the allocator's rest) leaves them too.

It wakes in the opposite order. Between the two a server is asleep and not parked, which reads as Locked: it serves
nobody, and each of the two calls goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nodeworkers.seats.backend import Backend, Reading, Server
from nodeworkers.seats.world import Moved


class Composition:
    """A Backend of two: `first` parks first and wakes last, `second` the other way round."""

    def __init__(self, first: Backend, second: Backend) -> None:
        self._first, self._second = first, second

    async def read(self, server: Server) -> Reading:
        # Of a server that the driver holds the engine is not asked: it would answer once it is let go.
        outer = await self._second.read(server)
        if outer.held != "Running":
            return outer
        inner = await self._first.read(server)
        if inner.held == "Parked":
            return replace(inner, held="Locked", told="Its engine sleeps, and the driver has not parked it.")
        return inner

    async def park(self, server: Server, epoch: int) -> Moved:
        if (await self._second.read(server)).held == "Parked":
            return await self._second.park(server, epoch)
        return _both(await self._first.park(server, epoch), await self._second.park(server, epoch))

    async def wake(self, server: Server, epoch: int, devices: Mapping[str, str] | None = None) -> Moved:
        return _both(await self._second.wake(server, epoch, devices), await self._first.wake(server, epoch))


def _both(one: Moved, other: Moved) -> Moved:
    return Moved(one.bytes + other.bytes, other.processes or one.processes, {**one.seconds, **other.seconds})
