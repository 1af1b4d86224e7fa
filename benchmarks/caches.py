"""Kernel caches: seconds until all are Ready on all nodes, and until a new digest of one is rolled out; and what each
node of each cache costs in history events, API writes, CPU and memory.

For whoever changes the way from a TritonKernelCache to its nodes. Temporal, API server, registry, controller and worker
are real; the nodes are simulated agents (`cache_agents`) that answer at once. Beside it, in the same run, the nodes'
own writes alone, with nobody deciding anything. It asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from benchmarks.cache_agents import SimulatedAgent, push, register, registry, serving, write
from benchmarks.own_stack import Memory, data_argument, own_stack
from benchmarks.report import Report, arguments, progress
from berth.demo import cluster, measure
from berth.demo.report import percentile
from berth.process import ProcessOptions, connect_temporal
from crds.kernelcache import API_VERSION, KIND
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import TRITONKERNELCACHES
from planning.caches.orders import CacheRef, cache_id
from stack import Endpoints, Lines, SimulatedNode, Stack
from stack.tools import Toolbox

NAMESPACE, BARE = "bench-caches", "bench-bare"
BUDGET = 20  # history events of a ready cache for each of its nodes: the design's own
AGENTS = "simulated agents (the benchmark itself)"


@dataclass(frozen=True, slots=True)
class News:
    """What counts of a cache: whether it is Ready, the digest that all its nodes have, and on how many it is ready."""

    name: str
    uid: str
    ready: bool
    good: str
    nodes: int


def news_of(raw: dict[str, Any]) -> News:
    """From the object."""
    meta, status = raw["metadata"], raw.get("status") or {}
    conditions = status.get("conditions") or ()
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
    count = (status.get("counts") or {}).get("ready", 0)
    return News(meta["name"], meta["uid"], ready, status.get("lastKnownGoodDigest", ""), count)


def cache(name: str, image: str) -> dict[str, Any]:
    """As a person would write it."""
    spec = {"ociImage": {"image": image}, "updatePolicy": {"maxUnavailable": "10%"}}
    return {
        "apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Events:
    """History events: of each workflow of a cache on a node (a run each), and of each cache's own by UID."""

    on_nodes: tuple[int, ...]
    own: dict[str, int]

    def a_node(self, nodes: int) -> float:
        """Of both together, for each cache on each node."""
        return mean(self.on_nodes) + mean(self.own.values()) / nodes


def verdict(events: float) -> str:
    """Whether the design's budget holds."""
    return f"within the budget of {BUDGET}" if events <= BUDGET else f"MORE than the budget of {BUDGET}"


