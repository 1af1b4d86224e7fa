"""What the node takes from a pod's reports, whatever the pod puts there; and that it is counted once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.csi import reports as reports_module
from nodeworkers.csi.reports import FILE_BYTES, FILES, KERNELS, MICROSECONDS, Reports, make_room, read_reports
from nodeworkers.ledger import Ledger, Mount
from planning.caches.hits import Seen
from planning.caches.volumes import NodeCache
from tests.scraping import Read

CACHE = NodeCache(
    uid="c-1",
    kind="TritonKernelCache",
    namespace="team-a",
    name="llama",
    state="Ready",
    digest="d1",
    goal="d1",
    compatible=True,
)
CLUSTERS = NodeCache(uid="c-2", kind="TritonKernelCacheCluster", namespace="", name="shared", digest="d1")


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    folder = tmp_path / "upper"
    folder.mkdir()
    make_room(folder)
    return folder


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger")
    opened.put_cache(CACHE)
    opened.put_cache(CLUSTERS)
    yield opened
    opened.close()


def mount(volume_id: str, upper: Path | str, cache: NodeCache = CACHE, pod: str = "p") -> Mount:
    return Mount(
        volume_id=volume_id, target_path=f"/k/{volume_id}", pod_uid=pod, pod_namespace="team-a", pod_name=pod,
        cache_uid=cache.uid, cache_kind=cache.kind, cache_name=cache.name, digest=cache.digest, mount_path="/m",
        size_bytes=1, upper=str(upper), size_cap=1, published_at=1.0,
    )  # fmt: skip


def text(hits: object = 0, misses: object = 0, microseconds: object = 0) -> str:
    return json.dumps({"hits": hits, "misses": misses, "compile_microseconds": microseconds})


def report(upper: Path, name: str, body: str | bytes) -> Path:
    """As the listener leaves it."""
    place = upper / ".berth" / "reports" / name
    fresh = place.with_name(f".{place.name}.new")
    fresh.write_bytes(body.encode() if isinstance(body, str) else body)
    fresh.replace(place)
    return place


def test_the_room_is_everybodys_and_the_rest_is_not(upper: Path) -> None:
    assert [os.stat(upper / each).st_mode & 0o7777 for each in (".berth", ".berth/mounted", ".berth/reports")] == [
        0o755, 0o644, 0o1777,
    ]  # fmt: skip


def test_reports_are_read_by_name(upper: Path) -> None:
    report(upper, "host-1-ab.json", text(3, 2, 1_500_000))
    report(upper, "host-2-cd.json", text(1))
    found = read_reports(upper, {})
    assert found == {"host-1-ab.json": Seen(3, 2, 1.5), "host-2-cd.json": Seen(1, 0, 0.0)}
    report(upper, "host-1-ab.json", text(2, 9, 1))
    (upper / ".berth" / "reports" / "host-2-cd.json").unlink()
    assert read_reports(upper, found) == {"host-1-ab.json": Seen(3, 9, 1.5), "host-2-cd.json": Seen(1, 0, 0.0)}


BAD = [
    "", "{", "[]", "1", "null", '"x"', "{}", text(-1), text(True), text(1.0), text("1"), text(None), text([1]),
    text(KERNELS + 1), text(0, KERNELS + 1), text(0, 0, MICROSECONDS + 1), text(10**30), '{"hits": NaN}',
    "[" * 4000, '{"a":' * 800, b"\xff\xfe", text(1) + " " * FILE_BYTES, '{"hits": 1, "misses": 1}',
]  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_what_is_no_report_is_none(body: str | bytes, upper: Path) -> None:
    report(upper, "bad.json", body)
    report(upper, "good.json", text(1, 1, 1))
    assert read_reports(upper, {}) == {"good.json": Seen(1, 1, 1e-6)}


@given(st.binary(max_size=200) | st.builds(text, st.integers(), st.integers(), st.integers()))
def test_numbers_are_bounded_whatever_is_written(body: bytes | str) -> None:
    said = reports_module._parsed(body.encode() if isinstance(body, str) else body)
    assert said is None or (
        0 <= said.hits <= KERNELS and 0 <= said.misses <= KERNELS and 0 <= said.compile_seconds <= MICROSECONDS / 1e6
    )


def test_nothing_is_followed_or_waited_for(upper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, secret = upper / ".berth" / "reports", tmp_path / "secret.json"
    secret.write_text(text(7))
    (folder / "link.json").symlink_to(secret)
    os.mkfifo(folder / "fifo.json")
    (folder / "folder.json").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(folder)
        server.bind("socket.json")
    for odd in ("..json", ".hidden.json", "a b.json", "a\nb.json", "x" * 200 + ".json", "a.json.new", "ü.json"):
        (folder / odd).write_text(text(7))
    assert read_reports(upper, {}) == {}
    # It became something else between the look and the opening.
    regular = os.stat(secret)
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    assert read_reports(upper, {}) == {}


@pytest.mark.parametrize("trap", [".berth", ".berth/reports"])
@pytest.mark.parametrize("kind", ["link", "file", "gone"])
def test_a_folder_that_became_something_else_is_none(trap: str, kind: str, upper: Path, tmp_path: Path) -> None:
    report(upper, "a.json", text(1))
    (upper / trap).rename(tmp_path / "moved")
    if kind == "link":
        (upper / trap).symlink_to(tmp_path / "moved")
    elif kind == "file":
        (upper / trap).touch()
    assert read_reports(upper, {}) == {} and read_reports(upper, {"old.json": Seen(1, 0)}) == {"old.json": Seen(1, 0)}
    assert read_reports(tmp_path / "nowhere", {}) == {}


def test_files_are_counted_and_a_known_one_goes_on(upper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(FILES + 50):
        report(upper, f"p-{number:04}.json", text(1))
    found = read_reports(upper, {})
    assert len(found) == FILES
    last = max(found)
    report(upper, last, text(5))
    assert read_reports(upper, found)[last] == Seen(5, 0, 0.0), "though no more are taken"
    monkeypatch.setattr(reports_module, "_ENTRIES", 10)
    assert len(read_reports(upper, {})) <= 10


def test_only_folders_that_changed_are_read(upper: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "_SETTLED", -1)
    read: list[Path] = []
    really = reports_module.read_reports

    def noting(path: Path, before: dict[str, Seen]) -> dict[str, Seen]:
        read.append(path)
        return really(path, before)

    monkeypatch.setattr(reports_module, "read_reports", noting)
    reports = Reports(ledger)
    ledger.put_mount(mount("v1", upper))
    ledger.put_mount(mount("v2", ""))
    ledger.put_mount(mount("v3", upper.parent / "nowhere"))
    reports.look()
    reports.look()
    assert read == [upper]
    report(upper, "a.json", text(2, 1, 10))
    reports.look()
    reports.look()
    assert read == [upper, upper] and ledger.seen() == {("c-1", "d1"): Seen(2, 1, 1e-5)}


def test_a_folder_that_changed_just_now_is_read_again(upper: Path, ledger: Ledger) -> None:
    reports = Reports(ledger)
    ledger.put_mount(mount("v1", upper))
    place = report(upper, "a.json", text(1))
    reports.look()
    place.write_text(text(2))  # as if renamed within the same tick of the clock: the folder's time does not tell
    reports.look()
    assert ledger.seen() == {("c-1", "d1"): Seen(2, 0, 0.0)}


def test_what_was_reported_outlives_pods_and_restarts_and_is_counted_once(upper: Path, ledger: Ledger) -> None:
    reports, kept = Reports(ledger), {("c-1", "d1"): Seen(3, 1, 2.0)}
    ledger.put_mount(mount("v1", upper))
    report(upper, "a.json", text(3, 1, 2_000_000))
    for _ in range(2):
        reports.look()
        reports.read("v1")
    Reports(ledger).look()  # a process that knows nothing yet
    assert ledger.seen() == kept and ledger.seen_by_volume() == {"v1": Seen(3, 1, 2.0)}
    ledger.remove_mount("v1")
    ledger.remove_mount("v1")
    reports.look()
    reports.read("v1")
    ledger.put_seen("v1", Seen(9, 9, 9.0))
    assert ledger.seen() == kept and ledger.seen_by_volume() == {} and reports._known == {}
    ledger.put_mount(mount("v2", upper))
    reports.look()
    assert ledger.seen() == {("c-1", "d1"): Seen(6, 2, 4.0)}
    ledger.put_cache(replace(CACHE, digest="d2"))  # another image: what was said of the old one stays
    ledger.put_mount(mount("v3", upper, replace(CACHE, digest="d2")))
    reports.look()
    assert ledger.seen()[("c-1", "d2")] == Seen(3, 1, 2.0)
    ledger.remove_cache("c-1")
    assert set(ledger.seen_by_volume()) == {"v2", "v3"}
    ledger.remove_mount("v2")
    ledger.remove_mount("v3")
    assert ledger.seen() == {}, "a cache that has gone leaves nothing"


def test_a_volume_that_ended_and_came_back_begins_at_nothing(
    upper: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports(ledger)
    ledger.put_mount(mount("v1", upper))
    place = report(upper, "a.json", text(3))
    reports.end("v1")
    ledger.remove_mount("v1")
    place.unlink()
    ledger.put_mount(mount("v1", upper))
    report(upper, "b.json", text(2))
    reports.read("v1")
    assert ledger.seen() == {("c-1", "d1"): Seen(5, 0, 0.0)}

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reports_module, "_names", broken)
    report(upper, "c.json", text(1))
    reports.end("v1")


def test_a_report_that_shrinks_while_nobody_looked_takes_nothing_back(upper: Path, ledger: Ledger) -> None:
    ledger.put_mount(mount("v1", upper))
    report(upper, "a.json", text(3, 1, 5))
    Reports(ledger).look()
    report(upper, "a.json", text(1, 4, 0))
    Reports(ledger).look()
    assert ledger.seen_by_volume() == {"v1": Seen(3, 4, 5e-6)}


async def test_the_watch_goes_on_whatever_goes_wrong(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "_SECONDS", 0.0)
    reports, calls, thrice = Reports(ledger), 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def look() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            loop.call_soon_threadsafe(thrice.set)
        raise RuntimeError("the disk is away")

    monkeypatch.setattr(reports, "look", look)
    watching = asyncio.create_task(reports.watch())
    async with asyncio.timeout(30):
        await thrice.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


# ---- Prometheus


def test_what_is_scraped(upper: Path, ledger: Ledger, scraped: Read) -> None:
    assert scraped() == {}
    reports = Reports(ledger)
    ledger.put_mount(mount("v1", upper))
    ledger.put_mount(replace(mount("v2", ""), published_at=None))
    report(upper, "a.json", text(3, 1, 500_000))
    reports.look()
    pod = '{cache="team-a/llama",pod="team-a/p"}'
    every = {
        'berth_cache_ready{cache="team-a/llama"}': 1, 'berth_cache_ready{cache="shared"}': 0,
        'berth_cache_mounts{cache="team-a/llama"}': 1, 'berth_cache_mounts{cache="shared"}': 0,
        'berth_cache_hits_total{cache="team-a/llama"}': 3, 'berth_cache_misses_total{cache="team-a/llama"}': 1,
        'berth_cache_compile_seconds_total{cache="team-a/llama"}': 0.5,
    }  # fmt: skip
    of_the_pod = {"hits": 3, "misses": 1, "compile_seconds": 0.5}
    assert scraped() == every | {f"berth_cache_pod_{name}{pod}": value for name, value in of_the_pod.items()}
    ledger.remove_mount("v1")
    reports.look()
    assert scraped() == every | {'berth_cache_mounts{cache="team-a/llama"}': 0}, "the pod's series went with it"
    ledger.put_mount(mount("v3", "", CLUSTERS))
    ledger.remove_cache("c-1")
    reports.look()
    assert scraped() == {'berth_cache_mounts{cache="shared"}': 1, 'berth_cache_ready{cache="shared"}': 0}
    for other in (replace(CLUSTERS, state="Removing"), replace(CLUSTERS, state="Failed", compatible=False)):
        ledger.put_cache(other)
        reports.look()
        assert scraped() == {'berth_cache_mounts{cache="shared"}': 1}, "nobody waits for it here"
