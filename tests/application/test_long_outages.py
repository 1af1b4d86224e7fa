"""The API server is away, and in another installation Temporal, for longer than anything of berth waits at a stretch:
local retries, catching up, five tries of an activity. Each first hangs (its connections stay open and bring nothing),
then refuses.

Workloads are in every state meanwhile. Afterwards each has ended as it should, and the fault tests' judge, who reads
every revision that etcd had, has found no second Job and no GPU promised twice.
"""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import placement_id, workload_id
from activities.patience import ATTEMPTS
from activities.signatures import CARRY_OUT
from controller.outage import ANSWER
from kube.errors import KubeError
from kube.resources import GPUWORKLOADS
from stack import Stack
from tests.application.stories import Begun, Places, Stories, installation
from tests.application.tenant import Tenant, condition, eventually, tenancy
from tests.faults.checker import check
from tests.faults.revisions import history, runs_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

Outage = Callable[[Tenant], Coroutine[None, None, None]]

OURS = ("controller", "worker")
# Jobs that nobody has tried to schedule are taken back after four times this, while the API server still hangs.
SETTINGS = {"bindDeadlineSeconds": 5}
# Of all who wait for an answer, a request to the API server (kube.client) and one to Temporal (its SDK) wait longest:
# 30 s. A look is given 20 s, a poke and the lease 10 s each, a standby tries for the lease at most 13 s after that.
HANGS = 33.0
# A round of pokes is tried longest where Temporal refuses: for so long to tell the ledger, then to tell workloads.
REFUSED_ROUND = 2 * ANSWER.total_seconds()
# Two turns; and for every 8 s of the outage either an extension of a hanging look (3 events), or another look after a
# pause that grows from there (6).
OWN_EVENTS = 2 * 12 + 7 * 6
# Two rounds (18 each at most) for the news from just before, then the looks (11 each) at a Job without a place until it
# is withdrawn; that round stays open.
LEDGER_EVENTS = 2 * 18 + 4 * 11


def begin(places: Places) -> Stories:
    """Each in an installation of its own, for it is broken there."""

    async def lived_through(outage: Outage) -> None:
        folder = places.folder(outage.__name__)
        async with (
            installation(folder, SETTINGS, places.installing) as stack,
            tenancy(stack, outage.__name__) as tenant,
        ):
            await outage(tenant)

    stories: tuple[Outage, ...] = (api_server_is_away, temporal_is_away)
    return {outage.__name__: lived_through(outage) for outage in stories}


async def test_the_api_server_is_away_for_longer_than_anybody_waits(long_stories: Begun) -> None:
    await long_stories[api_server_is_away.__name__]


async def test_temporal_is_away_for_longer_than_anybody_waits(long_stories: Begun) -> None:
    await long_stories[temporal_is_away.__name__]


async def api_server_is_away(tenant: Tenant) -> None:
    stack = tenant.stack
    pids = {name: stack.pid(name) for name in OURS}
    # Nothing ends while the API server is away: kwok counts anew when it is back. Before that it runs for longer than a
    # slow machine needs to see that others wait for its place.
    uids = await under_way(tenant, runs_on="50s", queued=("queued-1", "queued-2"))
    async with stopped(stack, "kube-scheduler"):
        await tenant.node("c", 1)
        # Once it runs, it does so for as long as the ledger's activity pauses: its withdrawal may come meanwhile.
        uids["unbound"] = (await tenant.apply("unbound", run="15s"))["metadata"]["uid"]
        await tenant.until("unbound", phase="Scheduled")
        await tenant.patch("suspended", suspend=True)
        await tenant.delete("deleted")
        before = await ledger_events(tenant)
        began = time.monotonic()
        async with stopped(stack, "kube-apiserver"):
            await says(stack, "controller", "cannot get the lease", within=40)
            await lasts(began, HANGS)
            await refuses(stack, "kube-apiserver")
            for process in OURS:
                await says(stack, process, "onnect", within=35)
            await tried_often(tenant)
            during = await ledger_events(tenant) - before
    await ready_again(tenant, "kube-apiserver")
    # These would come back by themselves, but pause for up to a minute between tries.
    others = ("kube-controller-manager", "kube-scheduler", "kwok")
    killed = {other: await asyncio.to_thread(stack.kill, other) for other in others}
    for other, old in killed.items():
        await asyncio.to_thread(stack.wait_restarted, other, old, 60)
    assert during <= LEDGER_EVENTS
    await all_end_well(tenant, uids, pids)


async def temporal_is_away(tenant: Tenant) -> None:
    stack = tenant.stack
    pids = {name: stack.pid(name) for name in OURS}
    uids = await under_way(tenant, runs_on="73s", queued=("queued", "queued-deleted"))
    began = time.monotonic()
    async with stopped(stack, "temporal"):
        for name in ("new-1", "new-2", "new-deleted"):
            uids[name] = (await tenant.apply(name))["metadata"]["uid"]
        await tenant.patch("suspended", suspend=True)
        await tenant.patch("queued", priority="high")
        await tenant.delete("deleted")
        for name in ("queued-deleted", "new-deleted"):
            await tenant.delete(name)
            await tenant.until_gone(name, seconds=5)  # nothing was made for it, so nobody has to tear anything down
            del uids[name]
        for process in OURS:
            await says(stack, process, "Temporal cannot be reached", within=40)
        await lasts(began, HANGS)
        await refuses(stack, "temporal")
        refused = time.monotonic()
        for process in OURS:
            await says(stack, process, "Temporal cannot be reached", within=15)
        await lasts(refused, REFUSED_ROUND + 3)
    await asyncio.to_thread(stack.wait_ready, ["temporal"], 60)
    await all_end_well(tenant, uids, pids)


