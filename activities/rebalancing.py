"""Looks at all groups of seats, and orders or proposes the moves that have been worth it for a while. For the workflow
of rebalancing; what is decided is `planning.seats.rebalancing`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from opentelemetry import metrics
from temporalio import activity

from activities.migration_around import around
from activities.migration_signatures import REBALANCE_SEATS, Rebalanced
from crds.gpuseatprofile import API_VERSION
from crds.seatmigration import ENDED, KIND, Destination, SeatMigrationSpec
from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, NotFound
from kube.events import EventRecorder
from kube.resources import GPUSEATGROUPS, GPUSEATPROFILES, PODS, SEATMIGRATIONS, ObjectRef
from planning import times
from planning.podspecs import mapping, text
from planning.seats.migration import Refusal, decide
from planning.seats.rebalancing import LEAST_WINDOW, GroupLoad, Proposal, Standing, due, loads, moved, proposals

log = logging.getLogger(__name__)

REBALANCED = "kyb.ai/rebalanced"
"""On SeatMigrations that were ordered here: these are deleted again when they have been over for a while."""
KEPT = 3600.0  # seconds
_LEAST_PAUSE, _MOST_PAUSE = 5.0, 60.0  # seconds between looks

_moves = metrics.get_meter("berth.worker").create_counter(
    "berth_seat_rebalances", description="Moves of seats that were ordered or proposed, by which"
)


class Rebalancing:
    def __init__(self, kube: KubeClient, events: EventRecorder) -> None:
        self._kube = kube
        self._events = events

    @activity.defn(name=REBALANCE_SEATS)
    async def rebalance(self, standing: Standing) -> Rebalanced:
        """Raises KubeError where the API server could not be asked; it is repeated."""
        profiles, _ = await self._kube.list(GPUSEATPROFILES)
        if not any(mapping(each.get("spec")).get("rebalance") for each in profiles):
            return Rebalanced("No GPUSeatProfile asks for it.")
        busy = await self._tidy()
        now = time.time()
        raw, _ = await self._kube.list(GPUSEATGROUPS)
        groups = [replace(each, well=each.well and each.node not in busy) for each in loads(raw)]
        found = await self._possible(raw, groups)
        ripe, standing = due(found, standing, now)
        for each in ripe:
            await self._act(each, standing.since[each.key])
            standing = moved(standing, each, now)
        windows = [each.window for each in loads(raw) if each.mode is not None]
        within = min(max(min(windows, default=LEAST_WINDOW) / 60, _LEAST_PAUSE), _MOST_PAUSE)
        said = "; ".join(each.told for each in found) or "Nothing to move"
        return Rebalanced(f"{said}.", standing, within)

    async def _possible(self, raw: list[dict[str, Any]], groups: list[GroupLoad]) -> list[Proposal]:
        """The best moves of those that can be carried out."""
        fixed = set[tuple[str, str]]()
        while True:
            found, before = proposals(groups, fixed), len(fixed)
            for each in found:
                namespace, pod = each.seat.namespace, each.seat.pod
                names = [{"metadata": {"name": pod}}]
                known = await around(self._kube, namespace, names, only=pod, groups=raw)
                spec = SeatMigrationSpec(pod=each.seat.pod, to=Destination(group=each.target))
                answer = decide(spec, namespace, "rebalance", "", known)
                if isinstance(answer, Refusal):
                    log.debug("%s, but %s", each.told, answer.message)
                    fixed.add((namespace, each.seat.pod))
            if len(fixed) == before:
                return found

    async def _act(self, proposal: Proposal, since: float) -> None:
        about = await self._pod(proposal)
        log.info("%s: %s", proposal.mode, proposal.told)
        _moves.add(1, {"mode": proposal.mode})
        if proposal.mode == "Propose":
            self._events.record(
                regarding=about, type="Normal", reason="SeatMoveProposed", action="MigrateSeat",
                note=f"{_sentence(proposal)} (kubectl create a SeatMigration, or rebalance: Perform).",
            )  # fmt: skip
            return
        digest = hashlib.sha256(f"{proposal.key} {since}".encode()).hexdigest()[:8]
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": f"{proposal.seat.pod[:200].rstrip('-.')}-{digest}", "labels": {REBALANCED: "true"},
                "annotations": {"kyb.ai/because": _sentence(proposal)},
            },
            "spec": {"pod": proposal.seat.pod, "to": {"group": proposal.target, "node": proposal.node}},
        }  # fmt: skip
        with suppress(AlreadyExists):
            await self._kube.create(SEATMIGRATIONS, body, proposal.seat.namespace)
        self._events.record(
            regarding=about,
            type="Normal",
            reason="SeatMoveOrdered",
            action="MigrateSeat",
            note=f"{_sentence(proposal)}.",
        )

    async def _pod(self, proposal: Proposal) -> ObjectRef:
        """With its UID, by which `kubectl describe` finds its Events."""
        uid = ""
        with suppress(NotFound):
            found = await self._kube.get(PODS, proposal.seat.pod, proposal.seat.namespace)
            uid = str(found["metadata"]["uid"])
        return ObjectRef("v1", "Pod", proposal.seat.pod, proposal.seat.namespace, uid)

    async def _tidy(self) -> set[str]:
        """Deletes what was ordered here and has been over for a while. Nodes that a move is under way on, whoever has
        ordered it: no other is begun there.
        """
        moves, _ = await self._kube.list(SEATMIGRATIONS)
        ordered = [each for each in moves if mapping(each["metadata"].get("labels")).get(REBALANCED) == "true"]
        busy = set[str]()
        for raw in moves:
            status, to = mapping(raw.get("status")), mapping(mapping(raw.get("spec")).get("to"))
            if status.get("phase") not in ENDED:
                places = (status.get("source"), status.get("destination"))
                busy |= {text(mapping(place).get("node")) for place in places} | {text(to.get("node"))}
        for over in _over(ordered, time.time() - KEPT):
            meta = over["metadata"]
            with suppress(NotFound, Conflict):
                await self._kube.delete(SEATMIGRATIONS, meta["name"], meta["namespace"], uid=meta["uid"])
        return busy


def _over(ordered: Iterable[Mapping[str, Any]], before: float) -> list[Mapping[str, Any]]:
    found = []
    for raw in ordered:
        status = mapping(raw.get("status"))
        finished = times.seconds(status.get("finished"))
        if status.get("phase") in ENDED and finished is not None and finished < before:
            found.append(raw)
    return found


def _sentence(proposal: Proposal) -> str:
    return proposal.told[0].upper() + proposal.told[1:]
