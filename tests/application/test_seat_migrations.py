"""SeatMigrations on a real control plane with its scheduler and its controllers: pods move to seats of other groups, or
all is as it was before. Nodes, their seats and what diverts requests there are simulated.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError

from activities.migration_signatures import migration_id
from kube.errors import KubeError, NotFound
from kube.resources import EVENTS, PODS, REPLICASETS, SEATMIGRATIONS, SERVICES, Resource
from planning.seats.endpoints import SERVICE_ANNOTATION
from planning.seats.migration import CLAIM, COST, FROM, HASH, RECORD, REPLACES
from stack import StackError
from tests.application.seat_nodes import STARTS, SimulatedSeats, server, simulated_seats
from tests.application.tenant import Tenant, condition, eventually, type_name
from tests.crds.test_kernelcaches import columns

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]

DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment", True)
STATEFULSETS = Resource("apps", "v1", "statefulsets", "StatefulSet", True)
EVENTS_BUDGET = 40


@pytest.fixture
async def node(tenant: Tenant) -> AsyncIterator[SimulatedSeats]:
    async with simulated_seats(tenant, "n", ("G01", "G23")) as made:
        yield made


async def order(tenant: Tenant, name: str, **spec: Any) -> str:
    """A SeatMigration; its UID."""
    body = {"apiVersion": "kyb.ai/v1alpha1", "kind": "SeatMigration", "metadata": {"name": name}, "spec": spec}
    made = await tenant.kube.create(SEATMIGRATIONS, body, tenant.namespace)
    return str(made["metadata"]["uid"])


async def shows(tenant: Tenant, name: str, phase: str, seconds: float = 60.0) -> dict[str, Any]:
    """The SeatMigration once it shows this phase."""
    found: dict[str, Any] = {}

    async def so() -> bool:
        nonlocal found
        found = await tenant.kube.get(SEATMIGRATIONS, name, tenant.namespace)
        return bool(found.get("status", {}).get("phase") == phase)

    await eventually(so, seconds, lambda: f"{name} should be {phase}: {found.get('status')}")
    return found


async def start(tenant: Tenant, node: SimulatedSeats, name: str, **annotations: str) -> dict[str, Any]:
    """A pod that has a seat."""
    made = await tenant.kube.create(PODS, server(name, node.node, **annotations), tenant.namespace)
    await seated(tenant, node, name)
    return made


async def seated(tenant: Tenant, node: SimulatedSeats, name: str) -> None:
    async def so() -> bool:
        return (tenant.namespace, name) in node.held.values()

    await eventually(so, 30, lambda: f"{name} has no seat: {node.held}")


def several(node: SimulatedSeats, name: str, replicas: int) -> dict[str, Any]:
    """The spec of what keeps so many pods with seats."""
    pod = server(name, node.node)
    meta = {key: pod["metadata"][key] for key in ("labels", "annotations")}
    template = {"metadata": meta, "spec": pod["spec"]}
    return {"replicas": replicas, "selector": {"matchLabels": meta["labels"]}, "template": template}


async def pods(tenant: Tenant) -> dict[str, dict[str, Any]]:
    return {
        each["metadata"]["name"]: each for each in await tenant.pods() if "deletionTimestamp" not in each["metadata"]
    }


async def told(tenant: Tenant, kind: str, name: str) -> set[str]:
    items, _ = await tenant.kube.list(EVENTS, tenant.namespace)
    about = [each for each in items if each.get("regarding", {}).get("kind") == kind]
    return {each["reason"] for each in about if each["regarding"]["name"] == name}


async def hears(tenant: Tenant, kind: str, name: str, *reasons: str, seconds: float = 20.0) -> None:
    found: set[str] = set()

    async def so() -> bool:
        nonlocal found
        found = await told(tenant, kind, name)
        return found >= set(reasons)

    await eventually(so, seconds, lambda: f"{kind} {name} should have heard {reasons}, and heard {found}")


async def ended(tenant: Tenant, uid: str) -> list[str]:
    """The event types of its workflow, once that has ended."""
    handle = tenant.temporal.get_workflow_handle(migration_id(uid))
    async with asyncio.timeout(20):
        await handle.result()
    return [type_name(event.event_type) async for event in handle.fetch_history_events()]


async def untouched(tenant: Tenant, pod: dict[str, Any]) -> None:
    """It is as it was before, and nobody else is there."""
    now = await pods(tenant)
    assert list(now) == [pod["metadata"]["name"]]
    (found,) = now.values()
    assert found["metadata"]["uid"] == pod["metadata"]["uid"]
    assert {CLAIM, COST, RECORD}.isdisjoint(found["metadata"]["annotations"])


async def test_a_pod_without_an_owner_moves(tenant: Tenant, node: SimulatedSeats) -> None:
    service = {
        "metadata": {"name": "c", "annotations": {SERVICE_ANNOTATION: "app=c"}},
        "spec": {"ports": [{"port": 80}]},
    }
    await tenant.kube.create(SERVICES, service, tenant.namespace)
    before = await start(tenant, node, "c")
    uid = await order(tenant, "c-away", pod="c", to={"group": "G23"})
    shown = (await shows(tenant, "c-away", "Completed"))["status"]
    (name,) = await pods(tenant)
    new = (await pods(tenant))[name]
    assert name.startswith("c-m")
    assert shown["source"] == {"node": node.node, "group": "G01", "seat": "kyb-G01-s1", "pod": "c"}
    assert shown["destination"] == {"node": node.node, "group": "G23", "seat": "kyb-G23-s1", "pod": name}
    assert [each["name"] for each in shown["steps"]] == ["Starting", "Switching", "Completed"]
    assert condition({"status": shown}, "Completed")["status"] == "True"
    assert new["spec"]["containers"][0]["env"] == [{"name": "MODEL", "value": "c"}]
    assert new["metadata"]["labels"] == before["metadata"]["labels"]
    assert new["metadata"]["annotations"][FROM] == f"c (kyb-G01-s1 on node {node.node})"
    assert {CLAIM, RECORD, REPLACES}.isdisjoint(new["metadata"]["annotations"])
    host = new["status"]["hostIP"]
    assert [(each.group, each.seat, each.address) for each in node.asked] == [("G01", "kyb-G01-s1", f"{host}:23011")]
    await hears(tenant, "Pod", "c", "SeatMigrating", "SeatMigrated")
    await hears(tenant, "Pod", name, "SeatMigrating", "SeatMigrated")
    await hears(tenant, "SeatMigration", "c-away", "SeatMigrating", "SeatMigrated")
    history = await ended(tenant, uid)
    assert len(history) <= EVENTS_BUDGET, len(history)
    row = columns(await asyncio.to_thread(tenant.stack.kubectl, "get", "smig", "c-away", "-n", tenant.namespace))
    assert row == {"NAME": "c-away", "POD": "c", "FROM": "kyb-G01-s1", "TO": "kyb-G23-s1", "NODE": node.node,
                   "PHASE": "Completed", "REASON": "Completed"}  # fmt: skip
    found = await tenant.kube.get(SEATMIGRATIONS, "c-away", tenant.namespace)
    assert "finalizers" not in found["metadata"]
    change = {"spec": {"to": {"group": "G01"}}}
    with pytest.raises(KubeError, match="ordered once"):
        await tenant.kube.merge_patch(SEATMIGRATIONS, "c-away", tenant.namespace, change)
    # It may move on, under a name that does not grow.
    await order(tenant, "c-back", pod=name, to={"group": "G01"})
    again = (await shows(tenant, "c-back", "Completed"))["status"]["destination"]
    assert again["group"] == "G01" and len(again["pod"]) == len(name)


async def test_a_pod_of_a_deployment_moves_by_surge(tenant: Tenant, node: SimulatedSeats) -> None:
    made = {"metadata": {"name": "web"}, "spec": several(node, "web", 2)}
    await tenant.kube.create(DEPLOYMENTS, made, tenant.namespace)

    async def both() -> bool:
        return len({who for who in node.held.values() if who[1].startswith("web-")}) == 2

    await eventually(both, 30, lambda: f"the Deployment has no two seats: {node.held}")
    names = sorted(await pods(tenant))
    workload = {"kind": "Deployment", "name": "web"}
    await order(tenant, "which", workload=workload, to={"group": "G23"})
    refused = (await shows(tenant, "which", "Refused"))["status"]
    assert refused["reason"] == "SeveralPods" and all(name in refused["message"] for name in names)
    await order(tenant, "one", pod=names[0], to={"group": "G23"})
    shown = (await shows(tenant, "one", "Completed"))["status"]
    moved = shown["destination"]["pod"]
    now = await pods(tenant)
    assert sorted(now) == sorted([names[1], moved])
    (owner,) = now[moved]["metadata"]["ownerReferences"]
    (theirs,) = now[names[1]]["metadata"]["ownerReferences"]
    assert owner["uid"] == theirs["uid"] and owner["kind"] == "ReplicaSet"
    assert now[moved]["metadata"]["labels"][HASH] == now[names[1]]["metadata"]["labels"][HASH]
    assert COST not in now[moved]["metadata"].get("annotations", {})
    found = await tenant.kube.get(REPLICASETS, owner["name"], tenant.namespace)
    assert found["spec"]["replicas"] == 2
    await tenant.kube.delete(DEPLOYMENTS, "web", tenant.namespace)
    await tenant.empty()


async def test_what_cannot_be_moved_is_refused_with_a_reason(tenant: Tenant, node: SimulatedSeats) -> None:
    pod = await start(tenant, node, "c")
    node.fill("G23")
    await node.tell()
    refusals: tuple[tuple[dict[str, str], str, str], ...] = (
        ({"group": "G01"}, "IsThere", "it is there already"),
        ({"group": "G45"}, "NoSuchGroup", "has no group G45"),
        ({"node": "nowhere"}, "NoSuchNode", "node nowhere says of no seats"),
        ({"group": "G23"}, "Full", "all 4 seats of group G23"),
    )
    uids = {reason: await order(tenant, reason.lower(), pod="c", to=to) for to, reason, _ in refusals}
    for _, reason, message in refusals:
        shown = (await shows(tenant, reason.lower(), "Refused"))["status"]
        assert shown["reason"] == reason and message in shown["message"]
        await ended(tenant, uids[reason])
    await untouched(tenant, pod)
    await hears(tenant, "SeatMigration", "full", "SeatMigrationRefused")


async def test_other_owners_are_refused(tenant: Tenant, node: SimulatedSeats) -> None:
    made = {"metadata": {"name": "db"}, "spec": several(node, "db", 1)}
    await tenant.kube.create(STATEFULSETS, made, tenant.namespace)
    await seated(tenant, node, "db-0")
    await order(tenant, "m", pod="db-0", to={"group": "G23"})
    shown = (await shows(tenant, "m", "Refused"))["status"]
    assert shown["reason"] == "OwnerUnsupported" and "StatefulSet db" in shown["message"]
    assert list(await pods(tenant)) == ["db-0"]
    await tenant.kube.delete(STATEFULSETS, "db", tenant.namespace)
    await order(tenant, "w", workload={"kind": "GPUWorkload", "name": "train"}, to={"group": "G23"})
    assert (await shows(tenant, "w", "Refused"))["status"]["reason"] == "OwnerUnsupported"
    await order(tenant, "nobody", pod="nobody", to={"group": "G23"})
    assert (await shows(tenant, "nobody", "Refused"))["status"]["reason"] == "NoPod"


async def test_one_that_lands_elsewhere_is_rolled_back(tenant: Tenant, node: SimulatedSeats) -> None:
    pod = await start(tenant, node, "c", **{STARTS: "G01"})
    uid = await order(tenant, "m", pod="c", to={"group": "G23"})
    shown = (await shows(tenant, "m", "RolledBack"))["status"]
    assert shown["reason"] == "OtherGroup" and "kyb-G01-s2" in shown["message"]
    assert condition({"status": shown}, "Completed")["status"] == "False"
    await untouched(tenant, pod)
    assert not node.asked
    await ended(tenant, uid)
    await hears(tenant, "Pod", "c", "SeatMigrating", "SeatMigrationRolledBack")


async def test_a_server_that_does_not_come_to_serve_is_rolled_back(tenant: Tenant, node: SimulatedSeats) -> None:
    pod = await start(tenant, node, "c")
    node.starts = False
    await order(tenant, "m", pod="c", to={"group": "G23"}, deadlineSeconds=10)
    shown = (await shows(tenant, "m", "RolledBack"))["status"]
    assert shown["reason"] == "DeadlineExceeded" and "which is Waiting" in shown["message"]
    await untouched(tenant, pod)


async def test_requests_that_do_not_end_keep_it_where_it_is(tenant: Tenant, node: SimulatedSeats) -> None:
    pod = await start(tenant, node, "c")
    node.why_not = "2 requests are still in flight after 120 s (kyb.ai/drain-seconds)"
    await order(tenant, "m", pod="c", to={"group": "G23"})
    shown = (await shows(tenant, "m", "RolledBack"))["status"]
    assert shown["reason"] == "RequestsNotPassedOn" and node.why_not in shown["message"]
    assert [bool(each.address) for each in node.asked] == [True, False], "they go to its own server again"
    await untouched(tenant, pod)


async def test_deleted_midway_it_is_undone_and_a_second_one_waits_for_nobody(
    tenant: Tenant, node: SimulatedSeats
) -> None:
    pod = await start(tenant, node, "c")
    node.starts = False
    uid = await order(tenant, "first", pod="c", to={"group": "G23"})
    await shows(tenant, "first", "Starting")
    await order(tenant, "second", pod="c", to={"group": "G23"})
    shown = (await shows(tenant, "second", "Refused"))["status"]
    assert shown["reason"] == "MovesAlready" and "SeatMigration first" in shown["message"]

    async def doubled() -> bool:
        return len(await pods(tenant)) == 2

    await eventually(doubled, 30, lambda: "nothing was started")
    await tenant.kube.delete(SEATMIGRATIONS, "first", tenant.namespace)

    async def gone() -> bool:
        try:
            await tenant.kube.get(SEATMIGRATIONS, "first", tenant.namespace)
        except NotFound:
            return True
        return False

    await eventually(gone, 60, lambda: "it is still there")
    await untouched(tenant, pod)
    await ended(tenant, uid)
    node.starts = True
    await order(tenant, "third", pod="c", to={"group": "G23"})
    await shows(tenant, "third", "Completed")


async def test_a_cancelled_workflow_undoes_what_it_did(tenant: Tenant, node: SimulatedSeats) -> None:
    pod = await start(tenant, node, "c")
    node.starts = False
    uid = await order(tenant, "m", pod="c", to={"group": "G23"})

    async def doubled() -> bool:
        return len(await pods(tenant)) == 2

    await eventually(doubled, 30, lambda: "nothing was started")
    handle = tenant.temporal.get_workflow_handle(migration_id(uid))
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    shown = (await shows(tenant, "m", "RolledBack"))["status"]
    assert shown["reason"] == "Cancelled"
    await untouched(tenant, pod)


async def test_cancelled_while_the_old_pod_ends_already_the_new_one_stays(tenant: Tenant, node: SimulatedSeats) -> None:
    await start(tenant, node, "c")
    held = {"metadata": {"finalizers": ["tests.berth.dev/hold"]}}
    await tenant.kube.merge_patch(PODS, "c", tenant.namespace, held)
    uid = await order(tenant, "m", pod="c", to={"group": "G23"})

    async def ends() -> bool:
        return "deletionTimestamp" in (await tenant.kube.get(PODS, "c", tenant.namespace))["metadata"]

    await eventually(ends, 60, lambda: "c is not ended")
    handle = tenant.temporal.get_workflow_handle(migration_id(uid))
    await handle.cancel()
    shown = (await shows(tenant, "m", "Completed"))["status"]
    assert list(await pods(tenant)) == [shown["destination"]["pod"]], "both would be gone otherwise"
    await tenant.kube.merge_patch(PODS, "c", tenant.namespace, {"metadata": {"finalizers": None}})
    with pytest.raises(WorkflowFailureError):
        await handle.result()


async def test_a_worker_that_is_killed_midway_goes_on(tenant: Tenant, node: SimulatedSeats) -> None:
    await start(tenant, node, "c")
    node.starts = False
    await order(tenant, "m", pod="c", to={"group": "G23"})

    async def doubled() -> bool:
        return len(await pods(tenant)) == 2

    await eventually(doubled, 30, lambda: "nothing was started")
    await asyncio.to_thread(tenant.stack.kill, "worker", signal.SIGKILL)
    node.starts = True
    shown = (await shows(tenant, "m", "Completed", 150))["status"]
    assert list(await pods(tenant)) == [shown["destination"]["pod"]]


async def test_the_worker_makes_and_deletes_no_pods_but_those_that_move(tenant: Tenant, node: SimulatedSeats) -> None:
    pod = await start(tenant, node, "c")
    worker = ("--as=system:serviceaccount:berth-system:berth-worker", "-n", tenant.namespace)
    with pytest.raises(StackError, match="pods of SeatMigrations only"):
        await asyncio.to_thread(tenant.stack.kubectl, "delete", "pod", "c", *worker)
    mark = f"--annotations={CLAIM}=u"
    for marked in ((), (mark,)):
        with pytest.raises(StackError, match="pods of SeatMigrations only"):
            await asyncio.to_thread(tenant.stack.kubectl, "run", "x", "--image=none", *marked, *worker)
    change = ("patch", "pod", "c", "--type=json", "-p")
    told = '[{"op": "replace", "path": "/spec/containers/0/image", "value": "other"}]'
    with pytest.raises(StackError, match="does not change what pods run"):
        await asyncio.to_thread(tenant.stack.kubectl, *change, told, *worker)
    other = {"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "x", "image": "none"}]}}
    await tenant.kube.create(PODS, other, tenant.namespace)
    with pytest.raises(StackError, match="moves pods with seats only"):
        await asyncio.to_thread(tenant.stack.kubectl, "annotate", "pod", "plain", f"{CLAIM}=u", *worker)
    await tenant.kube.delete(PODS, "plain", tenant.namespace)
    await untouched(tenant, pod)
