"""Reads tar archives strictly and in one pass: what a cache image's layer needs, and a reason for all else.

Python's tarfile reads extended headers of any size into memory, forgives broken ones and knows sparse files; here what
a header may take is bounded, and whatever two readers could understand differently is refused. Formats: POSIX ustar and
pax, and GNU's long names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from images.refused import Refused, shown
from planning.caches import limits

Type = Literal["file", "folder", "link", "device"]
BLOCK = 512
MOST_HEADER = 64 * limits.KIB  # of one extended header
MOST_PADDING = limits.MIB  # of zeros behind the end
_ZEROS = bytes(BLOCK)
_OCTAL = re.compile(rb" *([0-7]{0,12})[ \0]*")
_TYPES: dict[int, Type] = {
    ord("0"): "file", 0: "file", ord("7"): "file", ord("5"): "folder", ord("1"): "link", ord("2"): "link",
    ord("3"): "device", ord("4"): "device", ord("6"): "device",
}  # fmt: skip
_DECIMAL = re.compile(rb"[0-9]{1,18}")

Read = Callable[[], bytes]  # the next bytes of the archive, none at its end


@dataclass(frozen=True, slots=True)
class Entry:
    """One member. `name` is as it stands, but for a slash at the end; only files have a size."""

    name: bytes
    type: Type
    size: int


class Reader:
    """Members one after another; `content` of a file may be read, or is skipped, before the next."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._piece = memoryview(b"")
        self._left = 0  # of the current member's content
        self._padding = 0

    def entries(self) -> Iterator[Entry]:
        """Refused at the first thing that is wrong."""
        while (entry := self._next()) is not None:
            self._left, self._padding = entry.size, -entry.size % BLOCK
            yield entry

    def content(self) -> Iterator[memoryview]:
        """The bytes of the current file, in pieces."""
        while self._left:
            piece = self._take(self._left)
            if not piece:
                raise Refused("Malformed", "The layer ends in the middle of a file: it is truncated.")
            self._left -= len(piece)
            yield piece

    def _next(self) -> Entry | None:
        for _ in self.content():
            pass
        self._exactly(self._padding)
        self._padding = 0
        pax: dict[bytes, bytes] = {}
        long_name: bytes | None = None
        seen: set[int] = set()
        while True:
            header = self._exactly(BLOCK)
            if header == _ZEROS:
                if seen:
                    raise Refused("Malformed", "The layer has an extended header with no member behind it.")
                self._end()
                return None
            _check(header)
            kind, size = header[156], _number(header[124:136])
            if kind not in b"xgLK":
                return _entry(header, kind, size, pax, long_name)
            if kind in seen:
                raise Refused("Malformed", "The layer has two extended headers for one member.")
            seen.add(kind)
            body = self._extended(size)
            if kind == ord("x"):
                pax = _records(body)
            elif kind == ord("L"):
                long_name = body.rstrip(b"\0")
            elif kind == ord("g") and _records(body).keys() & {b"path", b"size", b"linkpath"}:
                raise Refused("Unsupported", "The layer has a global header with a path or size.")

    def _extended(self, size: int) -> bytes:
        if size > MOST_HEADER:
            raise Refused("TooLarge", f"The layer has an extended header of {size:,} bytes, more than {MOST_HEADER:,}.")
        body = self._exactly(size)
        self._exactly(-size % BLOCK)
        return body

    def _end(self) -> None:
        """Behind the end there are zeros and nothing else."""
        seen = 0
        while piece := self._take(limits.MIB):
            seen += len(piece)
            if bytes(piece).strip(b"\0"):
                raise Refused("Malformed", "The layer has data behind the end of its archive.")
            if seen > MOST_PADDING:
                raise Refused("TooLarge", f"The layer has more than {MOST_PADDING:,} bytes behind its end.")

    def _take(self, most: int) -> memoryview:
        if not self._piece:
            self._piece = memoryview(self._read())
        piece, self._piece = self._piece[:most], self._piece[most:]
        return piece

    def _exactly(self, size: int) -> bytes:
        taken = self._take(size) if size else memoryview(b"")
        if len(taken) == size:
            return bytes(taken)
        parts = [bytes(taken)]
        missing = size - len(taken)
        while missing:
            piece = self._take(missing)
            if not piece:
                raise Refused("Malformed", "The layer ends before its archive does: it is truncated.")
            parts.append(bytes(piece))
            missing -= len(piece)
        return b"".join(parts)


def _check(header: bytes) -> None:
    told = _number(header[148:156])
    if told != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise Refused("Malformed", "The layer has a member whose header has a wrong checksum: it is no tar archive.")


def _number(field: bytes) -> int:
    """A size: octal text, or GNU's binary for more than 8 GiB."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise Refused("Malformed", f"The layer has a member with {shown(field)} for a number.")
    return int(match[1] or b"0", 8)


def _entry(header: bytes, kind: int, size: int, pax: dict[bytes, bytes], long_name: bytes | None) -> Entry:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and (before := header[345:500].split(b"\0", 1)[0]):
        name = before + b"/" + name
    if b"path" in pax:
        name = pax[b"path"]
    elif long_name is not None:
        name = long_name
    told = _TYPES.get(kind)
    if told is None or any(key.startswith(b"GNU.sparse.") for key in pax):
        what = "a sparse file" if told or kind == ord("S") else f"a member of type {shown(bytes([kind]))}"
        raise Refused("Unsupported", f"{shown(name)} is {what}, which no cache has.")
    if b"size" in pax:
        if not _DECIMAL.fullmatch(pax[b"size"]):
            raise Refused("Malformed", f"{shown(name)} has {shown(pax[b'size'])} for a size.")
        size = int(pax[b"size"])
    if told == "file" and name.endswith(b"/"):
        told = "folder"  # as archives from before ustar have them
    if told != "file" and size:
        raise Refused("Malformed", f"{shown(name)} is no file and has {size:,} bytes.")
    return Entry(name.removesuffix(b"/"), told, size)


def _records(body: bytes) -> dict[bytes, bytes]:
    """A pax header: `<length> <key>=<value>\\n`, again and again."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 8)
        digits = body[at:space] if space > 0 else b""
        length = int(digits) if _DECIMAL.fullmatch(digits) else 0
        record = body[space + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if at + length > len(body) or not record.endswith(b"\n") or not equals or key in found:
            raise Refused("Malformed", "The layer has an extended header that is broken.")
        found[key] = value[:-1]
        at += length
    return found
