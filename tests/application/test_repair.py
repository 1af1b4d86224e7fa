"""What people and outages break, and the sweep repairs: workflows that were ended, leftovers of tombstones."""

from __future__ import annotations

import asyncio

import pytest

from activities.messages import workload_id
from kube.resources import GPUWORKLOADS
from planning.naming import FINALIZER
from tests.application.tenant import Tenant, eventually

pytestmark = pytest.mark.stack


async def sweep_now(tenant: Tenant) -> None:
    """A new leader sweeps at once; it waits for the old one's lease to run out."""
    old = await asyncio.to_thread(tenant.stack.kill, "controller")
    await asyncio.to_thread(tenant.stack.wait_restarted, "controller", old)


async def test_workflows_that_somebody_ended_are_begun_again(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    failing = (await tenant.apply("failing", 1, exit_code=1))["metadata"]["uid"]
    running = (await tenant.apply("running", 1, run="300s"))["metadata"]["uid"]
    held = (await tenant.apply("held", 8))["metadata"]["uid"]
    await tenant.until("running", phase="Running")
    await tenant.patch("running", priority=7)
    for name in ("failing", "held"):
        await tenant.until(name, retryCount=1)

    async def followed(*uids: str) -> bool:
        return all([await tenant.followed(uid) for uid in uids])

    await eventually(lambda: followed(running), 10, lambda: "the edit began no workflow")
    for uid in (failing, running, held):
        await tenant.temporal.get_workflow_handle(workload_id(uid)).terminate("as somebody might")
    (job,) = [job["metadata"]["uid"] for job in await tenant.jobs() if not job["status"].get("failed")]
    await sweep_now(tenant)
    # A verdict counts as lost only at a second look, half a minute later, for it may only be on its way.
    await eventually(lambda: followed(failing, held), 120, lambda: "not both workflows were begun again")
    await tenant.until("held", seconds=30, phase="Pending", attempt=2)
    assert job in [job["metadata"]["uid"] for job in await tenant.jobs()], "the running Job was left alone"
    assert not await tenant.followed(running), "nothing is to be decided about it"
    await tenant.evict("running")
    await tenant.until("running", phase="Running", attempt=1)


async def test_a_finalizer_left_on_a_tombstone_is_removed(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w")
    await tenant.until("w", phase="Succeeded")

    async def without() -> bool:
        return FINALIZER not in (await tenant.get("w"))["metadata"].get("finalizers", [])

    await eventually(without, 10, lambda: "the finalizer is still there")
    await tenant.kube.merge_patch(GPUWORKLOADS, "w", tenant.namespace, {"metadata": {"finalizers": [FINALIZER]}})
    await tenant.delete("w")
    await tenant.until_gone("w", seconds=30)  # the deletion itself makes the controller look
