"""What a node offers to the kubelet, whichever front end carries it: devices by resource, and what a container gets.

The words between the allocation core (nodeworkers/devices) and its two front ends, the device plugin and DRA.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """What can be handed out under one name: a card, a replica of a shared one, or a seat on a group of cards.

    `id` is unique on the node over all resources and at most 63 characters. `cards` are the ids of the cards that it
    stands on, and it is unhealthy when one of them is: `reason` (CamelCase) and `message` then say which and why.
    `numa` are the NUMA nodes of its cards, () where unknown. `group` is a seat's group.
    """

    id: str
    resource: str
    cards: tuple[str, ...]
    healthy: bool = True
    reason: str = ""
    message: str = ""
    numa: tuple[int, ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host that a container sees."""

    host: str
    container: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """A device node of the host in a container; `permissions` of r, w and m."""

    host: str
    container: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Injection:
    """What a container gets with its devices. It is kept by the kubelet and used again at each restart of the
    container, so nothing in it may change its meaning: CDI names (fully qualified) and by-id paths, never numbers.
    """

    env: dict[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[Node, ...] = ()
    cdi: tuple[str, ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """Devices that cannot be had. The text is a sentence for the pod's owner: which, why, what to do. The kubelet fails
    the pod with it, for good.
    """


class Held(Refused):
    """Devices that somebody else has. By DRA that may pass in a moment: another claim gets them as soon as a pod is
    deleted, and the kubelet gives the pod's claim back when its containers have ended.
    """
