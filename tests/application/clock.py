"""A wall clock that a test can set, for processes that begin with its environment."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    def __init__(self, folder: Path) -> None:
        library, self._shift = folder / "clock.so", folder / "shift"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
        self._shift.write_bytes(struct.pack("l", 0))
        self.environment = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._shift)}

    def ahead(self, seconds: int) -> None:
        """From now on the processes' clocks are ahead of the true time, or behind it if negative."""
        with self._shift.open("r+b") as file:  # in place: the processes have mapped it
            file.write(struct.pack("l", seconds))
