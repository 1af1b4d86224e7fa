"""Carries a SeatMigration's steps out: reads the pods, what nodes say of seats, and Services' endpoints, has
`planning.seats.migration` decide, and acts once. For the workflow of a SeatMigration.

Each step reads first how far it came already, so that one which was lost with its worker is simply begun anew. What is
to be moved is claimed by an annotation on the pod, which the API server arbitrates: two moves of a seat are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError
from temporalio import activity

from activities.heartbeats import beating
from activities.migration_around import around, named
from activities.migration_signatures import (
    DECIDE_MIGRATION,
    NOT_YET,
    RETIRE,
    ROLL_BACK,
    START_REPLACEMENT,
    Decided,
    Ended,
    MigrationRef,
    RollBack,
    Started,
)
from activities.migration_writes import MigrationWrites
from crds.seatmigration import ENDED, SeatMigrationSpec
from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound
from kube.events import EventRecorder
from kube.resources import ENDPOINTSLICES, GPUSEATGROUPS, PODS, REPLICASETS
from planning.podspecs import mapping, text
from planning.seats.endpoints import MANAGER
from planning.seats.migration import (
    CLAIM,
    HASH,
    RECORD,
    REPLACED_BY,
    REPLACES,
    RETIRES,
    Move,
    Progress,
    Refusal,
    SeatAt,
    decide,
    fits,
    gone,
    kept_out,
    leads_to,
    progress,
    replacement,
    seats_of,
    serves_still,
)
from planning.seats.migration_status import Told

POLL = 1.0  # seconds between looks while something is waited for that should happen soon
PATIENT = 5.0  # and while a server starts that has been starting for a while, which takes minutes
SOON = 30.0
GONE = 600.0  # seconds in which a pod that was deleted must be gone; a node that is away keeps it for longer
MESSAGES = 5.0  # and between two messages that only say what is waited for
ENDPOINTS = 60.0  # seconds in which Services must have turned to the new server
# Nodes turn to it within a second or two of its EndpointSlice, and nobody tells when they have.
NODES_FOLLOW = 3.0
DECIDING = 4  # at once: each reads the names of all pods of a namespace
ADOPTED = 120.0  # seconds in which the ReplicaSet must have ended the pod that costs least

_MOVE: TypeAdapter[Move] = TypeAdapter(Move)


class Migrations:
    def __init__(self, kube: KubeClient, events: EventRecorder) -> None:
        self._kube = kube
        self._writes = MigrationWrites(kube, events)
        self._deciding = asyncio.Semaphore(DECIDING)

    @activity.defn(name=DECIDE_MIGRATION)
    async def decide(self, ref: MigrationRef) -> Decided:
        """Raises KubeError where the API server could not be asked, or somebody changed what was decided on meanwhile:
        it is repeated.
        """
        async with beating(), self._deciding:
            return await self._decide(ref)

    @activity.defn(name=START_REPLACEMENT)
    async def start(self, move: Move) -> Started:
        """Raises KubeError where the API server could not be asked."""
        ref = _ref(move)
        said, said_at = "", 0.0
        async with beating():
            if (refused := await self._create(move)) is not None:
                return refused
            async for found in self._follow(move):
                if found.kind == "failed":
                    return Started(f"{found.message}.", found.reason)
                if found.kind == "serves" and found.seat is not None:
                    address = await self._address(move, found.seat)
                    await self._writes.tell(ref, Told("Switching", "Serves", f"{found.message}.", move, found.seat))
                    return Started(f"{found.message}.", address=address)
                if found.message != said and time.monotonic() >= said_at + MESSAGES:
                    said, said_at = found.message, time.monotonic()
                    await self._writes.tell(ref, Told("Starting", found.reason, f"{said}.", move, found.seat))
        raise AssertionError("unreachable")

    @activity.defn(name=RETIRE)
    async def retire(self, move: Move) -> Ended:
        """Raises KubeError where the API server could not be asked."""
        async with beating():
            why = await self._prepare(move)
            if why is not None:
                return why
            await self._end(move)
            deadline, until = time.monotonic() + ADOPTED, time.monotonic() + GONE
            while (pod := await self._pod(move.namespace, move.pod, move.pod_uid)) is not None:
                if time.monotonic() > until:
                    break  # its node is away: it is deleted, and goes with that
                if not gone(pod, move.pod_uid):  # whose it is, has yet to end it
                    new = await self._new(move)
                    if new is None or gone(new, new["metadata"]["uid"]) or time.monotonic() > deadline:
                        told = f"ReplicaSet {move.replica_set} kept pod {move.pod} and not {move.replacement}"
                        return Ended(f"{told}.", "NotAdopted")
                    await self._end(move)
                await asyncio.sleep(POLL)
            return await self._complete(move)

    @activity.defn(name=ROLL_BACK)
    async def roll_back(self, task: RollBack) -> Ended:
        """Raises KubeError where the API server could not be asked."""
        move, ref, until = task.move, _ref(task.move), time.monotonic() + GONE
        async with beating():
            pod, new = await asyncio.gather(self._pod(move.namespace, move.pod, move.pod_uid), self._new(move))
            retires = mapping(mapping(mapping(new).get("metadata")).get("annotations")).get(RETIRES)
            if gone(pod, move.pod_uid) and retires == move.pod_uid:
                return await self._complete(move)  # too late to undo: the one that serves stays
            await self._writes.tell(ref, Told("RollingBack", task.reason, task.message, move))
            if not task.own and not gone(pod, move.pod_uid):
                return Ended("Requests may go to the new server still.", NOT_YET)
            await self._writes.unclaim(move.namespace, move.pod, move.pod_uid, move.cost, claimed=True)
            while (new := await self._new(move)) is not None and time.monotonic() < until:
                await self._remove(move.namespace, new)
                await asyncio.sleep(POLL)
        await self._writes.unclaim(move.namespace, move.pod, move.pod_uid, move.cost)
        await self._writes.tell(ref, Told("RolledBack", task.reason, task.message, move))
        await self._writes.let_go(ref)
        return Ended(f"Rolled back: {task.message}")

    async def _complete(self, move: Move) -> Ended:
        """The old server is gone, or ends; whoever was started for it stays, if it is there."""
        new = await self._new(move)
        if new is None or gone(new, new["metadata"]["uid"]):
            return Ended(f"Pod {move.pod} is gone, and pod {move.replacement} ended as well.", "ReplacementGone")
        await self._give(move, new)
        await self._writes.settle(move, new)
        told = f"Pod {move.replacement} serves on {move.told} in the stead of {move.pod}."
        await self._writes.tell(_ref(move), Told("Completed", "Completed", told, move))
        await self._writes.let_go(_ref(move))
        return Ended(told)

    async def _decide(self, ref: MigrationRef) -> Decided:
        raw, pods = await self._writes.read(ref), await named(self._kube, ref.namespace)
        if raw is None:
            await self._clean(ref, pods)
            return Decided("It was deleted before anything was done.")
        phase = mapping(raw.get("status")).get("phase")
        if phase in ENDED:
            await self._writes.let_go(ref)
            return Decided("It has ended already.")
        spec, problem = SeatMigrationSpec.parse(raw.get("spec"))
        if spec is not None and (move := _recorded(ref, spec, pods)) is not None:
            told = f"Gone on with: {move.pod} moves to {move.told}."
            return Decided(told, move, resumed=True, undo=phase == "RollingBack")
        if "deletionTimestamp" in raw["metadata"] or phase == "RollingBack":
            found: Move | Refusal = Refusal("Deleted", "it was deleted, or undone, before anything was left to do")
        elif spec is None:
            found = Refusal("Invalid", problem)
        else:
            known = await around(self._kube, ref.namespace, pods, but=ref.uid, only=spec.pod)
            found = decide(spec, ref.namespace, ref.name, ref.uid, known)
        if isinstance(found, Refusal):
            await self._clean(ref, pods)
            await self._writes.tell(ref, Told("Refused", found.reason, f"{found.message}."))
            await self._writes.let_go(ref)
            return Decided(f"Refused: {found.message}.")
        await self._writes.hold(raw)
        mine = next(each for each in known.pods if each["metadata"]["uid"] == found.pod_uid)
        await self._writes.claim(mine, found)
        told = f"Pod {found.pod} moves from {found.seat} on node {found.node} to {found.told}."
        await self._writes.tell(ref, Told("Starting", "Starting", told, found))
        return Decided(told, found)

    async def _clean(self, ref: MigrationRef, pods: list[dict[str, Any]]) -> None:
        """Of what was begun before nothing is left: what was started goes, and what was claimed is nobody's."""
        for pod in pods:
            annotations = mapping(pod["metadata"].get("annotations"))
            if annotations.get(CLAIM) != ref.uid:
                continue
            if REPLACES in annotations:
                await self._remove(ref.namespace, pod)
            else:
                await self._writes.unclaim(ref.namespace, pod["metadata"]["name"], pod["metadata"]["uid"], "")

    # ---- reading

    async def _pod(self, namespace: str, name: str, uid: str = "") -> dict[str, Any] | None:
        """None where there is none, or another of that name."""
        try:
            found = await self._kube.get(PODS, name, namespace)
        except NotFound:
            return None
        return found if uid in ("", found["metadata"]["uid"]) else None

    async def _new(self, move: Move) -> dict[str, Any] | None:
        """What was started for this move, None where there is none."""
        found = await self._pod(move.namespace, move.replacement)
        annotations = mapping(mapping(mapping(found).get("metadata")).get("annotations"))
        return found if annotations.get(CLAIM) == move.migration or annotations.get(REPLACES) == move.pod else None

    async def _seats(self, node: str) -> list[SeatAt]:
        groups, _ = await self._kube.list(GPUSEATGROUPS, field_selector=f"spec.nodeName={node}")
        return seats_of(groups)

    async def _look(self, move: Move) -> Progress:
        raw = await self._writes.read(_ref(move))
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return Progress("failed", "Deleted", "it was deleted while it was under way")
        pod, new, seats = await asyncio.gather(
            self._pod(move.namespace, move.pod, move.pod_uid), self._new(move), self._seats(move.to_node)
        )
        return progress(move, pod, new, seats, time.time())

    async def _follow(self, move: Move) -> AsyncIterator[Progress]:
        patient = time.monotonic() + SOON
        while True:
            yield await self._look(move)
            await asyncio.sleep(PATIENT if time.monotonic() > patient else POLL)

    async def _address(self, move: Move, seat: SeatAt) -> str:
        """Where the proxy of the new server's node takes its requests."""
        new = await self._new(move)
        host = text(mapping(mapping(new).get("status")).get("hostIP"))
        if not host or not seat.port:
            return ""
        return f"[{host}]:{seat.port}" if ":" in host else f"{host}:{seat.port}"

    # ---- acting

    async def _create(self, move: Move) -> Started | None:
        """Makes the new pod, once; why it cannot be made, None where it was."""
        raw = await self._writes.read(_ref(move))
        pod = await self._pod(move.namespace, move.pod, move.pod_uid)
        if raw is None or "deletionTimestamp" in raw["metadata"] or pod is None:
            return None  # how it stands, the next look tells
        started = mapping(pod["metadata"].get("annotations")).get(REPLACED_BY) == move.replacement
        if await self._new(move) is None:
            if started:
                return Started(f"Pod {move.replacement} was deleted by somebody else.", "ReplacementGone")
            made = replacement(pod, move, _MOVE.dump_json(move).decode())
            try:
                created = await self._kube.create(PODS, made, move.namespace)
            except AlreadyExists:
                if await self._new(move) is None:
                    return Started(f"There is another pod {move.replacement} already.", "NameTaken")
            except (Invalid, Forbidden) as refused:
                return Started(f"Pod {move.replacement} cannot be made: {refused}", "Refused")
            else:
                self._writes.started(move, created)
        if not started:
            await self._writes.remember(move)
        return None

    async def _prepare(self, move: Move) -> Ended | None:
        """Waits until no Service leads to the old server any more. None: it may end; else why it may not."""
        raw = await self._writes.read(_ref(move))
        pod = await self._pod(move.namespace, move.pod, move.pod_uid)
        if gone(pod, move.pod_uid):
            return None  # it ends already: what becomes of the new one is looked at afterwards
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return Ended("It was deleted while it was under way.", "Deleted")
        if move.replica_set and not await self._replicas(move):
            told = f"ReplicaSet {move.replica_set} wants no pods any more: its Deployment was changed meanwhile"
            return Ended(f"{told}.", "RolledOut")
        deadline = time.monotonic() + ENDPOINTS
        selector = f"endpointslice.kubernetes.io/managed-by={MANAGER}"
        while move.port:
            slices, _ = await self._kube.list(ENDPOINTSLICES, move.namespace, label_selector=selector)
            if not (names := leads_to(slices, move.pod_uid)):
                await asyncio.sleep(NODES_FOLLOW)
                break
            if time.monotonic() > deadline:
                told = f"EndpointSlice {names[0]} still leads to pod {move.pod}: does berth's controller run?"
                return Ended(told, "EndpointsBehind")
            await asyncio.sleep(POLL)
        if not serves_still(move, await self._new(move), await self._seats(move.to_node)):
            return Ended(f"Pod {move.replacement} does not serve any more.", "ReplacementGone")
        return await self._ranked(move)

    async def _ranked(self, move: Move) -> Ended | None:
        """Waits until its ReplicaSet would end the old one and no other. None: it would."""
        deadline = time.monotonic() + ADOPTED
        while move.replica_set:
            siblings, _ = await self._kube.list(PODS, move.namespace, label_selector=f"{HASH}={move.template_hash}")
            theirs = [each for each in siblings if _owned_by(each, move.replica_set)]
            why = kept_out([*theirs, *filter(None, [await self._new(move)])], move)
            if not why:
                break
            if time.monotonic() > deadline:
                return Ended(f"{why[0].upper()}{why[1:]}.", "SiblingsNotReady")
            await asyncio.sleep(POLL)
        return None

    async def _replicas(self, move: Move) -> int:
        try:
            found = await self._kube.get(REPLICASETS, move.replica_set, move.namespace)
        except NotFound:
            return 0
        return 0 if "deletionTimestamp" in found["metadata"] else int(mapping(found.get("spec")).get("replicas") or 0)

    async def _end(self, move: Move) -> None:
        """Ends the old server; that of a ReplicaSet by giving it the new one. The new one says first for whom: from
        then on nobody undoes that.
        """
        if (new := await self._new(move)) is not None:
            await self._writes.take_over(move, new)
        if not move.replica_set:
            await self._writes.claim_again(move)
            with suppress(NotFound, Conflict):
                await self._kube.delete(PODS, move.pod, move.namespace, uid=move.pod_uid)
            return
        await self._writes.make_cheapest(move)
        if new is not None:
            await self._give(move, new)

    async def _remove(self, namespace: str, pod: Mapping[str, Any]) -> None:
        meta = pod["metadata"]
        if "deletionTimestamp" not in meta:
            with suppress(NotFound, Conflict):
                await self._kube.delete(PODS, meta["name"], namespace, uid=meta["uid"])

    async def _give(self, move: Move, new: Mapping[str, Any]) -> None:
        """Its ReplicaSet takes the new pod for one of its own."""
        if move.replica_set and mapping(new["metadata"].get("labels")).get(HASH) != move.template_hash:
            body = {"metadata": {"uid": new["metadata"]["uid"], "labels": {HASH: move.template_hash}}}
            with suppress(NotFound, Conflict):
                await self._kube.merge_patch(PODS, move.replacement, move.namespace, body)


def _ref(move: Move) -> MigrationRef:
    return MigrationRef(move.namespace, move.name, move.migration)


def _owned_by(pod: Mapping[str, Any], replica_set: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(each.get("controller") and each.get("name") == replica_set for each in owners)


def _recorded(ref: MigrationRef, spec: SeatMigrationSpec, pods: list[dict[str, Any]]) -> Move | None:
    """What was decided of it before, by the pod that was started: for a workflow that begins anew after Temporal lost
    its data. A record counts where it says what the spec does, for a pod that is claimed, too, or is gone.
    """
    claimed = {
        each["metadata"]["name"]: each["metadata"]
        for each in pods
        if mapping(each["metadata"].get("annotations")).get(CLAIM) == ref.uid
    }
    there = {each["metadata"]["name"] for each in pods}
    for name, meta in claimed.items():
        try:
            move = _MOVE.validate_json(mapping(meta.get("annotations")).get(RECORD) or "")
        except (ValidationError, TypeError):
            continue
        mine = (move.migration, move.namespace, move.name, move.replacement) == (ref.uid, ref.namespace, ref.name, name)
        if mine and fits(move, spec) and (move.pod in claimed or move.pod not in there):
            return move
    return None
