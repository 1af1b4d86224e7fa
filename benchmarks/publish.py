"""What a kernel cache costs a pod's start: NodePublishVolume and NodeUnpublishVolume over the kubelet's socket, with
real mounts, with layers prepared ahead and without, beside the bare system calls of what a writable layer could be; and
whether thousands leave anything.

Needs root. Everything is mounted in a mount namespace of its own, which goes with the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.report import Report, arguments, progress
from nodeworkers.csi import mounts, uppers
from nodeworkers.csi.driver import Driver, Places
from nodeworkers.csi.spares import SPARES
from nodeworkers.csi.uppers import Uppers
from nodeworkers.ledger import Ledger
from nodeworkers.rpc import csi_pb2
from planning.caches.volumes import NodeCache

DIGEST = "sha256:" + "ab" * 32
GIB = 1024**3
PAUSE = 0.05  # seconds between timed pods: twenty a second is more than a kubelet starts


def quantile(seconds: list[float], q: float) -> float:
    """Milliseconds."""
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3)


@dataclass
class Timed:
    """How long something took, each time."""

    seconds: list[float] = field(default_factory=list)

    def run(self, act: Callable[[], object]) -> None:
        began = time.perf_counter()
        act()
        self.seconds.append(time.perf_counter() - began)

    def show(self, report: Report, name: str, note: str = "") -> None:
        values = {"p50_ms": quantile(self.seconds, 0.5), "p99_ms": quantile(self.seconds, 0.99), "n": len(self.seconds)}
        report.note({name: values})
        report.row(name, f"{values['p50_ms']:.2f} / {values['p99_ms']:.2f} ms", note or "p50 / p99")


@dataclass
class Store:
    """One cache with some kernels."""

    content: Path

    def spare(self, digest: str, mounted: Callable[[], Collection[str]]) -> None:
        """Nothing is too much here."""

    def lower(self, digest: str, mount_path: str) -> list[Path]:
        return [self.content]


class SystemCalls:
    """How long the kernel was busy with mount(2), and with loop devices, for a call of the kubelet's: what happens
    beside it, for others to come, is not taken off its time.
    """

    def __init__(self) -> None:
        self.mounting = self.attaching = 0.0
        self.made = 0
        self._mount, self._attached = mounts.mount, uppers._attached
        mounts.mount, uppers._attached = self.mount, self.attached

    def mount(self, source: str, place: str, kind: str, flags: int, data: str) -> None:
        began = time.perf_counter()
        self._mount(source, place, kind, flags, data)
        if _in_a_call():
            self.mounting += time.perf_counter() - began

    def attached(self, disk: int, name: str) -> tuple[str, int]:
        began = time.perf_counter()
        device = self._attached(disk, name)
        if _in_a_call():
            self.attaching += time.perf_counter() - began
            self.made += 1
        return device


def _in_a_call() -> bool:
    return threading.current_thread().name.startswith("csi")


def alone() -> None:
    """A mount namespace of our own: a killed benchmark leaves nothing mounted."""
    os_unshare = ctypes.CDLL(None, use_errno=True)
    if os_unshare.unshare(0x00020000) != 0:  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def content_of(folder: Path, kernels: int) -> Path:
    """A cache's folder."""
    for number in range(kernels):
        kernel = folder / f"KERNEL{number:05d}"
        kernel.mkdir(parents=True)
        for name in ("add.json", "add.cubin", "__grp__add.json"):
            (kernel / name).write_bytes(b"x" * 2000)
    return folder


def bare(report: Report, folder: Path, content: Path, count: int) -> None:
    """What a writable layer could be, by system calls alone."""
    layer, target = folder / "layer", folder / "bare"
    layer.mkdir()
    target.mkdir()

    def overlay(upper: Path) -> None:
        options = f"lowerdir={content},upperdir={upper / 'upper'},workdir={upper / 'work'}"
        mounts.mount("bare", str(target), "overlay", mounts.NO_SUID | mounts.NO_DEV, options)

    def memory() -> None:
        mounts.mount("bare", str(layer), "tmpfs", mounts.NO_SUID | mounts.NO_DEV, "size=1g,mode=0700")
        (layer / "upper").mkdir()
        (layer / "work").mkdir()
        overlay(layer)

    def no_memory() -> None:
        mounts.unmount(str(target))
        mounts.unmount(str(layer))

    layers = Uppers(folder / "bare-layers", 4 * GIB)
    assert layers.prepare() == ""

    def disk() -> None:
        layers.create("bare", None)
        overlay(layers.folder / "bare" / "fs")

    def no_disk() -> None:
        mounts.unmount(str(target))
        layers.remove("bare")

    for name, put, take in (("tmpfs", memory, no_memory), ("ext4 in a file", disk, no_disk)):
        on, off = Timed(), Timed()
        for _ in range(count):
            on.run(put)
            off.run(take)
        on.show(report, f"bare {name}", "mounting alone, p50 / p99")
        off.show(report, f"bare {name}, away")


