"""The node's own record, here of kernel caches and mounts: one SQLite file, from which the kubelet is answered (law 3).

One process writes it; others may read it meanwhile (WAL). A damaged file is set aside and the record made anew: caches
from a copy of each beside it, mounts from the kernel's own table (`csi/volumes.py`).
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from nodeworkers.ledger_disk import UID, Copies, LogMover
from nodeworkers.ledger_tables import MIGRATIONS
from planning.caches.hits import Seen
from planning.caches.volumes import Kind, NodeCache

T = TypeVar("T")

FILE = "ledger.sqlite"
_APPLICATION = 0x62727468  # in the file's header: it is ours
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_REFUSED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


class LedgerError(Exception):
    """The ledger cannot be opened, read or written. The text says what to do."""


class _Damaged(Exception):
    """What lies in the file is no ledger of ours, or no longer."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume of a pod. `upper` is the folder of its private writable layer, '' where it is read-only; `published_at`
    is None from before the mount until after it, so that what it needs is kept and what was left midway is found.
    """

    volume_id: str
    target_path: str
    pod_uid: str
    pod_namespace: str
    pod_name: str
    cache_uid: str
    cache_kind: Kind
    cache_name: str
    digest: str
    mount_path: str
    size_bytes: int
    upper: str
    size_cap: int
    published_at: float | None = None


_cache: TypeAdapter[NodeCache] = TypeAdapter(NodeCache)
_mount: TypeAdapter[Mount] = TypeAdapter(Mount)
_CACHE_FIELDS = tuple(each.name for each in fields(NodeCache))
_MOUNT_FIELDS = tuple(each.name for each in fields(Mount))


class Ledger:
    """An open ledger. Its methods may be called by any thread; each raises LedgerError where the file fails."""

    def __init__(self, folder: Path) -> None:
        """Opens the ledger in `folder` and makes it where there is none. `repaired` says what had to be repaired.

        `identity` is another whenever the ledger was made anew, so that whoever relied on it looks again. `changes`
        counts what was written, so that whoever shows it need not look while nothing is.
        """
        self.changes = 0
        self.folder = folder
        self.path = folder / FILE
        self.repaired = ""
        self._log = LogMover(self.path)
        self._turn = threading.RLock()  # nobody waits for the disk with it
        self._changed: set[str] = set()  # caches that the transaction writes which is under way
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._copies = Copies(folder / "caches")
        lock = _only_writer(folder)
        self._lock: int | None = lock
        try:
            fresh = not self.path.exists()
            try:
                self._db = _opened(self.path)
            except _Damaged as damage:
                _set_aside(self.path)
                self._db = _opened(self.path)
                fresh = True
                self.repaired = (
                    f"The ledger {self.path} was damaged ({damage}). It is now {self.path.name}.damaged, and a new one "
                    "was made from what lies beside it."
                )
            self._agree_with_copies(fresh)
            self.identity = _identity(folder / "identity", fresh)
        except BaseException:
            os.close(lock)
            raise

    def renew(self) -> None:
        """Makes its identity another: what it says is not what it said, and whoever relies on it is to look again."""
        self.identity = _identity(self.folder / "identity", fresh=True)

    def close(self) -> None:
        """Lets go of the file."""
        self._log.close()
        with self._turn:
            self._db.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written within is written whole or not at all, and nobody else writes meanwhile. Then copies of the
        caches that it wrote are written: where that fails it is said, and the ledger has them all the same.
        """
        with self._turn:
            if self._db.in_transaction:
                yield
                return
            with self._told():
                self._db.execute("BEGIN IMMEDIATE")
            self._changed = set()
            try:
                yield
                with self._told():
                    self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            changed = self._changed
        if changed:
            with self._copied():
                self._copies.follow(changed, self.cache)

    # ---- caches

    def caches(self, name: str | None = None) -> list[NodeCache]:
        """All caches, or those of this name in any namespace."""
        if name is None:
            return self.read("SELECT * FROM caches", (), _cache_of)
        return self.read("SELECT * FROM caches WHERE name = ?", (name,), _cache_of)

    def cache(self, uid: str) -> NodeCache | None:
        """The cache of this UID."""
        return next(iter(self.read("SELECT * FROM caches WHERE uid = ?", (uid,), _cache_of)), None)

    def put_cache(self, cache: NodeCache) -> None:
        """Writes a cache down. Another of the same name is gone: the name is free only once its object is."""
        if not UID.fullmatch(cache.uid):
            raise LedgerError(f"{cache.uid!r} is no UID of an object, so the cache {cache.name} is not written down.")
        with self.transaction():
            for other in self.caches(cache.name):
                if (other.kind, other.namespace) == (cache.kind, cache.namespace) and other.uid != cache.uid:
                    self.remove_cache(other.uid)
            self._changed.add(cache.uid)
            values = asdict(cache)
            values["labels"] = orjson.dumps(dict(cache.labels)).decode()
            values["signatures"] = orjson.dumps(cache.signatures).decode()
            self._write("caches", _CACHE_FIELDS, values)

    def remove_cache(self, uid: str) -> None:
        """Forgets a cache. Its mounts stay on record for as long as they are mounted."""
        with self.transaction():
            if UID.fullmatch(uid):
                self._changed.add(uid)
            self.execute("DELETE FROM caches WHERE uid = ?", (uid,))

    # ---- mounts

    def mounts(self) -> list[Mount]:
        """All volumes, also those that are being mounted or unmounted."""
        return self.read("SELECT * FROM mounts", (), _mount_of)

    def mount(self, volume_id: str) -> Mount | None:
        """The volume of this id."""
        return next(iter(self.read("SELECT * FROM mounts WHERE volume_id = ?", (volume_id,), _mount_of)), None)

    def mounts_of(self, cache_uid: str) -> list[Mount]:
        """The volumes of one cache."""
        return self.read("SELECT * FROM mounts WHERE cache_uid = ?", (cache_uid,), _mount_of)

    def volumes(self) -> int:
        """How many volumes there are."""
        return sum(self.read("SELECT count(*) FROM mounts", (), lambda row: int(row[0])))

    def put_mount(self, mount: Mount) -> None:
        """Writes a volume down."""
        self._write("mounts", _MOUNT_FIELDS, asdict(mount))

    def remove_mount(self, volume_id: str) -> None:
        """Forgets a volume."""
        self.execute("DELETE FROM mounts WHERE volume_id = ?", (volume_id,))

    def digests(self) -> set[str]:
        """The digests that somebody needs: mounted, or what new pods get, or what to fall back to."""
        query = "SELECT digest FROM mounts UNION SELECT digest FROM caches UNION SELECT last_known_good FROM caches"
        return set(self.read(query, (), lambda row: str(row[0]))) - {""}

    # ---- what pods reported

    def put_seen(self, volume_id: str, seen: Seen) -> None:
        """Notes what the pod of a volume has reported so far; nothing if that volume is not on record. Numbers never
        fall, so that a repeated or late note changes nothing.
        """
        values = {"volume_id": volume_id, **asdict(seen)}
        self.execute(
            "INSERT INTO seen SELECT cache_uid, digest, volume_id, :hits, :misses, :compile_seconds FROM mounts "
            "WHERE volume_id = :volume_id ON CONFLICT DO UPDATE SET hits = max(hits, excluded.hits), "
            "misses = max(misses, excluded.misses), compile_seconds = max(compile_seconds, excluded.compile_seconds)",
            values,
        )

    def seen(self) -> dict[tuple[str, str], Seen]:
        """What pods reported, by the cache's UID and the digest; also pods that have gone."""
        query = (
            "SELECT cache_uid, digest, sum(hits), sum(misses), sum(compile_seconds) FROM seen "
            "GROUP BY cache_uid, digest"
        )
        return dict(self.read(query, (), lambda row: ((row[0], row[1]), Seen(*row[2:]))))

    def seen_by_volume(self) -> dict[str, Seen]:
        """What pods reported, by volume; only volumes on record."""
        query = "SELECT volume_id, hits, misses, compile_seconds FROM seen WHERE volume_id <> ''"
        return dict(self.read(query, (), lambda row: (row[0], Seen(*row[1:]))))

    # ---- the file

    def _write(self, table: str, names: tuple[str, ...], values: Mapping[str, Any]) -> None:
        marks = ", ".join(f":{name}" for name in names)
        self.execute(f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})", values)  # noqa: S608

    def execute(self, statement: str, values: Any) -> None:
        """Writes by one statement, for the records of a feature."""
        with self._turn, self._told():
            self._db.execute(statement, values)
            self.changes += 1
            self._log.wrote()

    def read(self, query: str, values: Any, of: Callable[[sqlite3.Row], T]) -> list[T]:
        """What `of` makes of each row."""
        with self._turn, self._told():
            return [of(row) for row in self._db.execute(query, values).fetchall()]

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            raise LedgerError(
                f"The ledger {self.path} cannot be used: {error}. If its disk has room, start berth node anew on this "
                "node: it looks the file over and repairs it."
            ) from error

    @contextmanager
    def _copied(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LedgerError(
                f"The copy of a cache cannot be written to {error.filename or self.folder}: {error.strerror}. Make "
                "room on the node's disk."
            ) from error

    def _agree_with_copies(self, fresh: bool) -> None:
        """A new ledger takes what the copies say; otherwise it is the ledger that holds."""
        if fresh:
            for cache in self._copies.read():
                self.put_cache(cache)
        with self._copied():
            self._copies.agree(self.caches())


def _only_writer(folder: Path) -> int:
    """A lock that lasts as long as the process. Returns what to close."""
    handle = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise LedgerError(
            f"Another berth node uses the ledger in {folder}. One process writes it: end the other first."
        ) from None
    return handle


def _identity(path: Path, fresh: bool) -> str:
    """A random name of the ledger, which lies beside it."""
    with suppress(OSError, UnicodeDecodeError):
        found = path.read_text()
        if not fresh and _IDENTITY.fullmatch(found):
            return found
    made, beside = uuid.uuid4().hex, path.with_suffix(".new")
    try:
        beside.write_text(made)
        beside.replace(path)
    except OSError as error:
        raise LedgerError(f"The ledger's identity cannot be written to {path}: {error.strerror}.") from error
    return made


def _opened(path: Path) -> sqlite3.Connection:
    """The file, looked over and brought up to date. Raises _Damaged, or LedgerError where the file is not to blame."""
    db: sqlite3.Connection | None = None
    try:
        # WAL without a sync at every commit: a crash of this process loses nothing, one of the machine the last
        # moments, and every mount with them.
        db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        _look_over(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # LogMover does it, beside whoever writes
        _migrate(db)
        for row in db.execute("SELECT * FROM caches").fetchall():
            _cache_of(row)
        for row in db.execute("SELECT * FROM mounts").fetchall():
            _mount_of(row)
    except (sqlite3.Error, ValidationError, ValueError, LedgerError, _Damaged) as error:
        if db is not None:
            db.close()
        if isinstance(error, LedgerError | _Damaged):
            raise
        if isinstance(error, sqlite3.Error) and not _damage(error):
            raise LedgerError(
                f"The ledger {path} cannot be opened: {error}. berth node needs a folder that it may write, with room "
                "on its disk."
            ) from error
        raise _Damaged(str(error).splitlines()[0]) from error
    return db


def _damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)  # none: Python's own complaint, such as text that is not UTF-8
    return code is None or code & 0xFF in _REFUSED


def _look_over(db: sqlite3.Connection, path: Path) -> None:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    application = int(db.execute("PRAGMA application_id").fetchone()[0])
    if version and application != _APPLICATION:
        raise _Damaged("it is another program's")
    if version > len(MIGRATIONS):
        raise LedgerError(
            f"The ledger {path} was written by a newer berth (schema {version}; this one knows {len(MIGRATIONS)}). "
            "Install that version again, or move the file away: a new one is made from what lies beside it."
        )
    found = db.execute("PRAGMA quick_check(1)").fetchone()
    if found is None or found[0] != "ok":
        raise _Damaged(str(found[0]) if found else "no answer")


def _migrate(db: sqlite3.Connection) -> None:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    for number, (_, script) in enumerate(MIGRATIONS[version:], version + 1):
        header = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {number};"
        db.executescript(f"BEGIN IMMEDIATE; {script} {header} COMMIT;")


def _set_aside(path: Path) -> None:
    """Keeps the damaged file for whoever wants to know, the last one only."""
    path.replace(path.with_name(f"{path.name}.damaged"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _cache_of(row: sqlite3.Row) -> NodeCache:
    values = {name: row[name] for name in row.keys()}  # noqa: SIM118 - iterating a Row gives values
    values["labels"] = orjson.loads(values["labels"])
    values["signatures"] = orjson.loads(values["signatures"])
    return _cache.validate_python(values)


def _mount_of(row: sqlite3.Row) -> Mount:
    return _mount.validate_python({name: row[name] for name in row.keys()})  # noqa: SIM118
