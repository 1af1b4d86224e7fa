"""Tenstorrent's cards of a node, as tt-kmd shows them: which there are, what is wrong with each, and what it measures.

A card is its ASIC id, or its PCI address where the driver tells no such id: never its number, which the kernel gives
anew whenever a card comes or goes. It is offered under the exact type that the driver prints, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nodeworkers.hardware.provider import HardwareError, said
from nodeworkers.hardware.tenstorrent_sysfs import TELEMETRY, Place, Raw, Reader, Tree, read_file
from planning.devices.cards import Card, Reading, Sight, Trouble, Vendor

DOMAIN = "tenstorrent.com"
PCI_VENDOR = "0x1e52"
ARCHITECTURES = {"0x401e": "wormhole", "0xb140": "blackhole"}  # by PCI device
# MiB of a whole card, from Tenstorrent's product pages; no attribute tells it.
MEMORY = {"n150": 12288, "n300": 24576, "p100a": 28672, "p150a": 32768, "p150b": 32768, "p150c": 32768}

HEARTBEAT_SECONDS = 1.0  # without a beat; tt-kmd names no rate, and cards beat several times a second
TELEMETRY_SECONDS = (
    150.0  # for a card to get its telemetry: the driver asks a Wormhole's firmware 120 times, once a second
)
THERMAL_SECONDS = 600.0  # that a card counts as unfit after it shut down for its heat
LINK_SECONDS = 60.0  # and after its PCI link reported uncorrectable errors
_TRIES = 3  # to read all cards without one coming or going meanwhile
_POLL = 0.25  # seconds between listings of the class while waiting
_RESOURCE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # the name in an extended resource's name
_ASIC = re.compile(r"(?=.*[1-9a-f])[0-9a-f]{4,32}")  # a chip that was never given one says zeros
_HUGEPAGES = "hugepages/hugepages-1048576kB"


@dataclass(slots=True)
class _State:
    """What is remembered of a card from look to look, by its PCI address, for as long as it is there."""

    card: Card | None = None  # as it was when it last told what it is
    asic: str = ""
    iommu: str = ""
    silent_since: float | None = None  # without telemetry
    beat: tuple[int, float] | None = None  # its heartbeat, and when that was first seen
    counters: dict[str, tuple[int, float | None]] = field(default_factory=dict)  # value, and when it last rose


class Tenstorrent:
    """A Source. `sys`, `dev` and `proc` are where these trees lie; `read` is for simulations, `clock` for tests."""

    vendor: Vendor = "tenstorrent"

    def __init__(
        self,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        proc: Path = Path("/proc"),
        read: Reader = read_file,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tree = Tree(sys, dev, proc, read)
        self._events = _listening() if sys == Path("/sys") else None
        self._clock = clock
        self._states: dict[str, _State] = {}
        self._seen: frozenset[str] = frozenset()

    def look(self) -> Sight:
        """Every card of the class, also one that says nothing; empty where there is none. Raises HardwareError if the
        class cannot be listed. Takes milliseconds, and up to 6 s while cards hang.
        """
        try:
            self._seen = self._tree.names()
            places, lost, answers = self._read()
        except OSError as error:
            raise HardwareError(
                f"/sys/class/tenstorrent cannot be listed: {error.strerror or error}; let berth's node process "
                "read /sys."
            ) from error
        self._states = {place.address: self._states.get(place.address) or _State() for place in places}
        if not places:
            return Sight(self.vendor, problem=" ".join(filter(None, [_lost(lost), self._driverless()])))
        places, doubles = _once(places)
        now = self._clock()
        nodes, links = self._tree.nodes(), self._tree.links()
        driver = said(self._tree.text("module/tenstorrent/version"))
        cards, troubles, readings = [], {}, {}
        for place in places:
            state, raw = self._states[place.address], answers.get(place.address)
            link, asic = links.get(place.index, ("", ""))
            _identify(state, place, raw, asic, driver)
            path = link if link and asic == state.asic else self._tree.node(place.index)
            card = replace(_remembered(state, place, driver), nodes=(path,) if place.index in nodes else ())
            cards.append(card)
            if found := _judged(state, card, raw, now):
                troubles[card.address] = found[0]
            if raw is not None and not raw.hangs:
                state.iommu = _iommu(raw.texts.get("iommu_group/type", ""))
                readings[card.address] = _measured(raw)
        cards, alike = _told_apart(cards)
        ids = {card.address: card.id for card in cards}
        return Sight(
            self.vendor,
            cards=tuple(cards),
            troubles={ids[address]: trouble for address, trouble in troubles.items()},
            readings={ids[address]: reading for address, reading in readings.items()},
            problem=" ".join(filter(None, [_lost(lost), doubles, alike])),
            host=self._host(driver, cards),
        )

    def wait(self, seconds: float) -> None:
        """See Source. A reset without hot-plug is no news to anyone: look every few seconds whatever happens."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._events is None:
                time.sleep(min(left, _POLL))
            elif self._told(min(left, _POLL)):
                return
            with contextlib.suppress(OSError):
                if self._tree.names() != self._seen:
                    return

    def close(self) -> None:
        """Stops listening; no driver is held."""
        self._events = None

    def _read(self) -> tuple[list[Place], list[str], dict[str, Raw]]:
        """What each card says. What is read while a card comes, goes or gets another number may be half one card's and
        half another's, so it is read anew until nothing of that has happened.
        """
        for _ in range(_TRIES):
            targets = self._tree.targets()
            places, lost = self._tree.places()
            answers = self._tree.read(places)
            now = self._tree.targets()
            if now == targets:
                break
        still = {name for name, target in targets.items() if now.get(name) == target}
        return [place for place in places if place.name in still], [name for name in lost if name in still], answers

    def _told(self, seconds: float) -> bool:
        """Whether the kernel told of a card within so many seconds. All that it told is one piece of news."""
        told, left = False, seconds
        try:
            while self._events is not None and self._events.poll(left) is not None:
                told, left = True, 0.0
        except OSError:  # more was told than could be kept; the listing tells from now on
            self._events = None
            return True
        return told

    def _driverless(self) -> str:
        """A sentence if there are cards that no driver serves."""
        found = [
            address
            for address in self._tree.entries("bus/pci/devices")
            if self._tree.text(f"bus/pci/devices/{address}/vendor").lower() == PCI_VENDOR
        ]
        if not found:
            return ""
        return (
            f"The driver tt-kmd serves none of this node's Tenstorrent devices ({', '.join(found[:8])}): load the "
            "module tenstorrent, and look into the kernel log. Grayskull cards need a driver older than 2.0."
        )

    def _host(self, driver: str, cards: Iterable[Card]) -> dict[str, str]:
        """`driver` and `firmware` (bundles, separated by commas); `iommu/<card id>` translated, passthrough or none;
        `hugepages-1g/total` and `/free`, and the same of each NUMA node as `hugepages-1g/numa<k>/…`.
        """
        firmware = sorted({card.firmware for card in cards if card.firmware})
        host = {"driver": driver, "firmware": ",".join(firmware)}
        for card in cards:
            if mode := self._states[card.address].iommu:
                host[f"iommu/{card.id}"] = mode
        places = {"hugepages-1g": f"kernel/mm/{_HUGEPAGES}"}
        for name in self._tree.entries("devices/system/node"):
            if re.fullmatch(r"node\d{1,4}", name):
                places[f"hugepages-1g/numa{name[4:]}"] = f"devices/system/node/{name}/{_HUGEPAGES}"
        for key, path in places.items():
            host[f"{key}/total"] = _count(self._tree.text(f"{path}/nr_hugepages"))
            host[f"{key}/free"] = _count(self._tree.text(f"{path}/free_hugepages"))
        return host


