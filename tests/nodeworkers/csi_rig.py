"""A node for the CSI driver without a cluster: a kubelet's folders, a store of a few files, and what is mounted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nodeworkers.csi import mounts
from nodeworkers.csi.uppers import Uppers
from nodeworkers.csi.volumes import Volumes
from nodeworkers.ledger import Ledger
from planning.caches.volumes import NodeCache, VolumeRequest

DIGEST, OTHER = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
CAPTURED = "/home/app/.triton/cache"
KERNEL = "5W7KJQDT"
UPPER_BYTES = 16 * 1024**2
CACHE = NodeCache(
    uid="0a0a-1", kind="TritonKernelCache", namespace="team-a", name="llama", state="Ready", digest=DIGEST,
    mount_path=CAPTURED, compatible=True, size_bytes=1000,
)  # fmt: skip


def no_mounts() -> str:
    """Why nothing can be mounted here; '' if it can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return "mkfs.ext4 (e2fsprogs) is not installed"
    if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
        return "there is no /dev/loop-control"
    return ""


needs_mounts = [
    pytest.mark.node,
    pytest.mark.skipif(bool(no_mounts()), reason=no_mounts() or "possible"),
]


class Store:
    """The lower folders, as the node's store lays them out: everybody may write, and nobody reaches them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        folder.chmod(0o700)

    def add(self, digest: str, files: Mapping[str, bytes]) -> Path:
        return self._write(self.folder / digest.removeprefix("sha256:") / "content", files)

    def spare(self, digest: str, mounted: Callable[[], Collection[str]]) -> None:
        """Nothing is too much here."""

    def lower(self, digest: str, mount_path: str) -> list[Path]:
        content = self.folder / digest.removeprefix("sha256:") / "content"
        if not content.is_dir():
            raise LookupError(f"{digest} is not in this node's store: it will be fetched again")
        if mount_path == CAPTURED:
            return [content]
        if mount_path.startswith("/fixed"):
            raise LookupError(f"this cache cannot be mounted at {mount_path}, only at {CAPTURED}")
        moved = {f"{KERNEL}/__grp__add.json": f'{{"child_paths": "{mount_path}"}}'.encode()}
        return [self._write(self.folder / "relocations" / mount_path.strip("/").replace("/", "-"), moved), content]

    def _write(self, folder: Path, files: Mapping[str, bytes]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o777)
            path.write_bytes(content)
            path.chmod(0o666)
        return folder


FILES = {f"{KERNEL}/add.cubin": b"machine code", f"{KERNEL}/__grp__add.json": b'{"child_paths": "captured"}'}


@dataclass
class Rig:
    """`kubelet` is its root; everything of ours is in `folder`."""

    kubelet: Path
    folder: Path
    store: Store

    def open(self) -> Volumes:
        """As a process that has just started, before its sweep."""
        uppers = Uppers(self.folder / "volumes", UPPER_BYTES)
        assert uppers.prepare() == ""
        return Volumes(Ledger(self.folder), self.store, uppers, self.kubelet)

    def target(self, pod: str = "pod-1", volume: str = "cache") -> str:
        """What a kubelet makes before it calls, and what it passes."""
        parent = self.kubelet / "pods" / pod / "volumes" / "kubernetes.io~csi" / volume
        parent.mkdir(parents=True, exist_ok=True)
        return str(parent / "mount")

    def mounted(self) -> list[mounts.MountPoint]:
        """Whatever of ours is mounted."""
        return [*mounts.here(below=str(self.kubelet)), *mounts.here(below=str(self.folder))]

    def left(self) -> list[str]:
        """Whatever is left of volumes: mounts, loop devices, files, targets."""
        loops = [
            f"{device.name} {backing.read_text().strip()}"
            for device in Path("/sys/block").glob("loop*")
            if (backing := device / "loop" / "backing_file").exists() and str(self.folder) in _text(backing)
        ]
        targets = [str(path) for path in self.kubelet.glob("pods/*/volumes/*/*/mount")]
        files = [str(path) for path in (self.folder / "volumes").glob("*")]
        return [*(point.place for point in self.mounted()), *loops, *targets, *files]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it went away just now
        return ""


def request(pod: str = "pod-1", read_only: bool = False, mount_path: str = "", name: str = "llama") -> VolumeRequest:
    return VolumeRequest("TritonKernelCache", name, mount_path, read_only, pod, "team-a", f"name-of-{pod}")


@contextmanager
def rig_in(folder: Path) -> Iterator[Rig]:
    """A rig with one cache in store and ledger; whatever is mounted in the end is taken away."""
    made = Rig(folder / "kubelet", folder / "berth", Store(folder / "berth" / "store"))
    made.kubelet.mkdir()
    made.store.add(DIGEST, FILES)
    ledger = Ledger(made.folder)
    ledger.put_cache(CACHE)
    ledger.put_cache(replace(CACHE, uid="0a0a-2", name="pending", state="Pending", reason="extracting"))
    ledger.close()
    try:
        yield made
    finally:
        for point in reversed(made.mounted()):
            mounts.unmount(point.place)
