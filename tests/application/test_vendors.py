"""A cluster of two vendors, of GPUs with more and with less memory, and of seats, through the API server's door."""

from __future__ import annotations

from typing import Any

import pytest

from kube.errors import Invalid
from planning.accelerators import AMD, NVIDIA, NVIDIA_MEMORY_LABEL, SEAT
from planning.naming import WORKLOAD_LABEL
from tests.application.tenant import Tenant, condition

pytestmark = pytest.mark.stack


async def limits(tenant: Tenant, workload: str) -> dict[str, Any]:
    """What the workload's pod asks for."""
    (pod,) = [pod for pod in await tenant.pods() if pod["metadata"]["labels"].get(WORKLOAD_LABEL) == workload]
    found: dict[str, Any] = pod["spec"]["containers"][0]["resources"]["limits"]
    return found


async def test_every_workload_gets_gpus_of_its_own_vendor(tenant: Tenant) -> None:
    both = await tenant.node("both", 1, offers={AMD: 2})
    await tenant.apply("amd", 2, run="300s", gpuResource=AMD)
    await tenant.apply("nvidia", 1, run="300s")
    for name in ("amd", "nvidia"):
        raw = await tenant.until(name, phase="Running")
        assert raw["status"]["assignedNode"] == both
    assert (await limits(tenant, "amd"), await limits(tenant, "nvidia")) == ({AMD: "2"}, {NVIDIA: "1"})
    await tenant.apply("more", 1, gpuResource=AMD)
    waiting = await tenant.until("more", phase="Scheduling")
    assert condition(waiting, "Scheduled")["reason"] == "WaitingForCapacity"
    assert f"needs 1 {AMD} on one node" in waiting["status"]["message"]
    await tenant.delete("amd")
    await tenant.until("more", phase="Succeeded")


async def test_gpu_memory_is_what_the_labels_tell(tenant: Tenant) -> None:
    little: dict[str, Any] = {NVIDIA_MEMORY_LABEL: "24576"}
    much: dict[str, Any] = {NVIDIA_MEMORY_LABEL: "81559"}
    await tenant.node("small", 8, **little)
    await tenant.node("unknown", 8)
    large = await tenant.node("large", 1, **much)
    await tenant.apply("w", run="300s", gpuMemory="80G")
    running = await tenant.until("w", phase="Running")
    assert running["status"]["assignedNode"] == large
    await tenant.apply("next", gpuMemory="80G")
    waiting = await tenant.until("next", phase="Scheduling")
    assert "1 with GPUs of 24 GiB (it needs 74.5 GiB)" in waiting["status"]["message"]


async def test_a_part_of_a_gpu_becomes_a_seat_where_there_are_seats(tenant: Tenant) -> None:
    await tenant.node("whole", 8)
    await tenant.apply("w", run="300s", gpuFraction=0.5, retryPolicy={"maxRetries": 10, "backoffSeconds": 1})
    told = await tenant.until("w", phase="Pending")
    assert "berth gives parts of GPUs only as seats" in told["status"]["message"]
    seated = await tenant.node("seated", 0, offers={SEAT: 2})
    running = await tenant.until("w", seconds=60, phase="Running")
    assert running["status"]["assignedNode"] == seated
    assert await limits(tenant, "w") == {SEAT: "1"}


async def test_what_contradicts_itself_is_refused_at_the_door(tenant: Tenant) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"gpus": 2, "gpuFraction": 0.5}, "gpuFraction is a part of one GPU"),
        ({"gpuFraction": 1.5}, "spec.gpuFraction"),
        ({"gpuFraction": 0.5, "gpuResource": AMD}, "gpuFraction is a part of one GPU"),
        ({"gpuMemory": "lots"}, "spec.gpuMemory"),
        ({"gpuResource": "gpu"}, "spec.gpuResource"),
    ]
    for wrong, message in refused:
        with pytest.raises(Invalid, match=message):
            await tenant.apply("w", **wrong)
