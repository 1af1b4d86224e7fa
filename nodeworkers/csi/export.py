"""What a pod compiled: the files of a volume's private layer, listed and copied. The pod wrote them, so nothing in
there is followed, run or trusted: regular files only, counted and bounded. What berth and the pod tell each other in
`.berth` is no part of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nodeworkers.listener import OURS

DEPTH, ENTRIES = 16, 200_000
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # the pod goes on working meanwhile
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ExportError(Exception):
    """The layer has more than may be taken out of it, or names that no file elsewhere can have."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A file that was written into a volume: its path below the volume's root, and its bytes."""

    path: str
    size: int


def compiled(upper: Path) -> list[Compiled]:
    """The regular files of a layer, by path. What else a pod made there, and what it only deleted, is left out."""
    return sorted(
        (Compiled(path, os.fstat(handle).st_size) for path, handle in _files(upper)), key=lambda each: each.path
    )


def copy_compiled(upper: Path, target: Path, most_bytes: int) -> list[Compiled]:
    """Copies them below `target`, which must be empty or absent, without owners, modes or times. Raises ExportError
    once there are more than `most_bytes`, whatever the files said they have.
    """
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ExportError(f"{target} is not empty: what was compiled needs a folder of its own.")
    copied: list[Compiled] = []
    left = most_bytes
    for path, handle in _files(upper):
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        size = 0
        with place.open("xb") as file:
            while block := os.read(handle, min(1 << 20, left + 1)):
                left -= len(block)
                if left < 0:
                    raise ExportError(
                        f"What was compiled has more than {most_bytes} bytes; {target} holds a part of it."
                    )
                file.write(block)
                size += len(block)
        copied.append(Compiled(path, size))
    return sorted(copied, key=lambda each: each.path)


@dataclass(slots=True)
class _Count:
    entries: int = 0


def _files(upper: Path) -> Iterator[tuple[str, int]]:
    """Every regular file as its path and an open handle, which is closed after its turn."""
    root = os.open(upper, _FOLDER)
    try:
        yield from _below(root, "", 1, _Count())
    finally:
        os.close(root)


def _below(folder: int, path: str, depth: int, count: _Count) -> Iterator[tuple[str, int]]:
    for name in sorted(os.listdir(folder)):
        count.entries += 1
        below = f"{path}{name}"
        if below == OURS:
            continue
        if count.entries > ENTRIES:
            raise ExportError(f"There are more than {ENTRIES} entries.")
        if not name.isprintable():
            raise ExportError(f"There is a name that is no text: {below[:128]!r}.")
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                continue
            handle = os.open(name, _FOLDER if stat.S_ISDIR(mode) else _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno not in _CHANGED:
                raise
            continue
        try:
            if stat.S_ISDIR(mode):
                if depth >= DEPTH:
                    raise ExportError(f"There are folders more than {DEPTH} deep: {below[:128]!r}.")
                yield from _below(handle, f"{below}/", depth + 1, count)
            elif stat.S_ISREG(os.fstat(handle).st_mode):
                yield below, handle
        finally:
            os.close(handle)
