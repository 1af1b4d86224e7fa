"""The Tenstorrent cards of a simulated machine: what its YAML file may say of them, and the tree of files in which they
are served just as tt-kmd serves real ones, with faults on command. The provider reads it as it reads the kernel's.

What plain files cannot do is done so: a read that hangs is a FIFO that nobody writes; a read that fails as the driver
lets it fail has a marker beside it, which `read_simulated` heeds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StrictStr, model_validator

from crds.gpuworkload import CRDModel, Int
from nodeworkers.hardware.machine_reset import MARKER as RESET_MARKER
from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.simulating import Simulated
from nodeworkers.hardware.source import Source
from nodeworkers.hardware.tenstorrent import ARCHITECTURES, PCI_VENDOR, Tenstorrent
from nodeworkers.hardware.tenstorrent_sysfs import read_file

MOST_CARDS = 256
MARKER = ".simulated-errno"  # beside attributes: the name of the error with which each read of them fails
MANIFEST = ".simulated-tenstorrent.json"  # in a tree's folder: the files that are a simulation's own
_FIRST_BEAT = 1000
_NULL = os.makedev(1, 3)

# The types that tt-kmd prints: the number of each in a board's id, and its PCI device (telemetry.c, module.h).
TYPES: dict[str, tuple[int, str]] = {
    "n300": (0x14, "0x401e"),
    "n150": (0x18, "0x401e"),
    "galaxy-wormhole": (0x35, "0x401e"),
    "p100": (0x36, "0xb140"),
    "p150a": (0x40, "0xb140"),
    "p150b": (0x41, "0xb140"),
    "p150c": (0x42, "0xb140"),
    "p100a": (0x43, "0xb140"),
    "p300b": (0x44, "0xb140"),
    "p300a": (0x45, "0xb140"),
    "p300c": (0x46, "0xb140"),
    "galaxy-blackhole": (0x47, "0xb140"),
    "unknown": (0xFF, "0xb140"),
}

Type = Literal[
    "n150", "n300", "galaxy-wormhole", "p100", "p100a", "p150a", "p150b", "p150c", "p300a", "p300b", "p300c",
    "galaxy-blackhole", "unknown",
]  # fmt: skip
Fault = Literal[
    "none", "hang", "gone", "detached", "resetting", "frozen-heartbeat", "hot", "no-telemetry", "empty-attribute",
    "no-node",
]  # fmt: skip
Iommu = Literal["translated", "passthrough", "none"]
_ERRNOS: dict[Fault, str] = {"detached": "ENODEV", "resetting": "ENODATA"}
_GROUPS: dict[Iommu, str] = {"translated": "DMA", "passthrough": "identity"}


class TenstorrentCard(CRDModel):
    """A card, or `count` of them that differ in their places and ids alone. What is left out is made up."""

    type: Type
    count: Annotated[Int, Field(ge=1, le=MOST_CARDS)] = 1
    index: Annotated[Int, Field(ge=0, le=4095)] | None = None
    address: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$")] | None = None
    asic_id: Annotated[StrictStr, Field(pattern=r"^([0-9A-Fa-f]{16})?$")] | None = None  # '': it tells none
    serial: Annotated[StrictStr, Field(pattern=r"^[0-9A-Fa-f]{16}$")] | None = None
    numa: Annotated[Int, Field(ge=-1, le=1023)] = 0
    iommu: Iommu = "translated"
    firmware: Annotated[StrictStr, Field(pattern=r"^\d{1,3}(\.\d{1,3}){3}$")] = "18.10.0.0"
    temperature: Annotated[float, Field(ge=-40, le=200)] = 45.0
    temperature_limit: Annotated[float, Field(ge=1, le=200)] = 75.0
    power: Annotated[float, Field(ge=0, le=5000)] = 30.0
    pids: Annotated[list[Annotated[Int, Field(ge=0, le=4194304)]], Field(max_length=64)] = Field(default_factory=list)
    fault: Fault = "none"
    reset: Literal["works", "fails", "hangs"] = "works"  # what comes of it; one that a process of `pids` holds has none

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.count > 1 and any(each is not None for each in (self.index, self.address, self.asic_id, self.serial)):
            raise ValueError("index, address, asicId and serial are of one card: leave out count")
        return self


class Hugepages(CRDModel):
    """Pages of 1 GiB of the whole machine."""

    total: Annotated[Int, Field(ge=0, le=65536)] = 0
    free: Annotated[Int, Field(ge=0, le=65536)] = 0

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.free > self.total:
            raise ValueError(f"{self.free} pages cannot be free of {self.total}")
        return self


class TenstorrentMachine(CRDModel):
    """The `tenstorrent` section of a machine's file."""

    cards: Annotated[list[TenstorrentCard], Field(max_length=MOST_CARDS)] = Field(default_factory=list)
    driver: Annotated[StrictStr, Field(pattern=r"^\d{1,3}\.\d{1,3}\.\d{1,3}$")] = "2.10.1"
    hugepages: Hugepages = Field(default_factory=Hugepages)

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        number = sum(card.count for card in self.cards)
        if number > MOST_CARDS:
            raise ValueError(f"a machine has at most {MOST_CARDS} Tenstorrent cards, not {number}")
        plugged = list(self.plugged())
        for name, values in (
            ("index", [card.index for card in plugged]),
            ("address", [card.address for card in plugged]),
            ("asicId", [card.asic for card in plugged if card.asic]),
        ):
            double = next((value for place, value in enumerate(values) if value in values[:place]), None)
            if double is not None:
                raise ValueError(f"two cards have the {name} {double}")
        return self

    def plugged(self) -> Iterator[Plugged]:
        """Each card by itself. Its place in the list makes up its address, and that its ids: whoever takes a card out
        lets it stay in the list with the fault `gone`, or gives the others their addresses.
        """
        cards = [card for card in self.cards for _ in range(card.count)]
        taken = {card.index for card in cards}
        free = (index for index in range(len(cards) + len(taken)) if index not in taken)
        for place, card in enumerate(cards):
            code, device = TYPES[card.type]
            address = card.address or f"{place // 255:04x}:{1 + place % 255:02x}:00.0"
            bits = address.replace(":", "").replace(".", "").upper()
            yield Plugged(
                card,
                index=next(free) if card.index is None else card.index,
                address=address,
                asic=(f"5170{bits}{code:03X}" if card.asic_id is None else card.asic_id).upper(),
                serial=(card.serial or f"{0x01000000 | code << 4:08X}{place:08X}").upper(),
                device=device,
            )


