"""berth's side: Temporal, controller and worker as the embedded stack runs them, on a control plane like the peer's,
with static nodes large enough that quotas bind and capacity never does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from temporalio.client import Client

from benchmarks.kueue.control_plane import ControlPlane, control_plane
from benchmarks.kueue.load import Load, quotas
from benchmarks.kueue.outcome import Outcome, Usage
from benchmarks.kueue.runner import Runner
from benchmarks.report import progress
from berth.cli.application import after_up, application_processes
from berth.demo import cluster, measure
from kube.client import KubeClient
from kube.resources import GPUQUOTAS, NAMESPACES, NODES
from stack import (
    Endpoints,
    ExistingCluster,
    Lines,
    ProcessSpec,
    SimulatedNode,
    Stack,
    StackError,
    UpOptions,
    node_manifest,
)
from stack.tools import Toolbox

NODE_COUNT = 120
DECIDING = frozenset({"temporal", "controller", "worker"})


@dataclass(frozen=True, slots=True)
class Details:
    """What only berth's side has. Seconds from the first creation: `admitted` and `ended` of the last workload."""

    admitted: float
    ended: float
    taken_back: int
    histories: measure.Histories


@dataclass(frozen=True, slots=True)
class Asked:
    """`limited`: berth creates Jobs at the rate of the peer's client."""

    load: Load
    limited: bool
    quotas: bool
    timeout: float


def run(asked: Asked, folder: Path) -> tuple[Outcome, Details]:
    """One run in `folder`, on a stack of its own."""
    programs = {name: found.path for name, found in Toolbox().ensure(("etcd", "kube-apiserver"), Lines()).items()}
    with control_plane(folder / "control-plane", programs) as plane:
        stack = Stack(folder / "stack")
        up = UpOptions(cluster=ExistingCluster(plane.kubeconfig), temporal_ui=False, end_with_caller=True)

        def processes(endpoints: Endpoints) -> list[ProcessSpec]:
            specs = application_processes(endpoints, up)
            return [_limited(spec) if asked.limited and spec.name == "worker" else spec for spec in specs]

        try:
            endpoints = stack.up(up, Lines(), processes, after_up)
            return asyncio.run(_measure(asked, stack, endpoints, plane))
        finally:
            stack.down()


def _limited(worker: ProcessSpec) -> ProcessSpec:
    """The same process with the same options, from another module."""
    options = worker.argv[worker.argv.index("worker") + 1 :]
    return replace(worker, argv=(sys.executable, "-m", "benchmarks.kueue.limited_worker", *options))


async def _measure(asked: Asked, stack: Stack, endpoints: Endpoints, plane: ControlPlane) -> tuple[Outcome, Details]:
    async with await KubeClient.connect(plane.kubeconfig, user_agent="berth-benchmark") as kube:
        await _prepare(kube, asked)
        runner = Runner(kube, asked.load, preemptible=asked.quotas)
        usage = Usage(lambda: _processes(stack, plane), DECIDING)
        usage.sample()
        before = await measure.api_writes(plane.kubeconfig)
        sampling = asyncio.create_task(usage.run())
        try:
            await runner.run(asked.timeout)
        except TimeoutError:
            raise StackError(
                f"After {asked.timeout:.0f} s only {len(runner.done):,} of {asked.load.workloads:,} were done.",
                "Give it longer (--timeout) or less to do (--scale).",
            ) from None
        finally:
            usage.sample()
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
        after = await measure.api_writes(plane.kubeconfig)
    began = min(runner.created.values())
    outcome = Outcome(
        workloads=asked.load.workloads,
        wall=max(runner.done.values()) - began,
        admission=runner.admission(),
        writes=measure.writes_between(before, after),
        cpu=usage.cpu,
        memory=usage.memory,
        durable_memory=usage.together,
        evictions=runner.taken_back,
    )
    progress("reading histories …")
    temporal = await Client.connect(endpoints.temporal_address, namespace=endpoints.temporal_namespace)
    return outcome, Details(
        admitted=max(runner.admitted.values()) - began,
        ended=max(runner.ended.values()) - began,
        taken_back=runner.taken_back,
        histories=await measure.histories(temporal, None, asked.load.workloads, timeout=120.0),
    )


def _processes(stack: Stack, plane: ControlPlane) -> Mapping[str, int]:
    own = {status.name: status.pid for status in stack.status() if status.pid is not None}
    return {**plane.processes, **own, "runner": os.getpid()}


async def _prepare(kube: KubeClient, asked: Asked) -> None:
    """Namespaces, quotas if wanted, and nodes that stay as they are, since nobody looks after them."""
    namespaces = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in asked.load.namespaces
    ]
    await cluster.create_all(kube, NAMESPACES, namespaces)
    if asked.quotas:
        await cluster.create_all(kube, GPUQUOTAS, quotas(asked.load))
    nodes = [static_node(f"static-{number:03d}") for number in range(NODE_COUNT)]
    await cluster.create_all(kube, NODES, nodes)
    # The API server taints every new node as not ready, and there is no controller-manager to see that it is.
    await cluster.each(
        nodes, lambda node: kube.merge_patch(NODES, node["metadata"]["name"], None, {"spec": {"taints": None}})
    )


def static_node(name: str) -> dict[str, Any]:
    """A node that is ready for ever, with more cores to a GPU than any workload wants."""
    node = node_manifest(SimulatedNode(name, gpus=8, gpu_model="simulated", cpu=256, memory=1024))
    node["status"]["conditions"] = [{"type": "Ready", "status": "True", "reason": "Pretended"}]
    return node
