"""The controller: watches GPUWorkloads, Jobs, pods and nodes, and pokes whom a change concerns. It decides nothing.

Only the Lease's holder watches; a standby is ready but idle. Stateless: what it forgets in a crash, the sweep at its
next start finds again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Any

from opentelemetry.trace import get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from temporalio.client import Client
from temporalio.service import RPCError

from activities.cache import LIVE_PODS
from controller import sweep
from controller.digests import JobDigest, NodeDigest, WorkloadDigest, job_digest, node_digest, workload_digest
from controller.pokes import Poker
from controller.routing import NOBODY, Route, on_job, on_node, on_workload
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import GPUWORKLOADS, JOBS, NODES, PODS
from planning.naming import JOB_SELECTOR

log = logging.getLogger(__name__)
_tracer = get_tracer("berth.controller")
_propagator = TraceContextTextMapPropagator()


class Controller:
    """One leader's term: reflectors → routing → pokes, with a sweep at the start and every `resync` seconds."""

    def __init__(self, kube: KubeClient, temporal: Client, *, pool: str = "default", resync: float = 600.0) -> None:
        self._kube = kube
        self._temporal = temporal
        self._pool = pool
        self._resync = resync
        self._sweep_now = asyncio.Event()
        self._jobs_by_workload: dict[str, dict[str, JobDigest]] = {}
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
        # Of live pods only their going matters here (it frees a place), so their metadata is enough.
        self.pods: Reflector[str] = Reflector(
            kube, PODS, project=_pod_name, field_selector=LIVE_PODS, metadata_only=True, on_change=self._pod_changed
        )

    @property
    def reflectors(self) -> dict[str, Reflector[Any]]:
        return {"gpuworkloads": self.workloads, "jobs": self.jobs, "nodes": self.nodes, "pods": self.pods}

    @property
    def synced(self) -> bool:
        return all(r.synced.is_set() for r in self.reflectors.values())

    async def lead(self) -> None:
        """Runs until cancelled; what was seen but not yet told is told before it ends."""
        try:
            async with asyncio.TaskGroup() as group:
                for reflector in self.reflectors.values():
                    group.create_task(reflector.run())
                group.create_task(self.poker.run())
                group.create_task(self._sweeps())
                group.create_task(self._expiries())
        finally:
            await self.poker.flush(5.0)

    async def _sweeps(self) -> None:
        for reflector in self.reflectors.values():
            await reflector.synced.wait()
        pause = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sweep_now.wait(), timeout=pause)
            self._sweep_now.clear()
            try:
                followed = await sweep.open_workflows(self._temporal)
            except RPCError as away:
                log.warning("the sweep waits for Temporal: %s", away.message)
                pause = 5.0
                continue
            jobs = sweep.by_workload(self.jobs.items.values())
            route = sweep.repairs(self.workloads.items, jobs, followed)
            self.poker.concern(route, "gpuworkloads", self.workloads.resource_version)
            try:
                await sweep.lost_verdicts(self._temporal, self._pool, followed)
            except RPCError as away:
                log.warning("verdicts were not swept: %s", away.message)
            tidied = await sweep.tidy_tombstones(self._kube, self.workloads.items, jobs, followed)
            log.info("sweep: %d workloads poked, %d leftovers removed", len(route.workloads), tidied)
            # Jitter, so that several installations on one Temporal do not sweep together.
            pause = self._resync * (0.9 + 0.2 * random.random())

    async def _expiries(self) -> None:
        await self.workloads.synced.wait()
        while True:
            due = await sweep.expire(self._kube, self.workloads.items)
            await asyncio.sleep(min(due or 10.0, 10.0))

    def _is_tombstone(self, uid: str) -> bool:
        workload = self.workloads.items.get(uid)
        return workload is not None and workload.finished

    def _workload_changed(self, change: Change[WorkloadDigest]) -> None:
        jobs = self._jobs_by_workload.get(change.uid, {}).values()
        route = on_workload(change.uid, change.old, change.new, jobs)
        if route is NOBODY or not self.synced:
            return
        with _tracer.start_as_current_span("watch GPUWorkload", attributes={"gpuworkload.uid": change.uid}):
            carrier: dict[str, str] = {}
            _propagator.inject(carrier)
        traceparent = carrier.get("traceparent")
        trace = (change.uid, traceparent) if traceparent else None
        self.poker.concern(route, "gpuworkloads", change.resource_version, trace=trace)

    def _job_changed(self, change: Change[JobDigest]) -> None:
        job = change.new or change.old
        if job is None:
            return
        mine = self._jobs_by_workload.setdefault(job.workload_uid, {})
        if change.new is None:
            mine.pop(change.uid, None)
            if not mine:
                self._jobs_by_workload.pop(job.workload_uid, None)
        else:
            mine[change.uid] = change.new
        workload = self.workloads.items.get(job.workload_uid)
        self._tell(on_job(change.old, change.new, workload), "jobs", change.resource_version)

    def _node_changed(self, change: Change[NodeDigest]) -> None:
        def jobs_on(node: str) -> list[JobDigest]:
            return [job for job in self.jobs.items.values() if job.node == node]

        self._tell(on_node(change.old, change.new, jobs_on), "nodes", change.resource_version)

    def _pod_changed(self, change: Change[str]) -> None:
        if change.new is None:
            self._tell(Route(ledger=True), "pods", change.resource_version)

    def _tell(self, route: Route, kind: str, version: int) -> None:
        # The first list is not news: the sweep that follows it looks at everything at once.
        if self.synced:
            self.poker.concern(route, kind, version)


def _pod_name(raw: dict[str, Any]) -> str:
    return str((raw.get("metadata") or {}).get("name", ""))
