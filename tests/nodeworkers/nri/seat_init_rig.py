"""seat-init as a real program with real children, for the tests: what it printed, whom it runs, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

DEADLINE = 20.0
AS_FIRST = (
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)  # the first process of a namespace; needs root


def eventually(holds: Callable[[], object], what: str) -> None:
    """Waits until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < DEADLINE, f"not in {DEADLINE:g} s: {what}"
        time.sleep(0.005)


class Held:
    """A container's first process, its folder of orders, and a file that its children may write to (`$LOG`)."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        arguments: Sequence[str],
        *,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.orders, self.log, self.error = folder / "slot", folder / "log", folder / "stderr"
        self.orders.mkdir(exist_ok=True)
        self.log.touch()
        variables = {"PATH": os.environ["PATH"], "LOG": str(self.log)} if env is None else dict(env)
        with self.error.open("wb") as error:
            self.process = subprocess.Popen(
                [*before, str(program), str(self.orders), *arguments],
                env=variables,
                stdin=stdin,
                stderr=error,
                cwd=folder,
                # A shell cannot trap what was ignored before it began, as under nohup.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        self._first = bool(before)

    @property
    def pid(self) -> int:
        """seat-init's own, not that of the program that made its namespace."""
        if not self._first:
            return self.process.pid
        eventually(lambda: children(self.process.pid), "a process in the namespace")
        return children(self.process.pid)[0]

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def said(self) -> str:
        return self.error.read_text()

    def until_lines(self, count: int) -> list[str]:
        eventually(lambda: len(self.lines()) >= count, f"{count} lines of the children")
        assert len(self.lines()) == count, self.lines()
        return self.lines()

    def until_said(self, part: str) -> None:
        eventually(lambda: part in self.said(), f"{part!r} in {self.said()!r}")

    def child(self) -> int:
        """The pid of the program that it runs."""
        pid = self.pid
        eventually(lambda: children(pid), "a child")
        return children(pid)[0]

    def until_alone(self) -> None:
        pid = self.pid
        eventually(lambda: not children(pid), "no child is left")

    def ended(self) -> int:
        return self.process.wait(DEADLINE)

    def end(self) -> None:
        for pid in (*descendants(self.process.pid), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(DEADLINE)


def children(pid: int) -> list[int]:
    """Also those that have ended and were not waited for."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def name(pid: int) -> str:
    """Empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    except OSError:
        return ""
