"""What the node says of its devices reaches the API server: once, again when it is another, and later where it must."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from kube.client import KubeClient
from kube.resources import NODEDEVICES, NODES
from nodeworkers import own_object
from nodeworkers.own_object import MANAGER, OwnObject
from planning.devices.cards import Card
from planning.devices.report import Picture, document, status
from tests.kube.fake_api import FakeApi

CARD = Card("tt-1", "tenstorrent", "n150", "tenstorrent.com/n150", 0)


@dataclass
class Rig:
    api: FakeApi
    kube: KubeClient
    picture: Picture

    def __post_init__(self) -> None:
        clock = itertools.count(1000.0, 60.0)  # that only the time is another is no reason to write
        self.reporting = OwnObject(
            self.kube, "n1", NODEDEVICES, partial(document, "n1"), lambda: status(self.picture, next(clock))
        )

    @property
    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects(NODEDEVICES)["", "n1"]
        return found

    @property
    def writes(self) -> list[str]:
        return [method for method, path, _ in self.api.requests if method != "GET" and NODEDEVICES.plural in path]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with FakeApi() as api, await api.client(user_agent="berth-node") as kube:
        api.put(NODES, "n1")
        yield Rig(api, kube, Picture([CARD]))


async def test_it_is_made_with_the_node_as_its_owner_and_written_only_when_it_is_another(rig: Rig) -> None:
    assert await rig.reporting.write() and await rig.reporting.write()
    assert rig.writes == ["POST", "PATCH"]
    (owner,) = rig.shown["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Node", "n1") and rig.shown["status"]["count"] == 1
    rig.picture = replace(rig.picture, cards=[CARD, replace(CARD, id="tt-2", index=1)])
    assert await rig.reporting.write()
    assert rig.writes == ["POST", "PATCH", "PATCH"] and rig.shown["status"]["summary"] == "2 × n150"
    assert MANAGER in next(path for method, path, _ in rig.api.requests if method == "PATCH")


async def test_what_cannot_be_written_now_is_written_later_and_told_meanwhile(rig: Rig) -> None:
    rig.api.fail(status=503, count=3, contains=NODEDEVICES.plural)
    assert not await rig.reporting.write()
    assert rig.reporting.trouble
    while not await rig.reporting.write():
        pass
    assert not rig.reporting.trouble and rig.shown["status"]["count"] == 1


async def test_that_of_a_node_that_was_made_anew_is_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.reporting.write()
    before = rig.shown["metadata"]["uid"]
    rig.api.remove(NODES, "n1")
    node = rig.api.put(NODES, "n1")
    monkeypatch.setattr(own_object, "_RECHECK", 0.0)
    await rig.reporting.write()
    assert rig.shown["metadata"]["uid"] != before
    assert rig.shown["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]
    assert rig.shown["status"]["count"] == 1


async def test_what_somebody_removed_or_edited_comes_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.reporting.write()
    rig.api.remove(NODEDEVICES, "n1")
    monkeypatch.setattr(own_object, "_RECHECK", 0.0)
    await rig.reporting.write()
    assert rig.shown["status"]["count"] == 1
