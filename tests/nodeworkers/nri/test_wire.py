"""NRI's bytes: as containerd writes them, in whatever pieces they come, and whatever they are."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodeworkers.nri import wire

frames = st.builds(
    wire.Frame,
    stream=st.integers(0, 2**32 - 1),
    kind=st.integers(0, 255),
    flags=st.integers(0, 255),
    data=st.binary(max_size=20_000),
)
sent = st.lists(st.tuples(st.sampled_from([wire.PLUGIN, wire.RUNTIME]), frames), max_size=6)


def in_pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = list[bytes](), 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces


def test_a_frame_is_laid_out_as_the_protocols_say() -> None:
    packed = wire.packed(wire.RUNTIME, wire.Frame(stream=1, kind=wire.REQUEST, flags=0, data=b"abc"))
    assert packed == bytes.fromhex("00000002 0000000d00000003 00000001 01 00") + b"abc"


@given(sent, st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_frames_arrive_in_whatever_pieces(sent: list[tuple[int, wire.Frame]], sizes: list[int]) -> None:
    unpacker, found = wire.Unpacker(), []
    for piece in in_pieces(b"".join(wire.packed(connection, frame) for connection, frame in sent), sizes):
        found += unpacker.feed(piece)
    assert found == sent


@given(frames)
@example(wire.Frame(1, wire.RESPONSE, 0, bytes(10_000)))
def test_no_part_is_larger_than_the_other_ends_buffer(frame: wire.Frame) -> None:
    packed, at = wire.packed(wire.PLUGIN, frame), 0
    while at < len(packed):
        _, size = struct.unpack_from(">II", packed, at)
        assert 0 < size <= 4096
        at += 8 + size


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_hostile_bytes_are_frames_or_an_error(pieces: list[bytes]) -> None:
    unpacker = wire.Unpacker()
    try:
        for piece in pieces:
            for connection, frame in unpacker.feed(piece):
                assert connection in (wire.PLUGIN, wire.RUNTIME)
                assert frame.data is None or len(frame.data) <= wire.MOST_DATA
    except wire.ProtocolError:
        pass


def part(connection: int, data: bytes) -> bytes:
    return struct.pack(">II", connection, len(data)) + data


def header(size: int, stream: int = 1) -> bytes:
    return struct.pack(">IIBB", size, stream, wire.REQUEST, 0)


def test_a_part_that_nri_cannot_send_is_refused_before_it_is_read() -> None:
    with pytest.raises(wire.ProtocolError, match="4294967295 bytes at once"):
        wire.Unpacker().feed(struct.pack(">II", wire.PLUGIN, 2**32 - 1))


def test_a_frame_that_is_too_large_is_skipped_and_the_next_one_read() -> None:
    unpacker = wire.Unpacker()
    too_large = wire.MOST_DATA + 1
    found = unpacker.feed(part(wire.PLUGIN, header(too_large)))
    assert found == [(wire.PLUGIN, wire.Frame(1, wire.REQUEST, 0, None))]
    for _ in range(too_large // 1024):
        assert not unpacker.feed(part(wire.PLUGIN, bytes(1024)))
    assert unpacker.feed(part(wire.PLUGIN, bytes(too_large % 1024) + header(2, 3) + b"ok")) == [
        (wire.PLUGIN, wire.Frame(3, wire.REQUEST, 0, b"ok"))
    ]


def test_the_largest_frame_is_taken_and_no_larger_one_made() -> None:
    frame = wire.Frame(1, wire.REQUEST, 0, bytes(wire.MOST_DATA))
    assert wire.Unpacker().feed(wire.packed(wire.PLUGIN, frame)) == [(wire.PLUGIN, frame)]
    with pytest.raises(ValueError, match="at most"):
        wire.packed(wire.PLUGIN, wire.Frame(1, wire.REQUEST, 0, bytes(wire.MOST_DATA + 1)))


def test_what_is_for_another_connection_is_nobodys() -> None:
    unpacker = wire.Unpacker()
    assert not unpacker.feed(part(0, b"x") + part(7, header(1) + b"x"))
    assert len(unpacker.feed(part(wire.PLUGIN, header(0)))) == 1
