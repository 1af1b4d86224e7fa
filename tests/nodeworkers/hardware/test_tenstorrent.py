"""Tenstorrent's cards, on trees of files as tt-kmd makes them: a simulated machine's, changed by hand where it cannot
be so bad.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.hardware import tenstorrent, tenstorrent_sysfs
from nodeworkers.hardware.machine_tenstorrent import Simulation, TenstorrentMachine, Type, read_simulated
from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.source import Source
from nodeworkers.hardware.tenstorrent import HEARTBEAT_SECONDS, TELEMETRY_SECONDS, THERMAL_SECONDS, Tenstorrent
from nodeworkers.hardware.wire import decode, encode
from planning.devices.cards import Card, Sight, Trouble

REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
ID = re.compile(r"[A-Za-z0-9._-]{1,63}")


class Rig:
    """A tree, the Source that looks at it, and its time."""

    def __init__(self, folder: Path, **section: Any) -> None:
        self.folder, self.now = folder, 1000.0
        self.simulation = Simulation(folder, machine(**section))
        self.source = self.fresh()

    def fresh(self, read: Callable[[str, int], str] = read_simulated) -> Tenstorrent:
        sys, dev, proc = (self.folder / name for name in ("sys", "dev", "proc"))
        return Tenstorrent(sys, dev, proc, read=read, clock=lambda: self.now)

    def apply(self, **section: Any) -> None:
        self.simulation.apply(machine(**section))

    def look(self, seconds: float = 2.0, beat: bool = True) -> Sight:
        self.now += seconds
        if beat:
            self.simulation.beat()
        return self.source.look()

    def attribute(self, index: int, name: str) -> Path:
        return self.folder / f"sys/class/tenstorrent/tenstorrent!{index}" / name

    def pci(self, index: int, name: str) -> Path:
        return self.attribute(index, "device").resolve() / name

    def trouble(self, **looked: Any) -> Trouble | None:
        """Of the only card."""
        (card,) = (sight := self.look(**looked)).cards
        return sight.troubles.get(card.id)


def machine(**section: Any) -> TenstorrentMachine:
    return TenstorrentMachine.model_validate(section)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "machine", cards=[{"type": "n150", "asicId": "00112233AABBCCDD", "numa": 1}])


# --- what there is -------------------------------------------------------------------------------------------------


def test_what_a_card_is(rig: Rig) -> None:
    sight = rig.look()
    (card,) = sight.cards
    assert card == Card(
        id="tt-00112233aabbccdd",
        vendor="tenstorrent",
        product="n150",
        resource="tenstorrent.com/n150",
        index=0,
        address="0000:01:00.0",
        numa=1,
        memory_mib=12288,
        nodes=(f"{rig.folder}/dev/tenstorrent/by-id/wormhole-00112233AABBCCDD",),
        arch="wormhole",
        driver="2.10.1-simulated",
        firmware="18.10.0.0",
    )
    assert os.path.samefile(card.nodes[0], rig.folder / "dev/tenstorrent/0")
    assert sight.troubles == {} and sight.problem == ""
    source: Source = rig.source
    assert source.vendor == sight.vendor == "tenstorrent"


@pytest.mark.parametrize("kind", [kind for kind in get_args(Type) if kind != "unknown"])
def test_every_type_is_offered_under_its_own_name(tmp_path: Path, kind: str) -> None:
    (card,) = Rig(tmp_path, cards=[{"type": kind}]).look().cards
    assert (card.product, card.resource) == (kind, f"tenstorrent.com/{kind}")


def test_types_side_by_side(tmp_path: Path) -> None:
    cards = Rig(tmp_path, cards=[{"type": "n150", "count": 2}, {"type": "galaxy-blackhole"}]).look().cards
    assert [card.resource for card in cards] == [
        "tenstorrent.com/n150", "tenstorrent.com/n150", "tenstorrent.com/galaxy-blackhole",
    ]  # fmt: skip
    assert [card.arch for card in cards] == ["wormhole", "wormhole", "blackhole"]


@pytest.mark.parametrize("kind", ["unknown", "n 150", "n150/x", "-n150", "x" * 64, "n\x00150", "ñ150"])
def test_a_type_that_is_none_is_told_and_not_offered(rig: Rig, kind: str) -> None:
    rig.attribute(0, "tt_card_type").write_text(f"{kind}\n")
    sight = rig.look()
    (card,) = sight.cards
    assert card.resource == "" and card.product == "unknown" and card.id == "tt-00112233aabbccdd"
    assert sight.troubles[card.id].reason == "UnknownCardType" and sight.troubles[card.id].sure


def test_a_type_of_tomorrow_is_offered_as_the_driver_prints_it(rig: Rig) -> None:
    rig.attribute(0, "tt_card_type").write_text("q900x\n")
    assert rig.look().cards[0].resource == "tenstorrent.com/q900x"


@pytest.mark.parametrize("asic", ["", "0000000000000000"])
def test_without_an_asic_id_a_card_is_its_address(rig: Rig, asic: str) -> None:
    rig.apply(cards=[{"type": "p100a", "address": "0001:c3:00.1", "asicId": asic}])
    (card,) = rig.look().cards
    assert card.id == "tt-0001-c3-00-1" and card.address == "0001:c3:00.1"
    assert card.nodes == (f"{rig.folder}/dev/tenstorrent/0",)


def test_what_a_machine_does_not_tell_is_none(rig: Rig) -> None:
    rig.apply(cards=[{"type": "n150", "numa": -1}])
    assert rig.look().cards[0].numa is None


def test_by_id_is_no_card_and_a_link_that_lies_is_not_used(rig: Rig) -> None:
    links = rig.folder / "dev/tenstorrent/by-id"
    (links / "wormhole-00112233AABBCCDD").unlink()
    (links / "wormhole-FFFFFFFFFFFFFFFF").symlink_to("../0")
    (links / "wormhole-dangling").symlink_to("../77")
    (card,) = rig.look().cards
    assert card.nodes == (f"{rig.folder}/dev/tenstorrent/0",)


def test_numbers_change_and_ids_and_paths_stay(tmp_path: Path) -> None:
    cards = [{"type": "n150", "address": f"0000:0{place}:00.0"} for place in (1, 2, 3)]
    rig = Rig(tmp_path, cards=cards)
    before = {card.id: card for card in rig.look().cards}
    rig.apply(cards=[card | {"index": index} for card, index in zip(cards, (2, 0, 1), strict=True)])
    after = {card.id: card for card in rig.look().cards}
    assert after.keys() == before.keys()
    assert [card.index for card in after.values()] == [0, 1, 2]
    for name, card in after.items():
        assert card.index != before[name].index
        assert (card.address, card.nodes) == (before[name].address, before[name].nodes)
        assert os.path.samefile(card.nodes[0], tmp_path / f"dev/tenstorrent/{card.index}")
        assert card.id.upper().removeprefix("TT-") == rig.attribute(card.index, "tt_asic_id").read_text().strip()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=st.lists(st.permutations(range(4)), min_size=1, max_size=4), gone=st.sets(st.integers(0, 3), max_size=3))
def test_whatever_the_numbers_a_card_is_itself(
    tmp_path_factory: pytest.TempPathFactory, orders: list[list[int]], gone: set[int]
) -> None:
    cards = [{"type": "p150b", "address": f"0000:0{place}:00.0"} for place in range(4)]
    rig = Rig(tmp_path_factory.mktemp("machine"), cards=cards)
    by_address = {card.address: card.id for card in rig.look().cards}
    assert len(set(by_address.values())) == 4
    for order in orders:
        rig.apply(
            cards=[
                card | {"index": index, "fault": "gone" if place in gone else "none"}
                for place, (card, index) in enumerate(zip(cards, order, strict=True))
            ]
        )
        sight = rig.look()
        assert len(sight.cards) == 4 - len(gone) and not sight.troubles
        for card in sight.cards:
            assert by_address[card.address] == card.id
            assert os.path.samefile(card.nodes[0], rig.folder / f"dev/tenstorrent/{card.index}")
            assert rig.pci(card.index, "").name == card.address


def test_cards_come_and_go(rig: Rig) -> None:
    two = [{"type": "n150", "count": 2}]
    rig.apply(cards=two)
    assert len(rig.look().cards) == 2
    rig.apply(cards=[{"type": "n150"}])
    assert len(rig.look().cards) == 1
    rig.apply(cards=[])
    assert rig.look() == Sight("tenstorrent")


def test_a_device_under_two_numbers_is_one_card(rig: Rig) -> None:
    double = rig.folder / "sys/class/tenstorrent/tenstorrent!4"
    double.symlink_to(os.readlink(rig.folder / "sys/class/tenstorrent/tenstorrent!0"))
    sight = rig.look()
    assert [(card.id, card.index) for card in sight.cards] == [("tt-00112233aabbccdd", 0)]
    assert "under two numbers" in sight.problem


def test_a_number_without_a_device_is_told(rig: Rig) -> None:
    (rig.folder / "sys/class/tenstorrent/tenstorrent!4").mkdir()
    sight = rig.look()
    assert len(sight.cards) == 1 and "tenstorrent!4 in /sys/class/tenstorrent stands for no PCI device" in sight.problem


def test_cards_that_change_places_while_they_are_read_are_not_mixed_up(tmp_path: Path) -> None:
    def cards(*order: int) -> list[dict[str, Any]]:
        return [
            {"type": "n150", "address": f"0000:0{place}:00.0", "index": index} for place, index in enumerate(order, 1)
        ]

    rig = Rig(tmp_path, cards=cards(0, 1))
    ids = {card.address: card.id for card in rig.look().cards}
    orders = [cards(1, 0)]

    def read(path: str, most: int) -> str:
        if path.endswith("tt_asic_id") and orders:
            rig.apply(cards=orders.pop())
        return read_simulated(path, most)

    sight = rig.fresh(read).look()
    assert {card.address: card.id for card in sight.cards} == ids and sight.problem == "" and not sight.troubles
    assert {card.address: card.index for card in sight.cards} == {"0000:01:00.0": 1, "0000:02:00.0": 0}


def test_a_card_that_goes_while_it_is_looked_for_is_no_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """realpath(3) of Python reads a link that it has seen before, and that may be gone."""
    rig.apply(cards=[{"type": "n150"}, {"type": "n150"}])
    original = os.path.realpath

    def realpath(path: str) -> str:
        if path.endswith("tenstorrent!0/device"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return original(path)

    monkeypatch.setattr(os.path, "realpath", realpath)
    (card,) = rig.look().cards
    assert card.index == 1


def test_a_card_that_never_rests_is_left_out_until_it_does(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cards=[{"type": "n150", "count": 2}])
    resting = rig.look().cards[0]

    def read(path: str, most: int) -> str:
        if path.endswith("0000:02:00.0/device"):
            rig.now += 1
            rig.apply(cards=[{"type": "n150"}, {"type": "n150", "index": int(rig.now) % 2 + 5}])
        return read_simulated(path, most)

    assert rig.fresh(read).look().cards == (resting,)


def test_two_cards_of_one_asic_id_go_by_their_addresses(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cards=[{"type": "n150", "count": 2}, {"type": "n300"}])
    rig.attribute(1, "tt_asic_id").write_text(rig.attribute(0, "tt_asic_id").read_text())
    sight = rig.look()
    assert [card.id for card in sight.cards[:2]] == ["tt-0000-01-00-0", "tt-0000-02-00-0"]
    assert "share the ASIC id" in sight.problem
    assert sight.readings.keys() == {card.id for card in sight.cards}


def test_no_driver_is_no_card_and_a_card_without_one_is_told(tmp_path: Path) -> None:
    assert Tenstorrent(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc").look() == Sight("tenstorrent")
    for address, vendor in (("0000:03:00.0", "0x1e52"), ("0000:04:00.0", "0x10de")):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
    sight = Tenstorrent(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc").look()
    assert not sight.cards and "(0000:03:00.0): load the module tenstorrent" in sight.problem


def test_a_class_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sys/class").mkdir(parents=True)
    (tmp_path / "sys/class/tenstorrent").write_text("")
    with pytest.raises(HardwareError, match=r"cannot be listed: Not a directory; let berth's node process read /sys"):
        Tenstorrent(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc").look()


# --- what is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason", "sure"),
    [
        ("detached", "Detached", True),
        ("resetting", "Resetting", False),
        ("hot", "TooHot", False),
        ("no-telemetry", "TelemetryMissing", False),
        ("empty-attribute", "AttributeEmpty", False),
        ("no-node", "NodeMissing", False),
    ],
)
def test_a_fault_has_its_reason_and_ends_and_the_card_stays_itself(
    rig: Rig, fault: str, reason: str, sure: bool
) -> None:
    card: dict[str, Any] = {"type": "n150", "asicId": "00112233AABBCCDD", "numa": 1}
    well = rig.look().cards[0]
    rig.apply(cards=[card | {"fault": fault}])
    sight = rig.look()
    (ill,) = sight.cards
    assert (ill.id, ill.resource, ill.numa) == (well.id, well.resource, well.numa)
    trouble = sight.troubles[ill.id]
    assert (trouble.reason, trouble.sure) == (reason, sure)
    assert ill.id in trouble.message and trouble.message.endswith(".")
    rig.apply(cards=[card])
    assert rig.look().troubles == {}


@pytest.mark.parametrize("fault", ["detached", "resetting", "empty-attribute"])
def test_a_card_that_never_told_its_type_keeps_its_id_by_its_link(rig: Rig, fault: str) -> None:
    rig.apply(cards=[{"type": "n150", "asicId": "00112233AABBCCDD", "fault": fault}])
    sight = rig.look()
    assert (sight.cards[0].id, sight.cards[0].resource) == ("tt-00112233aabbccdd", "")
    assert sight.troubles.keys() == {"tt-00112233aabbccdd"}


def test_telemetry_may_come_late_but_not_for_ever(rig: Rig) -> None:
    rig.apply(cards=[{"type": "n150", "asicId": "00112233AABBCCDD", "fault": "no-telemetry"}])
    early = rig.look()
    (card,) = early.cards
    assert card.resource == "" and card.id == "tt-0000-01-00-0"
    assert early.troubles[card.id].reason == "TelemetryMissing" and not early.troubles[card.id].sure
    late = rig.trouble(seconds=TELEMETRY_SECONDS)
    assert late is not None and late.reason == "TelemetryMissing" and late.sure
    rig.apply(cards=[{"type": "n150", "asicId": "00112233AABBCCDD"}])
    there = rig.look()
    assert there.cards[0].resource == "tenstorrent.com/n150" and there.cards[0].id == "tt-00112233aabbccdd"
    assert there.troubles == {}


def test_a_heartbeat_that_stops_and_goes_on(rig: Rig) -> None:
    assert rig.trouble() is None
    assert rig.trouble(seconds=HEARTBEAT_SECONDS / 2, beat=False) is None
    stopped = rig.trouble(seconds=HEARTBEAT_SECONDS / 2, beat=False)
    assert stopped is not None and stopped.reason == "HeartbeatStopped" and not stopped.sure
    assert rig.trouble(beat=False) == stopped
    assert rig.trouble() is None


def test_quick_looks_of_many_condemn_no_card(rig: Rig) -> None:
    """The peer's defect: what one stream read is old for the next."""
    for _ in range(20):
        assert rig.trouble(seconds=0.01, beat=False) is None


