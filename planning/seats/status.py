"""What a node says of its groups of seats, as GPUSeatGroups: for people, and for Services that lead to its seats."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from crds.gpuseatgroup import KIND, MOST_CHECKS, MOST_SHOWN, MOST_STAGES, GPUSeatGroupStatus
from crds.gpuseatprofile import API_VERSION, Rebalance, seat_resource
from planning.devices.report import cut
from planning.seats.orders import GroupPhase
from planning.seats.preflight import Check
from planning.times import timestamp

Outcome = Literal["Switched", "Kept", "Failed", "Quarantined"]
"""How a switch ended. Kept: whoever had the slot could not be parked; Failed: nobody has it; Quarantined: nobody may
have it."""

_FOUND = re.compile(r"G[0-9]+(-[0-9]+)*")  # as groups are called that a node finds by itself
_LONGEST = 190  # of a node's name in front of its group's: 253 in all


@dataclass(frozen=True, slots=True)
class SeatPicture:
    """One seat. `pod`: namespace, name and container of who holds it, None where nobody does. `port`: where the node's
    proxy takes its requests, 0 nowhere; `requests`: how many wait there. `parked_bytes`: what of its GPUs' memory is in
    the host's. `park`, `wake`: seconds that these take as measured of late, None where there was none; `expected`:
    until it serves, as whoever waits is told. `parkable`: None while nobody tried. `message`: why it is as it is;
    `error`: why it could not be parked, or lost its state. `since`: when its phase began, in seconds of the epoch, 0
    unknown. `lost`: its state is gone, and it has not served since. `uid`: of the pod. `passed_on`: where its requests
    go instead, as it moves to another seat. `busy`: the share of time in which it was asked.
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
    park: float | None = None
    expected: float | None = None
    error: str = ""
    since: float = 0.0
    lost: bool = False
    uid: str = ""
    passed_on: str = ""
    busy: float | None = None


@dataclass(frozen=True, slots=True)
class SwitchPicture:
    """The last switch: at `at`, from `before` to `after` ('' nobody), with the seconds of its stages."""

    at: float
    before: str
    after: str
    reason: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = "Switched"

    @property
    def whole(self) -> float:
        """Seconds in all. A stage with a colon is a part of the one before the colon."""
        return sum(_sane(seconds) for name, seconds in self.seconds.items() if ":" not in name)


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """A group. `since`: when its phase became what it is, and `healthy_since`: when it became well or ill, in seconds
    of the epoch. `next`: for whom the slot is cleared. `oldest`: for how long the first request that waits has waited,
    in seconds; `refused`: requests refused with 503. `proxy`: why the seat proxy does not answer, '' while it does.
    `gpus`: how many it has. `window`: seconds over which its seats' `busy` is counted. `rebalance`: whether its seats
    may be moved.
    """

    group: str
    phase: GroupPhase
    active: str = ""
    message: str = ""
    since: float = 0.0
    switches: int = 0
    seats: Sequence[SeatPicture] = ()
    last: SwitchPicture | None = None
    preflight: Sequence[Check] = ()
    simulated: bool = False
    next: str = ""
    oldest: float | None = None
    refused: int = 0
    proxy: str = ""
    healthy_since: float = 0.0
    gpus: int = 0
    window: float = 0.0
    rebalance: Rebalance | None = None


def healthy(picture: GroupPicture) -> tuple[bool, str, str]:
    """Whether it is well, why in a word, and a sentence."""
    if picture.phase == "Quarantined":
        return False, "Quarantined", picture.message or f"{picture.group} is left alone for now."
    if picture.proxy:
        return False, "ProxyAway", picture.proxy
    if picture.phase == "Active":
        return True, "Serving", f"{picture.active} serves."
    if picture.phase == "Empty":
        return True, "Empty", "Nobody has the slot."
    return True, "Switching", "The slot changes hands."


