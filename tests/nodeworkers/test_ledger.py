"""The node's ledger: what is written is read again, whatever happens to its file."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers import ledger as ledger_module
from nodeworkers import ledger_disk
from nodeworkers.ledger import FILE, Ledger, LedgerError, Mount
from nodeworkers.ledger_tables import MIGRATIONS
from planning.caches.volumes import NodeCache

DIGEST, OLD = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
CACHE = NodeCache(
    uid="c-1", kind="TritonKernelCache", namespace="team-a", name="llama", state="Ready", generation=3, digest=DIGEST,
    mount_path="/cache", size_bytes=5, compatible=True, last_known_good=OLD, labels={"a": "ä"},
    epoch=7, goal=OLD, signatures=("bundle sha256:1", "signature sha256:2"),
)  # fmt: skip
MOUNT = Mount(
    volume_id="csi-1", target_path="/k/pods/p/volumes/kubernetes.io~csi/v/mount", pod_uid="p", pod_namespace="team-a",
    pod_name="server", cache_uid="c-1", cache_kind="TritonKernelCache", cache_name="llama", digest=DIGEST,
    mount_path="/cache", size_bytes=5, upper="/u", size_cap=10, published_at=1.5,
)  # fmt: skip

Open = Callable[[], Ledger]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """Opens the same ledger again, closing it first."""
    opened: list[Ledger] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def reopen() -> Ledger:
        close()
        opened.append(Ledger(tmp_path / "node"))
        return opened[-1]

    yield reopen
    close()


def test_what_is_written_is_there_after_a_restart(reopen: Open) -> None:
    ledger = reopen()
    ledger.put_cache(CACHE)
    ledger.put_cache(replace(CACHE, uid="c-2", name="other", compatible=None, state="Pending"))
    ledger.put_mount(MOUNT)
    ledger.put_mount(replace(MOUNT, volume_id="csi-2", published_at=None, upper=""))
    ledger.put_mount(replace(MOUNT, volume_id="csi-3"))
    ledger.remove_mount("csi-3")
    ledger = reopen()
    assert not ledger.repaired
    assert ledger.cache("c-1") == CACHE and ledger.caches("llama") == [CACHE] and len(ledger.caches()) == 2
    assert ledger.mount("csi-1") == MOUNT and ledger.mount("csi-3") is None and ledger.volumes() == 2
    ledger.remove_cache("c-1")
    assert ledger.cache("c-1") is None
    assert ledger.mount("csi-1") == MOUNT, "a deleted cache stays on record where it is mounted"


def test_a_name_belongs_to_the_object_that_came_last(reopen: Open) -> None:
    ledger = reopen()
    ledger.put_cache(CACHE)
    ledger.put_cache(replace(CACHE, uid="c-3", namespace="team-b"))
    ledger.put_cache(replace(CACHE, uid="c-9", state="Pending"))
    assert {cache.uid for cache in ledger.caches("llama")} == {"c-3", "c-9"}


def test_what_anybody_needs_is_named(reopen: Open) -> None:
    ledger = reopen()
    assert ledger.digests() == set()
    ledger.put_cache(replace(CACHE, digest="", last_known_good=OLD))
    ledger.put_mount(replace(MOUNT, published_at=None))
    assert ledger.digests() == {DIGEST, OLD}


def test_one_process_writes_and_others_read_meanwhile(reopen: Open, tmp_path: Path) -> None:
    ledger = reopen()
    ledger.put_cache(CACHE)
    with pytest.raises(LedgerError, match="Another berth node uses the ledger"):
        Ledger(tmp_path / "node")
    reader = sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True)
    try:
        with ledger.transaction():
            ledger.put_cache(replace(CACHE, digest=OLD))
            assert reader.execute("SELECT digest FROM caches").fetchall() == [(DIGEST,)]
        assert reader.execute("SELECT digest FROM caches").fetchall() == [(OLD,)]
    finally:
        reader.close()


def test_a_transaction_is_whole_or_not_at_all(reopen: Open) -> None:
    ledger = reopen()

    def half() -> None:
        with ledger.transaction():
            ledger.put_mount(MOUNT)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert ledger.volumes() == 0
    with ledger.transaction(), ledger.transaction():
        ledger.put_mount(MOUNT)
    assert ledger.volumes() == 1


def test_threads_take_turns(reopen: Open) -> None:
    ledger = reopen()

    def count() -> None:
        for _ in range(50):
            with ledger.transaction():
                mount = ledger.mount("csi-1") or replace(MOUNT, size_bytes=0)
                ledger.put_mount(replace(mount, size_bytes=mount.size_bytes + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mount = ledger.mount("csi-1")
    assert mount is not None and mount.size_bytes == 200


def test_a_newer_berths_ledger_is_refused_and_left_alone(reopen: Open) -> None:
    ledger = reopen()
    ledger.put_mount(MOUNT)

    def written_by(version: int) -> None:
        with sqlite3.connect(ledger.path) as db:
            db.execute(f"PRAGMA user_version = {version}")
        db.close()

    written_by(len(MIGRATIONS) + 4)
    with pytest.raises(
        LedgerError, match=rf"newer berth \(schema {len(MIGRATIONS) + 4}; this one knows .*Install that"
    ):
        reopen()
    written_by(len(MIGRATIONS))
    assert reopen().mounts() == [MOUNT]


def test_an_older_ledger_is_brought_up_to_date(reopen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    reopen().put_cache(CACHE)
    added = ("berths", "CREATE TABLE berths (id TEXT PRIMARY KEY) STRICT;")
    monkeypatch.setattr(ledger_module, "MIGRATIONS", (*MIGRATIONS, added))
    ledger = reopen()
    assert not ledger.repaired and ledger.cache("c-1") == CACHE
    with sqlite3.connect(ledger.path) as db:
        assert db.execute("SELECT count(*) FROM berths").fetchone() == (0,)
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    db.close()


def test_the_ledger_before_orders_is_brought_up_to_date(reopen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the first schema, with a copy of its time beside it."""
    monkeypatch.setattr(ledger_module, "MIGRATIONS", MIGRATIONS[:1])
    old = [name for name in ledger_module._CACHE_FIELDS if name not in ("epoch", "goal", "signatures")]
    ledger = reopen()
    with sqlite3.connect(ledger.path) as db:
        values = {**asdict(CACHE), "labels": "{}"}
        marks = ", ".join(f":{name}" for name in old)
        db.execute(f"INSERT INTO caches ({', '.join(old)}) VALUES ({marks})", {name: values[name] for name in old})
    db.close()
    monkeypatch.undo()
    expected = replace(CACHE, labels={}, epoch=0, goal="", signatures=())
    ledger = reopen()
    assert not ledger.repaired and ledger.caches() == [expected]
    copy = ledger.folder / "caches" / "c-1.json"
    told = orjson.loads(copy.read_bytes())
    copy.write_bytes(orjson.dumps({name: told[name] for name in old}))
    ledger.close()
    for path in ledger.folder.glob(f"{FILE}*"):
        path.unlink()
    assert reopen().caches() == [expected]


