"""Parks and wakes a server's processes by a driver's calls, all or none, from whatever state they are in: reads it,
does what is left to do, and reads it again.

Which processes count the driver says: those of which it knows a state. That each is the one that was meant, and not
another with its pid, is looked up right before each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from nodeworkers.seats.backend import Held, Process
from nodeworkers.seats.helper.driver import CHECKPOINTED, FAILED, LOCKED, RUNNING, Driver, DriverError
from nodeworkers.seats.processes import there

Outcome = Literal["done", "untouched", "lost", "unsettled"]
LOCK_SECONDS = 10.0  # that a process gets to end what it has submitted to its GPUs
_HELD: Mapping[str, Held] = {RUNNING: "Running", LOCKED: "Locked", CHECKPOINTED: "Parked", FAILED: "Failed"}


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended; `told` is a sentence where that is not `done`. `processes`: of the server, those that have to do
    with GPUs. `seconds` by stage.
    """

    outcome: Outcome = "done"
    told: str = ""
    processes: Sequence[Process] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


def held(states: Collection[str]) -> Held:
    """What a server is whose processes are in these states."""
    found = {_HELD.get(state, "Changing") for state in states}
    if not found:
        return "Gone"
    if "Failed" in found:
        return "Failed"
    if "Changing" in found:
        return "Changing"
    # Some parked and others not: it was left amid a phase. Its calls wait, and some of it is on the GPUs.
    return next(iter(found)) if len(found) == 1 else "Locked"


def states(driver: Driver, processes: Sequence[Process]) -> dict[Process, str]:
    """Of those that have to do with GPUs."""
    found = {}
    for process in processes:
        if there(process) and (state := driver.state(process.pid)) is not None:
            found[process] = state
    return found


class _Ended(Exception):
    """The phase is over before its end."""

    def __init__(self, outcome: Outcome, told: str) -> None:
        super().__init__(told)
        self.outcome: Outcome = outcome


