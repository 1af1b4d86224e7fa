"""SIGKILL for every process while two hundred workloads are in flight; then the judge reads what etcd saw.

A third of them does more than succeed: some fail until their retries are used up, some are suspended and resumed, some
are edited, some are deleted on the way. What must become of each is its label `demand`, which the judge knows.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import pytest
import pytest_asyncio

from crds.gpuworkload import API_VERSION, KIND
from kube.client import KubeClient
from kube.errors import AlreadyExists, KubeError, Unavailable
from kube.resources import GPUWORKLOADS, JOBS, NODES, PODS
from planning.model import TOMBSTONES
from stack import SimulatedNode, Stack, node_manifests
from tests.application.stories import Begun, installation, side_by_side
from tests.faults.checker import Demand, check
from tests.faults.revisions import history

pytestmark = [
    pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")
]  # fmt: skip

VICTIMS = ("controller", "worker", "temporal", "kube-apiserver", "etcd")
ROUNDS = 3
NODES_WANTED, GPUS_EACH = 12, 8
SEED = 20261121
MAX_RETRIES = 2
SUCCEEDS = Demand("Succeeded", "Completed")
DEMANDS = {
    "succeeds": SUCCEEDS,
    "fails": Demand("Failed", "MaxRetriesExceeded", MAX_RETRIES),
    "suspended": SUCCEEDS,
    "urgent": SUCCEEDS,
    "overdue": Demand("Failed", "DeadlineExceeded"),
    "deleted": Demand(),
}
# One of each twenty workloads; the others succeed undisturbed.
MEDLEY = ("fails", "suspended", "suspended", "deleted", "deleted", "fails", "urgent", "overdue") + 12 * ("succeeds",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def survived(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Begun]:
    """Both in installations of their own, side by side."""
    installing = asyncio.Lock()

    async def lived_through(story: Callable[[Stack], Awaitable[None]]) -> None:
        folder = tmp_path_factory.mktemp(story.__name__)
        async with installation(folder, {}, installing, etcd_fsync=True) as fleet:
            await story(fleet)

    stories = (every_process_is_killed_time_and_again, what_runs_is_adopted_after_temporal_lost_its_data)
    async with side_by_side({story.__name__: lived_through(story) for story in stories}) as begun:
        yield begun


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(stack.endpoints.kubeconfig("admin")) as kube:
        yield kube


P = ParamSpec("P")


async def insist(call: Callable[P, Awaitable[Any]], *arguments: P.args, **keywords: P.kwargs) -> Any:
    """The test's own requests go through the same outages: they are repeated until they are answered."""
    while True:
        try:
            return await call(*arguments, **keywords)
        except AlreadyExists:
            return None
        except Unavailable:
            await asyncio.sleep(0.3)
        except KubeError as refused:
            # While etcd or the CRD's handlers come back, the API server forgets kinds for a moment.
            if refused.status not in (401, 403, 404):
                raise
            await asyncio.sleep(0.3)


async def submit(
    kube: KubeClient,
    count: int,
    *,
    seconds: tuple[float, float],
    rng: random.Random,
    medley: Sequence[str] = ("succeeds",),
) -> None:
    async def one(i: int) -> None:
        demand = medley[i % len(medley)]
        # What fails is short, for it runs several times; what is overdue would run for ever.
        run = {"fails": rng.uniform(0.5, 1.5), "overdue": 600.0}.get(demand, rng.uniform(*seconds))
        spec = {
            "modelName": "m",
            "gpuCount": rng.choice([1, 1, 2, 4]),
            "schedulingStrategy": rng.choice(["leastLoaded", "random", "costOptimized"]),
            "retryPolicy": {"maxRetries": MAX_RETRIES if demand == "fails" else 10, "backoffSeconds": 1},
            "env": [
                {"name": "SIMULATED_RUN", "value": f"{run:.1f}s"},
                {"name": "SIMULATED_EXIT", "value": "3" if demand == "fails" else "0"},
            ],
        }
        meta = {"name": name(i), "labels": {"demand": demand}}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": spec}
        await insist(kube.create, GPUWORKLOADS, body, "default")

    await asyncio.gather(*(one(i) for i in range(count)))


