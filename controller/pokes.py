"""Carries pokes to Temporal: coalesced, batched, in no hurry, and never lost while the process lives.

Many changes become one poke: the ledger hears at most a few times a second, a workload once for all that happened to it
meanwhile. What Temporal did not take stays dirty and is sent again with growing pauses; when it takes pokes again after
an outage, `recovered` asks for a sweep, for it may have come back without its data.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from opentelemetry import metrics
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import (
    PlacementState,
    Poke,
    WorkloadState,
    placement_attributes,
    placement_id,
    workload_attributes,
)
from activities.signatures import TASK_QUEUE, Versions, WorkloadRef
from controller.outage import ANSWER, TEMPORAL_AWAY, reason
from controller.routing import Route, WorkloadPoke
from workflows.placement import newest

log = logging.getLogger(__name__)

# The ledger's rounds cost the same whatever they carry, so news waits a moment for company.
LEDGER_PAUSE = 0.25
# Every pod that ends anywhere in the cluster may have freed something; nobody waits for exactly that one.
PODS_PAUSE = 1.0
WORKLOAD_PAUSE = 0.1
CONCURRENCY = 16
LONGEST_PAUSE = 15.0

_meter = metrics.get_meter("berth.controller")
_sent = _meter.create_counter("berth_pokes_sent", description="Pokes that Temporal took, by receiver")
_failed = _meter.create_counter("berth_pokes_failed", description="Pokes that Temporal did not take (yet)")


@dataclass(frozen=True, slots=True)
class _Due:
    poke: WorkloadPoke
    seen: Versions


class Poker:
    """`concern` notes who must hear, `run` delivers. `skip(uid)` is asked last, just before a poke leaves."""

    def __init__(
        self, client: Client, *, pool: str, skip: Callable[[str], bool], recovered: Callable[[], None]
    ) -> None:
        self._client = client
        self._pool = pool
        self._skip = skip
        self._recovered = recovered
        self._ledger_seen: Versions | None = None
        self._workloads: dict[str, _Due] = {}  # by the id of the workflow that is to hear
        self._wake = asyncio.Event()
        self._trouble = 0
        self._last_ledger_poke = -math.inf

    @property
    def reachable(self) -> bool:
        """False while Temporal does not take pokes."""
        return self._trouble == 0

    @property
    def pending(self) -> int:
        return len(self._workloads) + (self._ledger_seen is not None)

    def concern(self, route: Route, kind: str, version: int) -> None:
        """Somebody must hear of a change of `kind` (a plural name) at `version`."""
        if route.ledger:
            self._note_ledger({kind: version})
            self._wake.set()
        for poke in route.workloads:
            self._note_workload(self._workloads.get(poke.receiver), _Due(poke, {kind: version}))
            self._wake.set()

    def _note_ledger(self, seen: Versions) -> None:
        self._ledger_seen = newest(self._ledger_seen or {}, seen)

    def _note_workload(self, older: _Due | None, newer: _Due) -> None:
        """Two pokes of one workload become one: it begins a workflow if either would."""
        if older is not None:
            poke = older.poke if older.poke.begin and not newer.poke.begin else newer.poke
            poke = replace(poke, ended=older.poke.ended or newer.poke.ended)
            newer = _Due(poke, newest(older.seen, newer.seen))
        self._workloads[newer.poke.receiver] = newer

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(WORKLOAD_PAUSE)
            self._wake.clear()
            ok = await self._deliver()
            if ok and self._trouble:
                log.info("Temporal takes pokes again after %d failed rounds; sweeping", self._trouble)
                self._trouble = 0
                self._recovered()
            elif not ok:
                self._trouble += 1
                pause = min(LONGEST_PAUSE, 0.5 * 2.0 ** min(self._trouble, 10)) * (0.5 + random.random() / 2)
                await asyncio.sleep(pause)
                self._wake.set()

    async def flush(self, seconds: float) -> None:
        """Delivers what is pending, `seconds` at most: on shutdown nothing that was seen should wait for a resync."""
        try:
            async with asyncio.timeout(seconds):
                while self.pending:
                    self._last_ledger_poke = -math.inf
                    if not await self._deliver():
                        return
        except TimeoutError:
            log.warning("%d pokes are left to the next leader's sweep", self.pending)

    async def _deliver(self) -> bool:
        """Sends all that is due. False if Temporal did not take something; that stays due, and so does all that was
        not sent because this was cancelled or failed otherwise.
        """
        ledger_heard = await self._deliver_to_ledger()
        return await self._deliver_to_workloads() and ledger_heard

    async def _deliver_to_ledger(self) -> bool:
        if self._ledger_seen is None:
            return True
        pause = PODS_PAUSE if self._ledger_seen.keys() <= {"pods"} else LEDGER_PAUSE
        remaining = self._last_ledger_poke + pause - time.monotonic()
        if remaining > 0:
            asyncio.get_running_loop().call_later(remaining, self._wake.set)
            return True
        seen, self._ledger_seen = self._ledger_seen, None
        taken = False
        try:
            taken = await self._attempt(self._poke_ledger(seen), "ledger")
        finally:
            if taken:
                self._last_ledger_poke = time.monotonic()
            else:
                self._note_ledger(seen)
        return taken

    async def _deliver_to_workloads(self) -> bool:
        batch, self._workloads = self._workloads, {}
        left = dict(batch)
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(receiver: str, due: _Due) -> None:
            async with gate:
                poke = due.poke
                if poke.order:
                    heard = await self._attempt(self._signal(due), "order")
                else:
                    nobody = self._skip(poke.uid) and not poke.ended
                    heard = nobody or await self._attempt(self._poke_workload(due), "workload")
                if heard:
                    del left[receiver]

        try:
            async with asyncio.TaskGroup() as group:
                for receiver, due in batch.items():
                    group.create_task(one(receiver, due))
        finally:
            for receiver, due in left.items():
                again = self._workloads.pop(receiver, None)
                self._note_workload(None if again is None else due, again or due)
        return not left

    async def _attempt(self, call: Awaitable[None], receiver: str) -> bool:
        try:
            await call
        except TEMPORAL_AWAY as away:
            _failed.add(1, {"receiver": receiver})
            if self._trouble == 0:
                log.warning("Temporal did not take a poke of the %s: %s; trying again", receiver, reason(away))
            return False
        _sent.add(1, {"receiver": receiver})
        return True

    async def _poke_ledger(self, seen: Versions) -> None:
        await self._client.start_workflow(
            "Placement",
            PlacementState(pool=self._pool),
            id=placement_id(self._pool),
            task_queue=TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=placement_attributes(self._pool),
            static_summary=f"Placement ledger of pool {self._pool}",
            start_signal="poke",
            start_signal_args=[Poke(seen)],
            rpc_timeout=ANSWER,
        )

    async def _poke_workload(self, due: _Due) -> None:
        poke = due.poke
        ref = WorkloadRef(poke.uid, poke.namespace, poke.name)
        if poke.begin and not poke.ended:
            try:
                # A plain start, not signal-with-start: the first look needs no signal, which saves an event.
                await self._client.start_workflow(
                    "GPUWorkload",
                    WorkloadState(ref, seen=due.seen),
                    id=poke.receiver,
                    task_queue=TASK_QUEUE,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                    search_attributes=workload_attributes(ref, poke.node, poke.phase),
                    static_summary=f"{poke.namespace}/{poke.name}",
                    rpc_timeout=ANSWER,
                )
                return
            except WorkflowAlreadyStartedError:
                pass
        await self._signal(due)

    async def _signal(self, due: _Due) -> None:
        try:
            handle = self._client.get_workflow_handle(due.poke.receiver)
            await handle.signal("poke", Poke(due.seen), rpc_timeout=ANSWER)
        except RPCError as refused:
            if refused.status != RPCStatusCode.NOT_FOUND:
                raise
            # Nobody to tell. If it closed between start and signal, its last look came after this change was made.