@dataclass
class Bench:
    """One stack that is up, and what is measured on it."""

    stack: Stack
    endpoints: Endpoints
    host: str  # the registry's
    options: argparse.Namespace
    report: Report
    found: dict[str, News] = field(default_factory=dict)
    moments: dict[str, float] = field(default_factory=dict)  # when each cache was Ready first

    async def run(self) -> None:
        options = self.options
        names = [f"cache-{i:03d}" for i in range(options.caches)]
        images = {name: f"{self.host}/bench/{name}:v1" for name in names}
        nodes = [f"bench-{i:03d}" for i in range(options.nodes)]
        temporal = await self._temporal()
        async with await KubeClient.connect(self.endpoints.kubeconfig(), user_agent="berth-benchmark") as kube:
            progress(f"{len(nodes)} simulated nodes, {len(names)} images …")
            spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in (NAMESPACE, BARE)]
            await cluster.prepare(kube, self.stack, spaces, [SimulatedNode(node, gpus=8) for node in nodes])
            await cluster.each(nodes, lambda node: register(kube, node))
            await push(self.host, images.values())
            agents, memory = [SimulatedAgent(node, kube) for node in nodes], Memory(self.stack)
            workers = [agent.worker(temporal) for agent in agents]
            async with serving(workers), self._watching(kube), memory.sampled():
                await self._ready([cache(name, image) for name, image in images.items()])
                before = await self._events(temporal, len(names) * len(nodes))
                await self._tell_events(temporal, before)
                await self._rollout(kube, temporal, names[0], before)
            self.report.note({"orders": sum(agent.orders for agent in agents)})
            await self._bare(kube, nodes)
        memory.tell(self.report)

    async def _temporal(self) -> Client:
        found = self.endpoints
        options = ProcessOptions(
            temporal_address=found.temporal_address, temporal_namespace=found.temporal_namespace
        )  # fmt: skip
        return await connect_temporal(options, lazy=False)

    # ---- what is measured

    async def _ready(self, bodies: Sequence[dict[str, Any]]) -> None:
        """All caches from nothing to Ready on all nodes."""
        progress(f"{len(bodies)} caches …")
        async with self._costs("ready", len(bodies) * self.options.nodes):
            began = time.monotonic()
            items = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
            await asyncio.to_thread(self.stack.kubectl, "apply", "-f", "-", stdin=items)
            applied = time.monotonic()
            await self._until(lambda: len(self.moments) == len(bodies), "all caches are Ready")
            await self._until(self._settled, "every cache has every node")
        at = sorted(moment - applied for moment in self.moments.values())
        values = {"seconds": round(at[-1], 2), "p50": round(percentile(at, 0.5), 2)}
        values["seconds_of_kubectl"] = round(applied - began, 2)
        self.report.note({"ready_seconds": values})
        pairs = len(bodies) * self.options.nodes
        self.report.row(
            "all caches Ready", f"{values['seconds']} s", f"after the last apply; half by {values['p50']} s"
        )
        self.report.row("", f"{pairs / at[-1]:.0f}", "nodes of caches per second")
        self._tell_costs("ready")

    async def _rollout(self, kube: KubeClient, temporal: Client, name: str, before: Events) -> None:
        """A new digest of one cache, with at most a tenth of the nodes without one at a time."""
        progress("a new digest for one of them …")
        image, nodes = f"{self.host}/bench/{name}:v2", self.options.nodes
        digest = (await push(self.host, [image]))[image]
        async with self._costs("rollout", nodes):
            began = time.monotonic()
            await kube.merge_patch(TRITONKERNELCACHES, name, NAMESPACE, {"spec": {"ociImage": {"image": image}}})
            await self._until(lambda: self.found[name].ready and self.found[name].good == digest, "it is rolled out")
            seconds = time.monotonic() - began
        after = await self._events(temporal, len(before.on_nodes) + nodes)
        uid = self.found[name].uid
        on_nodes, own = sum(after.on_nodes) - sum(before.on_nodes), after.own[uid] - before.own[uid]
        each = (on_nodes + own) / nodes
        self.report.note(
            {"rollout": {"seconds": round(seconds, 2), "events_of_nodes": on_nodes, "events_own": own,
                         "events_a_node": round(each, 2)}}
        )  # fmt: skip
        self.report.row(f"new digest on {nodes} nodes", f"{seconds:.1f} s", "of one cache, maxUnavailable 10%")
        self.report.row("", f"{each:.1f}", f"history events a node: {own} of the cache's own, {on_nodes} of its nodes")
        self._tell_costs("rollout")

    async def _bare(self, kube: KubeClient, nodes: Sequence[str]) -> None:
        """The peer: the same objects of nodes, written by nobody's order, as fast as one client does."""
        progress("the nodes' own writes alone …")
        refs = [CacheRef("TritonKernelCache", BARE, name, news.uid) for name, news in self.found.items()]
        pairs = [(ref, node) for ref in refs for node in nodes]
        async with self._costs("bare", len(pairs)):
            began = time.monotonic()
            digest = "sha256:" + 64 * "0"
            await cluster.each(pairs, lambda pair: write(kube, *pair, digest, 1, new=True))
            seconds = time.monotonic() - began
        ratio = self.report.values["ready_seconds"]["seconds"] / seconds
        self.report.note({"bare_seconds": round(seconds, 2), "ratio_ready_to_bare": round(ratio, 2)})
        self.report.row(
            "the nodes' writes alone", f"{seconds:.1f} s", f"nobody decides; berth takes {ratio:.1f} × that"
        )
        self._tell_costs("bare")

    async def _events(self, temporal: Client, expected: int) -> Events:
        """Once Temporal lists so many ended workflows of nodes; its list is some moments late."""
        runs: dict[str, int] = {}
        deadline = time.monotonic() + 60
        while len(runs) < expected:
            if time.monotonic() > deadline:
                raise SystemExit(f"Temporal lists {len(runs)} ended workflows of nodes, but {expected} should have.")
            await asyncio.sleep(0.5)
            listed = temporal.list_workflows('BerthKind = "NodeKernelCache"', page_size=1000)
            runs = {run.run_id: run.history_length async for run in listed if run.close_time is not None}
        own = {news.uid: await self._own(temporal, news.uid) for news in self.found.values()}
        return Events(tuple(runs.values()), own)

    async def _own(self, temporal: Client, uid: str) -> int:
        """Events of all runs of a cache's workflow: of those that go on the server itself is asked."""
        count = 0
        async for run in temporal.list_workflows(f'WorkflowId = "{cache_id(uid)}"'):
            handle = temporal.get_workflow_handle(run.id, run_id=run.run_id)
            count += (await handle.describe()).history_length
        return count

    async def _tell_events(self, temporal: Client, events: Events) -> None:
        nodes = self.options.nodes
        own, total = list(events.own.values()), events.a_node(nodes)
        first = next(iter(self.found.values())).uid
        history = temporal.get_workflow_handle(cache_id(first)).fetch_history_events()
        kinds = Counter([EventType.Name(each.event_type).removeprefix("EVENT_TYPE_") async for each in history])
        self.report.note(
            {"events": {"of_nodes_mean": round(mean(events.on_nodes), 2), "of_nodes_max": max(events.on_nodes),
                        "own_mean": round(mean(own), 1), "own_max": max(own), "a_node": round(total, 2),
                        "budget": BUDGET, "kept": total <= BUDGET, "first_cache_by_type": dict(kinds.most_common())}}
        )  # fmt: skip
        self.report.row("history events", f"{total:.2f}", f"for each cache on each node: {verdict(total)}")
        self.report.row("", f"{mean(events.on_nodes):.2f}", f"of the node's workflow; at most {max(events.on_nodes)}")
        self.report.row(
            "", f"{mean(own) / nodes:.2f}", f"of the cache's own ({mean(own):.0f}, at most {max(own)}), by nodes"
        )

    # ---- how it is measured

    @asynccontextmanager
    async def _watching(self, kube: KubeClient) -> AsyncIterator[None]:
        """Caches are watched within the block."""
        reflector: Reflector[News] = Reflector(
            kube, TRITONKERNELCACHES, project=news_of, namespace=NAMESPACE, on_change=self._changed
        )
        watching = asyncio.create_task(reflector.run())
        try:
            await reflector.synced.wait()
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    def _changed(self, change: Change[News]) -> None:
        if change.new is not None:
            self.found[change.new.name] = change.new
            if change.new.ready:
                self.moments.setdefault(change.new.name, time.monotonic())

    def _settled(self) -> bool:
        return all(each.good and each.nodes == self.options.nodes for each in self.found.values())

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.options.timeout
        told = time.monotonic()
        while not holds():
            if time.monotonic() > deadline:
                ready = f"{len(self.moments)} of {self.options.caches} caches have been Ready"
                raise SystemExit(f"Waited {self.options.timeout:.0f} s in vain until {what}: {ready}.")
            if time.monotonic() - told > 20:
                told = time.monotonic()
                done = sum(each.nodes for each in self.found.values())
                progress(f"{len(self.moments)} caches Ready, {done} nodes told of")
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def _costs(self, name: str, pairs: int) -> AsyncIterator[None]:
        """What the block costs for each of so many nodes of caches, with the last writes that follow it."""
        kubeconfig = self.endpoints.kubeconfig()
        writes, cpu = await measure.api_writes(kubeconfig), self._cpu()
        yield
        await asyncio.sleep(3.0)  # the last status, and Events
        spent = measure.spent(cpu, self._cpu())
        written = measure.writes_between(writes, await measure.api_writes(kubeconfig))
        self.report.note(
            {f"{name}_costs": {"api_writes_a_node": round(sum(written.values()) / pairs, 2),
                               "api_writes_by_kind": written, "cpu_seconds": spent,
                               "cpu_milliseconds_a_node": round(1000 * sum(spent.values()) / pairs, 1)}}
        )  # fmt: skip

    def _cpu(self) -> dict[str, float]:
        return {**measure.stack_cpu(self.stack), AGENTS: measure.cpu_seconds(os.getpid())}

    def _tell_costs(self, name: str) -> None:
        costs = self.report.values[f"{name}_costs"]
        self.report.row("", f"{costs['api_writes_a_node']}", "API writes for each cache on each node")
        most = [f"{who} {seconds:.1f}" for who, seconds in costs["cpu_seconds"].items() if seconds >= 0.1]
        self.report.row("", f"{costs['cpu_milliseconds_a_node']} ms", f"of CPU; in seconds: {', '.join(most)}")


def main() -> None:
    """Entry point."""
    parser = arguments("caches", "seconds until kernel caches are Ready on all (simulated) nodes, and what each costs")
    parser.add_argument("--caches", type=int, default=100, help="caches, each for all nodes (100)")
    parser.add_argument("--nodes", type=int, default=100, help="nodes with a simulated agent each (100)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each of the steps")
    data_argument(parser)
    options = parser.parse_args()
    report = Report(f"{options.caches} kernel caches on {options.nodes} nodes with simulated agents")
    program = Toolbox().ensure(["registry-referrers"], Lines())["registry-referrers"].path
    with registry(program) as host:
        settings = {"registries": {"insecure": [host]}}
        with own_stack("caches", options.data, settings) as (stack, endpoints):
            asyncio.run(Bench(stack, endpoints, host, options, report).run())
    report.finish(options.json)


if __name__ == "__main__":
    main()
