"""The node's store: whole caches or none, after a crash at any moment and on a full disk; what is in use stays."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from images.build import Said, build, read
from images.extraction import extract
from images.folder import Folder
from images.layout import read_manifest
from images.refused import Refused
from nodeworkers.store import Cached, Store, du
from tests.images import caches

PLENTY = 2**30
A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


def put(store: Store, digest: str, size: int = 1000, *in_use: str) -> Cached:
    """A cache with one kernel and so many bytes beside."""
    with store.staged() as content:
        caches.kernel(content, digest)
        (content / "more").write_bytes(os.urandom(size))
        return store.keep(content, digest, {"size": size}, in_use)


def whole(store: Store) -> None:
    """What every crash must leave: caches that are complete, and nothing half-made once it was swept."""
    assert not list((store.root / "staging").iterdir())
    for folder in (store.root / "caches").iterdir():
        cached = store.get(f"sha256:{folder.name}")
        assert cached is not None, f"{folder} lost its description"
        told = cached.about["files"]
        assert isinstance(told, dict)
        there = {
            path.relative_to(cached.content).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in cached.content.rglob("*")
            if path.is_file()
        }
        assert there == told
    for folder in (store.root / "relocations").iterdir():
        assert store.get(f"sha256:{folder.name}") is not None
        for layer in folder.iterdir():
            assert len(list(layer.rglob("__grp__*.json"))) == KERNELS


def test_what_is_kept_is_there_again(tmp_path: Path) -> None:
    kept = put(Store(tmp_path, PLENTY), A)
    again = Store(tmp_path, PLENTY)
    assert again.sweep() == 0 and again.get(A) == kept and again.cached() == [kept]
    assert kept.about == {"size": 1000} and kept.size == du(kept.content) > 1000
    assert again.get(B) is None
    if os.geteuid() == 0:
        assert (tmp_path.stat().st_mode & 0o777) == 0o700, "no other user looks in"


def test_the_same_digest_is_kept_once(tmp_path: Path) -> None:
    store = Store(tmp_path, PLENTY)
    first = put(store, A, 1000)
    assert put(store, A, 2000) == first
    assert len(list(tmp_path.rglob("more"))) == 1 and not list((tmp_path / "staging").iterdir())


def test_what_is_not_kept_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path, PLENTY)

    def fail() -> None:
        with store.staged() as content:
            caches.kernel(content)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list((tmp_path / "staging").iterdir()) and store.cached() == []


def test_the_longest_unused_leaves_and_what_is_in_use_stays(tmp_path: Path) -> None:
    size = put(Store(tmp_path / "measure", PLENTY), A, 50_000).size
    store = Store(tmp_path / "store", 2 * size + size // 2)
    for number, digest in enumerate((A, B)):
        put(store, digest, 50_000)
        os.utime(store.root / "caches" / digest[7:] / "image.json", (number, number))
    put(store, C, 50_000, A)
    assert {each.digest for each in store.cached()} == {A, C}, "A was unused longest, but is in use"
    with pytest.raises(Refused, match="does not fit") as caught:
        put(store, B, 50_000, A, C)
    assert caught.value.reason == "NoSpace" and {each.digest for each in store.cached()} == {A, C}
    store.used(A)
    put(store, B, 50_000)
    assert {each.digest for each in store.cached()} == {A, B}, "C was unused longest"


def test_a_cache_beyond_the_quota_drives_nothing_out(tmp_path: Path) -> None:
    store = Store(tmp_path, 200_000)
    put(store, A)
    with pytest.raises(Refused, match="at most 200,000"):
        put(store, B, 300_000)
    assert [each.digest for each in store.cached()] == [A] and not list((tmp_path / "staging").iterdir())


def test_relocations_are_made_once_and_leave_with_their_cache(tmp_path: Path) -> None:
    store = Store(tmp_path, PLENTY)
    kept = put(store, A)
    layer = store.relocation(A, "/mnt/warm")
    assert layer is not None and store.relocation(A, "/mnt/warm") == layer != store.relocation(A, "/other")
    for path in (layer, *layer.rglob("*")):  # an overlay shows these modes to pods that are not root
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666), path
    (group,) = layer.rglob("__grp__*.json")
    beside = kept.content / group.parent.relative_to(layer)
    for name, path in json.loads(group.read_text())["child_paths"].items():
        assert path == f"/mnt/warm/{beside.name}/{name}" and (beside / name).is_file()
    store.remove(A)
    assert not layer.exists() and store.get(A) is None
    with pytest.raises(Refused, match="is not on this node"):
        store.relocation(A, "/mnt/warm")


def test_a_cache_without_groups_has_nothing_to_relocate(tmp_path: Path) -> None:
    store = Store(tmp_path, PLENTY)
    with store.staged() as content:
        (content / "model").write_text("x")
        store.keep(content, A, {}, ())
    assert store.relocation(A, "/mnt") is None and not list((tmp_path / "staging").iterdir())


def test_what_is_mounted_is_the_relocation_above_the_content(tmp_path: Path) -> None:
    store = Store(tmp_path, PLENTY)
    with store.staged() as content:
        caches.kernel(content, A)
        kept = store.keep(content, A, {"capture_path": caches.AT, "groups": 1}, ())
    assert store.lower(A, caches.AT) == (kept.content,), "where it was compiled nothing has to be moved"
    above, below = store.lower(A, "/mnt")
    assert below == kept.content and above == store.relocation(A, "/mnt")
    with store.staged() as content:
        (content / "model").write_text("x")
        other = store.keep(content, B, {"groups": 0}, ())
    os.utime(other.content.parent / "image.json", (1, 1))
    assert store.lower(B, "/mnt") == (other.content,)
    assert (other.content.parent / "image.json").stat().st_mtime > 1, "what is mounted leaves last"
    with pytest.raises(LookupError, match="is no longer on this node's disk"):
        store.lower(C, "/mnt")
    (group,) = kept.content.rglob("__grp__*.json")
    group.write_text("{}")
    with pytest.raises(LookupError, match=r"cannot be mounted at /else: .* has no child_paths"):
        store.lower(A, "/else")


def test_paths_that_nobody_mounts_any_more_are_given_up_but_for_the_last_few(tmp_path: Path) -> None:
    store = Store(tmp_path, PLENTY)
    put(store, A)
    layers = []
    for number in range(12):
        layers.append(store.lower(A, f"/mnt/{number}")[0])
        os.utime(layers[-1], (number, number))
    asked = store.lower(A, "/mnt/1")[0]
    store.spare(A, lambda: {"/mnt/0", "/mnt/2", "/mnt/11"})
    # Of the nine that are not mounted, the one that was used longest ago.
    assert [number for number, layer in enumerate(layers) if not layer.exists()] == [3] and asked.exists()
    assert not list((tmp_path / "staging").iterdir())
    store.spare(B, lambda: ())
    assert store.lower(A, "/mnt/3")[0] == layers[3] and layers[3].exists(), "made again when it is wanted"


def test_volumes_that_are_mounted_at_once_share_one_relocation(tmp_path: Path) -> None:
    store = Store(tmp_path, PLENTY)
    put(store, A)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: store.lower(A, "/mnt"), range(32)))
    assert len(set(found)) == 1 and not list((tmp_path / "staging").iterdir())


@pytest.mark.parametrize("break_", ["gone", "garbage", "other digest", "no content", "a file"])
def test_what_lost_its_description_is_swept(tmp_path: Path, break_: str) -> None:
    store = Store(tmp_path, PLENTY)
    put(store, A)
    kept = put(store, B)
    store.relocation(B, "/mnt")
    described = kept.content.parent / "image.json"
    if break_ == "gone":
        described.unlink()
    elif break_ == "garbage":
        described.write_text("{" * 1000)
    elif break_ == "other digest":
        described.write_text(described.read_text().replace("b" * 64, "c" * 64))
    elif break_ == "no content":
        shutil.rmtree(kept.content)
    else:
        shutil.rmtree(kept.content.parent)
        kept.content.parent.write_text("x")
    (tmp_path / "staging" / "7").mkdir()
    (tmp_path / "staging" / "file").write_text("x")
    again = Store(tmp_path, PLENTY)
    assert again.get(B) is None
    again.sweep()
    assert [each.digest for each in again.cached()] == [A]
    assert not list((tmp_path / "staging").iterdir()) and not list((tmp_path / "relocations").iterdir())


@pytest.mark.parametrize("digest", ["", "sha256:../../etc", "a" * 64, "sha256:" + "A" * 64, f"{A}\n"])
def test_a_digest_is_a_digest(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ValueError, match="is no digest"):
        Store(tmp_path, PLENTY).get(digest)


# --- crashes ---------------------------------------------------------------------------------------------------------

KERNELS = 30
WORK = """
import asyncio, hashlib, json, sys
from pathlib import Path
from images.extraction import extract
from nodeworkers.store import Store

