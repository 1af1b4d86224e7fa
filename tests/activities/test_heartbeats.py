"""An activity that works gives signs of life, from its beginning on and no longer than that."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities import heartbeats, planner
from activities.heartbeats import BEAT, beating
from activities.placements import Placements
from activities.signatures import SILENCE, CarryOut, DecideRequest
from planning.model import Decision, Ledger


class Beats(ActivityEnvironment):
    """Tells when the second sign of life came."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.twice = 0, asyncio.Event()
        self.on_heartbeat = self.heard

    def heard(self, *_: Any) -> None:
        self.count += 1
        if self.count == 2:
            self.twice.set()


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Beats:
    monkeypatch.setattr(heartbeats, "BEAT", timedelta(seconds=0.01))
    return Beats()


class Over(Exception):
    """What keeps the activity is over."""


async def test_signs_of_life_end_with_the_work(beats: Beats) -> None:
    async def work() -> None:
        async with beating():
            await beats.twice.wait()

    async def and_then() -> None:
        await work()
        before = beats.count
        await asyncio.sleep(0.1)  # ten beats, were there any
        assert beats.count == before

    await asyncio.wait_for(beats.run(and_then), 10)


async def test_a_round_that_waits_for_its_cache_gives_signs_of_life(beats: Beats) -> None:
    async def reach(*_: Any) -> None:
        await beats.twice.wait()
        raise Over

    planner_ = planner.Planner(cast(Any, SimpleNamespace(reach=reach)), cast(Any, None), cast(Any, None))
    with pytest.raises(Over):
        await asyncio.wait_for(beats.run(planner_.decide, DecideRequest(Ledger(), {}, {}, 1, 7)), 10)


async def test_what_is_carried_out_gives_signs_of_life_from_its_beginning_on(beats: Beats) -> None:
    async def wait_synced() -> None:
        await beats.twice.wait()
        raise Over

    cache: Any = SimpleNamespace(wait_synced=wait_synced)
    placements = Placements(cache, cast(Any, None), cast(Any, None), cast(Any, None))
    with pytest.raises(Over):
        await asyncio.wait_for(beats.run(placements.carry_out, CarryOut(Decision())), 10)


def test_one_that_is_late_is_not_lost() -> None:
    assert SILENCE >= 3 * BEAT