def _identify(state: _State, place: Place, raw: Raw | None, linked: str, driver: str) -> None:
    """Takes into `state` what the card says of itself. What it does not say now stays as it was."""
    asic = raw.texts.get("tt_asic_id", "").lower() if raw else ""
    if _ASIC.fullmatch(asic):
        state.asic = asic
    elif not state.asic and _ASIC.fullmatch(linked):
        state.asic = linked
    kind = raw.texts.get("tt_card_type", "") if raw else ""
    if raw is None or not kind or (raw.hangs and state.card):
        return
    named = _RESOURCE.fullmatch(kind) is not None and kind != "unknown"
    numa = raw.number("numa_node")
    state.card = Card(
        id="",
        vendor="tenstorrent",
        product=kind if named else "unknown",
        resource=f"{DOMAIN}/{kind}" if named else "",
        index=place.index,
        address=place.address,
        numa=numa if numa is not None and 0 <= numa < 4096 else None,
        memory_mib=MEMORY.get(kind, 0),
        arch=ARCHITECTURES.get(raw.texts.get("device", "").lower(), ""),
        driver=driver,
        firmware=said(raw.texts.get("tt_fw_bundle_ver", "")),
    )


def _remembered(state: _State, place: Place, driver: str) -> Card:
    """The card as it is known, under the number that it has now. Its resource is '' if it never told its type."""
    card = state.card or Card("", "tenstorrent", "unknown", "", place.index, place.address, driver=driver)
    return replace(card, id=f"tt-{state.asic}" if state.asic else _by_address(place.address), index=place.index)


