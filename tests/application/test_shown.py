"""What the status shows while a Job goes on, of which no workflow of the workload's own tells: the ledger does."""

from __future__ import annotations

import asyncio

import pytest

from planning.naming import WORKLOAD_LABEL
from tests.application.tenant import Tenant, eventually

pytestmark = pytest.mark.stack


async def until_job(tenant: Tenant, workload: str, **wanted: int) -> None:
    """Waits until the workload's only Job counts its pods like this."""

    async def counts() -> bool:
        mine = [j["status"] for j in await tenant.jobs() if j["metadata"]["labels"][WORKLOAD_LABEL] == workload]
        return len(mine) == 1 and all(mine[0].get(key) == n for key, n in wanted.items())

    await eventually(counts, 20, lambda: f"the Job does not count {wanted}")


async def rounds(tenant: Tenant, name: str) -> None:
    """The ledger has looked at everything since: it placed two others, one after the other."""
    for other in (f"{name}-1", f"{name}-2"):
        await tenant.apply(other, nodeSelector={"pool": tenant.namespace, "whose": "others"})
        await tenant.until(other, phase="Succeeded")


async def test_a_slow_start_a_restart_and_a_slow_end_are_shown_as_what_they_are(tenant: Tenant) -> None:
    await tenant.node("a", 1, kubelet=False)
    await tenant.node("b", 1, whose="others")
    async with tenant.phases() as shown:
        selector = {"pool": tenant.namespace, "kubernetes.io/hostname": f"{tenant.namespace}-a"}
        uid = (await tenant.apply("w", nodeSelector=selector))["metadata"]["uid"]
        await tenant.until("w", seconds=5, phase="Scheduled")
        await until_job(tenant, "w", active=1)
        await tenant.play("w", "Running", Ready=True)
        await tenant.until("w", seconds=5, phase="Running")
        await tenant.play("w", "Running", Ready=False)  # its container restarts
        await until_job(tenant, "w", active=1, ready=0)
        await rounds(tenant, "restarting")
        await tenant.play("w", "Running", Ready=True)
        await until_job(tenant, "w", active=1, ready=1)
        assert not await tenant.followed(uid)
        await tenant.evict("w")  # it takes its time to end
        await until_job(tenant, "w", ready=0, terminating=1)
        await rounds(tenant, "ending")
        await tenant.play("w", "Failed", DisruptionTarget=True)
        force = ("--force", "--grace-period=0", "--namespace", tenant.namespace)
        await asyncio.to_thread(tenant.stack.kubectl, "delete", "pod", await tenant.pod("w"), *force)
        await tenant.until("w", phase="Scheduled", attempt=1, retryCount=0)
        await until_job(tenant, "w", active=1)
        await tenant.play("w", "Succeeded")
        await tenant.until("w", phase="Succeeded")
    assert shown["w"] == ["Scheduled", "Running", "Scheduling", "Scheduled", "Succeeded"]
