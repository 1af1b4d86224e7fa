"""What a node tells the scheduler of its devices (resource.k8s.io/v1): which ResourceSlices there are to be, and the
least that has to be written so that there are. For DRA's publisher (nodeworkers/dra).

All devices of a node are one pool, named after it, so that a device keeps its identity (driver, pool, name) whichever
slice it stands in. Limits are those of k8s.io/api/resource/v1 1.36.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from planning.devices.cards import Card
from planning.devices.offers import Device

DRIVER: Final = "devices.kyb.ai"
"""The DRA driver's name, and the domain of its attributes. Not a vendor's: their own drivers may stand beside it."""

UNHEALTHY: Final = f"{DRIVER}/unhealthy"
"""The key of the taint of a device that is not well; its value is the reason."""

PER_SLICE: Final = 128
PER_SLICE_WITH_TAINTS: Final = 64
"""Devices in one slice, and in one of which any device may have a taint."""

_TEXT: Final = 64  # bytes of a string attribute
_LABEL: Final = 63  # characters of a device's name and of a taint's value
_NAME: Final = 253  # characters of an object's name
_NAMED = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_UNITS: Final = ("Mi", "Gi", "Ti", "Pi", "Ei")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """What is kept in mind of a slice that the API server has. `digest` is of everything but its pool; `since` has by
    device and taint's value when the server first saw that taint.
    """

    name: str
    version: int
    generation: int
    count: int
    digest: str
    since: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Changes:
    """What makes the slices be as wanted, in this order. Updates are bodies of a JSON merge patch that is good for the
    version it was made for and no other.
    """

    delete: tuple[Stored, ...] = ()
    update: tuple[Object, ...] = ()
    create: tuple[Object, ...] = ()


def names(ids: Iterable[str]) -> dict[str, str]:
    """The name in DRA (a DNS label of at most 63 characters) of each device id; no two have the same.

    An id that is a label is its own name, capitals become small, what a label may not have becomes '-'. Only where two
    ids would meet so do those that are no labels get a hash behind it: names never change for another order.
    """
    distinct = set(ids)
    slugs = {each: re.sub(r"[^a-z0-9-]", "-", each.lower())[:_LABEL].strip("-") for each in distinct}
    crowd: dict[str, int] = {}
    for slug in slugs.values():
        crowd[slug] = crowd.get(slug, 0) + 1
    result = {}
    for each in sorted(distinct):
        slug = slugs[each]
        own = slug == each or (crowd[slug] == 1 and _NAMED.fullmatch(slug) is not None)
        result[each] = slug if own else _hashed(slug, each, _LABEL).lstrip("-")
    return result


def slices(
    node: str,
    offered: Mapping[str, Sequence[Device]],
    cards: Mapping[str, Card],
    *,
    taints: bool = True,
    roots: Mapping[str, str] | None = None,
    owner: str = "",
    simulated: bool = False,
) -> list[Object]:
    """The ResourceSlices of a node, without their pool's generation (see `changes`); none where there are no devices.

    `taints`: whether the API server keeps a device's taints. Where it does, a device that is not well has one; where
    not, it is left out. Either way no other device moves to another slice, so that one card's trouble is one write.
    `cards` by id; `roots` by card id: the PCIe root complex (pci0000:3a). `owner` is the UID of the Node object, with
    which the slices go. `simulated` devices have an attribute of that name; others have none.
    """
    everything = [device for resource in sorted(offered) for device in sorted(offered[resource], key=_by_id)]
    named = names(device.id for device in everything)
    size = PER_SLICE_WITH_TAINTS if taints else PER_SLICE
    chunks = [everything[start : start + size] for start in range(0, len(everything), size)]
    result: list[Object] = []
    for index, chunk in enumerate(chunks):
        devices = [
            _device(named[device.id], device, cards, roots or {}) for device in chunk if taints or device.healthy
        ]
        for device in devices if simulated else ():
            device["attributes"]["simulated"] = {"bool": True}
        metadata: Object = {"name": _slice_name(node, index)}
        if owner:
            reference = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": owner, "controller": True}
            metadata["ownerReferences"] = [reference]
        pool = {"name": node, "resourceSliceCount": len(chunks)}
        result.append(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": metadata,
                "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
            }
        )
    return result


def stored(body: Mapping[str, Any]) -> Stored:
    """What is kept in mind of a slice as the API server tells it."""
    metadata, spec = body["metadata"], body["spec"]
    since = {
        (device["name"], taint.get("value", "")): taint["timeAdded"]
        for device in spec.get("devices") or ()
        for taint in device.get("taints") or ()
        if taint.get("timeAdded")
    }
    return Stored(
        name=metadata["name"],
        version=int(metadata["resourceVersion"]),
        generation=int(spec["pool"].get("generation", 0)),
        count=int(spec["pool"]["resourceSliceCount"]),
        digest=_digest(body),
        since=since,
    )


def changes(wanted: Sequence[Object], there: Collection[Stored]) -> Changes:
    """From the slices that are there to those wanted.

    Whoever reads slices uses those of a pool's highest generation alone, and may wait until they are as many as each of
    them says. So everything gets a new generation, unless a single write does it, which nobody can see by half; that is
    how k8s.io/dynamic-resource-allocation does it as well.
    """
    known = {each.name: each for each in there}
    generation = max((each.generation for each in there), default=0)
    gone = tuple(known[name] for name in sorted(known.keys() - {body["metadata"]["name"] for body in wanted}))
    new = [body for body in wanted if body["metadata"]["name"] not in known]
    old = [(body, known[body["metadata"]["name"]]) for body in wanted if body["metadata"]["name"] in known]
    changed = [(body, at) for body, at in old if not _same(body, at, generation)]
    if new or len(changed) > 1:
        generation, changed = generation + 1, old
    return Changes(
        delete=gone,
        update=tuple(_patch(body, at, generation) for body, at in changed),
        create=tuple(_of_generation(body, generation) for body in new),
    )


def keeps_taints(answer: Mapping[str, Any]) -> bool:
    """Whether an API server that was sent `probe` keeps taints: one with that feature off drops them in silence."""
    return any(device.get("taints") for device in (answer.get("spec") or {}).get("devices") or ())


def probe(node: str) -> Object:
    """A slice to be created for show only (dry run), with a taint."""
    ill = Device("probe", "", (), healthy=False, reason="Probe")
    (body,) = slices(node, {"": [ill]}, {})
    body["metadata"]["name"] = _hashed(f"{node}-{DRIVER}", "probe", _NAME)
    return _of_generation(body, 1)


def _by_id(device: Device) -> str:
    return device.id


def _hashed(text: str, whole: str, limit: int) -> str:
    """A name for `whole` that begins with `text` and has at most `limit` characters."""
    tail = hashlib.sha256(whole.encode()).hexdigest()[:10]
    return f"{text[: limit - 11].rstrip('-.')}-{tail}"


def _slice_name(node: str, index: int) -> str:
    name = f"{node}-{DRIVER}-{index}"
    return name if len(name) <= _NAME else _hashed(node, name, _NAME)


def _device(name: str, device: Device, cards: Mapping[str, Card], roots: Mapping[str, str]) -> Object:
    """resource.k8s.io/v1 Device. What a device's cards do not have in common is not told of it."""
    held = [cards[each] for each in device.cards if each in cards]
    texts = {
        "resource": device.resource,
        "type": device.resource.rpartition("/")[2],
        "id": device.id,
        "group": device.group,
        "vendor": _common(card.vendor for card in held),
        "product": _common(card.product for card in held),
        "arch": _common(card.arch for card in held),
        "driverVersion": _common(card.driver for card in held),
        "firmware": _common(card.firmware for card in held),
        "resource.kubernetes.io/pcieRoot": _common(roots.get(card.id, "") for card in held),
    }
    attributes: Object = {"cards": {"int": len(device.cards)}}
    if len(held) == 1 == len(device.cards):
        (card,) = held
        texts["parent"] = card.parent
        texts["uuid"] = card.id if card.vendor == "nvidia" else ""
        texts["asicID"] = card.id.removeprefix("tt-") if card.id.startswith("tt-") else ""
        texts["resource.kubernetes.io/pciBusID"] = card.address if _ADDRESS.fullmatch(card.address) else ""
        attributes["index"] = {"int": card.index}
    if len(device.numa) == 1:
        attributes["numa"] = {"int": device.numa[0]}
    attributes |= {key: {"string": _clipped(text)} for key, text in texts.items() if text}
    result: Object = {"name": name, "attributes": attributes}
    memory = sum(card.memory_mib for card in held)
    if memory > 0:
        result["capacity"] = {"memory": {"value": _quantity(memory)}}
    if not device.healthy:
        result["taints"] = [{"key": UNHEALTHY, "value": _label(device.reason), "effect": "NoSchedule"}]
    return result


