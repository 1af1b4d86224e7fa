"""Processes by pid and start, for whoever must not take one for another that has its pid by now."""

from __future__ import annotations

from pathlib import Path

from nodeworkers.seats.backend import Process


def started(pid: int, proc: Path = Path("/proc")) -> int | None:
    """When it began, in clock ticks since boot (field 22 of proc_pid_stat(5)); None for one that is gone."""
    try:
        # Its name, in brackets, may have brackets and blanks itself.
        return int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def there(process: Process, proc: Path = Path("/proc")) -> bool:
    """Whether this very process still is."""
    return started(process.pid, proc) == process.started
