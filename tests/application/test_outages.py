"""The API server, then Temporal, is away for longer than anything of berth waits at a stretch: local retries, catching
up, five tries of an activity. Each first hangs (its connections stay open and bring nothing), then refuses.

Workloads are in every state meanwhile. Afterwards each has ended as it should, and the fault tests' judge, who reads
every revision that etcd had, has found no second Job and no GPU promised twice.
"""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from activities.messages import placement_id, workload_id
from berth.cli.application import after_up, application_processes
from kube.errors import KubeError
from kube.resources import GPUWORKLOADS
from planning.naming import ATTEMPT_LABEL, WORKLOAD_UID_LABEL
from stack import Stack, UpOptions
from tests.application.tenant import Tenant, condition, eventually
from tests.faults.checker import check
from tests.faults.revisions import Revision, history

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

OURS = ("controller", "worker")
# Jobs that nobody has tried to schedule are taken back after four times this, well within the outage.
SETTINGS = {"bindDeadlineSeconds": 5}
# Two turns; and for every 8 s of the outage either an extension of a hanging look (3 events), or another look after a
# pause that grows from there (6).
OWN_EVENTS = 2 * 12 + 10 * 6
# The round under way, then the looks (11 each) at a Job without a place until it is withdrawn; that round stays open.
LEDGER_EVENTS = 12 + 4 * 11 + 4


@pytest.fixture
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An installation for each test: it is broken here, its judge needs every revision, and what the judge writes to
    know where they end upsets the API server's watches.
    """
    stack = Stack(tmp_path_factory.mktemp("outages"))
    options = UpOptions(end_with_caller=True, keep_history=True, etcd_fsync=False)
    stack.up(
        options,
        processes=lambda endpoints: application_processes(endpoints, options),
        after_up=lambda endpoints: after_up(endpoints, SETTINGS),
    )
    yield stack
    stack.down()


@asynccontextmanager
async def stopped(stack: Stack, name: str) -> AsyncIterator[None]:
    """A process that hangs; whatever runs under its name in the end goes on."""
    stack.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        stack.kill(name, signal.SIGCONT)


async def refuses(stack: Stack, name: str) -> None:
    """Kills a hanging process, and makes its successor hang before that listens: nobody is there any more."""
    port = stack.process(name).port
    assert port is not None
    async with asyncio.timeout(60):
        while await listening(port):
            old = stack.kill(name, signal.SIGKILL)
            while stack.process(name).pid in (None, old):
                await asyncio.sleep(0.005)
            stack.kill(name, signal.SIGSTOP)


async def listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.transport.abort()
    return True


def readiness(stack: Stack, process: str) -> str:
    """What is wrong, '' if it is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{stack.endpoints.ports[f'{process}-health']}/readyz") as answer:
            assert answer.status == 200
            return ""
    except urllib.error.HTTPError as not_ready:
        return not_ready.read().decode()


async def says(stack: Stack, process: str, *words: str, within: float) -> None:
    said = ""

    async def told() -> bool:
        nonlocal said
        said = await asyncio.to_thread(readiness, stack, process)
        return all(word in said for word in words)

    await eventually(told, within, lambda: f"/readyz of the {process} should say {words}; it says {said!r}")


async def is_ready(stack: Stack, process: str, within: float) -> None:
    said = ""

    async def well() -> bool:
        nonlocal said
        said = await asyncio.to_thread(readiness, stack, process)
        return not said

    await eventually(well, within, lambda: f"the {process} should be ready; it says {said!r}")


async def ready_again(tenant: Tenant, name: str) -> None:
    await asyncio.to_thread(tenant.stack.wait_ready, [name], 60)

    async def answers() -> bool:
        try:
            await tenant.kube.list(GPUWORKLOADS, tenant.namespace)
        except KubeError:
            return False  # the CRD's handlers come a moment later
        return True

    await eventually(answers, 30, lambda: "the API server does not answer")


async def ledger_events(tenant: Tenant) -> int:
    described = await tenant.temporal.get_workflow_handle(placement_id("default")).describe()
    assert described.raw_info.first_run_id == described.run_id, "one history, so that its length can be compared"
    return described.history_length


