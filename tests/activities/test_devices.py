"""What nodes say of their devices gets into statuses and labels: what is due, once, and nothing of anybody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities import devices
from activities.cache import ClusterCache
from activities.device_signatures import DevicesLook, DevicesShown
from activities.devices import AGAIN, MANAGER, SOON, DeviceShows
from kube.errors import Unavailable
from kube.resources import GPUSEATPROFILES, NODEDEVICES, NODES, PODS
from tests.crds.test_gpuseatprofile import spec
from tests.kube.fake_api import FakeApi

REFUSED = "Group G29 (GPUs 2 and 9) of profile pair is refused: there is no GPU 9; this node has GPUs 0 to 7."
COUNT, MEMORY = "berth.dev/nvidia.count", "nvidia.com/gpu.memory"


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, str]] = []

    def record(self, *, regarding: Any, type: str, reason: str, action: str, note: str) -> None:
        self.events.append((regarding.name, type, reason, note))


class World:
    """A cluster, and a worker's cache of it that has seen all there is."""

    def __init__(self, api: FakeApi, kube: Any, cache: ClusterCache) -> None:
        self.api, self.cache, self.events = api, cache, Recorder()
        self.now = 1000.0
        self.shows = DeviceShows(cache, kube, cast(Any, self.events), clock=lambda: self.now)

    def node(self, name: str, labels: dict[str, str] | None = None, managed: tuple[str, ...] = ()) -> None:
        fields: dict[str, Any] = {"f:metadata": {"f:labels": {f"f:{key}": {} for key in managed}}}
        entries = [{"manager": MANAGER, "operation": "Update", "fieldsV1": fields}] if managed else []
        self.api.put(NODES, name, metadata={"labels": labels or {}, "managedFields": entries})

    def says(
        self,
        node: str,
        seats: dict[str, Any] | None = None,
        labels: dict[str, str] | None = None,
        devices: list[dict[str, Any]] | None = None,
    ) -> None:
        told = ("seats", seats), ("labels", labels), ("devices", devices)
        status = {key: value for key, value in told if value is not None}
        self.api.put(NODEDEVICES, node, spec={"nodeName": node}, status=status)

    def profile(self, name: str = "pairs", **more: Any) -> None:
        self.api.put(GPUSEATPROFILES, name, metadata={"generation": 1}, spec=spec() | more)

    def status(self, name: str = "pairs") -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects(GPUSEATPROFILES)["", name].get("status", {})
        return found

    def labels(self, node: str) -> dict[str, str]:
        found: dict[str, str] = self.api.objects(NODES)["", node]["metadata"]["labels"]
        return found

    def writes(self, kind: str = "") -> int:
        return sum(method == "PATCH" and kind in path for method, path, _ in self.api.requests)

    async def look(self) -> DevicesShown:
        await self.caught_up()
        shown: DevicesShown = await ActivityEnvironment().run(self.shows.show, DevicesLook({}))
        await self.caught_up()
        return shown

    async def caught_up(self) -> None:
        async with asyncio.timeout(20):
            for resource in (NODES, NODEDEVICES, GPUSEATPROFILES, PODS):
                reflector = self.cache.reflectors[resource.plural]
                wanted = {
                    each["metadata"]["uid"]: int(each["metadata"]["resourceVersion"])
                    for each in self.api.objects(resource).values()
                }
                while reflector._versions != wanted:
                    await asyncio.sleep(0.01)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with FakeApi() as api, await api.client(user_agent=MANAGER) as kube:
        cache = ClusterCache(kube)
        running = asyncio.create_task(cache.run())
        await cache.wait_synced()
        yield World(api, kube, cache)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def serving(**more: Any) -> dict[str, Any]:
    return {"source": "GPUSeatProfile pairs", "generation": 1, "groups": 4, "seats": 16} | more


async def test_a_thousand_nodes_are_one_write_of_a_status(world: World) -> None:
    world.profile()
    for number in range(1000):
        world.node(f"n{number}")
        world.says(f"n{number}", serving())
    assert await world.look() == DevicesShown("1 status and the labels of 0 nodes written")
    status = world.status()
    assert (status["seats"], status["nodesServing"], status["nodesRefused"]) == (16000, 1000, 0)
    assert world.events.events == [("pairs", "Normal", "Serving", "Seats: 16000, on 1000 nodes.")]
    await world.look()
    assert world.writes() == 1, "what is shown already is not written again"


