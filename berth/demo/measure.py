"""Measures what a run cost: requests that the API server counted, sizes of Temporal histories, memory of processes.

For the demo and the benchmarks. Read from the sources themselves; nothing is estimated.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from temporalio.client import Client, WorkflowExecution, WorkflowExecutionDescription

from activities.messages import placement_id
from kube.connection import Connection
from stack import Stack

WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
_LINE = re.compile(rb"^apiserver_request_total\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Request:
    """One kind of write as the API server counts it: `what` is resource[.group][/subresource]."""

    verb: str
    what: str
    ok: bool


async def api_writes(kubeconfig: Path) -> Counter[Request]:
    """All writes since the API server started, dry runs left out; two of them subtracted give a run's.

    From `apiserver_request_total` at /metrics, which counts by verb and resource; it knows no user agents.
    """
    connection = await Connection.open(kubeconfig, None, user_agent="berth-measure", timeout=30.0)
    try:
        timeout = aiohttp.ClientTimeout(total=30.0)
        url = f"{connection.host}/metrics"
        async with connection.session.get(url, timeout=timeout, **connection.options) as response:
            response.raise_for_status()
            return parse_writes(await response.read())
    finally:
        await connection.close()


def parse_writes(text: bytes) -> Counter[Request]:
    """The writes in a page of the API server's metrics."""
    totals: Counter[Request] = Counter()
    for match in _LINE.finditer(text):
        labels = dict(_LABEL.findall(match.group(1).decode()))
        if labels.get("verb") not in WRITES or labels.get("dry_run"):
            continue
        what = ".".join(filter(None, (labels.get("resource", ""), labels.get("group", ""))))
        if labels.get("subresource"):
            what += f"/{labels['subresource']}"
        totals[Request(labels["verb"], what, labels.get("code", "").startswith("2"))] += int(float(match.group(2)))
    return totals


def writes_between(before: Counter[Request], after: Counter[Request]) -> dict[str, int]:
    """What was written in between, most first: 'VERB resource' → count; what failed is marked."""
    spent = Counter(after)
    spent.subtract(before)
    named = {f"{r.verb} {r.what}{'' if r.ok else ' (refused)'}": n for r, n in spent.items() if n > 0}
    return dict(sorted(named.items(), key=lambda entry: (-entry[1], entry[0])))


@dataclass(frozen=True, slots=True)
class Histories:
    """Sizes of workflow histories: of each workload's own (0: it never had one), and of the shared ledger (all of its
    runs).
    """

    events: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    still_open: int = 0
    ledger_events: int = 0
    ledger_bytes: int = 0
    ledger_runs: int = 0

    @property
    def workflows(self) -> int:
        return sum(1 for events in self.events if events)


async def histories(client: Client, namespace: str | None, workloads: int, timeout: float = 15.0) -> Histories:
    """Reads from Temporal those of `workloads` that have ended in that Kubernetes namespace (None: in all).

    Temporal's list is some moments late, more so after much work: so it is read until it stays the same, and whatever
    it still calls open is asked for itself.
    """
    deadline = time.monotonic() + timeout
    query = 'BerthKind = "GPUWorkload"' + ("" if namespace is None else f' AND BerthNamespace = "{namespace}"')
    known = -1
    while True:
        events: Counter[str] = Counter()
        size: Counter[str] = Counter()
        late: list[WorkflowExecution] = []
        async for run in client.list_workflows(query, page_size=1000):
            if run.close_time is None:
                late.append(run)
            else:
                events[run.id] += run.history_length
                size[run.id] += run.raw_info.history_size_bytes
        still_open = 0
        for described in await _describe(client, late):
            if described.close_time is None:
                still_open += 1
            else:
                events[described.id] += described.history_length
                size[described.id] += described.raw_info.history_size_bytes
        if (len(events) == known and not still_open) or time.monotonic() > deadline:
            break
        known = len(events)
        await asyncio.sleep(2.0)
    ledger, none = await _ledger(client), (0,) * max(0, workloads - len(events))
    return Histories((*events.values(), *none), (*size.values(), *none), still_open, *ledger)


async def _describe(client: Client, runs: Sequence[WorkflowExecution]) -> list[WorkflowExecutionDescription]:
    """The runs as the server itself knows them, asked for a few at a time."""
    gate = asyncio.Semaphore(16)

    async def one(run: WorkflowExecution) -> WorkflowExecutionDescription:
        async with gate:
            return await client.get_workflow_handle(run.id, run_id=run.run_id).describe()

    return await asyncio.gather(*map(one, runs))


async def _ledger(client: Client, pool: str = "default") -> tuple[int, int, int]:
    """Events, bytes and runs of the placement ledger; Temporal lists lengths of closed runs only."""
    events = size = runs = 0
    async for run in client.list_workflows(f'WorkflowId = "{placement_id(pool)}"'):
        described = await client.get_workflow_handle(run.id, run_id=run.run_id).describe()
        events += described.history_length
        size += described.raw_info.history_size_bytes
        runs += 1
    return events, size, runs


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in bytes: resident, the proportional share of it, and the highest resident size so far."""

    rss: int
    pss: int
    peak: int


def memory(pid: int) -> Memory:
    """From /proc/<pid>; raises OSError when the process is gone."""
    proc = Path("/proc") / str(pid)
    rollup = _kilobytes((proc / "smaps_rollup").read_text())
    status = _kilobytes((proc / "status").read_text())
    return Memory(rollup["Rss"] * 1024, rollup["Pss"] * 1024, status["VmHWM"] * 1024)


def _kilobytes(text: str) -> Mapping[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far, in user and kernel mode; raises OSError when it is gone."""
    # proc(5): fields 14 and 15, counted from the state behind the name in brackets, which may hold anything
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stack_cpu(stack: Stack) -> dict[str, float]:
    """CPU seconds by process of a stack, for those that run; two of them subtracted give a run's."""
    used = {}
    for status in stack.status():
        if status.pid is not None:
            with suppress(OSError):
                used[status.name] = cpu_seconds(status.pid)
    return used


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was used in between, most first; a process that was restarted counts from its restart."""
    rest = {name: round(value - before.get(name, 0.0), 2) for name, value in after.items()}
    whole = {name: value if value >= 0 else after[name] for name, value in rest.items()}
    return dict(sorted(whole.items(), key=lambda entry: -entry[1]))
