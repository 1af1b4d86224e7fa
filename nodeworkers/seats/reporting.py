"""What a node's process tells people of its groups of seats: GPUSeatGroups, Events, and what metrics read.

Looks once a second at what is known already and asks nobody but the seat proxy. Nothing that serves or switches waits
for it: what the API server does not take is written once it does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from crds.gpuseatprofile import Rebalance
from kube.client import KubeClient
from kube.errors import KubeError, NotFound
from kube.events import EventRecorder
from kube.resources import GPUSEATGROUPS, ObjectRef
from nodeworkers.own_object import OwnObject
from nodeworkers.seats import metrics
from nodeworkers.seats.proxy_words import ProxyError, SeatMetrics, Traffic
from nodeworkers.seats.records import SeatRecord
from nodeworkers.seats.slots import Slot
from nodeworkers.seats.switching import Cleared, Filled
from nodeworkers.seats.tenants import Tenant
from nodeworkers.seats.world import SeatLook
from planning.seats.events import Pace, Told, news
from planning.seats.preflight import Check
from planning.seats.status import (
    GroupPicture,
    Outcome,
    SeatPicture,
    SwitchPicture,
    document,
    healthy,
    object_name,
    status,
)

PAUSE = 1.0  # seconds between looks
PROXY_PAUSE = 5.0  # seconds between questions to the proxy
GAP = 3.0  # seconds between two writes of a group that does nothing but switch
REFRESH = 30.0  # seconds after which numbers that change all the time are written anew
_MOST_PAUSE = 60.0  # until leftovers are looked for again, while the API server is away
_IN_SLOT = {
    "Starting": "Starting", "Active": "Active", "Draining": "Draining", "Parking": "Parking", "Restoring": "Waking",
    "VerifyServing": "Waking",
}  # fmt: skip
_UNDER_WAY = frozenset({"Starting", "Draining", "Parking", "VerifyFree", "Restoring", "VerifyServing"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the node's process knows of one group now, from memory.

    seats: who holds each, None for nobody; phases: where planning has each (`planning.seats.group.Phase`); looks: as
    the hardware had them last; records, backends (by name), traffic: by seat, of those of which something is known;
    waits: seconds until each is expected to serve, as whoever waits is told; last: the last switch (`SwitchLog`);
    notes: what a seat's owner should know of what the pod says, by seat; busy: the share of time in which each was
    asked, of the last `window` seconds; gpus: how many the group has; rebalance: whether its seats may be moved.
    """

    slot: Slot
    seats: Mapping[str, Tenant | None]
    phases: Mapping[str, str]
    looks: Mapping[str, SeatLook] = field(default_factory=dict)
    records: Mapping[str, SeatRecord] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    last: SwitchPicture | None = None
    preflight: Sequence[Check] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
    busy: Mapping[str, float] = field(default_factory=dict)
    gpus: int = 0
    window: float = 0.0
    rebalance: Rebalance | None = None


class Proxy(Protocol):
    """What is asked of the seat proxy (`ProxyControl`). Raises ProxyError."""

    async def metrics(self) -> dict[str, SeatMetrics]:
        """Counters of all seats by name."""


def picture(facts: GroupFacts, *, refused: int = 0, proxy: str = "") -> GroupPicture:
    """The group as people see it. `proxy`: why the seat proxy does not answer, '' while it does."""
    slot = facts.slot
    waiting = [each.oldest for each in facts.traffic.values() if each.held and each.oldest is not None]
    return GroupPicture(
        group=slot.group,
        phase=slot.phase,
        active=slot.seat,
        message=slot.reason,
        since=slot.since,
        switches=slot.switches,
        seats=[_seat(facts, id) for id in facts.seats],
        last=facts.last,
        preflight=facts.preflight,
        simulated=facts.simulated,
        gpus=facts.gpus,
        window=facts.window,
        rebalance=facts.rebalance,
        next=slot.next,
        oldest=max(waiting, default=None),
        refused=refused,
        proxy=proxy,
    )


def _seat(facts: GroupFacts, id: str) -> SeatPicture:
    tenant = facts.seats[id]
    record, traffic, look = facts.records.get(id), facts.traffic.get(id), facts.looks.get(id, SeatLook("Absent"))
    if tenant is None:
        return SeatPicture(id, "Absent")
    known = record.known if record is not None and record.holder == tenant.uid else None
    return SeatPicture(
        id=id,
        phase=_phase(facts, id, look),
        pod=(tenant.namespace, tenant.pod, tenant.container),
        port=record.port if record is not None and tenant.settings.port else 0,
        requests=traffic.held if traffic is not None else 0,
        busy=facts.busy.get(id),
        parked_bytes=known.host_bytes if known is not None and look.state == "Parked" else 0,
        wake=known.wake if known is not None else None,
        backend=facts.backends.get(id, ""),
        parkable=known.parkable if known is not None else None,
        message=look.told or tenant.told or facts.notes.get(id, ""),
        park=known.park if known is not None else None,
        expected=facts.waits.get(id),
        error=known.why_not if known is not None else "",
        lost=known.lost if known is not None else False,
        uid=tenant.uid,
        passed_on=known.passed_on if known is not None else "",
    )