@dataclass(frozen=True, slots=True)
class Plugged:
    """One card with all that was made up for it."""

    card: TenstorrentCard
    index: int
    address: str
    asic: str
    serial: str
    device: str

    @property
    def pci(self) -> str:
        return f"sys/devices/pci{self.address[:4]}:00/{self.address}"

    @property
    def folder(self) -> str:
        return f"{self.pci}/tenstorrent/tenstorrent!{self.index}"

    @property
    def beats(self) -> bool:
        return self.card.fault not in ("gone", "hang", "no-telemetry", "frozen-heartbeat")


@dataclass(frozen=True, slots=True)
class _File:
    kind: Literal["text", "link", "fifo", "node"]
    content: str = ""


class Simulation:
    """The tree of a simulated machine below `folder`, in which `sys`, `dev` and `proc` lie. Other files there, such as
    another vendor's, are left alone. One process at a time may keep it up.

    Device nodes are /dev/null under another name where this process may make some, so that containers get them, and
    plain files otherwise. They stay as they are for as long as the card keeps its number.
    """

    def __init__(self, folder: Path, machine: TenstorrentMachine) -> None:
        """Raises HardwareError, as `apply` does."""
        self._folder = folder
        self._machine = machine
        self._beats = _FIRST_BEAT
        self.apply(machine)

    def apply(self, machine: TenstorrentMachine) -> None:
        """Makes the tree that of `machine`: each file changes at once, and only if it has to. Raises HardwareError."""
        with _told(self._folder):
            self._sync(_tree(machine, self._beats))
            self._machine = machine

    def beat(self) -> None:
        """Lets every card's firmware live on for a moment. Raises HardwareError."""
        self._beats += 1
        with _told(self._folder):
            for each in self._machine.plugged():
                if each.beats:
                    self._put(f"{each.folder}/tt_heartbeat", _File("text", f"{self._beats}\n"))

    def _sync(self, wanted: dict[str, _File]) -> None:
        own = self._own()
        foreign = [path for path in wanted.keys() - set(own) if os.path.lexists(self._folder / path)]
        if foreign:
            raise HardwareError(
                f"{self._folder / min(foreign)} is no file of a simulated machine, so it is left alone; name an empty "
                "folder for the machine's tree."
            )
        # Before it makes a file, so that whoever comes after a killed process knows which were its own.
        self._note([*own, *(path for path in wanted if path not in set(own))])
        for path, file in wanted.items():
            if not self._is(path, file):
                self._put(path, file)
        for path in reversed(own):
            if path not in wanted:
                self._remove(path)
        self._note(wanted)

    def _own(self) -> list[str]:
        try:
            listed = json.loads((self._folder / MANIFEST).read_bytes())
        except (FileNotFoundError, ValueError):
            return []
        paths = [path for path in listed if isinstance(path, str)] if isinstance(listed, list) else []
        return [path for path in paths if path.startswith(("sys/", "dev/", "proc/")) and ".." not in path.split("/")]

    def _note(self, paths: Iterable[str]) -> None:
        self._put(MANIFEST, _File("text", json.dumps(list(paths))))

    def _is(self, path: str, file: _File) -> bool:
        place = self._folder / path
        try:
            status = place.lstat()
            if file.kind == "text":
                return stat.S_ISREG(status.st_mode) and place.read_text() == file.content
            if file.kind == "link":
                return stat.S_ISLNK(status.st_mode) and os.readlink(place) == file.content
        except (OSError, UnicodeDecodeError):
            return False
        if file.kind == "fifo":
            return stat.S_ISFIFO(status.st_mode)
        return stat.S_ISREG(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL)

    def _put(self, path: str, file: _File) -> None:
        place, new = self._folder / path, self._folder / f"{MANIFEST}.new"
        place.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        if file.kind == "text":
            new.write_text(file.content)
        elif file.kind == "link":
            new.symlink_to(file.content)
        elif file.kind == "fifo":
            os.mkfifo(new)
        else:
            _make_node(new)
        with self._released(place):
            new.rename(place)

    def _remove(self, path: str) -> None:
        place = self._folder / path
        with self._released(place):
            place.unlink(missing_ok=True)
        for folder in place.relative_to(self._folder).parents:
            try:
                (self._folder / folder).rmdir()
            except OSError:
                break

    @contextlib.contextmanager
    def _released(self, place: Path) -> Iterator[None]:
        """Whoever waits for a FIFO that goes reads an end of file, not for ever."""
        try:
            waits = stat.S_ISFIFO(place.lstat().st_mode)
        except OSError:
            waits = False
        if not waits:
            yield
            return
        kept = self._folder / f"{MANIFEST}.fifo"
        kept.unlink(missing_ok=True)
        os.link(place, kept)
        yield
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(kept, os.O_WRONLY | os.O_NONBLOCK))
        kept.unlink()


