"""Speaks to the node's seat proxy, which carries the requests of all seats: says what to serve, is told what goes on.

For whoever switches seats. The proxy (`native/seat-proxy`) is a process of its own and goes on with what it was told
last while nobody speaks to it; `ProxyControl.state` says what that was.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from nodeworkers.seats.proxy_words import (
    Drained,
    Hello,
    HoldTimes,
    News,
    Overruled,
    ProxyAway,
    ProxyError,
    Route,
    SeatMetrics,
    SeatState,
    StaleEpoch,
    Traffic,
)

VERSION = 1
_T = TypeVar("_T")
_LINE = 64 * 1024 * 1024  # bytes of an answer: the state of all seats is one line
_ASKED = 256 * 1024  # bytes of a request that the proxy reads
_SECONDS = 10.0


@dataclass
class _Link:
    """One connection, and who waits on it for which answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    broken: bool = False


class ProxyControl:
    """The node's word with its proxy. Connects when first used, and again after the proxy was replaced; calls may
    overlap.

    Every call raises ProxyAway where nobody answers, StaleEpoch where a newer speaker was heard, and ProxyError with
    the proxy's sentence for whatever else it refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> ProxyControl:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection; the proxy goes on."""
        link, self._link = self._link, None
        if link is not None:
            await _end(link)

    async def hello(self) -> Hello:
        """Which proxy this is."""
        found = await self._ask("hello", {})
        return _parsed(lambda: Hello(found["version"], found["pid"], found["up"]))

    async def set(self, route: Route) -> None:
        """Serves a seat so from now on. Opened, it gets the requests that are held for it at once, in their order."""
        await self._ask("set", {"route": asdict(route)})

    async def remove(self, seat: str, epoch: int) -> None:
        """Serves a seat no more: requests in flight go on, those held are refused."""
        await self._ask("remove", {"seat": seat, "epoch": epoch})

    async def drain(self, seat: str, epoch: int, seconds: float, *, cut: bool = False) -> Drained:
        """Forwards no new request of an open seat but holds them, and waits until none is in flight or `seconds` have
        passed; with `cut` those left are broken off then. It stays so until the next `set`. Raises Overruled if
        that comes first.
        """
        asked = {"seat": seat, "epoch": epoch, "seconds": seconds, "cut": cut}
        found = await self._ask("drain", asked, seconds + _SECONDS)
        return _parsed(lambda: Drained(found["left"], found["cut"]))

    async def state(self) -> dict[str, SeatState]:
        """All seats by name, as the proxy has them: what a node that comes back goes on from."""
        found = await self._ask("state", {})

        def read() -> dict[str, SeatState]:
            states = [SeatState(Route.read(each["route"]), Traffic.read(each["traffic"])) for each in found["seats"]]
            return {each.route.seat: each for each in states}

        return _parsed(read)

    async def metrics(self) -> dict[str, SeatMetrics]:
        """Counters of all seats by name."""
        found = await self._ask("metrics", {})

        def read() -> dict[str, SeatMetrics]:
            result = {}
            for seat, counts in found["seats"].items():
                times = counts.pop("held_seconds")
                held = HoldTimes(tuple(times["bounds"]), tuple(times["buckets"]), times["sum"])
                result[seat] = SeatMetrics(counts, held)
            return result

        return _parsed(read)

    async def watch(self, interval: float = 0.01) -> AsyncIterator[News]:
        """What goes on, until the proxy goes away (then ProxyAway): all seats first, and then those that change,
        gathered over `interval` seconds (0-60) but at once where a first request is held. On a connection of its own.
        """
        link = await self._connect()
        try:
            _send(link, 0, "watch", {"interval": interval})
            _checked(await self._line(link))
            while True:
                found = await self._line(link)
                yield _news(found)
        finally:
            await _end(link)

    async def _connect(self) -> _Link:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_LINE)
        except OSError as error:
            why = error.strerror or error
            raise ProxyAway(f"The seat proxy does not answer on {self._path}: {why}. Is it running?") from error
        return _Link(reader, writer)

    async def _line(self, link: _Link) -> dict[str, Any]:
        try:
            line = await link.reader.readline()
        except (OSError, ValueError) as error:
            raise ProxyAway(f"The seat proxy's socket {self._path} broke: {error}.") from error
        if not line.endswith(b"\n"):
            raise ProxyAway(f"The seat proxy has closed {self._path}.")
        found = _parsed(lambda: orjson.loads(line))
        if not isinstance(found, dict):
            raise ProxyError(f"The seat proxy says {line[:80]!r}, which is no answer.")
        return found

    async def _ask(self, op: str, fields: Mapping[str, Any], seconds: float = _SECONDS) -> dict[str, Any]:
        async with self._connecting:
            if self._link is not None and self._link.broken:
                await self.close()
            if self._link is None:
                self._link = await self._connect()
                self._link.task = asyncio.create_task(self._read(self._link))
            link = self._link
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        link.waiting[number] = answer
        try:
            _send(link, number, op, fields)
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 may lose a cancellation
                return _checked(await answer)
        except TimeoutError as error:
            raise ProxyAway(f"The seat proxy has not answered {op} within {seconds:.0f} s.") from error
        finally:
            link.waiting.pop(number, None)

    async def _read(self, link: _Link) -> None:
        """Gives answers to those who wait for them, until the connection ends."""
        error = ProxyAway(f"The connection to the seat proxy at {self._path} was closed.")
        try:
            while True:
                found = await self._line(link)
                waiter = link.waiting.pop(found["id"], None) if isinstance(found.get("id"), int) else None
                if waiter is not None and not waiter.done():
                    waiter.set_result(found)
        except ProxyAway as gone:
            error = gone
        except ProxyError as strange:
            error = ProxyAway(str(strange))
        finally:
            link.broken = True
            for waiter in link.waiting.values():
                if not waiter.done():
                    waiter.set_exception(error)


def _send(link: _Link, number: int, op: str, fields: Mapping[str, Any]) -> None:
    line = orjson.dumps({"v": VERSION, "id": number, "op": op, **fields})
    if len(line) > _ASKED:
        raise ProxyError(f"What the seat proxy is asked ({op}) has {len(line)} bytes, of at most {_ASKED}.", "too_long")
    link.writer.write(line + b"\n")


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    if found.get("ok") is True:
        return found
    code, message = str(found.get("code")), str(found.get("message"))
    kind = {"stale": StaleEpoch, "overruled": Overruled}.get(code, ProxyError)
    raise kind(f"The seat proxy refuses: {message}.", code)


def _news(found: Mapping[str, Any]) -> News:
    return _parsed(lambda: News(tuple(Traffic.read(each) for each in found["seats"]), tuple(found["removed"])))


def _parsed(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProxyError(f"The seat proxy says what this berth does not understand: {error!r:.200}.") from error


async def _end(link: _Link) -> None:
    if link.task is not None:
        link.task.cancel()
        with suppress(asyncio.CancelledError):
            await link.task
    link.writer.close()
    with suppress(OSError):
        await link.writer.wait_closed()
