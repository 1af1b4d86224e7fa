"""The helper's side of its socket: one phase at a time, in a thread that nobody breaks off; an older epoch than the
newest that it ever heard is refused before the driver is touched.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from nodeworkers.seats.backend import Process
from nodeworkers.seats.helper.driver import Driver, DriverError
from nodeworkers.seats.helper.frames import FrameError, packed, read
from nodeworkers.seats.helper.phases import Phases, Result, held, states

MOST_TALKING = 32  # connections at once
_SILENT = 30.0  # seconds after which a connection on which nothing comes is closed
_ENDING = "ending"
_log = logging.getLogger(__name__)


class _Refused(Exception):
    """What was asked is not done. `code` is a word for programs, the text a sentence."""

    def __init__(self, code: str, told: str) -> None:
        super().__init__(told)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Busy:
    """What goes on, since when, and on which processes."""

    what: str
    since: float
    processes: frozenset[Process] = frozenset()
    asked: object = None  # all that it was asked with, but for the epoch
    over: threading.Event = field(default_factory=threading.Event)
    results: list[Result] = field(default_factory=list)  # its one result, once it is over

    def __str__(self) -> str:
        return f"{self.what} for {time.monotonic() - self.since:.0f} s"


class Helper:
    """One group's. `driver` is ready."""

    def __init__(self, driver: Driver, path: Path) -> None:
        """`path`: of the socket; the newest epoch is written beside it."""
        self._driver, self._path = driver, path
        self._phases = Phases(driver)
        self._turn = threading.Lock()
        self._busy: _Busy | None = None
        self._untold: _Busy | None = None  # what ended last, as long as nobody has heard how
        self._talking = threading.BoundedSemaphore(MOST_TALKING)
        self._epochs = path.with_suffix(".epoch")
        self._epoch = _number(self._epochs)

    def serve(self, listener: socket.socket) -> None:
        """Until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not self._talking.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def end(self) -> None:
        """Waits for what goes on; after that nothing begins."""
        while True:
            with self._turn:
                if self._busy is None:
                    self._busy = _Busy(_ENDING, time.monotonic())
                    return
            time.sleep(0.05)

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection, cast(BinaryIO, connection.makefile("rwb")) as stream:
                connection.settimeout(_SILENT)
                while (asked := read(stream)) is not None:
                    answer = self._answer(asked)
                    connection.settimeout(_SILENT)
                    stream.write(packed(answer))
                    stream.flush()
                    if answer["ok"]:
                        self._heard_of(asked)
        except FrameError as error:
            _log.warning("somebody who speaks to this helper was sent away: %s", error)
        except OSError:  # whoever asked is gone; what goes on goes on
            pass
        finally:
            self._talking.release()

    def _answer(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return {"ok": True, **self._do(asked)}
        except _Refused as refused:
            return {"ok": False, "code": refused.code, "message": str(refused)}
        except DriverError as error:
            return {"ok": False, "code": "driver", "message": f"the GPUs' driver says {error.code}"}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return {"ok": False, "code": "bad", "message": f"what was asked makes no sense: {error!r:.200}"}
        except Exception as error:
            _log.exception("a mistake of the helper's")
            return {"ok": False, "code": "broken", "message": f"the helper failed: {error!r:.200}"}

    def _do(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        match asked["op"]:
            case "hello":
                return {"pid": os.getpid(), "version": self._driver.version(), "devices": list(self._driver.devices())}
            case "read":
                return self._read(_processes(asked["processes"]))
            case "memory":
                found = self._driver.memory([str(card) for card in asked["cards"]])
                return {"cards": {card: asdict(each) for card, each in found.items()}}
            case "park":
                processes = _processes(asked["processes"])
                return self._carry_out(asked, "parking", processes, lambda: self._phases.park(processes))
            case "wake":
                processes, parked = _processes(asked["processes"]), _processes(asked["parked"])
                devices = {str(old): str(new) for old, new in asked["devices"].items()}
                phases = self._phases
                return self._carry_out(asked, "waking", processes, lambda: phases.wake(processes, parked, devices))
        raise _Refused("bad", f"nothing is called {asked['op']!r:.40}")

    def _read(self, processes: Sequence[Process]) -> Mapping[str, Any]:
        busy = self._busy
        if busy is not None and busy.processes.intersection(processes):
            return {"held": "Changing", "told": str(busy), "processes": []}
        found = states(self._driver, processes)
        return {
            "held": held(found.values()),
            "told": "",
            "processes": [(process.pid, process.started) for process in found],
        }

    def _carry_out(
        self, asked: Mapping[str, Any], what: str, processes: Sequence[Process], phase: Callable[[], Result]
    ) -> Mapping[str, Any]:
        epoch = asked["epoch"]
        if not isinstance(epoch, int) or isinstance(epoch, bool):
            raise _Refused("bad", "an epoch is a whole number")
        key = _key(asked)
        with self._turn:
            if epoch < self._epoch:
                raise _Refused("stale", f"the epoch {epoch} ended when {self._epoch} began")
            if self._busy is not None and self._busy.what == _ENDING:
                raise _Refused("ending", "it is ending, and another may be begun")
            busy = self._busy
            if busy is not None and busy.asked != key:
                raise _Refused("busy", f"{busy} already")
            if epoch > self._epoch:
                self._note(epoch)
            before = self._untold
            if busy is None:
                mine = self._busy = _Busy(what, time.monotonic(), frozenset(processes), key)
                self._untold = None
        if busy is not None:  # whoever asked for it before may have gone: who asks now gets its result
            busy.over.wait()
            if not busy.results:
                raise _Refused("broken", "what was under way failed")
            return _told(busy.results[0])
        try:
            result = phase()
            if before is not None and before.asked == key:
                result = _joined(before.results[0], result)
            mine.results.append(result)
        except Exception as error:  # nobody may take it for a refusal: calls may have been made
            _log.exception("a mistake of the helper's, amid %s", what)
            raise _Refused("broken", f"the helper failed amid {what}: {error!r:.200}") from error
        finally:
            with self._turn:
                self._busy = None
                self._untold = mine if mine.results else None
            mine.over.set()
        return _told(result)

    def _heard_of(self, asked: Mapping[str, Any]) -> None:
        with self._turn:
            if self._untold is not None and self._untold.asked == _key(asked):
                self._untold = None

    def _note(self, epoch: int) -> None:
        """Older ones are refused from now on, by the helper that comes after this one as well."""
        try:
            _write(self._epochs, epoch)
        except OSError as error:
            raise _Refused("unwritten", f"the epoch cannot be written down: {error}") from error
        self._epoch = epoch


def _key(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in asked.items() if name != "epoch"}


def _told(result: Result) -> dict[str, Any]:
    return asdict(result) | {"processes": [(process.pid, process.started) for process in result.processes]}


def _joined(before: Result, now: Result) -> Result:
    """How a phase ended whose end nobody heard, and that was asked for again."""
    if before.outcome == "lost":  # what can be read of the dead is less than was known then
        return before
    return replace(now, seconds=before.seconds) if before.outcome == now.outcome == "done" else now


def _processes(told: Any) -> list[Process]:
    """Raises as the caller says it."""
    found: list[Process] = []
    for pid, started in told:
        if not isinstance(pid, int) or not isinstance(started, int) or pid <= 0 or started < 0:
            raise ValueError("processes are pairs of a pid and a start")
        found.append(Process(pid, started))
    return found


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _write(file: Path, number: int) -> None:
    written = file.with_suffix(".epoch.new")
    written.write_text(str(number))
    written.replace(file)