def simulated(file: Path, tree: Path) -> Source:
    """A Source of the cards that the machine's file describes, in a tree below `tree` that follows the file. The tree
    stays when the Source is closed, for containers may hold its nodes.
    """
    from nodeworkers.hardware.machine import read  # a machine is made of sections such as this module's

    simulation: Simulation | None = None

    def apply(file: Path) -> None:
        nonlocal simulation
        machine = read(file).tenstorrent
        if simulation is None:
            simulation = Simulation(tree, machine)
        else:
            simulation.apply(machine)

    def beat() -> None:
        if simulation is not None:
            simulation.beat()

    return Simulated(Tenstorrent(tree / "sys", tree / "dev", tree / "proc", read_simulated), file, apply, beat)


def read_simulated(path: str, most: int) -> str:
    """A Reader of a simulation's tree: as `read_file`, but fails where a marker stands beside an attribute."""
    try:
        name = read_file(f"{os.path.dirname(path)}/{MARKER}", 32)
    except OSError:
        return read_file(path, most)
    if not os.path.lexists(path) or name not in _ERRNOS.values():
        return read_file(path, most)
    code = getattr(errno, name)
    raise OSError(code, os.strerror(code), path)


def _tree(machine: TenstorrentMachine, beats: int) -> dict[str, _File]:
    """All files by path below the folder, in the order in which they come to be: the class of cards is the last."""
    cards = [each for each in machine.plugged() if each.card.fault != "gone"]
    texts = _hugepages(machine)
    if machine.cards:
        texts["sys/module/tenstorrent/version"] = f"{machine.driver}-simulated"
    files: dict[str, _File] = {}
    links: dict[str, str] = {}
    for each in cards:
        texts |= _pci(each) | _telemetry(each, beats)
        index, fault = each.index, each.card.fault
        texts[f"proc/driver/tenstorrent/{index}/pids"] = "".join(f"{pid}\n" for pid in each.card.pids)
        if each.card.reset != "works":
            texts[f"{each.folder}/{RESET_MARKER}"] = each.card.reset
        if fault != "no-node":
            files[f"dev/tenstorrent/{index}"] = _File("node")
            if each.asic and fault != "no-telemetry":
                links[f"dev/tenstorrent/by-id/{ARCHITECTURES[each.device]}-{each.asic}"] = f"../{index}"
        links[f"{each.folder}/device"] = f"../../../{each.address}"
        links[f"sys/bus/pci/devices/{each.address}"] = f"../../../{each.pci.removeprefix('sys/')}"
        if group := _GROUPS.get(each.card.iommu):
            texts[f"sys/kernel/iommu_groups/{index}/type"] = group
            links[f"{each.pci}/iommu_group"] = f"../../../kernel/iommu_groups/{index}"
        if name := _ERRNOS.get(fault):
            texts |= {f"{folder}/{MARKER}": name for folder in (each.folder, f"{each.pci}/hwmon/hwmon{index}")}
    files |= {path: _File("text", f"{text}\n" if text else "") for path, text in texts.items()}
    files |= {f"{each.folder}/tt_heartbeat": _File("fifo") for each in cards if each.card.fault == "hang"}
    files |= {path: _File("link", target) for path, target in links.items()}
    for each in cards:
        target = f"../../{each.folder.removeprefix('sys/')}"
        files[f"sys/class/tenstorrent/tenstorrent!{each.index}"] = _File("link", target)
    return files


def _pci(each: Plugged) -> dict[str, str]:
    return {
        f"{each.pci}/vendor": PCI_VENDOR,
        f"{each.pci}/device": each.device,
        f"{each.pci}/numa_node": str(each.card.numa),
        f"{each.pci}/aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 0",
        f"{each.pci}/aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0",
        f"{each.pci}/aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0",
    }


def _telemetry(each: Plugged, beats: int) -> dict[str, str]:
    card, fault = each.card, each.card.fault
    if fault == "no-telemetry":
        return {}
    temperature = card.temperature_limit + 10 if fault == "hot" else card.temperature
    hwmon = f"{each.pci}/hwmon/hwmon{each.index}"
    found = {
        f"{each.folder}/tt_card_type": "" if fault == "empty-attribute" else card.type,
        f"{each.folder}/tt_serial": each.serial,
        f"{each.folder}/tt_fw_bundle_ver": card.firmware,
        f"{each.folder}/tt_heartbeat": str(beats if each.beats else _FIRST_BEAT),
        f"{hwmon}/name": ARCHITECTURES[each.device],
        f"{hwmon}/temp1_input": str(round(temperature * 1000)),
        f"{hwmon}/temp1_max": str(round(card.temperature_limit * 1000)),
        f"{hwmon}/power1_input": str(round(card.power * 1_000_000)),
    }
    if each.asic:
        found[f"{each.folder}/tt_asic_id"] = each.asic
    if ARCHITECTURES[each.device] == "blackhole":
        found[f"{each.folder}/tt_therm_trip_count"] = "0"
    return found


def _hugepages(machine: TenstorrentMachine) -> dict[str, str]:
    pages = machine.hugepages
    found = {f"sys/kernel/mm/{path}": text for path, text in _pages(pages.total, pages.free)}
    nodes = sorted({each.card.numa for each in machine.plugged() if each.card.numa >= 0})
    total, free = pages.total, pages.free
    for place, node in enumerate(nodes):
        # As evenly as they go, and what does not go evenly on the first nodes.
        here, left = -(-total // (len(nodes) - place)), -(-free // (len(nodes) - place))
        total, free = total - here, free - left
        found |= {f"sys/devices/system/node/node{node}/{path}": text for path, text in _pages(here, left)}
    return found


def _pages(total: int, free: int) -> list[tuple[str, str]]:
    folder = "hugepages/hugepages-1048576kB"
    return [(f"{folder}/nr_hugepages", str(total)), (f"{folder}/free_hugepages", str(free))]


def _make_node(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, _NULL)
    except PermissionError:
        path.touch()
    path.chmod(0o666)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HardwareError(
            f"The simulated machine's tree in {folder} cannot be written: {error.strerror or error}. Name "
            "another folder."
        ) from error
