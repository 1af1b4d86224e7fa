"""What a container gets with the devices it was given: variables, mounts, device nodes. For the allocation core.

The kubelet keeps the answer and uses it at every start of the container, so all of it names things that stay: CDI
names, links by id, PCI addresses. Sources: TT_VISIBLE_DEVICES of tenstorrent/tt-umd, which takes full PCI addresses;
CUDA_VISIBLE_DEVICES of the CUDA programming guide, which takes UUIDs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planning.accelerators import seat_size
from planning.devices import cdi
from planning.devices.cards import Card
from planning.devices.cdi import DriverFiles
from planning.devices.offers import Device, Injection, Mount, Node, Refused

HUGEPAGES = "/dev/hugepages-1G"
# The driver allocates so many pages of 1 GiB for each chip where no IOMMU translates.
PAGES_PER_CARD = 4


def allocated(
    asked: Sequence[str],
    resource: str,
    devices: Mapping[str, Device],
    cards: Mapping[str, Card],
    host: Mapping[str, str],
    files: DriverFiles,
    *,
    with_cdi: bool,
) -> Injection:
    """What a container gets with these devices of a resource. `devices` are those that the node has, by id. Raises
    Refused.
    """
    if not asked:
        raise Refused(f"No device of {resource} was asked for.")
    chosen = [_one(each, resource, devices) for each in dict.fromkeys(asked)]
    if seat_size(resource) and len(chosen) > 1:
        raise Refused(
            f"A container has one seat, and {len(chosen)} of {resource} were asked for: give each model server a "
            "container of its own."
        )
    mine = [cards[card] for card in dict.fromkeys(card for device in chosen for card in device.cards) if card in cards]
    if len(mine) < len({card for device in chosen for card in device.cards}):
        raise Refused(f"The cards of {', '.join(each.id for each in chosen)} are not on this node any more.")
    if lacking := next((card.id for card in mine if not card.nodes), ""):
        raise Refused(
            f"{lacking} has no device node on this node, and a container could not open it. Delete the pod, so that it "
            "moves; on the node, look whether the driver and udev have made one below /dev."
        )
    vendors = {card.vendor for card in mine}
    if vendors == {"tenstorrent"}:
        found = _tenstorrent(mine, host, with_cdi)
    elif vendors == {"nvidia"}:
        found = _nvidia(mine, cards, files, with_cdi)
    else:
        raise Refused(
            f"What a container needs for {resource} of {' and '.join(sorted(vendors)) or 'nobody'} is unknown."
        )
    return _seat(found, chosen[0], mine) if chosen[0].group else found


def lasting(host: Mapping[str, str]) -> dict[str, str]:
    """Of a machine's facts those by which it is decided what containers get, and which a machine that runs keeps: while
    nobody tells them they are as they were.
    """
    return {key: value for key, value in host.items() if key.startswith("iommu/") or key == "hugepages-1g/total"}


def pages_wanted(cards: Sequence[Card], host: Mapping[str, str]) -> int:
    """How many pages of 1 GiB these cards need, 0 where an IOMMU translates for them."""
    return PAGES_PER_CARD * sum(_without_iommu(card, host) for card in cards)


def pages_lacking(cards: Sequence[Card], host: Mapping[str, str]) -> str:
    """A sentence where the machine has fewer free than its cards need; '' if there are enough, or nobody tells."""
    wanted, free = pages_wanted(cards, host), host.get("hugepages-1g/free", "")
    if not wanted or not free.isdecimal() or int(free) >= wanted:
        return ""
    return (
        f"Tenstorrent's cards need {wanted} free pages of 1 GiB here, for no IOMMU translates for them, and {free} are "
        "free: set hugepagesz=1G hugepages=N on the kernel's command line, or turn the IOMMU's translation on."
    )


def _one(each: str, resource: str, devices: Mapping[str, Device]) -> Device:
    device = devices.get(each)
    if device is None or device.resource != resource:
        raise Refused(f"{each} is no {resource} of this node. Delete the pod, so that it is placed anew.")
    if not device.healthy:
        raise Refused(f"{each} cannot be had ({device.reason}): {device.message} Delete the pod, so that it moves.")
    return device


def _tenstorrent(mine: Sequence[Card], host: Mapping[str, str], with_cdi: bool) -> Injection:
    addresses = [card.address for card in mine]
    # A part of an address would match others, and an index counts what the container sees.
    env = {"TT_VISIBLE_DEVICES": ",".join(sorted(addresses))} if all(addresses) else {}
    # Where no pages are set aside there is nothing to mount, and a mount of nothing keeps a container from starting.
    pages = pages_wanted(mine, host) and host.get("hugepages-1g/total") != "0"
    mounts = (Mount(HUGEPAGES, HUGEPAGES, read_only=False),) if pages else ()
    if with_cdi:
        return Injection(env, mounts, cdi=tuple(cdi.name(card.vendor, card.id) for card in mine))
    nodes = tuple(Node(path, f"/dev/tenstorrent/{card.index}") for card in mine for path in card.nodes[:1])
    return Injection(env, mounts, nodes)


def _nvidia(mine: Sequence[Card], cards: Mapping[str, Card], files: DriverFiles, with_cdi: bool) -> Injection:
    if with_cdi:
        return Injection({"NVIDIA_VISIBLE_DEVICES": "void"}, cdi=tuple(cdi.name(card.vendor, card.id) for card in mine))
    # NVIDIA's own runtime brings the libraries, where it is there.
    env = {"NVIDIA_VISIBLE_DEVICES": ",".join(card.id for card in mine)}
    own = [pair for card in mine for pair in cdi.device_nodes(card, cards)]
    shared = [(path, cdi.inside(path)) for path in files.nodes]
    nodes = tuple(Node(host, path) for host, path in dict.fromkeys([*own, *shared]))
    mounts = tuple(Mount(host, path) for host, path in files.libraries)
    return Injection(env, mounts, nodes)


def _seat(found: Injection, seat: Device, mine: Sequence[Card]) -> Injection:
    indices = sorted(card.index for card in mine)
    env = {
        **found.env,
        "CUDA_VISIBLE_DEVICES": ",".join(card.id for card in sorted(mine, key=lambda card: card.index)),
        "KYB_GPU_GROUP": seat.group,
        "KYB_GPU_INDICES": ",".join(map(str, indices)),
        "KYB_GPU_SEAT": seat.id,
    }
    return Injection(env, found.mounts, found.nodes, found.cdi, found.annotations)


def _without_iommu(card: Card, host: Mapping[str, str]) -> bool:
    return card.vendor == "tenstorrent" and host.get(f"iommu/{card.id}") != "translated"
