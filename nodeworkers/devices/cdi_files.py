"""Writes the node's CDI documents, by which container runtimes know what a device's name stands for.

A runtime may read the folder at any moment, so a document is there whole or not at all, and is written only when it
says something else. Files of other vendors, and others' of ours, are left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

import orjson

VENDOR = "berth.dev"
FOLDER = Path("/var/run/cdi")
_CLASS = re.compile(r"[A-Za-z](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")  # of a kind, by the CDI specification
_OURS = re.compile(rf"{re.escape(VENDOR)}-{_CLASS.pattern}\.json")
_HALF = re.compile(rf"\.{re.escape(VENDOR)}-{_CLASS.pattern}\.json\.new")
_MODE = 0o644
_MOST = 4 * 1024 * 1024  # bytes of a document that are read


class CdiError(Exception):
    """Documents are not as they should be. The text says which, why, and what to do."""


class CdiFiles:
    """Our documents in one folder, with one writer. It waits for the disk."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder

    def write(self, documents: Mapping[str, Mapping[str, object]], kept: Collection[str] = ()) -> tuple[str, ...]:
        """Makes the folder say what `documents` say, by kind (`berth.dev/nvidia`), and nothing else of ours but the
        files of the kinds `kept`, which stay as they are. Returns the names of the files that changed. Raises CdiError
        after having done all that could be done.
        """
        stays = {f"{VENDOR}-{kind.partition('/')[2]}.json" for kind in kept}
        problems: list[str] = []
        wanted: dict[str, bytes] = {}
        for kind, document in documents.items():
            vendor, _, name = kind.partition("/")
            if vendor != VENDOR or not _CLASS.fullmatch(name) or document.get("kind") != kind:
                problems.append(
                    f"{kind!r:.80} is not a kind of {VENDOR}, or not that of its document, and is not written."
                )
                continue
            wanted[f"{VENDOR}-{name}.json"] = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
            present = os.listdir(self.folder)
        except OSError as error:
            raise CdiError(
                f"The folder {self.folder} for CDI documents cannot be used: {_why(error)}. Mount it into berth node, "
                "writable; until then containers get no devices by CDI."
            ) from error
        changed: list[str] = []
        for name, content in wanted.items():
            try:
                if self._read(name) != (_MODE, content):
                    self._replace(name, content)
                    changed.append(name)
            except OSError as error:
                problems.append(f"{self.folder / name} cannot be written: {_why(error)}. Make room for it.")
        for name in present:
            if _HALF.fullmatch(name) or (
                _OURS.fullmatch(name) and name not in wanted and name not in stays and self._says_ours(name)
            ):
                try:
                    (self.folder / name).unlink(missing_ok=True)
                except OSError as error:
                    problems.append(f"{self.folder / name} is out of date and cannot be removed: {_why(error)}.")
                else:
                    changed.append(name)
        if problems:
            raise CdiError(" ".join(problems))
        return tuple(changed)

    def _read(self, name: str) -> tuple[int, bytes] | None:
        """The mode and the content of a plain file; None where there is none."""
        try:
            file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with open(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                return None
            return stat.S_IMODE(found.st_mode), opened.read(_MOST)

    def _replace(self, name: str, content: bytes) -> None:
        half = self.folder / f".{name}.new"  # a name that runtimes do not read
        half.unlink(missing_ok=True)
        try:
            file = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
            with open(file, "wb") as opened:
                os.fchmod(file, _MODE)  # whatever the umask is
                opened.write(content)
                opened.flush()
                os.fsync(file)
            half.replace(self.folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)
            raise

    def _says_ours(self, name: str) -> bool:
        """Whether a file with a name of ours has a document of ours: another's may have been put there by hand."""
        found = self._read(name)
        try:
            document = orjson.loads(found[1]) if found else None
        except ValueError:
            return False
        return isinstance(document, dict) and str(document.get("kind")).startswith(f"{VENDOR}/")


def _why(error: OSError) -> str:
    return error.strerror or str(error)
