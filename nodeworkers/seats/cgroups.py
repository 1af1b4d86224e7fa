"""A container's control group: where its files are, which processes are in it, and what memory it may have and has.

For whoever finds a seat's processes (`containers.py`) and asks for room before parking (`limits.py`). Both versions:
where the memory controller is in a hierarchy of its own (cgroup v1, also beside v2), that one counts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nodeworkers.seats.backend import Process
from nodeworkers.seats.processes import started

PROC, MOUNTED = Path("/proc"), Path("/sys/fs/cgroup")
_MOST = 256 * 1024  # bytes of a file that are read: a cgroup's list of 30 000 processes is as long
_NO_LIMIT = 2**60  # cgroup v1 writes "none" as the largest multiple of a page (some kernels: of 64 KiB) below 2**63
_FILES = {True: ("memory.max", "memory.current"), False: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_IDLE = {True: "inactive_file", False: "total_inactive_file"}  # of memory.stat, with what is below


class CgroupError(Exception):
    """A control group cannot be read, or is not what it should be. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """`path` as /proc/PID/cgroup names it; `folder`: where its files are; `mounted`: where those of the root are;
    `unified`: whether it is of version 2.
    """

    path: str
    folder: Path
    mounted: Path
    unified: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes. `limit`: None for none. `used`: in all; `idle`: of that, file pages that can be had back at once."""

    limit: int | None
    used: int
    idle: int


def of_container(pid: int, id: str, proc: Path = PROC, mounted: Path = MOUNTED) -> Cgroup:
    """The control group of the container `id`, in or below which the process is. Raises CgroupError where it is not:
    the pid is another's by now, or nothing can be told from here.
    """
    path, unified = _path(pid, proc)
    root = mounted if unified else mounted / "memory"
    parts = Path(path).parts
    if ".." in parts:
        raise CgroupError(
            f"The process {pid} is in the control group {path}, seen from a namespace of cgroups: berth must run in "
            "that of the host (a privileged container on cgroup v2 does)."
        )
    for index, part in enumerate(parts):
        # containerd and CRI-O name it by the id, or <their name>-<id>.scope under systemd.
        if part == id or part.endswith(f"-{id}.scope"):
            own = Path(*parts[: index + 1])
            folder = root / own.relative_to("/")
            if not folder.is_dir():
                raise CgroupError(
                    f"The control group {own} is not at {folder}: berth needs the host's {mounted} mounted there."
                )
            return Cgroup(str(own), folder, root, unified)
    raise CgroupError(f"The process {pid} is in the control group {path}, which is not that of the container {id}.")


def processes(cgroup: Cgroup, proc: Path = PROC) -> tuple[Process, ...]:
    """All in it and below it that have not ended, in ascending order. Raises CgroupError where it cannot be read; one
    that is gone has none.
    """
    found: set[Process] = set()
    for pid in sorted(set(_listed(cgroup.folder))):
        began = started(pid, proc)
        if began is None or _ended(pid, proc):
            continue
        try:
            path, _ = _path(pid, proc)
        except CgroupError:
            continue
        # What was listed may be gone and its pid another's: only one that is of this cgroup after its start was read,
        # and has it still, is the one.
        if f"{path}/".startswith(f"{cgroup.path}/") and started(pid, proc) == began:
            found.add(Process(pid, began))
    return tuple(sorted(found))


def usage(folder: Path, unified: bool) -> Usage | None:
    """Of one control group; None where it has no such files, as a root, or is gone. Raises CgroupError where they make
    no sense.
    """
    limit_file, used_file = (folder / name for name in _FILES[unified])
    try:
        limit, used = _read(limit_file).strip(), _read(used_file).strip()
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if not folder.is_dir():
            return None
        raise CgroupError(f"The memory of {folder} cannot be read: {error.strerror}.") from error
    try:
        most = None if limit == "max" else int(limit)
        idle = int(stat.get(_IDLE[unified], "0"))
        now = int(used)
    except ValueError as error:
        raise CgroupError(f"{limit_file} or the files beside it have no numbers of bytes: {error}.") from error
    return Usage(None if most is None or most >= _NO_LIMIT else most, max(now, 0), max(idle, 0))


def _listed(folder: Path) -> Iterator[int]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    try:
        for place, _, _ in os.walk(folder, onerror=refuse):
            try:
                listed = _read(Path(place) / "cgroup.procs").split()
            except OSError as error:
                # It is being removed right now, or is a threaded one, whose processes are listed above it.
                if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                    continue
                raise
            for text in listed:
                pid = int(text)
                if pid <= 0:  # how cgroups(7) shows processes of another pid namespace
                    raise CgroupError(
                        f"{place} has processes that berth cannot see: it must run with the host's pids (hostPID)."
                    )
                yield pid
    except (OSError, ValueError) as error:
        raise CgroupError(f"The processes of {folder} cannot be read: {error}.") from error


def _path(pid: int, proc: Path) -> tuple[str, bool]:
    """A process's control group for memory, and whether it is of version 2."""
    try:
        lines = _read(proc / str(pid) / "cgroup").splitlines()
    except OSError as error:
        raise CgroupError(f"The process {pid} is gone.") from error
    unified = ""
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.removesuffix(" (deleted)")
        if "memory" in controllers.split(","):
            return path, False
        if number == "0" and not controllers:
            unified = path
    if not unified:
        raise CgroupError(f"The process {pid} is in no control group that counts memory.")
    return unified, True


def _ended(pid: int, proc: Path) -> bool:
    """Whether it is a zombie: ended, and not waited for. A first thread that ended before others looks so too."""
    try:
        fields = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
        return fields[0] in "ZX" and int(fields[17]) <= 1
    except (OSError, IndexError, ValueError):
        return True


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST).decode(errors="replace")
