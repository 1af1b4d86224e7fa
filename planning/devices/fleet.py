"""What the control plane makes of all nodes' NodeDevices: each GPUSeatProfile's verdicts, and which labels a node may
have itself given. For the activity that writes statuses and labels.

A node is believed about its own devices and about nothing else: what it says names no other node, and of the labels it
asks for only those count that tell of accelerators. Here it is found, too, which pods would rather have another seat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crds.gpuseatprofile import MOST_NAME, MOST_SEATS
from planning.accelerators import seat_size
from planning.conditions import conditions
from planning.devices.labels import admitted
from planning.devices.seat_profiles import SeatProfileView, chosen, seat_profile_view
from planning.devices.seat_status import Verdict, reported
from planning.model import PodView
from planning.podspecs import mapping, mappings

_SEAT = re.compile(rf"kyb-([A-Za-z0-9-]{{1,{MOST_NAME}}})-s([1-9][0-9]{{0,3}})")


@dataclass(frozen=True, slots=True)
class HeldSeat:
    """A seat that a pod holds, by the word of its node."""

    id: str
    group: str
    namespace: str
    pod: str


@dataclass(frozen=True, slots=True)
class NodeDevicesView:
    """What is kept of a NodeDevices. `labels`: None where its node does not say which."""

    node: str
    seats: Mapping[str, Any]
    labels: Mapping[str, str] | None
    held: tuple[HeldSeat, ...] = ()


@dataclass(frozen=True, slots=True)
class SeatStanding:
    """A GPUSeatProfile and what its status shows."""

    view: SeatProfileView
    status: Mapping[str, Any]
    resource_version: int


def node_devices_view(raw: Mapping[str, Any]) -> NodeDevicesView:
    """Raises where it lacks what every object has."""
    status = mapping(raw.get("status"))
    labels = status.get("labels")
    return NodeDevicesView(
        str(raw["metadata"]["name"]),
        mapping(status.get("seats")),
        admitted(labels) if isinstance(labels, Mapping) else None,
        held_seats(raw),
    )


def held_seats(raw: Mapping[str, Any]) -> tuple[HeldSeat, ...]:
    """Of a NodeDevices. What is not named as a seat of its group is none: a node could make up any number of them."""
    found = []
    for device in mappings(mapping(raw.get("status")).get("devices")):
        holder = mapping(device.get("heldBy"))
        words = device.get("id"), device.get("group"), holder.get("namespace"), holder.get("pod")
        told = [each for each in words if isinstance(each, str) and each]
        if len(told) == len(words) and seat_size(str(device.get("resource"))):
            seat = HeldSeat(*told)
            if _of_its_group(seat):
                found.append(seat)
    return tuple(found)


def passed_over(nodes: Iterable[NodeDevicesView], pods: Iterable[PodView]) -> list[tuple[PodView, HeldSeat]]:
    """The pods that hold a seat of another group than they prefer, each once, with the first such seat. A node is
    believed about pods that it runs.
    """
    prefer = {(pod.node, pod.namespace, pod.name): pod for pod in pods if pod.prefers}
    if not prefer:
        return []
    found: dict[str, tuple[PodView, HeldSeat]] = {}
    for view in nodes:
        for seat in view.held:
            pod = prefer.get((view.node, seat.namespace, seat.pod))
            if pod is not None and pod.prefers != seat.group:
                found.setdefault(pod.uid, (pod, seat))
    return list(found.values())


def seat_standing(raw: Mapping[str, Any]) -> SeatStanding:
    """Raises where it lacks what every object has."""
    version = int(raw["metadata"].get("resourceVersion") or 0)
    return SeatStanding(seat_profile_view(raw), mapping(raw.get("status")), version)


def fleet_verdicts(
    profiles: Sequence[SeatProfileView], nodes: Iterable[NodeDevicesView], labels: Mapping[str, Mapping[str, str]]
) -> list[Verdict]:
    """What all nodes make of all GPUSeatProfiles. `labels`: of each node that there is. Only nodes that say something
    of their devices count: where berth's process does not run, nobody is waited for. One that follows a file follows no
    GPUSeatProfile.
    """
    found: list[Verdict] = []
    for node in nodes:
        mine = labels.get(node.node)
        if mine is not None and not _by_file(node.seats):
            found += reported(node.node, chosen(profiles, mine), node.seats)
    return found


def news(before: Mapping[str, Any], due: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The conditions that are worth an Event: that it is refused, or why now, and that all of it is served."""
    shown = {each.get("type"): (each.get("status"), each.get("reason")) for each in conditions(before)}
    return [
        each
        for each in conditions(due)
        if each["status"] == "True" and shown.get(each["type"]) != (each["status"], each["reason"])
    ]


def _of_its_group(seat: HeldSeat) -> bool:
    named = _SEAT.fullmatch(seat.id)
    return named is not None and named[1] == seat.group and int(named[2]) <= MOST_SEATS


def _by_file(seats: Mapping[str, Any]) -> bool:
    return str(seats.get("source") or "").startswith("the file ")
