"""Pods as the fake kubelet has them, and what its containers were given: the device manager's memory of allocations.

pkg/kubelet/cm/devicemanager/pod_devices.go of Kubernetes 1.36.3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeworkers.rpc import deviceplugin_pb2
from tests.fake_kubelet.checkpoint import Allocated

WITHOUT_NUMA = -1
"""The NUMA node under which the kubelet keeps devices that have none."""


@dataclass
class Given:
    """What the plugins' responses add up to for one container, as the runtime gets it."""

    env: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """By path in the container: path on the host, and whether it is read-only."""
    nodes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By path in the container: path on the host, and permissions."""
    annotations: dict[str, str] = field(default_factory=dict)
    cdi: list[str] = field(default_factory=list)


@dataclass
class Container:
    """`wants` by resource. `devices` by resource, as allocated; `given` at the last start; `error`: why it did not
    start. An init container ends as soon as it has started.
    """

    name: str
    wants: Mapping[str, int]
    init: bool = False
    running: bool = False
    starts: int = 0
    error: str = ""
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    given: Given = field(default_factory=Given)


@dataclass
class Pod:
    """`phase`: Pending, Running, Failed or Deleted. A pod that fails at admission has reason UnexpectedAdmissionError
    and stays failed.
    """

    uid: str
    name: str
    namespace: str
    containers: list[Container]
    phase: str = "Pending"
    reason: str = ""
    message: str = ""

    @property
    def active(self) -> bool:
        """Does it hold its devices?"""
        return self.phase in ("Pending", "Running")

    def container(self, name: str) -> Container:
        """By name: c0, c1, ..., and i0, i1, ... for init containers."""
        return next(each for each in self.containers if each.name == name)

    def devices(self, resource: str) -> set[str]:
        """What its containers have of a resource."""
        return {device for container in self.containers for device in container.devices.get(resource, ())}


Key = tuple[str, str, str]  # pod uid, container, resource


class Allocations:
    """Which container has which devices, with the plugin's response."""

    def __init__(self) -> None:
        self.entries: dict[Key, Allocated] = {}

    def insert(self, entry: Allocated) -> None:
        """A container has devices."""
        self.entries[entry.pod_uid, entry.container, entry.resource] = entry

    def of(self, uid: str, container: str, resource: str) -> set[str] | None:
        """The devices of a container; None if nothing was allocated."""
        entry = self.entries.get((uid, container, resource))
        return None if entry is None else ids(entry)

    def of_container(self, uid: str, container: str) -> dict[str, Allocated]:
        """By resource."""
        return {key[2]: entry for key, entry in self.entries.items() if key[:2] == (uid, container)}

    def held(self) -> dict[str, set[str]]:
        """All devices in use, by resource."""
        held: dict[str, set[str]] = {}
        for entry in self.entries.values():
            held.setdefault(entry.resource, set()).update(ids(entry))
        return held

    def keep(self, uids: Collection[str]) -> bool:
        """Forgets the other pods; were there any?"""
        gone = [key for key in self.entries if key[0] not in uids]
        for key in gone:
            del self.entries[key]
        return bool(gone)

    def given(self, uid: str, container: str) -> Given:
        """What the container gets, from the responses that were kept. The first of two that disagree wins."""
        given = Given()
        for entry in self.of_container(uid, container).values():
            response = deviceplugin_pb2.ContainerAllocateResponse.FromString(entry.response)
            given.env = {**response.envs, **given.env}
            given.annotations = {**response.annotations, **given.annotations}
            for mount in response.mounts:
                given.mounts.setdefault(mount.container_path, (mount.host_path, mount.read_only))
            for node in response.devices:
                given.nodes.setdefault(node.container_path, (node.host_path, node.permissions))
            given.cdi += [each.name for each in response.cdi_devices if each.name not in given.cdi]
        return given


def ids(entry: Allocated) -> set[str]:
    """The devices of an entry, on whatever NUMA node."""
    return {device for devices in entry.devices.values() for device in devices}


def by_numa(chosen: Collection[str], known: Mapping[str, Any]) -> dict[int, list[str]]:
    """Devices under each of their NUMA nodes. `known`: the plugin's Device of each id."""
    nodes: dict[int, list[str]] = {}
    for device in chosen:
        on = [node.ID for node in known[device].topology.nodes] if device in known else []
        for node in on or [WITHOUT_NUMA]:
            nodes.setdefault(node, []).append(device)
    return nodes
