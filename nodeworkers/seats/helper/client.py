"""Speaks to a group's helper, and begins one where there is none. For backends, and for whoever proves that memory is
free.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodeworkers.seats.backend import Process, Reading
from nodeworkers.seats.environment import outliving
from nodeworkers.seats.helper.driver import CardMemory
from nodeworkers.seats.helper.frames import HEAD, FrameError, packed, parsed, size
from nodeworkers.seats.helper.phases import Result
from nodeworkers.seats.world import UnsettledError, UntouchedError

_READ_SECONDS = 10.0  # for what changes nothing
_ENDING = 2.0  # that a helper takes at most from when it is killed until nobody can connect to it
_PAUSE = 10.0  # until a helper is begun anew that could not be
_MOST_LOG = 2**20  # bytes
_STARTING = 30.0  # that a new helper gets: attaching to the driver takes seconds
_CHANGES = ("park", "wake")
_log = logging.getLogger(__name__)


class HelperError(UntouchedError):
    """The helper cannot be asked, or does not do it. Nothing has changed. The text is a sentence."""


class _WentAwayError(HelperError):
    """It ended, or closed the connection, before it answered."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a helper is, which driver it has, and UUIDs of all GPUs that this shows."""

    pid: int
    version: str
    devices: Sequence[str]


class HelperClient:
    """One group's. `driver`: as the helper takes it; `phase`: seconds after which a park or a wake that still goes on
    is left to itself.
    """

    def __init__(self, socket: Path, driver: str, phase: float = 300.0) -> None:
        self._socket, self._driver, self._phase = socket, driver, phase
        self._starting = asyncio.Lock()
        self._trouble, self._again = "", 0.0  # why none could be begun, and when it is tried again

    async def hello(self) -> Hello:
        """Begins it where there is none. Raises HelperError."""
        told = await self._ask("hello", {}, _READ_SECONDS)
        return Hello(told["pid"], told["version"], told["devices"])

    async def read(self, processes: Sequence[Process]) -> Reading:
        """How a server's processes are. Raises HelperError."""
        told = await self._ask("read", {"processes": _pairs(processes)}, _READ_SECONDS)
        return Reading(told["held"], told=told["told"])

    async def memory(self, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        """Of these cards. Raises HelperError."""
        told = await self._ask("memory", {"cards": list(cards)}, _READ_SECONDS)
        return {
            card: CardMemory(each["free"], each["total"], {int(pid): held for pid, held in each["holders"].items()})
            for card, each in told["cards"].items()
        }

    async def park(self, processes: Sequence[Process], epoch: int) -> Result:
        """As `Phases.park`. Raises HelperError, and UnsettledError where it goes on and nobody waits any more."""
        return await self._change("park", {"processes": _pairs(processes), "epoch": epoch})

    async def wake(
        self, processes: Sequence[Process], parked: Sequence[Process], epoch: int, devices: Mapping[str, str]
    ) -> Result:
        """As `Phases.wake`; raises as `park` does."""
        asked = {"processes": _pairs(processes), "parked": _pairs(parked), "epoch": epoch, "devices": dict(devices)}
        return await self._change("wake", asked)

    async def _change(self, op: str, asked: Mapping[str, Any]) -> Result:
        told = await self._ask(op, asked, self._phase)
        processes = tuple(Process(pid, started) for pid, started in told["processes"])
        return Result(told["outcome"], told["told"], processes, told["seconds"])

    async def _ask(self, op: str, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ENDING
        while True:
            try:
                return await self._ask_once(op, fields, seconds)
            except _WentAwayError:  # what only reads is asked again, of the next one
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(0.02)

    async def _ask_once(self, op: str, fields: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        reader, writer = await self._connected()
        try:
            async with asyncio.timeout(seconds):
                writer.write(packed({"op": op, **fields}))
                await writer.drain()
                told = parsed(await reader.readexactly(size(await reader.readexactly(HEAD))))
        except TimeoutError as error:
            message = f"The helper on {self._socket} has not answered {op} for {seconds:.0f} s."
            raise (UnsettledError if op in _CHANGES else HelperError)(message) from error
        except (OSError, asyncio.IncompleteReadError, FrameError) as error:
            message = f"The helper on {self._socket} went away amid {op}: {error}."
            raise (UnsettledError if op in _CHANGES else _WentAwayError)(message) from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if told.get("ok") is True:
            return told
        message = f"The helper on {self._socket} refuses to {op}: {told.get('message')}."
        unsettled = op in _CHANGES and told.get("code") in ("busy", "broken")
        raise UnsettledError(message) if unsettled else HelperError(message)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(self._socket)
        async with self._starting:
            with contextlib.suppress(OSError):
                return await asyncio.open_unix_connection(self._socket)
            now = asyncio.get_running_loop().time()
            if now < self._again:  # where there is no driver, asking costs no process each time
                raise HelperError(self._trouble)
            try:
                while (found := await self._begun(now + _STARTING)) is None:
                    pass
            except HelperError as error:
                self._trouble, self._again = str(error), asyncio.get_running_loop().time() + _PAUSE
                raise
            return found

    async def _begun(self, deadline: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to a new helper, or to one that was there; None where that one ended meanwhile."""
        _log.info("a helper is begun on %s", self._socket)
        try:
            ended = await asyncio.to_thread(self._begin)
        except OSError as error:
            raise HelperError(f"No helper can be begun on {self._socket}: {error}.") from error
        try:
            loop, another = asyncio.get_running_loop(), False
            while loop.time() < deadline:
                with contextlib.suppress(OSError):
                    return await asyncio.open_unix_connection(self._socket)
                if select.select([ended], [], [], 0)[0]:
                    if not self._another():
                        break
                    another = True
                await asyncio.sleep(0.02)
        finally:
            os.close(ended)
        if another and loop.time() < deadline:
            return None
        raise HelperError(f"The helper on {self._socket} was begun and does not answer: {self._last_words()}.")

    def _another(self) -> bool:
        """Whether some helper has the lock, and may answer yet."""
        with self._socket.with_suffix(".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _last_words(self) -> str:
        said = self._log_file.read_text(errors="replace").rstrip()[-500:].rpartition("\n")[2]
        return f"{said.rstrip('.')} ({self._log_file})"

    @property
    def _log_file(self) -> Path:
        return self._socket.with_suffix(".log")

    def _begin(self) -> int:
        """As nobody's child: it outlives this process. A descriptor that comes to its end when the helper does."""
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "nodeworkers.seats.helper"]
        ended, lives = os.pipe()
        try:
            if self._log_file.exists() and self._log_file.stat().st_size > _MOST_LOG:
                self._log_file.unlink()
            with self._log_file.open("ab") as log:
                subprocess.run(
                    ["setsid", "--fork", *command, "--socket", str(self._socket.absolute()), "--driver", self._driver],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=outliving(), check=False,
                    pass_fds=[lives],
                )  # fmt: skip
        except OSError:
            os.close(ended)
            raise
        finally:
            os.close(lives)
        return ended


def _pairs(processes: Sequence[Process]) -> list[tuple[int, int]]:
    return [(process.pid, process.started) for process in processes]
