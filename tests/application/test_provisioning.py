"""Nodes ordered from a simulated autoscaler on a real API server: one for each need, and nothing stays behind.

In an installation of its own, since its settings make every workload that no node could hold wait for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import WorkflowExecutionStatus

from activities.messages import PlacementState, placement_id, provisioning_id
from berth.cli.application import after_up, application_processes
from kube.resources import PODTEMPLATES
from planning.requests import LOOK_SOON
from stack import Endpoints, Stack, StackError, UpOptions
from tests.application.autoscaler import CLASS, SimulatedAutoscaler, install_kind
from tests.application.stories import Begun, side_by_side
from tests.application.tenant import Tenant, condition, eventually, tenancy, type_name

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

Story = Callable[[Tenant, SimulatedAutoscaler], Coroutine[None, None, None]]

# The backoff lasts long enough for a test to see that nothing is ordered meanwhile.
SETTINGS: dict[str, Any] = {
    "bindDeadlineSeconds": 5,
    "provisioning": {
        "className": CLASS, "parameters": {"zone": "z"}, "waitSeconds": 2, "backoffSeconds": 2, "retries": 2,
        "bookingSeconds": 120, "maxOrders": 50,
    },
}  # fmt: skip
# One order that is accepted, provisioned and used (workflows/provisioning.py).
BUDGET = 30


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("provisioning"))
    options = UpOptions(end_with_caller=True, etcd_fsync=False)

    def install(endpoints: Endpoints) -> None:
        install_kind(endpoints)
        after_up(endpoints, SETTINGS)

    stack.up(options, processes=lambda endpoints: application_processes(endpoints, options), after_up=install)
    yield stack
    stack.down()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(scaled: Stack) -> AsyncIterator[Begun]:
    async def tell(story: Story) -> None:
        async with tenancy(scaled, story.__name__) as tenant, SimulatedAutoscaler(tenant).running() as autoscaler:
            try:
                await story(tenant, autoscaler)
            finally:
                await tenant.leave()

    async with side_by_side({story.__name__: tell(story) for story in STORIES}) as begun:
        yield begun


async def nothing_left(tenant: Tenant, autoscaler: SimulatedAutoscaler, uid: str) -> None:
    """Neither requests nor templates, and the ledger remembers nothing of it."""
    await autoscaler.nothing_left()
    left: list[Any] = []

    async def clean() -> bool:
        templates, _ = await tenant.kube.list(PODTEMPLATES, tenant.namespace)
        handle = tenant.temporal.get_workflow_handle(placement_id("default"))
        state = await handle.query("ledger", result_type=PlacementState)
        left[:] = [each["metadata"]["name"] for each in templates]
        left.extend(known for of, known in state.ledger.provisioning.items() if of == uid)
        return not left

    # A workflow that waits for no request hears of nothing until its next look.
    await eventually(
        clean, 20 + LOOK_SOON, lambda: f"templates, or what the ledger knows of the order, are left: {left}"
    )


async def history(tenant: Tenant, uid: str) -> list[str]:
    handle = tenant.temporal.get_workflow_handle(provisioning_id(uid))
    async with asyncio.timeout(20):
        await handle.result()
    return [type_name(event.event_type) async for event in handle.fetch_history_events()]


async def one_node_is_ordered_and_used(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    uid = (await tenant.apply("big", 8, run="300s"))["metadata"]["uid"]
    name = await autoscaler.request(1)
    (request,) = autoscaler.made
    assert request["spec"] == {
        "provisioningClassName": CLASS, "parameters": {"zone": "z"},
        "podSets": [{"count": 1, "podTemplateRef": {"name": name}}],
    }  # fmt: skip
    template = (await tenant.kube.get(PODTEMPLATES, name, tenant.namespace))["template"]["spec"]
    assert template["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert template["nodeSelector"] == {"pool": tenant.namespace} and "affinity" not in template
    waiting = await tenant.until("big", phase="Scheduling")
    assert condition(waiting, "Scheduled")["reason"] == "Provisioning"

    async def says(text: str) -> None:
        async def shown() -> bool:
            return text in (await tenant.get("big"))["status"]["message"]

        await eventually(shown, 20, lambda: f"{text!r} should be told")

    await says(f"ordered 1 node for 8 GPUs (ProvisioningRequest {name}) at")
    await autoscaler.says(name, "Accepted")
    await says("; accepted at")
    node = await autoscaler.node("new", 8)
    await autoscaler.says(name, "Provisioned")
    await says("; provisioned at")
    # A node without GPUs is none, but it is no reason to order another.
    await asyncio.sleep(4)
    assert len(autoscaler.made) == 1 and not await tenant.jobs()
    await autoscaler.offers(node, 8)
    await tenant.until("big", phase="Running", assignedNode=node)
    (job,) = await tenant.jobs()
    told = job["spec"]["template"]["metadata"]["annotations"]
    assert told["autoscaling.x-k8s.io/consume-provisioning-request"] == name
    assert told["autoscaling.x-k8s.io/provisioning-class-name"] == CLASS
    await nothing_left(tenant, autoscaler, uid)
    assert len(autoscaler.made) == 1 and (await tenant.get("big"))["status"]["retryCount"] == 0
    events = await history(tenant, uid)
    assert len(events) <= BUDGET, ", ".join(events)
    reasons = {event["reason"] for event in await tenant.events("big")}
    assert {"Provisioning", "NodeOrdered", "OrderAccepted", "NodeProvisioned", "Scheduled"} <= reasons


async def two_that_fit_together_have_two_orders_and_share_a_node(
    tenant: Tenant, autoscaler: SimulatedAutoscaler
) -> None:
    """It is the autoscaler who knows how large its nodes are; when one comes, the second order is taken back."""
    uids = [(await tenant.apply(name, 4, run="300s"))["metadata"]["uid"] for name in ("a", "b")]
    await autoscaler.request(2)
    await autoscaler.offers(await autoscaler.node("new", 8), 8)
    for name, uid in zip("ab", uids, strict=True):
        await tenant.until(name, phase="Running")
        await nothing_left(tenant, autoscaler, uid)
    assert len(autoscaler.made) == 2


async def a_gang_has_one_order_and_starts_with_its_last_node(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    await tenant.node("there", 2)
    uid = (await tenant.apply("gang", 2, run="300s", replicas=3))["metadata"]["uid"]
    name = await autoscaler.request(1)
    assert autoscaler.made[0]["spec"]["podSets"] == [{"count": 3, "podTemplateRef": {"name": name}}]

    async def told() -> bool:
        message = (await tenant.get("gang")).get("status", {}).get("message", "")
        return f"ordered nodes for 3 pods of 2 GPUs each (ProvisioningRequest {name})" in message

    await eventually(told, 20, lambda: "it should be told what is ordered")
    first, last = [await autoscaler.node(which, 2) for which in ("first", "last")]
    await autoscaler.says(name, "Provisioned")
    await autoscaler.offers(first, 2)
    # Another that is told something was looked at by a round of its own: it saw that two of three fit.
    await tenant.apply("later", 1, suspend=True)
    await tenant.until("later", phase="Pending")
    assert not await tenant.jobs() and len(autoscaler.made) == 1
    await autoscaler.offers(last, 2)
    running = await tenant.until("gang", phase="Running", placedReplicas=3)
    assert {each["name"][len(tenant.namespace) + 1 :] for each in running["status"]["nodes"]} == {
        "there", "first", "last",
    }  # fmt: skip
    for pod in await tenant.pods():
        told_by = pod["metadata"]["annotations"]["autoscaling.x-k8s.io/consume-provisioning-request"]
        assert told_by == name
    await nothing_left(tenant, autoscaler, uid)
    assert len(autoscaler.made) == 1


async def a_gang_for_which_what_is_free_and_coming_suffices_has_none_ordered(
    tenant: Tenant, autoscaler: SimulatedAutoscaler
) -> None:
    await tenant.node("there", 2)
    coming = await autoscaler.node("coming", 2)
    await tenant.apply("gang", 2, run="300s", replicas=2)
    await tenant.until("gang", phase="Scheduling")
    await asyncio.sleep(2 * SETTINGS["provisioning"]["waitSeconds"])  # an order would be due
    await autoscaler.offers(coming, 2)
    await tenant.until("gang", phase="Running", placedReplicas=2)
    assert not autoscaler.made


async def a_request_that_fails_is_followed_by_another(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    uid = (await tenant.apply("w", 2, run="300s"))["metadata"]["uid"]
    first = await autoscaler.request(1)
    await autoscaler.says(first, "Failed")
    await autoscaler.nothing_left()
    assert "retry 1 of 2" in (await tenant.get("w"))["status"]["message"]
    second = await autoscaler.request(2)
    assert second != first
    await autoscaler.says(second, "Provisioned")
    await autoscaler.offers(await autoscaler.node("new", 2), 2)
    await tenant.until("w", phase="Running", retryCount=0)
    await nothing_left(tenant, autoscaler, uid)
    assert "OrderFailed" in {event["reason"] for event in await tenant.events("w")}


async def a_booking_that_expires_is_made_anew(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    uid = (await tenant.apply("w", 2, run="300s"))["metadata"]["uid"]
    first = await autoscaler.request(1)
    await autoscaler.says(first, "Provisioned")
    await autoscaler.says(first, "BookingExpired")
    second = await autoscaler.request(2)
    assert autoscaler.open == [second]
    # One that nobody declares expired does so by berth's own clock.
    await autoscaler.says(second, "Provisioned", ago=SETTINGS["provisioning"]["bookingSeconds"])
    third = await autoscaler.request(3)
    await autoscaler.says(third, "Provisioned")
    await autoscaler.offers(await autoscaler.node("new", 2), 2)
    await tenant.until("w", phase="Running", retryCount=0)
    await nothing_left(tenant, autoscaler, uid)
    assert len(autoscaler.made) == 3


async def while_a_node_is_coming_none_is_ordered_anew(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    """The booking of a node whose driver takes its time runs out first."""
    uid = (await tenant.apply("w", 2, run="300s"))["metadata"]["uid"]
    first = await autoscaler.request(1)
    node = await autoscaler.node("slow", 2)
    await autoscaler.says(first, "Provisioned")
    await autoscaler.says(first, "BookingExpired")
    await autoscaler.nothing_left()

    async def waits_for_it() -> bool:
        return "a node is there whose GPUs are not usable yet" in (await tenant.get("w"))["status"]["message"]

    await eventually(waits_for_it, 20, lambda: "it should wait for the node that is coming")
    await autoscaler.offers(node, 2)
    await tenant.until("w", phase="Running")
    assert len(autoscaler.made) == 1
    await nothing_left(tenant, autoscaler, uid)


async def retries_of_an_order_end(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    """Afterwards it is as without orders: no node could hold it, which costs retries of its own."""
    await tenant.node("small", 1)
    uid = (await tenant.apply("w", 2, retryPolicy={"maxRetries": 1, "backoffSeconds": 1}))["metadata"]["uid"]
    for number in (1, 2, 3):
        await autoscaler.says(await autoscaler.request(number), "Failed")
    failed = await tenant.until("w", phase="Failed")
    assert "no node has 2 GPUs; the largest" in failed["status"]["message"]
    assert len(autoscaler.made) == 3
    await nothing_left(tenant, autoscaler, uid)
    assert "OrderGivenUp" in {event["reason"] for event in await tenant.events("w")}


async def who_no_longer_waits_has_the_order_taken_back(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    leave: dict[str, Callable[[str], Coroutine[None, None, None]]] = {
        "deleted": tenant.delete,
        "suspended": partial(tenant.patch, suspend=True),
    }
    for number, name in enumerate(leave, start=1):
        uid = (await tenant.apply(name, 2))["metadata"]["uid"]
        request = await autoscaler.request(number)
        await autoscaler.says(request, "Accepted")
        await leave[name](name)
        await nothing_left(tenant, autoscaler, uid)
    uid = (await tenant.apply("edited", 2))["metadata"]["uid"]
    old = await autoscaler.request(3)
    await tenant.patch("edited", gpuCount=3)
    new = await autoscaler.request(4)

    async def replaced() -> bool:
        return autoscaler.open == [new]

    await eventually(replaced, 20, lambda: f"{old} should be gone, {autoscaler.open} are open")
    await tenant.delete("edited")
    await nothing_left(tenant, autoscaler, uid)


async def somebody_who_deletes_a_request_has_it_made_anew(tenant: Tenant, autoscaler: SimulatedAutoscaler) -> None:
    await tenant.apply("w", 2)
    first = await autoscaler.request(1)
    await tenant.until("w", phase="Scheduling")
    await asyncio.to_thread(tenant.stack.kubectl, "delete", "provreq", "-n", tenant.namespace, first)
    assert await autoscaler.request(2) != first


async def who_waits_for_capacity_waits_a_while_before_it_orders(
    tenant: Tenant, autoscaler: SimulatedAutoscaler
) -> None:
    node = await tenant.node("a", 2)
    await tenant.apply("first", 2, run="300s")
    await tenant.until("first", phase="Running", assignedNode=node)
    uid = (await tenant.apply("second", 2, run="300s"))["metadata"]["uid"]
    waiting = await tenant.until("second", phase="Scheduling")
    assert condition(waiting, "Scheduled")["reason"] == "WaitingForCapacity" and not autoscaler.made
    await autoscaler.request(1)
    await tenant.delete("first")  # what it waited for comes free after all
    await tenant.until("second", phase="Running", assignedNode=node)
    await nothing_left(tenant, autoscaler, uid)


async def a_workflow_that_somebody_cancels_takes_its_order_back(
    tenant: Tenant, autoscaler: SimulatedAutoscaler
) -> None:
    uid = (await tenant.apply("w", 2))["metadata"]["uid"]
    await autoscaler.request(1)
    handle = tenant.temporal.get_workflow_handle(provisioning_id(uid))
    await handle.cancel()
    await autoscaler.nothing_left()

    async def cancelled() -> bool:
        return (await handle.describe()).status == WorkflowExecutionStatus.CANCELED

    await eventually(cancelled, 20, lambda: "the workflow should be cancelled")
    assert len(autoscaler.made) == 1


STORIES: tuple[Story, ...] = (
    one_node_is_ordered_and_used,
    two_that_fit_together_have_two_orders_and_share_a_node,
    a_gang_has_one_order_and_starts_with_its_last_node,
    a_gang_for_which_what_is_free_and_coming_suffices_has_none_ordered,
    a_request_that_fails_is_followed_by_another,
    a_booking_that_expires_is_made_anew,
    while_a_node_is_coming_none_is_ordered_anew,
    retries_of_an_order_end,
    who_no_longer_waits_has_the_order_taken_back,
    somebody_who_deletes_a_request_has_it_made_anew,
    who_waits_for_capacity_waits_a_while_before_it_orders,
    a_workflow_that_somebody_cancels_takes_its_order_back,
)


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
async def test_provisioning(told: Begun, story: str) -> None:
    await told[story]


async def test_a_worker_that_is_killed_orders_nothing_twice(scaled: Stack, told: Begun) -> None:
    """Killed at each step of an order; after the stories, which it would disturb."""

    async def kill() -> None:
        """As soon as there is one to kill."""

        async def killed() -> bool:
            try:
                await asyncio.to_thread(scaled.kill, "worker")
            except StackError:
                return False
            return True

        await eventually(killed, 30, lambda: "no worker runs")

    await asyncio.gather(*told.values(), return_exceptions=True)
    async with tenancy(scaled, "killed") as tenant, SimulatedAutoscaler(tenant).running() as autoscaler:
        uid = (await tenant.apply("w", 2, run="300s"))["metadata"]["uid"]
        name = await autoscaler.request(1)
        await kill()
        await autoscaler.says(name, "Accepted")
        node = await autoscaler.node("new", 2)
        await autoscaler.says(name, "Provisioned")
        await kill()
        await autoscaler.offers(node, 2)
        await tenant.until("w", 90, phase="Running")
        await kill()
        await autoscaler.nothing_left(60)
        await nothing_left(tenant, autoscaler, uid)
        assert [each["metadata"]["name"] for each in autoscaler.made] == [name]
        assert len(await tenant.jobs()) == 1
        await tenant.leave()
