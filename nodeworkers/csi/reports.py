"""Reads what pods report of the kernels that they found or compiled, from the private layers of their volumes, and
counts it by cache. For the driver, and through the ledger for whoever shows it or predicts hits.

A pod wrote the reports (nodeworkers/listener/python tells their form), so nothing in there is followed, sizes and
numbers are bounded, and what is no report is no report. A pod can lie about its own numbers, and about nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from nodeworkers import metrics
from nodeworkers.ledger import Ledger
from nodeworkers.listener import OURS
from planning.caches.hits import Seen

FILES, FILE_BYTES = 256, 4096  # of one volume: a server for eight GPUs compiles in dozens of processes
KERNELS, MICROSECONDS = 10**7, 10**13  # of one report; the second is four months
_ENTRIES = 4 * FILES  # of the folder, half-written ones included
_SECONDS = 15.0
_SETTLED = 10**9  # nanoseconds
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,127}\.json")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NONE = Seen(0, 0)
_log = logging.getLogger(__name__)


def make_room(upper: Path) -> None:
    """Makes the folder that pods write to in a new private layer, and what tells when that was. Raises OSError.

    Files that the pod makes are younger than `mounted`, so that its listener can tell kernels that came with the cache
    from those that the pod compiled itself.
    """
    ours = upper / OURS
    ours.mkdir()
    ours.chmod(0o755)
    (ours / "mounted").touch(mode=0o644)
    (ours / "reports").mkdir()
    (ours / "reports").chmod(0o1777)


def read_reports(upper: Path, before: Mapping[str, Seen]) -> dict[str, Seen]:
    """The reports in a private layer by name, where `before` is what they said last: numbers of a report never fall,
    and one that has gone, or is none any more, stays what it was. Never raises for what a pod may do.
    """
    found = dict(before)
    try:
        folder = _reports(upper)
    except OSError:
        return found
    try:
        for name in _names(folder):
            if len(found) >= FILES and name not in found:
                continue
            said = _report(folder, name)
            if said is not None:
                found[name] = _more(found.get(name, _NONE), said)
    finally:
        os.close(folder)
    return found


@dataclass(slots=True)
class _Known:
    """Of one volume: its reports, and when its folder had them."""

    changed: int = -1
    reports: dict[str, Seen] = field(default_factory=dict)


class Reports:
    """What the pods of one node report."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._known: dict[str, _Known] = {}
        self._turn = threading.Lock()

    async def watch(self) -> None:
        """Reads what has changed, time and again until cancelled. What goes wrong is logged, once for each streak."""
        wrong = ""
        while True:
            try:
                await asyncio.to_thread(self.look)
                wrong = ""
            # Whatever it is, a defect of ours too: this task would end unseen, and no report be read until the process
            # starts anew.
            except Exception as error:
                if str(error) != wrong:
                    _log.warning("What pods report of their caches cannot be read: %s", error, exc_info=True)
                wrong = str(error)
            await asyncio.sleep(_SECONDS)

    def look(self) -> None:
        """Reads the reports of all volumes whose folder has changed, and leaves what they say for Prometheus. Blocks;
        raises LedgerError.
        """
        mounts = self.ledger.mounts()
        for mount in mounts:
            self.read(mount.volume_id)
        with self._turn:
            for volume_id in self._known.keys() - {mount.volume_id for mount in mounts}:
                del self._known[volume_id]
        metrics.tell(metrics.counted(self.ledger.caches(), mounts, self.ledger.seen(), self.ledger.seen_by_volume()))

    def read(self, volume_id: str) -> None:
        """Reads the reports of one volume if its folder has changed, and notes them in the ledger. Blocks; raises
        LedgerError.
        """
        mount = self.ledger.mount(volume_id)
        if mount is None or not mount.upper:
            return
        with self._turn:
            known = self._known.setdefault(volume_id, _Known())
            changed = _changed(Path(mount.upper))
            if changed == known.changed:
                return
            reports = read_reports(Path(mount.upper), known.reports)
            if reports != known.reports:
                self.ledger.put_seen(volume_id, sum(reports.values(), _NONE))
            # The clock of files is coarse: a folder that changed just now may change again at the same time by it.
            settled = time.time_ns() - changed > _SETTLED
            known.changed, known.reports = changed if settled else -1, reports


def _changed(upper: Path) -> int:
    """When a name in the folder last came or went, which a pod cannot set back; -1 where there is no folder."""
    try:
        folder = _reports(upper)
    except OSError:
        return -1
    try:
        return os.fstat(folder).st_ctime_ns
    finally:
        os.close(folder)


def _reports(upper: Path) -> int:
    """The folder with the reports, opened. Only the way to `upper` is ours; below it each name may be a trap."""
    root = os.open(upper, _FOLDER)
    try:
        ours = os.open(OURS, _FOLDER, dir_fd=root)
    finally:
        os.close(root)
    try:
        return os.open("reports", _FOLDER, dir_fd=ours)
    finally:
        os.close(ours)


def _names(folder: int) -> list[str]:
    """Names that a report can have, of the first entries: however many a pod makes, we read no more."""
    names = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _ENTRIES:
                break
            if _NAME.fullmatch(entry.name):
                names.append(entry.name)
    return sorted(names)


def _report(folder: int, name: str) -> Seen | None:
    try:
        # Looked at before it is opened, for that alone can do something; and again, for it may be another by then.
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return None
        handle = os.open(name, _FILE, dir_fd=folder)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        body = os.read(handle, FILE_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(handle)
    return _parsed(body) if len(body) <= FILE_BYTES else None


def _parsed(body: bytes) -> Seen | None:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(said, dict):
        return None
    hits, misses = _number(said.get("hits"), KERNELS), _number(said.get("misses"), KERNELS)
    microseconds = _number(said.get("compile_microseconds"), MICROSECONDS)
    if hits is None or misses is None or microseconds is None:
        return None
    return Seen(hits, misses, microseconds / 1e6)


def _number(value: object, most: int) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None


def _more(one: Seen, other: Seen) -> Seen:
    return Seen(
        max(one.hits, other.hits),
        max(one.misses, other.misses),
        max(one.compile_seconds, other.compile_seconds),
    )
