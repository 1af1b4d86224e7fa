"""What is mounted on this node, as the kernel tells it, and the two system calls that change it.

For `volumes.py` and `uppers.py`. Mounting by system call instead of by mount(8) saves a fork, and refuses nothing that
the kernel would take.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TABLE = Path("/proc/self/mountinfo")

READ_ONLY, NO_SUID, NO_DEV, NO_ATIME = 1, 2, 4, 1024  # MS_* of mount(2)
_DETACH, _NO_FOLLOW = 2, 8  # of umount2(2)
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One line of /proc/self/mountinfo, as far as it counts here (proc_pid_mountinfo(5))."""

    place: str
    kind: str
    source: str
    options: str  # of the file system


def parse(table: bytes) -> list[MountPoint]:
    """Reads the table, oldest mount first. Lines that are none are left out."""
    return [found for line in table.splitlines() if (found := _parse_line(line)) is not None]


def here(places: Iterable[str] = (), below: str = "") -> list[MountPoint]:
    """What is mounted at these places and below that folder, oldest first; of a place with several, the last shows."""
    wanted, folder = set(places), f"{below.rstrip('/')}/"
    names = [_written(place) for place in wanted] + ([_written(folder)] if below else [])
    # A node has thousands of mounts: most lines are left aside without taking them apart.
    near = b"\n".join(line for line in TABLE.read_bytes().splitlines() if any(name in line for name in names))
    return [point for point in parse(near) if point.place in wanted or (below and point.place.startswith(folder))]


def mount(source: str, place: str, kind: str, flags: int, data: str) -> None:
    """mount(2). Raises OSError."""
    _check(
        _libc.mount(os.fsencode(source), os.fsencode(place), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data)),
        place,
    )


def unmount(place: str) -> None:
    """umount2(2). What something still looks into is taken out of sight and goes when that ends. Raises OSError."""
    try:
        _check(_libc.umount2(os.fsencode(place), _NO_FOLLOW), place)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _check(_libc.umount2(os.fsencode(place), _NO_FOLLOW | _DETACH), place)


def _check(result: int, place: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)


def _parse_line(line: bytes) -> MountPoint | None:
    # id parent major:minor root place options [optional fields] - kind source options
    before, dash, after = line.partition(b" - ")
    left, right = before.split(b" "), after.split(b" ")
    if not dash or len(left) < 6 or len(right) < 3:
        return None
    return MountPoint(_read(left[4]), _read(right[0]), _read(right[1]), _read(b" ".join(right[2:])))


def _read(word: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), word))


def _written(path: str) -> bytes:
    r"""A path as the table has it: blanks, backslashes and # as \ooo."""
    return re.sub(rb"[ \t\n\\#]", lambda found: rb"\%03o" % ord(found[0]), os.fsencode(path))
