"""What a node's cards are offered as: whole cards, shares of one, seats on groups of them; under which resource, with
which ids, and how well each is.

For the allocation core. A card's health is that of everything that stands on it. A device that somebody holds is listed
for as long, whatever became of its card: the kubelet says of a device that left the list that it is healthy. And while
it is held its card is offered in no other way: the kubelet counts each resource for itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planning.devices.cards import Card
from planning.devices.health import VANISHED, Health
from planning.devices.offers import Device

SHARED = "nvidia.com/gpu"
MOST_ID = 63  # characters of a device's id: what the kubelet's API allows
MOST_SHARES = 64  # of one card
_MESSAGE = 256
# IsExtendedResourceName of k8s.io/kubernetes, pkg/apis/core/v1/helper: "requests." before the name has to fit as well.
_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_RESOURCE = re.compile(rf"(?=[^/]{{1,244}}/)(?!requests\.){_DOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_ID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")


_Way = tuple[str, frozenset[str], bool]


@dataclass(frozen=True, slots=True)
class Seat:
    """One place on a group of GPUs. `id` is its device id, `kyb-<group>-s<k>`; `cards` are the group's."""

    id: str
    resource: str
    group: str
    cards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """How cards are offered. `shares`: as how many devices each whole GPU of NVIDIA's counts that is in no group;
    `aliases`: resource → the one that it is offered as instead, for a family of card types.
    """

    shares: int = 1
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offering:
    """The devices by resource, sorted by id, and what could not be offered: sentences."""

    devices: Mapping[str, tuple[Device, ...]]
    problems: tuple[str, ...] = ()


def offered(
    cards: Sequence[Card],
    health: Mapping[str, Health],
    seats: Iterable[Seat],
    terms: Terms,
    held: Mapping[str, Device],
    known: Iterable[str] = (),
    withheld: Collection[str] = (),
) -> Offering:
    """`held`: devices by id that a container has, as they were offered then. `known`: resources that are to stay, with
    no devices if there are none. `withheld`: cards that are not offered whole, for groups wait for them. `cards` are
    all that are known, also those that a provider in trouble does not list just now.
    """
    by_id = {card.id: card for card in cards}
    made, problems = _made(by_id, list(seats), terms, withheld)
    problems += _withdrawn(made, held, by_id)
    made |= held
    found: dict[str, list[Device]] = {resource: [] for resource in known}
    for device in made.values():
        found.setdefault(device.resource, []).append(_judged(device, by_id, health))
    listed = {resource: tuple(sorted(each, key=lambda one: one.id)) for resource, each in sorted(found.items())}
    return Offering(listed, tuple(problems))


def is_resource(name: str) -> bool:
    """Whether the kubelet takes it as the name of a resource of ours."""
    return _RESOURCE.fullmatch(name) is not None and "kubernetes.io/" not in name


def _made(
    cards: Mapping[str, Card], seats: list[Seat], terms: Terms, withheld: Collection[str]
) -> tuple[dict[str, Device], list[str]]:
    """Devices by id, each as if it were well. What bears a name that cannot be one, or another's, is told instead."""
    problems: list[str] = []
    made: dict[str, Device] = {}
    grouped = {card for seat in seats for card in seat.cards} | set(withheld)
    divided = {card.parent for card in cards.values()}
    devices = [Device(seat.id, seat.resource, seat.cards, group=seat.group) for seat in seats]
    for card in cards.values():
        # Its instances are offered, or the seats on it, and not the whole.
        if not card.resource or card.id in divided or card.id in grouped or card.parent in grouped:
            continue
        devices += _of_card(card, terms)
    for device in devices:
        if not is_resource(device.resource):
            problems.append(f"{device.id} is not offered: {device.resource!r:.80} cannot be the name of a resource.")
        elif len(device.id) > MOST_ID or not _ID.fullmatch(device.id):
            problems.append(f"{device.id!r:.80} is not offered: an id of a device has at most {MOST_ID} characters.")
        elif device.id in made:
            problems.append(f"{device.id} is offered once: two devices of this node have that id.")
        else:
            made[device.id] = device
    return made, list(dict.fromkeys(problems))


def _withdrawn(made: dict[str, Device], held: Mapping[str, Device], cards: Mapping[str, Card]) -> list[str]:
    """Takes away what stands on a card that is held in another way, which a new configuration or a new card type is no
    reason to give to a second container; what waits so, in sentences.
    """
    holders: dict[str, dict[_Way, Device]] = {}
    for device in held.values():
        for card in device.cards:
            holders.setdefault(card, {})[_way(device)] = device
    parts: dict[str, Device] = {}
    for card, ways in holders.items():
        if card in cards and cards[card].parent:
            parts[cards[card].parent] = next(iter(ways.values()))
    told = []
    for device in list(made.values()):
        own = _way(device)
        others = [each for card in device.cards for way, each in holders.get(card, {}).items() if way != own]
        others += [parts[card] for card in device.cards if card in parts]
        whole = [cards[card].parent for card in device.cards if card in cards and cards[card].parent]
        others += [each for card in whole for each in holders.get(card, {}).values()]
        if others:
            del made[device.id]
            name = f"Group {device.group}" if device.group else device.cards[0]
            told.append(
                f"{name} is not offered as {device.resource} yet: a container holds {others[0].id} of "
                f"{others[0].resource}. It will be when that ends."
            )
    return list(dict.fromkeys(told))


def _way(device: Device) -> _Way:
    """Equal for devices that may be on the same cards at a time: shares of a card, seats of a group."""
    return device.resource, frozenset(device.cards), device.id in device.cards


def _of_card(card: Card, terms: Terms) -> list[Device]:
    resource = terms.aliases.get(card.resource, card.resource)
    if card.resource != SHARED or terms.shares <= 1:
        return [Device(card.id, resource, (card.id,))]
    shares = min(terms.shares, MOST_SHARES)
    return [Device(f"{card.id}-r{number}", resource, (card.id,)) for number in range(shares)]


def _judged(device: Device, cards: Mapping[str, Card], health: Mapping[str, Health]) -> Device:
    """With the health of the worst of what it stands on, and the NUMA nodes of its cards."""
    known = {card.numa for each in device.cards if (card := cards.get(each)) is not None and card.numa is not None}
    numa = tuple(sorted(known)) or device.numa
    ill = [(each, why) for each in _beneath(device, cards) if (why := _why(each, health)) is not None]
    if not ill:
        return replace(device, healthy=True, reason="", message="", numa=numa)
    first, (reason, message) = ill[0]
    told = message if device.cards == (first,) else f"{first}: {message}"
    return replace(device, healthy=False, reason=reason, message=told[:_MESSAGE], numa=numa)


def _beneath(device: Device, cards: Mapping[str, Card]) -> list[str]:
    """Its cards, and the GPUs whose instances they are."""
    parents = [cards[each].parent for each in device.cards if each in cards and cards[each].parent]
    return [*device.cards, *parents]


def _why(card: str, health: Mapping[str, Health]) -> tuple[str, str] | None:
    """Why nothing on this card is given out; None: it is."""
    found = health.get(card)
    if found is None:
        return VANISHED, "It is not on this node any more."
    return None if found.usable else (found.reason or "Unhealthy", found.message)