def test_a_frozen_heartbeat_in_the_simulation(rig: Rig) -> None:
    rig.apply(cards=[{"type": "n150", "fault": "frozen-heartbeat"}])
    rig.look()
    trouble = rig.trouble()
    assert trouble is not None and trouble.reason == "HeartbeatStopped"


@pytest.mark.parametrize("value", [None, "", "alive", "1e3", "-", "9" * 400])
def test_a_firmware_without_a_heartbeat_is_not_condemned_for_it(rig: Rig, value: str | None) -> None:
    rig.attribute(0, "tt_heartbeat").unlink()
    for _ in range(3):
        if value is not None:
            rig.attribute(0, "tt_heartbeat").write_text(value)
        assert rig.trouble(beat=False) is None


def test_the_beat_before_a_reset_is_not_the_one_after(rig: Rig) -> None:
    rig.look()
    rig.apply(cards=[{"type": "n150", "fault": "resetting"}])
    rig.look(beat=False)
    rig.apply(cards=[{"type": "n150"}])
    assert rig.trouble(beat=False) is None


def test_an_attribute_that_the_firmware_lost_is_no_reset(rig: Rig) -> None:
    """tt-kmd answers ENODATA to both (telemetry.c)."""

    def read(path: str, most: int) -> str:
        if path.endswith("tt_heartbeat"):
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return read_simulated(path, most)

    assert rig.fresh(read).look().troubles == {}


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EINVAL, errno.ETIMEDOUT])
def test_another_error_is_told_by_its_name(rig: Rig, code: int) -> None:
    def read(path: str, most: int) -> str:
        if "temp1_input" in path:
            raise OSError(code, os.strerror(code))
        return read_simulated(path, most)

    (trouble,) = rig.fresh(read).look().troubles.values()
    assert trouble.reason == "Unreadable" and f"temp1_input be read: {os.strerror(code)}" in trouble.message


