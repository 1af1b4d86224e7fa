"""Watches workloads, Jobs and pods of one namespace and tells `live.Fleet`, for the demo and the benchmarks.

Nothing here asks berth: what is shown is what the API server tells anybody. Times are when the news arrived here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from berth.demo.live import Fleet
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import GPUWORKLOADS, JOBS, PODS
from planning.naming import ATTEMPT_LABEL, JOB_SELECTOR, NODE_ANNOTATION, WORKLOAD_LABEL

LIVE_PODS = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True, slots=True)
class JobNews:
    workload: str
    attempt: int
    node: str


@dataclass(frozen=True, slots=True)
class PodNews:
    workload: str
    attempt: int
    node: str
    running: bool


@dataclass(frozen=True, slots=True)
class WorkloadNews:
    name: str
    phase: str
    retries: int
    message: str


class Observer:
    """Three watches that feed one fleet. `clock` gives the moment in the fleet's seconds."""

    def __init__(self, kube: KubeClient, fleet: Fleet, clock: Callable[[], float], namespace: str) -> None:
        self._fleet = fleet
        self._clock = clock
        self.workloads: Reflector[WorkloadNews] = Reflector(
            kube, GPUWORKLOADS, project=workload_news, namespace=namespace, on_change=self._workload
        )
        self.jobs: Reflector[JobNews] = Reflector(
            kube, JOBS, project=job_news, namespace=namespace, label_selector=JOB_SELECTOR, metadata_only=True,
            on_change=self._job,
        )  # fmt: skip
        self.pods: Reflector[PodNews] = Reflector(
            kube, PODS, project=pod_news, namespace=namespace, label_selector=JOB_SELECTOR, field_selector=LIVE_PODS,
            on_change=self._pod,
        )  # fmt: skip

    @property
    def problems(self) -> list[str]:
        """What kept a watch from working just now, for a person who wonders why nothing moves."""
        reflectors: tuple[Reflector[Any], ...] = (self.workloads, self.jobs, self.pods)
        return [f"{each.name}: {each.last_error}" for each in reflectors if each.last_error]

    async def run(self) -> None:
        """Watches until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in (self.workloads, self.jobs, self.pods):
                group.create_task(reflector.run())

    async def synced(self) -> None:
        """Returns once all three have listed."""
        for reflector in (self.workloads, self.jobs, self.pods):
            await reflector.synced.wait()

    def _workload(self, change: Change[WorkloadNews]) -> None:
        new = change.new
        if new is not None:
            self._fleet.status(new.name, new.phase, new.retries, new.message, self._clock())

    def _job(self, change: Change[JobNews]) -> None:
        if change.new is not None:
            self._fleet.job(change.new.workload, change.new.attempt, change.new.node, self._clock())
        elif change.old is not None:
            self._fleet.job_gone(change.old.workload, change.old.attempt, self._clock())

    def _pod(self, change: Change[PodNews]) -> None:
        new, old = change.new, change.old
        if new is not None:
            self._fleet.pod(change.uid, new.workload, new.attempt, new.node, new.running, self._clock())
        elif old is not None:
            self._fleet.pod_gone(change.uid, old.workload, old.attempt, self._clock())


def workload_news(raw: dict[str, Any]) -> WorkloadNews:
    """Of a GPUWorkload."""
    status: Mapping[str, Any] = raw.get("status") or {}
    return WorkloadNews(
        raw["metadata"]["name"], status.get("phase", ""), status.get("retryCount") or 0, status.get("message", "")
    )


def job_news(raw: dict[str, Any]) -> JobNews | None:
    """Of a Job's metadata."""
    meta = raw["metadata"]
    labels = meta.get("labels") or {}
    if WORKLOAD_LABEL not in labels:
        return None
    node = (meta.get("annotations") or {}).get(NODE_ANNOTATION, "")
    return JobNews(labels[WORKLOAD_LABEL], _attempt(labels), node)


def pod_news(raw: dict[str, Any]) -> PodNews | None:
    """Of a live pod."""
    labels = raw["metadata"].get("labels") or {}
    if WORKLOAD_LABEL not in labels:
        return None
    running = (raw.get("status") or {}).get("phase") == "Running"
    return PodNews(labels[WORKLOAD_LABEL], _attempt(labels), (raw.get("spec") or {}).get("nodeName", ""), running)


def _attempt(labels: Mapping[str, str]) -> int:
    text = labels.get(ATTEMPT_LABEL, "0")
    return int(text) if text.isdigit() else 0