async def test_a_refusal_names_node_and_group_and_is_an_event_once(world: World) -> None:
    world.profile()
    for node in ("good", "bad"):
        world.node(node)
    world.says("good", serving())
    world.says("bad", serving(groups=3, seats=12, problems=[REFUSED]))
    await world.look()
    conditions = {each["type"]: each for each in world.status()["conditions"]}
    assert conditions["Ready"]["reason"] == conditions["Error"]["reason"] == "Refused"
    assert f"bad: {REFUSED}" in conditions["Error"]["message"] and world.status()["nodesRefused"] == 1
    ((name, kind, reason, note),) = world.events.events
    assert (name, kind, reason) == ("pairs", "Warning", "Refused") and "bad: Group G29" in note
    world.node("late")
    world.says("late", serving())
    await world.look()
    assert len(world.events.events) == 1
    world.says("bad", serving())
    await world.look()
    assert world.events.events[1:] == [("pairs", "Normal", "Serving", "Seats: 48, on 3 nodes.")]


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([("G012", [0, 1, 2])], "group G012 has 3 GPUs"),
        ([("G01", [0, 1]), ("G12", [1, 2])], "overlap: GPU 1 is in G01 and in G12"),
    ],
)
async def test_what_no_node_could_serve_is_said_though_an_older_api_server_took_it(
    world: World, groups: list[Any], told: str
) -> None:
    world.profile(**spec(*groups))
    await world.look()
    (_, error) = world.status()["conditions"]
    assert (error["status"], error["reason"]) == ("True", "Invalid") and told in error["message"]
    assert [each[1:3] for each in world.events.events] == [("Warning", "Invalid")]


async def test_a_node_that_follows_a_file_is_not_waited_for(world: World) -> None:
    world.profile()
    world.node("by-file")
    world.says("by-file", serving(source="the file /etc/seats.yaml"))
    world.node("without-berth")
    await world.look()
    assert world.status()["conditions"][0]["reason"] == "NoNodes" and world.status()["nodes"] == []


async def test_labels_come_and_go_with_the_cards(world: World) -> None:
    world.node("n", {"team": "a"})
    world.says("n", labels={COUNT: "8", MEMORY: "81559"})
    assert (await world.look()).message == "0 statuses and the labels of 1 node written"
    assert world.labels("n") == {"team": "a", COUNT: "8", MEMORY: "81559"}
    await world.look()
    assert (
        world.writes("nodes") == 1 and sum(m == "GET" and p.endswith("/nodes/n") for m, p, _ in world.api.requests) == 1
    )
    world.node("n", world.labels("n"), managed=(COUNT, MEMORY))
    world.says("n", labels={})
    await world.look()
    assert world.labels("n") == {"team": "a"}


async def test_labels_of_others_stay_and_those_that_somebody_removed_come_back(world: World) -> None:
    world.node("n", {MEMORY: "40960", "node-role.kubernetes.io/x": ""})
    world.says("n", labels={COUNT: "8", MEMORY: "81559", "node-role.kubernetes.io/control-plane": ""})
    await world.look()
    kept = {MEMORY: "40960", "node-role.kubernetes.io/x": "", COUNT: "8"}
    assert world.labels("n") == kept
    world.node("n", {key: text for key, text in kept.items() if key != COUNT})
    await world.look()
    assert world.labels("n") == kept
    world.says("n", labels={})
    world.node("n", kept, managed=(COUNT,))
    await world.look()
    assert world.labels("n") == {MEMORY: "40960", "node-role.kubernetes.io/x": ""}


async def test_of_a_node_that_does_not_say_its_labels_none_are_touched(world: World) -> None:
    world.node("n", {COUNT: "8"}, managed=(COUNT,))
    world.says("n", seats=serving())
    await world.look()
    assert world.writes() == 0


async def test_more_nodes_than_a_look_labels_are_left_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "MOST", 3)
    for number in range(5):
        world.node(f"n{number}")
        world.says(f"n{number}", labels={COUNT: "8"})
    assert (await world.look()).within == SOON
    assert (await world.look()).within is None
    assert all(world.labels(f"n{number}") == {COUNT: "8"} for number in range(5))