async def served(report: Report, folder: Path, content: Path, count: int, cycles: int) -> None:
    """The calls as a kubelet makes them, one connection for each as it does."""
    places = Places(folder / "kubelet", folder / "berth")
    places.kubelet_root.mkdir()
    ledger = Ledger(places.folder)
    ledger.put_cache(
        NodeCache("u", "TritonKernelCache", "team-a", "llama", "Ready", 1, DIGEST, "/cache", 1000, True)
    )  # fmt: skip
    driver = Driver(places, "node-1", ledger, Store(content))
    await driver.start()
    kernel = SystemCalls()
    empty, whole, beyond, own, away = Timed(), Timed(), Timed(), Timed(), Timed()

    async def call(timed: Timed, name: str, request: Any) -> None:
        began = time.perf_counter()
        async with grpc.aio.insecure_channel(f"unix:{places.endpoint}") as channel:
            method: Any = channel.unary_unary(
                f"/csi.v1.{name}", request_serializer=lambda sent: sent.SerializeToString()
            )
            await method(request)
        timed.seconds.append(time.perf_counter() - began)

    async def cycle(number: int) -> None:
        pod = f"pod-{number % 100}"
        parent = places.kubelet_root / "pods" / pod / "volumes" / "kubernetes.io~csi" / "cache"
        parent.mkdir(parents=True, exist_ok=True)
        kubelets = "csi.storage.k8s.io/"
        request = csi_pb2.NodePublishVolumeRequest(
            volume_id=f"csi-{number}", target_path=f"{parent}/mount",
            volume_capability=csi_pb2.VolumeCapability(
                mount=csi_pb2.VolumeCapability.MountVolume(volume_mount_group="2000")
            ),
            volume_context={
                f"{kubelets}ephemeral": "true", f"{kubelets}pod.name": pod, f"{kubelets}pod.namespace": "team-a",
                f"{kubelets}pod.uid": pod, "kernel-name": "llama",
            },
        )  # fmt: skip
        await call(empty, "Identity/Probe", csi_pb2.ProbeRequest())
        kernel.mounting = kernel.attaching = 0.0
        await call(whole, "Node/NodePublishVolume", request)
        beyond.seconds.append(whole.seconds[-1] - kernel.mounting)
        own.seconds.append(beyond.seconds[-1] - kernel.attaching)
        (parent / "mount" / "compiled").write_bytes(b"x" * 100_000)
        gone = csi_pb2.NodeUnpublishVolumeRequest(volume_id=f"csi-{number}", target_path=f"{parent}/mount")
        await call(away, "Node/NodeUnpublishVolume", gone)

    numbers = itertools.count()

    def timed(way: str) -> None:
        whole.show(report, f"NodePublishVolume, {way}", "a connection, the call, all its work, p50 / p99")
        beyond.show(report, "of it beyond mount(2)", "p50 / p99; the goal is at most 5 ms")
        own.show(report, "and beyond the loop device", "p50 / p99")
        empty.show(report, "an empty call", "a connection and Probe, the same way, p50 / p99")
        away.show(report, "NodeUnpublishVolume", "with 100 kB written, p50 / p99")

    async def cycles_of(count: int, pause: float = PAUSE) -> None:
        for each in (empty, whole, beyond, own, away):
            each.seconds.clear()
        for _ in range(count):
            await cycle(next(numbers))
            await asyncio.sleep(pause)

    await cycles_of(20)  # everything is loaded and opened once
    await cycles_of(count)
    timed("layer made by the call")
    watching = asyncio.create_task(driver.watch())
    await full(driver)
    await cycles_of(20)
    await full(driver)
    before, kernel.made = state(places), 0
    await cycles_of(count)
    timed("layer prepared ahead")
    report.row("without a spare", str(kernel.made), f"of these {count}")
    report.note({"without_a_spare": kernel.made})
    for done in range(0, cycles, 1000):
        progress(f"{done} of {cycles} cycles …")
        await cycles_of(min(1000, cycles - done), pause=0)
    await full(driver)
    after = state(places)
    report.note({"cycles": cycles + count, "before": before, "after": after})
    left = {name: after[name] - before[name] for name in after if name != "max_rss_kib"}
    report.row("left after all", str(sum(left.values())), f"{cycles + count} cycles: {left}")
    report.row("memory", f"{after['max_rss_kib'] // 1024} MB", f"at most; {before['max_rss_kib'] // 1024} MB after 20")
    watching.cancel()
    await driver.stop()
    ledger.close()


async def full(driver: Driver) -> None:
    """Waits until all spare layers are there."""
    async with asyncio.timeout(60):
        while driver.uppers.spares < SPARES:
            await asyncio.sleep(0.01)


def state(places: Places) -> dict[str, int]:
    """What could pile up."""
    ours = str(places.folder.parent)
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return {
        "mounts": sum(ours in point.place for point in mounts.parse(mounts.TABLE.read_bytes())),
        "loop_devices": sum(ours in path for path in backing),
        "files": sum(1 for _ in (places.folder / "volumes").rglob("*")),
        "targets": sum(1 for _ in places.kubelet_root.glob("pods/*/volumes/*/*/mount")),
        "handles": len(os.listdir("/proc/self/fd")),
        "ledger_bytes": (places.folder / "ledger.sqlite").stat().st_size // 1_000_000,
        "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    """Entry point."""
    parser = arguments("publish", "NodePublish and NodeUnpublish, p50 and p99, and what thousands of them leave")
    parser.add_argument("--count", type=int, default=1000, help="timed cycles (1000)")
    parser.add_argument("--cycles", type=int, default=0, help="more cycles after that, for leaks (0)")
    parser.add_argument("--kernels", type=int, default=500, help="folders of the cache (500)")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("This benchmark mounts, and needs root.")
    alone()
    report = Report(f"publish: {options.count:,} volumes, a cache of {options.kernels} kernels")
    folder = Path(tempfile.mkdtemp(prefix="berth-publish-"))
    try:
        content = content_of(folder / "content", options.kernels)
        bare(report, folder, content, min(options.count, 500))
        asyncio.run(served(report, folder, content, options.count, options.cycles))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish(options.json)


if __name__ == "__main__":
    main()
