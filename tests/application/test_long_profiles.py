"""What runs did is learned, recommended, and outlives the loss of Temporal's data; on an installation of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from activities.messages import placement_id
from activities.signatures import LEARN
from berth.cli import command_line
from kube.errors import NotFound
from kube.resources import GPUMODELPROFILES
from planning.accelerators import NVIDIA_MEMORY_LABEL
from planning.model import GPU_MODEL_LABEL
from planning.naming import profile_name
from stack import Stack
from tests.application.stories import Begun, Places, Stories, installation
from tests.application.tenant import Tenant, eventually, tenancy, type_name
from workflows.placement import LEARN_PAUSE

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

MODEL = "meta-llama/Llama-3.1-8B"
SETTINGS = {"bindDeadlineSeconds": 4, "sampleSeconds": 1}
# An end settles for 15 s, and the ledger lets a minute pass between two times of learning.
LEARNED = 100.0


def begin(places: Places) -> Stories:
    async def told() -> None:
        async with (
            installation(places.folder("profiles"), SETTINGS, places.installing) as stack,
            tenancy(stack, "profiles") as tenant,
        ):
            await runs_are_learned_recommended_and_remembered_without_temporal(tenant)

    return {runs_are_learned_recommended_and_remembered_without_temporal.__name__: told()}


async def run(tenant: Tenant, name: str, *, run: str = "5s", fails: bool = False, **spec: Any) -> None:
    """Asks for four GPUs and uses one."""
    said = {
        "SIMULATED_RUN": run,
        "SIMULATED_EXIT": str(int(fails)),
        "SIMULATED_USAGE": "gpus=1,engine=80,memory=20000,power=300",
    }
    env = [{"name": key, "value": value} for key, value in said.items()]
    await tenant.apply(name, 4, modelName=MODEL, env=env, **spec)


async def profile(tenant: Tenant) -> dict[str, Any]:
    try:
        return await tenant.kube.get(GPUMODELPROFILES, profile_name(MODEL), tenant.namespace)
    except NotFound:
        return {}


async def until_learned(tenant: Tenant, runs: int) -> dict[str, Any]:
    """The profile's status once it knows of so many runs."""
    status: dict[str, Any] = {}

    async def learned() -> bool:
        nonlocal status
        status = (await profile(tenant)).get("status", {})
        return bool(status.get("runs", 0) >= runs)

    await eventually(learned, LEARNED, lambda: f"{runs} runs should be learned; the profile says {status}")
    return status


async def berth(tenant: Tenant, *arguments: str) -> str:
    admin = str(tenant.stack.endpoints.kubeconfig("admin"))
    command = ["recommend", *arguments, "-n", tenant.namespace, "--kubeconfig", admin]
    result = await asyncio.to_thread(CliRunner().invoke, command_line(), command)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


async def times_learned(tenant: Tenant) -> list[float]:
    """When the ledger had runs learned, by its history."""
    return [
        event.event_time.ToNanoseconds() / 1e9
        async for event in tenant.temporal.get_workflow_handle(placement_id("default")).fetch_history_events()
        if type_name(event.event_type) == "ACTIVITY_TASK_SCHEDULED"
        and event.activity_task_scheduled_event_attributes.activity_type.name == LEARN
    ]


def forget_everything(stack: Stack) -> None:
    """Deletes Temporal's database under the running server: the next start finds nothing."""
    folder = Path(stack.endpoints.data) / "temporal"
    assert any(folder.iterdir())
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


async def test_runs_are_learned_recommended_and_remembered_without_temporal(long_stories: Begun) -> None:
    await long_stories[runs_are_learned_recommended_and_remembered_without_temporal.__name__]


async def runs_are_learned_recommended_and_remembered_without_temporal(tenant: Tenant) -> None:
    for name, model, memory in (("large", "A100", "81920"), ("small", "A10", "24576")):
        labels: dict[str, Any] = {GPU_MODEL_LABEL: model, NVIDIA_MEMORY_LABEL: memory}
        await tenant.node(name, 8, **labels)
    assert "Nothing was learned" in await berth(tenant)
    await run(tenant, "gone", ttlSecondsAfterFinished=1)
    for name in ("a", "b", "c"):
        await run(tenant, name)
    await tenant.until("c", phase="Succeeded")
    await run(tenant, "fails", fails=True, retryPolicy={"maxRetries": 1, "backoffSeconds": 1})
    await tenant.until("fails", phase="Failed")
    await tenant.until_gone("gone")

    status = await until_learned(tenant, 5)
    assert (status["runs"], status["succeeded"], status["retries"]) == (5, 4, 1), "the one that is gone counts as well"
    assert status["failures"] == [{"reason": "MaxRetriesExceeded", "count": 1}]
    assert (status["activeGPUs"], status["peakMemoryMiB"]) == (1, 20_000)
    (count,) = status["gpuCounts"]
    assert (count["gpuCount"], count["runs"], count["usage"]["engineActiveP95Percent"]) == (4, 4, 80)
    assert count["usage"]["simulated"] is True
    assert 3 <= float(status["p50"].removesuffix("s")) <= 9
    (typical,) = status["typicalPods"]
    assert (typical["gpus"], typical["weight"]) == (4, pytest.approx(5 * 1024, rel=0.5))
    head, row = (await asyncio.to_thread(tenant.stack.kubectl, "get", "gpump", "-n", tenant.namespace)).splitlines()
    assert head.split() == ["NAME", "MODEL", "RUNS", "P50", "P90", "ACTIVE", "GPUS", "PEAK", "MEMORY", "AGE"]
    assert row.split()[1:3] == [MODEL, "5"] and row.split()[5:7] == ["1", "20000"]

    text = await berth(tenant, MODEL)
    assert "asked 4 GPUs, priority normal proposed 1 GPU with 23,000 MiB each (type A10), priority high" in text
    assert "simulated samples of its runs with 4 GPUs" in text and "Nothing of this is applied." in text
    (told,) = json.loads(await berth(tenant, "--json"))
    assert (told["asked"]["gpu_count"], told["recommendation"]["gpu_count"]) == (4, 1)
    assert 0.3 < told["recommendation"]["confidence"] < 0.7

    await run(tenant, "next", run="8s")
    running = (await tenant.until("next", phase="Running"))["status"]
    assert running["recommendation"]["gpuCount"] == 1 and running["recommendation"]["simulated"] is True
    assert running["recommendation"]["gpuType"] == "A10"
    times = await times_learned(tenant)
    assert times and all(later - earlier >= LEARN_PAUSE for earlier, later in pairwise(times))

    forget_everything(tenant.stack)
    old = await asyncio.to_thread(tenant.stack.kill, "temporal")
    await asyncio.to_thread(tenant.stack.wait_restarted, "temporal", old, 60)
    ended = (await tenant.until("next", phase="Succeeded", seconds=90))["status"]
    assert ended["recommendation"]["gpuCount"] == 1
    assert (await until_learned(tenant, 6))["runs"] == 6, "none is lost and none counted twice"
    assert "proposed 1 GPU" in await berth(tenant, MODEL)
    assert await times_learned(tenant), "by the new ledger"