def test_its_identity_is_another_when_it_was_made_anew(reopen: Open) -> None:
    ledger = reopen()
    first = ledger.identity
    assert reopen().identity == first
    (ledger.folder / "identity").unlink()
    second = reopen().identity
    assert second != first
    for path in ledger.folder.glob(f"{FILE}*"):
        path.unlink()
    third = reopen().identity
    assert len({first, second, third}) == 3 and reopen().identity == third


def test_it_counts_what_is_written(reopen: Open) -> None:
    ledger = reopen()
    counted = [ledger.changes]
    acts: tuple[Callable[[], None], ...] = (
        lambda: ledger.put_cache(CACHE),
        lambda: ledger.put_mount(MOUNT),
        lambda: ledger.remove_mount("csi-1"),
        lambda: ledger.remove_cache("c-1"),
    )
    for act in acts:
        act()
        counted.append(ledger.changes)
    assert sorted(set(counted)) == counted
    ledger.mounts()
    assert ledger.changes == counted[-1]


def test_a_lost_ledger_is_made_from_the_copies_beside_it(reopen: Open) -> None:
    ledger = reopen()
    ledger.put_cache(CACHE)
    ledger.put_cache(replace(CACHE, uid="c-2", name="gone"))
    ledger.remove_cache("c-2")
    ledger.close()
    shutil.copytree(ledger.folder, ledger.folder.parent / "second")
    second = ledger.folder.parent / "second"
    for path in second.glob(f"{FILE}*"):
        path.unlink()
    (second / "caches" / "bad.json").write_text('{"uid": "c-1"')
    (second / "caches" / "c-7.json").write_bytes((second / "caches" / "c-1.json").read_bytes())
    rebuilt = Ledger(second)
    assert rebuilt.caches() == [CACHE]
    rebuilt.close()


