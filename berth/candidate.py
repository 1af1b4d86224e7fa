"""The name under which a process stands for a lease, and whether the process behind such a name has ended.

For the controller: the successor of one that crashed on the same machine leads at once, where it would else wait until
the lease has run out. Of another machine, or of another container, nothing is known, and it waits.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from pathlib import Path

_PROC = Path("/proc")


def candidate_name() -> str:
    """A name that no other process has. Behind the host's name and a random part it tells which process of which
    machine that is.
    """
    name = f"{os.uname().nodename}_{uuid.uuid4().hex[:8]}"
    machine, started = _machine(), _started(os.getpid())
    return f"{name}_{machine}.{os.getpid()}.{started}" if machine and started else name


def has_ended(name: str) -> bool:
    """Whether the process of this name is known to have ended: False also where that cannot be told."""
    machine = _machine()
    found = re.fullmatch(rf".*_{machine}\.([0-9]+)\.([0-9]+)", name) if machine else None
    if found is None:
        return False
    pid, started = int(found[1]), found[2]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # somebody else's
    now = _started(pid)
    return now is not None and now != started


def _machine() -> str:
    """One boot of a kernel and one numbering of processes in it, '' where that cannot be told.

    A later namespace may have the number of one that is gone; but then the processes of that one are gone, too.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()
        numbering = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}{numbering}".encode()).hexdigest()[:12]


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot (proc(5), field 22 of stat); '' if it has ended and nobody has
    taken note. None where that cannot be read: /proc may hide who lives.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
