"""Extracts a cache image's layers into its working folder: the process that touches what strangers made.

Started by images.extraction with the layers and the folder as open files, it first gives up everything else: root (and
with it every path but the folder, by chroot), the network, new privileges, processes, memory and time beyond its
limits. It writes plain files and folders with modes of its own, looks at what it wrote, and tells it as JSON. What lies
in the layers outside the cache's folder is not written; links, devices and odd names inside it refuse the whole image,
and so does any name that tries to leave.
"""

from __future__ import annotations

import ctypes
import errno
import gzip
import json
import os
import resource
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, cast

from isal import igzip, isal_zlib

from images import triton, vllm
from images.layout import cache_folder
from images.refused import Refused, shown
from images.tar import Entry, Reader
from images.tree import FILE_MODE, FOLDER_MODE, File, wrong_path
from planning.caches.labels import Kind

CHUNK = 512 * 1024
FOLDERS_OPEN = 32
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38  # of prctl(2)
_CLONE_NEWNET = 0x40000000  # of unshare(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
# The stub of isal calls its error an instance.
_BROKEN: tuple[type[Exception], ...] = (
    gzip.BadGzipFile,
    EOFError,
    zlib.error,
    cast("type[Exception]", isal_zlib.error),
)


class Extraction:
    """Writes members below the working folder, and counts them."""

    def __init__(self, kind: Kind, bounds: dict[str, int]) -> None:
        self.root = cache_folder(kind).encode()
        self.bounds = bounds
        self.members = self.folders = self.bytes = 0
        self.written: list[File] = []
        self._open: dict[bytes, int] = {b"": os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)}

    def layer(self, file: BinaryIO) -> None:
        """One layer; Refused as soon as something is wrong."""
        reader = Reader(self._unpacked(file))
        try:
            for entry in reader.entries():
                self._count(entry.size)
                path = self._place(entry)
                if path is None:
                    continue
                if entry.type == "folder":
                    self._folder(path)
                elif entry.type == "file":
                    self._write(path, reader.content())
                else:
                    raise Refused("Unsafe", f"{shown(entry.name)} is a {entry.type}; a cache has only plain files.")
        except _BROKEN as broken:
            raise Refused("Malformed", f"A layer is no whole gzip file: {broken}.") from None

    def _unpacked(self, file: BinaryIO) -> Callable[[], bytes]:
        """Reads the layer's archive, and watches how much comes out of how little."""
        source: BinaryIO = igzip.open(file, "rb")  # type: ignore[no-untyped-call]
        free, ratio, most = self.bounds["ratio_free_bytes"], self.bounds["ratio"], self.bounds["archive_bytes"]
        out = 0

        def read() -> bytes:
            nonlocal out
            piece = source.read(CHUNK)
            out += len(piece)
            if out > free and out > ratio * file.tell():
                raise Refused("TooLarge", f"A layer unpacks to more than {ratio} times its size: it is a bomb.")
            if out > most:
                raise Refused("TooLarge", f"A layer's archive has more than {most:,} bytes.")
            return piece

        return read

    def _count(self, size: int) -> None:
        self.members += 1
        self.bytes += size
        self._bounded(self.members)
        if size > self.bounds["file_bytes"]:
            raise Refused(
                "TooLarge", f"The image has a file of {size:,} bytes; {self.bounds['file_bytes']:,} are most."
            )
        if self.bytes > self.bounds["extracted_bytes"]:
            raise Refused("TooLarge", f"The image has more than {self.bounds['extracted_bytes']:,} bytes of files.")

    def _bounded(self, entries: int) -> None:
        if entries > self.bounds["entries"]:
            raise Refused("TooLarge", f"The image has more than {self.bounds['entries']:,} files and folders.")

    def _place(self, entry: Entry) -> bytes | None:
        """Where below the cache's folder an entry goes; None if it lies elsewhere in the image."""
        name = entry.name
        while name.startswith(b"./"):
            name = name[2:]
        if name in (b"", b"."):
            return None
        wrong = wrong_path(name)
        if wrong:
            raise Refused("Unsafe", f"{shown(entry.name)} {wrong}.")
        first, _, path = name.partition(b"/")
        if first != self.root:
            return None
        if not path and entry.type != "folder":
            raise Refused("Malformed", f"{shown(entry.name)} is no folder.")
        if path.rpartition(b"/")[2].startswith(b".wh."):
            raise Refused("Unsupported", f"{shown(entry.name)} takes away what another layer has; a cache adds only.")
        return path or None

    def _folder(self, path: bytes) -> int:
        """An open folder, made if need be, its parents too; nothing on the way is followed anywhere."""
        known = self._open.get(path)
        if known is not None:
            return known
        before, _, name = path.rpartition(b"/")
        within = self._folder(before)
        try:
            os.mkdir(name, FOLDER_MODE, dir_fd=within)
        except FileExistsError:
            pass
        else:
            self.folders += 1
            self._bounded(self.folders + len(self.written))
        try:
            opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        except NotADirectoryError:
            raise Refused("Malformed", f"{shown(path)} is a file and a folder at once.") from None
        self._open[path] = opened
        return opened

    def _write(self, path: bytes, content: Iterable[memoryview]) -> None:
        if len(self._open) > FOLDERS_OPEN:
            for opened in [self._open.pop(each) for each in list(self._open) if each]:
                os.close(opened)
        before, _, name = path.rpartition(b"/")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(name, flags, FILE_MODE, dir_fd=self._folder(before))
        except FileExistsError:
            raise Refused("Malformed", f"{shown(path)} is there twice.") from None
        size = 0
        try:
            for piece in content:
                size += len(piece)
                while piece:
                    piece = piece[os.write(file, piece) :]
        finally:
            os.close(file)
        text = path.decode()
        self.written.append(File(text, size, text))