def test_a_card_that_shut_down_for_its_heat_is_unfit_for_a_while(rig: Rig) -> None:
    count = rig.attribute(0, "tt_therm_trip_count")
    count.write_text("7\n")
    assert rig.trouble() is None, "it may have done so years ago"
    count.write_text("8\n")
    tripped = rig.trouble()
    assert tripped is not None and tripped.reason == "ThermalTrip" and tripped.sure
    assert rig.trouble(seconds=THERMAL_SECONDS - 1) == tripped
    assert rig.trouble(seconds=1) is None
    count.write_text("0\n")
    assert rig.trouble() is None, "the count begins anew with the card's power"


def test_a_trip_shows_after_the_reset_that_it_makes(rig: Rig) -> None:
    rig.apply(cards=[{"type": "p100a"}])
    rig.look()
    rig.apply(cards=[{"type": "p100a", "fault": "resetting"}])
    rig.look()
    rig.apply(cards=[{"type": "p100a"}])
    rig.attribute(0, "tt_therm_trip_count").write_text("1\n")
    trouble = rig.trouble()
    assert trouble is not None and trouble.reason == "ThermalTrip"


@pytest.mark.parametrize(
    ("name", "reason", "sure"), [("fatal", "PcieFatalErrors", True), ("nonfatal", "PcieErrors", False)]
)
def test_errors_of_the_link(rig: Rig, name: str, reason: str, sure: bool) -> None:
    total = rig.pci(0, f"aer_dev_{name}")
    total.write_text(f"Undefined 0\nDLP 3\nTOTAL_ERR_{name.upper()} 3\n")
    assert rig.trouble() is None
    total.write_text(f"Undefined 0\nDLP 4\nTOTAL_ERR_{name.upper()} 4\n")
    trouble = rig.trouble()
    assert trouble is not None and (trouble.reason, trouble.sure) == (reason, sure)
    assert rig.trouble(seconds=60) is None


