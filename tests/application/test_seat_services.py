"""Services of seats on a real control plane: the controller's process keeps their EndpointSlices with its own rights,
from what a node's account says, and neither of them can write what is another's. The node itself is simulated.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kube.client import KubeClient
from kube.errors import AccessDenied, Forbidden, KubeError, NotFound
from kube.events import EventRecorder
from kube.resources import ENDPOINTSLICES, EVENTS, GPUSEATGROUPS, NODES, PODS, SERVICES, ObjectRef
from planning.seats.endpoints import MANAGER, PORT_ANNOTATION, SERVICE_ANNOTATION
from planning.seats.status import GroupPicture, SeatPicture, SwitchPicture, document, object_name, status
from tests.application.tenant import Tenant, eventually
from tests.crds.test_kernelcaches import account, columns

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]

HOST = "192.0.2.7"
A, B = "kyb-G01-s1", "kyb-G01-s2"
MANAGED_BY = "endpointslice.kubernetes.io/managed-by"


@asynccontextmanager
async def process_of(tenant: Tenant, node: str, folder: Path) -> AsyncIterator[KubeClient]:
    """The API server as `berth node` of that node has it: by a token that names it."""
    uid = (await tenant.kube.get(NODES, node))["metadata"]["uid"]
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}", f"--bound-object-uid={uid}")
    asked = ("create", "token", "berth-node", "-n", "berth-system", *bound)
    token = await asyncio.to_thread(tenant.stack.kubectl, *asked)
    async with await KubeClient.connect(account(tenant.stack, folder / node, token.strip())) as kube:
        yield kube


async def group(tenant: Tenant, kube: KubeClient, node: str, name: str = "G01") -> str:
    """A GPUSeatGroup of the node, of which nothing is said yet."""
    uid = (await tenant.kube.get(NODES, node))["metadata"]["uid"]
    made = await kube.create(GPUSEATGROUPS, document(node, uid, name))
    return str(made["metadata"]["name"])


async def says(kube: KubeClient, name: str, picture: GroupPicture) -> None:
    body = {"status": {"seats": None} | status(picture, 1_000_000.0)}
    await kube.merge_patch(GPUSEATGROUPS, name, None, body, subresource="status")


def held(tenant: Tenant, pod: str, seat: str = A, phase: str = "Parked", port: int = 31000) -> SeatPicture:
    return SeatPicture(seat, phase, (tenant.namespace, pod, "server"), port)


async def service(tenant: Tenant, name: str = "llama", **spec: Any) -> None:
    meta = {"name": name, "annotations": {SERVICE_ANNOTATION: "app=llama"}}
    body = {"metadata": meta, "spec": {"ports": [{"name": "http", "port": 80}]} | spec}
    await tenant.kube.create(SERVICES, {"apiVersion": "v1", "kind": "Service"} | body, tenant.namespace)


async def pod(tenant: Tenant, name: str, node: str) -> None:
    """A pod with a seat, as a kubelet would show it."""
    meta = {"name": name, "labels": {"app": "llama"}, "annotations": {PORT_ANNOTATION: "8000"}}
    spec = {"nodeName": node, "containers": [{"name": "server", "image": "none"}]}
    await tenant.kube.create(
        PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}, tenant.namespace
    )
    body = {"status": {"phase": "Running", "hostIP": HOST, "hostIPs": [{"ip": HOST}]}}
    await tenant.kube.merge_patch(PODS, name, tenant.namespace, body, subresource="status")


async def leads_to(tenant: Tenant, name: str, *wanted: tuple[str, int, bool]) -> None:
    """Waits until the Service has these endpoints and no other: pod, port, and whether it is ready."""
    found: list[tuple[str, int, bool]] = []

    async def so() -> bool:
        nonlocal found
        selector = f"kubernetes.io/service-name={name}"
        slices, _ = await tenant.kube.list(ENDPOINTSLICES, tenant.namespace, label_selector=selector)
        assert all(each["metadata"]["labels"][MANAGED_BY] == MANAGER for each in slices)
        assert all(end["addresses"] == [HOST] for each in slices for end in each["endpoints"])
        found = sorted(
            (end["targetRef"]["name"], each["ports"][0]["port"], end["conditions"]["ready"])
            for each in slices
            for end in each["endpoints"]
        )
        return found == sorted(wanted)

    await eventually(so, 20, lambda: f"{name} should lead to {wanted}, and leads to {found}")


async def test_a_service_leads_to_the_proxies_that_nodes_speak_of(tenant: Tenant, tmp_path: Path) -> None:
    node = await tenant.node("n", 0, kubelet=False)
    await service(tenant)
    await pod(tenant, "llama-0", node)
    async with process_of(tenant, node, tmp_path) as berth_node:
        name = await group(tenant, berth_node, node)
        await says(berth_node, name, GroupPicture("G01", "Active", A, seats=[held(tenant, "llama-0")]))
        await leads_to(tenant, "llama", ("llama-0", 31000, True))
        await pod(tenant, "llama-1", node)
        other = held(tenant, "llama-1", B, "Starting", 31001)
        await says(berth_node, name, GroupPicture("G01", "Starting", B, seats=[held(tenant, "llama-0"), other]))
        await leads_to(tenant, "llama", ("llama-0", 31000, True), ("llama-1", 31001, False))
        await says(berth_node, name, GroupPicture("G01", "Starting", B, seats=[other]))
        await leads_to(tenant, "llama", ("llama-1", 31001, True))  # a request is what starts it
        await says(berth_node, name, GroupPicture("G01", "Active", B, seats=[held(tenant, "llama-1", B, port=31002)]))
        await leads_to(tenant, "llama", ("llama-1", 31002, True))
        # Of a pod that runs elsewhere the node says nothing that counts.
        await says(berth_node, name, GroupPicture("G01", "Active", A, seats=[held(tenant, "elsewhere")]))
        await leads_to(tenant, "llama")
        await says(berth_node, name, GroupPicture("G01", "Active", A, seats=[held(tenant, "llama-0")]))
        await leads_to(tenant, "llama", ("llama-0", 31000, True))
        await tenant.kube.delete(SERVICES, "llama", tenant.namespace)
        await leads_to(tenant, "llama")
        await service(tenant)
        await leads_to(tenant, "llama", ("llama-0", 31000, True))
        await berth_node.delete(GPUSEATGROUPS, name)
        await leads_to(tenant, "llama")


async def test_a_service_that_cannot_lead_to_seats_says_why(tenant: Tenant) -> None:
    await service(tenant, selector={"app": "llama"})

    async def told() -> bool:
        events, _ = await tenant.kube.list(EVENTS, tenant.namespace)
        return [each["note"] for each in events if each["reason"] == "NoSeatEndpoints"] == [
            f"Service llama leads to no seats: it has a selector beside its annotation {SERVICE_ANNOTATION}: "
            "remove the selector."
        ]

    await eventually(told, 20, lambda: "there is no Event")


async def test_the_controller_writes_no_endpoints_but_its_own(tenant: Tenant) -> None:
    def body(name: str, manager: str | None) -> dict[str, Any]:
        labels = {"kubernetes.io/service-name": "s"} | ({MANAGED_BY: manager} if manager else {})
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": labels},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [HOST]}],
        }

    where, refused = tenant.namespace, "EndpointSlices of its own only"
    for name, manager in (("theirs", "somebody"), ("nobodys", None)):
        await tenant.kube.create(ENDPOINTSLICES, body(name, manager), where)
    async with await KubeClient.connect(tenant.stack.endpoints.kubeconfig("berth-controller")) as kube:
        for name, manager in (("theirs", "somebody"), ("nobodys", None)):
            with pytest.raises(KubeError, match=refused):
                await kube.create(ENDPOINTSLICES, body(f"{name}-too", manager), where)
            with pytest.raises(KubeError, match=refused):
                await kube.delete(ENDPOINTSLICES, name, where)
            for mine in (None, MANAGER):  # also where it claims to be its own
                with pytest.raises(KubeError, match=refused):
                    await kube.apply(ENDPOINTSLICES, name, where, body(name, mine or manager), field_manager=MANAGER)
        await kube.create(ENDPOINTSLICES, body("mine", MANAGER), where)
        with pytest.raises(KubeError, match=refused):  # nor does it give one away
            await kube.merge_patch(ENDPOINTSLICES, "mine", where, {"metadata": {"labels": {MANAGED_BY: "somebody"}}})
        await kube.delete(ENDPOINTSLICES, "mine", where)
    left, _ = await tenant.kube.list(ENDPOINTSLICES, where)
    assert {each["metadata"]["name"] for each in left} == {"theirs", "nobodys"}


async def test_a_node_writes_no_group_of_another_node_and_no_endpoints(tenant: Tenant, tmp_path: Path) -> None:
    mine, other = [await tenant.node(name, 0, kubelet=False) for name in ("mine", "other")]
    theirs = await group(tenant, tenant.kube, other)
    foreign = f"process of node {mine} may not speak for node {other}"
    async with process_of(tenant, mine, tmp_path) as kube:
        with pytest.raises(KubeError, match=foreign):
            await group(tenant, kube, other, "G23")
        with pytest.raises(KubeError, match=foreign):
            await says(kube, theirs, GroupPicture("G01", "Active", A, seats=[held(tenant, "llama-0")]))
        with pytest.raises(KubeError, match=foreign):
            await kube.delete(GPUSEATGROUPS, theirs)
        for kind in (ENDPOINTSLICES, SERVICES):
            with pytest.raises(AccessDenied):
                await kube.list(kind, tenant.namespace)
        name = await group(tenant, kube, mine)
        await says(kube, name, GroupPicture("G01", "Empty"))
        await kube.delete(GPUSEATGROUPS, name)
    assert "status" not in await tenant.kube.get(GPUSEATGROUPS, theirs)


async def test_a_node_writes_events_in_its_own_name_only(tenant: Tenant, tmp_path: Path) -> None:
    mine, other = await tenant.node("n", 0, kubelet=False), await tenant.node("other", 0, kubelet=False)
    await pod(tenant, "llama-0", mine)
    async with process_of(tenant, mine, tmp_path) as kube:
        about = ObjectRef("v1", "Pod", "llama-0", tenant.namespace, uid="a-uid")

        async def told_by(controller: str, instance: str) -> int:
            events = EventRecorder(kube, controller, instance)
            events.record(regarding=about, type="Normal", reason="SeatActive", action="WakeSeat", note=controller)
            await events.flush(10.0)
            return events.written - events.dropped

        assert await told_by("berth-node", mine) == 1
        assert await told_by("berth-node", other) == await told_by("kubelet", mine) == -1
    (shown,) = (await tenant.kube.list(EVENTS, tenant.namespace))[0]
    assert (shown["reportingController"], shown["reportingInstance"]) == ("berth-node", mine)
    async with process_of(tenant, other, tmp_path) as kube:
        with pytest.raises(Forbidden):
            await kube.merge_patch(EVENTS, shown["metadata"]["name"], tenant.namespace, {"series": None})


async def test_what_kubectl_shows_of_a_group(tenant: Tenant) -> None:
    node = await tenant.node("n", 0, kubelet=False)
    name = await group(tenant, tenant.kube, node)
    assert name == object_name(node, "G01")
    seats = [
        held(tenant, "llama-0", A, "Active"),
        SeatPicture(B, "Parked", (tenant.namespace, "qwen-0", "server"), 31001, requests=3, parked_bytes=40 << 30),
    ]
    last = SwitchPicture(1_000_000.0, B, A, "it waited", {"park": 1.5})
    told = GroupPicture("G01", "Active", A, f"{A} serves", 1.0, 7, seats, last, simulated=True, refused=2)
    await says(tenant.kube, name, told)
    # G01's name is its own, also where the node has a g01.
    small = document(node, "uid-of-a-node", "g01")
    assert small["metadata"]["name"].startswith(f"{name}.")
    await tenant.kube.create(GPUSEATGROUPS, small)
    with suppress(NotFound):  # Kubernetes may have collected it already: its node is none
        await tenant.kube.delete(GPUSEATGROUPS, small["metadata"]["name"])
    kubectl = tenant.stack.kubectl
    row = columns(await asyncio.to_thread(kubectl, "get", "gpuseatgroups", name))
    switched = row.pop("LAST")
    assert switched.endswith(("y", "d")), "since 1970"
    assert row == {"NAME": name, "NODE": node, "GROUP": "G01", "PHASE": "Active", "ACTIVE": A, "WAITING": "3",
                   "PARKED": "1", "SWITCHES": "7"}  # fmt: skip
    wide = columns(await asyncio.to_thread(kubectl, "get", "gpusg", name, "-o", "wide"))
    assert {key: wide[key] for key in wide.keys() - row.keys() - {"LAST"}} == {
        "HEALTHY": "True", "MESSAGE": f"{A} serves", "REFUSED": "2", "PARKED BYTES": str(40 << 30), "SIMULATED": "true"
    }  # fmt: skip
    chosen = await asyncio.to_thread(kubectl, "get", "gpusg", f"--field-selector=spec.nodeName={node}", "-o", "json")
    assert [each["metadata"]["name"] for each in json.loads(chosen)["items"]] == [name]
