"""Shows what nodes say of their devices: how each GPUSeatProfile stands, in its status and as Events, and what a node
has, in the labels of its Node. For the workflow of devices.

Everything here can be repeated: what is written is compared with what is there, and only what differs is written.
"""

from __future__ import annotations

import asyncio
import logging
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
AGAIN = 30.0  # and where a write was refused

_written = metrics.get_meter("berth.worker").create_counter(
    "berth_device_writes", description="Statuses of GPUSeatProfiles and labels of nodes that were written, by kind"
)


class DeviceShows:
    def __init__(self, cache: ClusterCache, kube: KubeClient, events: EventRecorder) -> None:
        self._cache = cache
        self._kube = kube
        self._events = events
        # By a node's UID: what it was to have, and the labels that it had once it did.
        self._settled: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {}
        self._passed_over: set[tuple[str, str]] = set()  # pods and seats of which that was said

    @activity.defn(name=SHOW_DEVICES)
    async def show(self, look: DevicesLook) -> DevicesShown:
        """Raises Unavailable where the API server cannot be asked: it is repeated."""
        await self._cache.reach(look.fresh, CATCH_UP)
        labelled, left, more = await self._label()
        shown, again = await self._tell()
        self._tell_preferences()
        said = (
            f"{_counted(shown, 'status', 'statuses')} and the labels of {_counted(labelled, 'node', 'nodes')} written"
        )
        waits = [SOON] if more else []
        waits += [each for each in (left, again) if each is not None]
        return DevicesShown(said, min(waits, default=None))

    # ---- labels

    async def _label(self) -> tuple[int, float | None, bool]:
        """How many nodes got other labels; when to look again for those that could not be written; whether more are
        due.
        """
        by_name = {node.name: node for node in self._cache.nodes.items.values()}
        there = {node.uid for node in by_name.values()}
        self._settled = {uid: each for uid, each in self._settled.items() if uid in there}
        due = [
            (node, view.labels)
            for view in self._cache.node_devices.items.values()
            if view.labels is not None
            and (node := by_name.get(view.node)) is not None
            and self._settled.get(node.uid) != (view.labels, node.labels)
        ]
        waits: list[float] = []
        done = 0

        async def one(node: NodeView, wanted: Mapping[str, str]) -> None:
            nonlocal done
            try:
                done += await self._label_node(node, wanted)
            except (Conflict, NotFound):
                waits.append(SOON)
            except Unavailable:
                raise
            except KubeError as refused:
                log.warning("the labels of node %s are not written: %s", node.name, refused)
                waits.append(AGAIN)

        await _each(partial(one, *each) for each in due[:MOST])
        return done, min(waits, default=None), len(due) > MOST

    async def _label_node(self, node: NodeView, wanted: Mapping[str, str]) -> bool:
        """Whether something was written."""
        raw = await self._kube.get(NODES, node.name)
        meta = raw["metadata"]
        if meta["uid"] != node.uid:
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
        """An Event for each pod that has a seat of another group than it prefers; once more by a worker that is new."""
        found = passed_over(self._cache.node_devices.items.values(), self._cache.pods.items.values())
        for pod, seat in found:
            if (pod.uid, seat.id) not in self._passed_over:
                self._events.record(
                    regarding=ObjectRef("v1", "Pod", pod.name, pod.namespace, pod.uid),
                    type="Normal",
                    reason="OtherGroup",
                    action="CompareGroups",
                    note=f"It prefers group {pod.prefers} and has seat {seat.id} of group {seat.group}. "
                    f"Where seats come by device plugin any may be given; by DRA group {pod.prefers} had none free.",
                )
        self._passed_over = {(pod.uid, seat.id) for pod, seat in found}

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
