"""A leader's term: when it sweeps, when it looks a second time, and that no outage ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from controller import app
from controller.app import Controller
from controller.digests import JobDigest, NodeDigest, WorkloadDigest
from kube.reflector import Change
from kube.resources import PROVISIONINGREQUESTS
from planning.model import Turn
from planning.naming import JOB_SELECTOR, WORKLOAD_UID_LABEL
from tests.controller.fake_temporal import UNAVAILABLE, UNREACHABLE, FakeTemporal
from tests.kube.fake_api import FakeApi

WORKLOAD = WorkloadDigest("ns", "w", 1, finished=False, deleting=False, finalizer=True, caught_up=True, expires=None)
JOB = JobDigest("ns", "w-0", "u", "w", 0, "n1", ready=False, finished=True, deleting=False, uid="j", nodes=("n1",))


def controller(temporal: FakeTemporal, *, resync: float = 600.0) -> Controller:
    """One whose watches have seen all there is: nothing yet."""
    mine = Controller(cast(Any, None), cast(Any, temporal), resync=resync)
    for reflector in mine.reflectors.values():
        reflector.synced.set()
        reflector.resource_version = 1000
    return mine


def show(reflector: Any, uid: str, digest: Any) -> None:
    """As if the reflector's watch had brought it."""
    reflector._put(uid, reflector._versions.get(uid, 1000) + 1, digest)


async def until(check: Callable[[], bool], seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("away", [UNAVAILABLE, UNREACHABLE])
async def test_a_sweep_waits_for_temporal(away: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "TEMPORAL_PAUSE", 0.05)
    temporal = FakeTemporal()
    temporal.away = away
    mine = controller(temporal)
    show(mine.workloads, "u", WORKLOAD)
    show(mine.jobs, "j", JOB)
    sweeping = asyncio.create_task(mine._sweeps())
    await until(lambda: temporal.calls > 3)
    assert not sweeping.done()
    assert mine.temporal_away
    temporal.away = None
    await until(lambda: not mine.temporal_away)
    sweeping.cancel()
    due = mine.poker._workloads["gpuworkload/u"]
    assert due.poke.begin


async def test_sweeps_bring_the_newest_objects_version_and_not_the_lists() -> None:
    temporal = FakeTemporal()
    mine = controller(temporal)
    mine.workloads._put("u", 900, replace(WORKLOAD, caught_up=False))
    mine.jobs._put("i", 700, replace(JOB, uid="i", workload_uid="t"))
    mine.jobs._put("j", 800, JOB)
    mine.poker._workloads.clear()
    mine.poker._ledger_seen = None
    sweeping = asyncio.create_task(mine._sweeps())
    await until(lambda: mine.poker.pending == 2)
    sweeping.cancel()
    assert mine.poker._ledger_seen == {"gpuworkloads": 900, "jobs": 800}
    assert mine.poker._workloads["gpuworkload/u"].seen == {"gpuworkloads": 900, "jobs": 800}


async def test_whether_a_workflow_may_be_open_is_known_from_the_first_sweep_on() -> None:
    temporal = FakeTemporal()
    mine = controller(temporal)
    running = replace(JOB, finished=False)
    done = replace(running, finished=True, complete=True)

    def complete(uid: str) -> list[bool]:
        show(mine.workloads, uid, WORKLOAD)
        show(mine.jobs, f"job-{uid}", replace(running, workload_uid=uid))
        mine.poker._workloads.clear()
        show(mine.jobs, f"job-{uid}", replace(done, workload_uid=uid))
        return [due.poke.begin for due in mine.poker._workloads.values()]

    assert complete("before") == [True], "nobody knows yet what is open"
    temporal.open = {"open"}
    show(mine.workloads, "open", WORKLOAD)
    sweeping = asyncio.create_task(mine._sweeps())
    await until(lambda: mine._followed is not None)
    sweeping.cancel()
    assert complete("plain") == []
    assert complete("open") == [True]
    show(mine.nodes, "n1", NodeDigest("n1", able=True, fingerprint=1))
    show(mine.workloads, "shaken", WORKLOAD)
    show(mine.jobs, "job-shaken", replace(running, workload_uid="shaken"))
    show(mine.nodes, "n1", NodeDigest("n1", able=False, fingerprint=2))
    assert complete("shaken") == [True], "its workflow was begun when its node failed"
    mine.poker._workloads.clear()
    show(mine.workloads, "shaken", replace(WORKLOAD, finished=True))
    assert [due.poke.ended for due in mine.poker._workloads.values()] == [True]
    assert "shaken" not in (mine._followed or ())


async def test_a_verdict_is_looked_for_twice_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SECOND_LOOK", 0.3)
    temporal = FakeTemporal()
    temporal.held = {"lost": Turn(1, 1), "making": Turn(0, 0)}
    mine = controller(temporal)
    sweeping = asyncio.create_task(mine._sweeps())
    await until(lambda: len(mine._suspects) == 2)
    mine.poker._ledger_seen = None
    temporal.open.add("making")
    mine._sweep_now.set()  # a sweep for another reason comes too soon to tell
    await asyncio.sleep(0.1)
    assert temporal.signals == []
    await until(lambda: bool(temporal.signals))
    sweeping.cancel()
    ((ledger, name, back),) = temporal.signals
    assert (ledger, name, back.uid, back.turn) == ("placement/default", "requeue", "lost", Turn(2, 1))
    assert mine._suspects == {}


async def test_a_second_look_brings_no_pokes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SECOND_LOOK", 0.05)
    temporal = FakeTemporal()
    temporal.held = {"lost": Turn(0, 0)}
    mine = controller(temporal)
    sweeping = asyncio.create_task(mine._sweeps())
    await until(lambda: bool(mine._suspects))
    mine.poker._ledger_seen = None
    await until(lambda: bool(temporal.signals))
    sweeping.cancel()
    assert mine.poker.pending == 0


async def test_a_tombstone_that_cannot_go_is_swept_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "TIDY_AFTER", 0.02)
    mine = controller(FakeTemporal(), resync=0.05)
    stone = replace(WORKLOAD, finished=True)
    show(mine.workloads, "u", stone)
    show(mine.workloads, "v", stone)
    assert not mine._tidying
    for uid in ("u", "v"):
        show(mine.workloads, uid, replace(stone, deleting=True))
    assert mine._tidying.keys() == {"u", "v"}
    mine.workloads._remove("v", 2000)  # its own workflow was about to remove the finalizer
    await until(mine._sweep_now.is_set)
    mine._sweep_now.clear()
    await until(mine._sweep_now.is_set)
    await until(lambda: not mine._tidying)  # ever later, and at last left to the resync