def _by_address(address: str) -> str:
    return f"tt-{address.replace(':', '-').replace('.', '-')}"


def _judged(state: _State, card: Card, raw: Raw | None, now: float) -> list[Trouble]:
    """What is wrong with a card, worst first."""
    name, found = _named(card), list[Trouble]()

    def trouble(reason: str, message: str, sure: bool = False) -> None:
        found.append(Trouble(reason, f"{name} {message}", sure))

    if raw is None:
        trouble("NotRead", "was not looked at, for others hang; it will be in one of the next looks.")
        return found
    if raw.hangs:
        state.beat = None
        trouble(
            "Hangs",
            "does not answer: a read of its attributes hangs in the kernel. Drain the node and power it off and on; "
            "look into its kernel log.",
            True,
        )
        return found
    failed = set(raw.errors.values())
    tripped = _rose(state, "therm", raw.number("tt_therm_trip_count"), now, THERMAL_SECONDS)
    resetting = errno.ENODATA in failed and not any(attribute in raw.texts for attribute in TELEMETRY)
    if resetting or errno.ENODEV in failed:
        # What a link reports while its card goes and comes is no fault, and nothing beats then.
        state.beat = None
        state.counters = {key: value for key, value in state.counters.items() if key == "therm"}
    if errno.ENODEV in failed:
        trouble("Detached", "is detached from its driver. If it does not come back, restart the node.", True)
        return found
    if resetting:
        trouble("Resetting", "is in the middle of a reset. If it stays there, reset it once more with tt-smi -r.")
        return found
    fatal = _rose(state, "fatal", raw.total("aer_dev_fatal"), now, LINK_SECONDS)
    nonfatal = _rose(state, "nonfatal", raw.total("aer_dev_nonfatal"), now, LINK_SECONDS)
    if "tt_card_type" in raw.texts:
        state.silent_since = None
    elif raw.errors.get("tt_card_type", errno.ENODATA) == errno.ENODATA:
        state.silent_since = now if state.silent_since is None else state.silent_since
        late = now - state.silent_since >= TELEMETRY_SECONDS
        advice = (
            f"has had none for {TELEMETRY_SECONDS:g} s. Update its firmware and tt-kmd (1.28 or newer), or reset it."
            if late
            else "may get it from its firmware within two minutes after its driver was loaded."
        )
        trouble("TelemetryMissing", f"has no telemetry, and so no type: it {advice}", late)
    empty = [attribute for attribute in ("tt_card_type", "tt_asic_id") if raw.texts.get(attribute) == ""]
    if empty:
        trouble("AttributeEmpty", f"says nothing in {' and '.join(empty)}. If it stays so, reset it or its firmware.")
    elif not card.resource and "tt_card_type" in raw.texts:
        trouble(
            "UnknownCardType",
            f"is of a type that the driver does not know ({said(raw.texts['tt_card_type']) or 'unknown'}), so it is "
            "offered under no name. Update tt-kmd.",
            True,
        )
    if not card.nodes:
        trouble(
            "NodeMissing",
            f"has no device node /dev/tenstorrent/{card.index}: run udevadm trigger, and mount the host's /dev as a "
            "folder where berth's node process runs in a container.",
        )
    unreadable = {
        attribute: code for attribute, code in raw.errors.items() if code not in (errno.ENODATA, errno.ENODEV)
    }
    for attribute, code in list(unreadable.items())[:1]:
        trouble("Unreadable", f"does not let {attribute} be read: {os.strerror(code)}. Look into the kernel log.")
    if fatal:
        trouble("PcieFatalErrors", "has fatal errors on its PCI link. Look into the kernel log, and reseat it.", True)
    if tripped:
        trouble("ThermalTrip", "shut itself down for its heat. Look at the node's fans and airflow.", True)
    if _beats_not(state, raw.number("tt_heartbeat"), now):
        trouble("HeartbeatStopped", "has no heartbeat: its firmware hangs. Reset it with tt-smi -r.")
    temperature, limit = raw.number("temp1_input"), raw.number("temp1_max")
    if temperature is not None and limit is not None and temperature >= limit > 0:
        trouble(
            "TooHot",
            f"is at {temperature / 1000:g} °C, and its limit is {limit / 1000:g} °C. Look at the node's fans "
            "and airflow.",
        )
    if nonfatal:
        trouble("PcieErrors", "has uncorrectable errors on its PCI link. Look into the kernel log.")
    return found


