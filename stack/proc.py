"""Small facts about processes on Linux: start times, that a child dies with its parent, and ending one for certain.

For the supervisor and for whoever must not signal a stranger that got an old process id.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills this process when the thread that started it ends, however it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; with its id this names it for good. None if it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else int(after_name[19])


def begun_with(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def uptime(ticks: int) -> float:
    """Seconds since the start time given in clock ticks since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def alive(pid: int, started: int) -> bool:
    """Whether the very process that had this id and start time still runs."""
    return start_time(pid) == started


def send(pid: int, started: int, signal_number: int) -> bool:
    """Signals a process if it is still the same one; False if it is gone."""
    if not alive(pid, started):
        return False
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return False
    return True
