"""Admission: workloads per second from create to Job created, next to bare Jobs on the same stack in the same run.

For whoever changes the path from a GPUWorkload to its Job. Also what it costs: API writes, history events, CPU and
memory. `--scale` is 1,000 nodes and 5,000 workloads for the memory of controller and worker, `--fill
--nodes 500 --workloads 4000` KAI's shape: all nodes filled, from creation to Running. It asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from temporalio.client import Client

from benchmarks.own_stack import Memory, data_argument, own_stack
from benchmarks.report import Report, arguments, progress
from berth.demo import cluster, measure
from berth.demo.report import percentile
from crds.gpuworkload import API_VERSION, KIND
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import GPUWORKLOADS, JOBS, PODS
from planning.model import TOMBSTONES
from stack import Endpoints, SimulatedNode, Stack

BERTH, BARE = "bench-berth", "bench-bare"
IMAGE = "simulated.invalid/bench"
STEPS = ("created", "running", "complete")


@dataclass(frozen=True, slots=True)
class JobNews:
    name: str
    complete: bool


def job_news(raw: dict[str, Any]) -> JobNews:
    """What counts of a Job."""
    status = raw.get("status") or {}
    conditions = status.get("conditions") or ()
    complete = any(each.get("type") == "Complete" and each.get("status") == "True" for each in conditions)
    return JobNews(raw["metadata"]["name"], complete)


def runner_of(raw: dict[str, Any]) -> str:
    """The Job of a pod that runs or has run, else ''."""
    if (raw.get("status") or {}).get("phase") not in ("Running", "Succeeded"):
        return ""
    return str((raw["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-name", ""))


@dataclass
class Jobs:
    """First moments of every Job of one namespace, by step; the same watches serve berth's Jobs and bare ones."""

    kube: KubeClient
    namespace: str
    seen: dict[str, dict[str, float]] = field(default_factory=lambda: {step: {} for step in STEPS})

    def __post_init__(self) -> None:
        self.reflector: Reflector[JobNews] = Reflector(
            self.kube, JOBS, project=job_news, namespace=self.namespace, on_change=self._changed
        )
        self.pods: Reflector[str] = Reflector(
            self.kube, PODS, project=runner_of, namespace=self.namespace, on_change=self._pod_changed
        )

    async def watch(self) -> None:
        """Watches until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.reflector.run())
            group.create_task(self.pods.run())

    def _pod_changed(self, change: Change[str]) -> None:
        if change.new:
            self.seen["running"].setdefault(change.new, time.monotonic())

    def _changed(self, change: Change[JobNews]) -> None:
        job, now = change.new, time.monotonic()
        if job is None:
            return
        self.seen["created"].setdefault(job.name, now)
        if job.complete:
            self.seen["complete"].setdefault(job.name, now)


def pod_spec(seconds: float, gpus: int) -> dict[str, Any]:
    """The pod of a bare Job: the same as berth makes of `workload`."""
    amounts = {"nvidia.com/gpu": str(gpus)}
    return {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "gpu-workload",
                "image": IMAGE,
                "env": [{"name": "SIMULATED_RUN", "value": f"{seconds:g}s"}],
                "resources": {"requests": {"cpu": "1", "memory": "1Gi", **amounts}, "limits": amounts},
            }
        ],
    }


def bare_job(name: str, seconds: float) -> dict[str, Any]:
    """A Job as a person would write it without berth."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": BARE},
        "spec": {"backoffLimit": 0, "template": {"spec": pod_spec(seconds, 1)}},
    }


