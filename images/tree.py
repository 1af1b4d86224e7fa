"""Lists what a folder holds, for those who pack caches and those who look at extracted ones: plain files only, sorted,
within the limits that a node will hold the image to.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from images.refused import Refused, shown
from planning.caches import limits

# Of all that is extracted, for an overlay shows the modes of what lies below it: a pod that is not root compiles into
# folders that exist, in a layer of its own. Nobody else can reach them: the store's own folder is root's alone.
FILE_MODE, FOLDER_MODE = 0o666, 0o777

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_LEFT_BY_TRITON = "tmp.pid_"  # what an interrupted Triton leaves behind
_OURS = ".berth"  # at the top of every mounted cache: berth's own, and no part of it


@dataclass(frozen=True, slots=True)
class File:
    """A plain file: `path` is how it is called in the image, with /, below the cache's root."""

    path: str
    size: int
    source: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def files(folder: Path) -> list[File]:
    """All files below a folder by path; Refused for links, devices, odd names and more than the limits allow."""
    if not folder.is_dir():
        raise Refused("Unsupported", f"{folder} is no folder.")
    found: list[File] = []
    entries = total = 0
    for path, entry in _walk(os.fspath(folder), ""):
        entries += 1
        if entries > limits.ENTRIES:
            raise Refused("TooLarge", f"{folder} holds more than {limits.ENTRIES:,} files and folders.")
        if entry.is_dir(follow_symlinks=False):
            continue
        info = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode):
            raise Refused("Unsafe", f"{shown(path)} is neither a file nor a folder; a cache has only these.")
        if info.st_size > limits.FILE_BYTES:
            raise Refused("TooLarge", f"{shown(path)} is larger than {limits.FILE_BYTES // limits.GIB} GiB.")
        total += info.st_size
        if total > limits.EXTRACTED_BYTES:
            raise Refused("TooLarge", f"{folder} holds more than {limits.EXTRACTED_BYTES // limits.GIB} GiB.")
        found.append(File(path, info.st_size, entry.path))
    return sorted(found, key=lambda each: each.path)


def _walk(folder: str, before: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(folder) as listing:
        entries = list(listing)
    for entry in entries:
        if entry.name.startswith(_LEFT_BY_TRITON) or before + entry.name == _OURS:
            continue
        path = before + entry.name
        wrong = wrong_path(path.encode("utf-8", "surrogateescape"))
        if wrong:
            raise Refused("Unsafe", f"{shown(path)} {wrong}.")
        yield path, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, f"{path}/")


def wrong_path(path: bytes) -> str:
    """What is wrong with a path below a cache's root, as the end of a sentence; nothing if it may be written.

    The limits are those of the file systems and tools that it will meet; control characters would forge lines in logs.
    """
    if len(path) > limits.PATH_BYTES:
        return f"is longer than {limits.PATH_BYTES} bytes"
    try:
        path.decode("utf-8")
    except UnicodeDecodeError:
        return "is not UTF-8"
    if _CONTROL.search(path):
        return "has control characters"
    parts = path.split(b"/")
    if len(parts) > limits.DEPTH:
        return f"lies more than {limits.DEPTH} folders deep"
    for part in parts:
        if part in (b"", b".", b".."):
            return "has an empty part, . or .. in it" if path[:1] != b"/" else "is absolute"
        if len(part) > limits.NAME_BYTES:
            return f"has a part of more than {limits.NAME_BYTES} bytes"
    return ""
