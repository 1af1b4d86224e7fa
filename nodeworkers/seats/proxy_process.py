"""Keeps a seat proxy running beside the node's process, and out of its life: the proxy goes on serving while this
process is replaced, and is found again by whoever comes next.

Where somebody else starts the proxy (a container of its own), it is only waited for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
from pathlib import Path

from nodeworkers.seats.environment import outliving
from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_words import ProxyAway, ProxyError

LOOK = 1.0  # seconds between two looks whether it is there
_STARTING = 10.0  # seconds that a proxy gets to answer
_PAUSES = (0.5, 15.0)  # seconds between starts that fail: the first, and the longest
_log = logging.getLogger(__name__)


class ProxyProcess:
    """One node's. `program`: what to start, None where others do; `control` speaks to its socket."""

    def __init__(self, program: Path | None, socket: Path, log: Path, control: ProxyControl) -> None:
        self._program, self._socket, self._log, self._control = program, socket, log, control
        self.trouble = "the seat proxy was not reached yet"
        """Why nobody serves seats' requests, a sentence; '' while the proxy answers."""

    async def run(self) -> None:
        """Looks after it until cancelled; the proxy stays."""
        pause = _PAUSES[0]
        while True:
            if await self._answers():
                pause = _PAUSES[0]
                await asyncio.sleep(LOOK)
                continue
            if self._program is not None and await self._start(self._program):
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    async def _answers(self) -> bool:
        try:
            hello = await self._control.hello()
        except ProxyAway as away:
            self._hear(str(away))
            return False
        except ProxyError as strange:  # somebody is there: a second one would not help
            self._hear(str(strange))
            return True
        if self.trouble:
            _log.info("The seat proxy %s answers (process %d, up for %.0f s).", hello.version, hello.pid, hello.up)
        self.trouble = ""
        return True

    async def _start(self, program: Path) -> bool:
        """Whether it answers. One that was begun before and is slow is not doubled: it holds a lock on its socket."""
        try:
            await asyncio.to_thread(self._begin, program)
        except OSError as error:
            self._hear(f"The seat proxy {program} cannot be started: {error.strerror or error}.")
            return False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _STARTING
        while loop.time() < deadline:
            if await self._answers():
                return True
            await asyncio.sleep(0.05)
        self._hear(f"The seat proxy {program} was started and does not answer; its log is {self._log}.")
        return False

    def _begin(self, program: Path) -> None:
        """As nobody's child, so that nobody has to wait for its end."""
        if not os.access(program, os.X_OK):
            program.stat()
            raise PermissionError(errno.EACCES, "it is no program")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            subprocess.run(
                ["setsid", "--fork", str(program), "--control", str(self._socket)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=outliving(), check=False,
            )  # fmt: skip

    def _hear(self, trouble: str) -> None:
        if trouble != self.trouble:
            _log.warning("%s", trouble)
        self.trouble = trouble
