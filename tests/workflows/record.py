"""Records the histories that test_replay.py replays: `python -m tests.workflows.record`, on stacks of their own; with
names of plays (scenarios, provisioning, kernel_caches, devices, seats, migrations, rebalancing) those alone.

Every scenario is played on the real control plane; what Temporal recorded is written to histories/, named after the
scenario and the build, so that histories of older builds stay and go on being replayed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHandle

from activities.cache_signatures import NodeState, node_attributes
from activities.device_signatures import devices_id
from activities.messages import placement_id, provisioning_id, workload_id
from activities.migration_signatures import migration_id, rebalancing_id
from activities.signatures import TASK_QUEUE
from benchmarks.cache_agents import register
from berth.cli.application import after_up, application_processes
from berth.process import ProcessOptions, connect_temporal
from berth.version import build_id
from crds.kernelcache import API_VERSION
from kube.client import KubeClient
from kube.resources import NAMESPACES, NODES, SEATMIGRATIONS, TRITONKERNELCACHES
from planning.caches.orders import (
    INVENTORY,
    NODE_WORKFLOW,
    Inventory,
    NodeTask,
    Report,
    cache_id,
    node_cache_id,
    node_id,
)
from planning.seats.orders import group_id
from stack import Endpoints, Lines, Stack, UpOptions
from tests.application.autoscaler import CLASS, SimulatedAutoscaler, install_kind
from tests.application.cache_nodes import SimulatedAgent, is_ready, serving
from tests.application.seat_nodes import simulated_seats
from tests.application.tenant import Tenant, condition, eventually
from tests.application.test_devices import COUNT, profile, says, seated, simulated, until_labels, until_ready_is
from tests.application.test_seat_migrations import order, shows, start
from tests.application.test_seat_rebalancing import rebalanced
from tests.application.test_seat_switches import NODE as SEATS_NODE
from tests.application.test_seat_switches import switching
from tests.nodeworkers.seats.simulated_node import GROUP

FOLDER = Path(__file__).parent / "histories"


async def scenarios(tenant: Tenant) -> dict[str, str]:
    """Plays them all; returns the workflow id of each."""
    await tenant.node("a", 2)
    ids: dict[str, str] = {}

    async def begin(scenario: str, name: str, gpus: int = 1, **spec: object) -> None:
        raw = await tenant.apply(name, gpus, **spec)  # type: ignore[arg-type]  # the scenario's own spec fields
        ids[scenario] = workload_id(raw["metadata"]["uid"])

    await tenant.apply("succeeded")  # of which the ledger alone tells
    await tenant.until("succeeded", phase="Succeeded")
    await begin("gpuworkload-retried", "retried", exit_code=3, retryPolicy={"maxRetries": 1, "backoffSeconds": 2})
    await tenant.until("retried", phase="Failed")
    await begin("gpuworkload-no-suitable-node", "impossible", gpus=8)
    await tenant.until("impossible", retryCount=1)
    await tenant.patch("impossible", gpuCount=1)
    await tenant.until("impossible", phase="Succeeded")
    await begin("gpuworkload-suspended", "suspended", run="4s")
    await tenant.until("suspended", phase="Running")
    await tenant.patch("suspended", suspend=True)
    await tenant.until("suspended", phase="Pending")
    await tenant.patch("suspended", suspend=False)
    await tenant.until("suspended", phase="Succeeded", seconds=60)
    await begin("gpuworkload-evicted", "evicted", run="4s")
    await tenant.until("evicted", phase="Running")
    await tenant.evict("evicted")
    await tenant.until("evicted", phase="Succeeded", seconds=60)
    await begin("gpuworkload-deleted", "deleted", run="60s")
    await tenant.until("deleted", phase="Running")
    await tenant.delete("deleted")
    await tenant.until_gone("deleted")
    await begin("gpuworkload-gang", "gang", replicas=2)
    await tenant.until("gang", phase="Succeeded")
    ids["placement-rounds"] = placement_id("default")
    return ids


PROVISIONING = {"className": CLASS, "waitSeconds": 1, "backoffSeconds": 1, "retries": 1}


async def provisioning(tenant: Tenant) -> dict[str, str]:
    """Orders of nodes, with the settings for them."""
    ids: dict[str, str] = {}

    async def begin(scenario: str, name: str, gpus: int) -> str:
        uid = str((await tenant.apply(name, gpus))["metadata"]["uid"])
        ids[scenario] = provisioning_id(uid)
        return uid

    async with SimulatedAutoscaler(tenant).running() as autoscaler:
        await begin("provisioning-used", "used", 1)
        first = await autoscaler.request(1)
        await autoscaler.says(first, "Provisioned")
        await autoscaler.says(first, "BookingExpired")
        await autoscaler.says(await autoscaler.request(2), "Provisioned")
        await autoscaler.offers(await autoscaler.node("a", 1), 1)
        await tenant.until("used", phase="Succeeded")
        await begin("provisioning-given-up", "given-up", 2)
        for number in (3, 4):
            await autoscaler.says(await autoscaler.request(number), "Failed")
        await tenant.until("given-up", retryCount=1)
        await begin("provisioning-edited", "edited", 2)
        await autoscaler.request(5)
        await tenant.patch("edited", gpuCount=3)
        await autoscaler.request(6)
        await tenant.delete("edited")
        await autoscaler.nothing_left()
        uid = await begin("provisioning-cancelled", "cancelled", 2)
        await autoscaler.request(7)
        await tenant.temporal.get_workflow_handle(provisioning_id(uid)).cancel()
        await autoscaler.nothing_left()
    ids["placement-provisioning"] = placement_id("default")
    return ids


async def kernel_caches(tenant: Tenant) -> dict[str, str]:
    """A cache from its first node to its last, a node that changes and goes. Images are given by digest."""
    agents = [SimulatedAgent(await tenant.node(name, 1)) for name in ("a", "b")]
    good, bad = (f"sha256:{letter * 64}" for letter in "ab")
    tries = 0

    def answers(task: NodeTask) -> Report:
        nonlocal tries
        if task.order.digest == bad:
            return Report(task.node, task.order.epoch, "failed", "", "SignatureRefused", "nobody known has signed it")
        if task.ref.name == "retried" and tries < 2:
            tries += 1
            return Report(task.node, task.order.epoch, "retrying", "", "RegistryAway", "no answer", within=1.0)
        return is_ready(task)

    async def apply(name: str, digest: str) -> str:
        spec = {"ociImage": {"image": f"registry.example/team/cache@{digest}"}}
        body = {"apiVersion": API_VERSION, "kind": "TritonKernelCache", "metadata": {"name": name}, "spec": spec}
        raw = await tenant.kube.create(TRITONKERNELCACHES, body, tenant.namespace)
        return str(raw["metadata"]["uid"])

    async def until(name: str, kind: str, status: str, reason: str) -> None:
        async def holds() -> bool:
            found = condition(await tenant.kube.get(TRITONKERNELCACHES, name, tenant.namespace), kind)
            return (found.get("status"), found.get("reason")) == (status, reason)

        await eventually(holds, 60, lambda: f"{name}: {kind} should be {status} {reason}")

    async def gone() -> bool:
        left, _ = await tenant.kube.list(TRITONKERNELCACHES, tenant.namespace)
        return [each["metadata"]["name"] for each in left] == ["retried"]

    for agent in agents:
        agent.answers = answers
        await register(tenant.kube, agent.node)
    first, second = agents
    async with serving(tenant.stack.endpoints, agents):
        await found_on(tenant, first.node, "f1")
        life, retried = await apply("life", good), await apply("retried", good)
        await until("life", "Ready", "True", "Ready")
        await until("retried", "Ready", "True", "Ready")
        image = {"spec": {"ociImage": {"image": f"registry.example/team/cache@{bad}"}}}
        await tenant.kube.merge_patch(TRITONKERNELCACHES, "life", tenant.namespace, image)
        await until("life", "Error", "True", "RolledBack")
        orders = len(first.orders)
        await found_on(tenant, first.node, "f2")
        await eventually(lambda: _true(len(first.orders) > orders), 30, lambda: "nobody checks anew")
        await until("life", "Ready", "True", "Ready")
        second.pods = 1
        await tenant.kube.delete(TRITONKERNELCACHES, "life", tenant.namespace)
        await until("life", "Ready", "False", "InUse")
        second.pods = 0
        await eventually(gone, 60, lambda: "the cache is still there")
        await tenant.kube.delete(NODES, first.node)
        over = tenant.temporal.get_workflow_handle(node_id(first.node))
        await eventually(lambda: _over(over), 60, lambda: "the node's workflow goes on")
    return {
        "kernelcache-life": cache_id(life),
        "kernelcache-retried": cache_id(retried),
        "nodekernelcache-removed": node_cache_id(life, second.node),
        "nodekernelcache-retried": node_cache_id(retried, second.node),
        "node-changed": node_id(first.node),
    }


async def devices(tenant: Tenant) -> dict[str, str]:
    """A fleet of one node that serves a GPUSeatProfile, refuses it and serves it again."""
    node = await simulated(tenant, "a")
    name = await profile(tenant)
    await until_ready_is(tenant, name, "Pending", 0)
    await says(tenant, node, seats=seated(tenant, problems=["Group G29 is refused."]), labels={COUNT: "8"})
    await until_ready_is(tenant, name, "Refused", 16)
    await says(tenant, node, seats=seated(tenant, problems=None))
    await until_ready_is(tenant, name, "Serving", 16)
    await until_labels(tenant, node, {COUNT: "8"})
    return {"devices-shown": devices_id("default")}


async def _true(value: bool) -> bool:
    return value


async def _over(workflow: WorkflowHandle[Any, Any]) -> bool:
    return (await workflow.describe()).close_time is not None


async def found_on(tenant: Tenant, node: str, fingerprint: str) -> None:
    """As a node's process tells it."""
    await tenant.temporal.start_workflow(
        NODE_WORKFLOW,
        NodeState(node, fingerprint),
        id=node_id(node),
        task_queue=TASK_QUEUE,
        search_attributes=node_attributes(node),
        start_signal=INVENTORY,
        start_signal_args=[Inventory(node, fingerprint)],
    )