def test_errors_of_the_link_in_a_reset_are_none(rig: Rig) -> None:
    rig.look()
    rig.apply(cards=[{"type": "n150", "fault": "resetting"}])
    rig.look()
    rig.apply(cards=[{"type": "n150"}])
    rig.pci(0, "aer_dev_fatal").write_text("TOTAL_ERR_FATAL 9\n")
    assert rig.trouble() is None


def test_correctable_errors_are_the_links_daily_life(rig: Rig) -> None:
    rig.look()
    rig.pci(0, "aer_dev_correctable").write_text("RxErr 500\nTOTAL_ERR_COR 500\n")
    assert rig.trouble() is None


# --- one that hangs ------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tenstorrent_sysfs, "PATIENCE", 0.2)
    monkeypatch.setattr(tenstorrent_sysfs, "LONGEST", 0.6)
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, f"{left} are still there"
        time.sleep(0.01)


def faults(*names: str) -> list[dict[str, Any]]:
    return [{"type": "n150", "fault": name} for name in names]


@pytest.mark.usefixtures("impatient")
def test_a_card_that_hangs_condemns_no_other_and_comes_back(rig: Rig) -> None:
    rig.apply(cards=faults("none", "hang", "none"))
    for _ in range(3):
        sight = rig.look()
        assert [card.resource for card in sight.cards] == 3 * ["tenstorrent.com/n150"]
        assert [card.numa for card in sight.cards] == [0, 0, 0]
        assert {name: (trouble.reason, trouble.sure) for name, trouble in sight.troubles.items()} == {
            sight.cards[1].id: ("Hangs", True)
        }
        assert sight.readings.keys() == {sight.cards[0].id, sight.cards[2].id}
        assert f"iommu/{sight.cards[0].id}" in sight.host
    asking = [thread for thread in threading.enumerate() if thread.name == "tenstorrent-read"]
    assert len(asking) == 1, "it is asked once, not at every look"
    rig.apply(cards=faults("none", "none", "none"))
    deadline = time.monotonic() + 5
    while (sight := rig.look()).troubles:
        assert time.monotonic() < deadline, sight.troubles
    assert len(sight.readings) == 3


