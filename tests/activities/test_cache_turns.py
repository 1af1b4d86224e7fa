"""Kernel caches that have orders for their nodes at once: who waits, who is called, and that nobody is forgotten."""

from __future__ import annotations

import time

import pytest

from activities.kernel_caches import QUEUED
from planning.caches.turns import Turns
from tests.activities.cache_world import World

OTHER = "other"


def crowded(monkeypatch: pytest.MonkeyPatch, *names: str) -> World:
    """There are two places, and another cache has both."""
    world = World(monkeypatch, *names)
    world.caches._turns = turns = Turns(2)
    assert turns.grant(OTHER, 2, time.monotonic()) == 2
    return world


async def test_a_cache_waits_until_others_have_had_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    world = crowded(monkeypatch, "a", "b")
    looked = await world.look()
    assert (looked.phase, looked.within) == ("Queued", QUEUED) and not world.temporal.orders
    assert world.condition("Error")[0] == "False", "to wait is no error"
    world.caches._turns.grant(OTHER, 0, time.monotonic())
    assert (await world.look()).phase == "Preparing"
    assert {name for name, _ in world.temporal.orders} == {"a", "b"}


async def test_one_that_is_done_calls_on_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a", "b")
    world.caches._turns = Turns(2)
    await world.look()
    assert world.caches._turns.grant(OTHER, 2, time.monotonic()) == 0
    world.answer("a")
    await world.look()
    assert not world.temporal.signals, "one place is not enough for it"
    world.answer("b")
    assert (await world.look()).phase == "Ready"
    assert world.temporal.signals == [(f"kernelcache/{OTHER}", "poke")]


async def test_a_cache_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a", "b")
    world.caches._turns = Turns(2)
    await world.look()
    world.server.delete()
    await world.look()
    assert world.caches._turns.grant(OTHER, 2, time.monotonic()) == 2
