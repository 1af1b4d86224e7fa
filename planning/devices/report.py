"""What a node says of its devices in its NodeDevices: the whole picture, bounded, in the words of people.

For the node's process, which writes it whenever it is another, and for `berth devices`, which shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from crds.gpuseatprofile import MOST_GROUPS, MOST_SEATS
from crds.gpuworkload import API_VERSION
from crds.nodedevices import (
    KIND,
    MOST_CARDS,
    MOST_DEVICES,
    MOST_LABELS,
    MOST_PROBLEMS,
    MOST_RESOURCES,
    MOST_TOPOLOGY,
    NodeDevicesStatus,
)
from planning.devices.cards import Card, Connection, Link
from planning.devices.offers import Device
from planning.times import timestamp

FrontEnd = Literal["device-plugin", "dra"]

# As `nvidia-smi topo -m` writes them, which is what people know.
_CONNECTIONS: dict[Connection, str] = {
    "nvlink": "NV",
    "same-board": "PSB",
    "single-switch": "PIX",
    "multi-switch": "PXB",
    "host-bridge": "PHB",
    "same-cpu": "NODE",
    "cross-cpu": "SYS",
}


@dataclass(frozen=True, slots=True)
class CardHealth:
    """How a card is: `since` in seconds since the epoch."""

    state: Literal["Healthy", "Unhealthy", "Unknown"]
    reason: str = ""
    message: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Holder:
    """The container that has a device."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class Offer:
    """How one resource is offered, if it is; `message` says why it is not had by the kubelet, or by the API server; ''
    where it is.
    """

    front_end: FrontEnd | Literal["none"]
    message: str = ""


@dataclass(frozen=True, slots=True)
class Seats:
    """Which seats were asked for, by what, what stands against them, and what waits for pods that run."""

    source: str
    generation: int
    groups: int
    seats: int
    problems: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """All that a node knows of its devices. `devices` by resource; `holders` by device id; `offers` by resource;
    `labels`: those that its Node is to have (planning/devices/labels.py), None as long as nobody knows.
    """

    cards: Sequence[Card] = ()
    health: Mapping[str, CardHealth] = field(default_factory=dict)
    devices: Mapping[str, Sequence[Device]] = field(default_factory=dict)
    holders: Mapping[str, Holder] = field(default_factory=dict)
    offers: Mapping[str, Offer] = field(default_factory=dict)
    links: Sequence[Link] = ()
    problems: Sequence[str] = ()
    seats: Seats | None = None
    simulated: bool = False
    labels: Mapping[str, str] | None = None


