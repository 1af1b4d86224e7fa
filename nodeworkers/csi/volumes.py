"""Mounts kernel caches into pods and takes them away again: read what is mounted, decide, act once, record (law 6).

A volume is an overlay at the kubelet's target: the store's folders below, shared and never written, and above them a
layer of the pod's own. It is on record before it is mounted, so that nothing it needs is removed meanwhile, and the
mount itself says whose it is, so that a lost ledger is filled from the kernel's table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, urlencode

from pydantic import TypeAdapter, ValidationError

from nodeworkers.csi import mounts, targets
from nodeworkers.csi.mounts import MountPoint
from nodeworkers.csi.reports import Reports, make_room
from nodeworkers.csi.targets import Target, TargetError, target_of
from nodeworkers.csi.uppers import UpperError, Uppers
from nodeworkers.ledger import Ledger, LedgerError, Mount
from nodeworkers.listener import OURS
from planning.caches.volumes import DRIVER, VOLUMES, Admission, Code, Refusal, VolumeRequest, admit

_SOURCE = f"{DRIVER}/"
_SAID = (
    "pod_uid", "pod_namespace", "pod_name", "cache_uid", "cache_kind", "cache_name", "digest", "mount_path", "upper",
    "size_bytes", "size_cap",
)  # fmt: skip
# Whatever a kernel's defaults are: what a pod changes lies above as whole files, which can be copied out.
_OVERLAY = "index=off,metacopy=off,redirect_dir=off"
_UNFIT = set(',:\\"\n')  # what would need escaping among overlay's options
_mount: TypeAdapter[Mount] = TypeAdapter(Mount)


class Refused(Exception):
    """A call that is answered with an error: the name of a gRPC status, and a sentence for the pod's Event."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message


class Layers(Protocol):
    """The store, as far as it counts here."""

    def lower(self, digest: str, mount_path: str) -> Sequence[Path]:
        """The folders, topmost first, that make up a cache whose kernels believe to be at `mount_path`. Everybody may
        write in them as far as modes go (folders 0777, files 0666): an overlay shows these modes, and a pod that is not
        root compiles into folders that exist. Raises LookupError, with a sentence, where there are none.
        """

    def spare(self, digest: str, mounted: Callable[[], Collection[str]]) -> None:
        """Removes what was made for mount paths of this cache that are not among those `mounted`, as far as it is too
        much. To be called while nobody begins to mount; never raises for what a disk does.
        """


