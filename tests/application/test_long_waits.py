"""What takes others half a minute (the pod garbage collector, a kubelet's silence, a quota's refusals), and Temporal
when it suggests to continue as new after a few events already. All wait side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from temporalio.client import WorkflowHandle

from activities.messages import placement_id, workload_id
from kube.resources import NODES, Resource
from tests.application.conftest import SETTINGS
from tests.application.stories import Begun, Places, Stories, installation
from tests.application.tenant import Tenant, condition, eventually, tenancy
from tests.faults.checker import check
from tests.faults.revisions import history, runs_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

Story = Callable[[Tenant], Coroutine[None, None, None]]

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", namespaced=True)
# A look and the wait after it are about ten events.
SHORT_HISTORIES = {"limit.historyCount.suggestContinueAsNew": 20}


def begin(places: Places) -> Stories:
    async def told(story: Story) -> None:
        async with tenancy(places.deployed, story.__name__) as tenant:
            try:
                await story(tenant)
            finally:
                await tenant.leave()

    async def told_apart(story: Story) -> None:
        folder = places.folder("short")
        async with (
            installation(folder, SETTINGS, places.installing, SHORT_HISTORIES) as stack,
            tenancy(stack, story.__name__) as tenant,
        ):
            await story(tenant)

    stories = {story.__name__: told(story) for story in STORIES}
    apart = retries_verdicts_and_promises_outlive_continue_as_new
    return stories | {apart.__name__: told_apart(apart)}


async def a_deleted_node_costs_a_retry_and_the_next_job_goes_elsewhere(tenant: Tenant) -> None:
    first = await tenant.node("a", 1)
    await tenant.apply("w", run="300s", retryPolicy={"maxRetries": 2, "backoffSeconds": 1})
    running = await tenant.until("w", phase="Running")
    assert running["status"]["assignedNode"] == first
    second = await tenant.node("b", 1)
    await tenant.kube.delete(NODES, first)
    # The pod garbage collector takes a minute to give up the pods of a node that is gone; until then berth waits.
    again = await tenant.until("w", phase="Running", retryCount=1, seconds=150)
    assert again["status"]["assignedNode"] == second
    reasons = [e["reason"] for e in await tenant.events("w")]
    assert "NodeGone" in reasons
    assert "NodeLost" in reasons


async def a_node_that_is_merely_not_ready_is_waited_for_and_says_so(tenant: Tenant) -> None:
    node = await tenant.node("a", 1)
    await tenant.apply("w", run="30s")
    await tenant.until("w", phase="Running")
    label = {"metadata": {"labels": {"gpu.warp.dev/simulated-failure": "true"}}}
    await tenant.kube.merge_patch(NODES, node, None, label)
    raw = await tenant.get("w")

    async def told() -> bool:
        nonlocal raw
        raw = await tenant.get("w")
        return condition(raw, "Running").get("reason") == "NodeNotReady"

    await eventually(told, 30, lambda: f"nothing is said of the node: {raw.get('status')}")
    assert raw["status"]["phase"] in ("Running", "Scheduled")
    assert "waiting for it" in raw["status"]["message"]
    assert raw["status"]["retryCount"] == 0

    async def heard() -> bool:  # Events are written beside the statuses
        return [e["type"] for e in await tenant.events("w") if e["reason"] == "NodeNotReady"] == ["Warning"]

    await eventually(heard, 10, lambda: "no Event tells of the node")
    await tenant.kube.merge_patch(NODES, node, None, {"metadata": {"labels": {"gpu.warp.dev/simulated-failure": None}}})
    await tenant.until("w", phase="Running", message=f"running on node {node}")
    await tenant.until("w", phase="Succeeded", seconds=60)


async def a_node_out_of_service_costs_a_retry_and_the_next_job_goes_elsewhere(tenant: Tenant) -> None:
    first = await tenant.node("a", 1)
    await tenant.apply("w", run="300s", retryPolicy={"maxRetries": 2, "backoffSeconds": 1})
    await tenant.until("w", phase="Running", assignedNode=first)
    second = await tenant.node("b", 1)
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    await tenant.kube.merge_patch(NODES, first, None, {"spec": {"taints": [taint]}})
    await tenant.until("w", phase="Running", retryCount=1, assignedNode=second, seconds=60)
    (lost,) = [e for e in await tenant.events("w") if e["reason"] == "NodeLost"]
    assert "out of service" in lost["note"]


async def pods_that_a_quota_refuses_cost_retries_and_hold_no_gpu_for_ever(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await tenant.kube.create(QUOTAS, quota, tenant.namespace)
    await tenant.apply("w", retryPolicy={"maxRetries": 1, "backoffSeconds": 1})
    failed = await tenant.until("w", phase="Failed", seconds=90)  # 4 bind deadlines a Job, two Jobs
    assert "quota" in failed["status"]["message"]
    await tenant.empty()


async def who_waits_is_told_when_it_should_start(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("first", run="300s", activeDeadlineSeconds=280)
    await tenant.until("first", phase="Running")
    await tenant.apply("second")
    await tenant.until("second", phase="Scheduling")

    async def told() -> bool:
        return "expectedStartTime" in (await tenant.get("second"))["status"]

    await eventually(told, 120, lambda: "nobody says when it should start")  # there is a forecast a minute
    status = (await tenant.get("second"))["status"]
    assert status["expectedStartTime"] <= status["expectedStartLatest"]
    assert "; expected to start at " in status["message"]
    assert "StartExpected" in [event["reason"] for event in await tenant.events("second")]
    await tenant.delete("first")
    placed = await tenant.until("second", phase="Succeeded")
    assert "expectedStartTime" not in placed["status"]


async def continued(tenant: Tenant, workflow: str) -> bool:
    """Whether the newest run of a workflow is not its first."""
    handle: WorkflowHandle[object, object] = tenant.temporal.get_workflow_handle(workflow)
    described = await handle.describe()
    return described.raw_info.first_run_id != described.run_id


async def retries_verdicts_and_promises_outlive_continue_as_new(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    patient = {"maxRetries": 4, "backoffSeconds": 1}
    applied = {
        "fails": await tenant.apply("fails", exit_code=3, retryPolicy=patient),
        "impossible": await tenant.apply("impossible", 8, retryPolicy=patient),
        "runs": await tenant.apply("runs", run="20s"),
    }
    uids = {name: raw["metadata"]["uid"] for name, raw in applied.items()}
    for name in ("fails", "impossible"):
        await tenant.until(name, phase="Failed", retryCount=4, seconds=90)
    await tenant.until("runs", phase="Succeeded", retryCount=0, seconds=60)
    for workflow in (placement_id("default"), workload_id(uids["fails"]), workload_id(uids["impossible"])):
        assert await continued(tenant, workflow), f"{workflow} was never continued as new: nothing was tested"
    revisions = await asyncio.to_thread(history, tenant.stack.endpoints)
    # The judge counts Jobs; the retries of what fits nowhere are verdicts without one.
    assert [broken for broken in check(revisions).violations if "/impossible " not in broken] == []
    assert runs_of(revisions) == {uids["fails"]: [0, 1, 2, 3, 4], uids["runs"]: [0]}


STORIES: tuple[Story, ...] = (
    a_deleted_node_costs_a_retry_and_the_next_job_goes_elsewhere,
    a_node_that_is_merely_not_ready_is_waited_for_and_says_so,
    a_node_out_of_service_costs_a_retry_and_the_next_job_goes_elsewhere,
    pods_that_a_quota_refuses_cost_retries_and_hold_no_gpu_for_ever,
    who_waits_is_told_when_it_should_start,
)


@pytest.mark.parametrize(
    "story", [*STORIES, retries_verdicts_and_promises_outlive_continue_as_new], ids=lambda s: s.__name__
)
async def test_waiting(long_stories: Begun, story: Story) -> None:
    await long_stories[story.__name__]
