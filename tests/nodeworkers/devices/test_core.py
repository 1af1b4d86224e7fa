"""The allocation core: what is seen becomes what is offered, what is given is remembered, and nothing that goes wrong
beside it costs the kubelet an answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from nodeworkers.devices import core as module
from nodeworkers.devices.cdi_files import CdiFiles
from nodeworkers.devices.core import Core, FrontEnds
from nodeworkers.devices.holdings import Holding, Holdings, PodResourcesError
from nodeworkers.devices.profiles import Profiles
from nodeworkers.devices.records import Records
from nodeworkers.ledger import Ledger
from planning.devices.cards import Card, Reading, Sight, Trouble
from planning.devices.cdi import DriverFiles
from planning.devices.health import SILENT, SILENT_SECONDS, VANISHED, Health
from planning.devices.offering import Terms
from planning.devices.offers import Refused

N150, GPU, SEAT = "tenstorrent.com/n150", "nvidia.com/gpu", "kyb.ai/gpu-2x-seat"
CARDS = [
    Card(f"tt-{n}", "tenstorrent", "n150", N150, n, f"0000:0{n}:00.0", nodes=(f"/dev/tenstorrent/by-id/wormhole-{n}",))
    for n in range(3)
]  # fmt: skip
GPUS = [Card(f"GPU-{n}", "nvidia", "H100", GPU, n, nodes=(f"/dev/nvidia{n}",)) for n in range(4)]
LOST = Trouble("Detached", "Its driver has let go of it.", sure=True)
SEATS = """
apiVersion: kyb.ai/v1alpha1
kind: GPUSeatProfile
metadata: {name: pairs}
spec:
  profiles: [{name: pair, resource: kyb.ai/gpu-2x-seat, groupSize: 2, seatsPerGroup: 2}]
  gpuTopology: {groups: [{name: G01, gpus: [0, 1]}]}
