"""Tells when something happened to the node's containers: by the runtime's events where it has some, else by asking.

For whoever waits for a seat's container. It never ends by itself: a runtime that is away, slow, or answers nonsense is
tried again, and `trouble` says what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from nodeworkers.seats.containers import SOCKET
from nodeworkers.seats.cri import Cri, CriError, Session, UnknownCallError

_POLL, _CHECK = 1.0, 10.0  # seconds between lists: without events, and beside them, for they may stop without a word
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_log = logging.getLogger(__name__)


class Following:
    """Follows while `run` runs. `trouble` is a sentence that says what is wrong, '' for nothing; `news` counts what was
    heard of.
    """

    def __init__(self, socket: Path = SOCKET, *, poll: float = _POLL, check: float = _CHECK) -> None:
        """`poll` and `check`: seconds between lists, without events and beside them."""
        self._cri, self._poll, self._check = Cri(socket), poll, check
        self._seen: frozenset[tuple[str, int]] | None = None
        self._woken = asyncio.Event()
        self.news = 0
        self.trouble = "The container runtime has not been asked yet."

    async def changed(self, news: int, seconds: float) -> int:
        """Returns `news` as it is once it is another than this one, or after `seconds`: whoever reads it, looks, and
        then waits with what it read misses nothing.
        """
        if news == self.news:
            woken = self._woken
            try:
                async with asyncio.timeout(seconds):
                    await woken.wait()
            except TimeoutError:
                pass
        return self.news

    async def run(self) -> None:
        """Until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            try:
                async with self._cri.session() as session:
                    await self._list(session)
                    self._tell("")
                    began = time.monotonic()
                    try:
                        await self._follow(session)
                    finally:
                        if time.monotonic() - began > _LONGEST_PAUSE:
                            pause = _FIRST_PAUSE
            except CriError as error:
                self._tell(str(error))
            except Exception as error:
                _log.exception("Following the container runtime failed.")
                self._tell(f"Following the container runtime failed: {error}.")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _follow(self, session: Session) -> None:
        if not await _has_events(session):
            await self._ask_again(session, self._poll)
        hearing = asyncio.ensure_future(self._hear(session))
        asking = asyncio.ensure_future(self._ask_again(session, self._check))
        try:
            await asyncio.wait((hearing, asking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (hearing, asking):
                each.cancel()
            results = await asyncio.gather(hearing, asking, return_exceptions=True)
        for result in results:
            if isinstance(result, UnknownCallError):
                await self._ask_again(session, self._poll)
            if isinstance(result, Exception):
                raise result

    async def _hear(self, session: Session) -> None:
        async for _ in session.events():
            self._wake()
        raise CriError("The container runtime ended its events: it is being restarted, perhaps.")

    async def _ask_again(self, session: Session, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._list(session)

    async def _list(self, session: Session) -> None:
        seen = frozenset((each.id, each.state) for each in await session.containers())
        if seen != self._seen:
            self._seen = seen
            self._wake()

    def _tell(self, trouble: str) -> None:
        if trouble != self.trouble:
            if trouble:
                _log.warning("%s", trouble)
            self.trouble = trouble
            self._wake()

    def _wake(self) -> None:
        self.news += 1
        self._woken.set()
        self._woken = asyncio.Event()


async def _has_events(session: Session) -> bool:
    """containerd 1 has one queue of events, and what berth takes from it a kubelet that reads them misses."""
    runtime = await session.version()
    return not (runtime.runtime_name == "containerd" and runtime.runtime_version.removeprefix("v").startswith("1."))