async def own_events(tenant: Tenant, uid: str) -> int:
    return (await tenant.temporal.get_workflow_handle(workload_id(uid)).describe()).history_length


async def lasts(began: float, seconds: float) -> None:
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))


def runs_of(revisions: list[Revision]) -> dict[str, list[int]]:
    """Which attempts of each workload had a Job whose pod was ready, by the workload's UID."""
    ran: dict[str, dict[str, int]] = {}
    for revision in revisions:
        if revision.kind == "job" and revision.value is not None and revision.value.get("status", {}).get("ready"):
            meta = revision.value["metadata"]
            mine = ran.setdefault(meta["labels"][WORKLOAD_UID_LABEL], {})
            mine[meta["uid"]] = int(meta["labels"][ATTEMPT_LABEL])
    return {workload: sorted(jobs.values()) for workload, jobs in ran.items()}


async def judged(tenant: Tenant, runs: dict[str, list[int]], uids: dict[str, str]) -> None:
    """Deletes everything; then no promise was broken, each ran just so often, and nothing is left."""
    for name in runs:
        await tenant.delete(name)
    for name in runs:
        await tenant.until_gone(name)
    await tenant.empty()
    revisions = await asyncio.to_thread(history, tenant.stack.endpoints)
    report = check(revisions)
    assert report.violations == []
    assert [entry for entry in report.left if tenant.namespace in entry] == []
    counted = runs_of(revisions)
    assert {name: counted.get(uids[name], []) for name in runs} == runs


async def test_the_api_server_is_away_for_75_seconds(tenant: Tenant) -> None:
    stack = tenant.stack
    pids = {name: stack.pid(name) for name in OURS}
    for node, gpus in (("a", 4), ("b", 4)):
        await tenant.node(node, gpus)
    once = {"maxRetries": 1, "backoffSeconds": 20}
    uids = {
        name: (await tenant.apply(name, 1, **spec))["metadata"]["uid"]
        for name, spec in {
            "ends-1": {"run": "20s"},
            "ends-2": {"run": "20s"},
            "fails": {"run": "20s", "exit_code": 3, "retryPolicy": once | {"backoffSeconds": 1}},
            "runs-on": {"run": "30s"},
            "suspended": {"run": "300s"},
            "deleted": {"run": "300s"},
            "backs-off": {"run": "1s", "exit_code": 3, "retryPolicy": once},
        }.items()
    }
    for name in uids.keys() - {"backs-off"}:
        await tenant.until(name, phase="Running")
    for name in ("queued-1", "queued-2"):
        uids[name] = (await tenant.apply(name, 4))["metadata"]["uid"]
        await tenant.until(name, phase="Scheduling")
    await tenant.until("backs-off", retryCount=1)
    async with stopped(stack, "kube-scheduler"):
        await tenant.node("c", 1)
        uids["unbound"] = (await tenant.apply("unbound", 1, run="15s"))["metadata"]["uid"]
        await tenant.until("unbound", phase="Scheduled")
        await tenant.patch("suspended", suspend=True)
        await tenant.delete("deleted")
        before = await ledger_events(tenant)
        began = time.monotonic()
        async with stopped(stack, "kube-apiserver"):
            await says(stack, "controller", "cannot get the lease", within=40)
            await lasts(began, 45)
            await refuses(stack, "kube-apiserver")
            refused = time.monotonic()
            for process in OURS:
                await says(stack, process, "onnect", within=35)
            await lasts(refused, 30)
            during = await ledger_events(tenant) - before
    await ready_again(tenant, "kube-apiserver")
    # These would come back by themselves, but pause for up to a minute between tries.
    for other in ("kube-controller-manager", "kube-scheduler"):
        old = await asyncio.to_thread(stack.kill, other)
        await asyncio.to_thread(stack.wait_restarted, other, old, 60)

    for process in OURS:
        await is_ready(stack, process, within=60)
    await tenant.until_gone("deleted", seconds=90)
    raw = await tenant.until("suspended", seconds=90, phase="Pending")
    assert condition(raw, "Suspended")["status"] == "True"
    for name in ("ends-1", "ends-2", "runs-on", "queued-1", "queued-2", "unbound"):
        done = await tenant.until(name, seconds=90, phase={"Succeeded", "Failed"})
        assert (done["status"]["phase"], done["status"]["retryCount"]) == ("Succeeded", 0), name
    for name, retries in (("fails", 1), ("backs-off", 1)):
        done = await tenant.until(name, seconds=90, phase={"Succeeded", "Failed"})
        assert (done["status"]["phase"], done["status"]["retryCount"]) == ("Failed", retries), name
    assert {name: stack.pid(name) for name in OURS} == pids, "nobody was restarted"
    assert during <= LEDGER_EVENTS
    lengths = {name: await own_events(tenant, uid) for name, uid in uids.items()}
    assert max(lengths.values()) <= OWN_EVENTS, lengths
    runs = {name: [0] for name in uids if name != "deleted"} | {"fails": [0, 1], "backs-off": [0, 1]}
    await judged(tenant, runs, uids)


