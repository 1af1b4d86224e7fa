"""What is said to the helper and by it: JSON behind its length, and never more than `MOST` bytes of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

MOST = 4 * 2**20  # bytes: a server may have thousands of processes
_LENGTH = struct.Struct("!I")


class FrameError(Exception):
    """What came is no frame. The text is a sentence."""


def packed(told: Mapping[str, Any]) -> bytes:
    """A frame."""
    body = json.dumps(told).encode()
    return _LENGTH.pack(len(body)) + body


def size(head: bytes) -> int:
    """How many bytes follow a frame's head. Raises FrameError."""
    found: int = _LENGTH.unpack(head)[0]
    if found > MOST:
        raise FrameError(f"A frame of {found} bytes is too long: at most {MOST}.")
    return found


HEAD = _LENGTH.size


def parsed(body: bytes) -> dict[str, Any]:
    """What a frame says. Raises FrameError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"A frame is no JSON: {error!r:.200}.") from error
    if not isinstance(found, dict):
        raise FrameError("A frame is no object.")
    return found


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame of a stream; None at its end. Raises FrameError."""
    head = stream.read(HEAD)
    if not head:
        return None
    if len(head) < HEAD:
        raise FrameError("A frame ended within its head.")
    length = size(head)
    body = stream.read(length)
    if len(body) < length:
        raise FrameError("A frame ended before its end.")
    return parsed(body)
