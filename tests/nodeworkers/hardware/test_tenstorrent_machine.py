"""The tree of a simulated machine's Tenstorrent cards: how it follows the machine, and what it leaves alone."""

from __future__ import annotations

import errno
import importlib
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from nodeworkers.hardware.machine_tenstorrent import (
    MANIFEST,
    Fault,
    Simulation,
    TenstorrentMachine,
    read_simulated,
    simulated,
)
from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.source import Source
from nodeworkers.hardware.tenstorrent import Tenstorrent
from nodeworkers.hardware.watcher import SIMULATED, SOURCES
from nodeworkers.hardware.wire import decode, encode


def machine(*cards: dict[str, Any], **section: Any) -> TenstorrentMachine:
    return TenstorrentMachine.model_validate({"cards": list(cards), **section})


def n150(**more: Any) -> dict[str, Any]:
    return {"type": "n150", **more}


def files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file that is no folder: its inode, mode and time of change."""
    found = {}
    for parent, folders, names in os.walk(folder):
        for name in (*names, *(each for each in folders if Path(parent, each).is_symlink())):
            status = Path(parent, name).lstat()
            found[os.path.relpath(Path(parent, name), folder)] = (status.st_ino, status.st_mode, status.st_mtime_ns)
    return found


def test_the_class_is_as_the_kernel_has_it(tmp_path: Path) -> None:
    Simulation(tmp_path, machine(n150()))
    card = tmp_path / "sys/class/tenstorrent/tenstorrent!0"
    assert os.readlink(card) == "../../devices/pci0000:00/0000:01:00.0/tenstorrent/tenstorrent!0"
    assert (card / "device").resolve() == (tmp_path / "sys/bus/pci/devices/0000:01:00.0").resolve()
    assert (card / "device/tenstorrent/tenstorrent!0").samefile(card)
    assert (card / "tt_card_type").read_text() == "n150\n"
    assert (card / "device/iommu_group/type").read_text() == "DMA\n"


def test_the_serial_tells_the_type_as_the_driver_reads_it(tmp_path: Path) -> None:
    Simulation(tmp_path, machine({"type": "p150b"}))
    serial = (tmp_path / "sys/class/tenstorrent/tenstorrent!0/tt_serial").read_text().strip()
    assert int(serial[:8], 16) >> 4 & 0xFFFF == 0x41


def test_nodes_are_devices_that_a_container_can_get_where_they_may_be_made(tmp_path: Path) -> None:
    Simulation(tmp_path, machine(n150()))
    node = tmp_path / "dev/tenstorrent/0"
    mode = node.stat().st_mode
    assert stat.S_IMODE(mode) == 0o666
    if not stat.S_ISCHR(mode):
        pytest.skip("device nodes cannot be made here: it is a plain file")
    assert node.stat().st_rdev == os.makedev(1, 3)


def test_where_they_may_not_be_made_they_are_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    simulation = Simulation(tmp_path, machine(n150()))
    assert (tmp_path / "dev/tenstorrent/0").is_file()
    before = files(tmp_path)["dev/tenstorrent/0"]
    simulation.apply(machine(n150(fault="hot")))
    assert files(tmp_path)["dev/tenstorrent/0"] == before


def test_only_what_changes_is_written(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, machine(n150(count=2)))
    before = files(tmp_path)
    simulation.apply(machine(n150(), n150(temperature=60.0)))
    after = files(tmp_path)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert {path for path in changed if not path.startswith(MANIFEST)} == {
        "sys/devices/pci0000:00/0000:02:00.0/hwmon/hwmon1/temp1_input"
    }


def test_a_beat_is_of_those_that_live(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, machine(n150(), n150(fault="frozen-heartbeat"), n150(fault="gone")))
    beats = [tmp_path / f"sys/class/tenstorrent/tenstorrent!{index}/tt_heartbeat" for index in (0, 1)]
    before = [beat.read_text() for beat in beats]
    simulation.beat()
    assert beats[0].read_text() != before[0] and beats[1].read_text() == before[1]
    assert not (tmp_path / "sys/class/tenstorrent/tenstorrent!2").is_symlink()


def test_a_file_is_never_half_there(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, machine(n150()))

    def beat() -> None:
        for _ in range(200):
            simulation.beat()

    beats = threading.Thread(target=beat, daemon=True)
    path = str(tmp_path / "sys/class/tenstorrent/tenstorrent!0/tt_heartbeat")
    beats.start()
    while beats.is_alive():
        assert read_simulated(path, 99).isdecimal()


def test_one_who_comes_after_a_killed_process_finds_its_own_and_leaves_the_rest(tmp_path: Path) -> None:
    """Its containers hold nodes by now."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").write_text("another vendor's")
    Simulation(tmp_path, machine(n150(), n150(fault="hang")))
    node = files(tmp_path)["dev/tenstorrent/0"]
    again = Simulation(tmp_path, machine(n150()))
    assert files(tmp_path)["dev/tenstorrent/0"] == node
    again.apply(machine())
    assert {path.split("/")[0] for path in files(tmp_path)} == {"sys", "dev", MANIFEST}
    assert [path for path in files(tmp_path) if "tenstorrent/" in path or "pci" in path] == []
    assert (tmp_path / "dev/nvidia0").read_text() == "another vendor's"
    assert not (tmp_path / "proc").exists(), "no empty folder is left"


def test_what_is_not_its_own_is_never_touched(tmp_path: Path) -> None:
    theirs = tmp_path / "sys/module/tenstorrent/version"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("2.10.0\n")
    with pytest.raises(HardwareError, match=r"sys/module/tenstorrent/version is no file of a simulated machine"):
        Simulation(tmp_path, machine(n150()))
    assert files(tmp_path).keys() == {"sys/module/tenstorrent/version"} and theirs.read_text() == "2.10.0\n"


@pytest.mark.parametrize(
    "listed", [b"", b"{", b"{}", b"[1, null]", b'["/etc/passwd", "sys/../../x", "../x", "etc/y", "dev/z"]']
)
def test_a_list_of_its_own_files_that_is_none(tmp_path: Path, listed: bytes) -> None:
    outside = tmp_path / "x"
    outside.write_text("theirs")
    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(listed)
    Simulation(folder, machine(n150())).apply(machine())
    assert outside.read_text() == "theirs" and Path("/etc/passwd").exists()
    assert all(path.startswith(("sys/", "dev/", "proc/")) for path in json.loads((folder / MANIFEST).read_text()))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "machine").write_text("a file")
    with pytest.raises(HardwareError, match=r"tree in .*machine cannot be written: .*\. Name another folder\."):
        Simulation(tmp_path / "machine", machine(n150()))


@pytest.mark.parametrize("after", [machine(n150()), machine()], ids=["well", "gone"])
def test_whoever_waits_for_a_read_that_hangs_is_let_go(tmp_path: Path, after: TenstorrentMachine) -> None:
    simulation = Simulation(tmp_path, machine(n150(fault="hang")))
    read: list[str] = []
    path = str(tmp_path / "sys/class/tenstorrent/tenstorrent!0/tt_heartbeat")
    reader = threading.Thread(target=lambda: read.append(read_simulated(path, 99)), daemon=True)
    reader.start()
    reader.join(0.05)
    assert reader.is_alive(), "it hangs"
    simulation.apply(after)
    reader.join(5)
    assert read == [""]


@pytest.mark.parametrize(("fault", "code"), [("detached", errno.ENODEV), ("resetting", errno.ENODATA)])
def test_reads_that_fail_as_the_driver_lets_them_fail(tmp_path: Path, fault: str, code: int) -> None:
    Simulation(tmp_path, machine(n150(fault=fault)))
    card = tmp_path / "sys/class/tenstorrent/tenstorrent!0"
    for path in (card / "tt_heartbeat", card / "device/hwmon/hwmon0/temp1_input"):
        with pytest.raises(OSError, match=os.strerror(code)):
            read_simulated(str(path), 99)
    assert read_simulated(str(card / "device/numa_node"), 99) == "0"
    with pytest.raises(FileNotFoundError):
        read_simulated(str(card / "tt_therm_trip_count"), 99)


