"""The disk work of the node's ledger for which no call of the kubelet waits: copies of its caches, each a file beside
it, and moving its log (WAL) into its file. Both end in fsync, which takes as long as the disk likes.

For `ledger.py`, whose lock nobody holds meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from planning.caches.volumes import NodeCache

UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_LIMIT = 4 * 1024 * 1024  # bytes of one cache's copy
_WRITES = 500  # of the ledger, after which its log is moved; each is of a few pages
_cache: TypeAdapter[NodeCache] = TypeAdapter(NodeCache)
_log = logging.getLogger(__name__)


class Copies:
    """A file of each cache, from which a ledger that was lost is made anew."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True, mode=0o700)
        self._folder = folder
        self._turn = threading.Lock()

    def follow(self, uids: Collection[str], cache: Callable[[str], NodeCache | None]) -> None:
        """Makes the copies of these caches say what `cache`, which is asked for each, says now: whoever comes last
        writes what is last. Raises OSError.
        """
        with self._turn:
            for uid in uids:
                found = cache(uid)
                if found is not None:
                    self._write(found)
                else:
                    self._path(uid).unlink(missing_ok=True)

    def read(self) -> list[NodeCache]:
        """What all copies say; one that is damaged is left out, and the cache's workflow fills the gap."""
        found = (self._read(path) for path in sorted(self._folder.glob("*.json")))
        return [cache for cache in found if cache is not None]

    def agree(self, caches: Iterable[NodeCache]) -> None:
        """Makes them be those of these caches, after whatever ended the last process. Raises OSError."""
        for half in self._folder.glob("*.new"):
            half.unlink()
        wanted = {cache.uid: cache for cache in caches}
        for path in self._folder.glob("*.json"):
            if path.stem not in wanted:
                path.unlink()
        for cache in wanted.values():
            if self._read(self._path(cache.uid)) != cache:
                self._write(cache)

    def _path(self, uid: str) -> Path:
        return self._folder / f"{uid}.json"

    def _write(self, cache: NodeCache) -> None:
        path = self._path(cache.uid)
        beside = path.with_suffix(".new")
        with beside.open("wb") as file:
            file.write(orjson.dumps(asdict(replace(cache, labels=dict(cache.labels)))))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def _read(self, path: Path) -> NodeCache | None:
        try:
            if path.stat().st_size > _LIMIT:
                return None
            cache = _cache.validate_json(path.read_bytes())
        except (OSError, ValidationError, ValueError):
            return None
        return cache if cache.uid == path.stem and UID.fullmatch(cache.uid) else None


class LogMover:
    """Moves a ledger's log into its file from a connection of its own, in a thread: SQLite would do it within the
    commit that makes the log long, whosever that is. Writers go on meanwhile (a passive checkpoint).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = _WRITES - 1  # what a process left that was killed is moved at the first write
        self._due, self._over = threading.Event(), False
        self._thread: threading.Thread | None = None

    def wrote(self) -> None:
        """Notes a write; by whoever has the ledger's lock."""
        self._written += 1
        if self._written < _WRITES:
            return
        self._written = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ledger-log", daemon=True)
            self._thread.start()
        self._due.set()

    def close(self) -> None:
        """Returns when it has ended."""
        self._over = True
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._over:
                return
            try:
                with closing(sqlite3.connect(self._path, timeout=0)) as db:
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            except sqlite3.Error as error:  # it is tried again after as many writes
                _log.warning("The log of %s cannot be moved into it: %s. Has its disk room?", self._path, error)