class Volumes:
    """The volumes of one node. Its methods block; calls for one volume must come one at a time.

    `offered` is the layer with berth's own folder, None where there is none; it is set before the first call.
    """

    def __init__(self, ledger: Ledger, layers: Layers, uppers: Uppers, kubelet_root: Path) -> None:
        self.ledger = ledger
        self.layers = layers
        self.uppers = uppers
        self.root = kubelet_root.resolve()  # as the kernel's table has it
        self._named = f"{kubelet_root}/"
        self.reports = Reports(ledger)
        self.offered: Path | None = None
        self._empty = uppers.folder.parent / "empty"
        unfit = _UNFIT & set(f"{uppers.folder}{self.root}")
        if unfit or not kubelet_root.is_absolute():
            raise ValueError(
                f"The folders {uppers.folder} and {kubelet_root} must be absolute and free of {sorted(_UNFIT)}."
            )
        self._empty.mkdir(parents=True, exist_ok=True, mode=0o755)

    # ---- publish

    def publish(self, volume_id: str, target_path: str, request: VolumeRequest, group: int | None) -> None:
        """Mounts what the pod asks for at the target; does nothing where it is mounted. Raises Refused."""
        target = self._target(target_path)
        if request.pod_uid != target.pod_uid:
            raise Refused(
                "InvalidArgument",
                f"the volume is said to be of pod {request.pod_uid[:64]!r}, and its target is of pod {target.pod_uid}.",
            )
        known, mounted = self.ledger.mount(volume_id), self._mounted(volume_id, target)
        if known is not None and known.target_path != target.path:
            raise Refused("FailedPrecondition", f"the volume {volume_id} is already that of {known.target_path}.")
        if known is not None and known.published_at is not None and mounted:
            self._same(known, target, request)
            return
        if known is not None or mounted or (self.uppers.folder / volume_id).exists():
            self._clear(volume_id, target)  # left midway, or from before a reboot
        mount = self._promise(volume_id, target, request)
        try:
            self._mount(mount, target, group)
        except BaseException as error:
            self._clear(volume_id, target)
            if isinstance(error, Refused):
                raise
            if isinstance(error, UpperError | TargetError):
                raise Refused("FailedPrecondition", str(error)) from error
            if isinstance(error, OSError):
                raise Refused("Internal", f"{mount.cache_name} cannot be mounted: {_told(error)}.") from error
            raise
        self.ledger.put_mount(replace(mount, published_at=time.time()))

    def _same(self, known: Mount, target: Target, request: VolumeRequest) -> None:
        """A repeated call must ask for the same."""
        asked = (request.kind, request.name, request.read_only, request.mount_path or known.mount_path, target.path)
        has = (known.cache_kind, known.cache_name, not known.upper, known.mount_path, known.target_path)
        if asked != has:
            raise Refused(
                "AlreadyExists",
                f"the volume is mounted at {known.target_path} as {known.cache_name}, and now something else is asked "
                "of it.",
            )

    def _promise(self, volume_id: str, target: Target, request: VolumeRequest) -> Mount:
        """Decides, and writes down what will be mounted, at one go: from now on nobody removes what it needs."""
        with self.ledger.transaction():
            decided = admit(request, self.ledger.caches(request.name))
            if isinstance(decided, Refusal):
                raise Refused(decided.code, decided.message)
            if self.ledger.volumes() >= VOLUMES:
                raise Refused("ResourceExhausted", f"this node has {VOLUMES} volumes of {DRIVER}, and takes no more.")
            mount = self._record(volume_id, target, request, decided)
            self.ledger.put_mount(mount)
        return mount

    def _record(self, volume_id: str, target: Target, request: VolumeRequest, decided: Admission) -> Mount:
        cache = decided.cache
        return Mount(
            volume_id=volume_id,
            target_path=target.path,
            pod_uid=request.pod_uid,
            pod_namespace=request.pod_namespace,
            pod_name=request.pod_name,
            cache_uid=cache.uid,
            cache_kind=cache.kind,
            cache_name=cache.name,
            digest=cache.digest,
            mount_path=decided.mount_path,
            size_bytes=cache.size_bytes,
            upper="" if request.read_only else str(self.uppers.upper(volume_id)),
            size_cap=0 if request.read_only else self.uppers.size,
        )

    def _mount(self, mount: Mount, target: Target, group: int | None) -> None:
        try:
            folders = [str(folder) for folder in self.layers.lower(mount.digest, mount.mount_path)]
        except LookupError as missing:
            raise Refused("FailedPrecondition", str(missing.args[0] if missing.args else missing)) from missing
        for folder in folders:
            if _UNFIT & set(folder) or not os.path.isdir(folder):
                raise Refused("Internal", f"the store's folder {folder} is not there or has a name that overlays lack.")
        if self.offered is not None:
            folders.insert(0, str(self.offered))
        elif any(os.path.lexists(f"{folder}/{OURS}") for folder in folders):
            raise Refused(
                "FailedPrecondition",
                f"the image of {mount.cache_name} brings a folder {OURS}, which is berth's own, and this node cannot "
                "lay that above it: build the image without.",
            )
        flags = mounts.NO_SUID | mounts.NO_DEV  # not noexec: caches hold shared objects that are loaded
        if mount.upper:
            upper, work = self.uppers.create(mount.volume_id, group), self.uppers.work(mount.volume_id)
            make_room(upper)
            options = f"lowerdir={':'.join(folders)},upperdir={upper},workdir={work},{_OVERLAY}"
        else:
            flags |= mounts.READ_ONLY
            # An overlay and no bind mount: the kubelet sees only those that are file systems of their own.
            options = f"lowerdir={':'.join([str(self._empty), *folders])},{_OVERLAY}"
        with target.created() as (place, made):
            if not made and mounts.here([target.path]):
                raise Refused("FailedPrecondition", f"something else is mounted at {target.path}: unmount it.")
            mounts.mount(_source(mount), place, "overlay", flags, options)

    # ---- unpublish

    def unpublish(self, volume_id: str, target_path: str) -> None:
        """Takes the volume away with all that was private to it; does nothing where it is gone. Raises Refused."""
        target = self._target(target_path)
        known = self.ledger.mount(volume_id)
        if known is not None and known.target_path != target.path:
            raise Refused("FailedPrecondition", f"the volume {volume_id} is that of {known.target_path}.")
        self._clear(volume_id, target)

    def _clear(self, volume_id: str, target: Target) -> None:
        """Undoes all that there may be of a volume, in the reverse order, and forgets it last."""
        try:
            with ExitStack() as parent:
                for _ in range(len(self._mounted(volume_id, target))):
                    mounts.unmount(f"/proc/self/fd/{parent.enter_context(target.parent())}/{targets.MOUNT}")
            target.remove()
            self.reports.end(volume_id)
            self.uppers.remove(volume_id)
        except TargetError as error:
            raise Refused("FailedPrecondition", str(error)) from error
        except OSError as error:  # something is left, so that the kubelet must ask again even if the pod goes meanwhile
            raise Refused("Unavailable", f"the volume {volume_id} cannot be taken away: {_told(error)}.") from error
        known = self.ledger.mount(volume_id)
        with self.ledger.transaction():  # no publish decides meanwhile
            self.ledger.remove_mount(volume_id)
            if known is not None:
                digest = known.digest
                self.layers.spare(
                    digest, lambda: {mount.mount_path for mount in self.ledger.mounts() if mount.digest == digest}
                )

    # ---- what is there

    def stats(self, volume_id: str, path: str) -> tuple[Mount, os.statvfs_result]:
        """The volume, and how much of its writable layer is used. Raises Refused."""
        mount = self.ledger.mount(volume_id)
        if mount is None or mount.target_path != self._real(path.rstrip("/")):
            raise Refused("NotFound", f"no volume {volume_id[:128]!r} is mounted at {path[:256]!r} on this node.")
        if not self._mounted(volume_id, self._target(mount.target_path)):
            raise Refused("NotFound", f"the volume {volume_id} is no longer mounted at {mount.target_path}.")
        return mount, os.statvfs(mount.target_path)

    def lacking(self, mount: Mount) -> str:
        """What of the store a volume still needs is gone; '' is well."""
        try:
            folders = self.layers.lower(mount.digest, mount.mount_path)
        except LookupError as missing:
            return str(missing.args[0] if missing.args else missing)
        return next((f"the store's folder {folder} is gone" for folder in folders if not folder.is_dir()), "")

    def sweep(self) -> list[str]:
        """Makes ledger, mounts and writable layers agree after a crash or a reboot, and says what it did. A pod's mount
        is never taken away here: the kubelet asks for that. To be called before the kubelet can call.
        """
        told: list[str] = []
        mounted: dict[str, MountPoint] = {}
        unknown: list[str] = []
        for point in mounts.here(below=str(self.root)):
            if point.kind == "overlay" and point.source.startswith(_SOURCE) and self._is_target(point.place):
                volume_id = point.source.removeprefix(_SOURCE).partition("?")[0]
                mounted[volume_id] = point
        for mount in self.ledger.mounts():
            if mount.volume_id in mounted and mounted[mount.volume_id].place == mount.target_path:
                if mount.published_at is None:  # the mount is the last step but that record
                    told.append(self._noted(mount, "mounted and not yet recorded"))
                continue
            try:
                self._clear(mount.volume_id, target_of(self.root, mount.target_path))
                told.append(f"volume {mount.volume_id} of pod {mount.pod_namespace}/{mount.pod_name} was not mounted: "
                            "what was left of it is gone")  # fmt: skip
            except (Refused, TargetError, LedgerError) as error:
                told.append(f"volume {mount.volume_id} is not mounted and cannot be cleared: {error}")
        for volume_id, point in mounted.items():
            if self.ledger.mount(volume_id) is not None:
                continue
            unknown.append(volume_id)
            found = _mount_said(point)
            if found is None:
                told.append(f"{point.place} is mounted as {point.source[:256]!r}, which says nothing known: left alone")
            else:
                told.append(self._noted(found, "mounted and in no record"))
        for volume_id in self.uppers.present():
            if self.ledger.mount(volume_id) is None and volume_id not in unknown:
                try:
                    self.uppers.remove(volume_id)
                    told.append(f"the writable layer of {volume_id}, which nobody has mounted, is gone")
                except OSError as error:
                    told.append(f"the writable layer of {volume_id} cannot be removed: {_told(error)}")
        return told

    def _noted(self, mount: Mount, how: str) -> str:
        """Records a volume that is mounted, and says so. On a full disk that waits for the next start: until then the
        kubelet can have it unmounted all the same.
        """
        try:
            self.ledger.put_mount(replace(mount, published_at=time.time()))
        except LedgerError as error:
            return f"volume {mount.volume_id} is {how}: {error}"
        return f"volume {mount.volume_id} was {how}: it is now"

    def _is_target(self, place: str) -> bool:
        """Whether a mount there is a volume itself: with subPath the kubelet mounts parts of one elsewhere below its
        root, and these look the same.
        """
        try:
            target_of(self.root, place)
        except TargetError:
            return False
        return True

    def _target(self, path: str) -> Target:
        try:
            return target_of(self.root, self._real(path))
        except TargetError as error:
            raise Refused("InvalidArgument", str(error)) from error

    def _real(self, path: str) -> str:
        """A path as the kernel has it: the way to the kubelet's root may lead over links, nothing below it may."""
        return f"{self.root}/{path.removeprefix(self._named)}" if path.startswith(self._named) else path

    def _mounted(self, volume_id: str, target: Target) -> list[MountPoint]:
        """Mounts of this volume at its target. Raises Refused where another's is there."""
        if target.absent():  # as for every new volume: the table of mounts is long on a busy node
            return []
        found = mounts.here([target.path])
        for point in found:
            said = point.source.removeprefix(_SOURCE).partition("?")[0]
            if point.kind != "overlay" or not point.source.startswith(_SOURCE) or said != volume_id:
                raise Refused("FailedPrecondition", f"{point.source[:128]!r} is mounted at {target.path}: unmount it.")
        return found


def _source(mount: Mount) -> str:
    """What the kernel's table of mounts says about a volume. It is found by it, and read again by `_mount_said`."""
    said = urlencode({name: getattr(mount, name) for name in _SAID})
    return f"{_SOURCE}{mount.volume_id}?{said}"


def _mount_said(point: MountPoint) -> Mount | None:
    volume_id, _, said = point.source.removeprefix(_SOURCE).partition("?")
    try:
        values = dict(parse_qsl(said, keep_blank_values=True, strict_parsing=True, max_num_fields=len(_SAID)))
        return _mount.validate_python({**values, "volume_id": volume_id, "target_path": point.place})
    except (ValidationError, ValueError):
        return None


def _told(error: OSError) -> str:
    return f"{error.strerror or error} ({error.filename})" if error.filename else str(error.strerror or error)