def _common(values: Iterable[str]) -> str:
    """The one value that all have; '' if there is none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else ""


def _clipped(text: str) -> str:
    return text.encode()[:_TEXT].decode("utf-8", "ignore")


def _label(reason: str) -> str:
    """A label's value of what should be CamelCase already."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", reason)[:_LABEL].strip("-_.") or "Unhealthy"


def _quantity(mebibytes: int) -> str:
    """In the API server's own way of writing it, so that what comes back is what was sent."""
    unit = 0
    while mebibytes % 1024 == 0 and unit < len(_UNITS) - 1:
        mebibytes, unit = mebibytes // 1024, unit + 1
    return f"{mebibytes}{_UNITS[unit]}"


def _digest(body: Mapping[str, Any]) -> str:
    """Of what a slice says and whose it is; not of its pool, nor of what the API server adds."""
    owners = [each.get("uid") for each in body["metadata"].get("ownerReferences") or ()]
    devices = []
    for device in body["spec"].get("devices") or ():
        told = [
            {key: value for key, value in taint.items() if key != "timeAdded"} for taint in device.get("taints") or ()
        ]
        devices.append({**device, "taints": told})
    text = json.dumps([owners, devices], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _same(body: Object, at: Stored, generation: int) -> bool:
    count = body["spec"]["pool"]["resourceSliceCount"]
    return (at.generation, at.count) == (generation, count) and at.digest == _digest(body)


def _of_generation(body: Object, generation: int) -> Object:
    spec = body["spec"]
    return {**body, "spec": {**spec, "pool": {**spec["pool"], "generation": generation}}}


def _patch(body: Object, at: Stored, generation: int) -> Object:
    metadata = {"resourceVersion": str(at.version), "ownerReferences": body["metadata"].get("ownerReferences", [])}
    devices = [_with_times(device, at) for device in body["spec"]["devices"]]
    pool = {**body["spec"]["pool"], "generation": generation}
    return {"metadata": {"name": at.name, **metadata}, "spec": {"pool": pool, "devices": devices}}


def _with_times(device: Object, at: Stored) -> Object:
    """A taint that was there before keeps the time at which it came: the API server would take now."""
    if "taints" not in device:
        return device
    taints = []
    for taint in device["taints"]:
        time = at.since.get((device["name"], taint["value"]))
        taints.append({**taint, "timeAdded": time} if time else taint)
    return {**device, "taints": taints}