def _beats_not(state: _State, beat: int | None, now: float) -> bool:
    if beat is None:
        state.beat = None
    elif state.beat is None or state.beat[0] != beat:
        state.beat = beat, now
    return state.beat is not None and now - state.beat[1] >= HEARTBEAT_SECONDS


def _rose(state: _State, counter: str, value: int | None, now: float, seconds: float) -> bool:
    """Whether a counter rose within so many seconds. One that fell was begun anew, with the card's power or driver."""
    if value is not None:
        before, rose = state.counters.get(counter, (value, None))
        state.counters[counter] = value, now if value > before else rose
    rose = state.counters.get(counter, (0, None))[1]
    return rose is not None and now - rose < seconds


def _measured(raw: Raw) -> Reading:
    temperature, power = raw.number("temp1_input"), raw.number("power1_input")
    return Reading(
        temperature=None if temperature is None else temperature / 1000,
        power=None if power is None else power / 1_000_000,
        pids=raw.pids,
    )


def _named(card: Card) -> str:
    return f"The Tenstorrent card {card.id} ({card.product}) at {card.address}"


def _iommu(kind: str) -> str:
    """What an IOMMU does for a card, from the type of its group (Linux, ABI/testing/sysfs-kernel-iommu_groups), '' if
    it is in none. Unless it translates, user space wants pages of 1 GiB.
    """
    if kind.startswith("DMA"):
        return "translated"
    return "passthrough" if kind else "none"


def _count(text: str) -> str:
    return text if re.fullmatch(r"\d{1,9}", text) else "0"


def _once(places: list[Place]) -> tuple[list[Place], str]:
    """Each device once, and a sentence if one was there under two numbers."""
    kept: dict[str, Place] = {}
    for place in places:
        kept.setdefault(place.address, place)
    if len(kept) == len(places):
        return places, ""
    return list(kept.values()), "The kernel lists a Tenstorrent device under two numbers: restart the node."


def _told_apart(cards: list[Card]) -> tuple[list[Card], str]:
    """Cards that name one ASIC id go by their addresses."""
    often = [name for name, number in Counter(card.id for card in cards).items() if number > 1]
    if not often:
        return cards, ""
    told = [replace(card, id=_by_address(card.address)) if card.id in often else card for card in cards]
    return (
        told,
        f"Cards share the ASIC id of {', '.join(often[:4])}, and go by their PCI addresses: update their firmware.",
    )


def _lost(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"{', '.join(names[:8])} in /sys/class/tenstorrent stands for no PCI device: reload tt-kmd or restart the node."
    )


def _listening() -> Any:
    """Where the kernel's events of the class come in; None where they cannot be had, as without libudev."""
    try:
        pyudev = importlib.import_module("pyudev")
        # The kernel's own events, for those of udevd do not cross network namespaces.
        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        monitor.filter_by("tenstorrent")
        monitor.start()
    except (ImportError, OSError):
        return None
    return monitor