"""


@dataclass
class Kubelet:
    """What it shows of who holds what; None: it is away."""

    held: list[Holding] | None = field(default_factory=list)

    async def list(self) -> list[Holding]:
        if self.held is None:
            raise PodResourcesError("The kubelet is away.")
        return self.held


@dataclass
class Rig:
    folder: Path
    kubelet: Kubelet = field(default_factory=Kubelet)
    told: list[tuple[str, str, str]] = field(default_factory=list)
    now: float = 1000.0
    made_ready: list[list[str]] = field(default_factory=list)
    unready: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.seats = self.folder / "seats.yaml"
        self.cdi = self.folder / "cdi"
        self.begin()

    def begin(self) -> None:
        self.ledger = Ledger(self.folder / "ledger")
        records = Records(self.ledger)
        self.holdings = Holdings(
            self.kubelet, records, lambda _: True, lambda _: None, lambda: self.now, lambda: self.now
        )
        self.profiles = Profiles(None, "n", self.folder / "ledger", self.seats)
        self.core = Core(
            records, self.holdings, self.profiles, CdiFiles(self.cdi),
            FrontEnds(("tenstorrent.com/*", "kyb.ai/*"), (GPU,)),
            Terms(), DriverFiles, self.tell, self.make_ready,
        )  # fmt: skip
        self.plugin, self.dra = self.core.view("device-plugin"), self.core.view("dra")

    def again(self) -> None:
        """The process ends and begins."""
        self.ledger.close()
        self.begin()

    def make_ready(self, cards: Sequence[Card]) -> None:
        self.made_ready.append([card.id for card in cards])
        if any(card.id in self.unready for card in cards):
            raise Refused("It is held.")

    def tell(self, card: str, health: Health, sentence: str) -> None:
        self.told.append((card, health.state, sentence))

    async def see(self, *cards: Card, **troubles: Trouble) -> None:
        await self.look(Sight("tenstorrent", cards, {name.replace("_", "-"): each for name, each in troubles.items()}))

    async def look(self, sight: Sight) -> None:
        self.core.seen(sight)
        await self.core.settle()

    def ids(self, resource: str = N150) -> dict[str, bool]:
        return {device.id: device.healthy for device in self.plugin.offered().get(resource, ())}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path)
    monkeypatch.setattr("nodeworkers.devices.core.time.time", lambda: made.now)
    yield made
    made.ledger.close()


async def test_each_front_end_offers_its_own_and_cdi_is_written_before(rig: Rig) -> None:
    await rig.look(Sight("nvidia", tuple(GPUS)))
    await rig.see(*CARDS)
    assert list(rig.plugin.offered()) == [N150] and list(rig.dra.offered()) == [GPU]
    written = json.loads((rig.cdi / "berth.dev-tenstorrent.json").read_text())
    assert [each["name"] for each in written["devices"]] == ["tt-0", "tt-1", "tt-2"]


async def test_what_nobody_was_told_to_offer_is_offered_by_nobody(rig: Rig) -> None:
    await rig.see(replace(CARDS[0], resource="example.com/other"))
    assert not rig.plugin.offered() and not rig.dra.offered()
    assert "example.com/other" in rig.core.state.offering.devices, "and is shown all the same"


async def test_whoever_waits_is_told_of_changes_and_of_nothing_else(rig: Rig) -> None:
    await rig.see(*CARDS)
    version = rig.plugin.version
    waiting = asyncio.create_task(rig.plugin.changed(version))
    await rig.see(*CARDS)
    await asyncio.sleep(0)
    assert not waiting.done() and rig.plugin.version == version
    await rig.see(*CARDS, tt_1=LOST)
    assert await asyncio.wait_for(waiting, 5) == rig.plugin.version != version
    assert rig.ids() == {"tt-0": True, "tt-1": False, "tt-2": True}
    assert rig.told == [("tt-1", "Unhealthy", "n150 tt-1 is unhealthy (Detached): Its driver has let go of it.")]


async def test_after_a_restart_the_same_is_offered_before_anybody_has_looked(rig: Rig) -> None:
    await rig.see(*CARDS, tt_2=LOST)
    rig.again()
    await rig.core.settle()
    assert rig.ids() == {"tt-0": True, "tt-1": True, "tt-2": False}
    await rig.see(*CARDS[:1])
    await rig.core.settle()
    assert rig.ids() == {"tt-0": True}, "cards that are gone are not offered once somebody has looked"


@pytest.mark.parametrize(("mode", "mounts"), [("translated", 0), ("none", 1)])
async def test_after_a_restart_containers_get_what_the_machine_needs(rig: Rig, mode: str, mounts: int) -> None:
    """Also before anybody has looked, and while nobody can: an IOMMU that translates does so until the next boot."""
    host = {f"iommu/{card.id}": mode for card in CARDS} | {"hugepages-1g/total": "8", "hugepages-1g/free": "8"}
    await rig.look(Sight("tenstorrent", tuple(CARDS), host=host))
    assert len(rig.plugin.allocate(N150, ["tt-0"]).mounts) == mounts
    for _ in range(2):
        rig.again()
        await rig.core.settle()
        assert len(rig.plugin.allocate(N150, ["tt-1"]).mounts) == mounts
    await rig.look(Sight("tenstorrent", problem="The class cannot be listed."))
    assert len(rig.plugin.allocate(N150, ["tt-2"]).mounts) == mounts
    other = {key: "passthrough" if key.startswith("iommu/") else "8" for key in host}
    await rig.look(Sight("tenstorrent", tuple(CARDS), host=other))
    assert len(rig.plugin.allocate(N150, ["tt-2"]).mounts) == 1, "what is seen now is believed"


async def test_facts_that_make_no_sense_are_none(rig: Rig) -> None:
    """The ledger is as an older release, or a disk, has left it."""
    await rig.see(*CARDS)
    for number, odd in enumerate(("[]", '{"iommu/tt-1": 7}', "null")):
        rig.ledger.execute(
            "UPDATE cards SET health = json_set(health, '$.host', json(?)) WHERE id = ?", (odd, f"tt-{number}")
        )
    rig.again()
    await rig.core.settle()
    assert all(rig.ids().values()) and not rig.core.state.host


async def test_what_was_given_is_remembered_and_stays_listed_while_it_is_held(rig: Rig) -> None:
    await rig.see(*CARDS)
    found = rig.plugin.allocate(N150, ["tt-1"])
    assert found.cdi == ("berth.dev/tenstorrent=tt-1",) and rig.plugin.allocate(N150, ["tt-1"]) == found
    assert set(rig.holdings.held) == {"tt-1"}
    rig.again()
    await rig.see(CARDS[0], CARDS[2])
    await rig.core.settle()
    assert rig.ids() == {"tt-0": True, "tt-1": False, "tt-2": True}
    (gone,) = [each for each in rig.plugin.offered()[N150] if each.id == "tt-1"]
    assert gone.reason == VANISHED
    with pytest.raises(Refused, match=r"tt-1 cannot be had \(Vanished\)"):
        rig.plugin.allocate(N150, ["tt-1"])


async def test_it_goes_once_the_kubelet_shows_nobody_who_holds_it(rig: Rig) -> None:
    await rig.see(*CARDS)
    rig.plugin.allocate(N150, ["tt-1"])
    await rig.see(CARDS[0], CARDS[2])
    for _ in range(3):
        rig.now += 100
        await rig.holdings.look()
        await rig.core.settle()
    await rig.core.settle()
    assert rig.ids() == {"tt-0": True, "tt-2": True}


async def test_a_provider_that_is_silent_costs_nothing_at_first(rig: Rig) -> None:
    await rig.see(*CARDS)
    rig.core.silent("tenstorrent", "Its watcher hangs.")
    await rig.core.settle()
    assert all(rig.ids().values())
    rig.now += SILENT_SECONDS + 1
    rig.core.silent("tenstorrent", "Its watcher hangs.")
    await rig.core.settle()
    assert not any(rig.ids().values())
    assert rig.plugin.offered()[N150][0].reason == SILENT
    assert len(rig.told) == 6, "unknown, then unhealthy, each card once"


async def test_one_vendors_silence_is_not_the_others(rig: Rig) -> None:
    await rig.look(Sight("nvidia", tuple(GPUS)))
    await rig.see(*CARDS)
    rig.core.silent("nvidia", "Its watcher crashed.")
    rig.now += SILENT_SECONDS + 1
    rig.core.silent("nvidia", "Its watcher crashed.")
    await rig.core.settle()
    assert all(rig.ids().values()) and not any(each.healthy for each in rig.dra.offered()[GPU])


async def test_where_cdi_cannot_be_written_containers_get_paths(rig: Rig) -> None:
    rig.cdi.write_text("no folder")
    await rig.see(*CARDS)
    assert rig.ids() and any("cdi" in each for each in rig.core.state.problems)
    found = rig.plugin.allocate(N150, ["tt-0"])
    assert not found.cdi and found.nodes[0].host == "/dev/tenstorrent/by-id/wormhole-0"
    rig.cdi.unlink()
    await rig.core.settle()
    assert rig.plugin.allocate(N150, ["tt-0"]).cdi and not rig.core.state.problems[1:]


async def test_a_claims_devices_are_held_until_it_is_released(rig: Rig) -> None:
    await rig.look(Sight("nvidia", tuple(GPUS)))
    rig.dra.allocate(GPU, ["GPU-0"], claim="c")
    rig.dra.allocate(GPU, ["GPU-1"], claim="c", admin=True)
    assert set(rig.holdings.held) == {"GPU-0"}
    rig.again()
    assert set(rig.holdings.held) == {"GPU-0"}
    rig.core.release("c")
    rig.core.release("c")
    assert not rig.holdings.held


async def test_no_container_starts_with_a_device_that_is_not_well(rig: Rig) -> None:
    await rig.see(*CARDS, tt_1=LOST)
    rig.unready.add("tt-2")
    rig.plugin.before_start(N150, ["tt-0"])
    with pytest.raises(Refused, match="It is held"):
        rig.plugin.before_start(N150, ["tt-0", "tt-2"])
    assert rig.made_ready == [["tt-0"], ["tt-0", "tt-2"]]
    for bad in ("tt-1", "tt-9"):
        with pytest.raises(Refused):
            rig.plugin.before_start(N150, ["tt-0", bad])


def documented(rig: Rig, kind: str = "tenstorrent") -> list[str]:
    file = rig.cdi / f"berth.dev-{kind}.json"
    return [each["name"] for each in json.loads(file.read_text())["devices"]] if file.exists() else []


async def test_the_name_of_a_card_that_is_gone_leads_to_no_other_card(rig: Rig) -> None:
    await rig.see(*CARDS)
    rig.plugin.allocate(N150, ["tt-0"])
    # The kernel counts anew: what tt-0 was called is what tt-1 is called now.
    await rig.see(replace(CARDS[1], index=0), CARDS[2])
    assert documented(rig) == ["tt-1", "tt-2"] and "tt-0" in rig.ids()
    assert rig.core.written == {"tt-1": 0, "tt-2": 2}


async def test_the_names_of_the_last_run_stay_until_somebody_has_looked(rig: Rig) -> None:
    await rig.see(*CARDS)
    rig.again()
    await rig.look(Sight("nvidia", tuple(GPUS)))
    assert documented(rig) == ["tt-0", "tt-1", "tt-2"] and documented(rig, "nvidia")
    await rig.see(CARDS[1])
    assert documented(rig) == ["tt-1"]


async def test_a_folder_that_somebody_emptied_is_filled_again(rig: Rig) -> None:
    await rig.see(*CARDS)
    (rig.cdi / "berth.dev-tenstorrent.json").unlink()
    await rig.core.settle()
    assert documented(rig) == ["tt-0", "tt-1", "tt-2"]


async def test_what_one_front_end_gave_the_other_does_not_give(rig: Rig) -> None:
    await rig.look(Sight("nvidia", tuple(GPUS)))
    first = rig.dra.allocate(GPU, ["GPU-0"], claim="c")
    assert rig.dra.allocate(GPU, ["GPU-0"], claim="c") == first
    with pytest.raises(Refused, match="GPU-0 is held by the claim c"):
        rig.dra.allocate(GPU, ["GPU-0"], claim="d")
    with pytest.raises(Refused, match="GPU-0 is held by the claim c"):
        rig.plugin.allocate(GPU, ["GPU-0"])
    rig.plugin.allocate(GPU, ["GPU-1"])
    with pytest.raises(Refused, match="GPU-1 is held by a pod"):
        rig.dra.allocate(GPU, ["GPU-1"], claim="c")


async def test_a_look_that_saw_the_same_is_no_news(rig: Rig) -> None:
    await rig.see(*CARDS)
    rig.core._due.clear()
    rig.core.seen(Sight("tenstorrent", tuple(CARDS), readings={"tt-0": Reading(temperature=50.0)}))
    assert not rig.core._due.is_set()
    rig.core.seen(Sight("tenstorrent", tuple(CARDS), {"tt-0": LOST}))
    assert rig.core._due.is_set()


async def configured(rig: Rig, text: str) -> None:
    rig.seats.write_text(text)
    following = asyncio.create_task(rig.profiles.run())
    try:
        await asyncio.wait_for(rig.profiles.changed(rig.profiles.version), 20)
    finally:
        following.cancel()
    await rig.core.settle()


async def test_seats_take_their_gpus_and_a_held_one_outlives_its_configuration(rig: Rig) -> None:
    await rig.look(Sight("nvidia", tuple(GPUS)))
    await configured(rig, SEATS)
    assert rig.ids(SEAT) == {"kyb-G01-s1": True, "kyb-G01-s2": True}
    assert [each.id for each in rig.dra.offered()[GPU]] == ["GPU-2", "GPU-3"]
    found = rig.plugin.allocate(SEAT, ["kyb-G01-s2"])
    assert found.env["KYB_GPU_GROUP"] == "G01" and found.env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    rig.again()
    await rig.look(Sight("nvidia", tuple(GPUS)))
    await configured(rig, SEATS.replace("G01", "G23").replace("[0, 1]", "[2, 3]"))
    assert rig.ids(SEAT) == {"kyb-G01-s2": True, "kyb-G23-s1": True, "kyb-G23-s2": True}
    assert not rig.dra.offered()[GPU]


async def test_a_gpu_that_a_pod_has_whole_is_no_groups_meanwhile(rig: Rig) -> None:
    await rig.look(Sight("nvidia", tuple(GPUS)))
    rig.dra.allocate(GPU, ["GPU-1"], claim="c")
    await configured(rig, SEATS)
    assert not rig.ids(SEAT) and "waits" in rig.core.state.plan.waiting[0]
    rig.dra.release("c")
    await rig.core.settle()
    assert list(rig.ids(SEAT)) == ["kyb-G01-s1", "kyb-G01-s2"]


async def test_a_provider_that_may_have_missed_some_makes_nobody_forget_them(rig: Rig) -> None:
    await rig.see(*CARDS)
    await rig.look(Sight("tenstorrent", problem="It lists nothing."))
    await rig.core.settle()
    assert rig.ids() == {"tt-0": True, "tt-1": True, "tt-2": True}


async def test_a_mistake_of_ours_leaves_what_was_offered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.see(*CARDS)
    loop = asyncio.create_task(rig.core.run())
    try:

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(module, "offered", broken)
        rig.core.seen(Sight("tenstorrent"))
        await asyncio.sleep(3 * module.TOGETHER)
        assert all(rig.ids().values()) and len(rig.ids()) == 3 and not loop.done()
        monkeypatch.undo()
        rig.core.poke()
        async with asyncio.timeout(10):
            while rig.ids():
                await asyncio.sleep(0.01)
    finally:
        loop.cancel()