@pytest.mark.parametrize(("status", "reason", "within"), [(409, "Conflict", SOON), (403, "Forbidden", AGAIN)])
async def test_what_is_refused_keeps_nothing_else_from_being_written(
    world: World, status: int, reason: str, within: float
) -> None:
    world.profile()
    for node in ("a", "b"):
        world.node(node)
        world.says(node, serving(), {COUNT: "8"})
    world.api.fail(status=status, reason=reason, contains="/nodes/a", method="PATCH")
    shown = await world.look()
    assert shown == DevicesShown("1 status and the labels of 1 node written", within)
    world.now += within
    await world.look()
    assert world.labels("a") == world.labels("b") == {COUNT: "8"}


async def test_nodes_that_are_refused_leave_the_others_their_turn_and_wait_for_theirs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "MOST", 3)
    for node in ("bad-1", "bad-2", "bad-3", "well"):
        world.node(node)
        world.says(node, labels={COUNT: "8"})
    world.api.fail(status=403, reason="Forbidden", contains="/nodes/bad", method="PATCH", count=100)
    assert (await world.look()).within == AGAIN, "nothing was written: no look at once"
    world.now += 10
    assert (await world.look()).within == AGAIN - 10
    assert world.labels("well") == {COUNT: "8"} and world.writes("/nodes/bad") == 3
    world.now += 10
    world.says("bad-1", labels={COUNT: "9"})
    assert (await world.look()).within == AGAIN - 20 and world.writes("/nodes/bad") == 3
    world.now += 10
    for node in ("late-1", "late-2"):
        world.node(node)
        world.says(node, labels={COUNT: "8"})
    assert (await world.look()).within == SOON and world.writes("/nodes/bad") == 4
    assert world.labels("late-1") == world.labels("late-2") == {COUNT: "8"}
    world.api.faults.clear()
    world.now += AGAIN
    await world.look()
    assert [world.labels(f"bad-{number}")[COUNT] for number in (1, 2, 3)] == ["9", "8", "8"]


async def test_nodes_that_have_their_labels_keep_no_others_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "MOST", 1)
    world.node("has", {COUNT: "8"}, managed=(COUNT,))
    world.node("lacks")
    for node in ("has", "lacks"):
        world.says(node, labels={COUNT: "8"})
    assert (await world.look()).within == SOON
    await world.look()
    assert world.labels("lacks") == {COUNT: "8"}


async def test_an_api_server_that_is_away_is_for_temporal_to_try_again(world: World) -> None:
    world.profile()
    world.api.fail(status=503, reason="ServiceUnavailable", contains="/status", method="PATCH", count=20)
    with pytest.raises(Unavailable):
        await world.look()
    world.api.faults.clear()
    await world.look()
    assert world.status()["conditions"][0]["reason"] == "NoNodes"


async def test_a_pod_with_a_seat_of_another_group_than_it_prefers_is_told_once(world: World) -> None:
    def pod(name: str, prefers: str, node: str = "n") -> None:
        meta = {"annotations": {"kyb.ai/prefer-group": prefers}}
        world.api.put(PODS, name, "ns", metadata=meta, spec={"nodeName": node}, status={"phase": "Running"})

    def seat(group: str, number: int, holder: str) -> dict[str, Any]:
        held = {"namespace": "ns", "pod": holder, "container": "server"}
        return {
            "id": f"kyb-{group}-s{number}", "resource": "kyb.ai/gpu-2x-seat", "group": group, "heldBy": held
        }  # fmt: skip

    pod("right", "G01")
    pod("wrong", "G23")
    pod("elsewhere", "G23", node="m")
    held = [seat("G01", number, name) for number, name in enumerate(("right", "wrong", "elsewhere", "unknown"), 1)]
    world.says("n", serving(), devices=held)
    await world.look()
    ((name, type, reason, note),) = world.events.events
    assert (name, type, reason) == ("wrong", "Normal", "OtherGroup")
    assert note.startswith("It prefers group G23 and has seat kyb-G01-s2 of group G01.")
    assert "by DRA, either no seat of group G23 was free, or the webhook did not answer when" in note
    await world.look()
    assert len(world.events.events) == 1
    world.says("n", serving(), devices=[])
    await world.look()
    world.says("n", serving(), devices=[seat(f"G{number}", 1, "wrong") for number in range(40, 60)])
    await world.look()
    assert len(world.events.events) == 1, "whatever its node makes up"
    pod("wrong", "G77")
    await world.look()
    assert [note.partition(".")[0] for *_, note in world.events.events[1:]] == [
        "It prefers group G77 and has seat kyb-G40-s1 of group G40"
    ]
