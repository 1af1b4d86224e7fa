"""Frames, and what is none."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.seats.helper.frames import MOST, FrameError, packed, read

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=3))
def test_what_was_packed_is_read(told: list[dict[str, object]]) -> None:
    stream = io.BytesIO(b"".join(packed(each) for each in told))
    assert [read(stream) for _ in told] == told
    assert read(stream) is None


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda body: len(body).to_bytes(4, "big") + body))
def test_anything_else_is_an_error(junk: bytes) -> None:
    stream = io.BytesIO(junk)
    try:
        while read(stream) is not None:
            pass
    except FrameError:
        pass


@pytest.mark.parametrize(
    ("junk", "why"),
    [
        (b"\0\0", "within its head"),
        (b"\0\0\0\7{}", "before its end"),
        ((MOST + 1).to_bytes(4, "big"), "too long"),
        (b"\0\0\0\1{", "no JSON"),
        (b"\0\0\0\1\xff", "no JSON"),
        (b"\0\1\0\0" + b"[" * 65536, "no JSON"),
        (b"\0\0\0\2[]", "no object"),
    ],
)
def test_why_it_is_none(junk: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        read(io.BytesIO(junk))