def test_the_ledger_holds_against_a_copy_that_was_left(reopen: Open) -> None:
    """A crash between the two must not bring back a cache that was removed."""
    ledger = reopen()
    ledger.put_cache(CACHE)
    stray = ledger.folder / "caches" / "c-8.json"
    shutil.copy(ledger.folder / "caches" / "c-1.json", stray)
    (ledger.folder / "caches" / "c-1.json").unlink()
    ledger = reopen()
    assert ledger.caches() == [CACHE] and not stray.exists()
    assert (ledger.folder / "caches" / "c-1.json").exists()


def test_nobody_waits_while_a_cache_is_put_on_a_slow_disk(reopen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = reopen()
    begun, goes_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(file: int) -> None:
        begun.set()
        assert goes_on.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    putting = threading.Thread(target=lambda: ledger.put_cache(CACHE))
    putting.start()
    done = threading.Event()

    def answer() -> None:
        with ledger.transaction():
            ledger.put_mount(MOUNT)
        assert ledger.cache(CACHE.uid) == CACHE, "and reads what is written already"
        done.set()

    answering = threading.Thread(target=answer)
    try:
        assert begun.wait(60)
        answering.start()
        assert done.wait(60), "who answers the kubelet waits for the copy of a cache"
    finally:
        goes_on.set()
        putting.join()
        answering.join()
    assert (ledger.folder / "caches" / f"{CACHE.uid}.json").exists()


def test_copies_follow_the_ledger_whoever_writes_last(reopen: Open) -> None:
    ledger = reopen()
    states = ("Pending", "Ready", "Failed")

    def put(state: Any) -> None:
        for number in range(20):
            ledger.put_cache(replace(CACHE, state=state, size_bytes=number))

    threads = [threading.Thread(target=put, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = (ledger.folder / "caches" / f"{CACHE.uid}.json").read_bytes()
    assert orjson.loads(before)["state"] == (ledger.cache(CACHE.uid) or CACHE).state
    (ledger.folder / "caches" / f"{CACHE.uid}.json").write_bytes(before.replace(b'"size_bytes":', b'"size_bytes":1'))
    ledger = reopen()
    assert (ledger.folder / "caches" / f"{CACHE.uid}.json").read_bytes() == before, "a copy that lags is put right"


def test_a_copy_that_cannot_be_written_is_said_and_the_ledger_has_the_cache(reopen: Open) -> None:
    ledger = reopen()
    (ledger.folder / "caches" / f"{CACHE.uid}.new").mkdir()
    with pytest.raises(
        LedgerError, match=r"The copy of a cache cannot be written to .*c-1\.new: Is a directory\. Make"
    ):
        ledger.put_cache(CACHE)
    assert ledger.cache(CACHE.uid) == CACHE
    (ledger.folder / "caches" / f"{CACHE.uid}.new").rmdir()
    assert reopen().caches() == [CACHE]
    assert (ledger.folder / "caches" / f"{CACHE.uid}.json").exists()


def test_the_ledgers_log_is_moved_into_it_beside_those_who_write(reopen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_disk, "_WRITES", 10)
    ledger = reopen()
    before, deadline, number = ledger.path.stat().st_size, time.monotonic() + 60, 0
    while ledger.path.stat().st_size == before:
        assert time.monotonic() < deadline, "the log only grows"
        number += 1
        ledger.put_mount(replace(MOUNT, volume_id=f"csi-{number}"))
    assert ledger.volumes() == number


def test_a_file_of_something_else_is_set_aside(reopen: Open) -> None:
    ledger = reopen()
    ledger.put_cache(CACHE)
    ledger.close()
    path = ledger.path
    for content in (b"", b"not a database" * 100, os.urandom(8192)):
        path.write_bytes(content)
        path.with_name(f"{FILE}-wal").unlink(missing_ok=True)
        again = Ledger(ledger.folder)
        assert again.caches() == ([CACHE] if content else [])
        assert bool(again.repaired) == bool(content)
        assert "ledger.sqlite.damaged" in again.repaired or not content
        again.put_cache(CACHE)
        again.close()


def test_damage_that_no_row_shows_is_found_at_the_start(reopen: Open) -> None:
    ledger = reopen()
    ledger.put_cache(CACHE)
    query = "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_caches_1'"
    page, size = ledger._db.execute(query).fetchone()[0], ledger._db.execute("PRAGMA page_size").fetchone()[0]
    ledger.close()
    content = bytearray(ledger.path.read_bytes())
    content[(page - 1) * size : page * size] = bytes(size)
    ledger.path.write_bytes(content)
    assert "was damaged" in reopen().repaired
    assert reopen().caches() == [CACHE]


def test_a_ledger_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(LedgerError, match=r"cannot be opened.*needs a folder that it may write"):
        Ledger(tmp_path)


def test_a_full_disk_is_told_and_changes_nothing(reopen: Open) -> None:
    ledger = reopen()
    ledger.put_mount(MOUNT)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="cannot be used: database or disk is full"):
        ledger.put_mount(replace(MOUNT, volume_id="csi-2", pod_name="x" * 100_000))
    assert ledger.mounts() == [MOUNT]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed ledger with something in it."""
    folder = tmp_path_factory.mktemp("written")
    ledger = Ledger(folder)
    for number in range(12):
        ledger.put_cache(replace(CACHE, uid=f"c-{number}", name=f"n{number}", reason="x" * number * 100))
        ledger.put_mount(replace(MOUNT, volume_id=f"csi-{number}"))
    ledger.close()
    return folder


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_in_the_file_it_opens_or_says_why_not(data: st.DataObject, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written, folder)
    content = bytearray((folder / FILE).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 200))
        content[at : at + data.draw(st.integers(1, 64))] = data.draw(st.binary(min_size=1, max_size=64))
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content))) :]
    (folder / FILE).write_bytes(content)
    if int.from_bytes(content[60:64], "big") > len(MIGRATIONS) and content[68:72] == b"brth":
        content[60:64] = bytes(4)  # a schema of the future is another test's
        (folder / FILE).write_bytes(content)
    ledger = Ledger(folder)
    try:
        assert len(ledger.caches()) <= 12
        if ledger.repaired:
            assert len(ledger.caches()) == 12
        ledger.put_cache(CACHE)
        assert ledger.cache("c-1") == CACHE
    finally:
        ledger.close()


def test_a_process_killed_while_it_writes_loses_nothing_it_had_said(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from dataclasses import asdict, replace\n"
        "from tests.nodeworkers.test_ledger import CACHE, MOUNT; from nodeworkers.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "for number in range(10**6):\n"
        "    ledger.put_mount(replace(MOUNT, volume_id=f'csi-{number % 50}', size_bytes=number))\n"
        "    ledger.put_cache(replace(CACHE, generation=number))\n"
        "    print(number, flush=True)\n"
    )
    for least in (1, 40, 90):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = -1
        for line in process.stdout:
            said = int(line)
            if said >= least:
                break
        process.kill()
        process.stdout.close()
        process.wait()
        ledger = Ledger(tmp_path)
        cache, mount = ledger.cache("c-1"), ledger.mount(f"csi-{said % 50}")
        assert not ledger.repaired
        assert cache is not None and cache.generation >= said
        assert mount is not None and mount.size_bytes >= said
        ledger.close()
