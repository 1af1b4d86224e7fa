"""Rounds of placement on the openb trace, without any server, for whoever changes planning.

How long one round takes with many nodes and a long queue: while it drains, and when nothing fits any more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import Report, arguments
from berth.demo import trace
from berth.demo.cut import cut_nodes, holds
from berth.demo.manifests import MODEL_LABEL
from berth.demo.report import percentile
from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings
from planning import status
from planning.memory import Memory
from planning.model import (
    Assignment,
    Decision,
    Defaults,
    JobView,
    Ledger,
    NodeView,
    PodView,
    Resources,
    Snapshot,
    WorkloadView,
)
from planning.placement import decide
from workflows.placement import ROUND_LIMIT

MEBIBYTE = 1024 * 1024
NOW = 1_700_000_000.0


def node_view(node: trace.TraceNode) -> NodeView:
    """A node of the trace as the planner sees it."""
    return NodeView(
        name=node.name,
        uid=node.name,
        resource_version=1,
        ready=True,
        unschedulable=False,
        taints=(),
        labels={MODEL_LABEL: node.model, "kubernetes.io/hostname": node.name},
        allocatable=Resources(node.gpus, node.cpu_milli, node.memory_mib * MEBIBYTE, 110),
        gpu_models=(("", node.model),),
    )


def workload_view(number: int, pod: trace.TracePod, strategy: str | None = None) -> WorkloadView:
    """A pod of the trace as a queued workload; `number` makes it unique and orders the queue."""
    raw: dict[str, Any] = {
        "modelName": "openb",
        "gpuCount": pod.gpus,
        "image": "openb",
        "resources": {"requests": {"cpu": f"{pod.cpu_milli}m", "memory": f"{pod.memory_mib}Mi"}},
    }
    if strategy:
        raw["schedulingStrategy"] = strategy
    spec, wrong = GPUWorkloadSpec.parse(raw)
    if spec is None:
        raise ValueError(f"{pod.name}: {wrong}")
    name = f"w-{number:05d}"
    return WorkloadView(
        uid=f"{number:08x}-0000-4000-8000-000000000000",
        namespace="default",
        name=name,
        resource_version=number + 1,
        generation=1,
        created=NOW + number,
        spec=spec,
        finalizer=True,
    )


@dataclass
class Cluster:
    """A cluster on paper: what the planner decides becomes visible before the next round."""

    nodes: tuple[NodeView, ...]
    waiting: dict[str, WorkloadView]
    jobs: list[JobView]
    pods: list[PodView]
    placed: dict[str, WorkloadView]
    memory: Memory = field(default_factory=Memory)

    @classmethod
    def of(cls, nodes: Sequence[trace.TraceNode], workloads: Sequence[WorkloadView]) -> Cluster:
        return cls(tuple(map(node_view, nodes)), {view.uid: view for view in workloads}, [], [], {})

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(
            now=NOW + 1_000_000,
            nodes=self.nodes,
            pods=tuple(self.pods),
            jobs=tuple(self.jobs),
            workloads=(*self.waiting.values(), *self.placed.values()),
            defaults=Defaults("leastLoaded"),
        )

    def round(self, seed: int, limit: int = ROUND_LIMIT) -> tuple[Decision, float]:
        """One decision, applied; and the seconds that deciding took."""
        snapshot = self.snapshot
        began = time.perf_counter()
        decision = decide(snapshot, Ledger(), Settings(), limit=limit, seed=seed, memory=self.memory)
        took = time.perf_counter() - began
        for assignment in decision.assignments:
            self.placed[assignment.uid] = self.waiting.pop(assignment.uid)
            self.jobs.append(_job(assignment))
            self.pods.append(_pod(assignment))
        for entry in decision.waiting:
            view = self.waiting[entry.uid]
            told = status.waiting(view, entry, NOW)
            self.waiting[entry.uid] = replace(view, status=told or {})
        return decision, took

    @property
    def unallocated(self) -> int:
        """GPUs that no pod uses."""
        return sum(node.allocatable.gpus for node in self.nodes) - sum(pod.requests.gpus for pod in self.pods)


def _job(assignment: Assignment) -> JobView:
    return JobView(
        uid=f"job-{assignment.uid}",
        namespace=assignment.namespace,
        name=assignment.job_name,
        resource_version=1,
        workload_uid=assignment.uid,
        attempt=assignment.turn.attempt,
        retries=assignment.turn.retries,
        node=assignment.node,
        requests=assignment.requests,
        created=NOW,
        ready=True,
        counted=True,
    )


def _pod(assignment: Assignment) -> PodView:
    return PodView(
        uid=f"pod-{assignment.uid}",
        namespace=assignment.namespace,
        name=f"{assignment.job_name}-x",
        resource_version=1,
        node=assignment.node,
        requests=assignment.requests,
        workload_uid=assignment.uid,
        job_name=assignment.job_name,
        running=True,
    )


def rounds(found: trace.Trace, report: Report, options: argparse.Namespace) -> None:
    """How long deciding takes: while the queue drains onto empty nodes, and when nothing fits any more."""
    gpus = options.nodes * sum(node.gpus for node in found.nodes) // len(found.nodes)
    nodes = cut_nodes(found.nodes, gpus)
    fitting = [pod for pod in found.pods if any(holds(node, pod) for node in nodes)]
    drawn = random.Random(options.seed).choices(fitting, k=options.queued)
    cluster = Cluster.of(nodes, [workload_view(i, pod) for i, pod in enumerate(drawn)])
    times = []
    while True:
        decision, took = cluster.round(options.seed)
        times.append(took)
        if not decision.assignments and not decision.waiting:
            break
    placed = len(cluster.placed)
    deciding = sum(times)
    # Now the fleet is as full as it gets: as many again join the queue, and every poke costs such a round.
    more = random.Random(options.seed + 1).choices(fitting, k=options.queued)
    cluster.waiting |= {v.uid: v for v in (workload_view(options.queued + i, pod) for i, pod in enumerate(more))}
    while cluster.round(options.seed)[0].waiting:
        pass
    idle = [cluster.round(options.seed)[1] for _ in range(5)]
    report.note(
        {
            "rounds": {
                "nodes": len(nodes),
                "queued": options.queued,
                "limit": ROUND_LIMIT,
                "count": len(times),
                "placed": placed,
                "milliseconds_p50": round(1000 * percentile(times, 0.5), 1),
                "milliseconds_max": round(1000 * max(times), 1),
                "placements_per_second": round(placed / deciding),
                "full_queue": len(cluster.waiting),
                "full_milliseconds": round(1000 * statistics.median(idle), 1),
            }
        }
    )
    report.row(
        "a round", f"{1000 * percentile(times, 0.5):.0f} ms",
        f"median of {len(times)}, at most {1000 * max(times):.0f} ms; {len(nodes):,} nodes, {options.queued:,} queued, "
        f"{ROUND_LIMIT} places a round",
    )  # fmt: skip
    report.row("placements per second", f"{placed / deciding:,.0f}", f"{placed:,} in {deciding:.2f} s of deciding")
    report.row(
        "a round that finds no place", f"{1000 * statistics.median(idle):.0f} ms",
        f"{len(cluster.waiting):,} wait, their status tells it already",
    )  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = arguments("placement", "time of planning rounds")
    parser.add_argument("--nodes", type=int, default=1000, help="about how many nodes the rounds have (1000)")
    parser.add_argument("--queued", type=int, default=5000, help="workloads queued in the rounds (5000)")
    parser.add_argument("--seed", type=int, default=1, help="of the rounds' queue")
    options = parser.parse_args()
    report = Report("placement: the planner alone on openb")
    found = trace.load()
    rounds(found, report, options)
    report.finish(options.json)


if __name__ == "__main__":
    main()
