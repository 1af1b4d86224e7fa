"""Gangs: how soon one is told that it cannot run, or must wait, and how long a very large one takes to run.

For whoever changes the way of a gang, beside what KAI published for the same shapes (500 kwok nodes of 8 GPUs). Those
ran on another machine: the ratio tells of magnitudes. Moments are seen by watches, from the start of `kubectl apply`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.own_stack import data_argument, own_stack
from benchmarks.report import Report, arguments, progress
from berth.demo import cluster
from crds.gpuworkload import API_VERSION, KIND
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import GPUWORKLOADS, PODS
from planning.naming import WORKLOAD_LABEL
from stack import Endpoints, SimulatedNode, Stack

NAMESPACE = "bench-gangs"
ZONE = "topology.kubernetes.io/zone"
# Nodes of a zone: ten pods of eight GPUs each do not fit into one.
IN_A_ZONE = 8
# Seconds: a gang of 10 pods with 80 GPUs declared unschedulable, and one of 512 pods on 512 nodes. Source: KAI,
# docs/scale-tests/example-results.json at commit ab86e6c0.
PUBLISHED = {"verdict": 249.5, "start": 48.7}


def gang(name: str, pods: int, **spec: Any) -> dict[str, Any]:
    """Pods with 8 GPUs each."""
    body = {"modelName": "benchmark", "gpuCount": 8, "replicas": pods, "image": "simulated.invalid/bench", **spec}
    body["env"] = [{"name": "SIMULATED_RUN", "value": "3600s"}]
    return {
        "apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": body,
    }  # fmt: skip


def reason_of(raw: dict[str, Any]) -> tuple[str, str]:
    """The workload's name, and what its status says of its place: a reason, or its phase once it runs."""
    status = raw.get("status") or {}
    scheduled: dict[str, Any] = next((c for c in status.get("conditions") or () if c.get("type") == "Scheduled"), {})
    running = status.get("phase") == "Running"
    return raw["metadata"]["name"], "Running" if running else str(scheduled.get("reason", ""))


def member_of(raw: dict[str, Any]) -> tuple[str, bool, bool]:
    """The gang of a pod, whether it may be scheduled, and whether it runs."""
    lifted = not raw["spec"].get("schedulingGates")
    return raw["metadata"]["labels"].get(WORKLOAD_LABEL, ""), lifted, raw["status"].get("phase") == "Running"


@dataclass
class Bench:
    """One stack that is up, and what is measured on it."""

    stack: Stack
    endpoints: Endpoints
    options: argparse.Namespace
    report: Report
    told: dict[tuple[str, str], float] = field(default_factory=dict)  # the first moment, by workload and reason
    pods: dict[str, list[float]] = field(default_factory=dict)  # the moments of created, lifted and running pods

    async def run(self) -> None:
        options = self.options
        async with await KubeClient.connect(self.endpoints.kubeconfig(), user_agent="berth-benchmark") as kube:
            nodes = [
                SimulatedNode(f"bench-{i:04d}", gpus=8, labels={ZONE: f"zone-{i // IN_A_ZONE:03d}"})
                for i in range(options.nodes)
            ]
            progress(f"{len(nodes)} simulated nodes …")
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
            await cluster.prepare(kube, self.stack, [namespace], nodes)
            watches: list[Reflector[Any]] = [
                Reflector(kube, GPUWORKLOADS, project=reason_of, namespace=NAMESPACE, on_change=self._workload_changed),
                Reflector(kube, PODS, project=member_of, namespace=NAMESPACE, on_change=self._pod_changed),
            ]
            watching = [asyncio.create_task(each.run()) for each in watches]
            try:
                for each in watches:
                    await each.synced.wait()
                await self._verdicts("never", "NoSuitableNode", topology={"level": ZONE})
                await self._large()
                await self._verdicts("waits", "WaitingForCapacity")
            finally:
                for task in watching:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    async def _verdicts(self, name: str, reason: str, **spec: Any) -> None:
        """How soon gangs of 10 pods are told that reason, one after the other."""
        found, answered = [], []
        for i in range(self.options.repeat):
            full = f"{name}-{i}"
            began, taken = await self._apply(gang(full, 10, **spec))
            moment = await self._until(full, reason)
            found.append(moment - began)
            answered.append(max(0.0, moment - taken))
        seconds, published = median(found), PUBLISHED["verdict"]
        self.report.note({name: {"seconds": found, "after_the_answer": answered, "published": published}})
        title = "10 pods, 80 GPUs: " + ("it can never run" if name == "never" else "the fleet is full")
        self.report.row(
            title, f"{seconds:.2f} s", f"told {reason}; at most {max(found):.2f} s; KAI published {published} s"
        )
        self.report.row("", f"{median(answered):.2f} s", "of that after kubectl had its answer")

    async def _large(self) -> None:
        """How long a gang with a pod for each node takes to run."""
        count, name = self.options.nodes, "large"
        progress(f"a gang of {count} pods …")
        self.pods = {"created": [], "lifted": [], "running": []}
        began, _ = await self._apply(gang(name, count))
        running = await self._until(name, "Running") - began
        values = {step: sorted(moment - began for moment in moments) for step, moments in self.pods.items()}
        self.report.note({name: {"pods": count, "seconds": running, **values, "published": PUBLISHED["start"]}})
        ratio = PUBLISHED["start"] / running
        self.report.row(
            f"{count} pods on {count} nodes", f"{running:.1f} s",
            f"until Running is told; KAI published {PUBLISHED['start']} s for 512: {ratio:.1f} times as fast",
        )  # fmt: skip
        for step in ("created", "lifted", "running"):
            self.report.row("", f"{values[step][-1]:.1f} s", f"until all pods are {step}")

    async def _apply(self, body: dict[str, Any]) -> tuple[float, float]:
        """When kubectl began, and when it had its answer."""
        began = time.monotonic()
        await asyncio.to_thread(self.stack.kubectl, "apply", "-f", "-", stdin=json.dumps(body))
        return began, time.monotonic()

    async def _until(self, name: str, reason: str) -> float:
        """The moment at which it was told so."""
        deadline = time.monotonic() + self.options.timeout
        while (found := self.told.get((name, reason))) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing was told within {self.options.timeout:.0f} s; so far: {self.told}")
            await asyncio.sleep(0.01)
        return found

    def _workload_changed(self, change: Change[tuple[str, str]]) -> None:
        if change.new is not None:
            self.told.setdefault(change.new, time.monotonic())

    def _pod_changed(self, change: Change[tuple[str, bool, bool]]) -> None:
        if change.new is None or not self.pods:
            return
        _, lifted, running = change.new
        _, was_lifted, ran = change.old or ("", False, False)
        news = {"created": change.old is None, "lifted": lifted and not was_lifted, "running": running and not ran}
        for step in (step for step, holds in news.items() if holds):
            self.pods[step].append(time.monotonic())


def main() -> None:
    """Entry point."""
    parser = arguments("gangs", "seconds until a gang is told that it cannot run, and until a large one runs")
    parser.add_argument(
        "--nodes", type=int, default=512, help="simulated nodes of 8 GPUs each, and the large gang's pods"
    )
    parser.add_argument("--repeat", type=int, default=5, help="gangs that cannot run (5)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each of the steps")
    data_argument(parser)
    options = parser.parse_args()
    report = Report(f"gangs on {options.nodes:,} kwok nodes")
    with own_stack("gangs", options.data) as (stack, endpoints):
        asyncio.run(Bench(stack, endpoints, options, report).run())
    report.finish(options.json)


if __name__ == "__main__":
    main()
