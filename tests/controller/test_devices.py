"""Who hears of what nodes say of their devices: one workflow, once for many changes, and only of what it shows."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from activities.messages import Poke
from controller import devices
from controller.devices import DeviceWatch
from controller.digests import NodeDigest
from kube.reflector import Reflector
from tests.controller.fake_temporal import UNAVAILABLE, FakeTemporal
from tests.controller.test_pokes import until


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "PAUSE", 0.02)
        monkeypatch.setattr(devices, "APART", 0.02)
        self.temporal = FakeTemporal()
        self.watch = DeviceWatch(cast(Any, None), cast(Any, self.temporal))

    def put(self, reflector: Reflector[Any], name: str, version: int, **body: Any) -> None:
        raw = {"metadata": {"uid": name, "name": name, "generation": body.pop("generation", 1)}, **body}
        reflector._put(name, version, reflector._project(raw))

    def says(self, node: str, version: int, **status: Any) -> None:
        self.put(self.watch.node_devices, node, version, status=status)

    @property
    def due(self) -> dict[str, int] | None:
        found, self.watch._due = self.watch._due, None
        return None if found is None else dict(found)


async def test_a_thousand_nodes_within_a_moment_are_one_poke(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(devices, "PAUSE", 1.0)  # the moment, also on a busy machine
    running = asyncio.create_task(world.watch.run())
    for number in range(1000):
        world.says(f"n{number}", number + 1, seats={"seats": 4})
        await asyncio.sleep(0)
    await until(lambda: bool(world.temporal.started))
    await asyncio.sleep(0.1)
    assert world.temporal.started == [("devices/default", Poke({"nodedevices": 1000}))]
    running.cancel()


def test_only_what_is_shown_elsewhere_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.says("n", 1, seats={"seats": 4}, labels={"a": "1"})
    assert world.due == {"nodedevices": 1}
    world.says("n", 2, seats={"seats": 4}, labels={"a": "1"}, unhealthy=1, held=3)
    assert world.due is None
    for version, change in enumerate(({"seats": {"seats": 5}}, {"labels": {"a": "2"}}, {"seats": None}), 3):
        world.says("n", version, **{"seats": {"seats": 4}, "labels": {"a": "1"}} | change)
        assert world.due == {"nodedevices": version}
    same = {"seats": None, "labels": {"a": "1"}}
    card = {"id": "GPU-1", "resource": "nvidia.com/gpu", "heldBy": {"namespace": "ns", "pod": "p"}}
    world.says("n", 6, **same, devices=[card])
    assert world.due is None
    seat = {**card, "id": "kyb-G01-s1", "resource": "kyb.ai/gpu-2x-seat", "group": "G01"}
    world.says("n", 7, **same, devices=[card, seat])
    assert world.due == {"nodedevices": 7}, "its pod may prefer another group"
    world.watch.node_devices._remove("n", 9)
    assert world.due == {"nodedevices": 9}


def test_of_a_profile_the_spec_is_news_and_its_status_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.put(world.watch.seat_profiles, "p", 1)
    assert world.due == {"gpuseatprofiles": 1}
    world.put(world.watch.seat_profiles, "p", 2, status={"seats": 4})
    assert world.due is None
    world.put(world.watch.seat_profiles, "p", 3, generation=2)
    assert world.due == {"gpuseatprofiles": 3}


def test_a_nodes_labels_are_news_where_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    plain, other = NodeDigest("n", True, 1, {}), NodeDigest("n", True, 2, {"gpu": "h100"})
    world.watch.node_changed(plain, other, 5)
    world.watch.sweep()
    assert world.due is None, "an installation without devices has no such workflow"
    world.says("n", 6, seats={"seats": 4})
    assert world.due is not None
    world.watch.node_changed(plain, NodeDigest("n", False, 3, {}), 7)
    world.watch.node_changed(plain, None, 7)
    assert world.due is None
    world.watch.node_changed(plain, other, 8)
    assert world.due == {"nodes": 8}
    world.watch.sweep()
    assert world.due == {}


async def test_while_temporal_is_away_a_poke_stays_due(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.temporal.away = UNAVAILABLE
    running = asyncio.create_task(world.watch.run())
    world.put(world.watch.seat_profiles, "p", 4)
    await until(lambda: bool(world.watch.trouble))
    world.says("n", 6, seats={"seats": 5})
    world.temporal.away = None
    await until(lambda: bool(world.temporal.started))
    assert world.temporal.started[0][1] == Poke({"gpuseatprofiles": 4, "nodedevices": 6})
    await until(lambda: not world.watch.trouble)
    running.cancel()


async def test_what_was_seen_is_told_before_a_term_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.says("n", 4, seats={"seats": 4})
    await world.watch.flush(1.0)
    assert world.temporal.started == [("devices/default", Poke({"nodedevices": 4}))]
