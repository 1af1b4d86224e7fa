"""A local picture of one collection, kept up to date by list and watch, and the changes as they come.

For the controller (changes become pokes) and the planner (the picture is its cache). Kept is only what `project` makes
of an object. The picture is always a state the server had; nothing a server sends, and no bug in a callback, ends it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from kube.client import KubeClient
from kube.errors import Gone, KubeError, NotFound, Unavailable
from kube.resources import Resource

log = logging.getLogger(__name__)

T = TypeVar("T")

_GOOD_WATCH = 1.0  # seconds; a watch that ended sooner without news counts as a failure, lest we ask in a tight loop
_LONG_WATCH = 15.0  # seconds; a watch that lasted so long before it broke was good
_UNKNOWN = 60.0  # seconds until a kind that the server does not know is asked for again
_BREATHE = 500  # changes applied after a relist before other tasks get a turn


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """One object's change. `old` is None for added, `new` for deleted; `resource_version` is the change's own, or the
    list's for a deletion that was noticed by listing."""

    kind: Literal["added", "modified", "deleted"]
    uid: str
    old: T | None
    new: T | None
    resource_version: int


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter (AWS Architecture Blog, "Exponential Backoff And Jitter"), in seconds."""

    base: float = 0.2
    cap: float = 30.0

    def delay(self, failures: int) -> float:
        """A random wait after this many failures in a row (1: the first)."""
        return random.uniform(0.0, min(self.cap, self.base * 2.0 ** min(failures - 1, 30)))


class Reflector(Generic[T]):
    """Mirrors a collection into `items`, by UID, while `run` runs.

    `project` turns an object into what is kept, or None to leave it out (it counts as deleted if it was there). When
    it raises, that is logged and what was kept of the object stays. `on_change` is called after `items` was changed,
    synchronously, in the order of the server's stream; it should be quick and must not await.

    `optional`: a cluster may not know the kind at all; that is an empty picture, until one day it does.

    Counters: `relists`, `watch_restarts`, `events`, `errors` (callbacks that raised, objects without uid or version).
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        *,
        project: Callable[[dict[str, Any]], T | None],
        namespace: str | None = None,
        label_selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
        optional: bool = False,
        on_change: Callable[[Change[T]], None] | None = None,
        page_size: int = 500,
        watch_seconds: int = 270,
        backoff: Backoff = Backoff(),
    ) -> None:
        self.name = resource.qualified
        self.resource = resource
        self.resource_version = 0
        self.synced = asyncio.Event()
        self.last_contact: float | None = None
        self.last_error: str | None = None
        self.relists = 0
        self.watch_restarts = 0
        self.events = 0
        self.errors = 0
        self._client = client
        self._project = project
        self._on_change = on_change
        self._namespace = namespace
        self._selection: dict[str, Any] = {
            "label_selector": label_selector,
            "field_selector": field_selector,
            "metadata_only": metadata_only,
        }
        self._optional = optional
        self._page_size = page_size
        self._watch_seconds = watch_seconds
        self._backoff = backoff
        self._items: dict[str, T] = {}
        self._versions: dict[str, int] = {}
        self._progress = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self.items: Mapping[str, T] = MappingProxyType(self._items)

    @property
    def newest(self) -> int:
        """The newest version among what is kept. Every watch brings it; the list's own perhaps only a bookmark."""
        return max(self._versions.values(), default=0)

    def healthy(self, within: float = 150.0) -> bool:
        """Whether the picture is complete and the server was heard of in the last `within` seconds (bookmarks come
        about every 60)."""
        return self.synced.is_set() and self.last_contact is not None and time.monotonic() - self.last_contact < within

    async def wait_for(self, resource_version: int, timeout: float) -> bool:
        """Waits until the picture is at least as new as `resource_version`; False when `timeout` seconds pass first.

        Quick for a version that an object of this very selection got; for any other the next event or bookmark, up to
        about a minute away, brings the news.
        """
        if self.resource_version >= resource_version:
            return True
        waiter = asyncio.get_running_loop().create_future()
        entry = (resource_version, waiter)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        finally:
            if entry in self._waiters:
                self._waiters.remove(entry)
        return True

    def observe(self, obj: dict[str, Any]) -> None:
        """Takes in an object as the answer to one's own write showed it, ahead of the watch.

        Only what is there already, in an older version: whatever is not may have been deleted meanwhile, and no event
        would ever take it out again. `resource_version` stays what the watch has reached.
        """
        identity = self._identify(obj)
        if identity is not None and 0 < self._versions.get(identity[0], 0) < identity[1]:
            new, _ = self._read(obj)
            if new is not None:
                self._put(*identity, new)

    async def run(self) -> None:
        """Lists and watches until cancelled."""
        failures, listed, silent = 0, False, False
        while True:
            self._progress = False
            error: Exception | None = None
            began = time.monotonic()
            try:
                if not listed:
                    await self._list()
                    listed, began = True, time.monotonic()
                else:
                    self.watch_restarts += 1
                await self._watch()
            except Exception as exc:  # whatever ended the watch, the answer is another one: nobody else would begin it
                error = exc
                listed = listed and _can_resume(exc)
            lived = time.monotonic() - began
            good = self._progress or (listed and lived >= (_GOOD_WATCH if error is None else _LONG_WATCH))
            # Any answer ends a silence, and the first is often "too old": long pauses are for a server that is away.
            answered = silent and isinstance(error, KubeError) and not isinstance(error, Unavailable)
            failures = 0 if good else 1 if answered else failures + 1
            silent = isinstance(error, Unavailable)
            if error is None and good:
                continue
            if self._optional and not listed and isinstance(error, NotFound):
                self._unknown()
                await asyncio.sleep(_UNKNOWN)
                continue
            delay = self._backoff.delay(max(1, failures))
            if isinstance(error, KubeError) and error.retry_after:
                delay += error.retry_after
            self._report(error, listed, delay)
            await asyncio.sleep(delay)

    def _unknown(self) -> None:
        """The server does not know the kind: there are none."""
        self._contact()
        self.last_error = None
        for uid in list(self._items):
            self._remove(uid, self.resource_version)
        self.synced.set()

    def _report(self, error: Exception | None, listed: bool, delay: float) -> None:
        how = "watching on" if listed else "listing again"
        self.last_error = str(error) if error is not None else "the server ends watches at once"
        if error is None or isinstance(error, KubeError):
            level = logging.INFO if isinstance(error, Gone) else logging.WARNING
            log.log(level, "%s: %s; %s in %.1f s", self.name, self.last_error, how, delay)
        else:
            log.error("%s: unexpected failure; %s in %.1f s", self.name, how, delay, exc_info=error)

    async def _list(self) -> None:
        """Takes the server's present state and makes changes of the difference."""
        seen: dict[str, tuple[int, T]] = {}
        kept: set[str] = set()
        version = 0
        pages = self._client.list_pages(self.resource, self._namespace, page_size=self._page_size, **self._selection)
        async with aclosing(pages):
            async for page, listed_at in pages:
                version = listed_at
                self._contact()
                for obj in page:
                    self._take(obj, seen, kept)
                del page  # before the next one comes
        self.relists += self.synced.is_set()
        if version < self.resource_version:
            log.warning("%s: the server went back from version %d to %d", self.name, self.resource_version, version)

        for uid in [uid for uid in self._items if uid not in seen and uid not in kept]:
            self._remove(uid, version)
        for done, uid in enumerate(sorted(seen, key=lambda uid: seen[uid][0])):
            # Pages are read one after another: meanwhile an own write may have shown something newer (`observe`). What
            # the watch brought is older than the list, whatever its number: a restored server begins anew.
            known = self._versions.get(uid, 0)
            if known <= self.resource_version or seen[uid][0] > known:
                self._put(uid, *seen[uid])
            if done % _BREATHE == _BREATHE - 1:
                await asyncio.sleep(0)
        self.resource_version = version
        self._wake()
        self.synced.set()

    def _take(self, obj: dict[str, Any], seen: dict[str, tuple[int, T]], kept: set[str]) -> None:
        """Notes one listed object: in `seen` when it is new or changed, in `kept` when what we have of it stays."""
        identity = self._identify(obj)
        if identity is None:
            return
        uid, version = identity
        if self._versions.get(uid) == version:
            kept.add(uid)
            return
        new, readable = self._read(obj)
        if new is not None:
            seen[uid] = (version, new)
        elif not readable:
            kept.add(uid)

    async def _watch(self) -> None:
        """One watch from the last version seen until the server ends it; raises when it ends otherwise."""
        events = self._client.watch(
            self.resource,
            self._namespace,
            resource_version=self.resource_version,
            timeout_seconds=self._watch_seconds,
            opened=self._contact,
            **self._selection,
        )
        async with aclosing(events):
            async for kind, obj in events:
                self._contact()
                self._apply(kind, obj)
        self._contact()

    def _apply(self, kind: str, obj: dict[str, Any]) -> None:
        identity = self._identify(obj, bookmark=kind == "BOOKMARK")
        if identity is None:
            return
        uid, version = identity
        if kind in ("ADDED", "MODIFIED"):
            self.events += 1
            if version > self._versions.get(uid, 0):
                new, readable = self._read(obj)
                if new is not None:
                    self._put(uid, version, new)
                elif readable:
                    self._remove(uid, version)
        elif kind == "DELETED":
            self.events += 1
            self._remove(uid, version)
        if version > self.resource_version:
            self.resource_version = version
            self._progress = True
            self._wake()

    def _put(self, uid: str, version: int, new: T) -> None:
        old = self._items.get(uid)
        self._items[uid] = new
        self._versions[uid] = version
        self._emit(Change("added" if old is None else "modified", uid, old, new, version))

    def _remove(self, uid: str, version: int) -> None:
        if uid in self._items:
            del self._versions[uid]
            self._emit(Change("deleted", uid, self._items.pop(uid), None, version))

    def _emit(self, change: Change[T]) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(change)
        except Exception:  # a listener that fails must not keep the cache from what is true
            self.errors += 1
            log.exception("%s: on_change failed for %s (%s)", self.name, change.uid, change.kind)

    def _identify(self, obj: dict[str, Any], *, bookmark: bool = False) -> tuple[str, int] | None:
        try:
            metadata = obj["metadata"]
            return ("" if bookmark else str(metadata["uid"])), int(metadata["resourceVersion"])
        except (KeyError, TypeError, ValueError, AttributeError):
            self.errors += 1
            log.warning("%s: ignored an object without uid or resourceVersion: %.200r", self.name, obj)
            return None

    def _read(self, obj: dict[str, Any]) -> tuple[T | None, bool]:
        """What the projection makes of an object, and whether it could be read: if not, what was kept of it stays."""
        try:
            return self._project(obj), True
        except Exception:  # the projection is the owner's: one object that it cannot read must not cost all others
            self.errors += 1
            meta = obj["metadata"]
            name = "/".join(str(part) for part in (meta.get("namespace"), meta.get("name")) if part)
            log.exception("%s: project failed for %s (%s); its last good state is kept", self.name, name, meta["uid"])
            return None, False

    def _contact(self) -> None:
        self.last_contact = time.monotonic()
        self.last_error = None

    def _wake(self) -> None:
        for version, waiter in self._waiters:
            if version <= self.resource_version and not waiter.done():
                waiter.set_result(None)


def _can_resume(exc: Exception) -> bool:
    """Whether to watch on from the last version. A lost connection, yes; but an event that cannot be read would come
    again, and a version the server does not know yet (it was restored from a backup) would never come."""
    if not isinstance(exc, Unavailable) or exc.reason == "BadResponse":
        return False
    causes = exc.details.get("causes") or []
    return not any(isinstance(c, dict) and c.get("reason") == "ResourceVersionTooLarge" for c in causes)