def name(i: int) -> str:
    return f"w-{i:03}"


async def meddle(kube: KubeClient, count: int, *, rng: random.Random) -> None:
    """What people do meanwhile, to one workload each: to every other one once its Job is there, else at any moment."""
    live: dict[str, asyncio.Event] = {name(i): asyncio.Event() for i in range(count)}

    async def edit(i: int, **spec: Any) -> None:
        await insist(kube.merge_patch, GPUWORKLOADS, name(i), "default", {"spec": spec})

    async def one(i: int, demand: str, wait: float, pause: float) -> None:
        if i % 2:
            await live[name(i)].wait()
        else:
            await asyncio.sleep(wait)
        match demand:
            case "suspended":
                await edit(i, suspend=True)
                await asyncio.sleep(pause)
                await edit(i, suspend=False)
            case "urgent":
                await edit(i, priority="high")
            case "overdue":
                await edit(i, activeDeadlineSeconds=3)
            case "deleted":
                await delete(kube, name(i))

    async def look() -> None:
        while True:
            items, _ = await insist(kube.list, GPUWORKLOADS, "default", label_selector="demand notin (succeeds, fails)")
            for item in items:
                if item.get("status", {}).get("phase", "Scheduling") not in ("Scheduling", "Pending"):
                    live[item["metadata"]["name"]].set()
            await asyncio.sleep(0.5)

    looking = asyncio.create_task(look())
    demands = [(i, MEDLEY[i % len(MEDLEY)]) for i in range(count)]
    busy = [(i, demand) for i, demand in demands if demand not in ("succeeds", "fails")]
    await asyncio.gather(*(one(i, demand, rng.uniform(2, 30), rng.uniform(1, 6)) for i, demand in busy))
    looking.cancel()


async def delete(kube: KubeClient, of: str) -> None:
    """Deletes a workload, also when the answer to that is lost or the API server forgets the kind for a moment."""
    while True:
        try:
            return await kube.delete(GPUWORKLOADS, of, "default")
        except KubeError as refused:
            if not isinstance(refused, Unavailable) and refused.status not in (401, 403, 404):
                raise
        there, _ = await insist(kube.list, GPUWORKLOADS, "default")
        if of not in {item["metadata"]["name"] for item in there}:
            return None
        await asyncio.sleep(0.3)


async def phases(kube: KubeClient) -> dict[str, int]:
    items, _ = await insist(kube.list, GPUWORKLOADS, "default")
    counted: dict[str, int] = {}
    for item in items:
        phase = item.get("status", {}).get("phase", "none")
        counted[phase] = counted.get(phase, 0) + 1
    return counted


