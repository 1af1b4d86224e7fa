"""Hardware that is not there, for a vendor's watcher: its Source over a machine that a YAML file describes, which may
be edited while it is watched, so that cards come, go and fail on command.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.source import Source
from planning.devices.cards import Sight, Vendor

_GLANCE_SECONDS = 0.25  # from one glance at the file to the next


class Simulated:
    """A Source that says of all it sees that it is simulated. `apply` makes the machine what `file` says by now, and
    raises HardwareError where that makes no sense, with the machine as it was; `beat` is called before each look.
    """

    def __init__(self, source: Source, file: Path, apply: Callable[[Path], None], beat: Callable[[], None]) -> None:
        self._source, self._file, self._apply, self._beat = source, file, apply, beat
        self._applied: tuple[int, int, int] | None = None
        self._problem = ""

    @property
    def vendor(self) -> Vendor:
        return self._source.vendor

    def look(self) -> Sight:
        """Everything that the machine has by now. Raises HardwareError."""
        if self._written() != self._applied:
            self._applied = self._written()
            try:
                self._apply(self._file)
                self._problem = ""
            except HardwareError as error:
                self._problem = str(error)
        self._beat()
        sight = self._source.look()
        problem = " ".join(each for each in (self._problem, sight.problem) if each)
        return replace(sight, simulated=True, problem=problem)

    def wait(self, seconds: float) -> None:
        """Returns also when the file is another."""
        until = time.monotonic() + seconds
        while self._written() == self._applied and (left := until - time.monotonic()) > 0:
            began, glance = time.monotonic(), min(left, _GLANCE_SECONDS)
            self._source.wait(glance)
            if time.monotonic() - began < glance:  # the source has news
                return

    def close(self) -> None:
        """Lets go of the machine."""
        self._source.close()

    def _written(self) -> tuple[int, int, int]:
        """What tells the file from what it was; zeros where there is none."""
        try:
            found = self._file.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_size, found.st_mtime_ns)
