"""Pokes are coalesced, and what Temporal did not take stays due, however that came about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import Poke
from controller import pokes
from controller.pokes import Poker
from controller.routing import Route, WorkloadPoke
from tests.controller.fake_temporal import UNAVAILABLE, UNREACHABLE, FakeTemporal

LEDGER = Route(ledger=True)
BOTH = Route(
    ledger=True, workloads=(WorkloadPoke("u", "ns", "w", begin=True), WorkloadPoke("v", "ns", "x", begin=True))
)


def poker(temporal: FakeTemporal, recovered: Callable[[], None] = lambda: None) -> Poker:
    return Poker(cast(Any, temporal), pool="default", skip=lambda _: False, recovered=recovered)


async def until(check: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("away", [UNAVAILABLE, UNREACHABLE])
async def test_what_temporal_does_not_take_stays_due(away: Exception) -> None:
    temporal, recoveries = FakeTemporal(), []
    temporal.away = away
    mine = poker(temporal, lambda: recoveries.append(1))
    running = asyncio.create_task(mine.run())
    mine.concern(BOTH, "gpuworkloads", 5)
    await until(lambda: not mine.reachable)
    mine.concern(BOTH, "jobs", 7)
    assert not running.done()
    temporal.away = None
    await until(lambda: mine.reachable)
    running.cancel()
    assert mine.pending == 0
    assert recoveries == [1]
    told = dict(temporal.started)
    assert told["placement/default"] == Poke({"gpuworkloads": 5, "jobs": 7})
    assert told["gpuworkload/u"].seen == {"gpuworkloads": 5, "jobs": 7}
    assert "gpuworkload/v" in told


async def test_a_poke_under_way_when_all_is_cancelled_stays_due() -> None:
    temporal = FakeTemporal()
    temporal.gate = asyncio.Event()
    mine = poker(temporal)
    running = asyncio.create_task(mine.run())
    mine.concern(LEDGER, "gpuworkloads", 5)
    await until(lambda: temporal.calls > 0)
    running.cancel()
    await asyncio.wait({running})
    mine.concern(Route(workloads=BOTH.workloads), "jobs", 7)
    delivering = asyncio.create_task(mine._deliver_to_workloads())
    await until(lambda: temporal.calls > 2)
    delivering.cancel()
    await asyncio.wait({delivering})
    assert mine.pending == 3
    temporal.gate.set()
    await mine.flush(2.0)
    assert dict(temporal.started)["placement/default"] == Poke({"gpuworkloads": 5})
    assert len(temporal.started) == 3


async def test_an_unexpected_failure_loses_nothing_either() -> None:
    temporal = FakeTemporal()
    temporal.away = KeyError("a bug")
    mine = poker(temporal)
    mine.concern(LEDGER, "gpuworkloads", 5)
    with pytest.raises(KeyError):
        await mine.flush(1.0)
    mine.concern(BOTH, "jobs", 7)
    with pytest.raises(ExceptionGroup):
        await mine._deliver_to_workloads()
    assert mine.pending == 3
    temporal.away = None
    await mine.flush(1.0)
    assert dict(temporal.started)["placement/default"] == Poke({"gpuworkloads": 5, "jobs": 7})


async def test_a_failed_poke_and_a_newer_one_become_one_that_begins() -> None:
    temporal = FakeTemporal()
    mine = poker(temporal)
    temporal.away = UNAVAILABLE

    def meanwhile(_: str) -> None:
        mine.concern(Route(workloads=(WorkloadPoke("u", "ns", "w", begin=False),)), "gpuworkloads", 9)

    temporal.before = meanwhile
    mine.concern(Route(workloads=(WorkloadPoke("u", "ns", "w", begin=True),)), "jobs", 7)
    assert not await mine._deliver()
    temporal.before, temporal.away = (lambda _: None), None
    assert await mine._deliver()
    ((_, state),) = temporal.started
    assert state.seen == {"gpuworkloads": 9, "jobs": 7}


async def test_to_a_tombstone_goes_only_that_the_ledger_ended_it_and_that_begins_nothing() -> None:
    temporal = FakeTemporal()
    mine = Poker(cast(Any, temporal), pool="default", skip=lambda _: True, recovered=lambda: None)
    for uid in ("u", "v"):
        mine.concern(Route(workloads=(WorkloadPoke(uid, "ns", "w", begin=True),)), "jobs", 7)
    mine.concern(Route(workloads=(WorkloadPoke("u", "ns", "w", begin=False, ended=True),)), "gpuworkloads", 9)
    assert await mine._deliver()
    assert (mine.pending, temporal.started) == (0, [])
    assert [(id, arg.seen) for id, _, arg in temporal.signals] == [("gpuworkload/u", {"gpuworkloads": 9, "jobs": 7})]


async def test_the_end_does_not_wait_for_a_temporal_that_is_silent() -> None:
    temporal = FakeTemporal()
    temporal.gate = asyncio.Event()
    mine = poker(temporal)
    mine.concern(BOTH, "jobs", 7)
    async with asyncio.timeout(1.0):
        await mine.flush(0.05)
    assert mine.pending == 3


async def test_pods_that_end_wait_for_company_and_new_workloads_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pokes, "WORKLOAD_PAUSE", 0.0)
    monkeypatch.setattr(pokes, "LEDGER_PAUSE", 0.0)
    temporal = FakeTemporal()
    mine = poker(temporal)
    running = asyncio.create_task(mine.run())
    for version in range(1, 30):
        mine.concern(LEDGER, "pods", version)
        await asyncio.sleep(0.01)
    assert len(temporal.started) == 1, "the first goes at once, the others within a second"
    assert mine.pending == 1
    mine.concern(LEDGER, "gpuworkloads", 50)
    await until(lambda: len(temporal.started) == 2, 0.3)
    assert temporal.started[1][1].seen == {"gpuworkloads": 50, "pods": 29}
    mine.concern(LEDGER, "pods", 60)
    await until(lambda: mine.pending == 0, 2.0)
    running.cancel()


async def test_an_order_is_poked_beside_its_workload_even_if_that_has_ended() -> None:
    temporal = FakeTemporal()
    mine = Poker(cast(Any, temporal), pool="default", skip=lambda _: True, recovered=lambda: None)
    both = (WorkloadPoke("u", "ns", "w", begin=True), WorkloadPoke("u", "", "", begin=False, order=True))
    mine.concern(Route(workloads=both), "jobs", 5)
    mine.concern(Route(workloads=both[1:]), "provisioningrequests", 6)
    assert mine.pending == 2
    await mine.flush(5)
    assert temporal.started == [] and mine.pending == 0
    assert temporal.signals == [("provisioning/u", "poke", Poke({"jobs": 5, "provisioningrequests": 6}))]


async def test_an_order_that_nobody_follows_is_not_poked_for_ever() -> None:
    temporal = FakeTemporal()
    temporal.away = RPCError("not found", RPCStatusCode.NOT_FOUND, b"")
    mine = poker(temporal)
    mine.concern(Route(workloads=(WorkloadPoke("u", "", "", begin=False, order=True),)), "jobs", 5)
    await mine.flush(5)
    assert mine.pending == 0