def test_while_it_changes_a_look_is_a_sight(tmp_path: Path) -> None:
    """Each file changes at once, so another process may look at any moment."""
    simulation = Simulation(tmp_path, machine(n150(count=3)))
    provider = Tenstorrent(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc", read=read_simulated)
    ids = {card.address: card.id for card in provider.look().cards}
    stop, seen = threading.Event(), []

    def looks() -> None:
        while not stop.is_set():
            seen.append(provider.look())

    looker = threading.Thread(target=looks, daemon=True)
    looker.start()
    try:
        for turn in range(20):
            order = [turn % 3, (turn + 1) % 3, (turn + 2) % 3]
            simulation.apply(
                machine(*(n150(index=each, address=f"0000:0{1 + at}:00.0") for at, each in enumerate(order)))
            )
            simulation.beat()
    finally:
        stop.set()
        looker.join(10)
    assert len(seen) > 3
    for sight in seen:
        for card in sight.cards:
            assert card.id == ids[card.address], "one card's place and another's id"


# --- as a source ---------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "machine.yaml"


def following(file: Path) -> Source:
    return simulated(file, file.parent / "tree")


def rewrite(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def test_it_says_that_it_is_simulated(file: Path) -> None:
    rewrite(file, "tenstorrent: {cards: [{type: n150, count: 2}]}")
    source = following(file)
    sight = source.look()
    assert sight.simulated and len(sight.cards) == 2 and not sight.troubles
    assert sight.host["driver"].endswith("-simulated")
    assert {card.driver for card in sight.cards} == {"2.10.1-simulated"}
    source.close()
    assert (file.parent / "tree/dev/tenstorrent/0").exists(), "containers may hold it"


def test_it_follows_its_file_and_hearts_beat_on(file: Path) -> None:
    rewrite(file, "tenstorrent: {cards: [{type: n150}]}")
    source = following(file)
    for _ in range(2):
        assert not source.look().troubles
    rewrite(file, "tenstorrent: {cards: [{type: n150, fault: detached}]}")
    assert [trouble.reason for trouble in source.look().troubles.values()] == ["Detached"]
    rewrite(file, "tenstorrent: {cards: [{type: n150}]}")
    assert not source.look().troubles


def test_a_mistake_in_its_file_is_told_and_takes_no_card_away(file: Path) -> None:
    rewrite(file, "tenstorrent: {cards: [{type: n150}]}")
    source = following(file)
    source.look()
    rewrite(file, "tenstorrent: {cards: [{type: n151}]}")
    sight = source.look()
    assert len(sight.cards) == 1 and "machine.yaml, line 1: machine.tenstorrent.cards[0].type" in sight.problem
    rewrite(file, "tenstorrent: {cards: []}")
    assert source.look().problem == ""


def test_a_file_that_was_wrong_from_the_start_is_told_until_it_is_right(file: Path) -> None:
    source = following(file)
    assert "cannot be read" in source.look().problem and not source.look().cards
    rewrite(file, "tenstorrent: {cards: [{type: n150}]}")
    sight = source.look()
    assert len(sight.cards) == 1 and sight.problem == ""


def test_a_tree_outlives_the_process_that_made_it(file: Path) -> None:
    """A watcher that is started anew must not take the nodes from running containers, whatever its file says."""
    rewrite(file, "tenstorrent: {cards: [{type: n150}]}")
    following(file).look()
    node = (file.parent / "tree/dev/tenstorrent/0").stat().st_ino
    rewrite(file, "tenstorrent: [")
    sight = following(file).look()
    assert "is no YAML" in sight.problem and len(sight.cards) == 1
    rewrite(file, "tenstorrent: {cards: [{type: n150, temperature: 50}]}")
    following(file).look()
    assert (file.parent / "tree/dev/tenstorrent/0").stat().st_ino == node


def test_what_it_sees_goes_over_the_wire(file: Path) -> None:
    faults = "".join(f"{{type: p150a, fault: {fault}, pids: [7]}}, " for fault in get_args(Fault) if fault != "hang")
    rewrite(file, f"tenstorrent: {{cards: [{faults}{{type: unknown}}]}}")
    sight = following(file).look()
    assert len(sight.cards) > 8 and len(sight.troubles) > 5
    assert decode(encode(sight), "tenstorrent") == sight


def test_the_watcher_finds_it() -> None:
    for place in (SOURCES["tenstorrent"], SIMULATED["tenstorrent"]):
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("text", ["tenstorrent: {cards: []}", "tenstorrent: ["])
def test_waiting_ends_with_news(file: Path, text: str) -> None:
    rewrite(file, "tenstorrent: {cards: [{type: n150}]}")
    source = following(file)
    source.look()
    began = time.monotonic()
    source.wait(0.05)
    assert 0.05 <= time.monotonic() - began < 5
    waiter = threading.Thread(target=source.wait, args=(60,), daemon=True)
    waiter.start()
    rewrite(file, text)
    waiter.join(30)
    assert not waiter.is_alive()
