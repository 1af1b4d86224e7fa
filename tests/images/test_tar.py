"""The strict reader of archives: everything that a layer needs, a reason for all else, and no input that breaks it."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.refused import Refused
from images.tar import MOST_HEADER, MOST_PADDING, Reader
from tests.images.archives import END, long_name, member, pax, short


def read(archive: bytes, piece: int = 100) -> list[tuple[bytes, str, bytes]]:
    """All members with their content, the archive coming in pieces of odd sizes."""
    source = io.BytesIO(archive)
    reader = Reader(lambda: source.read(piece))
    return [(entry.name, entry.type, b"".join(reader.content())) for entry in reader.entries()]


def test_files_folders_and_links() -> None:
    archive = member(b"a/", type_=b"5") + member(b"a/b", b"x" * 1000) + member(b"c", type_=b"2", link=b"/etc") + END
    assert read(archive) == [(b"a", "folder", b""), (b"a/b", "file", b"x" * 1000), (b"c", "link", b"")]


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=150)


@given(
    st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=6),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.integers(1, 2000),
)
def test_what_python_writes_is_read_as_it_was_written(files: list[tuple[str, bytes]], form: int, piece: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, content in files:
            info = tarfile.TarInfo(f"d/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert read(out.getvalue(), piece) == [(f"d/{name}".encode(), "file", content) for name, content in files]


def test_long_names_of_either_kind() -> None:
    name = b"d/" * 60 + b"x"
    for extended in (long_name(name), pax({b"path": name, b"mtime": b"1.5"})):
        assert read(extended + member(b"short", b"1") + END) == [(name, "file", b"1")]


def test_sizes_beyond_octal() -> None:
    archive = pax({b"size": b"3"}) + member(b"a", b"123", size=0) + END
    assert read(archive) == [(b"a", "file", b"123")]
    with pytest.raises(Refused, match="truncated"):
        read(member(b"a", size=2**40) + END)


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (b"", "truncated"),
        (member(b"a", b"1"), "truncated"),
        (member(b"a", b"1" * 600)[:700], "in the middle of a file"),
        (b"x" * 512 + END, "checksum|number"),
        (member(b"a")[:148] + b"0000000\0" + member(b"a")[156:] + END, "wrong checksum"),
        (END + b"x" * 512, "behind the end"),
        (END + bytes(2 * MOST_PADDING), "bytes behind its end"),
        (member(b"a", type_=b"S") + END, "sparse"),
        (pax({b"GNU.sparse.major": b"1"}) + member(b"a") + END, "sparse"),
        (member(b"a", type_=b"V") + END, "member of type 'V'"),
        (pax({b"comment": b"x" * MOST_HEADER}) + member(b"a") + END, "extended header of"),
        (member(b"x", size=2**60, type_=b"x") + END, "extended header of"),
        (long_name(b"x" * (MOST_HEADER + 1)) + member(b"a") + END, "extended header of"),
        (pax({b"a": b"1"}) + pax({b"a": b"1"}) + member(b"a") + END, "two extended headers"),
        (pax({b"a": b"1"}) + END, "no member behind it"),
        (pax({b"path": b"/etc/passwd"}, b"g") + member(b"a") + END, "global header"),
        (pax({b"size": b"-5"}) + member(b"a") + END, "for a size"),
        (member(b"h", b"5 a=b\n", b"x") + member(b"a") + END, "broken"),
        (member(b"h", b"0 a=b\n", b"x") + member(b"a") + END, "broken"),
        (member(b"h", b"999999 a=b\n", b"x") + member(b"a") + END, "broken"),
        (member(b"h", b"6 a=1\n6 a=2\n", b"x") + member(b"a") + END, "broken"),
        (member(b"h", b"junk", b"x") + member(b"a") + END, "broken"),
        (member(b"d", b"123", b"5") + END, "is no file and has 3 bytes"),
        (member(b"l", b"123", b"1") + END, "is no file and has 3 bytes"),
    ],
    ids=short,
)
def test_a_reason_for_all_else(archive: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read(archive)


def test_a_negative_size_is_none() -> None:
    header = bytearray(member(b"a"))
    header[124:136] = b"\xff" * 12
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    with pytest.raises(Refused, match="for a number"):
        read(bytes(header) + END)


whole = (
    member(b"a/", type_=b"5") + pax({b"path": b"a/b"}) + member(b"x", b"y" * 700) + long_name(b"c") + member(b"z") + END
)


damaged = st.builds(
    lambda at, new: whole[:at] + new + whole[at + len(new) :],
    st.integers(0, len(whole)),
    st.binary(min_size=1, max_size=40),
)


@given(st.binary(max_size=3000) | damaged)
def test_no_archive_is_too_odd(archive: bytes) -> None:
    try:
        found = read(archive)
    except Refused:
        return
    assert sum(len(content) for _, _, content in found) <= len(archive)