async def record(stack: Stack, play: Callable[[Tenant], Awaitable[dict[str, str]]]) -> None:
    endpoints = stack.endpoints
    temporal = await connect_temporal(ProcessOptions(temporal_address=endpoints.temporal_address))
    async with await KubeClient.connect(endpoints.kubeconfig("admin")) as kube:
        await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "record"}})
        ids = await play(Tenant(stack, kube, temporal, "record"))
    FOLDER.mkdir(exist_ok=True)
    for scenario, workflow in ids.items():
        history = await temporal.get_workflow_handle(workflow).fetch_history()
        path = FOLDER / f"{scenario}--{build_id()}.json"
        path.write_text(json.dumps({"workflowId": workflow, "history": history.to_json_dict()}, indent=1) + "\n")
        sys.stdout.write(f"{path.name}: {len(history.events)} events\n")


async def seats(tenant: Tenant) -> dict[str, str]:
    """Three servers on one group: each starts, and two are woken."""
    with tempfile.TemporaryDirectory() as folder:
        async with switching(Path(folder), tenant.stack) as node:
            for number in (1, 2, 3):
                node.add(number)
            for number in (1, 2, 3, 1, 2):
                status, _ = await node.ask(number, seconds=60)
                assert status == 200
    return {"seatgroup-switched": group_id(SEATS_NODE, GROUP)}


async def rebalancing(tenant: Tenant) -> dict[str, str]:
    """A group that is too full: one of its servers moves."""
    async with simulated_seats(tenant, "n", ("G01", "G23")) as node, rebalanced(tenant, node, "Perform"):

        async def moved() -> bool:
            found, _ = await tenant.kube.list(SEATMIGRATIONS, tenant.namespace)
            return [each.get("status", {}).get("phase") for each in found] == ["Completed"]

        await eventually(moved, 90, lambda: f"nothing moved: {node.held}")
    return {"seatrebalancing-performed": rebalancing_id("default")}


async def migrations(tenant: Tenant) -> dict[str, str]:
    """One that comes off, and one that is undone after requests were diverted, for its new server ended."""
    async with simulated_seats(tenant, "n", ("G01", "G23")) as node:
        await start(tenant, node, "c")
        completed = await order(tenant, "c-away", pod="c", to={"group": "G23"})
        await shows(tenant, "c-away", "Completed")
        await start(tenant, node, "d")
        node.why_not = "2 requests are still in flight after 120 s (kyb.ai/drain-seconds)"
        undone = await order(tenant, "d-away", pod="d", to={"group": "G01"})
        await shows(tenant, "d-away", "RolledBack")
        for uid in (completed, undone):
            await tenant.temporal.get_workflow_handle(migration_id(uid)).result()
    return {"seatmigration-completed": migration_id(completed), "seatmigration-undone": migration_id(undone)}


def main() -> None:
    def with_autoscaler(endpoints: Endpoints) -> None:
        install_kind(endpoints)
        after_up(endpoints, {"provisioning": PROVISIONING})

    plays = (
        (scenarios, after_up), (provisioning, with_autoscaler), (kernel_caches, after_up), (devices, after_up),
        (seats, after_up), (migrations, after_up), (rebalancing, after_up),
    )  # fmt: skip
    for play, install in plays:
        if sys.argv[1:] and play.__name__ not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            stack, options = Stack(Path(folder)), UpOptions(end_with_caller=True)
            stack.up(options, Lines(), partial(application_processes, options=options), install)
            try:
                asyncio.run(record(stack, play))
            finally:
                stack.down()


if __name__ == "__main__":
    main()
