"""Where the programs in Rust are taken from, and what is said where they cannot be had."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stack import StackError
from stack.native import PROGRAMS, SOURCES, cargo, ensure, find, fingerprint
from tests.stack.test_tools import program

CARGO = """#!/bin/sh
if [ "$1" = --version ]; then echo "cargo 1.95.0 (f2d3ce0bd 2026-03-21)"; exit 0; fi
echo "   Compiling seat-proxy v0.1.0"
[ -e fails ] && {{ echo "error: expected item, found x"; exit 101; }}
echo once >> "{log}"
while [ "$1" != --target-dir ]; do shift; done
mkdir -p "$2/release" && for each in seat-proxy quick-backend; do echo built > "$2/release/$each"; done
chmod +x "$2/release/seat-proxy" "$2/release/quick-backend"
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of their own, and a cargo that pretends to build them and notes each time."""
    monkeypatch.delenv("BERTH_SEAT_PROXY", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    program(tmp_path / "path" / "cargo", "").write_text(CARGO.format(log=tmp_path / "log"))
    folder = tmp_path / "native"
    (folder / "src").mkdir(parents=True)
    shutil.copy(SOURCES / "Cargo.toml", folder)
    (folder / "src" / "main.rs").write_text("fn main() {}")
    return folder


def test_what_was_built_from_these_sources_is_not_built_again(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert find("seat-proxy", cache, sources) is None
    built = [ensure(each, cache=cache, sources=sources) for each in PROGRAMS]
    assert [each.name for each in built] == list(PROGRAMS) and all(each.is_file() for each in built)
    (sources / "target").mkdir()
    (sources / "target" / "made.rs").write_text("of no account")
    assert ensure("seat-proxy", cache=cache, sources=sources) == built[0]
    assert (tmp_path / "log").read_text() == "once\n"
    (sources / "src" / "main.rs").write_text("fn main() { }")
    assert ensure("seat-proxy", cache=cache, sources=sources) != built[0]
    assert sorted(each.name.split("-")[0] for each in (cache / "tools").iterdir()) == [
        ".native.lock",
        "native",
        "native",
    ]


def test_a_failed_build_says_why_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "fails").touch()
    with pytest.raises(StackError, match="error: expected item, found x"):
        ensure("seat-proxy", cache=tmp_path / "cache", sources=sources)
    assert find("seat-proxy", tmp_path / "cache", sources) is None


def test_a_program_may_be_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = program(tmp_path / "mine", "hello")
    monkeypatch.setenv("BERTH_SEAT_PROXY", str(mine))
    assert ensure("seat-proxy", cache=tmp_path / "cache", sources=sources) == mine
    monkeypatch.setenv("BERTH_SEAT_PROXY", str(tmp_path / "none"))
    with pytest.raises(StackError, match="BERTH_SEAT_PROXY"):
        ensure("seat-proxy", cache=tmp_path / "cache", sources=sources)


def test_what_is_missing_is_said_in_a_sentence(sources: Path, tmp_path: Path) -> None:
    program(tmp_path / "path" / "cargo", "cargo 1.70.0 (x)")
    with pytest.raises(StackError, match=r"needs cargo 1\.89 or newer, and cargo is 1\.70 on PATH"):
        cargo(sources)
    (tmp_path / "path" / "cargo").unlink()
    with pytest.raises(StackError, match=r"there is no cargo on PATH") as missing:
        ensure("seat-proxy", cache=tmp_path / "cache", sources=sources)
    assert "BERTH_SEAT_PROXY=/path" in missing.value.hint
    with pytest.raises(StackError, match="its sources are not in"):
        cargo(tmp_path / "elsewhere")


def test_a_program_that_is_none(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(StackError, match="no program called rover"):
        ensure("rover", cache=tmp_path / "cache", sources=sources)


def test_sources_are_told_apart(sources: Path) -> None:
    before = fingerprint(sources)
    (sources / "Cargo.lock").write_text("version = 4")
    assert fingerprint(sources) != before