@pytest.mark.usefixtures("impatient")
def test_a_card_that_hangs_halfway_is_what_it_was(rig: Rig) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def read(path: str, most: int) -> str:
        if hangs.is_set() and path.endswith("tt_fw_bundle_ver"):
            goes_on.wait(30)
        return read_simulated(path, most)

    source = rig.fresh(read)
    before = source.look().cards
    hangs.set()
    sight = source.look()
    assert [trouble.reason for trouble in sight.troubles.values()] == ["Hangs"]
    assert sight.cards == before
    goes_on.set()


@pytest.mark.usefixtures("impatient")
def test_a_read_that_returns_late_takes_no_other_card_with_it(rig: Rig) -> None:
    rig.apply(cards=faults("none", "none", "none", "none"))
    goes_on = threading.Event()

    def read(path: str, most: int) -> str:
        if path.endswith("0000:01:00.0/device"):
            goes_on.wait(30)
        if path.endswith("0000:02:00.0/device"):
            goes_on.set()
            time.sleep(tenstorrent_sysfs.PATIENCE / 2)  # the other could take the next card in this time
        return read_simulated(path, most)

    sight = rig.fresh(read).look()
    assert [trouble.reason for trouble in sight.troubles.values()] == ["Hangs"]


@pytest.mark.usefixtures("impatient")
def test_a_look_takes_its_time_and_no_more_however_many_hang(rig: Rig) -> None:
    rig.apply(cards=faults(*5 * ["hang"], "none"))
    began = time.monotonic()
    sight = rig.look()
    assert time.monotonic() - began < 3
    assert [sight.troubles[card.id].reason for card in sight.cards] == 3 * ["Hangs"] + 3 * ["NotRead"]
    assert not any(trouble.sure for trouble in sight.troubles.values() if trouble.reason == "NotRead")
    sight = rig.look()
    assert [sight.troubles[card.id].reason for card in sight.cards[:5]] == 5 * ["Hangs"]
    assert sight.cards[5].id not in sight.troubles
    rig.apply(cards=faults(*6 * ["none"]))


