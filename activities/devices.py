"""Shows what nodes say of their devices: how each GPUSeatProfile stands, in its status and as Events, and what a node
has, in the labels of its Node. For the workflow of devices.

Everything here can be repeated: what is written is compared with what is there, and only what differs is written.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from opentelemetry import metrics
from temporalio import activity

from activities.cache import ClusterCache
from activities.device_signatures import SHOW_DEVICES, DevicesLook, DevicesShown
from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound, Unavailable
from kube.events import EventRecorder
from kube.resources import GPUSEATPROFILES, NODES, ObjectRef
from planning.devices.fleet import SeatStanding, fleet_verdicts, news, passed_over
from planning.devices.labels import changes, owned
from planning.devices.seat_status import Verdict, seat_status
from planning.model import NodeView

log = logging.getLogger(__name__)

MANAGER = "berth-worker"
"""By this name the API server remembers which labels berth set: the client's own, of every write without another."""
CATCH_UP = 6.0
AT_A_TIME = 16  # calls to the API server
MOST = 400  # nodes that one look labels: it must come to its end
SOON = 0.1  # seconds until the next look, where there was more to label or something changed meanwhile
AGAIN = 30.0  # and where a write was refused: until then it is not tried again

_written = metrics.get_meter("berth.worker").create_counter(
    "berth_device_writes", description="Statuses of GPUSeatProfiles and labels of nodes that were written, by kind"
)


