"""The ledger has profiles learn when there is something to learn: at most once a minute, and whatever becomes of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.exceptions import ActivityError, CancelledError, RetryState

from activities.messages import PlacementState
from activities.signatures import LEARN, DecideResult, Learned
from planning.model import Decision
from workflows import placement
from workflows.placement import LEARN_PAUSE, Placement


class World:
    """What the ledger sees of Temporal: a clock, and activities of which only `learn` does anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.learned = 1000.0, 0
        self.learn_in: float | None = None
        self.answer: Callable[[], Learned] = Learned
        self.ledger = Placement(PlacementState())
        stands_in = SimpleNamespace(
            execute_activity=self._execute,
            random=lambda: random.Random(7),
            set_current_details=lambda _: None,
            time=lambda: self.now,
        )
        monkeypatch.setattr(placement, "workflow", stands_in)

    async def _execute(self, name: str, *_: object, **__: object) -> Any:
        if name == LEARN:
            self.learned += 1
            return self.answer()
        return DecideResult(Decision(), {}, learn_in=self.learn_in)

    async def round(self, learn_in: float | None) -> timedelta | None:
        """A round, and how long the ledger then sleeps when nobody pokes."""
        self.learn_in = learn_in
        await self.ledger._round()
        return self.ledger._next_look()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_it_learns_when_it_is_due_and_sleeps_until_then(world: World) -> None:
    assert await world.round(None) is None
    assert await world.round(7.0) == timedelta(seconds=7) and world.learned == 0
    assert await world.round(0.0) is None and world.learned == 1


async def test_it_learns_at_most_once_a_minute(world: World) -> None:
    await world.round(0.0)
    world.now += 20
    assert await world.round(0.0) == timedelta(seconds=LEARN_PAUSE - 20) and world.learned == 1
    world.now += LEARN_PAUSE - 20
    world.answer = lambda: Learned(200, 200, 0.0)
    assert await world.round(0.0) == timedelta(seconds=LEARN_PAUSE), "there is more than it learned in one go"
    assert world.learned == 2


async def test_if_it_fails_placing_goes_on_and_it_is_tried_again(world: World) -> None:
    def fails() -> Learned:
        raise failure()

    world.answer = fails
    assert await world.round(0.0) == timedelta(seconds=LEARN_PAUSE)
    world.now += LEARN_PAUSE
    world.answer = Learned
    assert await world.round(0.0) is None and world.learned == 2


async def test_a_cancelled_ledger_is_cancelled(world: World) -> None:
    def cancelled() -> Learned:
        error = failure()
        error.__cause__ = CancelledError()
        raise error

    world.answer = cancelled
    with pytest.raises((ActivityError, asyncio.CancelledError)):
        await world.round(0.0)


def failure() -> ActivityError:
    return ActivityError(
        "failed", scheduled_event_id=1, started_event_id=2, identity="", activity_type=LEARN, activity_id="1",
        retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
    )  # fmt: skip