async def test_the_end_of_a_term_tells_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    temporal = FakeTemporal()
    mine = controller(temporal)

    async def watch() -> None:
        await asyncio.Event().wait()

    for reflector in mine.reflectors.values():
        monkeypatch.setattr(reflector, "run", watch)
    monkeypatch.setattr(mine, "_watch_requests", watch)
    leading = asyncio.create_task(mine.lead())
    await until(lambda: bool(temporal.started))
    names = {task.get_name() for task in mine.tasks}
    assert {"pokes", "sweeps", "expiries", "watch of jobs"} <= names
    temporal.started.clear()
    mine._workload_changed(Change("added", "u", None, replace(WORKLOAD, caught_up=False, finalizer=False), 1001))
    leading.cancel()
    await asyncio.wait({leading})
    assert leading.cancelled()
    assert [id for id, _ in temporal.started] == ["placement/default"]


async def test_requests_are_watched_once_the_cluster_has_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ASK_AGAIN", 0.02)
    temporal = FakeTemporal()
    async with FakeApi() as api, await api.client() as kube:
        missing = api.fail(contains="provisioningrequests", status=404, reason="NotFound", count=3)
        mine = Controller(kube, cast(Any, temporal))
        watching = asyncio.create_task(mine._watch_requests())
        await until(lambda: mine.requests.synced.is_set())
        assert missing.count == 0 and mine.requests.relists == 0, "not even a list was tried before"
        labels = {**dict([JOB_SELECTOR.split("=")]), WORKLOAD_UID_LABEL: "u"}
        metadata = {"labels": labels}
        api.put(PROVISIONINGREQUESTS, "r", "ns", metadata=metadata)
        await until(lambda: bool(mine.requests.items))
        assert mine.poker.pending == 0
        told = {"conditions": [{"type": "Accepted", "status": "True"}]}
        api.put(PROVISIONINGREQUESTS, "r", "ns", metadata=metadata, status=told)
        await until(lambda: mine.poker.pending == 1)
        for reflector in mine.reflectors.values():
            reflector.synced.set()
        show(mine.workloads, "u", WORKLOAD)
        mine.poker._workloads.clear()
        show(mine.jobs, "j", replace(JOB, finished=False, ready=True))
        assert mine.poker._workloads.keys() == {"provisioning/u"}
        mine.poker._workloads.clear()
        api.remove(PROVISIONINGREQUESTS, "r", "ns")
        await until(lambda: mine.poker._workloads.keys() == {"provisioning/u"})
        watching.cancel()


async def test_an_api_server_that_is_away_does_not_put_off_the_watch_of_requests() -> None:
    async with FakeApi() as api, await api.client() as kube:
        api.fail(contains="provisioningrequests", status=503, reason="ServiceUnavailable")
        mine = Controller(kube, cast(Any, FakeTemporal()))
        watching = asyncio.create_task(mine._watch_requests())
        await until(lambda: mine.requests.synced.is_set())
        watching.cancel()


@pytest.mark.parametrize("kind", ["gpuquotas", "gpureservations"])
async def test_a_spec_that_changed_is_news_for_the_ledger_and_its_status_is_none(kind: str) -> None:
    mine = controller(FakeTemporal())
    show(mine.reflectors[kind], "q", 1)
    assert mine.poker._ledger_seen == {kind: 1001}
    mine.poker._ledger_seen = None
    show(mine.reflectors[kind], "q", 1)
    assert mine.poker._ledger_seen is None
    mine.reflectors[kind]._remove("q", 1003)
    assert mine.poker._ledger_seen == {kind: 1003}
