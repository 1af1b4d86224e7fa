"""The private writable layers of volumes: for each an ext4 file system in a sparse file, so that what a pod compiles is
capped, lies on the node's disk and not in its memory, and goes with one file. Why this: docs/decisions/0028.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from nodeworkers.csi import mounts

_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A  # LOOP_CTL_GET_FREE, LOOP_CONFIGURE of linux/loop.h (Linux 5.8)
_AUTOCLEAR = 4  # LO_FLAGS_AUTOCLEAR: the device goes with the mount
_INFO = struct.Struct("=5Q4I64s64s32s2Q")  # struct loop_info64
_CONFIG = struct.Struct(f"=2I{_INFO.size}s64x")  # struct loop_config
_ATTEMPTS = 32  # others take loop devices as well
# What lies in it is worthless after a crash: no journal, nothing set aside for root.
_MKFS = ("-q", "-F", "-O", "^has_journal,^resize_inode", "-m", "0", "-E", "lazy_itable_init=1,nodiscard")
_SPARE = ".spare-"  # no volume has such a name
_OPTIONS = "nobarrier,noinit_itable,errors=remount-ro"


class UpperError(Exception):
    """A writable layer cannot be had. The text says why and what to do."""


class Uppers:
    """The writable layers of one node, below one folder: `<volume>/disk` and, mounted, `<volume>/fs`. Some may be
    spare: whole, and of no volume yet. Any thread may call.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """`size` is the cap of each, in bytes. Call `prepare` before anything else."""
        self.folder = folder.resolve()  # as the kernel's table of mounts has it
        self.size = size
        self._template = self.folder.parent / "writable.ext4"
        self._wrong = ""
        self._turn = threading.Lock()
        self._spares: deque[Path] = deque()

    @property
    def spares(self) -> int:
        """How many layers are prepared ahead."""
        return len(self._spares)

    def prepare(self) -> str:
        """Makes the empty file system that each layer begins as. Returns why there can be none; '' is well."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._turn:
            try:
                self._wrong = self._make_template()
            except OSError as error:  # a full disk, perhaps, from which the kubelet is about to take volumes away
                self._wrong = f"{self._template} cannot be written ({error.strerror})"
            return self._wrong

    def _make_template(self) -> str:
        program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if program is None:
            return "mkfs.ext4 is not on this node: install e2fsprogs (berth's image has it)"
        if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
            return "/dev/loop-control cannot be used: load the kernel module loop, and give berth node the host's /dev"
        fresh = self._template.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with fresh.open("wb") as file:
            file.truncate(self.size)
        made = subprocess.run(
            [program, *_MKFS, str(fresh)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if made.returncode != 0:
            return f"mkfs.ext4 failed: {' '.join(made.stderr.split())[:256]}"
        fresh.replace(self._template)
        return ""

    def upper(self, volume_id: str) -> Path:
        """Where a volume's own files lie."""
        return self.folder / volume_id / "fs" / "upper"

    def work(self, volume_id: str) -> Path:
        """The folder that overlayfs needs beside it."""
        return self.folder / volume_id / "fs" / "work"

    def create(self, volume_id: str, group: int | None) -> Path:
        """Mounts an empty layer and returns its folder. Everybody in the pod may write, as in an emptyDir; with a
        group, its members may. Raises UpperError or OSError, and leaves what `remove` takes away.

        What was wrong when the process began is looked at again: a disk has room by now, or a module was loaded.
        """
        if self._wrong:
            self.prepare()
        self._check()
        place = self.folder / volume_id
        if not self._taken(place):
            place.mkdir(mode=0o700)
            self._make(place)
        upper = self.upper(volume_id)
        if group is not None:
            os.chown(upper, -1, group)
        os.chmod(upper, 0o777 if group is None else 0o2775)
        return upper

    def add_spare(self) -> None:
        """Prepares a layer for a later `create`. Raises OSError or UpperError, and leaves nothing then."""
        self._check()
        place = Path(tempfile.mkdtemp(prefix=_SPARE, dir=self.folder))
        try:
            self._make(place)
        except BaseException:
            with suppress(OSError):
                self.remove(place.name)
            raise
        self._spares.append(place)

    def drop_spare(self) -> None:
        """Takes a spare away again, if there is one. Raises OSError."""
        with suppress(IndexError):
            self.remove(self._spares.popleft().name)

    def _check(self) -> None:
        if self._wrong:
            raise UpperError(f"There are no writable layers on this node: {self._wrong}. readOnly: true works without.")

    def _taken(self, place: Path) -> bool:
        """Makes a spare the layer at this place. One rename, which the mount goes along with: however it ends, there is
        one layer, and it has one name.
        """
        try:
            spare = self._spares.popleft()
        except IndexError:
            return False
        try:
            spare.rename(place)
        except OSError:
            self._spares.append(spare)
            raise
        return True

    def _make(self, place: Path) -> None:
        (place / "fs").mkdir(mode=0o700)
        disk = _copied(self._template, place / "disk")
        try:
            device, handle = _attached(disk, place.name)
        finally:
            os.close(disk)
        try:
            flags = mounts.NO_SUID | mounts.NO_DEV | mounts.NO_ATIME
            mounts.mount(device, str(place / "fs"), "ext4", flags, _OPTIONS)
        finally:
            os.close(handle)
        self.upper(place.name).mkdir()
        self.work(place.name).mkdir(mode=0o700)

    def remove(self, volume_id: str) -> None:
        """Takes a layer away, also one that was left midway. Raises OSError."""
        place = self.folder / volume_id
        for _ in mounts.here([str(place / "fs")]):
            mounts.unmount(str(place / "fs"))
        with suppress(FileNotFoundError):
            (place / "disk").unlink()
        for folder in (place / "fs", place):
            with suppress(FileNotFoundError):
                folder.rmdir()

    def present(self) -> list[str]:
        """The volumes of which there is anything, and the spares that an earlier process left."""
        ours = {spare.name for spare in list(self._spares)}
        return [each.name for each in self.folder.iterdir() if each.name not in ours]


def _copied(template: Path, path: Path) -> int:
    """An open copy of a sparse file that is as sparse."""
    source = os.open(template, os.O_RDONLY | os.O_CLOEXEC)
    try:
        copy = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            size, at = os.fstat(source).st_size, 0
            os.ftruncate(copy, size)
            while at < size:
                try:
                    at = os.lseek(source, at, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # only a hole is left
                        break
                    raise
                end = os.lseek(source, at, os.SEEK_HOLE)
                while at < end:
                    at += os.copy_file_range(source, copy, end - at, at, at)
        except BaseException:
            os.close(copy)
            raise
        return copy
    finally:
        os.close(source)


def _attached(disk: int, name: str) -> tuple[str, int]:
    """A loop device for an open file, and the device opened: it lasts until that is closed or, mounted, unmounted."""
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, os.fsencode(name)[:63], b"", b"", 0, 0)
    config = _CONFIG.pack(disk, 0, info)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            device = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
            try:
                handle = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise UpperError(
                    f"The kernel offers {device}, which is not there: berth node needs the host's own /dev."
                ) from None
            try:
                if not stat.S_ISBLK(os.fstat(handle).st_mode):
                    raise UpperError(f"{device} is no block device: berth node needs the host's own /dev.")
                fcntl.ioctl(handle, _CONFIGURE, config)
            except OSError as error:
                os.close(handle)
                if error.errno != errno.EBUSY:  # somebody else was faster
                    raise
            except BaseException:
                os.close(handle)
                raise
            else:
                return device, handle
    finally:
        os.close(control)
    raise UpperError("Every free loop device was taken by somebody else at once: try again.")
