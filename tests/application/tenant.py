"""What a test of the deployed system does in a namespace of its own, and how it waits for what should happen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import placement_id, workload_id
from berth.process import ProcessOptions, connect_temporal
from crds.gpuworkload import API_VERSION, KIND
from kube.client import KubeClient
from kube.errors import NotFound
from kube.reflector import Change, Reflector
from kube.resources import EVENTS, GPUWORKLOADS, JOBS, NAMESPACES, NODES, PODS
from planning.naming import WORKLOAD_LABEL
from stack import SimulatedNode, Stack, node_manifest


@dataclass
class Tenant:
    """A namespace with nodes of its own, and what a test does there. Nodes are chosen by the label `pool`."""

    stack: Stack
    kube: KubeClient
    temporal: Client
    namespace: str

    async def node(
        self, name: str, gpus: int, *, kubelet: bool = True, offers: Mapping[str, int] | None = None, **labels: str
    ) -> str:
        """A simulated node. One without `kubelet` does nothing with its pods: the test does, by `play`; and it can be
        used at once, for the taint that every node is born with is gone.

        `offers`: resources beside its GPUs, which are NVIDIA's.
        """
        full = f"{self.namespace}-{name}"
        manifest = node_manifest(SimulatedNode(full, gpus=gpus, labels={"pool": self.namespace, **labels}))
        for told in ("allocatable", "capacity"):
            manifest["status"][told] |= {resource: str(count) for resource, count in (offers or {}).items()}
        if not kubelet:
            del manifest["metadata"]["annotations"]
            manifest["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        await self.kube.create(NODES, manifest)
        if not kubelet:
            await self.usable(full)
        return full

    async def usable(self, node: str) -> None:
        """Waits until the taint that every node is born with is gone."""

        async def untainted() -> bool:
            return not (await self.kube.get(NODES, node))["spec"].get("taints")

        await eventually(untainted, 20, lambda: f"node {node} keeps its taints")

    async def play(self, workload: str, phase: str, **conditions: bool) -> None:
        """Says of the workload's pod what a kubelet would say, on a node without one."""
        told = [{"type": kind, "status": str(holds)} for kind, holds in conditions.items()]
        body = {"status": {"phase": phase, "conditions": told}}
        await self.kube.merge_patch(PODS, await self.pod(workload), self.namespace, body, subresource="status")

    async def apply(
        self, name: str, gpus: int = 1, *, run: str = "1s", exit_code: int = 0, **spec: Any
    ) -> dict[str, Any]:
        """Creates a GPUWorkload for this tenant's nodes; it runs for `run` and ends with `exit_code` (simulated)."""
        body: dict[str, Any] = {"modelName": "m", "gpuCount": gpus, "nodeSelector": {"pool": self.namespace}}
        if "template" not in spec and "env" not in spec:
            body["env"] = [
                {"name": "SIMULATED_RUN", "value": run},
                {"name": "SIMULATED_EXIT", "value": str(exit_code)},
            ]
        body |= spec
        return await self.kube.create(
            GPUWORKLOADS,
            {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": body},
            self.namespace,
        )

    async def patch(self, name: str, **spec: Any) -> None:
        await self.kube.merge_patch(GPUWORKLOADS, name, self.namespace, {"spec": spec})

    async def get(self, name: str) -> dict[str, Any]:
        return await self.kube.get(GPUWORKLOADS, name, self.namespace)

    async def delete(self, name: str) -> None:
        await self.kube.delete(GPUWORKLOADS, name, self.namespace)

    async def until(self, name: str, seconds: float = 30.0, **wanted: Any) -> dict[str, Any]:
        """The workload once its status has all of `wanted`; a value may be a set of which one must hold."""
        raw: dict[str, Any] = {}

        async def holds() -> bool:
            nonlocal raw
            raw = await self.get(name)
            status = raw.get("status", {})
            return all(
                status.get(key) in value if isinstance(value, set) else status.get(key) == value
                for key, value in wanted.items()
            )

        await eventually(holds, seconds, lambda: f"{name} should show {wanted}; it shows {raw.get('status')}")
        return raw

    async def until_gone(self, name: str, seconds: float = 30.0) -> None:
        async def gone() -> bool:
            try:
                await self.get(name)
            except NotFound:
                return True
            return False

        await eventually(gone, seconds, lambda: f"{name} is still there")

    @contextlib.asynccontextmanager
    async def phases(self) -> AsyncIterator[dict[str, list[str]]]:
        """Every phase that the tenant's workloads show from here on, in order and without repetition, by name."""
        shown: dict[str, list[str]] = {}

        def note(change: Change[tuple[str, str]]) -> None:
            name, phase = change.new or ("", "")
            if phase and shown.setdefault(name, [])[-1:] != [phase]:
                shown[name].append(phase)

        reflector: Reflector[tuple[str, str]] = Reflector(
            self.kube,
            GPUWORKLOADS,
            namespace=self.namespace,
            project=lambda raw: (raw["metadata"]["name"], raw.get("status", {}).get("phase", "")),
            on_change=note,
        )
        watching = asyncio.create_task(reflector.run())
        try:
            await reflector.synced.wait()
            yield shown
        finally:
            watching.cancel()

    async def jobs(self) -> list[dict[str, Any]]:
        return (await self.kube.list(JOBS, self.namespace))[0]

    async def pods(self) -> list[dict[str, Any]]:
        return (await self.kube.list(PODS, self.namespace))[0]

    async def pod(self, workload: str) -> str:
        """The name of the workload's only pod."""
        (pod,) = [p for p in await self.pods() if p["metadata"]["labels"].get(WORKLOAD_LABEL) == workload]
        return str(pod["metadata"]["name"])

    async def empty(self, seconds: float = 90.0) -> None:
        """Waits until neither Jobs nor pods are left in the namespace. What belonged to a workload that had ended is
        left to Kubernetes' garbage collector, which looks for new kinds every half minute.
        """

        async def nothing() -> bool:
            return not await self.jobs() and not await self.pods()

        await eventually(nothing, seconds, lambda: "Jobs or pods are left")

    async def leave(self) -> None:
        """Deletes its workloads and its nodes: a failed test must not hand its load to the next one."""
        for workload in (await self.kube.list(GPUWORKLOADS, self.namespace))[0]:
            with contextlib.suppress(NotFound):
                await self.delete(workload["metadata"]["name"])
        for node in (await self.kube.list(NODES, label_selector=f"pool={self.namespace}"))[0]:
            await self.kube.delete(NODES, node["metadata"]["name"])

    async def evict(self, workload: str) -> None:
        """Evicts the workload's pod, as a drain does."""
        name = await self.pod(workload)
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        await asyncio.to_thread(self.stack.kubectl, "create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    async def followed(self, uid: str) -> bool:
        """Whether the workload's own workflow is open."""
        try:
            described = await self.temporal.get_workflow_handle(workload_id(uid)).describe()
        except RPCError as missing:
            if missing.status != RPCStatusCode.NOT_FOUND:
                raise
            return False
        return described.status == WorkflowExecutionStatus.RUNNING

    async def history(self, uid: str) -> list[str]:
        """The event types of the workload's workflow, once that has ended (a moment after the status says so); none if
        it never had one.
        """
        handle = self.temporal.get_workflow_handle(workload_id(uid))
        try:
            async with asyncio.timeout(10):
                await handle.result()
        except RPCError as missing:
            if missing.status != RPCStatusCode.NOT_FOUND:
                raise
            return []
        return [type_name(event.event_type) async for event in handle.fetch_history_events()]

    async def completions(self) -> set[str]:
        """UIDs of the workloads that the ledger ended, as its history has them."""
        ended: set[str] = set()
        async for event in self.temporal.get_workflow_handle(placement_id("default")).fetch_history_events():
            for payload in event.activity_task_completed_event_attributes.result.payloads:
                found = json.loads(payload.data)
                if isinstance(found, dict) and "decision" in found:
                    ended |= {each["uid"] for each in found["decision"]["completions"]}
        return ended

    async def events(self, name: str) -> list[dict[str, Any]]:
        items, _ = await self.kube.list(EVENTS, self.namespace)
        return [e for e in items if e.get("regarding", {}).get("name") == name and e["regarding"]["kind"] == KIND]


@contextlib.asynccontextmanager
async def tenancy(stack: Stack, name: str) -> AsyncIterator[Tenant]:
    """A tenant whose namespace is called after `name`, on a stack where berth is installed."""
    endpoints = stack.endpoints
    temporal = await connect_temporal(
        ProcessOptions(temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace)
    )
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    namespace = f"{words[:40].strip('-')}-{zlib.crc32(words.encode()):08x}"
    async with await KubeClient.connect(endpoints.kubeconfig("admin")) as kube:
        await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        yield Tenant(stack, kube, temporal, namespace)


def type_name(number: EventType.ValueType) -> str:
    return EventType.Name(number).removeprefix("EVENT_TYPE_")


def condition(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in raw.get("status", {}).get("conditions", []) if c["type"] == kind), {})


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float, explain: Callable[[], str]) -> None:
    """Waits on a condition with a deadline; says what was still wrong when it passes."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not await check():
        if asyncio.get_running_loop().time() > deadline:
            pytest.fail(f"after {seconds:.0f} s: {explain()}")
        await asyncio.sleep(0.2)
