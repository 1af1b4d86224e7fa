"""Where the kubelet wants a volume: below its own root, at the place that it gives to a pod's volumes, and reached
without following any symbolic link, so that nobody's folder can lead a mount elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.~_-]{0,252}[A-Za-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
MOUNT = "mount"  # what the kubelet calls the folder of each volume that is mounted
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TargetError(Exception):
    """The path is none that a kubelet gives to a pod's CSI volume, or something stands in its way."""


@dataclass(frozen=True, slots=True)
class Target:
    """`<root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount`."""

    root: Path
    pod_uid: str
    volume: str

    @property
    def path(self) -> str:
        """The path as the kernel's table of mounts has it."""
        return str(self.root.joinpath(*self._folders, MOUNT))

    @property
    def _folders(self) -> tuple[str, ...]:
        return ("pods", self.pod_uid, "volumes", "kubernetes.io~csi", self.volume)

    @contextmanager
    def parent(self) -> Iterator[int]:
        """The open folder in which `mount` is. Raises TargetError where it is not there or not a plain folder."""
        at, seen = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), self.root
        try:
            for name in self._folders:
                seen = seen / name
                try:
                    inner = os.open(name, _FOLDER, dir_fd=at)
                except OSError as error:
                    raise TargetError(f"{seen} is no folder of the kubelet's: {error.strerror}.") from error
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)

    def absent(self) -> bool:
        """Whether there is nothing of that name, and so nothing mounted there."""
        try:
            os.lstat(self.path)
        except FileNotFoundError:
            return True
        except OSError:  # such as that of a mount whose server has died
            return False
        return False

    @contextmanager
    def created(self) -> Iterator[tuple[str, bool]]:
        """The folder itself, made if need be, under a name that stays the same folder whatever is moved about; and
        whether it was made.
        """
        with self.parent() as parent:
            try:
                os.mkdir(MOUNT, 0o750, dir_fd=parent)
                made = True
            except FileExistsError:
                made = False
            try:
                folder = os.open(MOUNT, _FOLDER, dir_fd=parent)
            except OSError as error:
                raise TargetError(f"{self.path} is no folder: {error.strerror}.") from error
        try:
            yield f"/proc/self/fd/{folder}", made
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Removes the folder where it is empty. Raises OSError where it is not."""
        with suppress(TargetError), self.parent() as parent, suppress(FileNotFoundError):
            os.rmdir(MOUNT, dir_fd=parent)


def target_of(root: Path, path: str) -> Target:
    """A target path taken apart. Raises TargetError, whatever the path is."""
    prefix = f"{root}/"
    parts = path.removeprefix(prefix).split("/") if path.startswith(prefix) else []
    match parts:
        case ["pods", uid, "volumes", "kubernetes.io~csi", volume, last] if last == MOUNT:
            if _UID.fullmatch(uid) and _NAME.fullmatch(volume):
                return Target(root, uid, volume)
    raise TargetError(
        f"the target path {path[:256]!r} is none that the kubelet with the root {root} gives to a pod's CSI volume."
    )
