"""Reads what Temporal recorded about a workload, the newest first and within bounds; for `berth explain --history`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryReverseRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import placement_id, provisioning_id, workload_id
from berth.explain.history import Entry, Looks, Rounds, in_order, moment
from berth.process import ProcessOptions, connect_temporal
from controller.outage import ANSWER, TEMPORAL_AWAY, reason
from planning.times import timestamp

# A ledger that is never idle writes about thirty events a second.
MOST_EVENTS = 200_000
MOST_SECONDS = 30.0
# By so much may the clocks of the API server, which says when a workload was created, and of Temporal differ.
_CLOCKS = 60.0
_PAGE = 200
_RUNS = 100
# A lazy client finds fault with its address or its certificates at its first call only.
_AWAY = (*TEMPORAL_AWAY, ValueError, OSError)

Progress = Callable[[int, float], None]
"""Is told how many events were read, and of what moment the last one is."""


@dataclass(frozen=True)
class Recorded:
    """The oldest entry first. `notes`: what is missing, and why."""

    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Life:
    """Of which workload is asked, and when it was created and ended (None: it goes on), in seconds since the epoch."""

    uid: str
    created: float
    ended: float | None = None


async def recorded(options: ProcessOptions, life: Life, progress: Progress) -> Recorded:
    """What could be had; the notes say what could not."""
    try:
        temporal = await connect_temporal(options)
    except _AWAY as away:
        return Recorded(notes=[_unread(away)])
    return await Reader(temporal, progress).read(life)


class Reader:
    """Reads once, `most_events` in at most about `most_seconds`."""

    def __init__(
        self, temporal: Client, progress: Progress, *, most_events: int = MOST_EVENTS,
        most_seconds: float = MOST_SECONDS,
    ) -> None:  # fmt: skip
        self._temporal = temporal
        self._progress = progress
        self._most_events = most_events
        self._deadline = time.monotonic() + most_seconds
        self._count = 0
        self._notes: list[str] = []

    async def read(self, life: Life) -> Recorded:
        """The looks of the workload's own workflow, and at its order of a node, come first: they are few."""
        looks, rounds = Looks(), Rounds(life.uid)
        sources = (
            (workload_id(life.uid), looks.read),
            (provisioning_id(life.uid), looks.read),
            (placement_id("default"), rounds.read),
        )
        try:
            for workflow, read in sources:
                async for event in self._events(workflow, life):
                    read(event)
        except _AWAY as away:
            self._notes.append(_unread(away))
        rounds.end()
        unreadable = looks.unreadable + rounds.unreadable
        if unreadable:
            self._notes.append(f"what is not shown, for it could not be decoded: {unreadable} results")
        return Recorded(in_order([*looks.entries, *rounds.entries]), self._notes)

    async def _events(self, workflow: str, life: Life) -> AsyncIterator[HistoryEvent]:
        """The events of all runs in the workload's life, the newest first; as many as there is time for."""
        run: str | None = ""  # the latest
        if life.ended is not None:
            run = await self._run_before(workflow, life.ended + _CLOCKS) or run
        oldest = 0.0
        while run is not None:
            began = None
            try:
                async for event in self._run(workflow, run):
                    if (at := moment(event)) < life.created - _CLOCKS:
                        return
                    if self._count >= self._most_events or time.monotonic() > self._deadline:
                        read = f"{self._count:,} events were read{_back(oldest)}"
                        self._notes.append(f"older rounds are not shown: {read}")
                        return
                    self._count, oldest, began = self._count + 1, at, event
                    yield event
                    if self._count % _PAGE == 0:
                        self._progress(self._count, at)
            except RPCError as missing:
                if missing.status != RPCStatusCode.NOT_FOUND:
                    raise
                if run:
                    self._notes.append(f"what was before {timestamp(oldest)} is not kept by Temporal any more")
                return
            if began is None:
                return
            before = began.workflow_execution_started_event_attributes.continued_execution_run_id
            run = before or await self._run_before(workflow, oldest)

    async def _run(self, workflow: str, run: str) -> AsyncIterator[HistoryEvent]:
        request = GetWorkflowExecutionHistoryReverseRequest(
            namespace=self._temporal.namespace,
            execution=WorkflowExecution(workflow_id=workflow, run_id=run),
            maximum_page_size=_PAGE,
        )
        while True:
            async with asyncio.timeout(ANSWER.total_seconds()):  # the connection is part of it
                page = await self._temporal.workflow_service.get_workflow_execution_history_reverse(request)
            for event in page.history.events:
                yield event
            if not page.next_page_token:
                return
            request.next_page_token = page.next_page_token

    async def _run_before(self, workflow: str, when: float) -> str | None:
        """The latest run that began before that."""
        query = f'WorkflowId = "{workflow}" AND StartTime < "{timestamp(when)}"'
        found = [each async for each in self._temporal.list_workflows(query, limit=_RUNS)]
        latest = max(found, key=lambda each: each.start_time, default=None)
        return latest.run_id if latest is not None else None


def _unread(away: Exception) -> str:
    where = "its address: --temporal-address, TEMPORAL_ADDRESS or a profile"
    return f"Temporal's history could not be read to the end ({where}): {reason(away)}"


def _back(oldest: float) -> str:
    return f", back to {timestamp(oldest)}" if oldest else ""
