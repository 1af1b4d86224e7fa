"""Counts, inside a pod's own Python, the kernels that Triton found in the cache mounted here and those it compiled, and
tells the node by a small file in the mount. For `sitecustomize.py` beside it, which loads it once Triton is imported.

It needs nothing but Python 3.8. It never raises into the application, and where it cannot write it is silent.

The report is `<mount>/.berth/reports/<hostname>-<pid>-<random>.json`, one for each process:
`{"hits": <int>, "misses": <int>, "compile_microseconds": <int>}`, whose numbers only grow.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 1.0  # between two writes

_mounts: list[_Mount] = []
_writer: _Writer | None = None


def listen(knobs: Any, roots: list[str]) -> None:
    """Makes the listener in Triton's `knobs` one that counts for the caches mounted at `roots` (paths without links)
    and calls the application's, whenever the application sets its own.
    """
    global _writer
    kind = type(knobs.compilation)
    if not hasattr(kind, "listener"):
        return
    _mounts.extend(_Mount(root) for root in roots)
    _writer = _Writer()

    def get(self: Any) -> _Listener:
        return _Listener(self.__dict__.get("listener"))

    def put(self: Any, value: Any) -> None:
        # Who puts back what it found means what was there.
        self.__dict__["listener"] = value.other if isinstance(value, _Listener) else value

    def remove(self: Any) -> None:
        self.__dict__.pop("listener", None)

    kind.listener = property(get, put, remove)


class _Mount:
    """One mounted cache, and what this process has to say of it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._reports = os.path.join(root, ".berth", "reports")
        self._mounted = _times(os.path.join(root, ".berth", "mounted"))
        self.begin()

    def begin(self) -> None:
        """A process of its own begins at nothing, under a name of its own."""
        host = "".join(each for each in os.uname().nodename if (each.isalnum() and each.isascii()) or each == "-")
        self._name = f"{host.lstrip('-')[:64] or 'pod'}-{os.getpid()}-{os.urandom(8).hex()}"
        self.hits = self.misses = self.microseconds = 0
        self._written = (0, 0, 0)

    def holds(self, path: str) -> bool:
        return path.startswith(self.root + os.sep)

    def brought(self, path: str) -> bool:
        """Whether a file of this mount came with the cache. What the pod itself compiled is younger than its mount."""
        made = _times(path)
        return made is not None and (self._mounted is None or min(made) <= self._mounted[0])

    def write(self) -> None:
        """Leaves a whole file or the one before; nothing where this pod cannot write."""
        told = (self.hits, self.misses, self.microseconds)
        if told == self._written:
            return
        fresh = os.path.join(self._reports, f".{self._name}.new")
        try:
            with open(fresh, "w", encoding="utf-8") as file:
                file.write('{{"hits": {}, "misses": {}, "compile_microseconds": {}}}\n'.format(*told))
            os.replace(fresh, os.path.join(self._reports, self._name + ".json"))
            self._written = told
        except OSError:
            pass


class _Writer:
    """Writes what changed at once if the last time is a second ago, else when it will be, and at exit."""

    def __init__(self) -> None:
        self.told = threading.local()
        self._begin()
        atexit.register(self.write)
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may compile as well
        self._timer: threading.Timer | None = None  # a forked child has its parent's counts, and none of its threads
        self._next = 0.0
        for mount in _mounts:
            mount.begin()

    def changed(self) -> None:
        """To be called with the lock held."""
        left = self._next - time.monotonic()
        if left <= 0:
            self.write()
        elif self._timer is None:
            timer = threading.Timer(left, self.write)
            timer.daemon = True
            timer.start()
            self._timer = timer

    def write(self) -> None:
        try:
            with self.lock:
                self._timer, self._next = None, time.monotonic() + _SECONDS
                for mount in _mounts:
                    mount.write()
        except Exception:  # noqa: S110 - it runs in a thread of ours, or at exit: nobody could do anything
            pass


class _Listener:
    """What Triton calls after each kernel: it counts, and calls whatever else listens."""

    def __init__(self, other: Callable[..., Any] | None) -> None:
        self.other = other

    def __call__(self, *args: Any, **told: Any) -> Any:
        try:
            _count(told)
        except Exception:  # noqa: S110 - another Triton may tell other things
            pass
        return self.other(*args, **told) if self.other else None


def _count(told: dict[str, Any]) -> None:
    """A kernel found counts for the cache it came with, and for none if the pod had compiled it itself or has it from
    elsewhere. A kernel compiled counts for the cache into which it is written, or else for every one: none had it.
    """
    if _writer is None:
        return
    files, hit = told["metadata_group"], told["cache_hit"]
    if files is getattr(_writer.told, "files", None):
        return  # the application's listener calls the one that it found, which is ours as well
    _writer.told.files = files
    # The kernel's own description; every Triton writes it, whatever else it leaves out.
    path = next(os.path.realpath(each) for name, each in files.items() if name.endswith(".json"))
    holding = [mount for mount in _mounts if mount.holds(path)]
    microseconds = 0 if hit else max(0, int(told["times"].total))
    with _writer.lock:
        if hit:
            for mount in holding:
                mount.hits += mount.brought(path)
        else:
            for mount in holding or _mounts:
                mount.misses += 1
                mount.microseconds += microseconds
        _writer.changed()


def _times(path: str) -> tuple[int, int] | None:
    """When a file was written and when it was put there, in nanoseconds; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns
