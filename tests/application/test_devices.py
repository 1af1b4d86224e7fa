"""What nodes say of their devices, on a real control plane: the status of a GPUSeatProfile, its Events, nodes' labels,
and how far the worker's right to write to nodes goes. The nodes' processes are simulated.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from activities.device_signatures import devices_id
from kube.resources import EVENTS, GPUSEATPROFILES, NODEDEVICES, NODES
from planning.devices.report import document
from stack import StackError
from tests.application.tenant import Tenant, condition, eventually
from tests.crds.test_gpuseatprofile import spec

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]

COUNT, MEMORY = "berth.dev/nvidia.count", "nvidia.com/gpu.memory"
REFUSED = "Group G29 (GPUs 2 and 9) of profile pair is refused: there is no GPU 9; this node has GPUs 0 to 7."
WORKER = "--as=system:serviceaccount:berth-system:berth-worker"


async def simulated(tenant: Tenant, name: str, **labels: Any) -> str:
    """A node whose process says nothing yet."""
    node = await tenant.node(name, 0, **labels)
    uid = (await tenant.kube.get(NODES, node))["metadata"]["uid"]
    await tenant.kube.create(NODEDEVICES, document(node, uid))
    return node


async def says(tenant: Tenant, node: str, **status: Any) -> None:
    """As the process of that node does."""
    await tenant.kube.merge_patch(NODEDEVICES, node, None, {"status": status}, subresource="status")


async def profile(tenant: Tenant) -> str:
    """A GPUSeatProfile for the tenant's nodes."""
    body = {
        "apiVersion": "kyb.ai/v1alpha1",
        "kind": "GPUSeatProfile",
        "metadata": {"name": tenant.namespace},
        "spec": spec() | {"nodeSelector": {"pool": tenant.namespace}},
    }
    await tenant.kube.create(GPUSEATPROFILES, body)
    return tenant.namespace


def seated(tenant: Tenant, **more: Any) -> dict[str, Any]:
    return {"source": f"GPUSeatProfile {tenant.namespace}", "generation": 1, "groups": 4, "seats": 16} | more


async def until_ready_is(tenant: Tenant, name: str, reason: str, seats: int) -> dict[str, Any]:
    """The profile once it shows that."""
    found: dict[str, Any] = {}

    async def shown() -> bool:
        nonlocal found
        found = await tenant.kube.get(GPUSEATPROFILES, name)
        return condition(found, "Ready").get("reason") == reason and found["status"]["seats"] == seats

    await eventually(shown, 30, lambda: f"{name} should be {reason} with {seats} seats: {found.get('status')}")
    return found


async def until_labels(tenant: Tenant, node: str, wanted: dict[str, str]) -> None:
    found: dict[str, str] = {}

    async def shown() -> bool:
        nonlocal found
        labels = (await tenant.kube.get(NODES, node))["metadata"]["labels"]
        found = {key: text for key, text in labels.items() if key.partition("/")[0] in ("berth.dev", "nvidia.com")}
        return found == wanted

    await eventually(shown, 30, lambda: f"{node} should have {wanted}, and has {found}")


async def test_what_nodes_say_of_seats_and_cards_is_shown(tenant: Tenant) -> None:
    good, bad = await simulated(tenant, "good"), await simulated(tenant, "bad", **{MEMORY: "40960"})
    before = set((await tenant.kube.get(NODES, good))["metadata"]["labels"])
    name = await profile(tenant)
    try:
        labels = {COUNT: "8", MEMORY: "81559"}
        await says(tenant, good, seats=seated(tenant), labels={**labels, "node-role.kubernetes.io/control-plane": ""})
        await says(tenant, bad, seats=seated(tenant, groups=3, seats=12, problems=[REFUSED]), labels=labels)
        status = (await until_ready_is(tenant, name, "Refused", 28))["status"]
        assert f"{bad}: {REFUSED}" in condition({"status": status}, "Error")["message"]
        assert (status["nodesServing"], status["nodesRefused"], status["observedGeneration"]) == (2, 1, 1)
        header, row = tenant.stack.kubectl("get", "gpusp", name).splitlines()
        assert header.split() == ["NAME", "GROUPS", "SEATS", "SERVING", "REFUSED", "READY", "REASON", "AGE"]
        assert row.split()[:7] == [name, "7", "28", "2", "1", "False", "Refused"]
        await _event(tenant, name, "Warning", "Refused", bad)
        await until_labels(tenant, good, labels)
        await until_labels(tenant, bad, {COUNT: "8", MEMORY: "40960"})  # somebody else told the memory
        await says(tenant, bad, seats=seated(tenant, problems=None), labels=None)
        await until_ready_is(tenant, name, "Serving", 32)
        await _event(tenant, name, "Normal", "Serving", "on 2 nodes")
        await says(tenant, good, labels={COUNT: None, MEMORY: None, "node-role.kubernetes.io/control-plane": None})
        await until_labels(tenant, good, {})
        assert set((await tenant.kube.get(NODES, good))["metadata"]["labels"]) >= before
        await until_labels(tenant, bad, {COUNT: "8", MEMORY: "40960"})
    finally:
        await tenant.kube.delete(GPUSEATPROFILES, name)


async def test_a_fleet_that_says_something_at_once_is_a_few_events_and_writes(tenant: Tenant) -> None:
    nodes = [await simulated(tenant, f"n{number}") for number in range(24)]
    name = await profile(tenant)
    try:
        await until_ready_is(tenant, name, "Pending", 0)
        handle = tenant.temporal.get_workflow_handle(devices_id("default"))
        events = len((await handle.fetch_history()).events)
        await asyncio.gather(*(says(tenant, node, seats=seated(tenant), labels={COUNT: "8"}) for node in nodes))
        found = await until_ready_is(tenant, name, "Serving", 24 * 16)
        for node in nodes:
            await until_labels(tenant, node, {COUNT: "8"})
        writes = len((await handle.fetch_history()).events) - events
        assert writes <= 20, "four looks at most, of five events each"
        assert found["metadata"]["generation"] == 1
    finally:
        await tenant.kube.delete(GPUSEATPROFILES, name)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"spec": {"unschedulable": True}}, "nothing of a node but labels"),
        ({"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, "nothing of a node but labels"),
        ({"metadata": {"annotations": {"a": "b"}}}, "nothing of a node but labels"),
        ({"metadata": {"finalizers": ["a.b/c"]}}, "nothing of a node but labels"),
        ({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}, "labels of kubernetes.io"),
        ({"metadata": {"labels": {"kubernetes.io/hostname": "other"}}}, "labels of kubernetes.io"),
        ({"metadata": {"labels": {"kubernetes.io/arch": None}}}, "labels of kubernetes.io"),
        ({"metadata": {"labels": {COUNT: "8"}}}, ""),
    ],
)
async def test_the_worker_may_write_labels_of_nodes_and_nothing_else(
    tenant: Tenant, change: dict[str, Any], told: str
) -> None:
    labels: dict[str, Any] = {"kubernetes.io/hostname": "n", "kubernetes.io/arch": "amd64"}
    node = await tenant.node("n", 0, **labels)
    patch = ("patch", "node", node, WORKER, "--type=merge", "-p", json.dumps(change))
    if not told:
        tenant.stack.kubectl(*patch)
        return
    with pytest.raises(StackError) as refused:
        tenant.stack.kubectl(*patch)
    assert told in f"{refused.value} {getattr(refused.value, 'hint', '')}"


async def _event(tenant: Tenant, name: str, kind: str, reason: str, note: str) -> None:
    async def there() -> bool:
        found, _ = await tenant.kube.list(EVENTS, "default")
        return any(
            (each["regarding"].get("name"), each["type"], each["reason"]) == (name, kind, reason)
            and note in each["note"]
            for each in found
        )

    await eventually(there, 30, lambda: f"no Event {reason} of {name}")
