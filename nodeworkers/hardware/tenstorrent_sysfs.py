"""What tt-kmd, Tenstorrent's kernel driver, and the kernel tell of the cards under /sys, /dev and /proc: read as it is,
for `nodeworkers.hardware.tenstorrent` to judge. A card whose read hangs in the kernel holds up no other card's.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The text of a file, at most so many bytes of it. Raises OSError.
Reader = Callable[[str, int], str]

PAGE = 4096  # bytes: what sysfs shows of one attribute at most
MOST_PIDS = 64 * 1024  # bytes of a list of processes
PATIENCE = 2.0  # seconds that one card's files may take; sysfs answers within milliseconds
LONGEST = 6.0  # seconds for all the cards of one look

# Each exists only if the card's firmware reports it (tt-kmd docs/sysfs-attributes.md).
TELEMETRY = ("tt_card_type", "tt_asic_id", "tt_fw_bundle_ver", "tt_heartbeat", "tt_therm_trip_count")
_PCI = ("device", "numa_node", "aer_dev_fatal", "aer_dev_nonfatal", "iommu_group/type")
_HWMON = ("temp1_input", "temp1_max", "power1_input")
_CLASS = re.compile(r"tenstorrent!(\d{1,6})")
_NUMBER = re.compile(r"\d{1,6}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_file(path: str, most: int) -> str:
    """What stands in a file, at most `most` bytes, without the white space around it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, most).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the kernel has a card: the folder to which `/sys/class/tenstorrent/tenstorrent!<index>` leads, that of its
    PCI device, and that device's full address in lower case.
    """

    index: int
    folder: str
    pci: str
    address: str

    @property
    def name(self) -> str:
        return f"tenstorrent!{self.index}"


@dataclass(slots=True)
class Raw:
    """What was read of one card: attributes that exist by name, and the errno of those that failed otherwise.
    `hangs`: it does not answer, and what stands here was read before.
    """

    texts: dict[str, str] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    hangs: bool = False

    def number(self, name: str) -> int | None:
        """An attribute as a whole number; None if it is not there or is none."""
        text = self.texts.get(name, "")
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None

    def total(self, name: str) -> int | None:
        """The total of an `aer_dev_*` attribute, its last line: `TOTAL_ERR_FATAL 0`."""
        match = re.search(r"^TOTAL_ERR_\w+ (\d{1,18})$", self.texts.get(name, ""), re.MULTILINE)
        return int(match[1]) if match else None


class Tree:
    """The files of one machine. `read` is the seam where a simulation has reads fail as the driver lets them fail."""

    def __init__(self, sys: Path, dev: Path, proc: Path, read: Reader = read_file) -> None:
        self._sys, self._dev, self._proc, self._read = str(sys), str(dev), str(proc), read
        self._stuck: dict[str, threading.Thread] = {}

    def names(self) -> frozenset[str]:
        """The cards' names in the class, unread; cheap, for whoever waits for one to come or go. Raises OSError other
        than that there is no class: then the driver is not loaded.
        """
        try:
            return frozenset(os.listdir(f"{self._sys}/class/tenstorrent"))
        except FileNotFoundError:
            return frozenset()

    def targets(self) -> dict[str, str]:
        """Where each name of the class leads, '' if it is no link. Raises OSError as `names` does."""
        found = {}
        for name in self.names():
            try:
                found[name] = os.readlink(f"{self._sys}/class/tenstorrent/{name}")
            except OSError:
                found[name] = ""
        return found

    def places(self) -> tuple[list[Place], list[str]]:
        """Where cards are, by number, and the names of those that no PCI device stands behind. Raises OSError."""
        found, lost = [], []
        for name in sorted(self.names()):
            match = _CLASS.fullmatch(name)
            if match is None:
                continue
            try:
                # Not the class's own name for it, which may be another card's before this one is read.
                folder = os.path.realpath(f"{self._sys}/class/tenstorrent/{name}")
                pci = os.path.realpath(f"{folder}/device")
            except OSError:  # a link of it went at this moment, and so does the card
                continue
            address = os.path.basename(pci).lower()
            if _ADDRESS.fullmatch(address):
                found.append(Place(int(match[1]), folder, pci, address))
            else:
                lost.append(name)
        return sorted(found, key=lambda place: place.index), lost

    def read(self, places: Iterable[Place]) -> dict[str, Raw]:
        """What each card says, by address; nothing of those for which too many that hang left no time. Cards are read
        one after another in a thread of their own: where one hangs, the thread is left alone with that card, which is
        not asked again until it has returned, and another goes on.
        """
        answers: dict[str, Raw] = {}
        self._stuck = {address: thread for address, thread in self._stuck.items() if thread.is_alive()}
        todo: deque[Place] = deque()
        for place in places:
            if place.address in self._stuck:
                answers[place.address] = Raw(hangs=True)
            else:
                todo.append(place)
        waits = 0
        while todo and waits * PATIENCE < LONGEST:
            worker = _Worker(self._card, todo)
            worker.start()
            if silent := worker.drained(answers):
                self._stuck[silent] = worker
                waits += 1
        return answers

    def _card(self, place: Place, raw: Raw) -> None:
        for name in _PCI:
            self._attribute(raw, name, f"{place.pci}/{name}")
        for name in TELEMETRY:
            self._attribute(raw, name, f"{place.folder}/{name}")
        for folder in self._folders(f"{place.pci}/hwmon"):
            for name in _HWMON:
                self._attribute(raw, name, f"{place.pci}/hwmon/{folder}/{name}")
        self._attribute(raw, "pids", f"{self._proc}/driver/tenstorrent/{place.index}/pids", MOST_PIDS)
        # One line for each open descriptor; 0 is a process that lives in a namespace which this one cannot see.
        lines = raw.texts.pop("pids", "").splitlines()
        raw.pids = tuple(sorted({int(line) for line in lines if re.fullmatch(r"[1-9]\d{0,9}", line)}))

    def _attribute(self, raw: Raw, name: str, path: str, most: int = PAGE) -> None:
        try:
            raw.texts[name] = self._read(path, most)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raw.errors[name] = error.errno or errno.EIO

    def _folders(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))[:1]
        except OSError:
            return []

    def text(self, path: str) -> str:
        """An attribute of the machine, such as `module/tenstorrent/version`, below /sys; '' if it cannot be read."""
        try:
            return self._read(f"{self._sys}/{path}", PAGE)
        except OSError:
            return ""

    def entries(self, path: str) -> list[str]:
        """The names in a folder below /sys, [] if there is none."""
        try:
            return sorted(os.listdir(f"{self._sys}/{path}"))
        except OSError:
            return []

    def nodes(self) -> frozenset[int]:
        """The numbers of the device nodes there are; by-id, a folder, lies among them."""
        try:
            names = os.listdir(f"{self._dev}/tenstorrent")
        except OSError:
            return frozenset()
        return frozenset(int(name) for name in names if _NUMBER.fullmatch(name))

    def node(self, index: int) -> str:
        return f"{self._dev}/tenstorrent/{index}"

    def links(self) -> Mapping[int, tuple[str, str]]:
        """By the number that it leads to: the path of a link of udev's, and the ASIC id in its name (lower case)."""
        folder = f"{self._dev}/tenstorrent/by-id"
        found: dict[int, tuple[str, str]] = {}
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            return found
        for name in names:
            try:
                target = os.path.basename(os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
            _, _, asic = name.rpartition("-")
            if _NUMBER.fullmatch(target):
                found.setdefault(int(target), (f"{folder}/{name}", asic.lower()))
        return found


class _Worker(threading.Thread):
    """Reads cards until none is left, or until nobody waits for it any more."""

    def __init__(self, card: Callable[[Place, Raw], None], todo: deque[Place]) -> None:
        super().__init__(name="tenstorrent-read", daemon=True)
        self._card, self._todo = card, todo
        self._results: queue.SimpleQueue[tuple[str, Raw] | None] = queue.SimpleQueue()
        self._left_alone = threading.Event()
        self._at = "", Raw()

    def run(self) -> None:
        while self._todo and not self._left_alone.is_set():
            place = self._todo.popleft()
            self._at = place.address, Raw()
            self._card(place, self._at[1])
            self._results.put(self._at)
        self._at = "", Raw()
        self._results.put(None)

    def drained(self, answers: dict[str, Raw]) -> str:
        """Takes what it reads until it is through: ''. Or the address of the card where it has been for too long, with
        what it has read of that so far.
        """
        while True:
            try:
                result = self._results.get(timeout=PATIENCE)
            except queue.Empty:
                self._left_alone.set()
                address, raw = self._at
                if address:
                    answers[address] = Raw(dict(raw.texts), dict(raw.errors), hangs=True)
                return address
            if result is None:
                return ""
            answers[result[0]] = result[1]