# --- what is measured ----------------------------------------------------------------------------------------------


def test_what_is_measured(rig: Rig) -> None:
    rig.apply(cards=[{"type": "n150", "temperature": 51.25, "power": 87.5, "pids": [0, 4711, 12, 0, 4711]}])
    (reading,) = rig.look().readings.values()
    assert (reading.temperature, reading.power, reading.pids) == (51.25, 87.5, (12, 4711))
    assert reading.memory_used_mib is None


def test_what_the_host_is(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path,
        driver="2.9.0",
        hugepages={"total": 9, "free": 5},
        cards=[
            {"type": "n150", "numa": 0},
            {"type": "n150", "numa": 1, "iommu": "passthrough", "firmware": "19.0.0.1"},
            {"type": "n150", "numa": 1, "iommu": "none"},
        ],
    )
    sight = rig.look()
    first, second, third = (card.id for card in sight.cards)
    assert sight.host == {
        "driver": "2.9.0-simulated",
        "firmware": "18.10.0.0,19.0.0.1",
        f"iommu/{first}": "translated",
        f"iommu/{second}": "passthrough",
        f"iommu/{third}": "none",
        "hugepages-1g/total": "9",
        "hugepages-1g/free": "5",
        "hugepages-1g/numa0/total": "5",
        "hugepages-1g/numa0/free": "3",
        "hugepages-1g/numa1/total": "4",
        "hugepages-1g/numa1/free": "2",
    }


@pytest.mark.parametrize(("kind", "mode"), [("DMA-FQ", "translated"), ("identity", "passthrough"), ("", "none")])
def test_iommu_modes(rig: Rig, kind: str, mode: str) -> None:
    (rig.pci(0, "iommu_group/type")).write_text(f"{kind}\n")
    assert rig.look().host["iommu/tt-00112233aabbccdd"] == mode


# --- waiting -------------------------------------------------------------------------------------------------------


def test_waiting_ends_with_its_time_or_with_news(rig: Rig) -> None:
    rig.look()
    began = time.monotonic()
    rig.source.wait(0.05)
    assert 0.05 <= time.monotonic() - began < 5
    rig.apply(cards=[])
    rig.source.wait(60)
    assert time.monotonic() - began < 30
    rig.source.close()


class Events:
    """A stand-in for pyudev's monitor."""

    def __init__(self, *told: object) -> None:
        self.told = list(told)

    def poll(self, timeout: float) -> object:
        told = self.told.pop(0) if self.told else None
        if isinstance(told, Exception):
            raise told
        return told


