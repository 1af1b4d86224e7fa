"""`kyb.ai/prefer-group: G01` on a pod that asks for a seat: the request becomes a claim for a seat of that group, or of
any if there is none. For the admission webhook; a device plugin never learns of an annotation.

Only where the seat's resource is offered through DRA, which a DeviceClass says that names it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planning.accelerators import seat_size
from planning.podspecs import mapping, mappings

ANNOTATION = "kyb.ai/prefer-group"
LABEL = "kyb.ai/prefer-group"
"""On the templates that are made of it, by which they are found again."""
DRIVER = "devices.kyb.ai"
CLAIM = "preferred-seat"
"""The name of the claim within the pod."""

_GROUP = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,46}[A-Za-z0-9])?")
_ANY = "any"


@dataclass(frozen=True, slots=True)
class SeatClass:
    """A DeviceClass that stands for the extended resource of a seat."""

    name: str
    resource: str


@dataclass(frozen=True, slots=True)
class Preference:
    """What a pod prefers: `containers` are JSON pointers to those that ask for a seat."""

    group: str
    seat: SeatClass
    containers: tuple[str, ...]

    @property
    def template(self) -> str:
        """The name of the ResourceClaimTemplate; the same for all pods of a namespace that want the same."""
        known = hashlib.sha256(f"{self.seat.name}/{self.group}".encode()).hexdigest()[:10]
        return f"kyb-prefer-{self.group.lower()}-{known}"


def seat_class(raw: object) -> SeatClass | None:
    """None for a class of anything else."""
    whole = mapping(raw)
    resource = mapping(whole.get("spec")).get("extendedResourceName")
    name = mapping(whole.get("metadata")).get("name")
    if not isinstance(resource, str) or not isinstance(name, str) or not seat_size(resource):
        return None
    return SeatClass(name, resource)


def preferred_group(meta: Mapping[str, Any]) -> str:
    """The group that a pod of this metadata prefers; '' for none, and for what cannot be a group's name."""
    group = mapping(meta.get("annotations")).get(ANNOTATION)
    return group if isinstance(group, str) and _GROUP.fullmatch(group) else ""


def preference(pod: object, classes: Iterable[SeatClass]) -> Preference | None:
    """What the pod prefers, if that can be granted; None: it is taken as it comes.

    That is so for a group whose name cannot be one, for seats that are not offered through DRA, and where containers
    ask for several seats, which is refused later by whoever hands them out.
    """
    whole = mapping(pod)
    group = preferred_group(mapping(whole.get("metadata")))
    if not group:
        return None
    known = {each.resource: each for each in classes}
    spec = mapping(whole.get("spec"))
    if any(claim.get("name") == CLAIM for claim in mappings(spec.get("resourceClaims"))):
        return None
    found = [
        (f"/spec/{kind}/{index}", resource, amount)
        for kind in ("initContainers", "containers")
        for index, container in enumerate(mappings(spec.get(kind)))
        for resource, amount in mapping(mapping(container.get("resources")).get("limits")).items()
        if seat_size(str(resource))
    ]
    # Containers of one pod that ask for seats of their own would share the one of a claim.
    if len(found) != 1 or str(found[0][2]) != "1" or found[0][1] not in known:
        return None
    return Preference(group, known[found[0][1]], tuple(place for place, _, _ in found))


def template(wanted: Preference, namespace: str) -> dict[str, Any]:
    """The ResourceClaimTemplate (resource.k8s.io/v1) of which the pod's claim is made."""
    cel = f'device.attributes["{DRIVER}"].group == "{wanted.group}"'
    alternatives = [
        {"name": "preferred", "deviceClassName": wanted.seat.name, "selectors": [{"cel": {"expression": cel}}]},
        {"name": _ANY, "deviceClassName": wanted.seat.name},
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": wanted.template, "namespace": namespace, "labels": {LABEL: wanted.group}},
        "spec": {"spec": {"devices": {"requests": [{"name": "seat", "firstAvailable": alternatives}]}}},
    }


def patch(pod: object, wanted: Preference) -> list[dict[str, Any]]:
    """The JSON patch (RFC 6902) of the pod: the claim instead of the extended resource."""
    spec = mapping(mapping(pod).get("spec"))
    claim = {"name": CLAIM, "resourceClaimTemplateName": wanted.template}
    done = [_added("/spec/resourceClaims", claim, spec.get("resourceClaims"))]
    for place in wanted.containers:
        _, _, kind, index = place.split("/")
        resources = mapping(list(mappings(spec.get(kind)))[int(index)].get("resources"))
        for part in ("limits", "requests"):
            if wanted.seat.resource in mapping(resources.get(part)):
                key = wanted.seat.resource.replace("~", "~0").replace("/", "~1")
                done.append({"op": "remove", "path": f"{place}/resources/{part}/{key}"})
        done.append(_added(f"{place}/resources/claims", {"name": CLAIM}, resources.get("claims")))
    return done


def _added(path: str, value: Mapping[str, Any], there: object) -> dict[str, Any]:
    if isinstance(there, list) and there:
        return {"op": "add", "path": f"{path}/-", "value": value}
    return {"op": "add", "path": path, "value": [value]}
