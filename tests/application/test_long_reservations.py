"""GPUReservations on a real cluster: lent while nobody is due, cleared in time, honoured to the second, and told of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

import pytest

from crds.gpuworkload import API_VERSION
from kube.errors import Invalid
from kube.resources import EVENTS, GPURESERVATIONS
from planning.times import timestamp
from planning.windows import LEAD
from tests.application.stories import Begun, Places, Stories
from tests.application.tenant import Tenant, condition, eventually, tenancy
from tests.application.test_observability import get
from tests.application.test_quotas import explain

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

Story = Callable[[Tenant], Coroutine[None, None, None]]


def begin(places: Places) -> Stories:
    async def tell(story: Story) -> None:
        async with tenancy(places.deployed, story.__name__) as tenant:
            try:
                await story(tenant)
            finally:
                await tenant.leave()
                for found in (await tenant.kube.list(GPURESERVATIONS))[0]:
                    if found["metadata"]["name"].startswith(tenant.namespace):
                        await tenant.kube.delete(GPURESERVATIONS, found["metadata"]["name"])

    return {story.__name__: tell(story) for story in STORIES}


async def reserve(tenant: Tenant, name: str, gpus: int, start: float, seconds: float = 60.0, **spec: Any) -> str:
    """A GPUReservation on this test's nodes; its name begins with the tenant's namespace."""
    full = f"{tenant.namespace}-{name}"
    body = {"gpus": gpus, "namespaces": [tenant.namespace], "nodeSelector": {"pool": tenant.namespace}, **spec}
    body = {"start": timestamp(start), "end": timestamp(start + seconds), **body}
    made = {"apiVersion": API_VERSION, "kind": "GPUReservation", "metadata": {"name": full}, "spec": body}

    async def nodes_are_known() -> bool:
        """The webhook hears of a node that was just made a moment later."""
        try:
            await tenant.kube.create(GPURESERVATIONS, made, dry_run=True)
        except Invalid as refused:
            return "the 0 nodes that match" not in str(refused)
        return True

    await eventually(nodes_are_known, 20, lambda: "the webhook knows no node of this test")
    await tenant.kube.create(GPURESERVATIONS, made)
    return full


async def until(tenant: Tenant, name: str, seconds: float = 30.0, **wanted: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {}

    async def holds() -> bool:
        nonlocal raw
        raw = await tenant.kube.get(GPURESERVATIONS, name)
        return all(raw.get("status", {}).get(key) == value for key, value in wanted.items())

    await eventually(holds, seconds, lambda: f"{name} should show {wanted}; it shows {raw.get('status')}")
    return raw


async def until_refused(tenant: Tenant, why: str, gpus: int, start: float, seconds: float = 60.0) -> None:
    """Such a GPUReservation is refused, as soon as the webhook listens and knows of what was written before."""

    async def refused() -> bool:
        try:
            name = await reserve(tenant, "refused", gpus, start, seconds)
        except Invalid as told:
            return why in str(told)
        await tenant.kube.delete(GPURESERVATIONS, name)
        return False

    await eventually(refused, 30, lambda: f"nobody says {why}")


async def move(tenant: Tenant, name: str, start: float, seconds: float = 60.0) -> None:
    """The window is edited to begin at another time."""
    window = {"start": timestamp(start), "end": timestamp(start + seconds)}
    await tenant.kube.merge_patch(GPURESERVATIONS, name, None, {"spec": window})


async def who_borrowed_makes_way_in_time(tenant: Tenant) -> None:
    node = await tenant.node("a", 4)
    start = float(int(time.time() + 600))
    name = await reserve(tenant, "r", 4, start)
    shown = await until(tenant, name, phase="Reserved", reserved=4)
    assert condition(shown, "Reserved")["message"] == f"4 GPUs are kept on node {node} from {timestamp(start)} on"

    await tenant.apply("firm", 4)
    waiting = await tenant.until("firm", phase="Scheduling")
    assert f"what is free on node {node} is kept for GPUReservation {name}" in waiting["status"]["message"]
    explained = await asyncio.to_thread(explain, tenant, "firm")
    assert [each["why"] for each in explained["nodes"] if each["name"] == node] == [f"kept for GPUReservation {name}"]
    await tenant.apply("lent", 4, run="600s", preemptible=True)
    await tenant.until("lent", phase="Running")
    await tenant.apply("due", 4, run="20s", reservation=name)
    waiting = await tenant.until("due", phase="Scheduling")
    assert condition(waiting, "Scheduled")["reason"] == "WaitingForReservation"
    assert waiting["status"]["message"].startswith(f"GPUReservation {name} begins at {timestamp(start)}; 4 GPUs")
    await until(tenant, name, lent=4, waiting=1)
    head, row = tenant.stack.kubectl("get", "gpures", name).splitlines()
    assert head.split() == ["NAME", "START", "END", "GPUS", "RESERVED", "USED", "LENT", "WAITING", "PHASE", "AGE"]
    assert row.split()[3:-1] == ["4", "4", "0", "4", "1", "Reserved"]

    # Only now it comes near, however long all that took.
    start = float(int(time.time() + LEAD + 5))
    await move(tenant, name, start)
    stopped = await tenant.until("lent", phase="Scheduling", seconds=60)
    assert f"its place on node {node} goes to {tenant.namespace}/due" in stopped["status"]["message"]
    assert time.time() < start, "it makes way before the window begins"
    running = await tenant.until("due", phase="Running", seconds=start - time.time() + 20)
    began = datetime.fromisoformat(running["status"]["startTime"]).timestamp()
    assert start <= began <= start + 5
    await until(tenant, name, phase="Active", used=4, lent=0)

    async def counted() -> bool:
        scraped = await asyncio.to_thread(get, tenant, "worker-metrics", "/metrics")
        return f'berth_reservation_gpus_used{{reservation="{name}"}} 4.0' in scraped.splitlines()

    await eventually(counted, 10, lambda: "the metrics are not what the status says")

    await tenant.until("due", phase="Succeeded", seconds=40)
    await tenant.until("lent", phase="Running", seconds=40)
    assert (await tenant.get("firm"))["status"]["phase"] == "Scheduling"
    await tenant.delete("lent")
    await until(tenant, name, phase="Ended", seconds=start + 60 - time.time() + 10)
    await tenant.until("firm", phase="Succeeded", seconds=40)

    async def events() -> bool:
        found = (await tenant.kube.list(EVENTS))[0]
        told = {event["reason"] for event in found if event.get("regarding", {}).get("name") == name}
        return {"Reserved", "Active", "Ended"} <= told

    await eventually(events, 10, lambda: "no Events tell of the reservation")


async def a_wrong_reservation_says_where_and_why(tenant: Tenant) -> None:
    await tenant.node("a", 4)
    now = time.time()
    with pytest.raises(Invalid, match=r"spec\.end.*must be after start"):
        await reserve(tenant, "backwards", 1, now + 100, -50)
    with pytest.raises(Invalid, match=r"spec\.gpusPerNode.*gpus must be a multiple of it"):
        await reserve(tenant, "odd", 3, now + 100, gpusPerNode=2)
    await until_refused(tenant, "is past; it is ", 1, now - 100, 50)
    await until_refused(tenant, "spec.gpus: the 1 node that matches its nodeSelector has 4 GPUs", 5, now + 100)
    first = await reserve(tenant, "first", 3, now + 300)
    await until(tenant, first, phase="Reserved")
    told = f"spec.gpus: with GPUReservation {first} 5 GPUs would be reserved at "
    await until_refused(tenant, told, 2, now + 310)

    missing = f"{tenant.namespace}-late"
    await tenant.apply("early", 1, run="1s", reservation=missing)
    waiting = await tenant.until("early", phase="Pending")
    assert condition(waiting, "Accepted")["reason"] == "NoReservation"
    assert waiting["status"]["message"] == f"spec.reservation: there is no GPUReservation {missing}"
    await reserve(tenant, "late", 1, time.time() - 5)
    await tenant.until("early", phase="Succeeded", seconds=40)
    other = await reserve(tenant, "other", 1, now + 900, namespaces=["nobody"])

    async def not_for_us() -> bool:
        try:
            await tenant.apply("stranger", 1, reservation=other)
        except Invalid as told:
            return f"spec.reservation: GPUReservation {other} is not for namespace {tenant.namespace}" in str(told)
        await tenant.delete("stranger")
        await tenant.until_gone("stranger")
        return False

    await eventually(not_for_us, 20, lambda: "a namespace that it does not name may use it")


async def a_gang_gets_all_of_its_places_from_its_reservation(tenant: Tenant) -> None:
    nodes = [await tenant.node(name, 2) for name in "ab"]
    await tenant.apply("lent", 2, run="600s", preemptible=True, nodeSelector={"kubernetes.io/hostname": nodes[0]})
    await tenant.until("lent", phase="Running", assignedNode=nodes[0])
    name = await reserve(tenant, "r", 4, time.time() - 5, 150, gpusPerNode=2)
    await until(tenant, name, phase="Active", reserved=4)
    kept = [each["name"] for each in (await tenant.kube.get(GPURESERVATIONS, name))["status"]["nodes"]]
    await tenant.apply("gang", 1, run="30s", replicas=4, reservation=name)
    running = await tenant.until("gang", phase="Running", placedReplicas=4, seconds=60)
    assert running["status"]["nodes"] == [{"name": node, "pods": 2} for node in sorted(kept)]
    await until(tenant, name, used=4)
    await tenant.apply("later", 1, run="1s", replicas=2, reservation=name)
    waiting = await tenant.until("later", phase="Scheduling")
    assert condition(waiting, "Scheduled")["reason"] == "WaitingForReservation"
    assert waiting["status"]["message"].startswith(
        f"needs 2 pods with 1 GPU each; what is left of the 4 GPUs of GPUReservation {name} has room for 0 of them"
    )
    for each in ("gang", "later"):
        await tenant.until(each, phase="Succeeded", seconds=60)


STORIES: tuple[Story, ...] = (
    who_borrowed_makes_way_in_time,
    a_wrong_reservation_says_where_and_why,
    a_gang_gets_all_of_its_places_from_its_reservation,
)


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
async def test_that(story: str, long_stories: Begun) -> None:
    await long_stories[story]
