"""The controller: watches GPUWorkloads, Jobs, pods and nodes, and pokes whom a change concerns. It decides nothing.

Only the Lease's holder watches; a standby is ready but idle. Stateless: what it forgets in a crash, the sweep at its
next start finds again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import time
from functools import partial
from typing import Any

from opentelemetry.trace import get_tracer
from temporalio.client import Client

from activities.cache import LIVE_PODS, ByOwner
from activities.tracing import workload_span
from controller import sweep
from controller.caches import CacheWatch
from controller.devices import DeviceWatch
from controller.digests import (
    JobDigest,
    NodeDigest,
    RequestDigest,
    WorkloadDigest,
    job_digest,
    node_digest,
    request_digest,
    workload_digest,
)
from controller.migrations import MigrationWatch
from controller.outage import TEMPORAL_AWAY, reason
from controller.pokes import Poker
from controller.routing import NOBODY, Route, on_job, on_node, on_request, on_workload, with_order
from controller.seat_services import SeatServices
from kube.client import KubeClient
from kube.errors import AccessDenied, KubeError, NotFound
from kube.events import EventRecorder
from kube.reflector import Change, Reflector
from kube.resources import GPUQUOTAS, GPURESERVATIONS, GPUWORKLOADS, JOBS, NODES, PODS, PROVISIONINGREQUESTS
from planning.naming import JOB_SELECTOR

log = logging.getLogger(__name__)
# After a verdict was found without its workflow: long enough for one that is only being delivered to arrive.
SECOND_LOOK = 30.0
# After a tombstone began to be deleted with something of ours on it: its own workflow may be about to remove it.
TIDY_AFTER = 5.0
TEMPORAL_PAUSE = 5.0
# Until it is asked again whether the cluster has ProvisioningRequests: an autoscaler is not installed every day.
ASK_AGAIN = 60.0
# Less than what a leader has between losing its lease and its successor's start (kube.lease: 15 s - 10 s).
FLUSH = 4.0

_tracer = get_tracer("berth.controller")


class Controller:
    """One leader's term: reflectors → routing → pokes, with a sweep at the start and every `resync` seconds."""

    def __init__(self, kube: KubeClient, temporal: Client, *, pool: str = "default", resync: float = 600.0) -> None:
        self._kube = kube
        self._temporal = temporal
        self._pool = pool
        self._resync = resync
        self._sweep_now = asyncio.Event()
        self._suspects: dict[str, sweep.Suspect] = {}
        self._tidying: dict[str, asyncio.TimerHandle] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._temporal_away = ""
        self._followed: set[str] | None = None  # UIDs of workloads whose workflow may be open; None before the sweep
        self._jobs_by_workload: ByOwner[str, JobDigest] = ByOwner(lambda job: job.workload_uid)
        self.poker = Poker(temporal, pool=pool, skip=self._is_tombstone, recovered=self._sweep_now.set)
        self.workloads: Reflector[WorkloadDigest] = Reflector(
            kube, GPUWORKLOADS, project=workload_digest, on_change=self._workload_changed
        )
        self.jobs: Reflector[JobDigest] = Reflector(
            kube,
            JOBS,
            project=job_digest,
            label_selector=JOB_SELECTOR,
            on_change=self._job_changed,
        )
        self.nodes: Reflector[NodeDigest] = Reflector(kube, NODES, project=node_digest, on_change=self._node_changed)
        # Of these only the spec matters here: their statuses are the ledger's own.
        self.quotas: Reflector[int] = Reflector(
            kube, GPUQUOTAS, project=_generation, on_change=partial(self._spec_changed, "gpuquotas")
        )
        self.reservations: Reflector[int] = Reflector(
            kube, GPURESERVATIONS, project=_generation, on_change=partial(self._spec_changed, "gpureservations")
        )
        self._orders: ByOwner[str, RequestDigest] = ByOwner(lambda request: request.workload_uid)
        # Not every cluster has the kind: it is watched once it does, and nobody waits for that.
        self.requests: Reflector[RequestDigest] = Reflector(
            kube,
            PROVISIONINGREQUESTS,
            project=request_digest,
            label_selector=JOB_SELECTOR,
            on_change=self._request_changed,
        )
        self.caches = CacheWatch(kube, temporal)
        self.devices = DeviceWatch(kube, temporal, pool=pool)
        self.migrations = MigrationWatch(kube, temporal)
        self._events = EventRecorder(kube, "berth-controller", os.uname().nodename)
        self.seat_services = SeatServices(kube, self._events)
        # Of live pods only their going matters here (it frees a place), so their metadata is enough.
        self.pods: Reflector[str] = Reflector(
            kube, PODS, project=_pod_name, field_selector=LIVE_PODS, metadata_only=True, on_change=self._pod_changed
        )

    @property
    def reflectors(self) -> dict[str, Reflector[Any]]:
        return {
            "gpuworkloads": self.workloads,
            "jobs": self.jobs,
            "nodes": self.nodes,
            "pods": self.pods,
            "gpuquotas": self.quotas,
            "gpureservations": self.reservations,
            **self.caches.reflectors,
            **self.devices.reflectors,
            **self.seat_services.reflectors,
            **self.migrations.reflectors,
        }

    @property
    def synced(self) -> bool:
        return all(r.synced.is_set() for r in self.reflectors.values())

    @property
    def temporal_away(self) -> str:
        """Why Temporal cannot be reached, as far as anybody tried; '' while it answers."""
        known = self._temporal_away or self.caches.trouble or self.devices.trouble or self.migrations.trouble
        return known or ("" if self.poker.reachable else "it takes no pokes")

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What must run while this leads; none of them ever ends by itself."""
        return tuple(self._tasks)

    async def lead(self) -> None:
        """Runs until cancelled; what was seen but not yet told is told before it ends."""
        try:
            async with asyncio.TaskGroup() as group:
                for kind, reflector in self.reflectors.items():
                    self._tasks.append(group.create_task(reflector.run(), name=f"watch of {kind}"))
                self._tasks.append(group.create_task(self._watch_requests(), name="watch of provisioningrequests"))
                self._tasks.append(group.create_task(self.poker.run(), name="pokes"))
                self._tasks.append(group.create_task(self.caches.run(), name="pokes of kernel caches"))
                self._tasks.append(group.create_task(self.devices.run(), name="pokes about devices"))
                self._tasks.append(group.create_task(self.seat_services.run(), name="endpoints of seats"))
                self._tasks.append(group.create_task(self.migrations.run(), name="moves of seats"))
                self._tasks.append(group.create_task(self._events.run(), name="Events"))
                self._tasks.append(group.create_task(self._sweeps(), name="sweeps"))
                self._tasks.append(group.create_task(self._expiries(), name="expiries"))
        finally:
            for timer in self._tidying.values():
                timer.cancel()
            await self.poker.flush(FLUSH)
            await self.caches.flush(FLUSH)
            await self.devices.flush(FLUSH)
            await self.migrations.flush(FLUSH)

    async def _watch_requests(self) -> None:
        while not await self._has_requests():
            await asyncio.sleep(ASK_AGAIN)
        await self.requests.run()

    async def _has_requests(self) -> bool:
        """Whether the cluster has the kind, and lets us read it. That it is away, the reflector sits out."""
        try:
            await self._kube.list(PROVISIONINGREQUESTS, "default", label_selector=JOB_SELECTOR)
        except NotFound:
            return False
        except AccessDenied as denied:
            log.warning("ProvisioningRequests are not watched: %s", denied)
            return False
        except KubeError:
            return True
        return True

    async def _sweeps(self) -> None:
        for reflector in self.reflectors.values():
            await reflector.synced.wait()
        next_sweep = pause = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._sweep_now.wait()
            now = time.monotonic()
            whole = self._sweep_now.is_set() or now >= next_sweep
            self._sweep_now.clear()
            if whole:
                next_sweep = 0.0  # due until it was made
            try:
                followed = await sweep.open_workflows(self._temporal)
                if whole:
                    await self._repair(followed)
                    # Jitter, so that several installations on one Temporal do not sweep together.
                    next_sweep = now + self._resync * (0.9 + 0.2 * random.random())
                await self._requeue_lost(followed)
                self._temporal_away = ""
            except TEMPORAL_AWAY as away:
                self._temporal_away = reason(away)
                log.warning("the sweep waits for Temporal: %s", self._temporal_away)
                pause = TEMPORAL_PAUSE
                continue
            # A second look brings no pokes: without workers they would pile up in histories.
            second_look = SECOND_LOOK if self._suspects else math.inf
            pause = max(0.0, min(next_sweep - time.monotonic(), second_look))

    async def _repair(self, followed: set[str]) -> None:
        jobs = sweep.by_workload(self.jobs.items.values())
        route = sweep.repairs(self.workloads.items, jobs, followed)
        # What is found here a worker whose watches come back later does not know yet, and nobody tells it again. It is
        # told an object's version, for whoever waited for the list's might wait for a bookmark.
        # Visibility is a moment behind: who was begun since may be missing in it.
        self._followed = {uid for uid in followed | (self._followed or set()) if uid in self.workloads.items}
        self._concern(route, "gpuworkloads", self.workloads.newest)
        self._concern(route, "jobs", self.jobs.newest)
        self.caches.sweep()
        self.devices.sweep()
        self.migrations.sweep()
        tidied = await sweep.tidy_tombstones(self._kube, self.workloads.items, jobs, followed)
        log.info("sweep: %d workloads poked, %d leftovers removed", len(route.workloads), tidied)

    async def _requeue_lost(self, followed: set[str]) -> None:
        found = await sweep.unheard_verdicts(self._temporal, self._pool, followed)
        if found is None:
            return
        lost, suspects = sweep.confirmed(found, self._suspects, time.monotonic(), SECOND_LOOK)
        await sweep.requeue(self._temporal, self._pool, lost)
        self._suspects = suspects

    async def _expiries(self) -> None:
        await self.workloads.synced.wait()
        while True:
            due = await sweep.expire(self._kube, self.workloads.items)
            await asyncio.sleep(min(due or 10.0, 10.0))

    def _littered(self, uid: str) -> bool:
        return sweep.littered(self.workloads.items.get(uid), self._jobs_by_workload.of(uid))

    def _tidy_later(self, uid: str, delay: float) -> None:
        self._tidying[uid] = asyncio.get_running_loop().call_later(delay, self._tidy, uid, delay)

    def _tidy(self, uid: str, waited: float) -> None:
        """Sweeps for a tombstone that still cannot go, and looks again, ever later, whether it could."""
        del self._tidying[uid]
        if self._littered(uid):
            self._sweep_now.set()
            if waited < self._resync:
                self._tidy_later(uid, 2 * waited)

    def _may_be_followed(self, uid: str) -> bool:
        return self._followed is None or uid in self._followed

    def _is_tombstone(self, uid: str) -> bool:
        workload = self.workloads.items.get(uid)
        return workload is not None and workload.finished

    def _workload_changed(self, change: Change[WorkloadDigest]) -> None:
        if change.uid not in self._tidying and self._littered(change.uid):
            self._tidy_later(change.uid, TIDY_AFTER)
        followed, jobs = self._may_be_followed(change.uid), self._jobs_by_workload.of(change.uid)
        route = on_workload(change.uid, change.old, change.new, jobs, followed=followed)
        if self._followed is not None and (change.new is None or change.new.finished):
            self._followed.discard(change.uid)
        if self._orders.of(change.uid):
            route = with_order(route, change.uid)
        if route is NOBODY or not self.synced:
            return
        with workload_span(_tracer, "watch GPUWorkload", change.uid):
            self._concern(route, "gpuworkloads", change.resource_version)

    def _job_changed(self, change: Change[JobDigest]) -> None:
        self._jobs_by_workload.change(change)
        job = change.new or change.old
        workload = None if job is None else self.workloads.items.get(job.workload_uid)
        followed = job is not None and self._may_be_followed(job.workload_uid)
        route = on_job(change.old, change.new, workload, followed=followed)
        if job is not None and self._orders.of(job.workload_uid):
            route = with_order(route, job.workload_uid)
        self._tell(route, "jobs", change.resource_version)

    def _node_changed(self, change: Change[NodeDigest]) -> None:
        def jobs_on(node: str) -> list[JobDigest]:
            there = [job for job in self.jobs.items.values() if node == job.node or node in job.nodes]
            owners = ((job, self.workloads.items.get(job.workload_uid)) for job in there)
            return [job for job, owner in owners if owner is not None and owner.namespace == job.namespace]

        self._tell(on_node(change.old, change.new, jobs_on), "nodes", change.resource_version)
        if self.synced:
            self.caches.node_changed(change.old, change.new, change.resource_version)
            self.devices.node_changed(change.old, change.new, change.resource_version)

    def _pod_changed(self, change: Change[str]) -> None:
        if change.new is None:
            self._tell(Route(ledger=True), "pods", change.resource_version)

    def _spec_changed(self, kind: str, change: Change[int]) -> None:
        if change.old != change.new:
            self._tell(Route(ledger=True), kind, change.resource_version)

    def _request_changed(self, change: Change[RequestDigest]) -> None:
        self._orders.change(change)
        self.poker.concern(on_request(change.old, change.new), "provisioningrequests", change.resource_version)

    def _tell(self, route: Route, kind: str, version: int) -> None:
        # The first list is not news: the sweep that follows it looks at everything at once.
        if self.synced:
            self._concern(route, kind, version)

    def _concern(self, route: Route, kind: str, version: int) -> None:
        if self._followed is not None:
            self._followed.update(poke.uid for poke in route.workloads if poke.begin)
        self.poker.concern(route, kind, version)


def _generation(raw: dict[str, Any]) -> int:
    return int((raw.get("metadata") or {}).get("generation") or 0)


def _pod_name(raw: dict[str, Any]) -> str:
    return str((raw.get("metadata") or {}).get("name", ""))
