"""What a node tells of its groups of seats reaches the API server: in few writes, later where it must, and nothing is
left of a group that goes. The API server and the node are pretended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kube.client import KubeClient
from kube.events import EventRecorder
from kube.resources import EVENTS, GPUSEATGROUPS, NODES
from nodeworkers import own_object
from nodeworkers.seats import metrics, reporting
from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_words import HoldTimes, ProxyAway, SeatMetrics, State, Traffic
from nodeworkers.seats.records import Known, SeatRecord
from nodeworkers.seats.reporting import GAP, REFRESH, GroupFacts, SeatReporting, SwitchLog, picture
from nodeworkers.seats.slots import Slot
from nodeworkers.seats.switching import Cleared, Filled
from nodeworkers.seats.tenants import Tenant
from nodeworkers.seats.world import SeatLook
from nodeworkers.seats.world import State as HardwareState
from planning.seats.orders import GroupPhase
from planning.seats.pod_settings import PodSettings
from planning.seats.preflight import Check
from planning.seats.status import SwitchPicture, document, object_name
from tests.kube.fake_api import FakeApi
from tests.scraping import scraping

A, B, C = "kyb-G01-s1", "kyb-G01-s2", "kyb-G01-s3"
BEGAN = 1_800_000_000.0


def tenant(seat: str, pod: str, port: int = 8000) -> Tenant:
    return Tenant(seat, ["GPU-0"], "team", pod, "server", f"uid-{pod}", settings=PodSettings(port=port))


def traffic(seat: str, held: int, oldest: float | None = None) -> Traffic:
    return Traffic(seat, 1, State.HELD, False, held, oldest, 0, None, 0)


FACTS = GroupFacts(
    Slot("G01", "Active", A, reason=f"{A} serves", since=BEGAN, switches=7),
    {A: tenant(A, "llama-0"), B: tenant(B, "qwen-0"), C: None},
    {A: "Active", B: "Parked", C: "Absent"},
    {A: SeatLook("Running", True), B: SeatLook("Parked")},
    {
        A: SeatRecord(A, 23_000, "uid-llama-0", Known(wake=1.5, park=2.5, cards={"GPU-0": 9}, parkable=True)),
        B: SeatRecord(B, 23_001, "uid-qwen-0", Known(cards={"GPU-0": 40 << 30}, parkable=True)),
        C: SeatRecord(C, 23_002, "uid-of-one-that-went", Known(why_not="long ago")),
    },
    {A: "simulated", B: "simulated"},
    {B: traffic(B, 3, 4.0)},
    {B: 12.5},
    simulated=True,
)


def slot(phase: GroupPhase, seat: str = A, **more: Any) -> GroupFacts:
    return replace(FACTS, slot=replace(FACTS.slot, phase=phase, seat=seat, **more))


class SimulatedProxy:
    def __init__(self) -> None:
        self.counts: dict[str, SeatMetrics] | None = {}

    async def metrics(self) -> dict[str, SeatMetrics]:
        if self.counts is None:
            raise ProxyAway("The seat proxy does not answer. Is it running?")
        return self.counts


@dataclass
class Rig:
    api: FakeApi
    kube: KubeClient
    events: EventRecorder
    proxy: SimulatedProxy = field(default_factory=SimulatedProxy)
    facts: Iterable[GroupFacts] | None = (FACTS,)
    now: float = BEGAN

    def __post_init__(self) -> None:
        self.reporting = SeatReporting(self.kube, "n1", self.events, lambda: self.facts, self.proxy)

    async def step(self, facts: GroupFacts | None = None, passed: float = 1.0) -> None:
        """Time passes, a look is taken, and what is due is written."""
        if facts is not None:
            self.facts = (facts,)
        self.now += passed
        await self.reporting.ask()
        self.reporting.look(self.now)
        await self.reporting.tidy()
        for own, _ in self.reporting._objects.values():
            await own.write()

    def shown(self, group: str = "G01") -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects(GPUSEATGROUPS)["", object_name("n1", group)]
        return found

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.api.objects(GPUSEATGROUPS)}

    @property
    def writes(self) -> int:
        return sum(method == "PATCH" and GPUSEATGROUPS.plural in path for method, path, _ in self.api.requests)

    async def told(self) -> list[tuple[str, str, str]]:
        await self.events.flush(5.0)
        every = self.api.objects(EVENTS).values()
        return [(each["regarding"]["kind"], each["regarding"]["name"], each["reason"]) for each in every]


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    with scraping(metrics):
        async with FakeApi() as api, await api.client(user_agent="berth-node") as kube:
            api.put(NODES, "n1")
            made = Rig(api, kube, EventRecorder(kube, "berth-node", "n1"))
            monkeypatch.setattr(reporting, "time", SimpleNamespace(time=lambda: made.now))
            yield made
            for _, task in made.reporting._objects.values():
                task.cancel()


def test_what_is_known_of_a_group_is_all_told() -> None:
    found = picture(replace(FACTS, preflight=[Check("driver", False, "no driver")]), refused=2, proxy="away")
    assert (found.phase, found.active, found.switches, found.oldest, found.refused) == ("Active", A, 7, 4.0, 2)
    llama, qwen, nobody = found.seats
    assert (llama.pod, llama.port, llama.wake, llama.park) == (("team", "llama-0", "server"), 23_000, 1.5, 2.5)
    assert llama.parked_bytes == 0, "its memory is on the GPUs"
    assert (qwen.requests, qwen.parked_bytes, qwen.expected, qwen.uid) == (3, 40 << 30, 12.5, "uid-qwen-0")
    assert (nobody.phase, nobody.pod, nobody.error) == ("Absent", None, ""), "nothing of who had it before"
    assert found.proxy == "away" and not found.preflight[0].ok and found.simulated


def test_nothing_is_told_of_a_pod_that_was_measured_of_another() -> None:
    found = picture(replace(FACTS, seats={C: tenant(C, "new-0")}, phases={C: "Waiting"})).seats[0]
    assert (found.phase, found.port, found.error, found.lost) == ("Waiting", 23_002, "", False)


@pytest.mark.parametrize(
    ("phase", "seat", "looks", "expected"),
    [
        ("Draining", A, ("Running", "Parked"), ("Draining", "Parked")),
        ("Parking", A, ("Changing", "Parked"), ("Parking", "Parked")),
        ("VerifyFree", "", ("Parked", "Parked"), ("Parked", "Parked")),
        ("Restoring", B, ("Parked", "Changing"), ("Parked", "Waking")),
        ("VerifyServing", B, ("Parked", "Running"), ("Parked", "Waking")),
        ("Starting", B, ("Parked", "Waiting"), ("Parked", "Starting")),
        ("Active", B, ("Parked", "Running"), ("Parked", "Active")),
        ("Quarantined", "", ("Parked", "Failed"), ("Parked", "Parked")),
    ],
)
def test_seats_are_shown_as_a_switch_goes_on_before_planning_looks_again(
    phase: GroupPhase, seat: str, looks: tuple[HardwareState, HardwareState], expected: tuple[str, str]
) -> None:
    moving = replace(slot(phase, seat), looks={A: SeatLook(looks[0]), B: SeatLook(looks[1])})
    assert tuple(each.phase for each in picture(moving).seats[:2]) == expected


def test_a_seat_without_a_port_leads_nowhere() -> None:
    batch = replace(FACTS, seats={A: tenant(A, "llama-0", port=0)})
    assert picture(batch).seats[0].port == 0


async def test_it_is_written_once_and_belongs_to_the_node(rig: Rig) -> None:
    for _ in range(5):
        await rig.step()
    assert rig.writes == 1
    (owner,) = rig.shown()["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Node", "n1")
    status = rig.shown()["status"]
    assert (status["phase"], status["active"], status["requests"], status["oldestMillis"]) == ("Active", A, 3, 4000)
    assert [seat.get("heldBy", {}).get("pod") for seat in status["seats"]] == ["llama-0", "qwen-0", None]
    assert status["seats"][1]["expectedMillis"] == 12_500


@pytest.mark.parametrize("pause", [0.5, 2.0, 4.0])
async def test_a_switch_is_two_writes_however_many_phases_it_has(rig: Rig, pause: float) -> None:
    await rig.step(passed=GAP)
    await rig.step(passed=GAP)
    before = rig.writes
    for phase in ("Draining", "Parking", "VerifyFree", "Restoring", "VerifyServing"):
        moving = slot(phase, B if phase in ("Restoring", "VerifyServing") else A, reason=f"now {phase}")
        looks = {A: SeatLook("Changing" if phase == "Parking" else "Parked"), B: SeatLook("Changing")}
        await rig.step(replace(moving, looks=looks), pause)
    looks = {A: SeatLook("Parked"), B: SeatLook("Running", True)}
    after = replace(slot("Active", B, switches=8), phases={A: "Parked", B: "Active", C: "Absent"}, looks=looks)
    await rig.step(after, pause)
    await rig.step(passed=GAP)
    await rig.step(passed=GAP)
    assert 1 <= rig.writes - before <= 2
    assert rig.shown()["status"]["active"] == B and rig.shown()["status"]["switches"] == 8


async def test_numbers_that_change_all_the_time_are_written_rarely(rig: Rig) -> None:
    await rig.step()
    for second in range(int(3 * REFRESH)):
        await rig.step(replace(slot("Active", reason=f"for {second} s"), traffic={B: traffic(B, second, 1.0 * second)}))
    assert 3 <= rig.writes - 1 <= 4
    assert rig.shown()["status"]["requests"] >= 2 * REFRESH


async def test_who_holds_a_seat_is_written_at_once_also_within_a_switch(rig: Rig) -> None:
    await rig.step()
    await rig.step(slot("Draining"), GAP)
    seats = {**FACTS.seats, C: tenant(C, "new-0")}
    records = {**FACTS.records, C: SeatRecord(C, 23_002, "uid-new-0")}
    await rig.step(replace(slot("Parking"), seats=seats, records=records), 0.1)
    assert rig.shown()["status"]["seats"][2]["heldBy"]["pod"] == "new-0"
    assert rig.shown()["status"]["seats"][2]["port"] == 23_002


async def test_while_the_api_server_is_away_nothing_is_lost(rig: Rig) -> None:
    rig.api.fail(status=503, count=10_000, contains=GPUSEATGROUPS.plural)
    for _ in range(3):
        await rig.step(slot("Active", switches=8))
    assert rig.reporting.trouble
    rig.api.faults.clear()
    await rig.step(slot("Active", switches=9), GAP)
    assert not rig.reporting.trouble and rig.shown()["status"]["switches"] == 9


async def test_a_group_that_goes_takes_its_object_with_it(rig: Rig) -> None:
    other = replace(FACTS, slot=Slot("g01"))
    rig.facts = (FACTS, other)
    await rig.step()
    assert rig.names == {"n1.g01", object_name("n1", "g01")}
    rig.facts = (other,)
    await rig.step()
    assert rig.names == {object_name("n1", "g01")} and not any(each.group == "G01" for each in rig.reporting.pictures())
    rig.facts = (FACTS, other)
    await rig.step()
    assert len(rig.names) == 2, "it came back"


async def test_what_a_process_before_left_is_removed_once_the_groups_are_known(rig: Rig) -> None:
    for node, group in (("n1", "G23"), ("n1", "G01"), ("n2", "G23")):
        rig.api.put(GPUSEATGROUPS, object_name(node, group), spec=document(node, "u", group)["spec"])
    rig.facts = None
    await rig.step()
    assert len(rig.names) == 3, "Services lead to seats by what it said: nothing goes while nothing is known"
    rig.facts = (FACTS,)
    rig.api.fail(status=503, count=1, contains=GPUSEATGROUPS.plural)
    await rig.step()
    for _ in range(4):
        await rig.step(passed=5.0)
    assert rig.names == {"n1.g01", "n2.g23"}


async def test_events_are_about_pods_and_the_node(rig: Rig) -> None:
    await rig.step()
    last = SwitchPicture(rig.now, A, B, "it waited longest", {"wake": 2.0})
    looks = {A: SeatLook("Parked"), B: SeatLook("Running", True)}
    phases = {A: "Parked", B: "Active", C: "Absent"}
    after = replace(slot("Active", B, switches=8), phases=phases, looks=looks, last=last)
    await rig.step(after)
    expected = [("Node", "n1", "SeatSwitched"), ("Pod", "qwen-0", "SeatActive"), ("Pod", "llama-0", "SeatParked")]
    assert sorted(await rig.told()) == sorted(expected)
    for second in range(20):
        await rig.step(replace(after, last=replace(last, at=rig.now + second)))
    assert len(await rig.told()) == 3, "a busy group is not told of each time"


async def test_a_restart_tells_nothing_that_was_told_before(rig: Rig) -> None:
    ill = replace(slot("Quarantined", "", reason="no room"), last=SwitchPicture(1.0, A, B, "", {}, "Failed"))
    await rig.step(ill)
    await rig.step(ill)
    assert await rig.told() == []
    (condition,) = rig.shown()["status"]["conditions"]
    assert condition["status"] == "False" and condition["message"] == "no room"


async def test_the_proxy_that_is_away_is_told_and_counts_go_on(rig: Rig) -> None:
    rig.proxy.counts = {A: SeatMetrics({"refused_queue": 4}, HoldTimes((), (), 0.0))}
    await rig.step()
    rig.proxy.counts = {A: SeatMetrics({"refused_queue": 6}, HoldTimes((), (), 0.0))}
    await rig.step(passed=GAP)
    assert rig.reporting.pictures()[0].refused == 2
    rig.proxy.counts = None
    await rig.step(passed=GAP)
    (condition,) = rig.shown()["status"]["conditions"]
    assert (condition["reason"], condition["status"]) == ("ProxyAway", "False") and rig.shown()["status"][
        "refused"
    ] == 2
    rig.proxy.counts = {}
    await rig.step(passed=GAP)
    assert rig.shown()["status"]["conditions"][0]["status"] == "True"


async def test_the_real_control_of_the_proxy_is_asked(rig: Rig, tmp_path: Path) -> None:
    proxy: reporting.Proxy = ProxyControl(tmp_path / "nobody")
    alone = SeatReporting(rig.kube, "n1", rig.events, lambda: None, proxy)
    await alone.ask()
    assert "does not answer" in alone._silent and alone.pictures() == []


@pytest.fixture
def log() -> Iterable[SwitchLog]:
    with scraping(metrics):
        yield SwitchLog()


ACTIVE = FACTS.slot


def test_both_halves_of_a_switch_are_one(log: SwitchLog) -> None:
    log.cleared(
        ACTIVE, Cleared("VerifyFree", "", B, "it waited longest", None, {"drain": 0.1, "verify free": 0.2}), 1.0
    )
    assert log.last("G01") is None
    log.filled("G01", B, Filled("Active", B, f"{B} serves.", None, {"verify free": 0.3, "wake": 2.0}), 4.0)
    last = log.last("G01")
    assert last is not None and last.seconds == pytest.approx({"drain": 0.1, "verify free": 0.5, "wake": 2.0})
    assert list(last.seconds) == ["drain", "verify free", "wake"], "in the order in which it was done"
    assert replace(last, seconds={}) == SwitchPicture(4.0, A, B, "it waited longest")


def test_how_a_switch_can_fail(log: SwitchLog) -> None:
    log.cleared(
        ACTIVE, Cleared("Active", A, "", f"{A} was not parked: it is busy", 5.0, {"settle": 0.0, "drain": 9.0}), 1.0
    )
    kept = log.last("G01")
    assert kept is not None and (kept.outcome, kept.before, kept.after) == ("Kept", A, A)
    log.cleared(ACTIVE, Cleared("Quarantined", A, "", "no room", 5.0, {"drain": 1.0}), 2.0)
    assert log.last("G01").outcome == "Quarantined"  # type: ignore[union-attr]
    ill = Slot("G01", "Quarantined", A)
    log.cleared(ill, Cleared("Quarantined", A, "", "no room still", 5.0, {}), 3.0)
    assert log.last("G01").at == 2.0, "it is so still"  # type: ignore[union-attr]
    log.filled("G01", B, Filled("Starting", "", "it starts cold", 0.0, {"wake": 1.0}), 4.0)
    failed = log.last("G01")
    assert failed is not None and (failed.outcome, failed.before, failed.reason) == ("Failed", "", "it starts cold")


def test_a_look_at_a_group_that_stays_as_it_is_is_no_switch(log: SwitchLog) -> None:
    log.cleared(ACTIVE, Cleared("Active", A, "", "nobody waits", None, {"settle": 0.1}), 1.0)
    assert log.last("G01") is None
    log.filled("G01", B, Filled("Active", B, "", None, {}), 2.0)
    log.cleared(ACTIVE, Cleared("Empty", gone=True), 3.0)
    assert log.last("G01") is None


async def test_it_goes_on_by_itself_until_it_is_cancelled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("PAUSE", "PROXY_PAUSE"):
        monkeypatch.setattr(reporting, pause, 0.01)
    monkeypatch.setattr(own_object, "PAUSE", 0.01)
    hangs = asyncio.Event()
    monkeypatch.setattr(rig.proxy, "metrics", hangs.wait)
    running = asyncio.create_task(rig.reporting.run())
    async with asyncio.timeout(20):
        while rig.names != {"n1.g01"} or "status" not in rig.shown():
            await asyncio.sleep(0.01)
        rig.facts = ()
        while rig.names:
            await asyncio.sleep(0.01)
    assert not hangs.is_set(), "a proxy that hangs keeps nothing else from being told"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("GPUSeatGroup")]