def _phase(facts: GroupFacts, id: str, look: SeatLook) -> str:
    """Planning looks between switches only; while one goes on, the slot and the hardware tell more."""
    slot = facts.slot
    if slot.seat == id and slot.phase in _IN_SLOT and look.state in ("Running", "Locked", "Changing", "Waiting"):
        return _IN_SLOT[slot.phase]
    known = facts.phases.get(id, "Absent")
    return "Parked" if look.state == "Parked" and known in _IN_SLOT.values() else known


class SwitchLog:
    """Puts the two halves of each switch together, as the activities tell how they ended, and counts them."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[str, Cleared]] = {}
        self._last: dict[str, SwitchPicture] = {}

    def last(self, group: str) -> SwitchPicture | None:
        """The last switch since this process began."""
        return self._last.get(group)

    def forget(self, group: str) -> None:
        """The node has no such group any more."""
        self._begun.pop(group, None)
        self._last.pop(group, None)

    def cleared(self, before: Slot, told: Cleared, at: float) -> None:
        """The first half ended, of a slot that was `before`."""
        group = before.group
        self._begun.pop(group, None)
        if told.gone:
            self.forget(group)
        elif told.next:
            self._begun[group] = (before.seat, told)
        elif told.phase == "Quarantined":
            if before.phase != "Quarantined":
                metrics.quarantined(group)
                self._ended(group, SwitchPicture(at, before.seat, "", told.reason, told.seconds, "Quarantined"))
        elif "drain" in told.seconds:
            self._ended(group, SwitchPicture(at, before.seat, before.seat, told.reason, told.seconds, "Kept"))

    def filled(self, group: str, seat: str, told: Filled, at: float) -> None:
        """The second half ended, which was to give the slot to this seat."""
        before, first = self._begun.pop(group, ("", None))
        seconds, why = dict(told.seconds), told.reason
        if first is not None:
            for name, more in told.seconds.items():
                seconds[name] = first.seconds.get(name, 0.0) + more
            seconds = {**first.seconds, **seconds}
        outcome: Outcome = "Failed"
        if told.active == seat:
            outcome, why = "Switched", first.reason if first is not None else told.reason
        elif told.phase == "Quarantined":
            outcome = "Quarantined"
            metrics.quarantined(group)
        self._ended(group, SwitchPicture(at, before, seat, why, seconds, outcome))

    def _ended(self, group: str, switch: SwitchPicture) -> None:
        self._last[group] = switch
        metrics.switched(group, switch)


class _Shown:
    """One group as it was told last: since when it is so, and what is worth a write."""

    def __init__(self, first: GroupPicture) -> None:
        self.now = replace(first, healthy_since=first.since)
        self.told = Pace()
        self._since: dict[str, tuple[tuple[str, str], float]] = {}
        self._status: dict[str, Any] = {}
        self._said: tuple[object, object] = (None, None)
        self._at = 0.0
        self.dated(first, first.since)

    def update(self, latest: GroupPicture, now: float) -> list[Told]:
        """What is to be told of it as Events."""
        before = self.now
        self.dated(latest, now)
        return self.told.at(news(before, self.now), now)

    def dated(self, latest: GroupPicture, now: float) -> None:
        """With the times at which seats and the group's health became what they are."""
        for seat in latest.seats:
            known = self._since.get(seat.id)
            if known is None or known[0] != (seat.phase, seat.uid):
                self._since[seat.id] = ((seat.phase, seat.uid), now)
        self._since = {seat.id: self._since[seat.id] for seat in latest.seats}
        same = healthy(latest)[0] == healthy(self.now)[0]
        self.now = replace(
            latest,
            seats=[replace(seat, since=self._since[seat.id][1]) for seat in latest.seats],
            healthy_since=self.now.healthy_since if same else now,
        )

    def status(self, now: float) -> dict[str, Any]:
        """What the object is to say: the same as before while nothing matters that is another. A switch is two writes
        however many phases it has, that it goes on and how it ended; one that lasts is shown as it comes along.
        """
        (urgent, rest), passed = _matters(self.now), now - self._at
        due = urgent != self._said[0] or (rest != self._said[1] and passed >= GAP) or passed >= REFRESH
        if due or passed < 0:
            self._status, self._said, self._at = status(self.now, now), (urgent, rest), now
        return self._status


def _matters(group: GroupPicture) -> tuple[object, object]:
    """What is to be written at once, for Services lead by it or people should act; and what may wait for company. Texts
    and counts of what waits are in neither: they are another at each look.
    """
    seats = [(seat.id, seat.pod, seat.port, seat.backend, seat.passed_on) for seat in group.seats]
    urgent = (seats, list(group.preflight), group.simulated, group.gpus, group.rebalance, healthy(group)[:1])
    if group.phase in _UNDER_WAY:
        return urgent, "under way"
    phases = [(seat.phase, seat.parkable, seat.lost) for seat in group.seats]
    return urgent, (group.phase, group.active, group.switches, phases, group.last)


