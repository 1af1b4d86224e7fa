"""Temporal suggests to continue as new after a few events already: nothing is lost or repeated by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from temporalio.client import WorkflowHandle

from activities.messages import placement_id, workload_id
from berth.cli.application import after_up, application_processes
from stack import Stack, UpOptions
from tests.application.tenant import Tenant, tenancy
from tests.faults.checker import check
from tests.faults.revisions import history, runs_of

pytestmark = pytest.mark.stack

# A look and the wait after it are about ten.
EVENTS = 20


@pytest.fixture
async def short(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tenant]:
    stack = Stack(tmp_path_factory.mktemp("continued"))
    limit = {"limit.historyCount.suggestContinueAsNew": EVENTS}
    options = UpOptions(end_with_caller=True, etcd_fsync=False, keep_history=True, temporal_dynamic_config=limit)
    await asyncio.to_thread(
        stack.up,
        options,
        processes=lambda endpoints: application_processes(endpoints, options),
        after_up=lambda endpoints: after_up(endpoints, {"bindDeadlineSeconds": 4}),
    )
    try:
        async with tenancy(stack, "continued") as tenant:
            yield tenant
    finally:
        await asyncio.to_thread(stack.down)


async def continued(tenant: Tenant, workflow: str) -> bool:
    """Whether the newest run of a workflow is not its first."""
    handle: WorkflowHandle[object, object] = tenant.temporal.get_workflow_handle(workflow)
    described = await handle.describe()
    return described.raw_info.first_run_id != described.run_id


async def test_retries_verdicts_and_promises_outlive_continue_as_new(short: Tenant) -> None:
    await short.node("a", 2)
    patient = {"maxRetries": 4, "backoffSeconds": 1}
    applied = {
        "fails": await short.apply("fails", exit_code=3, retryPolicy=patient),
        "impossible": await short.apply("impossible", 8, retryPolicy=patient),
        "runs": await short.apply("runs", run="20s"),
    }
    uids = {name: raw["metadata"]["uid"] for name, raw in applied.items()}
    for name in ("fails", "impossible"):
        await short.until(name, phase="Failed", retryCount=4, seconds=90)
    await short.until("runs", phase="Succeeded", retryCount=0, seconds=60)
    for workflow in (placement_id("default"), workload_id(uids["fails"]), workload_id(uids["impossible"])):
        assert await continued(short, workflow), f"{workflow} was never continued as new: nothing was tested"
    revisions = await asyncio.to_thread(history, short.stack.endpoints)
    # The judge counts Jobs; the retries of what fits nowhere are verdicts without one.
    assert [broken for broken in check(revisions).violations if "/impossible " not in broken] == []
    assert runs_of(revisions) == {uids["fails"]: [0, 1, 2, 3, 4], uids["runs"]: [0]}
