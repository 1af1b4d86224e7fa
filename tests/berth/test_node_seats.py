"""What a node tells the workflows of its groups of seats: soon, once for much, and again where it was not taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from temporalio.service import RPCError, RPCStatusCode

from berth import node_seats
from berth.node_seats import SeatNews
from tests.controller.test_app import until


class Temporal:
    """Takes what it is told; `away`: how often it does not."""

    def __init__(self, away: int = 0) -> None:
        self.told: list[str] = []
        self.away = away
        self.slow: asyncio.Event | None = None

    async def start_workflow(self, name: str, state: Any, *, id: str, start_signal: str, **_: Any) -> None:
        if self.slow is not None:
            await self.slow.wait()
        if self.away:
            self.away -= 1
            raise RPCError("nobody answers", RPCStatusCode.UNAVAILABLE, b"")
        assert (name, start_signal, id) == ("SeatGroup", "news", f"seatgroup/{state.node}/{state.group}")
        self.told.append(state.group)


@asynccontextmanager
async def running(temporal: Temporal | None, *groups: str) -> AsyncIterator[SeatNews]:
    news = SeatNews("n", lambda: cast(Any, temporal), lambda: groups)
    task = asyncio.create_task(news.run())
    try:
        yield news
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_each_group_is_told_at_the_start_and_then_where_there_is_news() -> None:
    temporal = Temporal()
    async with running(temporal, "G01", "G23") as news:
        await until(lambda: temporal.told == ["G01", "G23"])
        news.poke("G23")
        await until(lambda: temporal.told == ["G01", "G23", "G23"])


async def test_what_is_said_while_it_is_told_is_told_once_more() -> None:
    temporal = Temporal()
    async with running(temporal) as news:
        temporal.slow = asyncio.Event()
        news.poke("G01")
        await asyncio.sleep(0)
        for _ in range(50):
            news.poke("G01")
            await asyncio.sleep(0)
        temporal.slow.set()
        news.poke("marker")
        await until(lambda: "marker" in temporal.told)
        assert temporal.told.count("G01") in (1, 2)


async def test_what_temporal_does_not_take_is_told_again_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_seats, "_PAUSES", (0.01, 0.02))
    temporal = Temporal(away=5)
    async with running(temporal, "G01", "G23") as news:
        await until(lambda: "nobody answers" in news.trouble)
        await until(lambda: sorted(temporal.told) == ["G01", "G23"] and news.trouble == "")


async def test_without_temporal_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_seats, "_PAUSES", (0.01, 0.02))
    async with running(None, "G01") as news:
        await until(lambda: news.trouble == "it was not reached yet")


async def test_every_group_is_told_again_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_seats, "AGAIN", 0.02)
    temporal = Temporal()
    async with running(temporal, "G01"):
        await until(lambda: temporal.told.count("G01") >= 3)
