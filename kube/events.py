"""Events (events.k8s.io/v1): what `kubectl describe` and `kubectl get events` tell a person about an object.

For activities. Recording never waits and never fails: events queue up, repeats of the same one become a series with a
count, and what does not fit is dropped and counted. Events are for people; nothing may depend on them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import re
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from kube.client import KubeClient
from kube.errors import AlreadyExists, KubeError, NotFound, Unavailable
from kube.reflector import Backoff
from kube.resources import EVENTS, ObjectRef

log = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]
_Key = tuple[str, str, str, str, str]

_NOTE_BYTES = 1024  # the API server's limits, in bytes (pkg/apis/core/validation/events.go)
_SHORT_BYTES = 128
_FORGET = 600.0  # seconds without a repeat after which the next one is an event of its own
_SERIES = 1024  # series remembered at most; what repeats does so soon
_ATTEMPTS = 6
_BACKOFF = Backoff(base=0.5)


@dataclass(eq=False, slots=True)
class _Series:
    """Occurrences of one event. `name` is the Event object's, chosen before it is created, so that a creation whose
    answer was lost is not done twice."""

    regarding: ObjectRef
    fields: dict[str, str]
    first: datetime
    last: datetime
    key: _Key
    count: int = 1
    name: str = ""
    created: bool = False
    written_at: float = 0.0
    last_at: float = 0.0
    queued: bool = False
    attempts: int = 0


class EventRecorder:
    """Writes Events while `run` runs; `flush` before the end.

    Counters: `dropped` (queue full, refused, or given up), `written` (requests that succeeded). To be used from the
    event loop's thread.
    """

    def __init__(
        self,
        client: KubeClient,
        reporting_controller: str,
        reporting_instance: str,
        *,
        queue_size: int = 1000,
        repeat_seconds: float = 10.0,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        """`repeat_seconds`: a series is brought up to date at most this often."""
        self.dropped = 0
        self.written = 0
        self._client = client
        self._controller = reporting_controller
        self._instance = _cut(reporting_instance, _SHORT_BYTES)
        self._queue_size = queue_size
        self._repeat = repeat_seconds
        self._backoff = backoff
        self._series: OrderedDict[_Key, _Series] = OrderedDict()
        self._due: list[tuple[float, int, _Series]] = []
        self._order = itertools.count()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def record(
        self,
        *,
        regarding: ObjectRef,
        type: EventType,
        reason: str,
        action: str,
        note: str,
    ) -> None:
        """Notes an event about `regarding`. `reason` is for machines (UpperCamelCase: why), `action` what was done or
        attempted, `note` for people."""
        moment, clock = datetime.now(UTC), time.monotonic()
        fields = {
            "type": type,
            "reason": _cut(reason, _SHORT_BYTES) or "Unknown",
            "action": _cut(action, _SHORT_BYTES) or "Unknown",
            "note": _cut(note, _NOTE_BYTES),
        }
        who = "/".join(
            (regarding.api_version, regarding.kind, regarding.namespace or "", regarding.name, regarding.uid)
        )
        key: _Key = (who, fields["type"], fields["reason"], fields["action"], fields["note"])
        series = self._series.get(key)
        if series is not None and (series.queued or clock - series.last_at < _FORGET):
            series.count += 1
            series.last, series.last_at = moment, clock
            self._series.move_to_end(key)
            if not series.queued:
                self._push(series, series.written_at + self._repeat)
            return
        if len(self._due) >= self._queue_size:
            self.dropped += 1
            return
        series = _Series(regarding, fields, moment, moment, key, last_at=clock)
        self._series[key] = series
        self._push(series, clock)
        while len(self._series) > _SERIES:
            self._series.popitem(last=False)

    async def run(self) -> None:
        """Writes what was recorded, until cancelled."""
        failures = 0
        while True:
            wait = self._due[0][0] - time.monotonic() if self._due else None
            if wait is None or wait > 0:
                self._wake.clear()
                try:
                    async with asyncio.timeout(wait):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            failures = 0 if await self._write_next() else failures + 1
            if failures:
                await asyncio.sleep(self._backoff.delay(failures))

    async def flush(self, timeout: float) -> bool:
        """Writes everything now, whether or not `run` runs; False when `timeout` seconds did not suffice."""
        try:
            async with asyncio.timeout(timeout):
                failures = 0
                while self._due or self._writing.locked():
                    failures = 0 if await self._write_next() else failures + 1
                    if failures:
                        await asyncio.sleep(self._backoff.delay(failures))
        except TimeoutError:
            return False
        return True

    def _push(self, series: _Series, due: float) -> None:
        series.queued = True
        heapq.heappush(self._due, (due, next(self._order), series))
        self._wake.set()

    async def _write_next(self) -> bool:
        """Writes the series that is due first; False when the API server is away (the series stays queued)."""
        async with self._writing:
            if not self._due:
                return True
            _, _, series = heapq.heappop(self._due)
            series.queued = False
            count, last = series.count, series.last
            try:
                await self._write(series, count, last)
            except asyncio.CancelledError:
                self._push(series, 0.0)
                raise
            except Unavailable as exc:
                series.attempts += 1
                if series.attempts < _ATTEMPTS:
                    if not series.queued:
                        self._push(series, 0.0)
                    return False
                self._give_up(series, exc)
                return False
            except Exception as exc:  # Events are for people: no failure to write one may end the recorder
                self._give_up(series, exc)
                return True
            self.written += 1
            series.attempts = 0
            series.written_at = time.monotonic()
            if series.count > count and not series.queued:
                self._push(series, series.written_at + self._repeat)
            return True

    def _give_up(self, series: _Series, exc: Exception) -> None:
        self.dropped += 1
        if self._series.get(series.key) is series:
            del self._series[series.key]
        level = logging.WARNING if isinstance(exc, KubeError) else logging.ERROR
        where = f"{series.regarding.namespace or ''}/{series.regarding.name}"
        log.log(level, "event %s about %s was not written: %s", series.fields["reason"], where, exc)

    async def _write(self, series: _Series, count: int, last: datetime) -> None:
        namespace = series.regarding.namespace or "default"
        repeats = {"count": count, "lastObservedTime": _micro(last)}
        if series.created:
            try:
                await self._client.merge_patch(EVENTS, series.name, namespace, {"series": repeats})
            except NotFound:
                series.name, series.created = "", False  # events live an hour; begin a new one
            else:
                return
        if not series.name:
            stem = re.sub(r"[^a-z0-9.-]", "-", series.regarding.name.lower())[:220].strip(".-") or "object"
            series.name = f"{stem}.{time.time_ns():x}{next(self._order) & 0xFFF:03x}"
        body: dict[str, Any] = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": series.name, "namespace": namespace},
            "eventTime": _micro(series.first),
            "reportingController": self._controller,
            "reportingInstance": self._instance,
            "regarding": series.regarding.to_dict(),
            **series.fields,
        }
        if count > 1:
            body["series"] = repeats
        with suppress(AlreadyExists):  # the answer to an earlier attempt was lost
            await self._client.create(EVENTS, body, namespace)
        series.created = True


def _cut(text: str, size: int) -> str:
    """At most `size` bytes of UTF-8, whole characters, an ellipsis where something is missing."""
    data = text.encode("utf-8", "replace")
    if len(data) <= size:
        return data.decode()
    return data[: size - 3].decode("utf-8", "ignore") + "…"


def _micro(moment: datetime) -> str:
    """metav1.MicroTime."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


__all__ = ["EventRecorder", "EventType", "ObjectRef"]
