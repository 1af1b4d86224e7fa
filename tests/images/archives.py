"""Layers for tests, made byte by byte: no library would write most of them."""

from __future__ import annotations

import gzip

END = bytes(1024)


def member(
    name: bytes,
    content: bytes = b"",
    type_: bytes = b"0",
    *,
    mode: int = 0o644,
    link: bytes = b"",
    size: int | None = None,
) -> bytes:
    """A header with a right checksum, and its content."""
    told = len(content) if size is None else size
    field = b"%011o\0" % told if told < 8**11 else b"\x80" + told.to_bytes(11, "big")
    head = name[:100].ljust(100, b"\0") + b"%07o\0" % mode + b"%07o\0" % 0 + b"%07o\0" % 0 + field
    head += b"%011o\0" % 0 + b" " * 8 + type_ + link[:100].ljust(100, b"\0") + b"ustar\x0000"
    head = head.ljust(512, b"\0")
    head = head[:148] + b"%06o\0 " % sum(head) + head[156:]
    return head + content + bytes(-len(content) % 512)


def pax(records: dict[bytes, bytes], type_: bytes = b"x") -> bytes:
    """An extended header for the member behind it."""
    body = b""
    for key, value in records.items():
        length = len(key) + len(value) + 3
        while len(b"%d" % length) + len(key) + len(value) + 3 != length:
            length += 1
        body += b"%d %s=%s\n" % (length, key, value)
    return member(b"PaxHeader", body, type_)


def long_name(name: bytes) -> bytes:
    """GNU's header for a long name."""
    return member(b"././@LongLink", name + b"\0", b"L")


def layer(*members: bytes, end: bytes = END) -> bytes:
    """A gzipped archive."""
    return gzip.compress(b"".join(members) + end, 6, mtime=0)


def short(value: object) -> str:
    """An argument of a test as part of its name; hostile ones have megabytes."""
    return repr(value)[:40]