async def under_way(tenant: Tenant, *, runs_on: str, queued: tuple[str, str]) -> dict[str, str]:
    """Workloads in every state, by name with their UIDs; `runs_on` says how long that one runs."""
    uids: dict[str, str] = {}

    async def apply(name: str, gpus: int = 1, **spec: Any) -> None:
        uids[name] = (await tenant.apply(name, gpus, **spec))["metadata"]["uid"]

    for node in ("a", "b"):
        # Both at once: were one not usable yet, all would run on the other, and what is to be queued would have room.
        await tenant.usable(await tenant.node(node, 4))
    await apply("backs-off", exit_code=3, retryPolicy={"maxRetries": 1, "backoffSeconds": 20})
    runs = {"runs-on": runs_on, "suspended": "300s", "deleted": "300s"}
    for name, run in runs.items():
        await apply(name, run=run)
    for name in runs:
        await tenant.until(name, phase="Running")
    for name in queued:
        await apply(name, 4)
    for name in queued:
        await tenant.until(name, phase="Scheduling")
    await tenant.until("backs-off", retryCount=1)
    # Of what is free on the others some is kept for those that are queued.
    await tenant.node("z", 3, role="short")
    short = {"pool": tenant.namespace, "role": "short"}
    # Short, for they are waited for afterwards, `fails` twice; so they come last, to be running when the outage begins.
    await apply("fails", run="6s", exit_code=3, retryPolicy={"maxRetries": 1, "backoffSeconds": 1}, nodeSelector=short)
    for name in ("ends-1", "ends-2"):
        await apply(name, run="10s", nodeSelector=short)
    for name in ("fails", "ends-1", "ends-2"):
        await tenant.until(name, phase="Running")
    return uids


async def all_end_well(tenant: Tenant, uids: dict[str, str], pids: dict[str, int]) -> None:
    """Each ends as it should, in the processes that were there before, and no history has become long."""
    for process in OURS:
        await is_ready(tenant.stack, process, within=60)
    await tenant.until_gone("deleted", seconds=90)
    raw = await tenant.until("suspended", seconds=90, phase="Pending")
    assert condition(raw, "Suspended")["status"] == "True"
    runs: dict[str, tuple[list[int], ...]] = {"suspended": ([0],)}
    for name in uids.keys() - {"deleted", "suspended"}:
        done = (await tenant.until(name, seconds=90, phase={"Succeeded", "Failed"}))["status"]
        fails = name in ("fails", "backs-off")
        assert (done["phase"], done["retryCount"]) == (("Failed", 1) if fails else ("Succeeded", 0)), name
        runs[name] = ([0, 1],) if fails else ([0],)
        if name == "unbound" and done["attempt"] == 1:
            # It was withdrawn before it found a place, or before its Job told of that; else it would be left alone.
            runs[name] = ([1], [0, 1])
    assert {name: tenant.stack.pid(name) for name in OURS} == pids, "nobody was restarted"
    lengths = {name: await own_events(tenant, uid) for name, uid in uids.items()}
    assert max(lengths.values()) <= OWN_EVENTS, lengths
    await judged(tenant, runs, uids)


async def judged(tenant: Tenant, runs: dict[str, tuple[list[int], ...]], uids: dict[str, str]) -> None:
    """Deletes everything; then no promise was broken, each ran as one of `runs` has it, and nothing is left."""
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
    ran = {name: counted.get(uids[name], []) for name in runs}
    assert {name: attempts for name, attempts in ran.items() if attempts not in runs[name]} == {}


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
    except urllib.error.URLError:
        return "nobody answers"


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
    """0 for a workload that nothing was decided about but its place."""
    try:
        return (await tenant.temporal.get_workflow_handle(workload_id(uid)).describe()).history_length
    except RPCError as missing:
        if missing.status != RPCStatusCode.NOT_FOUND:
            raise
        return 0


async def tried_often(tenant: Tenant) -> None:
    """Waits until the ledger's activity was tried once more than suffices to give up on what others can do without."""
    ledger, tries = tenant.temporal.get_workflow_handle(placement_id("default")), 0

    async def often() -> bool:
        nonlocal tries
        pending = (await ledger.describe()).raw_description.pending_activities
        # Counted is the try that is due.
        tries = max((each.attempt - 1 for each in pending if each.activity_type.name == CARRY_OUT), default=0)
        return tries > ATTEMPTS

    await eventually(often, 60, lambda: f"{CARRY_OUT} should be tried more than {ATTEMPTS} times; it was {tries} times")


async def lasts(began: float, seconds: float) -> None:
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
