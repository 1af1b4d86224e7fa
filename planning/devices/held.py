"""What a device was when it was given, from what its container got: for a node that starts anew and finds its devices
in use, some of them of cards or groups that are not there any more. And whether such a card was replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from planning.accelerators import seat_size
from planning.devices.cards import Card
from planning.devices.offering import Seat
from planning.devices.offers import Device, Injection

_SHARE = re.compile(r"-r[0-9]+$")


def device_of(id: str, resource: str, injection: Injection | None) -> Device:
    """The device as it was offered, without its health. Where nothing is known but its name, that is its card's."""
    cards = cards_of(injection)
    if seat_size(resource):
        return Device(id, resource, cards, group=injection.env.get("KYB_GPU_GROUP", "") if injection else "")
    # Of several that were given together each has its own card, of which its id begins.
    own = tuple(card for card in cards if id == card or id.startswith(f"{card}-"))
    return Device(id, resource, own or (_SHARE.sub("", id),))


def cards_of(injection: Injection | None) -> tuple[str, ...]:
    """The ids of the cards that a container got."""
    if injection is None:
        return ()
    named = tuple(name.partition("=")[2] for name in injection.cdi)
    if named:
        return named
    env = injection.env
    told = env.get("CUDA_VISIBLE_DEVICES") or env.get("NVIDIA_VISIBLE_DEVICES") or ""
    return tuple(each for each in told.split(",") if each and each != "void")


def seat_of(device: Device) -> Seat | None:
    """The seat that this device is; None for any other, and for one whose group nobody knows."""
    if not seat_size(device.resource) or not device.group or not device.cards:
        return None
    return Seat(device.id, device.resource, device.group, device.cards)


def replaced(card: Card, there: Iterable[Card]) -> bool:
    """Whether another whole card is in the place of this one, which is not there: at its address, or by its number
    where the address of one is unknown.
    """
    for other in there:
        if other.parent or other.vendor != card.vendor or other.id == card.id:
            continue
        if card.address and other.address:
            if other.address == card.address:
                return True
        elif other.index == card.index:
            return True
    return False