root, layer, digests = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")
store = Store(root, 2**30)
print("began", flush=True)
store.sweep()
while True:
    for digest in digests:
        with store.staged() as content:
            asyncio.run(extract([layer], "triton", content))
            files = {path.relative_to(content).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                     for path in content.rglob("*") if path.is_file()}
            store.keep(content, digest, {"files": files}, ())
        store.relocation(digest, "/mnt/warm")
        print(digest, flush=True)
    for digest in digests:
        store.remove(digest)
"""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer that takes a moment to extract."""
    top = tmp_path_factory.mktemp("layer")
    for number in range(KERNELS):
        folder = caches.kernel(top / "cache", str(number))
        (folder / "add.ptx").write_bytes(random.Random(number).randbytes(200_000))
    built = build(read(top / "cache", Said()), top / "image", tag=None, index=False)
    there = Folder(top / "image")
    manifest = read_manifest(there.read(built.top.digest, 2**20, "manifest"))
    return there.blob(manifest.layers[0].digest)


@pytest.mark.faults
def test_killed_at_any_moment_it_has_whole_caches_or_none(tmp_path: Path, layer: Path) -> None:
    """The process is killed at moments drawn by chance: its child extracts, or it keeps, relocates, removes. On a busy
    machine it comes less far in the same time, so that more moments are drawn there, and later ones.
    """
    draw = random.Random(5)
    seen: set[tuple[bool, int]] = set()
    for number in range(100):
        if number >= 25 and len(seen) > 2:
            break
        worker = subprocess.Popen(
            [sys.executable, "-c", WORK, str(tmp_path), str(layer), f"{A},{B}"], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None and worker.stdout.readline() == "began\n"
        time.sleep(draw.uniform(0.0, 0.8 * (1 + number // 25)))
        worker.kill()
        worker.wait()
        worker.stdout.close()
        left = len(list((tmp_path / "staging").iterdir()))
        store = Store(tmp_path, PLENTY)
        seen.add((left > 0, len(store.cached())))
        # It dies with its parent: as soon as a busy disk lets it go (syncfs), or, when it had only begun, as soon as it
        # has come to the folder and sees that it is alone.
        deadline = time.monotonic() + 60
        while told := alive(tmp_path):
            assert time.monotonic() < deadline, f"the child outlives its parent: {told}"
            time.sleep(0.01)
        store.sweep()
        whole(store)
    assert len(seen) > 2, f"the moments were not different enough: {seen}"


def children_of_nobody(root: Path) -> list[int]:
    """Extracting processes whose folder lies in the store."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "cwd").startswith(str(root)):
                found.append(int(entry.name))
    return found


def alive(root: Path) -> list[str]:
    """What the kernel says of these processes that live: their state, and the signals that wait for them."""
    told = []
    for pid in children_of_nobody(root):
        with contextlib.suppress(OSError):
            told.append(Path(f"/proc/{pid}/status").read_text())
    return [each for each in told if "State:\tZ" not in each]


@pytest.mark.faults
def test_killing_only_the_child_keeps_nothing(tmp_path: Path, layer: Path) -> None:
    store = Store(tmp_path, PLENTY)
    draw = random.Random(7)
    crashed = 0

    async def attempt() -> None:
        nonlocal crashed
        with store.staged() as content:
            work = asyncio.create_task(extract([layer], "triton", content))
            await asyncio.sleep(draw.uniform(0.05, 0.3))
            for pid in children_of_nobody(tmp_path):
                os.kill(pid, signal.SIGKILL)
            (outcome,) = await asyncio.gather(work, return_exceptions=True)
            if isinstance(outcome, Refused):
                assert outcome.reason == "Crashed"
                crashed += 1
            else:
                store.keep(content, A, {}, ())
                store.remove(A)

    for _ in range(15):
        asyncio.run(attempt())
        assert store.cached() == [] and not list((tmp_path / "staging").iterdir())
    assert crashed, "no child was met while it worked"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.node
def test_a_full_disk_is_told_and_leaves_nothing(small_disk: Path, layer: Path) -> None:
    store = Store(small_disk, PLENTY)
    kept = put(store, B, 500_000)

    async def attempt() -> None:
        with store.staged() as content:
            await extract([layer], "triton", content)
            store.keep(content, A, {}, ())

    with pytest.raises(Refused) as caught:
        asyncio.run(attempt())
    assert (caught.value.reason, str(caught.value)) == ("NoSpace", "The disk is full.")
    assert store.cached() == [kept] and not list((small_disk / "staging").iterdir())


@pytest.mark.node
def test_a_disk_that_fills_up_at_any_byte_keeps_whole_caches_or_none(small_disk: Path) -> None:
    """Every size of what lies there already, so that each step in turn is the one that finds no room."""
    store = Store(small_disk, PLENTY)
    filler = small_disk / "filler"
    outcomes = set()
    for left in range(0, 120_000, 4096):
        free = shutil.disk_usage(small_disk).free
        filler.write_bytes(b"x" * max(0, free - left))
        try:
            # An OSError is what the extraction would refuse: nothing is kept then.
            with contextlib.suppress(Refused, OSError), store.staged() as content:
                caches.kernel(content)
                (content / "more").write_bytes(b"y" * 20_000)
                store.keep(content, A, {"files": 1}, ())
            with contextlib.suppress(Refused):
                store.relocation(A, "/mnt")
        finally:
            filler.unlink()
        found = store.get(A)
        outcomes.add(found is not None)
        assert not list((small_disk / "staging").iterdir())
        if found is not None:
            assert (found.content / "more").stat().st_size == 20_000
            moved = small_disk / "relocations" / A[7:]
            assert all(len(list(layer.rglob("__grp__*"))) == 1 for layer in (moved.iterdir() if moved.exists() else ()))
            filler.write_bytes(b"x" * shutil.disk_usage(small_disk).free)
            store.remove(A)  # also where nothing more can be written
            assert store.get(A) is None
            filler.unlink()
    assert outcomes == {True, False}
