"""Work of the allocation core that may hang, done beside the loop which answers the kubelet.

In threads of its own: what hangs in the loop's pool of threads takes it from everybody, and keeps the process from
ending.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Beside:
    """At most one thread for each kind of work: what hangs already is not begun again."""

    def __init__(self) -> None:
        self._busy: dict[str, asyncio.Future[Any]] = {}

    async def run(self, what: str, work: Callable[[], T], seconds: float) -> T:
        """Waits for `work` so long. Raises TimeoutError, and what `work` raises."""
        until = time.monotonic() + seconds
        while (before := self._busy.get(what)) is not None and (left := until - time.monotonic()) > 0:
            await asyncio.wait([before], timeout=left)
        if what in self._busy:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        self._busy[what] = outcome
        outcome.add_done_callback(lambda _: self._busy.pop(what))
        outcome.add_done_callback(lambda done: done.exception())  # if nobody waits any more, nobody else looks

        def thread() -> None:
            try:
                settle, value = outcome.set_result, work()
            except Exception as error:
                settle, value = outcome.set_exception, error  # type: ignore[assignment]
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, value)

        threading.Thread(target=thread, name=what[:40], daemon=True).start()
        done, _ = await asyncio.wait([outcome], timeout=until - time.monotonic())
        if not done:
            raise TimeoutError
        return outcome.result()
