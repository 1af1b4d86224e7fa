"""berth's counterpart of the peer's runner: creates the workloads of a load in their streams, pretends that the Jobs
made of them run, and notes when each was created, admitted and done.

A workload is admitted when its Job exists, and done when berth has let go of it: terminal phase, finalizer removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from benchmarks.kueue.load import Load, Stream, workload
from berth.demo.cluster import patiently
from kube.client import KubeClient
from kube.errors import NotFound
from kube.reflector import Change, Reflector
from kube.resources import GPUWORKLOADS, JOBS
from planning.naming import FINALIZER, JOB_SELECTOR, WORKLOAD_LABEL

Key = tuple[str, str]  # namespace and name of a workload


@dataclass(frozen=True, slots=True)
class JobNews:
    namespace: str
    name: str
    workload: str
    ended: bool


def job_news(raw: dict[str, Any]) -> JobNews:
    """What counts of a Job. (Its end is this runner's own news.)"""
    meta = raw["metadata"]
    return JobNews(
        meta["namespace"],
        meta["name"],
        (meta.get("labels") or {}).get(WORKLOAD_LABEL, ""),
        bool((raw.get("status") or {}).get("completionTime")),
    )


def let_go(raw: dict[str, Any]) -> tuple[Key, bool]:
    """Of a workload that succeeded: which, and whether berth has let go of it."""
    meta = raw["metadata"]
    return (meta["namespace"], meta["name"]), FINALIZER not in (meta.get("finalizers") or ())


def completed(ended: datetime, seconds: float) -> dict[str, Any]:
    """The status of a Job that ran so long and ended well: all that the API server insists on, in one write."""
    began, now = (f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (ended - timedelta(seconds=seconds), ended))
    conditions = [
        {"type": kind, "status": "True", "lastProbeTime": now, "lastTransitionTime": now, "reason": "ByTest"}
        for kind in ("SuccessCriteriaMet", "Complete")
    ]
    return {"status": {"startTime": began, "completionTime": now, "succeeded": 1, "conditions": conditions}}


@dataclass
class Runner:
    """Moments by the monotonic clock, by workload. `taken_back`: Jobs that went before they had ended."""

    kube: KubeClient
    load: Load
    preemptible: bool = False
    created: dict[Key, float] = field(default_factory=dict)
    admitted: dict[Key, float] = field(default_factory=dict)
    ended: dict[Key, float] = field(default_factory=dict)
    done: dict[Key, float] = field(default_factory=dict)
    taken_back: int = 0
    failed: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._streams = {stream.name: stream for stream in self.load.streams}
        self._ending: set[asyncio.Task[None]] = set()
        self._jobs: Reflector[JobNews] = Reflector(
            self.kube, JOBS, project=job_news, label_selector=JOB_SELECTOR, on_change=self._job_changed
        )
        self._workloads: Reflector[tuple[Key, bool]] = Reflector(
            self.kube,
            GPUWORKLOADS,
            project=let_go,
            field_selector="status.phase=Succeeded",
            on_change=self._workload_changed,
        )

    async def run(self, timeout: float) -> None:
        """Returns when all workloads are done; TimeoutError if they are not after `timeout` seconds."""
        watches = [asyncio.create_task(each.run()) for each in (self._jobs, self._workloads)]
        try:
            async with asyncio.timeout(timeout):
                await self._jobs.synced.wait()
                await self._workloads.synced.wait()
                await self._create()
                while len(self.done) < self.load.workloads and not self.failed:
                    await asyncio.sleep(0.1)
            if self.failed:
                raise self.failed[0]
        finally:
            tasks = [*watches, *self._ending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _create(self) -> None:
        async with asyncio.TaskGroup() as group:
            for namespace in self.load.namespaces:
                for stream in self.load.streams:
                    group.create_task(self._stream(namespace, stream))

    async def _stream(self, namespace: str, stream: Stream) -> None:
        """As the peer's generator: waits before each, however long the creation before it took."""
        for number in range(stream.count):
            await asyncio.sleep(stream.interval_ms / 1000)
            body = workload(stream, number, namespace, preemptible=self.preemptible)
            self.created[namespace, body["metadata"]["name"]] = time.monotonic()
            await patiently(partial(self.kube.create, GPUWORKLOADS, body))

    def _job_changed(self, change: Change[JobNews]) -> None:
        if change.kind == "added" and change.new is not None:
            self.admitted.setdefault((change.new.namespace, change.new.workload), time.monotonic())
            ending = asyncio.create_task(self._end(change.new))
            self._ending.add(ending)
            ending.add_done_callback(self._over)
        elif change.new is None and change.old is not None:
            self.taken_back += not change.old.ended

    async def _end(self, job: JobNews) -> None:
        seconds = self._streams[job.workload.partition("-")[0]].runtime_ms / 1000
        await asyncio.sleep(seconds)
        body = completed(datetime.now(UTC), seconds)
        with suppress(NotFound):  # taken back meanwhile
            await patiently(lambda: self.kube.merge_patch(JOBS, job.name, job.namespace, body, subresource="status"))
            self.ended[job.namespace, job.workload] = time.monotonic()

    def _over(self, ending: asyncio.Task[None]) -> None:
        self._ending.discard(ending)
        error = None if ending.cancelled() else ending.exception()
        if error is not None:
            self.failed.append(error)

    def _workload_changed(self, change: Change[tuple[Key, bool]]) -> None:
        if change.new is not None and change.new[1]:
            self.done.setdefault(change.new[0], time.monotonic())

    def admission(self) -> Mapping[str, float]:
        """Mean seconds from creation to admission by class."""
        found: dict[str, list[float]] = {}
        for key, at in self.admitted.items():
            found.setdefault(key[1].partition("-")[0], []).append(at - self.created[key])
        return {name: sum(waits) / len(waits) for name, waits in sorted(found.items())}
