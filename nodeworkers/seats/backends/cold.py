"""Parks by ending the server: nothing of it is kept, and it starts anew when it is asked for. Every server can be
parked so, and for each it is the last resort.

The kubelet starts its container again, which waits for the slot like any other that starts. It counts a restart, and
after several waits longer each time (at most five minutes).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from nodeworkers.seats.backend import Reading, Server
from nodeworkers.seats.world import Moved


class Cold:
    """A Backend, for one server. `end`: ends all processes of its container, and returns when they have ended; raises
    UntouchedError and UnsettledError.
    """

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self._end = end

    async def read(self, server: Server) -> Reading:
        return Reading("Running" if server.processes else "Gone")

    async def park(self, server: Server, epoch: int) -> Moved:
        await self._end()
        return Moved()

    async def wake(self, server: Server, epoch: int, devices: Mapping[str, str] | None = None) -> Moved:
        """There is nothing to wake: its container starts where its seat has the slot."""
        return Moved()
