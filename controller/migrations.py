"""Watches SeatMigrations, and begins the workflow of each that has not ended. A part of the leader's term; it decides
nothing. What happens afterwards the workflow's activities see for themselves, so that nothing has to be told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from activities.migration_signatures import (
    SEAT_MIGRATION_WORKFLOW,
    MigrationRef,
    migration_attributes,
    migration_id,
)
from activities.signatures import TASK_QUEUE
from controller.outage import ANSWER, TEMPORAL_AWAY, reason
from crds.seatmigration import ENDED, FINALIZER
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import SEATMIGRATIONS
from planning.podspecs import mapping, text

log = logging.getLogger(__name__)

LONGEST_PAUSE = 15.0


@dataclass(frozen=True, slots=True)
class MigrationDigest:
    """`open`: somebody has to carry it on, or to let go of it."""

    ref: MigrationRef
    open: bool


class MigrationWatch:
    """`run` watches and begins until cancelled."""

    def __init__(self, kube: KubeClient, temporal: Client) -> None:
        self._temporal = temporal
        self._due: dict[str, MigrationRef] = {}
        self._wake = asyncio.Event()
        self.trouble = ""
        """Why Temporal does not take them; '' while it does."""
        self.migrations: Reflector[MigrationDigest] = Reflector(
            kube, SEATMIGRATIONS, project=migration_digest, on_change=self._changed
        )

    @property
    def reflectors(self) -> dict[str, Reflector[Any]]:
        return {"seatmigrations": self.migrations}

    def sweep(self) -> None:
        """For a new term, for Temporal that came back, and from time to time."""
        for digest in self.migrations.items.values():
            self._begin(digest)

    async def run(self) -> None:
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            if await self._deliver():
                if failures:
                    self.sweep()  # Temporal may have come back without its data
                failures, self.trouble = 0, ""
                continue
            failures += 1
            await asyncio.sleep(min(LONGEST_PAUSE, 0.5 * 2.0 ** min(failures, 10)))
            self._wake.set()

    async def flush(self, seconds: float) -> None:
        """Begins once what was seen and not begun yet, `seconds` at most: the next leader sweeps."""
        try:
            async with asyncio.timeout(seconds):
                await self._deliver()
        except TimeoutError:
            log.warning("%d SeatMigrations are left to the next leader's sweep", len(self._due))

    def _changed(self, change: Change[MigrationDigest]) -> None:
        if change.new is not None and change.new != change.old:
            self._begin(change.new)

    def _begin(self, digest: MigrationDigest) -> None:
        if digest.open:
            self._due[digest.ref.uid] = digest.ref
            self._wake.set()

    async def _deliver(self) -> bool:
        """False if Temporal did not take one: it stays due."""
        for uid, ref in list(self._due.items()):
            try:
                await self._temporal.start_workflow(
                    SEAT_MIGRATION_WORKFLOW,
                    ref,
                    id=migration_id(uid),
                    task_queue=TASK_QUEUE,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                    search_attributes=migration_attributes(ref),
                    static_summary=ref.told,
                    rpc_timeout=ANSWER,
                )
            except TEMPORAL_AWAY as away:
                if not self.trouble:
                    log.warning("Temporal did not take SeatMigration %s: %s; trying again", ref.told, reason(away))
                self.trouble = reason(away)
                return False
            self._due.pop(uid, None)
        return True


def migration_digest(raw: Mapping[str, Any]) -> MigrationDigest:
    meta = mapping(raw.get("metadata"))
    ended = mapping(raw.get("status")).get("phase") in ENDED
    leaving = "deletionTimestamp" in meta and FINALIZER in (meta.get("finalizers") or ())
    ref = MigrationRef(text(meta.get("namespace")), text(meta.get("name")), text(meta.get("uid")))
    return MigrationDigest(ref, leaving or not ended)