async def test_temporal_is_away_for_60_seconds(tenant: Tenant) -> None:
    stack = tenant.stack
    pids = {name: stack.pid(name) for name in OURS}
    for node in ("a", "b"):
        await tenant.node(node, 4)
    uids = {
        name: (await tenant.apply(name, 1, **spec))["metadata"]["uid"]
        for name, spec in {
            "ends-1": {"run": "15s"},
            "ends-2": {"run": "15s"},
            "fails": {"run": "15s", "exit_code": 3, "retryPolicy": {"maxRetries": 1, "backoffSeconds": 1}},
            "runs-on": {"run": "75s"},
            "suspended": {"run": "300s"},
            "deleted": {"run": "300s"},
            "backs-off": {"run": "1s", "exit_code": 3, "retryPolicy": {"maxRetries": 1, "backoffSeconds": 20}},
        }.items()
    }
    for name in uids.keys() - {"backs-off"}:
        await tenant.until(name, phase="Running")
    for name in ("queued", "queued-deleted"):
        uids[name] = (await tenant.apply(name, 4))["metadata"]["uid"]
        await tenant.until(name, phase="Scheduling")
    await tenant.until("backs-off", retryCount=1)
    began = time.monotonic()
    async with stopped(stack, "temporal"):
        for name in ("new-1", "new-2", "new-deleted"):
            uids[name] = (await tenant.apply(name, 1))["metadata"]["uid"]
        await tenant.patch("suspended", suspend=True)
        await tenant.patch("queued", priority="high")
        await tenant.delete("deleted")
        for name in ("queued-deleted", "new-deleted"):
            await tenant.delete(name)
            await tenant.until_gone(name, seconds=5)  # nothing was made for it, so nobody has to tear anything down
        for process in OURS:
            await says(stack, process, "Temporal cannot be reached", within=40)
        await lasts(began, 35)
        await refuses(stack, "temporal")
        refused = time.monotonic()
        for process in OURS:
            await says(stack, process, "Temporal cannot be reached", within=15)
        await lasts(refused, 26)
    await asyncio.to_thread(stack.wait_ready, ["temporal"], 60)
    for process in OURS:
        await is_ready(stack, process, within=60)
    await tenant.until_gone("deleted", seconds=60)
    raw = await tenant.until("suspended", seconds=60, phase="Pending")
    assert condition(raw, "Suspended")["status"] == "True"
    for name in ("ends-1", "ends-2", "runs-on", "queued", "new-1", "new-2"):
        done = await tenant.until(name, seconds=60, phase={"Succeeded", "Failed"})
        assert (done["status"]["phase"], done["status"]["retryCount"]) == ("Succeeded", 0), name
    for name, retries in (("fails", 1), ("backs-off", 1)):
        done = await tenant.until(name, seconds=60, phase={"Succeeded", "Failed"})
        assert (done["status"]["phase"], done["status"]["retryCount"]) == ("Failed", retries), name
    assert {name: stack.pid(name) for name in OURS} == pids, "nobody was restarted"
    followed = uids.keys() - {"queued-deleted", "new-deleted"}
    lengths = {name: await own_events(tenant, uids[name]) for name in followed}
    assert max(lengths.values()) <= OWN_EVENTS, lengths
    runs = {name: [0] for name in followed if name != "deleted"} | {"fails": [0, 1], "backs-off": [0, 1]}
    await judged(tenant, runs, uids)
