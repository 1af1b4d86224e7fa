"""SIGKILL at each step of a preemption: the one that is stopped loses no retry, the other gets its place, once each.

The steps are those that others can see: a Job is suspended, its pods go, the other's Job is made and ends, the stopped
one goes on. Each victim dies in an installation of its own, side by side: after each kill most of the time is waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from crds.gpuworkload import API_VERSION, KIND
from kube.client import KubeClient
from kube.resources import GPUWORKLOADS, JOBS, NODES, PODS
from planning.accelerators import NVIDIA
from planning.naming import ATTEMPT_LABEL, WORKLOAD_LABEL
from planning.views import job_view
from stack import SimulatedNode, Stack, node_manifests
from tests.application.stories import Begun, installation, side_by_side
from tests.faults.checker import Demand, check
from tests.faults.revisions import history, runs_of
from tests.faults.test_kills import connected, delete_all, insist

pytestmark = [
    pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")
]  # fmt: skip

Seen = Callable[[KubeClient, str], Awaitable[bool]]

VICTIMS = ("worker", "temporal")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def killed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Begun]:
    installing = asyncio.Lock()

    async def time_and_again(victim: str) -> None:
        folder = tmp_path_factory.mktemp(victim)
        async with installation(folder, {"minimumRuntimeSeconds": 1}, installing) as stack:
            await preemptions_survive_a_kill_at_each_step(stack, victim)

    async with side_by_side({victim: time_and_again(victim) for victim in VICTIMS}) as begun:
        yield begun


async def mine(kube: KubeClient, of: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The workload's Jobs and pods."""
    selector = f"{WORKLOAD_LABEL}={of}"
    jobs, _ = await insist(kube.list, JOBS, "default", label_selector=selector)
    pods, _ = await insist(kube.list, PODS, "default", label_selector=selector)
    return jobs, pods


async def asked(kube: KubeClient, pair: str) -> bool:
    """Nothing was done yet, but the other one is there."""
    return True


async def suspended(kube: KubeClient, pair: str) -> bool:
    jobs, _ = await mine(kube, f"low-{pair}")
    return any(job["spec"].get("suspend") for job in jobs)


async def pods_gone(kube: KubeClient, pair: str) -> bool:
    """And the Job controller says so, which is what its turn's end waits for."""
    jobs, pods = await mine(kube, f"low-{pair}")
    return not pods and any((view := job_view(job, NVIDIA)) is not None and view.halted for job in jobs)


async def other_made(kube: KubeClient, pair: str) -> bool:
    jobs, _ = await mine(kube, f"high-{pair}")
    return bool(jobs)


async def other_ended(kube: KubeClient, pair: str) -> bool:
    return await phase(kube, f"high-{pair}") == "Succeeded"


async def goes_on(kube: KubeClient, pair: str) -> bool:
    jobs, _ = await mine(kube, f"low-{pair}")
    return any(job["metadata"]["labels"][ATTEMPT_LABEL] == "1" for job in jobs)


STEPS: tuple[Seen, ...] = (asked, suspended, pods_gone, other_made, other_ended, goes_on)


async def submit(kube: KubeClient, name: str, node: str, run: str, **spec: Any) -> None:
    env = [{"name": "SIMULATED_RUN", "value": run}]
    body = {"modelName": "m", "gpuCount": 2, "nodeSelector": {"kubernetes.io/hostname": node}, "env": env, **spec}
    meta = {"name": name, "labels": {"demand": "succeeds"}}
    await insist(
        kube.create, GPUWORKLOADS, {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": body}, "default"
    )


async def phase(kube: KubeClient, name: str) -> str:
    raw = await insist(kube.get, GPUWORKLOADS, name, "default")
    return str(raw.get("status", {}).get("phase", ""))


async def until(holds: Callable[[], Awaitable[bool]], what: str, seconds: float = 60.0) -> None:
    """As soon as it holds: the next step is not far."""
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, f"after {seconds:.0f} s still not: {what}"
        await asyncio.sleep(0.01)


async def is_in(kube: KubeClient, name: str, wanted: str) -> bool:
    return await phase(kube, name) == wanted


@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_preemption_survives_a_kill_at_each_of_its_steps(killed: Begun, victim: str) -> None:
    await killed[victim]


async def preemptions_survive_a_kill_at_each_step(fleet: Stack, victim: str) -> None:
    steps = {step.__name__.replace("_", "-"): step for step in STEPS}
    async with connected(fleet) as kube:
        for manifest in node_manifests([SimulatedNode(pair, gpus=2) for pair in steps]):
            await kube.create(NODES, manifest)
        for pair, step in steps.items():
            await submit(kube, f"low-{pair}", pair, "20s", priority="low")
            await until(partial(is_in, kube, f"low-{pair}", "Running"), f"low-{pair} runs")
            await submit(kube, f"high-{pair}", pair, "1s", priority="high")
            await until(partial(step, kube, pair), f"{pair} comes to {step.__name__}")
            old = await asyncio.to_thread(fleet.kill, victim)
            await asyncio.to_thread(fleet.wait_restarted, victim, old, 60)
        told = {}
        for pair in steps:
            for name in (f"low-{pair}", f"high-{pair}"):
                await until(partial(is_in, kube, name, "Succeeded"), f"{name} ends", 120)
            raw = await kube.get(GPUWORKLOADS, f"low-{pair}", "default")
            told[pair] = raw["status"]["retryCount"], raw["status"]["attempt"]
        await delete_all(kube, 60)
    revisions = await asyncio.to_thread(history, fleet.endpoints)
    report = check(revisions, {"succeeds": Demand("Succeeded", "Completed")})
    assert report.violations == []
    assert report.left == []
    assert told == dict.fromkeys(steps, (0, 1)), "each is stopped once, and no retry is counted"
    assert all(len(runs) == len(set(runs)) for runs in runs_of(revisions).values()), "an attempt ran twice"
    made = {
        (meta["name"], meta["uid"]) for r in revisions if r.kind == "job" and r.value and (meta := r.value["metadata"])
    }
    assert len(made) == 2 * len(steps), "a Job that was stopped goes on, and none takes its place"