class DeviceShows:
    def __init__(
        self,
        cache: ClusterCache,
        kube: KubeClient,
        events: EventRecorder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._kube = kube
        self._events = events
        self._clock = clock
        # By a node's UID: what it was to have, and the labels that it had once it did.
        self._settled: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {}
        self._refused: dict[str, float] = {}  # by a node's UID: when its labels were, of those that have no others yet
        self._passed_over: set[tuple[str, str]] = set()  # UIDs of pods and the groups of which that was said

    @activity.defn(name=SHOW_DEVICES)
    async def show(self, look: DevicesLook) -> DevicesShown:
        """Raises Unavailable where the API server cannot be asked: it is repeated."""
        await self._cache.reach(look.fresh, CATCH_UP)
        labelled, left = await self._label()
        shown, again = await self._tell()
        self._tell_preferences()
        said = (
            f"{_counted(shown, 'status', 'statuses')} and the labels of {_counted(labelled, 'node', 'nodes')} written"
        )
        waits = [each for each in (left, again) if each is not None]
        return DevicesShown(said, min(waits, default=None))

    # ---- labels

    async def _label(self) -> tuple[int, float | None]:
        """How many nodes got other labels, and when to look again for those that are left."""
        now = self._clock()
        by_name = {node.name: node for node in self._cache.nodes.items.values()}
        there = {node.uid for node in by_name.values()}
        self._settled = {uid: each for uid, each in self._settled.items() if uid in there}
        self._refused = {uid: when for uid, when in self._refused.items() if uid in there}
        unsettled = [
            (node, view.labels)
            for view in self._cache.node_devices.items.values()
            if view.labels is not None
            and (node := by_name.get(view.node)) is not None
            and self._settled.get(node.uid) != (view.labels, node.labels)
        ]
        # Those that were refused come last: however many there are, all others have their turn before.
        unsettled.sort(key=lambda each: self._refused.get(each[0].uid, -math.inf))
        held_back = [left for node, _ in unsettled if (left := self._held_back(node, now)) > 0]
        due = [each for each in unsettled if self._held_back(each[0], now) <= 0]
        waits = [max(SOON, min(held_back))] if held_back else []
        done = settled = 0

        async def one(node: NodeView, wanted: Mapping[str, str]) -> None:
            nonlocal done, settled
            try:
                done += await self._label_node(node, wanted)
                if node.uid in self._settled:
                    self._refused.pop(node.uid, None)
                    settled += 1
            except (Conflict, NotFound):
                waits.append(SOON)
            except Unavailable:
                raise
            except KubeError as refused:
                log.warning("the labels of node %s are not written: %s", node.name, refused)
                self._refused[node.uid] = now
                waits.append(AGAIN)

        await _each(partial(one, *each) for each in due[:MOST])
        if len(due) > MOST:
            waits.append(SOON if settled else AGAIN)  # where nothing got on, another look at once would be a hot loop
        return done, min(waits, default=None)

    def _held_back(self, node: NodeView, now: float) -> float:
        """For how many seconds it is not tried, because it was refused."""
        return self._refused.get(node.uid, -math.inf) + AGAIN - now

    async def _label_node(self, node: NodeView, wanted: Mapping[str, str]) -> bool:
        """Whether something was written."""
        raw = await self._kube.get(NODES, node.name)
        meta = raw["metadata"]
        if meta["uid"] != node.uid:
            self._settled.pop(node.uid, None)
            return False  # the new one's process will say what it has
        delta = changes(meta.get("labels") or {}, wanted, owned(raw, MANAGER))
        if delta:
            body = {"metadata": {"resourceVersion": meta["resourceVersion"], "labels": delta}}
            raw = await self._kube.merge_patch(NODES, node.name, None, body)
            _written.add(1, {"kind": "labels"})
        self._settled[node.uid] = wanted, raw["metadata"].get("labels") or {}
        return bool(delta)

    # ---- seats

    def _tell_preferences(self) -> None:
        """An Event for each pod that has a seat of another group than it prefers; once more by a worker that is new.

        One for each group that it prefers, whatever seats its node says it has: nodes may say ever others.
        """
        pods = self._cache.pods.items.values()
        there = {pod.uid for pod in pods}
        self._passed_over = {each for each in self._passed_over if each[0] in there}
        for pod, seat in passed_over(self._cache.node_devices.items.values(), pods):
            if (pod.uid, pod.prefers) not in self._passed_over:
                self._passed_over.add((pod.uid, pod.prefers))
                self._events.record(
                    regarding=ObjectRef("v1", "Pod", pod.name, pod.namespace, pod.uid),
                    type="Normal",
                    reason="OtherGroup",
                    action="CompareGroups",
                    note=f"It prefers group {pod.prefers} and has seat {seat.id} of group {seat.group}. "
                    f"Where seats come by device plugin any may be given; by DRA, either no seat of group "
                    f"{pod.prefers} was free, or the webhook did not answer when the pod was created.",
                )

    async def _tell(self) -> tuple[int, float | None]:
        """How many statuses were written, and when to look again for those that could not be."""
        profiles = list(self._cache.seat_profiles.items.values())
        verdicts = fleet_verdicts(
            [each.view for each in profiles],
            self._cache.node_devices.items.values(),
            {node.name: node.labels for node in self._cache.nodes.items.values()},
        )
        done = 0
        waits: list[float] = []
        for profile in profiles:
            try:
                done += await self._show_profile(profile, verdicts)
            except NotFound:
                continue
            except Conflict:
                waits.append(SOON)
            except Unavailable:
                raise
            except KubeError as refused:
                log.warning("the status of GPUSeatProfile %s is not written: %s", profile.view.name, refused)
                waits.append(AGAIN)
        return done, min(waits, default=None)

    async def _show_profile(self, profile: SeatStanding, verdicts: Iterable[Verdict]) -> bool:
        due = seat_status(profile.view, profile.status, verdicts, time.time())
        if due == profile.status:
            return False
        name = profile.view.name
        body = {"metadata": {"resourceVersion": str(profile.resource_version)}, "status": due}
        raw = await self._kube.merge_patch(GPUSEATPROFILES, name, None, body, subresource="status")
        self._cache.seat_profiles.observe(raw)
        _written.add(1, {"kind": "status"})
        for each in news(profile.status, due):
            bad = each["type"] == "Error"
            log.log(
                logging.WARNING if bad else logging.INFO,
                "GPUSeatProfile %s: %s: %s",
                name,
                each["reason"],
                each["message"],
            )
            self._events.record(
                regarding=ObjectRef(GPUSEATPROFILES.api_version, GPUSEATPROFILES.kind, name, None, profile.view.uid),
                type="Warning" if bad else "Normal",
                reason=each["reason"],
                action="ConfigureSeats",
                note=each["message"],
            )
        return True


async def _each(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Makes all calls, a few at a time, and raises what the first of those that failed did."""
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await call()

    for failed in await asyncio.gather(*(one(call) for call in calls), return_exceptions=True):
        if failed is not None:
            raise failed


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