def workload(name: str, seconds: float) -> dict[str, Any]:
    """The same as a GPUWorkload."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": BERTH},
        "spec": {
            "modelName": "benchmark",
            "gpuCount": 1,
            "image": IMAGE,
            "env": [{"name": "SIMULATED_RUN", "value": f"{seconds:g}s"}],
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        },
    }


@dataclass
class Bench:
    """One stack that is up, and what is measured on it."""

    stack: Stack
    endpoints: Endpoints
    options: argparse.Namespace
    report: Report

    async def run(self) -> None:
        kubeconfig = self.endpoints.kubeconfig()
        async with await KubeClient.connect(kubeconfig, user_agent="berth-benchmark") as kube:
            nodes = [SimulatedNode(f"bench-{i:04d}", gpus=8, gpu_model="simulated") for i in range(self.options.nodes)]
            namespaces = [
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in (BERTH, BARE)
            ]
            progress(f"{len(nodes)} simulated nodes …")
            await cluster.prepare(kube, self.stack, namespaces, nodes)
            memory = Memory(self.stack)
            async with memory.sampled():
                count, seconds = self.options.workloads, self.options.run_seconds
                if not self.options.no_bare:
                    bodies = [bare_job(f"bare-{i:05d}", seconds) for i in range(count)]
                    await self._round("bare", kube, BARE, lambda: cluster.create_all(kube, JOBS, bodies))
                    await self._remove(kube)
                workloads = [workload(f"w-{i:05d}", seconds) for i in range(count)]
                await self._round("berth", kube, BERTH, lambda: cluster.create_all(kube, GPUWORKLOADS, workloads))
                if not self.options.fill:
                    await self._until_ended(kube, count)
        temporal = await Client.connect(
            self.endpoints.temporal_address, namespace=self.endpoints.temporal_namespace
        )  # fmt: skip
        self._histories(await measure.histories(temporal, BERTH, count))
        self._ratios()
        memory.tell(self.report)

    async def _round(self, name: str, kube: KubeClient, namespace: str, create: Callable[[], Any]) -> None:
        """Creates everything and waits until all Jobs completed, or run where they fill the nodes."""
        count = self.options.workloads
        progress(f"{name}: {count} …")
        jobs = Jobs(kube, namespace)
        watching = asyncio.create_task(jobs.watch())
        try:
            await jobs.reflector.synced.wait()
            await jobs.pods.synced.wait()
            writes, cpu = await measure.api_writes(self.endpoints.kubeconfig()), measure.stack_cpu(self.stack)
            began = time.monotonic()
            await create()
            accepted = time.monotonic() - began
            deadline = began + self.options.timeout
            until = jobs.seen["running" if self.options.fill else "complete"]
            while len(until) < count and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.0 if name == "berth" else 1.0)  # the last status, events, removals
            spent = measure.spent(cpu, measure.stack_cpu(self.stack))
            written = measure.writes_between(writes, await measure.api_writes(self.endpoints.kubeconfig()))
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        moments = {step: sorted(at - began for at in jobs.seen[step].values()) for step in STEPS}
        self.report.note(
            {
                name: {
                    "count": count,
                    "accepted_seconds": round(accepted, 2),
                    "steps": {
                        step: {
                            "count": len(at),
                            "seconds": round(at[-1], 2) if at else None,
                            "p50": round(percentile(at, 0.5), 2) if at else None,
                            "per_second": round(len(at) / at[-1], 1) if at else None,
                        }
                        for step, at in moments.items()
                    },
                    "api_writes_per_object": round(sum(written.values()) / count, 2),
                    "api_writes_by_kind": written,
                    "cpu_seconds": spent,
                    "cpu_milliseconds_per_object": round(1000 * sum(spent.values()) / count, 1),
                }
            }
        )

    async def _remove(self, kube: KubeClient) -> None:
        """Clears the bare Jobs away, so that both rounds begin alike."""
        jobs, _ = await kube.list(JOBS, BARE, metadata_only=True)
        await cluster.each(jobs, lambda job: kube.delete(JOBS, job["metadata"]["name"], BARE))
        deadline = time.monotonic() + self.options.timeout
        while (await kube.list(PODS, BARE, metadata_only=True))[0] and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
        await asyncio.sleep(3.0)

    async def _until_ended(self, kube: KubeClient, count: int) -> None:
        deadline = time.monotonic() + 120
        ended = 0
        while ended < count and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            items, _ = await kube.list(GPUWORKLOADS, BERTH)
            ended = sum((item.get("status") or {}).get("phase") in TOMBSTONES for item in items)
        self.report.note({"ended": ended})
        if ended < count:
            progress(f"only {ended} of {count} workloads have ended")

    # ---- the report

    def _ratios(self) -> None:
        report, berth = self.report, self.report.values["berth"]
        bare = self.report.values.get("bare")
        for step in STEPS[:2] if self.options.fill else STEPS:
            mine = berth["steps"][step]
            note = f"{mine['count']:,} in {mine['seconds']} s"
            if bare and mine["per_second"]:
                theirs = bare["steps"][step]["per_second"]
                ratio = round(mine["per_second"] / theirs, 3)
                report.note({f"ratio_{step}": ratio})
                note += f"; bare Jobs {theirs}/s, ratio {ratio:.2f}"
            report.row(f"Jobs {step} per second", f"{mine['per_second']}", note)
        for key, name in (
            ("api_writes_per_object", "API writes a workload"),
            ("cpu_milliseconds_per_object", "CPU ms a workload"),
        ):
            note = "of all processes of the stack" + (f"; a bare Job: {bare[key]}" if bare else "")
            report.row(name, str(berth[key]), note)

    def _histories(self, found: measure.Histories) -> None:
        count = max(1, len(found.events))
        values = {
            "workflows": found.workflows,
            "still_open": found.still_open,
            "events_mean": round(sum(found.events) / count, 2),
            "events_max": max(found.events, default=0),
            "bytes_mean": round(sum(found.size) / count),
            "ledger_events_per_workload": round(found.ledger_events / self.options.workloads, 2),
            "ledger_events": found.ledger_events,
            "ledger_bytes": found.ledger_bytes,
            "ledger_runs": found.ledger_runs,
        }
        self.report.note({"histories": values})
        self.report.row("history events", f"{values['events_mean']}", f"of its own; at most {values['events_max']}")
        self.report.row("", f"{values['ledger_events_per_workload']}", "of the shared ledger, a workload")


def main() -> None:
    """Entry point."""
    parser = arguments("admission", "workloads/s from create to Job created, and what each costs")
    parser.add_argument("--nodes", type=int, default=200, help="simulated nodes of 8 GPUs each (200)")
    parser.add_argument("--workloads", type=int, default=1000, help="one GPU each (1000)")
    parser.add_argument("--run-seconds", type=float, default=5.0, help="simulated run time (5)")
    parser.add_argument("--no-bare", action="store_true", help="without the comparison")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each of the two rounds")
    data_argument(parser)
    parser.add_argument("--scale", action="store_true", help="1,000 nodes, 5,000 workloads, no comparison: memory")
    parser.add_argument(
        "--fill", action="store_true", help="500 nodes, 4,000 workloads that go on running: KAI's shape"
    )
    options = parser.parse_args()
    if options.fill:
        options.run_seconds = 7200.0
    if options.scale:
        options.nodes, options.workloads, options.no_bare, options.timeout = 1000, 5000, True, 3600.0
    title = f"admission: {options.workloads:,} workloads on {options.nodes:,} kwok nodes"
    report = Report(title)
    with own_stack("admission", options.data) as (stack, endpoints):
        asyncio.run(Bench(stack, endpoints, options, report).run())
    report.finish(options.json)


if __name__ == "__main__":
    main()
