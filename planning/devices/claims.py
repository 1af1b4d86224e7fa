"""What the scheduler has given to a ResourceClaim on this node, in the words of the allocation core: for DRA's kubelet
plugin, which reads the claim and hands its devices out. Shapes: status.allocation in k8s.io/api/resource/v1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from planning.devices.offers import Device, Refused
from planning.devices.slices import DRIVER, names

CDI_KIND: Final = f"{DRIVER}/claim"
"""The kind of the CDI devices that are one claim's own."""


def cdi_device(uid: str, number: int) -> str:
    """The name, within its kind, of a CDI device of a claim: of its `number`th portion."""
    return f"{uid}-{number}"


def uid_of(name: str) -> str:
    """The UID of the claim whose own a CDI device (`kind=name`) is; '' if it is none's."""
    kind, _, device = name.partition("=")
    uid, _, number = device.rpartition("-")
    return uid if kind == CDI_KIND and number.isdecimal() else ""


@dataclass(frozen=True, slots=True)
class Result:
    """One device that was given to one request of a claim. `device` is its name in DRA; `request` is without the part
    behind '/', which names the alternative that was chosen. `admin`: for looking at it, whoever else has it.
    """

    request: str
    pool: str
    device: str
    admin: bool = False
    share: str = ""


@dataclass(frozen=True, slots=True)
class Portion:
    """What is handed out in one piece: the devices of one resource that one request of a claim got."""

    request: str
    resource: str
    ids: tuple[str, ...]
    results: tuple[Result, ...]
    admin: bool = False


def results(claim: Mapping[str, Any], uid: str, node: str) -> tuple[Result, ...]:
    """What a claim got of this driver's devices on this node, if it is the claim of that UID. Raises Refused."""
    metadata = _mapping(claim.get("metadata"))
    called = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
    if metadata.get("uid") != uid:
        raise Refused(
            f"The ResourceClaim {called} is another one by now: its UID is {metadata.get('uid')}, and the pod was "
            f"given the one with {uid}. Delete the pod; whatever made it makes it anew."
        )
    allocation = _mapping(_mapping(claim.get("status")).get("allocation"))
    devices = _mapping(allocation.get("devices"))
    if not devices:
        raise Refused(f"The ResourceClaim {called} has no devices: the scheduler has not allocated any to it.")
    for each in _mappings(devices.get("config")):
        if _mapping(each.get("opaque")).get("driver") == DRIVER:
            raise Refused(
                f"The ResourceClaim {called} or its DeviceClass has opaque parameters for {DRIVER}, which takes none. "
                "Remove them."
            )
    found = []
    for each in _mappings(devices.get("results")):
        if each.get("driver") != DRIVER:
            continue
        if each.get("pool") != node:
            raise Refused(
                f"The ResourceClaim {called} was given the device {each.get('device')} of {each.get('pool')}, and this "
                f"is the node {node}. Delete the pod, so that the scheduler chooses anew."
            )
        found.append(
            Result(
                request=str(each.get("request", "")).partition("/")[0],
                pool=node,
                device=str(each.get("device", "")),
                admin=each.get("adminAccess") is True,
                share=str(each.get("shareID") or ""),
            )
        )
    if not found:
        raise Refused(f"The ResourceClaim {called} has no device of {DRIVER}.")
    return tuple(found)


def portions(given: Sequence[Result], offered: Mapping[str, Sequence[Device]]) -> tuple[Portion, ...]:
    """The same by request and resource, with the ids of the devices, in the order of the results. Raises Refused for a
    device that is not there (any more).
    """
    everything = [device for devices in offered.values() for device in devices]
    called = names(device.id for device in everything)
    by_name = {called[device.id]: device for device in everything}
    parts: dict[tuple[str, str, bool], list[tuple[str, Result]]] = {}
    for result in given:
        device = by_name.get(result.device)
        if device is None:
            raise Refused(
                f"The device {result.device} is not on the node {result.pool} any more. Delete the pod, so that the "
                "scheduler chooses anew."
            )
        parts.setdefault((result.request, device.resource, result.admin), []).append((device.id, result))
    return tuple(
        Portion(request, resource, tuple(each for each, _ in part), tuple(result for _, result in part), admin)
        for (request, resource, admin), part in parts.items()
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