def inspected(kind: Kind, found: Sequence[File]) -> dict[str, Any]:
    """What lies in the working folder now; Refused if it is no cache, or not what it says."""
    cache = triton.read(found)
    cache.require()
    if kind == "triton" and not cache.kernels:
        raise Refused("Unsupported", f"The image has no compiled kernel in {cache_folder(kind)}/.")
    if not found:
        raise Refused("Unsupported", f"The image has nothing in {cache_folder(kind)}/.")
    places = set(cache.capture_paths) | (set(vllm.capture_paths(found)) if kind == "vllm" else set())
    versions = list(cache.versions)
    return {
        "kernels": len(cache.kernels),
        "groups": cache.groups,
        "targets": [asdict(each) for each in cache.targets],
        "triton_version": versions[0] if len(versions) == 1 else None,
        "capture_path": places.pop() if len(places) == 1 else None,
        "warnings": [each[:512] for each in cache.warnings[: triton.MOST_TOLD]],
        "warned": len(cache.warnings),
    }


def confine(request: dict[str, Any]) -> None:
    """Gives up what is not needed, for good; who is not root has nothing to give up but room."""
    bounds, uid = request["bounds"], request["uid"]
    os.fchdir(request["folder"])
    os.umask(0)
    for which, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64 + max(request["folder"], *request["layers"])),
        (resource.RLIMIT_CPU, bounds["seconds"]),
        (resource.RLIMIT_FSIZE, bounds["file_bytes"]),
        (resource.RLIMIT_AS, bounds["memory_bytes"]),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(which, (most, most))
    if uid is not None:
        # Where this is not ours to give, in a container without its capability, the rest must do.
        _LIBC.unshare(_CLONE_NEWNET)
        os.chroot(".")
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for option, value in ((_SET_NO_NEW_PRIVS, 1), (_SET_PDEATHSIG, int(signal.SIGKILL))):
        if _LIBC.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() not in (request["parent"], 0):  # 0: it lives in another namespace of processes
        os.kill(os.getpid(), signal.SIGKILL)


def sync(folder: int) -> None:
    """Everything that was written reaches the disk: one wait for all files instead of one for each."""
    if _LIBC.syncfs(folder):
        raise OSError(ctypes.get_errno(), "syncfs")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Extracts, syncs and looks; what it tells goes to the parent."""
    try:
        confine(request)
        extraction = Extraction(request["kind"], request["bounds"])
        for layer in request["layers"]:
            with open(layer, "rb") as file:
                extraction.layer(file)
        told = inspected(request["kind"], extraction.written)
        sync(request["folder"])
    except Refused as refused:
        return {"refused": [refused.reason, str(refused)]}
    except MemoryError:
        return {"refused": ["TooLarge", f"Reading it takes more than {request['bounds']['memory_bytes']:,} bytes."]}
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return {"refused": ["NoSpace", "The disk is full."]}
        raise
    return {"extracted": {**told, "files": len(extraction.written), "bytes": extraction.bytes}}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.stdin.buffer.read()))))
