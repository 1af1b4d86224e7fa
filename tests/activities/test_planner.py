"""A planner that has not seen what was seen before waits for it, unless the API server itself went back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

import activities.planner
from activities import forecasts
from activities.cache import StaleCacheError
from activities.planner import Planner
from activities.signatures import DecideRequest, DecideResult, Versions
from crds.settings import Settings
from planning import placement
from planning.memory import Memory
from planning.model import Decision, Ended, Ledger, Snapshot, WorkloadView
from planning.profiles import SETTLE
from tests.planning.builders import NOW, SETTINGS, node, promise, reservation, snapshot, workload
from tests.planning.test_prediction import running


class Cache:
    """A picture of the Jobs at one version."""

    def __init__(self, seen: Snapshot) -> None:
        self.settings, self.departed = SETTINGS, dict[str, WorkloadView]()
        self.live_jobs = {job.uid: job for job in seen.jobs}
        self._seen = seen

    async def reach(self, versions: Versions, _: float) -> Versions:
        return {kind: version for kind, version in versions.items() if version > self._seen.jobs_version}

    def snapshot(self) -> Snapshot:
        return self._seen


async def at_once(seen: Snapshot, settings: Settings) -> forecasts.Forecast:
    return forecasts.forecast(seen, settings)


def planner_beside(
    server: int,
    seen: Snapshot | None = None,
    make: Callable[[Snapshot, Settings], Awaitable[forecasts.Forecast]] = at_once,
) -> Planner:
    """One whose cache has seen version 5, of a server that is at `server`."""

    async def list_(*_: object, **__: object) -> tuple[list[dict[str, Any]], int]:
        return [], server

    cache = Cache(seen or replace(snapshot([node("n", 8)], [workload("a")]), jobs_version=5))
    return Planner(cast(Any, cache), cast(Any, SimpleNamespace(list=list_)), forecasts.Forecasts(make))


async def decide(server: int, *, ledger: Ledger | None = None, **asked: Versions) -> DecideResult:
    """A round."""
    planner = planner_beside(server)
    request = DecideRequest(ledger or Ledger(), asked.get("fresh", {}), asked.get("at_least", {}), 10, 7)
    result: DecideResult = await ActivityEnvironment().run(planner.decide, request)
    return result


async def test_a_binding_version_is_waited_for_unless_the_server_went_back() -> None:
    with pytest.raises(StaleCacheError):
        await decide(9, at_least={"jobs": 9})
    result = await decide(8, at_least={"jobs": 9})
    assert (result.restored, result.behind) == (True, False)


@pytest.mark.parametrize(("server", "restored"), [(8, True), (9, False)])
async def test_news_of_a_former_life_tell_that_the_server_went_back(server: int, restored: bool) -> None:
    result = await decide(server, fresh={"jobs": 9})
    assert (result.restored, result.behind) == (restored, True)


async def test_a_promise_whose_job_the_backup_does_not_have_is_given_anew() -> None:
    ledger = Ledger(in_flight={"a": promise("a", "n")}, made={"a": 9})
    waits = await decide(9, ledger=ledger, fresh={"jobs": 9})
    assert (waits.decision.seen, waits.decision.assignments) == ([], [])
    result = await decide(8, ledger=ledger, fresh={"jobs": 9})
    assert (result.decision.seen, [a.uid for a in result.decision.assignments]) == (["a"], ["a"])
    assert max(result.versions.values()) <= 5, "nothing that no cache will ever have binds later rounds"


async def test_a_round_tells_when_runs_can_be_learned_also_of_workloads_that_are_gone() -> None:
    planner = planner_beside(5)
    request = DecideRequest(Ledger(), {}, {}, 10, 7)
    result: DecideResult = await ActivityEnvironment().run(planner.decide, request)
    assert result.learn_in is None
    gone = workload("b", status={"phase": "Succeeded"}, ended=Ended(NOW - SETTLE + 4, NOW - 60))
    planner._cache.departed["b"] = gone
    result = await ActivityEnvironment().run(planner.decide, request)
    assert result.learn_in == pytest.approx(4, abs=1)


async def test_a_forecast_is_made_beside_the_rounds_and_told_by_a_later_one() -> None:
    told = replace(workload("a", 8), status={"phase": "Scheduling"})
    seen = running((8, 100.0), waiting=(), took=(400.0,) * 5)
    planner = planner_beside(5, replace(seen, workloads=(*seen.workloads, told), jobs_version=5))
    request = DecideRequest(Ledger(), {}, {}, 10, 7)
    first: DecideResult = await ActivityEnvironment().run(planner.decide, request)
    assert (first.decision.expected, first.decision.wake_after) == ([], forecasts.SOON)
    async with asyncio.timeout(10):
        while planner._forecasts._running is not None:
            await asyncio.sleep(0.01)
    second: DecideResult = await ActivityEnvironment().run(planner.decide, request)
    (expected,) = second.decision.expected
    assert expected.uid == "a" and expected.start == pytest.approx(NOW + 300, rel=0.1)
    assert second.decision.wake_after != forecasts.SOON, "none is under way"


async def test_a_forecast_that_fails_costs_nobody_a_place() -> None:
    async def fail(*_: object) -> forecasts.Forecast:
        raise ValueError("a strategy from outside, say")

    planner = planner_beside(5, replace(snapshot([node("n", 1)], [workload("a", 2)]), jobs_version=5), fail)
    for _ in range(2):
        result: DecideResult = await ActivityEnvironment().run(planner.decide, DecideRequest(Ledger(), {}, {}, 10, 7))
        assert result.decision.expected == []


async def test_whoever_decides_next_knows_of_reservations_that_were_given_nodes() -> None:
    keeps = replace(reservation("r", gpus=1, start=100, end=200), resource_version=4)
    seen = replace(snapshot([node("n", 1)], reservations=[keeps]), jobs_version=5)
    result: DecideResult = await ActivityEnvironment().run(
        planner_beside(5, seen).decide, DecideRequest(Ledger(), {}, {}, 10, 7)
    )
    assert (result.decision.reserved, result.versions) == ({"uid-r": {"n": 1}}, {"gpureservations": 4})
    assert result.reservations == 1, "its status is to tell"


async def test_rounds_share_a_memory_unless_they_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Memory] = []
    together = threading.Barrier(1)

    def watched(*arguments: Any, memory: Memory, **rest: Any) -> Decision:
        used.append(memory)
        together.wait(10)
        return placement.decide(*arguments, memory=memory, **rest)

    monkeypatch.setattr(activities.planner, "decide", watched)
    planner, request = planner_beside(5), DecideRequest(Ledger(), {}, {}, 10, 7)

    async def round_() -> None:
        await ActivityEnvironment().run(planner.decide, request)

    await round_()
    await round_()
    assert used[0] is used[1]
    together = threading.Barrier(2)
    await asyncio.gather(round_(), round_())
    assert used[2] is not used[3], "a round that was given up may still go on beside its repetition"
    together = threading.Barrier(1)
    await round_()
    assert used[4] in used[2:4]


async def test_after_a_round_that_took_long_others_wait_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[tuple[float, float]] = []  # when each was planned, from and to

    def slow(*args: Any, **options: Any) -> Decision:
        began = time.monotonic()
        time.sleep(0.1)
        rounds.append((began, time.monotonic()))
        return placement.decide(*args, **options)

    monkeypatch.setattr(activities.planner, "decide", slow)
    planner, request = planner_beside(5), DecideRequest(Ledger(), {}, {}, 10, 7)
    for _ in range(2):
        await ActivityEnvironment().run(planner.decide, request)
    (_, ended), (began, _) = rounds
    assert began - ended >= activities.planner.REST * 0.1
