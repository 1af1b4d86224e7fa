"""The bytes between containerd and an NRI plugin, for `session.py`: several connections over one socket, and ttrpc's
frames on each of them. No I/O.

Sources: github.com/containerd/nri v0.12.0, pkg/net/multiplex (mux.go, ttrpc.go); github.com/containerd/ttrpc v1.2.8,
PROTOCOL.md and channel.go. All numbers are big-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PLUGIN, RUNTIME = 1, 2  # connections: what containerd asks of us, what we ask of it
REQUEST, RESPONSE, DATA = 1, 2, 3  # types of frames
REMOTE_OPEN = 0x02  # flag of a request that more data will follow

MOST_DATA = 4 << 20  # bytes of a frame without its header
_PART = struct.Struct(">II")  # connection, bytes that follow
_FRAME = struct.Struct(">IIBB")  # bytes that follow, stream, type, flags
_MOST_PART = _FRAME.size + MOST_DATA
# Whoever reads a connection at the other end does so through a buffer of 4096 bytes, and gives the connection up when
# a part does not fit (mux.go's Read, bufio's default).
_OUR_PART = 4096


class ProtocolError(Exception):
    """What no NRI runtime sends. The connection is of no use any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of ttrpc; `data` is None where it was larger than MOST_DATA, and thrown away."""

    stream: int
    kind: int
    flags: int
    data: bytes | None


def packed(connection: int, frame: Frame) -> bytes:
    """The bytes of a frame on a connection. Raises ValueError for more than MOST_DATA."""
    data = frame.data or b""
    if len(data) > MOST_DATA:
        raise ValueError(f"a frame of ttrpc holds at most {MOST_DATA} bytes, not {len(data)}")
    whole = _FRAME.pack(len(data), frame.stream, frame.kind, frame.flags) + data
    parts = (whole[at : at + _OUR_PART] for at in range(0, len(whole), _OUR_PART))
    return b"".join(_PART.pack(connection, len(part)) + part for part in parts)


class Unpacker:
    """Makes frames of what is read of the socket, in whatever pieces that comes."""

    def __init__(self) -> None:
        self._read = bytearray()
        self._connections = {PLUGIN: _Frames(), RUNTIME: _Frames()}

    def feed(self, data: bytes) -> list[tuple[int, Frame]]:
        """The frames that `data` completes, each with its connection. Raises ProtocolError."""
        self._read += data
        found: list[tuple[int, Frame]] = []
        while len(self._read) >= _PART.size:
            connection, size = _PART.unpack_from(self._read)
            if size > _MOST_PART:
                raise ProtocolError(f"announced {size} bytes at once, and NRI sends at most {_MOST_PART}")
            end = _PART.size + size
            if len(self._read) < end:
                break
            part = bytes(self._read[_PART.size : end])
            del self._read[:end]
            if frames := self._connections.get(connection):  # what is for no connection of ours is nobody's, as in Go
                found += [(connection, frame) for frame in frames.feed(part)]
        return found


class _Frames:
    """One connection's frames."""

    def __init__(self) -> None:
        self._read = bytearray()
        self._skip = 0  # bytes that are left of a frame that is too large

    def feed(self, part: bytes) -> list[Frame]:
        self._read += part
        found: list[Frame] = []
        while True:
            skipped = min(self._skip, len(self._read))
            del self._read[:skipped]
            self._skip -= skipped
            if self._skip or len(self._read) < _FRAME.size:
                return found
            size, stream, kind, flags = _FRAME.unpack_from(self._read)
            if size > MOST_DATA:
                self._skip = _FRAME.size + size
                found.append(Frame(stream, kind, flags, None))
                continue
            end = _FRAME.size + size
            if len(self._read) < end:
                return found
            found.append(Frame(stream, kind, flags, bytes(self._read[_FRAME.size : end])))
            del self._read[:end]
