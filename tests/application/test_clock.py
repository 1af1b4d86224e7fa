"""The wall clocks of controller and worker are set, by an hour and back, while work is under way."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from berth.controller_process import LEASE
from crds.settings import SETTINGS_NAMESPACE
from kube.resources import LEASES
from tests.application.clock import Clock
from tests.application.tenant import Tenant, eventually

pytestmark = pytest.mark.stack

AHEAD, BEHIND = 3600, -240  # certificates are valid from five minutes before they were made


def shown(workload: dict[str, Any]) -> float:
    """When the worker's clock says that the workload was scheduled."""
    (told,) = [c["lastTransitionTime"] for c in workload["status"]["conditions"] if c["type"] == "Scheduled"]
    return datetime.fromisoformat(told).timestamp()


async def leader(tenant: Tenant) -> tuple[str, int]:
    spec = (await tenant.kube.get(LEASES, LEASE, SETTINGS_NAMESPACE))["spec"]
    return spec["holderIdentity"], spec["leaseTransitions"]


async def job(tenant: Tenant, workload: str, attempt: int) -> None:
    async def made() -> bool:
        names = [job["metadata"]["name"] for job in await tenant.jobs()]
        return any(name.startswith(f"{workload}-") and name.endswith(f"-{attempt}") for name in names)

    await eventually(made, 30, lambda: f"attempt {attempt} of {workload} was not made")


async def test_work_goes_on_and_nothing_is_counted_twice_when_clocks_jump(tenant: Tenant, clock: Clock) -> None:
    await tenant.node("a", 4)
    lease = await leader(tenant)
    await tenant.apply("before", 1, run="12s")
    await tenant.until("before", phase="Running")
    await tenant.apply("waiting", 4)
    await tenant.apply("failing", 1, exit_code=3, retryPolicy={"maxRetries": 2, "backoffSeconds": 5})
    await tenant.until("failing", retryCount=1)
    began = time.monotonic()
    try:
        clock.ahead(AHEAD)
        await tenant.patch("failing", priority="high")  # so that it looks again in the middle of its back-off
        await tenant.apply("ahead", 1)
        await job(tenant, "failing", attempt=1)
        assert time.monotonic() - began > 3, "the clock's hour counted as part of a back-off of five seconds"
        told = await tenant.until("ahead", phase="Succeeded")
        assert shown(told) > time.time() + AHEAD - 60, "the worker's clock was not ahead: nothing was tested"
        await tenant.until("failing", retryCount=2)
        clock.ahead(BEHIND)
        await job(tenant, "failing", attempt=2)  # and not an hour later
        await tenant.apply("behind", 1)
        told = await tenant.until("behind", phase="Succeeded")
        assert shown(told) < time.time() + BEHIND + 60
    finally:
        clock.ahead(0)
    for name in ("before", "waiting"):
        await tenant.until(name, phase="Succeeded", seconds=60)
    for name in ("before", "waiting", "ahead", "behind"):
        status = (await tenant.get(name))["status"]
        assert (status.get("attempt", 0), status.get("retryCount", 0)) == (0, 0), f"{name} ran more than once: {status}"
    await tenant.until("failing", phase="Failed", retryCount=2, attempt=2)
    assert await leader(tenant) == lease, "another controller took over because of a clock"
