"""One order at a time for each cache, and the newest wins: an older one that is under way is ended, an older one that
comes late is refused. For the node's activities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from temporalio.exceptions import ApplicationError

from planning.caches.orders import SUPERSEDED

T = TypeVar("T")
_REMEMBERED = 4096  # caches that are gone, whose late orders are known


@dataclass(slots=True)
class _Turn(Generic[T]):
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    newest: int = 0
    job: asyncio.Task[T] | None = None
    of: int = 0


class Turns(Generic[T]):
    """The orders of one node."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn[T]] = {}
        self._past: dict[str, int] = {}

    async def take(self, uid: str, epoch: int, begun: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Does the work of an order once it is its turn. `begun`: the newest epoch on record for the cache `uid`.

        Raises Late where a newer one had begun before, and ApplicationError (SUPERSEDED, not to be repeated) where one
        comes meanwhile.
        """
        turn = self._turns.setdefault(uid, _Turn())
        newest = max(begun, turn.newest, self._past.get(uid, 0))
        if epoch < newest:
            self._leave(uid, turn)
            raise Late(epoch, newest)
        turn.newest = epoch
        if turn.job is not None and turn.of < epoch:
            turn.job.cancel()
        turn.waiting += 1
        try:
            async with turn.lock:
                if epoch < turn.newest:
                    raise superseded(epoch, turn.newest)
                turn.job, turn.of = asyncio.create_task(work()), epoch
                try:
                    return await turn.job
                except asyncio.CancelledError:
                    own = asyncio.current_task()
                    if own is not None and own.cancelling():
                        raise
                    raise superseded(epoch, turn.newest) from None
                finally:
                    turn.job = None
        finally:
            turn.waiting -= 1
            self._leave(uid, turn)

    def _leave(self, uid: str, turn: _Turn[T]) -> None:
        if turn.waiting:
            return
        self._turns.pop(uid, None)
        if turn.newest:
            self._past.pop(uid, None)
            self._past[uid] = turn.newest
            if len(self._past) > _REMEMBERED:
                del self._past[next(iter(self._past))]


class Late(Exception):
    """An order that is older than `newest`, which the node has begun."""

    def __init__(self, epoch: int, newest: int) -> None:
        super().__init__(f"Order {epoch} is older than {newest}, which this node has begun.")
        self.newest = newest


def superseded(epoch: int, newest: int) -> ApplicationError:
    """What an order is answered that a newer one overtakes: who gave that one waits for this one no more."""
    return ApplicationError(str(Late(epoch, newest)), type=SUPERSEDED, non_retryable=True)
