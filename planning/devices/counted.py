"""How many GPUs of which resource a node offers through DRA: what it says in ResourceSlices, under the names that
DeviceClasses give extended resources. The device plugin's stand in the node's allocatable; these do not.

Shapes are those of resource.k8s.io/v1. A class says in CEL which devices are its own; read here are conjunctions of
comparisons with a driver's name or an attribute, which is what drivers ship. Any other class counts nothing: GPUs that
berth does not see it does not promise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planning.accelerators import gpu_counts, gpu_model, memory_mib
from planning.model import NodeView
from planning.podspecs import mapping, mappings
from planning.quantities import quantity
from planning.resources import Resources

# Of a claim that the scheduler makes of a pod's extended resources: the pod's own requests count these devices.
_OF_EXTENDED = "resource.kubernetes.io/extended-resource-claim"
_KEEP_OUT = ("NoSchedule", "NoExecute")
_TERM = re.compile(
    r"""\s*device\.(?:driver|attributes\[(?P<q>["'])(?P<domain>[A-Za-z0-9./-]+)(?P=q)\]\.(?P<name>[A-Za-z0-9_]+))
    \s*==\s*(?:(?P<v>["'])(?P<text>[^"'\\]*)(?P=v)|(?P<number>-?[0-9]{1,18})|(?P<flag>true|false))\s*""",
    re.VERBOSE,
)

Value = str | int | bool
Attribute = tuple[str, str]
"""Domain and name of a device's attribute; the domain of an unqualified one is its driver. ('', 'driver') is that."""
Device = tuple[str, str, str]
"""Driver, pool and name: which device it is."""


@dataclass(frozen=True, slots=True)
class ClassView:
    """A DeviceClass that stands for an extended resource; `terms` is None where its selectors cannot be read."""

    resource: str
    terms: tuple[tuple[Attribute, Value], ...] | None


@dataclass(frozen=True, slots=True)
class SlicedDevice:
    """`usable`: no taint keeps pods away from it."""

    name: str
    attributes: Mapping[Attribute, Value]
    memory_mib: int
    usable: bool


@dataclass(frozen=True, slots=True)
class SliceView:
    """A ResourceSlice of one node's devices."""

    node: str
    driver: str
    pool: str
    generation: int
    devices: tuple[SlicedDevice, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """Devices of a resource that a node has and nobody's claim holds, and the least memory of one (0: unknown)."""

    resource: str
    count: int
    memory_mib: int


def class_view(raw: object) -> ClassView | None:
    """None for a class that is no extended resource."""
    spec = mapping(mapping(raw).get("spec"))
    resource = spec.get("extendedResourceName")
    if not isinstance(resource, str) or not resource:
        return None
    terms: list[tuple[Attribute, Value]] = []
    for selector in mappings(spec.get("selectors")):
        read = _terms(mapping(selector.get("cel")).get("expression"))
        if read is None:
            return ClassView(resource, None)
        terms += read
    return ClassView(resource, tuple(terms) or None)  # without any, every device of every driver would be its own


def slice_view(raw: object) -> SliceView | None:
    """None for devices that are of no single node."""
    spec = mapping(mapping(raw).get("spec"))
    node, driver, pool = spec.get("nodeName"), spec.get("driver"), mapping(spec.get("pool"))
    if not isinstance(node, str) or not node or not isinstance(driver, str):
        return None
    devices = tuple(_device(each, driver) for each in mappings(spec.get("devices")))
    return SliceView(node, driver, str(pool.get("name", "")), _int(pool.get("generation")), devices)


def claim_view(raw: object) -> tuple[Device, ...] | None:
    """The devices that a ResourceClaim holds beside what pods request; None where it holds none."""
    claim = mapping(raw)
    annotations = mapping(mapping(claim.get("metadata")).get("annotations"))
    if annotations.get(_OF_EXTENDED) == "true":
        return None
    devices = mapping(mapping(mapping(claim.get("status")).get("allocation")).get("devices"))
    held = (
        (str(each.get("driver", "")), str(each.get("pool", "")), str(each.get("device", "")))
        for each in mappings(devices.get("results"))
        if each.get("adminAccess") is not True
    )
    return tuple(held) or None


def counted(
    slices: Iterable[SliceView], classes: Iterable[ClassView], claims: Iterable[tuple[Device, ...]]
) -> dict[str, tuple[Counted, ...]]:
    """By node. Of a pool only the newest generation counts, as for the scheduler."""
    known = [each for each in classes if each.terms is not None]
    if not known:
        return {}
    every = list(slices)
    newest: dict[tuple[str, str, str], int] = {}
    for each in every:
        pool = (each.node, each.driver, each.pool)
        newest[pool] = max(newest.get(pool, 0), each.generation)
    taken = {device for claim in claims for device in claim}
    counts: Counter[tuple[str, str]] = Counter()
    memory: dict[tuple[str, str], int] = {}
    for each in every:
        if each.generation < newest[each.node, each.driver, each.pool]:
            continue
        for device in each.devices:
            if not device.usable or (each.driver, each.pool, device.name) in taken:
                continue
            for resource in {view.resource for view in known if _is_of(device, view)}:
                key = (each.node, resource)
                counts[key] += 1
                memory[key] = min(memory.get(key, device.memory_mib), device.memory_mib)
    found: dict[str, list[Counted]] = {}
    for (node, resource), count in sorted(counts.items()):
        found.setdefault(node, []).append(Counted(resource, count, memory[node, resource]))
    return {node: tuple(each) for node, each in found.items()}


def with_devices(node: NodeView, found: tuple[Counted, ...], gpu_resource: str) -> NodeView:
    """The node with these devices beside those of its allocatable."""
    more = dict(gpu_counts({each.resource: each.count for each in found}, gpu_resource))
    if not more:
        return node
    old = node.allocatable
    together = Counter(dict(old.gpus_by_resource()) if old.gpus else {})
    together.update(more)
    told = {each.resource: each.memory_mib for each in found}
    memory, models = dict(node.gpu_memory), dict(node.gpu_models)
    for name in more:
        resource = name or gpu_resource
        memory.setdefault(name, memory_mib(node.labels, resource) or told.get(resource, 0))
        models.setdefault(name, gpu_model(node.labels, resource))
    return replace(
        node,
        allocatable=Resources.counting(together.items(), old.cpu_milli, old.memory, old.pods),
        gaps=tuple(gap for gap in node.gaps if gap.resource not in more),
        gpu_memory=tuple((name, mib) for name, mib in memory.items() if mib),
        gpu_models=tuple((name, model) for name, model in models.items() if model),
    )


def _is_of(device: SlicedDevice, view: ClassView) -> bool:
    # A bool is an int in Python and not in CEL.
    return all(
        type(device.attributes.get(name)) is type(value) and device.attributes[name] == value
        for name, value in view.terms or ()
    )


def _terms(expression: object) -> list[tuple[Attribute, Value]] | None:
    if not isinstance(expression, str) or len(expression) > 10_240:
        return None
    terms: list[tuple[Attribute, Value]] = []
    for part in expression.split("&&"):
        term = _TERM.fullmatch(part)
        if term is None:
            return None
        name = (term["domain"], term["name"]) if term["domain"] else ("", "driver")
        if term["text"] is not None:
            terms.append((name, term["text"]))
        else:
            terms.append((name, int(term["number"]) if term["number"] else term["flag"] == "true"))
    return terms


def _device(raw: Mapping[str, Any], driver: str) -> SlicedDevice:
    attributes: dict[Attribute, Value] = {("", "driver"): driver}
    for key, value in mapping(raw.get("attributes")).items():
        domain, _, name = str(key).rpartition("/")
        told = next((each for each in mapping(value).values() if isinstance(each, str | int)), None)
        if told is not None:
            attributes[domain or driver, name] = told
    memory = mapping(mapping(raw.get("capacity")).get("memory")).get("value")
    kept_out = any(taint.get("effect") in _KEEP_OUT for taint in mappings(raw.get("taints")))
    return SlicedDevice(str(raw.get("name", "")), attributes, _mib(memory), not kept_out)


def _mib(value: object) -> int:
    try:
        return int(quantity(value) // 2**20) if isinstance(value, str) else 0
    except (ValueError, ArithmeticError):
        return 0


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