class Phases:
    """The phases over one driver; for one server at a time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._seconds: dict[str, float] = {}
        self._processes: tuple[Process, ...] = ()
        self._touched = False

    def park(self, processes: Sequence[Process]) -> Result:
        """All their memory leaves the GPUs, or none does."""
        return self._result(lambda: self._park(processes))

    def wake(self, processes: Sequence[Process], parked: Sequence[Process], devices: Mapping[str, str]) -> Result:
        """All of it comes back, and their calls go on. `parked`: those of them that must be there, as far as known."""
        return self._result(lambda: self._wake(processes, parked, devices))

    def _result(self, phase: Callable[[], None]) -> Result:
        self._seconds, self._processes, self._touched = {}, (), False
        try:
            phase()
        except _Ended as ended:
            return Result(ended.outcome, str(ended), self._processes, self._seconds)
        except DriverError as error:  # it cannot even tell how they are
            outcome: Outcome = "unsettled" if self._touched else "untouched"
            return Result(outcome, f"the driver says {error.code}", self._processes, self._seconds)
        return Result("done", "", self._processes, self._seconds)

    def _park(self, processes: Sequence[Process]) -> None:
        known = self._known(processes)
        if not known:
            raise _Ended("untouched", "no process of it has anything on a GPU")
        if held(known.values()) == "Parked":
            return
        with self._stage("lock"):
            self._lock([process for process, state in known.items() if state == RUNNING], known)
        with self._stage("checkpoint"):
            failed = self._all(
                self._driver.checkpoint, [process for process in known if self._state(process) == LOCKED]
            )
        if not failed:
            self._settled(known, CHECKPOINTED, "parking")
            return
        self._dead(known, "checkpointing")
        process, error = failed[0]
        why = f"process {process.pid} could not be checkpointed: {error.code}"
        self._undo(known, why)
        raise _Ended("untouched", why)

    def _lock(self, running: Sequence[Process], known: Mapping[Process, str]) -> None:
        """All of them, side by side: a rank that waits for one that is locked never ends what it submitted."""
        failed = self._all(lambda pid: self._driver.lock(pid, LOCK_SECONDS), running)
        if not failed:
            return
        self._dead(known, "locking")
        process, error = failed[0]
        if error.timed_out:
            why = f"process {process.pid} had work on its GPUs for {LOCK_SECONDS:.0f} s"
        else:
            why = f"process {process.pid} could not be locked: {error.code}"
        self._undo(known, why)
        raise _Ended("untouched", why)

    def _wake(self, processes: Sequence[Process], must: Sequence[Process], devices: Mapping[str, str]) -> None:
        if gone := [process.pid for process in must if not there(process)]:
            raise _Ended("lost", f"process {gone[0]} ended while it was parked")
        whole = self._map(devices)
        known = self._known(sorted({*processes, *must}))
        if not known:
            raise _Ended("lost", "no process of it is there any more that had anything on a GPU")
        if empty := [process.pid for process in must if process not in known]:
            raise _Ended("lost", f"process {empty[0]} was parked, and the driver knows it no more")
        with self._stage("restore"):
            parked = [process for process, state in known.items() if state == CHECKPOINTED]
            failed = self._all(lambda pid: self._driver.restore(pid, whole), parked)
        if failed:
            # It stays checkpointed for ever: drivers refuse every further restore (cuda-checkpoint#44).
            process, error = failed[0]
            raise _Ended("lost", f"process {process.pid} could not be restored: {error.code}")
        with self._stage("unlock"):
            self._unlock(known)
        self._settled(known, RUNNING, "waking")

    def _map(self, devices: Mapping[str, str]) -> Mapping[str, str]:
        """Each GPU that the driver shows, used or not, to one of its own, as it demands; none where all stay."""
        if all(old == new for old, new in devices.items()):
            return {}
        shown = self._driver.devices()
        if strange := {*devices, *devices.values()}.difference(shown):
            raise _Ended("untouched", f"the driver shows no GPU {', '.join(sorted(strange))}")
        if len({*devices.values()}) < len(devices):
            raise _Ended("untouched", "two GPUs' memory would come to one")
        left = [uuid for uuid in shown if uuid not in devices.values()]
        whole = dict(devices)
        for uuid in shown:  # who gave its place to another takes one that is left
            if uuid not in whole and uuid in left:
                whole[uuid] = uuid
                left.remove(uuid)
        for uuid in shown:
            if uuid not in whole:
                whole[uuid] = left.pop(0)
        return whole

    def _undo(self, known: Mapping[Process, str], why: str) -> None:
        """Lets it go on where it was."""
        now = {process: self._state(process) for process in known}
        if FAILED in now.values():
            raise _Ended("lost", f"{why}, and the driver has given it up")
        failed = self._all(
            lambda pid: self._driver.restore(pid, {}), [each for each, state in now.items() if state == CHECKPOINTED]
        )
        if failed:
            raise _Ended("lost", f"{why}, and what was taken of it could not be restored: {failed[0][1].code}")
        self._unlock(known)
        self._settled(known, RUNNING, f"being let go ({why})")

    def _unlock(self, known: Mapping[Process, str]) -> None:
        failed = self._all(self._driver.unlock, [process for process in known if self._state(process) == LOCKED])
        if failed:
            self._dead(known, "unlocking")
            raise _Ended("lost", f"process {failed[0][0].pid} could not be unlocked: {failed[0][1].code}")

    # ---- common

    def _known(self, processes: Sequence[Process]) -> dict[Process, str]:
        known = states(self._driver, processes)
        self._processes = tuple(known)
        if FAILED in known.values():
            raise _Ended("lost", "the driver has given it up")
        return known

    def _dead(self, known: Mapping[Process, str], during: str) -> None:
        """One that died takes the others with it: they would wait for it. The driver forgets it before it is gone."""
        gone = [process.pid for process in known if self._state(process) is None]
        if gone:
            raise _Ended("lost", f"process {gone[0]} died while {during}")

    def _settled(self, known: Mapping[Process, str], state: str, during: str) -> None:
        """What the driver tells of them now, and not what its calls returned, is how the phase ended."""
        self._dead(known, during)
        now = {process.pid: self._state(process) for process in known}
        if FAILED in now.values():
            raise _Ended("lost", f"the driver gave it up while {during}")
        for pid, found in now.items():
            if found != state:
                raise _Ended("unsettled", f"process {pid} is {found} after {during}, not {state}")

    def _state(self, process: Process) -> str | None:
        return self._driver.state(process.pid) if there(process) else None

    def _all(self, call: Callable[[int], None], processes: Sequence[Process]) -> list[tuple[Process, DriverError]]:
        """Makes a call for each, side by side, and waits for all: those that failed."""

        def one(process: Process) -> tuple[Process, DriverError] | None:
            if not there(process):
                return process, DriverError("it is gone")
            self._touched = True
            try:
                call(process.pid)
            except DriverError as error:
                return process, error
            return None

        if len(processes) < 2:
            ended = [one(process) for process in processes]
        else:
            with ThreadPoolExecutor(len(processes)) as threads:
                ended = list(threads.map(one, processes))
        return [each for each in ended if each is not None]

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = round(time.monotonic() - began, 4)
