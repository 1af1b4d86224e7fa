"""The few writes that a SeatMigration's activities make beside its pods' lives: its status, its finalizer, claims, and
Events. Each is safe to repeat.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import metrics

from activities.migration_signatures import MigrationRef
from crds.gpuseatprofile import API_VERSION
from crds.seatmigration import ENDED, FINALIZER, KIND
from kube.client import KubeClient
from kube.errors import Conflict, NotFound
from kube.events import EventRecorder
from kube.resources import PODS, SEATMIGRATIONS, ObjectRef
from planning.podspecs import mapping, text
from planning.seats.migration import (
    CHEAPEST,
    CLAIM,
    COST,
    FROM,
    RECORD,
    REPLACED_BY,
    REPLACES,
    RETIRES,
    Move,
)
from planning.seats.migration_status import Told, status

log = logging.getLogger(__name__)

_ended = metrics.get_meter("berth.worker").create_counter(
    "berth_seat_migrations", description="SeatMigrations that ended, by phase"
)

# Reason and action of the Event at each phase, and whether it is a warning.
_EVENTS: Mapping[str, tuple[str, bool]] = {
    "Starting": ("SeatMigrating", False),
    "Completed": ("SeatMigrated", False),
    "RolledBack": ("SeatMigrationRolledBack", True),
    "Refused": ("SeatMigrationRefused", True),
}


class MigrationWrites:
    def __init__(self, kube: KubeClient, events: EventRecorder) -> None:
        self._kube = kube
        self._events = events

    async def read(self, ref: MigrationRef) -> dict[str, Any] | None:
        """The SeatMigration, None where it is gone or another has its name."""
        try:
            raw = await self._kube.get(SEATMIGRATIONS, ref.name, ref.namespace)
        except NotFound:
            return None
        return raw if raw["metadata"]["uid"] == ref.uid else None

    async def tell(self, ref: MigrationRef, told: Told) -> None:
        """Its status; and an Event of it and of its pods where its phase is another."""
        raw = await self.read(ref)
        if raw is None:
            return
        before = text(mapping(raw.get("status")).get("phase"))
        if before in ENDED:
            return  # what has ended stays so, whoever comes late
        body = {"metadata": {"uid": ref.uid}, "status": status(raw, told, time.time())}
        try:
            await self._kube.merge_patch(SEATMIGRATIONS, ref.name, ref.namespace, body, subresource="status")
        except (NotFound, Conflict):
            return
        if told.phase != before and told.phase in ENDED:
            _ended.add(1, {"phase": told.phase})
        if told.phase != before and told.phase in _EVENTS:
            reason, bad = _EVENTS[told.phase]
            log.info("SeatMigration %s: %s: %s", ref.told, reason, told.message)
            self._record(ObjectRef(API_VERSION, KIND, ref.name, ref.namespace, ref.uid), reason, told.message, bad=bad)
            if told.move is not None:
                self._record(_pod(told.move, told.move.pod, told.move.pod_uid), reason, told.message, bad=bad)

    def started(self, move: Move, pod: Mapping[str, Any]) -> None:
        """The pod that was made hears in whose stead."""
        note = f"It is to serve on {move.told} in the stead of pod {move.pod}, by SeatMigration {move.name}."
        self._record(_pod(move, move.replacement, pod["metadata"]["uid"]), "SeatMigrating", note)

    async def hold(self, raw: Mapping[str, Any]) -> None:
        """Adds the finalizer. Raises Conflict where somebody changed it meanwhile."""
        meta = raw["metadata"]
        if FINALIZER in meta.get("finalizers", ()):
            return
        finalizers = [*meta.get("finalizers", ()), FINALIZER]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"], "finalizers": finalizers}}
        await self._kube.merge_patch(SEATMIGRATIONS, meta["name"], meta["namespace"], body)

    async def let_go(self, ref: MigrationRef) -> None:
        """Removes the finalizer. Raises Conflict where somebody changed it meanwhile."""
        raw = await self.read(ref)
        if raw is None or FINALIZER not in raw["metadata"].get("finalizers", ()):
            return
        left = [each for each in raw["metadata"]["finalizers"] if each != FINALIZER]
        body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"], "finalizers": left}}
        await self._kube.merge_patch(SEATMIGRATIONS, ref.name, ref.namespace, body)

    async def claim(self, pod: Mapping[str, Any], move: Move) -> None:
        """No other SeatMigration touches it. Raises Conflict where it was changed since it was looked at."""
        meta = pod["metadata"]
        if mapping(meta.get("annotations")).get(CLAIM) == move.migration:
            return
        body = {"metadata": {"resourceVersion": meta["resourceVersion"], "annotations": {CLAIM: move.migration}}}
        await self._kube.merge_patch(PODS, move.pod, move.namespace, body)

    async def claim_again(self, move: Move) -> None:
        """Somebody may have taken the claim off, and without it nobody may delete the pod."""
        await self._annotate(move.namespace, move.pod, move.pod_uid, {CLAIM: move.migration})

    async def remember(self, move: Move) -> None:
        """That its substitute was made: it is made once."""
        await self._annotate(move.namespace, move.pod, move.pod_uid, {REPLACED_BY: move.replacement})

    async def take_over(self, move: Move, pod: Mapping[str, Any]) -> None:
        """The new pod says that the old one is ended for it."""
        await self._annotate(move.namespace, move.replacement, pod["metadata"]["uid"], {RETIRES: move.pod_uid})

    async def unclaim(self, namespace: str, name: str, uid: str, cost: str, *, claimed: bool = False) -> None:
        """`cost`: what was said before of ending it, '' nothing; `claimed`: only that is said again, and it stays
        claimed.
        """
        annotations: dict[str, str | None] = {} if claimed else {CLAIM: None, REPLACED_BY: None}
        try:
            pod = await self._kube.get(PODS, name, namespace)
            if mapping(pod["metadata"].get("annotations")).get(COST) == CHEAPEST:
                annotations[COST] = cost or None
            if annotations:
                await self._annotate(namespace, name, uid, annotations)
        except NotFound:
            return

    async def make_cheapest(self, move: Move) -> None:
        """Of its ReplicaSet's pods it is ended first."""
        await self._annotate(move.namespace, move.pod, move.pod_uid, {COST: CHEAPEST})

    async def settle(self, move: Move, pod: Mapping[str, Any]) -> None:
        """The new pod is nobody's substitute any more, and says where it came from."""
        came = f"{move.pod} ({move.seat} on node {move.node})"
        uid = pod["metadata"]["uid"]
        settled: dict[str, str | None] = {
            CLAIM: None, REPLACES: None, RECORD: None, RETIRES: None, FROM: came,
        }  # fmt: skip
        await self._annotate(move.namespace, move.replacement, uid, settled)
        note = f"It serves in the stead of pod {move.pod}, which had {move.seat} on node {move.node}."
        self._record(_pod(move, move.replacement, uid), "SeatMigrated", note)

    async def _annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str | None]) -> None:
        try:
            await self._kube.merge_patch(PODS, name, namespace, {"metadata": {"uid": uid, "annotations": annotations}})
        except (NotFound, Conflict):
            return

    def _record(self, about: ObjectRef, reason: str, note: str, *, bad: bool = False) -> None:
        self._events.record(
            regarding=about, type="Warning" if bad else "Normal", reason=reason, action="MigrateSeat", note=note
        )


def _pod(move: Move, name: str, uid: str) -> ObjectRef:
    return ObjectRef("v1", "Pod", name, move.namespace, uid)
