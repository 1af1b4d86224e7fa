"""What a node says of its groups of seats, as GPUSeatGroups: for people, and for Services that lead to its seats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crds.gpuseatgroup import KIND, MOST_CHECKS, MOST_SHOWN, MOST_STAGES, GPUSeatGroupStatus
from crds.gpuseatprofile import API_VERSION
from planning.devices.report import cut
from planning.seats.orders import GroupPhase
from planning.times import timestamp


@dataclass(frozen=True, slots=True)
class SeatPicture:
    """One seat. `pod`: namespace, name and container of who holds it, None where nobody does. `port`: where the node's
    proxy takes its requests, 0 nowhere; `requests`: how many wait there. `parked_bytes`: what of its GPUs' memory is in
    the host's. `wake`: the median of its wakes in seconds, None where there was none. `parkable`: None while nobody
    tried. `message`: why it is as it is.
    """

    id: str
    phase: str
    pod: tuple[str, str, str] | None = None
    port: int = 0
    requests: int = 0
    parked_bytes: int = 0
    wake: float | None = None
    backend: str = ""
    parkable: bool | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class SwitchPicture:
    """The last switch: at `at`, from `before` to `after` ('' nobody), with the seconds of its stages."""

    at: float
    before: str
    after: str
    reason: str
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckPicture:
    """What preflight found."""

    name: str
    ok: bool
    message: str


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """A group. `since`: when its phase became what it is, in seconds of the epoch."""

    group: str
    phase: GroupPhase
    active: str = ""
    message: str = ""
    since: float = 0.0
    switches: int = 0
    seats: Sequence[SeatPicture] = ()
    last: SwitchPicture | None = None
    preflight: Sequence[CheckPicture] = ()
    simulated: bool = False


def object_name(node: str, group: str) -> str:
    """The name of the GPUSeatGroup, which must be one of Kubernetes': groups' names may have capitals."""
    return f"{node}.{group.lower()}"


def document(node: str, node_uid: str, group: str) -> dict[str, Any]:
    """The object without its status, as it is created. It goes with the Node."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": object_name(node, group), "ownerReferences": [owner]},
        "spec": {"nodeName": node, "group": group},
    }


def status(picture: GroupPicture, now: float) -> dict[str, Any]:
    """The status, valid whatever a pod or an engine says of itself: texts are cut."""
    raw: dict[str, Any] = {
        "updated": timestamp(now),
        "simulated": picture.simulated or None,
        "phase": picture.phase,
        "active": picture.active,
        "message": cut(picture.message, 512),
        "since": timestamp(picture.since) if picture.since else None,
        "requests": sum(seat.requests for seat in picture.seats),
        "held": sum(seat.pod is not None for seat in picture.seats),
        "parked": sum(seat.phase == "Parked" for seat in picture.seats),
        "parked_bytes": sum(seat.parked_bytes for seat in picture.seats),
        "switches": picture.switches,
        "last_switch": None if picture.last is None else _switch(picture.last),
        "seats": [_seat(seat) for seat in picture.seats[:MOST_SHOWN]],
        "preflight": [
            {"name": cut(each.name, 128), "ok": each.ok, "message": cut(each.message, 512)}
            for each in list({check.name: check for check in picture.preflight}.values())[:MOST_CHECKS]
        ],
    }
    model = GPUSeatGroupStatus.model_validate({key: value for key, value in raw.items() if value not in (None, "", [])})
    return model.model_dump(by_alias=True, exclude_none=True)


def _seat(seat: SeatPicture) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "id": seat.id,
        "phase": seat.phase,
        "message": cut(seat.message, 512),
        "backend": cut(seat.backend, 128),
        "parkable": seat.parkable,
        "port": seat.port or None,
        "requests": seat.requests or None,
        "parked_bytes": seat.parked_bytes or None,
        "wake_millis": None if seat.wake is None else _millis(seat.wake),
    }
    if seat.pod is not None:
        raw["held_by"] = dict(zip(("namespace", "pod", "container"), seat.pod, strict=True))
    return {key: value for key, value in raw.items() if value not in (None, "")}


def _switch(last: SwitchPicture) -> dict[str, Any]:
    stages = {cut(name, 128): _millis(seconds) for name, seconds in last.seconds.items()}
    raw: dict[str, Any] = {
        "at": timestamp(last.at),
        # A stage with a colon is a part of the one before the colon.
        "millis": sum(millis for name, millis in stages.items() if ":" not in name),
        "reason": cut(last.reason, 512),
        "stages": [{"name": name, "millis": millis} for name, millis in list(stages.items())[:MOST_STAGES]],
    }
    return raw | {key: seat for key, seat in (("before", last.before), ("after", last.after)) if seat}


def _millis(seconds: float) -> int:
    return max(0, round(seconds * 1000))
