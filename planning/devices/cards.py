"""A node's accelerators as its hardware providers report them, whoever made them: the words that all of berth's device
code shares. Providers (nodeworkers/hardware) make these values in a process of their own, so each must survive JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Vendor = Literal["nvidia", "amd", "tenstorrent"]

# How two cards are connected, best first. NVLink counts its links beside: `Link.lanes`.
Connection = Literal["nvlink", "same-board", "single-switch", "multi-switch", "host-bridge", "same-cpu", "cross-cpu"]


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator, or one MIG instance of one.

    `id` is its name for ever and on its node alone: at most 63 characters of [A-Za-z0-9._-], the same after a reboot
    and after the kernel counts cards anew. `resource` is the extended resource that it counts as. `index` is the
    kernel's number for it now (/dev/nvidia<index>, /dev/tenstorrent/<index>) and may be another tomorrow. `address` is
    its full PCI address (0000:3b:00.0), '' if unknown; `numa` None where the machine does not tell. `nodes` are the
    device nodes on the host that are this card's alone. `parent` is the card whose instance it is, '' for a whole one.
    """

    id: str
    vendor: Vendor
    product: str
    resource: str
    index: int
    address: str = ""
    numa: int | None = None
    memory_mib: int = 0
    nodes: tuple[str, ...] = ()
    arch: str = ""
    driver: str = ""
    firmware: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """How cards `a` < `b` (ids) are connected; `lanes` is the number of NVLinks between them."""

    a: str
    b: str
    connection: Connection
    lanes: int = 0


@dataclass(frozen=True, slots=True)
class Trouble:
    """What a provider saw wrong with a card in one look. `reason` is CamelCase, `message` a sentence for people with
    what to do. `sure`: one sighting is enough to call the card unhealthy; otherwise it has to be seen again.
    """

    reason: str
    message: str
    sure: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured of a card in one look; None where nobody tells. Temperature in degrees Celsius, power in watts,
    memory in use in MiB. `pids`: host processes that hold the card now.
    """

    temperature: float | None = None
    power: float | None = None
    memory_used_mib: int | None = None
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sight:
    """One look of one provider: all its cards, and of each the trouble (absent: it is well) and what was measured.

    `problem`: what it could not do as a whole, a sentence; cards may then be missing that are there. `host`: facts of
    the machine that go on the node's labels or into what containers get, such as driver and IOMMU mode.
    """

    vendor: Vendor
    cards: tuple[Card, ...] = ()
    troubles: dict[str, Trouble] = field(default_factory=dict)
    readings: dict[str, Reading] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    problem: str = ""
    host: dict[str, str] = field(default_factory=dict)
    simulated: bool = False
