"""Keeps one vendor's watcher process going for the node process, and tells what it sees or that it sees nothing.

A watcher that hangs is ended, one that crashes or prints nonsense is started again, each with a sentence, and neither
holds up anything else. A vendor without hardware on the node has no process; its hardware is looked for time and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodeworkers.hardware.wire import MOST_LINE, WireError, decode
from planning.devices.cards import Sight, Vendor

PCI_VENDORS: dict[Vendor, str] = {"nvidia": "0x10de", "amd": "0x1002", "tenstorrent": "0x1e52"}
_BIG_LINE = 16 * 1024  # bytes that take a millisecond to believe: more are not read on the event loop
_MOST_LINES, _WINDOW = 100, 5.0  # lines in so many seconds; an intact watcher prints 50 at most
_LAST_WORDS = 400  # characters of what a watcher that ended had said last
_STDERR_KEPT = 4096  # bytes
_CHUNK, _BREATH = 64 * 1024, 0.01  # bytes of it at once, and seconds between them
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each thing may take, in seconds. `first`: until a new watcher's first line, for a driver may have to
    wake its cards; `silence`: between lines after that; `polite`: to end when asked; `death`: to be gone when killed;
    `settled`: how long a watcher must have seen for its next failure to count as the first.
    """

    first: float = 60.0
    silence: float = 15.0
    polite: float = 1.0
    death: float = 5.0
    look_for_hardware: float = 30.0
    retry_first: float = 0.5
    retry_most: float = 60.0
    settled: float = 60.0


def command(vendor: Vendor, simulated: Path | None = None, tree: Path | None = None) -> list[str]:
    """What starts a vendor's watcher: of the machine's hardware, or of the machine that the file `simulated` describes
    and that is laid out in the folder `tree`.
    """
    line = [sys.executable, "-I", "-m", "nodeworkers.hardware.watcher", vendor, "--parent", str(os.getpid())]
    if simulated is not None and tree is not None:
        line += ["--simulated", str(simulated.absolute()), "--tree", str(tree.absolute())]
    return line


def plugged(vendor: Vendor, sys: Path = Path("/sys")) -> bool:
    """Whether the kernel knows of any PCI device of this vendor, or its driver of a card; asks no driver."""
    classes = sys / "class" / vendor
    with contextlib.suppress(OSError):
        if next(classes.iterdir(), None) is not None:
            return True
    with contextlib.suppress(OSError):
        for device in (sys / "bus" / "pci" / "devices").iterdir():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if (device / "vendor").read_text().strip().lower() == PCI_VENDORS[vendor]:
                    return True
    return False