async def until_ended(kube: KubeClient, count: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        counted = await phases(kube)
        if sum(counted.get(phase, 0) for phase in TOMBSTONES) == count == sum(counted.values()):
            return
        assert time.monotonic() < deadline, f"after {seconds:.0f} s not all have ended: {counted}"
        await asyncio.sleep(1)


async def delete_all(kube: KubeClient, seconds: float) -> None:
    items, _ = await insist(kube.list, GPUWORKLOADS, "default")
    for item in items:
        await delete(kube, item["metadata"]["name"])
    deadline = time.monotonic() + seconds
    while True:
        left = [raw for kind in (GPUWORKLOADS, JOBS, PODS) for raw in (await insist(kube.list, kind, "default"))[0]]
        if not left:
            return
        for raw in left:
            raw["metadata"].pop("managedFields", None)
        assert time.monotonic() < deadline, f"{len(left)} left after deletion, such as {left[0]}"
        await asyncio.sleep(0.5)


async def test_every_process_is_killed_time_and_again(survived: Begun) -> None:
    await survived[every_process_is_killed_time_and_again.__name__]


async def every_process_is_killed_time_and_again(fleet: Stack) -> None:
    rng = random.Random(SEED)
    count = 200
    async with connected(fleet) as kube:
        for manifest in node_manifests([SimulatedNode(f"n{i}", gpus=GPUS_EACH) for i in range(NODES_WANTED)]):
            await insist(kube.create, NODES, manifest)
        submitting = asyncio.create_task(submit(kube, count, seconds=(2.0, 8.0), rng=rng, medley=MEDLEY))
        meddling = asyncio.create_task(meddle(kube, count, rng=rng))
        killed: dict[str, int] = {}
        for _ in range(ROUNDS):
            for victim in rng.sample(VICTIMS, len(VICTIMS)):
                await asyncio.sleep(rng.uniform(0.5, 2.5))
                old = await asyncio.to_thread(fleet.kill, victim)
                await asyncio.to_thread(fleet.wait_restarted, victim, old, 60)
                killed[victim] = killed.get(victim, 0) + 1
        await asyncio.gather(submitting, meddling)
        in_flight = {phase: n for phase, n in (await phases(kube)).items() if phase not in TOMBSTONES}
        wanted = Counter(DEMANDS[MEDLEY[i % len(MEDLEY)]].phase for i in range(count))
        await until_ended(kube, count - wanted.pop(""), 300)
        ended = await phases(kube)
        await delete_all(kube, 60)
    report = check(await asyncio.to_thread(history, fleet.endpoints), DEMANDS)
    assert report.violations == []
    assert killed == dict.fromkeys(VICTIMS, ROUNDS)
    assert ended == wanted, "a killed process is nobody's failed run"
    assert report.jobs_made >= count
    assert report.deleted_live > 0, "some were deleted while they had a Job"
    assert report.suspended_live > 0, "some were suspended while they had a Job"
    assert report.most_gpus_at_once > NODES_WANTED * GPUS_EACH / 2, "the fleet was busy while processes died"
    assert sum(in_flight.values()) > 0, "workloads were in flight until the last kill"
    assert [entry for entry in report.left if entry.startswith(("workload", "job", "pod"))] == []


async def test_what_runs_is_adopted_after_temporal_lost_its_data(survived: Begun) -> None:
    await survived[what_runs_is_adopted_after_temporal_lost_its_data.__name__]


async def what_runs_is_adopted_after_temporal_lost_its_data(fleet: Stack) -> None:
    count = 40
    async with connected(fleet) as kube:
        for manifest in node_manifests([SimulatedNode(f"n{i}", gpus=GPUS_EACH) for i in range(4)]):
            await insist(kube.create, NODES, manifest)
        await submit(kube, count, seconds=(15.0, 25.0), rng=random.Random(SEED))
        deadline = time.monotonic() + 60
        while (await phases(kube)).get("Running", 0) < 10:
            assert time.monotonic() < deadline, f"too few run: {await phases(kube)}"
            await asyncio.sleep(0.5)
        running_before = {
            job["metadata"]["uid"]
            for job in (await insist(kube.list, JOBS, "default"))[0]
            if job.get("status", {}).get("ready")
        }
        forget_everything(fleet)
        old = await asyncio.to_thread(fleet.kill, "temporal")
        await asyncio.to_thread(fleet.wait_restarted, "temporal", old, 60)
        await until_ended(kube, count, 240)
        assert await phases(kube) == {"Succeeded": count}
        await delete_all(kube, 60)
    report = check(await asyncio.to_thread(history, fleet.endpoints))
    assert report.violations == []
    assert running_before
    assert report.jobs_made == count, "no running Job was replaced"
    assert [entry for entry in report.left if entry.startswith(("workload", "job", "pod"))] == []


def forget_everything(stack: Stack) -> None:
    """Deletes Temporal's database under the running server: the next start finds nothing."""
    folder = Path(stack.endpoints.data) / "temporal"
    assert any(folder.iterdir())
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