def object_name(node: str, group: str) -> str:
    """The name of the GPUSeatGroup: `<node>.<group>` in small letters, for Kubernetes has no others.

    Two groups of a node may differ in nothing else. The name belongs to one that was found (G01), and otherwise to the
    one that has small letters only; any other gets a part more. A node's name that leaves no room for its group's is
    cut, and told by the same part.
    """
    small = group.lower()
    theirs = _FOUND.fullmatch(group.upper()) is not None
    if len(node) > _LONGEST:
        return f"{node[:_LONGEST].rstrip('.-')}.{small}.{_digest(f'{node}/{group}')}"
    if group == (group.upper() if theirs else small):
        return f"{node}.{small}"
    return f"{node}.{small}.{_digest(group)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]


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
    """The status, valid whatever a pod or an engine says of itself: texts are cut, numbers that are none count as 0."""
    raw: dict[str, Any] = {
        "updated": timestamp(now),
        "simulated": picture.simulated or None,
        "resource": seat_resource(picture.gpus) if picture.gpus > 0 else None,
        "window_seconds": round(picture.window) if picture.window >= 1 else None,
        "rebalance": picture.rebalance,
        "phase": picture.phase,
        "active": cut(picture.active, 128),
        "message": cut(picture.message, 512),
        "since": timestamp(picture.since) if picture.since else None,
        "requests": _sum(seat.requests for seat in picture.seats),
        "oldest_millis": None if picture.oldest is None else _millis(picture.oldest),
        "refused": max(0, picture.refused) or None,
        "held": sum(seat.pod is not None for seat in picture.seats),
        "parked": sum(seat.phase == "Parked" for seat in picture.seats),
        "parked_bytes": _sum(seat.parked_bytes for seat in picture.seats),
        "switches": max(0, picture.switches),
        "last_switch": None if picture.last is None else _switch(picture.last),
        "seats": [_seat(seat) for seat in list({each.id: each for each in picture.seats}.values())[:MOST_SHOWN]],
        "preflight": [
            {"name": name, "ok": check.ok, "message": cut(check.told, 512)}
            for name, check in list({cut(each.name, 128): each for each in picture.preflight}.items())[:MOST_CHECKS]
        ],
        "conditions": [_condition(picture)],
    }
    model = GPUSeatGroupStatus.model_validate({key: value for key, value in raw.items() if value not in (None, "", [])})
    return model.model_dump(by_alias=True, exclude_none=True)


def _condition(picture: GroupPicture) -> dict[str, Any]:
    well, reason, message = healthy(picture)
    return {
        "type": "Healthy",
        "status": "True" if well else "False",
        "reason": reason,
        "message": cut(message, 512),
        "last_transition_time": timestamp(picture.healthy_since or picture.since),
    }


def _seat(seat: SeatPicture) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "id": cut(seat.id, 128),
        "phase": seat.phase,
        "since": timestamp(seat.since) if seat.since else None,
        "message": cut(seat.message, 512),
        "last_error": cut(seat.error, 512),
        "backend": cut(seat.backend, 128),
        "parkable": seat.parkable,
        "port": seat.port if 0 < seat.port < 65536 else None,
        "requests": max(0, seat.requests) or None,
        "busy_percent": None if seat.busy is None else round(100 * min(1.0, _sane(seat.busy))),
        "passed_on": cut(seat.passed_on, 128),
        "parked_bytes": max(0, seat.parked_bytes) or None,
        "park_millis": None if seat.park is None else _millis(seat.park),
        "wake_millis": None if seat.wake is None else _millis(seat.wake),
        "expected_millis": None if seat.expected is None else _millis(seat.expected),
    }
    if seat.pod is not None:
        raw["held_by"] = dict(zip(("namespace", "pod", "container"), seat.pod, strict=True))
    return {key: value for key, value in raw.items() if value not in (None, "")}


def _switch(last: SwitchPicture) -> dict[str, Any]:
    stages = {cut(name, 128): _millis(seconds) for name, seconds in last.seconds.items()}
    raw: dict[str, Any] = {
        "at": timestamp(last.at),
        "millis": _millis(last.whole),
        "outcome": last.outcome,
        "reason": cut(last.reason, 512),
        "stages": [{"name": name, "millis": millis} for name, millis in list(stages.items())[:MOST_STAGES]],
    }
    return raw | {key: cut(seat, 128) for key, seat in (("before", last.before), ("after", last.after)) if seat}


def _sum(numbers: Iterable[int]) -> int:
    return sum(max(0, each) for each in numbers)


def _sane(seconds: float) -> float:
    return min(max(seconds, 0.0), 1e9) if math.isfinite(seconds) else 0.0


def _millis(seconds: float) -> int:
    return round(_sane(seconds) * 1000)