class Watching:
    """One vendor's watcher. `sight` is the last look, None until there was one; `problem` says why there is none now,
    '' while all is well; `pid` is the process, None while there is none.
    """

    def __init__(
        self,
        vendor: Vendor,
        command: Sequence[str],
        on_sight: Callable[[Sight], None],
        on_silence: Callable[[str], None],
        there: Callable[[], bool] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Calls `on_sight` with each look, also an empty one where the vendor has no hardware here, and `on_silence`
        with a sentence each time that looks fail to come. `there` (None: `plugged`) tells, quickly, whether a watcher
        is worth starting; it is called in a thread.
        """
        self.vendor = vendor
        self.sight: Sight | None = None
        self.problem = ""
        self.pid: int | None = None
        self._command = list(command)
        self._on_sight, self._on_silence = on_sight, on_silence
        self._there = there or (lambda: plugged(vendor))
        self._patience = patience or Patience()
        self._seeing_since: float | None = None

    async def run(self) -> None:
        """Watches until it is cancelled; then the watcher is ended. Call it in a thread that lives as long: the watcher
        ends with the thread that started it.
        """
        patience, failures = self._patience, 0
        while True:
            await self._until_there()
            self._seeing_since = None
            failed = await self._life()
            if not failed:
                failures = 0
                continue
            since = self._seeing_since
            settled = since is not None and time.monotonic() - since >= patience.settled
            failures = 1 if settled else failures + 1
            await asyncio.sleep(min(patience.retry_most, patience.retry_first * 2 ** min(failures - 1, 16)))

    async def _until_there(self) -> None:
        empty = False
        while not await asyncio.to_thread(self._there):
            if not empty:
                self._saw(Sight(self.vendor))
                empty = True
            await asyncio.sleep(self._patience.look_for_hardware)

    async def _life(self) -> bool:
        """One watcher, from its start until it is gone. Whether it failed: otherwise there is nothing to see."""
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=_environment(), cwd="/", start_new_session=True, limit=MOST_LINE,
            )  # fmt: skip
        except OSError as error:
            self._failed(f"cannot be started: {error.strerror or error}. Install berth on this node anew.")
            return True
        self.pid = child.pid
        words = _Words(child.stderr)
        politely = True
        try:
            why = await self._listen(child, words)
            politely = not why
            if why:
                self._failed(why)
            await self._end(child, politely)
        except asyncio.CancelledError:
            await self._end(child, politely, forever=False)
            raise
        finally:
            words.close()
            self.pid = None
        return bool(why)

    async def _listen(self, child: asyncio.subprocess.Process, words: _Words) -> str:
        """Passes on what it sees until it is to be ended or has ended. Returns why, '' if it has nothing to see."""
        patience, window, lines = self._patience, time.monotonic(), 0
        searched = window
        while True:
            wait = patience.first if self._seeing_since is None else patience.silence
            try:
                async with asyncio.timeout(wait):
                    line = await _line(child)
                if not line.endswith(b"\n"):
                    return await self._ended(child, words)
                sight = await self._believed(line)
            except TimeoutError:
                return (
                    f"has said nothing for {wait:g} s, as when a driver hangs. It is ended and started anew; look into "
                    "the node's kernel log."
                )
            except WireError as error:
                return f"said what is no look at the hardware: {error}. It is ended and started anew."
            now = time.monotonic()
            if now - window > _WINDOW:
                window, lines = now, 0
            lines += 1
            if lines > _MOST_LINES:
                return f"said {lines} lines in {now - window:.1f} s. It is ended and started anew."
            if self._seeing_since is None:
                self._seeing_since = now
            self._saw(sight)
            if not sight.cards and now - searched >= patience.look_for_hardware:
                searched = now
                if not await asyncio.to_thread(self._there):
                    return ""

    async def _ended(self, child: asyncio.subprocess.Process, words: _Words) -> str:
        if not await _gone(child, self._patience.polite):
            return "closed its output. It is ended and started anew."
        return f"{_ending(child.returncode)} and is started anew. {await words.last(self._patience.polite)}"

    async def _believed(self, line: bytes) -> Sight:
        if len(line) > _BIG_LINE:
            return await asyncio.to_thread(decode, line, self.vendor)
        return decode(line, self.vendor)

    async def _end(self, child: asyncio.subprocess.Process, politely: bool, forever: bool = True) -> None:
        """Ends it, and returns when it is gone: a second one would hang beside it. It only reads, so it may be killed
        at any moment. What the kernel itself holds dies when the kernel lets go, and not before; where not `forever`,
        that is left.
        """
        patience = self._patience
        if child.returncode is not None:
            return
        if politely:
            _send(child, signal.SIGTERM)
            if await _gone(child, patience.polite):
                return
        _send(child, signal.SIGKILL)
        if await _gone(child, patience.death):
            return
        message = (
            f"cannot be ended: the kernel holds process {child.pid} (state {_state(child.pid)}). No other is started "
            "before it is gone; where that never happens, restart the node."
        )
        if not forever:
            _log.warning("The watcher of %s %s", self.vendor, message)
            return
        self._failed(message)
        await child.wait()

    def _saw(self, sight: Sight) -> None:
        self.sight, self.problem = sight, ""
        try:
            self._on_sight(sight)
        except Exception:
            _log.exception("A look at the node's %s cards was not taken in.", self.vendor)

    def _failed(self, what: str) -> None:
        self.problem = f"The watcher of the node's {self.vendor} cards {what}"
        _log.warning("%s", self.problem)
        try:
            self._on_silence(self.problem)
        except Exception:
            _log.exception("The silence of the watcher of %s cards was not taken in.", self.vendor)


class _Words:
    """What a process says on stderr: read to the end so that it is not held up, and the end of it kept."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        self._kept = b""
        self._listening = asyncio.create_task(self._listen(stream))

    async def _listen(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (chunk := await stream.read(_CHUNK)):
            self._kept = (self._kept + chunk)[-_STDERR_KEPT:]
            await asyncio.sleep(_BREATH)  # one that never stops gets no more of this process than that

    async def last(self, within: float) -> str:
        """A sentence of its last line, which may be on its way for some seconds."""
        await asyncio.wait([self._listening], timeout=within)
        text = self._kept.decode("utf-8", "replace").strip().rpartition("\n")[2][-_LAST_WORDS:]
        shown = "".join(each if each.isprintable() else " " for each in text).strip()
        return f"Its last words: {shown}" if shown else "It said nothing on stderr."

    def close(self) -> None:
        self._listening.cancel()


async def _line(child: asyncio.subprocess.Process) -> bytes:
    """The next line; without a newline at its end where the output ended. Raises WireError if it is too long."""
    if child.stdout is None:
        raise ValueError("the watcher was started without a pipe")
    try:
        return await child.stdout.readline()
    except ValueError:
        raise WireError(f"a line of more than {MOST_LINE:,} bytes") from None


async def _gone(child: asyncio.subprocess.Process, within: float) -> bool:
    try:
        async with asyncio.timeout(within):
            await child.wait()
    except TimeoutError:
        return False
    return True


def _send(child: asyncio.subprocess.Process, sent: signal.Signals) -> None:
    """To it and to all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, sent)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return f"ended with code {code}"


def _state(pid: int) -> str:
    """The letter of proc_pid_stat(5): D is a call into the kernel that nothing interrupts."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return "unknown"


def _environment() -> dict[str, str]:
    """A driver's library may lie where only the container's own settings say."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {"PATH": os.defpath, "LC_ALL": "C.UTF-8", **({"LD_LIBRARY_PATH": path} if path else {})}
