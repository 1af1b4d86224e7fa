"""How long work is shown: bars on a terminal, one line per event elsewhere, nothing in quiet tests.

For whoever calls `Stack.up`: pass one of the three, or anything with the same two methods.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """Shows work in progress, one line for each name."""

    def update(self, name: str, detail: str, done: int = 0, total: int = 0) -> None:
        """`done` of `total` steps of `name` are done; a total of 0 means unknown."""

    def finish(self, name: str, detail: str) -> None:
        """`name` is done; `detail` says how it ended."""


class Silent:
    """Shows nothing."""

    def update(self, name: str, detail: str, done: int = 0, total: int = 0) -> None:
        """Nothing."""

    def finish(self, name: str, detail: str) -> None:
        """Nothing."""


class Lines:
    """One line when a thing begins, when its detail changes, every `interval` seconds, and when it ends."""

    def __init__(self, stream: TextIO | None = None, interval: float = 15.0) -> None:
        self._stream = stream
        self._interval = interval
        self._shown: dict[str, tuple[str, float]] = {}

    def _print(self, text: str) -> None:
        print(text, file=self._stream or sys.stderr, flush=True)

    def update(self, name: str, detail: str, done: int = 0, total: int = 0) -> None:
        """Prints unless the same was printed a moment ago."""
        now = time.monotonic()
        last, at = self._shown.get(name, ("", 0.0))
        if last == detail and now - at < self._interval:
            return
        self._shown[name] = (detail, now)
        self._print(f"{name}: {detail}" + (f" ({done}/{total})" if total else ""))

    def finish(self, name: str, detail: str) -> None:
        """Prints how it ended."""
        self._shown.pop(name, None)
        self._print(f"{name}: {detail}")


class Terminal:
    """Bars on a terminal; use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._bars = Bars(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("[bold]{task.fields[title]:<24}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console or Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Terminal:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", total=None, title=name)
        return self._tasks[name]

    def update(self, name: str, detail: str, done: int = 0, total: int = 0) -> None:
        """Moves the bar."""
        self._bars.update(self._task(name), description=detail, completed=done, total=total or None)

    def finish(self, name: str, detail: str) -> None:
        """Fills the bar."""
        task = self._task(name)
        total = self._bars.tasks[self._bars.task_ids.index(task)].total or 1
        self._bars.update(task, description=detail, completed=total, total=total)