def test_what_the_kernel_tells_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(object(), object())
    monkeypatch.setattr(tenstorrent, "_listening", lambda: events)
    source = Tenstorrent()
    began = time.monotonic()
    source.wait(60)
    assert time.monotonic() - began < 30 and not events.told, "all that is told is one piece of news"
    events.told = [OSError(errno.ENOBUFS, "No buffer space available")]
    source.wait(60)
    assert time.monotonic() - began < 30, "more than could be kept is news as well"


def test_pyudev_offers_what_is_used_of_it() -> None:
    pytest.importorskip("pyudev")
    monitor = tenstorrent._listening()
    if monitor is None:
        pytest.skip("no netlink socket can be had here")
    assert monitor.poll(0.0) is None


def test_another_tree_than_the_real_one_has_no_events(rig: Rig) -> None:
    assert rig.source._events is None


# --- whatever there is ---------------------------------------------------------------------------------------------

GARBAGE = st.one_of(
    st.binary(max_size=300), st.sampled_from([b"", b"\n", b"0", b"-1", b"unknown", b"9" * 5000, b"\xff\x00"])
)
NAMES = st.sampled_from(
    [
        *(f"sys/devices/pci0000:00/0000:0{bus}:00.0/{name}" for bus in (1, 2) for name in (
            "device", "numa_node", "aer_dev_fatal", "aer_dev_nonfatal", "iommu_group", "hwmon", "hwmon/hwmon0",
            "hwmon/hwmon0/temp1_input", "hwmon/hwmon0/temp1_max", "hwmon/hwmon0/power1_input",
        )),
        *(f"sys/devices/pci0000:00/0000:0{index + 1}:00.0/tenstorrent/tenstorrent!{index}/{name}" for index in (0, 1)
          for name in ("device", "tt_card_type", "tt_asic_id", "tt_heartbeat", "tt_fw_bundle_ver")),
        "sys/class/tenstorrent/tenstorrent!1", "sys/class/tenstorrent/tenstorrent!x", "sys/module/tenstorrent/version",
        "sys/class/tenstorrent/tenstorrent!7", "dev/tenstorrent", "dev/tenstorrent/0", "dev/tenstorrent/by-id",
        "dev/tenstorrent/by-id/wormhole-", "dev/tenstorrent/x", "proc/driver/tenstorrent/0/pids",
        "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "sys/devices/system/node/node0",
    ]
)  # fmt: skip
CHANGES = st.lists(
    st.tuples(NAMES, st.one_of(GARBAGE, st.sampled_from(["gone", "folder", "loop", "dangling", "first"]))), max_size=8
)


def spoil(root: Path, name: str, how: bytes | str) -> None:
    place = root / name
    try:
        if place.is_symlink() or place.is_file() or place.is_char_device():
            place.unlink()
        elif place.is_dir():
            place.rename(root / f"away-{time.monotonic_ns()}")
        match how:
            case bytes():
                place.write_bytes(how)
            case "folder":
                place.mkdir()
            case "loop":
                place.symlink_to(place.name)
            case "dangling":
                place.symlink_to("../nowhere")
            case "first":
                place.symlink_to(root / "sys/devices/pci0000:00/0000:01:00.0/tenstorrent/tenstorrent!0")
    except OSError:
        pass  # its folder was spoilt before


@settings(max_examples=60, deadline=None)
@given(rounds=st.lists(CHANGES, min_size=1, max_size=3))
def test_whatever_the_tree_a_look_is_a_sight(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[tuple[str, bytes | str]]]
) -> None:
    rig = Rig(tmp_path_factory.mktemp("machine"), cards=[{"type": "n150"}, {"type": "p150a"}])
    rig.look()
    for changes in rounds:
        for name, how in changes:
            spoil(rig.folder, name, how)
        sight = rig.look(beat=False)
        assert decode(encode(sight), "tenstorrent") == sight, "nothing of it is lost on its way, or refused"
        ids = [card.id for card in sight.cards]
        assert len(set(ids)) == len(ids) and all(ID.fullmatch(each) for each in ids)
        assert set(sight.troubles) <= set(ids) and set(sight.readings) <= set(ids)
        for trouble in sight.troubles.values():
            assert REASON.fullmatch(trouble.reason) and trouble.message.isprintable() and len(trouble.message) < 1024
        for card in sight.cards:
            assert card.resource == "" or re.fullmatch(r"tenstorrent\.com/[A-Za-z0-9._-]{1,63}", card.resource)
            assert card.index >= 0 and (card.numa is None or card.numa >= 0) and len(card.nodes) <= 1
            assert card.resource or card.id in sight.troubles, "one that is not offered says why"
