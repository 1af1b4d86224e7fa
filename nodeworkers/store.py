"""Keeps extracted caches on a node's disk by the digest of their image, within a quota. For the node's activities and
its CSI server.

    <root>/caches/<sha256>/content/        what is mounted, never changed
    <root>/caches/<sha256>/image.json      what it is, written last
    <root>/relocations/<sha256>/<…>/       lists of files for another mount path, laid above the content
    <root>/staging/<…>/                    not there yet, or not there any more

What is under caches/ or relocations/ is whole: it was written elsewhere, synced and then renamed, and leaves by being
renamed away first. So a crash at any moment leaves only staging/ behind, which `sweep` empties.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from images.refused import Refused
from images.tree import FOLDER_MODE
from images.triton import relocate
from planning.caches import limits
from planning.caches.eviction import Stored, to_remove
from planning.caches.labels import parse_json

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SPARE = 8  # relocations of one cache that nobody has mounted
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Cached:
    """A cache on disk. `size` is what it takes there (du), `about` what was told of it when it came."""

    digest: str
    content: Path
    size: int
    about: Mapping[str, object]


class Store:
    """The caches below one folder, of which this process is the only writer. All methods block: they are disk work."""

    def __init__(self, root: Path, quota: int) -> None:
        """`quota` in bytes on the disk. The folder is made if need be, and nobody but root may enter it."""
        self.root = root
        self.quota = quota
        self._numbers = itertools.count()
        self._caches, self._relocations, self._staging = root / "caches", root / "relocations", root / "staging"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        for folder in (self._caches, self._relocations, self._staging):
            folder.mkdir(mode=0o755, exist_ok=True)

    def sweep(self) -> int:
        """Removes what a crash left half-made, and caches that lost their description; how much that was."""
        left = list(self._staging.iterdir())
        for folder in left:
            _remove(folder)
        broken = [folder for folder in self._caches.iterdir() if self._read(folder) is None]
        known = {folder.name for folder in self._caches.iterdir()} - {folder.name for folder in broken}
        orphans = [folder for folder in self._relocations.iterdir() if folder.name not in known]
        for folder in (*broken, *orphans):
            self._discard(folder)
        return len(left) + len(broken) + len(orphans)

    def get(self, digest: str) -> Cached | None:
        """A cache that is there, whole; None if it is not."""
        return self._read(self._caches / _name(digest))

    def cached(self) -> list[Cached]:
        """All that are there, by digest."""
        found = (self._read(folder) for folder in sorted(self._caches.iterdir()))
        return [each for each in found if each is not None]

    def used(self, digest: str) -> None:
        """Notes that a cache is of use now: those that were of none for longest leave first."""
        with suppress(FileNotFoundError):
            os.utime(self._caches / _name(digest) / "image.json")

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """An empty folder into which a cache's content is extracted; whatever is still there at the end is removed."""
        with _full_disk():
            folder = self._new_staging()
        content = folder / "content"
        try:
            with _full_disk():
                content.mkdir(mode=0o755)
            yield content
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, content: Path, digest: str, about: Mapping[str, object], in_use: Collection[str]) -> Cached:
        """Makes what was staged the cache of a digest, others leaving if the quota wants it; if that digest is there
        already, it stays as it is. Refused (NoSpace) if there is no room.
        """
        there = self.get(digest)
        if there is not None:
            return there
        folder, size = content.parent, du(content)
        self.make_room(size, {*in_use, digest})
        with _full_disk():
            body = json.dumps({"digest": digest, "size": size, "about": about}).encode()
            _write(folder / "image.json", body)
            _settle(folder)
            target = self._caches / _name(digest)
            if target.exists():  # without its description, or `get` had found it
                self._discard(target)
            folder.rename(target)
            _sync(self._caches)
        kept = self.get(digest)
        if kept is None:
            raise Refused("TooLarge", f"What is told about {digest} is too large to be kept.")
        return kept

    def make_room(self, needed: int, in_use: Collection[str]) -> tuple[str, ...]:
        """Removes caches, longest unused first and never one of `in_use` (digests), until `needed` bytes fit into the
        quota: those removed. Refused (NoSpace) if they do not fit even so; nothing is removed then.
        """
        stored = self._stored()
        chosen = to_remove(stored, needed, self.quota, in_use)
        if chosen is None:
            held = sum(each.size for each in stored if each.digest in in_use)
            raise Refused(
                "NoSpace",
                f"A cache of {needed:,} bytes does not fit: the node keeps at most {self.quota:,} for caches, "
                f"and {held:,} of them are in use. Raise the quota, or remove caches that pods use.",
            )
        for digest in chosen:
            self.remove(digest)
        return chosen

    def taken(self) -> int:
        """Bytes that count against the quota now."""
        return sum(each.size for each in self._stored())

    def _stored(self) -> list[Stored]:
        found = []
        for each in self.cached():
            moved = self._relocations / _name(each.digest)
            size = each.size + (du(moved) if moved.exists() else 0)
            found.append(Stored(each.digest, size, (each.content.parent / "image.json").stat().st_mtime))
        return found

    def remove(self, digest: str) -> None:
        """Removes a cache and its relocations. Whoever has it mounted must have let go of it first."""
        for folder in (self._relocations / _name(digest), self._caches / _name(digest)):
            if folder.exists():
                self._discard(folder)

    def relocation(self, digest: str, mount_path: str) -> Path | None:
        """The layer that lies above a cache's content when it is mounted at `mount_path`, made if it is not there yet;
        None if that cache has nothing to relocate. Refused if there is no such cache.
        """
        cached = self.get(digest)
        if cached is None:
            raise Refused("Inconsistent", f"Cache {digest} is not on this node.")
        place = self._relocated(digest, mount_path)
        if place.exists():
            return place
        with _full_disk():
            folder = self._new_staging()
        try:
            with _full_disk():
                layer = folder / "layer"
                layer.mkdir()
                layer.chmod(FOLDER_MODE)
                if relocate(cached.content, mount_path, layer) == 0:
                    return None
                _settle(layer)
                place.parent.mkdir(mode=0o755, exist_ok=True)
                try:
                    layer.rename(place)
                except OSError:
                    if not place.exists():  # else another volume's call made it meanwhile
                        raise
                _sync(place.parent)
                _sync(self._relocations)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return place

    def lower(self, digest: str, mount_path: str) -> tuple[Path, ...]:
        """The folders of a cache that is mounted at `mount_path`, topmost first. Raises LookupError, with a sentence,
        where it is not there or cannot be moved there.
        """
        cached = self.get(digest)
        if cached is None:
            raise LookupError(
                f"the image {digest} is no longer on this node's disk; berth fetches it again at the next look at it"
            )
        self.used(digest)
        if cached.about.get("groups") == 0 or cached.about.get("capture_path") == mount_path:
            return (cached.content,)
        try:
            moved = self.relocation(digest, mount_path)
        except Refused as refused:
            raise LookupError(f"the cache cannot be mounted at {mount_path}: {refused}") from refused
        if moved is None:
            return (cached.content,)
        os.utime(moved)  # `spare` keeps those that were used last
        return (moved, cached.content)

    def spare(self, digest: str, mounted: Callable[[], Collection[str]]) -> None:
        """Removes the relocations of a cache for mount paths that nobody has mounted, but for a few that were used
        last: pods choose their paths, and what they chose once must not fill the disk. `mounted` tells the paths in
        use, and nobody may begin to mount the cache meanwhile. What cannot be removed stays for another time.
        """
        with suppress(OSError):
            folder = self._relocations / _name(digest)
            places = sorted(folder.iterdir(), key=lambda place: place.stat().st_mtime_ns, reverse=True)
            if len(places) > _SPARE:
                needed = {self._relocated(digest, path) for path in mounted()}
                for place in [place for place in places if place not in needed][_SPARE:]:
                    self._discard(place)

    def _relocated(self, digest: str, mount_path: str) -> Path:
        return self._relocations / _name(digest) / hashlib.sha256(mount_path.encode()).hexdigest()[:32]

    def _new_staging(self) -> Path:
        folder = self._free_name()
        folder.mkdir(mode=0o755)
        return folder

    def _free_name(self) -> Path:
        return next(place for number in self._numbers if not (place := self._staging / str(number)).exists())

    def _discard(self, folder: Path) -> None:
        """Away in one step, then piece by piece; nothing is made for it, as the disk may be full."""
        gone = self._free_name()
        folder.rename(gone)
        _sync(folder.parent)
        _remove(gone)

    def _read(self, folder: Path) -> Cached | None:
        try:
            with (folder / "image.json").open("rb") as file:
                raw = parse_json(file.read(limits.MANIFEST_BYTES + 1), limits.MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        content = folder / "content"
        if not isinstance(raw, Mapping) or not content.is_dir():
            return None
        digest, size, about = raw.get("digest"), raw.get("size"), raw.get("about")
        if digest != f"sha256:{folder.name}" or not isinstance(size, int) or not isinstance(about, Mapping):
            return None
        return Cached(digest, content, size, about)


def du(folder: Path) -> int:
    """Bytes that a folder takes on the disk, as du(1) counts them."""
    total = 0
    for path, _, names, opened in os.fwalk(folder):
        total += os.stat(path).st_blocks * 512
        total += sum(os.stat(name, dir_fd=opened, follow_symlinks=False).st_blocks * 512 for name in names)
    return total


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _name(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ValueError(f"{digest[:80]!r} is no digest")
    return match[1]


def _write(path: Path, body: bytes) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """What was renamed or made in it is on the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _settle(folder: Path) -> None:
    """All below a folder is on the disk: one wait for its whole file system instead of one for each file."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _LIBC.syncfs(opened):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(opened)


@contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Refused("NoSpace", "The disk with the node's caches is full.") from None
        raise
