"""A ledger is read beside the process that writes it, after that has gone, and as a crash left it."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from nodeworkers.ledger import FILE, Ledger, LedgerError, Mount
from nodeworkers.mounted import mounted

MOUNT = Mount(
    volume_id="v1", target_path="/t", pod_uid="u", pod_namespace="team-a", pod_name="b", cache_uid="c",
    cache_kind="TritonKernelCache", cache_name="llama", digest="d", mount_path="/m", size_bytes=1, upper="/u",
    size_cap=9, published_at=1.0,
)  # fmt: skip
OTHER = replace(MOUNT, volume_id="v2", pod_name="a")


def put(ledger: Ledger) -> None:
    for each in (MOUNT, OTHER, replace(MOUNT, volume_id="v3", published_at=None)):
        ledger.put_mount(each)


def test_volumes_are_read_while_another_writes_and_when_it_has_gone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    put(ledger)
    assert mounted(tmp_path) == [OTHER, MOUNT], "by pod; one that is not mounted yet is left out"
    with ledger.transaction():
        ledger.remove_mount("v2")
        assert mounted(tmp_path) == [OTHER, MOUNT], "what is not written whole is not seen, and nobody waits"
    assert mounted(tmp_path) == [MOUNT]
    ledger.close()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("ledger*")}
    assert mounted(tmp_path) == [MOUNT]
    assert (tmp_path / FILE).read_bytes() == before[FILE]
    Ledger(tmp_path).close()


def test_what_a_crash_left_is_read(tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    ledger = Ledger(tmp_path / "alive")
    put(ledger)
    for suffix in ("", "-wal"):  # as after a reboot; the newest is only in the log
        shutil.copy(f"{ledger.path}{suffix}", crashed / f"{FILE}{suffix}")
    ledger.close()
    assert mounted(crashed) == [OTHER, MOUNT]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("nothing", "no ledger in"), ("text", "cannot be read"), ("newer", "written by a newer berth"),
        ("empty", "no such table"), ("odd", "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_ledger_is_refused_with_a_sentence(make: str, words: str, tmp_path: Path) -> None:
    if make == "text":
        (tmp_path / FILE).write_text("no ledger at all, but long enough to be taken for one" * 9)
    elif make == "empty":
        (tmp_path / FILE).touch()
    elif make != "nothing":
        ledger = Ledger(tmp_path)
        put(ledger)
        ledger.close()
        with sqlite3.connect(tmp_path / FILE) as db:
            db.execute("PRAGMA user_version = 999" if make == "newer" else "UPDATE mounts SET cache_kind = 'Odd'")
        db.close()
    with pytest.raises(LedgerError, match=words):
        mounted(tmp_path)