def document(node: str, node_uid: str) -> dict[str, Any]:
    """The object without its status, as it is created. It goes with the Node."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": node, "ownerReferences": [owner]},
        "spec": {"nodeName": node},
    }


def status(picture: Picture, now: float) -> dict[str, Any]:
    """The status, valid whatever a driver says of itself: texts are cut, and of too many those are shown that somebody
    would ask about.
    """
    devices = [device for each in picture.devices.values() for device in each]
    ill = sum(_health(picture, card).state != "Healthy" for card in picture.cards)
    held = sum(device.id in picture.holders for device in devices)
    raw: dict[str, Any] = {
        "updated": timestamp(now),
        "simulated": picture.simulated,
        "count": len(picture.cards),
        "unhealthy": ill,
        "held": held,
        "summary": cut(summary(picture.cards), 128),
        "problems": [cut(each, 512) for each in picture.problems[:MOST_PROBLEMS]],
        "cards": _cards(picture),
        "devices": _devices(picture, devices),
        "resources": _distinct([_resource(picture, name, each) for name, each in _first(picture.devices)], "name"),
        "topology": _topology(picture),
        "seats": _seats(picture.seats),
        "labels": None if picture.labels is None else dict(sorted(picture.labels.items())[:MOST_LABELS]),
    }
    model = NodeDevicesStatus.model_validate({key: value for key, value in raw.items() if value not in (None, [])})
    return model.model_dump(by_alias=True, exclude_none=True)


def summary(cards: Iterable[Card]) -> str:
    """`4 × n150, 8 × NVIDIA H100`; 'none' where there are none."""
    counted = Counter(card.product for card in cards if not card.parent)
    return ", ".join(f"{count} × {product}" for product, count in sorted(counted.items())) or "none"


def connection(link: Link | None) -> str:
    """How two cards are connected, in the shorthand of nvidia-smi; '?' where nobody told."""
    if link is None:
        return "?"
    return f"NV{link.lanes}" if link.connection == "nvlink" else _CONNECTIONS[link.connection]


def _health(picture: Picture, card: Card) -> CardHealth:
    return picture.health.get(card.id) or CardHealth("Unknown", "NotSeen", "It has not been checked yet.")


def _cards(picture: Picture) -> list[dict[str, Any]]:
    shown = sorted(picture.cards, key=lambda card: _health(picture, card).state == "Healthy")[:MOST_CARDS]
    found = _distinct([_card(card, _health(picture, card)) for card in shown], "id")
    return sorted(found, key=lambda each: (each["vendor"], each["index"], each["id"]))


def _card(card: Card, health: CardHealth) -> dict[str, Any]:
    raw = {
        "id": cut(card.id, 128),
        "vendor": card.vendor,
        "product": cut(card.product, 128),
        "resource": cut(card.resource, 128) or None,
        "index": max(0, card.index),
        "address": cut(card.address, 128) or None,
        "numa": card.numa if card.numa is not None and card.numa >= 0 else None,
        "memoryMiB": card.memory_mib or None,
        "driver": cut(card.driver, 128) or None,
        "health": health.state,
        "since": timestamp(health.since) if health.since else None,
    }
    if health.state != "Healthy":
        raw |= {"reason": cut(health.reason, 128), "message": cut(health.message, 512)}
    return _without_none(raw)


def _devices(picture: Picture, devices: Sequence[Device]) -> list[dict[str, Any]]:
    told = sorted(devices, key=lambda each: (each.id not in picture.holders and each.healthy, each.resource, each.id))
    found = []
    for device in sorted(told[:MOST_DEVICES], key=lambda each: (each.resource, each.id)):
        holder = picture.holders.get(device.id)
        raw: dict[str, Any] = {
            "id": cut(device.id, 128),
            "resource": cut(device.resource, 128),
            "cards": [cut(card, 128) for card in device.cards[:64]],
            "group": cut(device.group, 128) or None,
            "healthy": device.healthy,
        }
        if holder is not None:
            raw["heldBy"] = {
                "namespace": cut(holder.namespace, 128),
                "pod": cut(holder.pod, 128),
                "container": cut(holder.container, 128),
            }
        found.append(_without_none(raw))
    return _distinct(found, "id")


def _first(devices: Mapping[str, Sequence[Device]]) -> list[tuple[str, Sequence[Device]]]:
    return sorted(devices.items())[:MOST_RESOURCES]


def _resource(picture: Picture, name: str, devices: Sequence[Device]) -> dict[str, Any]:
    offer = picture.offers.get(name) or Offer("none", "It is not offered yet.")
    return _without_none(
        {
            "name": cut(name, 128),
            "frontEnd": offer.front_end,
            "devices": len(devices),
            "healthy": sum(device.healthy for device in devices),
            "held": sum(device.id in picture.holders for device in devices),
            "offered": not offer.message,
            "message": cut(offer.message, 512) or None,
        }
    )


def _topology(picture: Picture) -> list[dict[str, Any]] | None:
    """Only of cards between which something is known, and only as many as fit a screen."""
    linked = {card for link in picture.links for card in (link.a, link.b)}
    cards = sorted((card for card in picture.cards if card.id in linked), key=lambda card: (card.vendor, card.index))
    if not 1 < len(cards) <= MOST_TOPOLOGY:
        return None
    links = {frozenset((link.a, link.b)): link for link in picture.links}
    rows = [
        {
            "card": cut(one.id, 128),
            "links": ["X" if one is other else connection(links.get(frozenset((one.id, other.id)))) for other in cards],
        }
        for one in cards
    ]
    return _distinct(rows, "card")


def _seats(seats: Seats | None) -> dict[str, Any] | None:
    if seats is None:
        return None
    return _without_none(
        {
            "source": cut(seats.source, 128),
            "generation": seats.generation or None,
            # Found groups of one may be more on a node of more GPUs than any has.
            "groups": min(seats.groups, MOST_GROUPS),
            "seats": min(seats.seats, MOST_GROUPS * MOST_SEATS),
            "problems": [cut(each, 512) for each in seats.problems[:MOST_PROBLEMS]] or None,
            "waiting": [cut(each, 512) for each in seats.waiting[:MOST_PROBLEMS]] or None,
        }
    )


def _distinct(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The API server takes no two with one key, and two names of a driver's may be one once they are cut."""
    return list({row[key]: row for row in reversed(rows)}.values())[::-1]


def _without_none(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def cut(text: str, most: int) -> str:
    """Printable, and at most so long."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
