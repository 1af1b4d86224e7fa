"""Real mounts: caches in pods' folders, their private layers, and that nothing is left whatever happens."""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.csi import mounts
from nodeworkers.csi.export import Compiled, ExportError, compiled, copy_compiled
from nodeworkers.csi.volumes import Refused, Volumes
from nodeworkers.ledger import FILE, LedgerError, Mount
from tests.nodeworkers.csi_rig import CACHE, CAPTURED, DIGEST, FILES, KERNEL, OTHER, Rig, needs_mounts, request, rig_in

pytestmark = needs_mounts


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rig_in(tmp_path) as made:
        yield made


@pytest.fixture
def volumes(rig: Rig) -> Iterator[Volumes]:
    opened = rig.open()
    yield opened
    opened.ledger.close()


def refusal(volumes: Volumes, volume_id: str, target: str, *, pod: str = "pod-1", **asked: object) -> str:
    with pytest.raises(Refused) as caught:
        volumes.publish(volume_id, target, request(pod, **asked), None)  # type: ignore[arg-type]
    return f"{caught.value.code}: {caught.value.message}"


def as_user(folder: str, script: str, user: int, groups: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A shell in the folder, as a container has it: the path to it is not the user's business."""
    return subprocess.run(
        ["sh", "-c", script], cwd=folder, user=user, group=user, extra_groups=groups, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_a_pod_reads_the_cache_and_writes_above_it(rig: Rig, volumes: Volumes) -> None:
    first, second = rig.target("pod-1"), rig.target("pod-2")
    volumes.publish("csi-1", first, request("pod-1"), None)
    volumes.publish("csi-2", second, request("pod-2"), None)
    kernel = Path(first, KERNEL, "add.cubin")
    assert kernel.read_bytes() == b"machine code"
    kernel.write_bytes(b"changed")
    Path(first, "NEWKERNEL").mkdir()
    Path(first, "NEWKERNEL", "mul.cubin").write_bytes(b"compiled")
    Path(first, KERNEL, "__grp__add.json").unlink()
    assert {name: Path(second, name).read_bytes() for name in FILES} == FILES, "a pod saw another's writes"
    assert not Path(second, "NEWKERNEL").exists()
    assert {name: (rig.store.folder / DIGEST[7:] / "content" / name).read_bytes() for name in FILES} == FILES
    record = volumes.ledger.mount("csi-1")
    assert record is not None and record.published_at is not None and record.digest == DIGEST
    assert (record.pod_namespace, record.pod_name) == ("team-a", "name-of-pod-1")
    for volume_id, target in (("csi-1", first), ("csi-2", second), ("csi-1", first), ("csi-never", first)):
        volumes.unpublish(volume_id, target)
    assert rig.left() == [] and volumes.ledger.mounts() == []
    assert {name: (rig.store.folder / DIGEST[7:] / "content" / name).read_bytes() for name in FILES} == FILES


def test_how_it_is_mounted(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    line = next(line for line in mounts.TABLE.read_text().splitlines() if f" {target} " in line)
    assert line.split()[5].split(",")[:3] == ["rw", "nosuid", "nodev"] and "noexec" not in line
    with open(Path(target, KERNEL, "add.cubin"), "rb") as file:  # as a shared object of a cache is loaded
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()


def test_a_repeated_call_changes_nothing_and_another_wish_is_refused(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    Path(target, "mine").touch()
    before = rig.mounted()
    volumes.publish("csi-1", target, request(), None)
    volumes.publish("csi-1", target, request(mount_path=CAPTURED), None)
    assert rig.mounted() == before and Path(target, "mine").exists()
    assert "AlreadyExists" in refusal(volumes, "csi-1", target, read_only=True)
    assert "AlreadyExists" in refusal(volumes, "csi-1", target, mount_path="/other")
    assert "FailedPrecondition" in refusal(volumes, "csi-1", rig.target("pod-1", "other"))
    assert "is mounted at" in refusal(volumes, "csi-2", target)
    with pytest.raises(Refused, match="is that of"):
        volumes.unpublish("csi-1", rig.target("pod-1", "other"))
    assert rig.mounted() == before and Path(target, "mine").exists()


def test_a_repeated_call_is_answered_though_the_cache_has_gone_meanwhile(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    volumes.ledger.put_cache(replace(CACHE, digest=OTHER, state="Failed"))
    volumes.publish("csi-1", target, request(), None)
    assert DIGEST in volumes.ledger.digests(), "what is mounted would be removed"
    for cache in volumes.ledger.caches():
        volumes.ledger.remove_cache(cache.uid)
    assert volumes.ledger.digests() == {DIGEST}
    volumes.unpublish("csi-1", target)
    assert volumes.ledger.digests() == set()


def test_read_only_needs_no_layer_and_is_a_file_system_of_its_own(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(read_only=True), None)
    assert Path(target, KERNEL, "add.cubin").read_bytes() == b"machine code"
    with pytest.raises(OSError, match="Read-only"):
        Path(target, "x").touch()
    assert os.stat(target).st_dev != os.stat(Path(target).parent).st_dev, "the kubelet would not see the mount"
    assert list((rig.folder / "volumes").iterdir()) == []
    volumes.unpublish("csi-1", target)
    assert rig.left() == []


def test_elsewhere_mounted_the_kernels_find_themselves(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(mount_path="/cache"), None)
    assert Path(target, KERNEL, "__grp__add.json").read_text() == '{"child_paths": "/cache"}'
    assert Path(target, KERNEL, "add.cubin").read_bytes() == b"machine code"
    assert "FailedPrecondition: this cache cannot be mounted at /fixed" in refusal(
        volumes, "csi-2", rig.target("pod-2"), pod="pod-2", mount_path="/fixed/there"
    )


def test_the_store_hears_which_paths_are_still_mounted_while_nobody_can_begin_to(
    rig: Rig, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, set[str], bool]] = []

    def spare(digest: str, mounted: Callable[[], Collection[str]]) -> None:
        heard.append((digest, set(mounted()), volumes.ledger._db.in_transaction))

    monkeypatch.setattr(volumes.layers, "spare", spare)
    for number, path in enumerate(("/a", "/b", "/a", "")):
        target = rig.target(f"pod-{number}")
        volumes.publish(f"csi-{number}", target, request(f"pod-{number}", mount_path=path), None)
    for number in (0, 1, 2):
        volumes.unpublish(f"csi-{number}", rig.target(f"pod-{number}"))
    assert heard == [
        (DIGEST, {"/a", "/b", CAPTURED}, True),
        (DIGEST, {"/a", CAPTURED}, True),
        (DIGEST, {CAPTURED}, True),
    ]
    volumes.unpublish("csi-3", rig.target("pod-3"))
    assert rig.left() == []


@pytest.mark.parametrize("group", [None, 2000])
def test_who_is_not_root_compiles_in_old_and_new_folders(rig: Rig, volumes: Volumes, group: int | None) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), group)
    script = f"mkdir NEW && echo a > NEW/x && echo b > {KERNEL}/add.cubin && echo c > {KERNEL}/new && mv NEW/x NEW/y"
    done = as_user(target, script, 1234, (group,) if group else ())
    assert done.returncode == 0, done.stderr
    if group:
        assert os.stat(Path(target, "NEW")).st_gid == group, "new folders are the group's as well"
        assert as_user(target, "mkdir OTHER", 4321).returncode != 0, "without the group the root is not one's own"


def test_a_layer_is_capped_and_says_when_it_is_full(rig: Rig, volumes: Volumes) -> None:
    target, other = rig.target("pod-1"), rig.target("pod-2")
    volumes.publish("csi-1", target, request("pod-1"), None)
    volumes.publish("csi-2", other, request("pod-2"), None)
    _, empty = volumes.stats("csi-1", target)
    assert 12 * 1024**2 < empty.f_bavail * empty.f_frsize <= 16 * 1024**2
    with pytest.raises(OSError, match="No space left"):
        Path(target, "big").write_bytes(b"x" * 32 * 1024**2)
    _, full = volumes.stats("csi-1", target)
    assert full.f_bavail * full.f_frsize < 1024**2
    _, untouched = volumes.stats("csi-2", other)
    assert untouched.f_bavail == empty.f_bavail
    Path(other, "small").write_bytes(b"x")


def test_stats_of_what_is_not_mounted_there_are_not_found(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    for volume_id, path in (("csi-2", target), ("csi-1", "/etc"), ("csi-1", "")):
        with pytest.raises(Refused, match="no volume"):
            volumes.stats(volume_id, path)
    mount, _ = volumes.stats("csi-1", f"{target}/")
    assert volumes.lacking(mount) == ""
    (rig.store.folder / DIGEST[7:] / "content").rename(rig.folder / "gone")
    assert "is not in this node's store" in volumes.lacking(mount)
    mounts.unmount(target)
    with pytest.raises(Refused, match="is no longer mounted"):
        volumes.stats("csi-1", target)


def test_a_refused_volume_leaves_nothing(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    assert refusal(volumes, "csi-1", target, name="pending").endswith("is not Ready on this node yet: extracting")
    assert refusal(volumes, "csi-1", target, name="none").startswith("NotFound: ")
    assert "is said to be of pod 'pod-9'" in refusal(volumes, "csi-1", target, pod="pod-9")
    assert "InvalidArgument: the target path '/etc' is none" in refusal(volumes, "csi-1", "/etc")
    missing = f"{rig.kubelet}/pods/pod-1/volumes/kubernetes.io~csi/none/mount"
    assert "is no folder of the kubelet's" in refusal(volumes, "csi-1", missing)
    volumes.ledger.put_cache(replace(CACHE, digest=OTHER))
    assert f"FailedPrecondition: {OTHER} is not in this node's store" in refusal(volumes, "csi-1", target)
    assert rig.left() == [] and volumes.ledger.mounts() == []


def test_folders_may_lie_behind_links(tmp_path: Path) -> None:
    """As where /var/lib/kubelet was moved to another disk; the kernel's table has where it is."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with rig_in(tmp_path / "link") as rig:
        volumes, target = rig.open(), rig.target()
        volumes.publish("csi-1", target, request(), None)
        Path(target, "mine").touch()
        volumes.publish("csi-1", target, request(), None)
        assert volumes.sweep() == [] and Path(target, "mine").exists()
        assert volumes.stats("csi-1", target)[0].upper
        volumes.unpublish("csi-1", target)
        assert mounts.here(below=str(tmp_path / "disk")) == [] and rig.left() == []
        volumes.ledger.close()


def test_something_elses_mount_is_never_touched(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    os.mkdir(target)
    mounts.mount("theirs", target, "tmpfs", 0, "size=1m")
    Path(target, "theirs").touch()
    assert "'theirs' is mounted at" in refusal(volumes, "csi-1", target)
    with pytest.raises(Refused, match="'theirs' is mounted at"):
        volumes.unpublish("csi-1", target)
    volumes.sweep()
    assert Path(target, "theirs").exists()


def test_without_loop_devices_only_what_is_read_only_is_mounted(
    rig: Rig, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("shutil.which", lambda *_, **__: None)
        assert "install e2fsprogs" in volumes.uppers.prepare()
        target = rig.target()
        told = refusal(volumes, "csi-1", target)
        assert "no writable layers on this node: mkfs.ext4 is not" in told and "readOnly: true works" in told
        volumes.publish("csi-1", target, request(read_only=True), None)
    volumes.unpublish("csi-1", target)
    assert rig.left() == []


def test_a_full_disk_at_the_start_ends_nothing_and_is_no_matter_once_it_has_room(
    rig: Rig, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "writable.new":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", full)
    assert volumes.uppers.prepare().endswith("writable.ext4 cannot be written (No space left on device)")
    target = rig.target()
    assert "No space left on device" in refusal(volumes, "csi-1", target)
    monkeypatch.undo()
    volumes.publish("csi-1", target, request(), None)
    volumes.unpublish("csi-1", target)
    assert rig.left() == []


def test_what_is_still_looked_into_goes_out_of_sight_at_once_and_away_later(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    with open(Path(target, KERNEL, "add.cubin"), "rb") as file:
        volumes.unpublish("csi-1", target)
        assert file.read() == b"machine code"
        assert [entry for entry in rig.left() if not entry.startswith("loop")] == []
    deadline = time.monotonic() + 10
    while rig.left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rig.left() == []


def test_after_a_reboot_the_kubelet_gets_its_volumes_anew(rig: Rig) -> None:
    before = rig.open()
    target = rig.target()
    before.publish("csi-1", target, request(), None)
    Path(target, "mine").touch()
    for point in reversed(rig.mounted()):
        mounts.unmount(point.place)
    before.ledger.close()
    after = rig.open()
    assert [told.split(" was ")[0] for told in after.sweep()] == ["volume csi-1 of pod team-a/name-of-pod-1"]
    assert rig.left() == [] and after.ledger.mounts() == []
    after.publish("csi-1", target, request(), None)
    assert Path(target, KERNEL, "add.cubin").exists() and not Path(target, "mine").exists()
    after.unpublish("csi-1", target)
    assert rig.left() == []
    after.ledger.close()


def test_without_its_ledger_the_node_knows_its_mounts_from_the_kernel(rig: Rig) -> None:
    before = rig.open()
    target, other = rig.target("pod-1"), rig.target("pod-2")
    before.publish("csi-1", target, request("pod-1", mount_path="/a path/ä&b=c"), 2000)
    before.publish("csi-2", other, request("pod-2", read_only=True), None)
    records = [replace(mount, published_at=None) for mount in before.ledger.mounts()]
    before.ledger.close()
    for path in rig.folder.glob(f"{FILE}*"):
        path.unlink()
    after = rig.open()
    assert len(after.sweep()) == 2
    assert [replace(mount, published_at=None) for mount in after.ledger.mounts()] == records
    assert after.sweep() == []
    after.publish("csi-2", other, request("pod-2", read_only=True), None)
    after.unpublish("csi-1", target)
    after.unpublish("csi-2", other)
    assert rig.left() == []
    after.ledger.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_container_with_a_part_of_the_volume_keeps_it_over_a_restart(rig: Rig, lost: bool) -> None:
    """With `subPath` the kubelet mounts a folder of the volume once more, below its own root and later in the table."""
    before = rig.open()
    target, part = rig.target(), rig.kubelet / "pods" / "pod-1" / "volume-subpaths" / "cache" / "main" / "0"
    before.publish("csi-1", target, request(), None)
    part.mkdir(parents=True)
    bind = 4096  # MS_BIND
    mounts.mount(f"{target}/{KERNEL}", str(part), "", bind, "")
    (record,) = before.ledger.mounts()
    before.ledger.close()
    if lost:
        for path in rig.folder.glob(f"{FILE}*"):
            path.unlink()
    after = rig.open()
    assert len(after.sweep()) == lost
    assert [replace(mount, published_at=record.published_at) for mount in after.ledger.mounts()] == [record]
    Path(target, "mine").touch()
    assert (part / "add.cubin").read_bytes() == b"machine code"
    mounts.unmount(str(part))
    after.unpublish("csi-1", target)
    assert rig.left() == []
    after.ledger.close()


def test_a_mount_that_says_nothing_known_is_left_alone(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    volumes.ledger.remove_mount("csi-1")
    point = next(point for point in rig.mounted() if point.place == target)
    mounts.unmount(target)
    mounts.mount("csi.tkm.io/csi-1?pod_uid=only", target, "overlay", 0, point.options.removeprefix("rw,"))
    assert [told for told in volumes.sweep() if "left alone" in told]
    assert Path(target, KERNEL, "add.cubin").exists()
    assert (rig.folder / "volumes" / "csi-1").exists()


def test_a_start_on_a_full_disk_sweeps_what_it_can(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rig.open()
    mounted, lost = rig.target("pod-1"), rig.target("pod-2")
    before.publish("csi-1", mounted, request("pod-1"), None)
    before.publish("csi-2", lost, request("pod-2"), None)
    mounts.unmount(lost)
    before.ledger.remove_mount("csi-1")

    def full(*_: object) -> None:
        raise LedgerError("The ledger cannot be used: database or disk is full.")

    for name in ("put_mount", "remove_mount"):
        monkeypatch.setattr(before.ledger, name, full)
    assert len([told for told in before.sweep() if "disk is full" in told]) == 2
    assert [path.name for path in (rig.folder / "volumes").iterdir()] == ["csi-1"]
    monkeypatch.undo()
    before.unpublish("csi-1", mounted)
    before.unpublish("csi-2", lost)
    assert rig.left() == [] and before.ledger.mounts() == []
    before.ledger.close()


def test_layers_that_nobody_has_mounted_are_swept(rig: Rig, volumes: Volumes) -> None:
    volumes.uppers.create("csi-lost", None)
    (rig.folder / "volumes" / "csi-empty").mkdir()
    assert len(volumes.sweep()) == 2
    assert rig.left() == []


def test_many_pods_at_once(rig: Rig, volumes: Volumes) -> None:
    wrong: list[BaseException] = []

    def life(number: int) -> None:
        try:
            target = rig.target(f"pod-{number}")
            for _ in range(6):
                volumes.publish(f"csi-{number}", target, request(f"pod-{number}"), None)
                Path(target, "x").write_text(str(number))
                assert Path(target, "x").read_text() == str(number)
                volumes.unpublish(f"csi-{number}", target)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=life, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and rig.left() == []


def test_whatever_a_failed_publish_leaves_the_kubelet_is_told_to_come_back(
    rig: Rig, volumes: Volumes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FailedPrecondition, Internal and their kin are final for a kubelet: it would never ask to unpublish."""
    target = rig.target()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(volumes.uppers, "remove", broken)
    monkeypatch.setattr("nodeworkers.csi.volumes.make_room", broken)
    assert refusal(volumes, "csi-1", target).startswith("Unavailable: the volume csi-1 cannot be taken away: Input")
    assert volumes.ledger.mount("csi-1") is not None
    monkeypatch.undo()

    put = volumes.ledger.put_mount

    def full(mount: Mount) -> None:
        if mount.published_at is not None:
            raise LedgerError("The ledger cannot be used: database or disk is full.")
        put(mount)

    monkeypatch.setattr(volumes.ledger, "put_mount", full)
    with pytest.raises(LedgerError):
        volumes.publish("csi-1", target, request(), None)
    monkeypatch.undo()
    volumes.unpublish("csi-1", target)
    assert rig.left() == [] and volumes.ledger.mounts() == []


def test_a_ledger_that_takes_nothing_keeps_no_volume_on_a_full_disk(
    rig: Rig, volumes: Volumes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer that is to go may be what fills the disk."""
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    report = {"hits": 3, "misses": 1, "compile_microseconds": 5}
    Path(target, ".berth", "reports", "pod-1.json").write_text(json.dumps(report))

    def full(*_: object) -> None:
        raise LedgerError("The ledger cannot be used: database or disk is full.")

    monkeypatch.setattr(volumes.ledger, "put_seen", full)
    monkeypatch.setattr(volumes.ledger, "remove_mount", full)
    with pytest.raises(LedgerError):
        volumes.unpublish("csi-1", target)
    assert rig.left() == [] and "csi-1 reported last is lost" in caplog.text
    monkeypatch.undo()
    volumes.unpublish("csi-1", target)
    assert volumes.ledger.mounts() == []


def test_hundreds_of_volumes_leave_nothing(rig: Rig, volumes: Volumes) -> None:
    gc.collect()  # tests before this one may have left handles that nobody holds any more
    handles = set(os.listdir("/proc/self/fd"))
    for number in range(300):
        target = rig.target(f"pod-{number % 7}")
        volumes.publish(f"csi-{number}", target, request(f"pod-{number % 7}", read_only=number % 3 == 0), None)
        volumes.unpublish(f"csi-{number}", target)
    assert rig.left() == [] and volumes.ledger.volumes() == 0
    gc.collect()
    assert len(set(os.listdir("/proc/self/fd")) - handles) <= 1, "the listing's own handle, and no other"


def test_what_was_compiled_is_listed_and_copied_and_nothing_else(rig: Rig, volumes: Volumes, tmp_path: Path) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    Path(target, "NEW").mkdir()
    Path(target, "NEW", "mul.cubin").write_bytes(b"compiled")
    Path(target, KERNEL, "add.cubin").unlink()
    Path(target, "link").symlink_to("/etc/passwd")
    os.link(Path(target, "NEW", "mul.cubin"), Path(target, "hard"))
    os.mkfifo(Path(target, "fifo"))
    os.chmod(Path(target, "NEW", "mul.cubin"), 0o4755)
    upper = volumes.uppers.upper("csi-1")
    assert compiled(upper) == [Compiled("NEW/mul.cubin", 8), Compiled("hard", 8)]
    out = tmp_path / "out"
    assert copy_compiled(upper, out, 16) == compiled(upper)
    assert (out / "NEW" / "mul.cubin").read_bytes() == b"compiled"
    assert (out / "NEW" / "mul.cubin").stat().st_mode & 0o7111 == 0
    with pytest.raises(ExportError, match="is not empty"):
        copy_compiled(upper, out, 16)
    with pytest.raises(ExportError, match="more than 15 bytes"):
        copy_compiled(upper, tmp_path / "little", 15)
    deep = Path(target)
    for _ in range(16):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(ExportError, match="more than 16 deep"):
        compiled(upper)
