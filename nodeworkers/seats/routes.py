"""What the seat proxy is to serve, kept true: said again to a proxy that was started anew, and changed when a seat is.

For the node's seats. What goes on at the proxy comes back as `heard`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_words import Drained, News, ProxyAway, ProxyError, Route

_PAUSES = (0.1, 2.0)  # seconds between attempts to listen to the proxy: the first, and the longest
_log = logging.getLogger(__name__)


class Routes:
    """One node's. `put`, `drain` and `remove` raise as ProxyControl does."""

    def __init__(self, control: ProxyControl, heard: Callable[[News], None]) -> None:
        self._control, self._heard = control, heard
        self._wanted: dict[str, Route] = {}
        self._draining: set[str] = set()
        self._removing: dict[str, int] = {}

    @property
    def wanted(self) -> Mapping[str, Route]:
        """What each seat's route is to be."""
        return self._wanted

    async def put(self, route: Route) -> None:
        """Serves a seat so from now on, and after a restart of the proxy too, whether this call succeeds or not."""
        self._removing.pop(route.seat, None)
        self._wanted[route.seat] = route
        await self._control.set(route)

    async def amend(self, route: Route) -> None:
        """The same for what no switch waits for: says nothing where nothing is new, and leaves a drain alone."""
        before = self._wanted.get(route.seat)
        if route == before or route.seat in self._draining:
            return
        await self.put(route)

    async def drain(self, seat: str, epoch: int, seconds: float, *, cut: bool = False) -> Drained:
        """As ProxyControl.drain."""
        self._draining.add(seat)
        try:
            return await self._control.drain(seat, epoch, seconds, cut=cut)
        finally:
            self._draining.discard(seat)

    async def remove(self, seat: str, epoch: int) -> None:
        """Serves it no more."""
        self._wanted.pop(seat, None)
        self._removing[seat] = epoch
        if seat in await self._control.state():
            await self._control.remove(seat, epoch)
        self._removing.pop(seat, None)

    async def keep(self, seats: Collection[str]) -> None:
        """Serves those and no others: also none of which only the proxy knows, from before this process began."""
        there = await self._control.state()
        for seat in (there.keys() | self._wanted.keys()) - set(seats):
            epoch = there[seat].route.epoch if seat in there else 0
            await self.remove(seat, max(epoch, self._wanted[seat].epoch if seat in self._wanted else 0))

    async def run(self) -> None:
        """Listens to the proxy until cancelled. Whatever it has when it is met is put right first."""
        pause = _PAUSES[0]
        while True:
            try:
                await self._put_right()
                async for news in self._control.watch():
                    pause = _PAUSES[0]
                    self._heard(news)
            except ProxyAway:
                pass  # told by whoever keeps it running
            except ProxyError as error:
                _log.warning("%s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    async def _put_right(self) -> None:
        there = {seat: state.route for seat, state in (await self._control.state()).items()}
        for seat, epoch in self._removing.items():
            if seat in there:
                await self._control.remove(seat, max(epoch, there[seat].epoch))
        for seat, route in list(self._wanted.items()):
            # A proxy that has gone on knows better whether a drain goes on than what was written down before it.
            if seat in self._draining and seat in there:
                continue
            if there.get(seat) != route:
                await self._control.set(route)