class SeatReporting:
    """One node's; `run` tells until cancelled. `facts`: of all groups that it has now, called by the loop's thread;
    None while it does not know yet which these are, or who holds their seats: what was told before stays as it is then.
    """

    def __init__(
        self, kube: KubeClient, node: str, events: EventRecorder, facts: Callable[[], Iterable[GroupFacts] | None],
        proxy: Proxy,
    ) -> None:  # fmt: skip
        self._kube, self._node, self._events, self._facts, self._proxy = kube, node, events, facts, proxy
        self._requests = metrics.Requests()
        self._shown: dict[str, _Shown] = {}
        self._objects: dict[str, tuple[OwnObject, asyncio.Task[None]]] = {}
        self._known = False  # which groups there are
        self._gone: set[str] | None = None  # names of objects to be deleted; None: those left from before are not known
        self._silent = ""

    @property
    def trouble(self) -> str:
        """Why the API server does not take what is told; '' while it does."""
        return next((each.trouble for each, _ in self._objects.values() if each.trouble), "")

    def pictures(self) -> list[GroupPicture]:
        """All groups as they were looked at last, for metrics."""
        return [shown.now for shown in self._shown.values()]

    async def run(self) -> None:
        """Until cancelled. Raises an ExceptionGroup with what `facts` raises."""
        metrics.observe(self.pictures)
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._look_on())
                parts.create_task(self._ask_on())
                parts.create_task(self._tidy_on())
        finally:
            tasks = [task for _, task in self._objects.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._objects.clear()
            self._shown.clear()

    async def _look_on(self) -> None:
        while True:
            self.look(time.time())
            await asyncio.sleep(PAUSE)

    async def _ask_on(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(PROXY_PAUSE)

    async def _tidy_on(self) -> None:
        pause = PAUSE
        while True:
            pause = PAUSE if await self.tidy() else min(2 * pause, _MOST_PAUSE)
            await asyncio.sleep(pause)

    def look(self, now: float) -> None:
        """Tells what is another thing at `now`, in seconds of the epoch."""
        known = self._facts()
        if known is None:
            return
        groups = {each.slot.group: each for each in known}
        metrics.begin(groups.keys() - self._shown.keys())
        for group, facts in groups.items():
            latest = picture(facts, refused=self._requests.refused.get(group, 0), proxy=self._silent)
            shown = self._shown.get(group)
            if shown is None:
                self._shown[group] = _Shown(latest)
                self._write(group)
                continue
            for told in shown.update(latest, now):
                self._tell(told)
        for group in self._shown.keys() - groups.keys():
            self._drop(group)
        self._known = True

    async def ask(self) -> None:
        """Reads the proxy's counters."""
        group_of = {seat.id: group for group, shown in self._shown.items() for seat in shown.now.seats}
        try:
            self._requests.heard(await self._proxy.metrics(), group_of)
            self._silent = ""
        except ProxyError as error:
            self._requests.heard(None, group_of)
            self._silent = str(error)

    async def tidy(self) -> bool:
        """Deletes objects of groups that the node has no more, those left by the process before it as well. False where
        that could not be done.
        """
        if not self._known:
            return True
        try:
            if self._gone is None:
                found, _ = await self._kube.list(GPUSEATGROUPS, field_selector=f"spec.nodeName={self._node}")
                mine = {object_name(self._node, group) for group in self._shown}
                self._gone = {str(each["metadata"]["name"]) for each in found} - mine
            for name in sorted(self._gone):
                if name not in self._gone:
                    continue  # it came back meanwhile
                try:
                    await self._kube.delete(GPUSEATGROUPS, name)
                except NotFound:
                    _log.debug("GPUSeatGroup %s is gone already", name)
                self._gone.discard(name)
        except KubeError as error:
            _log.warning("GPUSeatGroups of groups that this node has no more cannot be removed: %s", error)
            return False
        return True

    def _write(self, group: str) -> None:
        shown = self._shown[group]
        own = OwnObject(
            self._kube, self._node, GPUSEATGROUPS, partial(document, self._node, group=group),
            lambda: shown.status(time.time()),
        )  # fmt: skip
        self._objects[group] = (own, asyncio.create_task(own.run(), name=f"GPUSeatGroup {group}"))
        if self._gone is not None:
            self._gone.discard(object_name(self._node, group))

    def _drop(self, group: str) -> None:
        del self._shown[group]
        _, task = self._objects.pop(group)
        task.cancel()
        if self._gone is not None:
            self._gone.add(object_name(self._node, group))

    def _tell(self, told: Told) -> None:
        about = ObjectRef("v1", "Node", self._node, uid=self._node)
        if told.pod is not None:
            namespace, name, uid = told.pod
            about = ObjectRef("v1", "Pod", name, namespace, uid)
        self._events.record(regarding=about, type=told.type, reason=told.reason, action=told.action, note=told.note)
