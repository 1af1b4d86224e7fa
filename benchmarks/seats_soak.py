"""Three model servers on one group of GPUs, asked without end by their Services: what a switch takes beyond the
backend's own time, what becomes of requests, whether anything grows, and that nothing goes wrong when all that can be
killed is.

For whoever changes how seats are switched. A real kubelet, API server and Temporal run here; simulated are the GPUs and
the servers on them, which really hold and copy memory. It asserts nothing.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from benchmarks.own_stack import MEGABYTE
from benchmarks.report import Report, arguments, progress
from berth.demo import measure
from berth.process import ProcessOptions, connect_temporal
from planning.seats.orders import group_id
from stack.realnode import unavailable
from tests.nodeworkers.pods import NODE
from tests.nodeworkers.seats.soak import Seen, soak
from tests.nodeworkers.seats.whole import NAMES, Seated, seated, server, service

SWITCHES = 10_000
KILLING = 1800.0  # seconds
GOAL = 0.1  # seconds of overhead, p99
_BACKEND = ("park: lock", "park: checkpoint", "wake: restore", "wake: unlock")
_SLICE = 60.0  # seconds between looks at how many switches there were


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def overheads(node: Seated) -> tuple[list[float], float]:
    """Of each switch in the workflow's present run: seconds from the signal until whoever was asked for serves, less
    those of the drain and of the backend; and events of its history for each.
    """
    endpoints = node.node.stack.endpoints
    options = ProcessOptions(
        temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace
    )
    temporal: Client = await connect_temporal(options, lazy=False)
    found: list[float] = []
    begun, events = 0.0, 0
    async for event in temporal.get_workflow_handle(group_id(NODE, "G01")).fetch_history_events():
        events += 1
        at = event.event_time.ToDatetime().timestamp()
        match event.event_type:
            case EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED | EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
                begun = begun or at
            case EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
                ended = event.activity_task_completed_event_attributes
                said: dict[str, Any] = json.loads(ended.result.payloads[0].data)
                told = said["seconds"]
                if said["switched"] and "start" not in told:
                    own = sum(told.get(stage, 0.0) for stage in (*_BACKEND, "drain"))
                    found.append(at - begun - own)
                begun = 0.0
    return found, events / max(1, len(found))


def sizes(node: Seated) -> dict[str, int]:
    """Bytes (PSS) of what goes on for as long as the node does."""
    found = {"berth node": measure.memory(node.node.stack.pid("node")).pss}
    for name, words in (("seat proxy", "seat-proxy --control"), ("helper", "nodeworkers.seats.helper")):
        found[name] = sum(measure.memory(pid).pss for pid in node.processes(words))
    found["servers"] = sum(measure.memory(pid).pss for pid in node.processes("simulated_gpu.server"))
    return found


def switches(node: Seated) -> int:
    return int(node.group().get("switches", 0))


def tell_requests(seen: Seen, title: str, report: Report) -> None:
    waits = seen.waits
    report.note({
        title: {
            "answered": seen.answered, "refused": dict(seen.refused), "broken": seen.broken, "wrong": seen.wrong,
            "victims": dict(seen.victims), "p50": percentile(waits, 0.5), "p99": percentile(waits, 0.99),
        }
    })  # fmt: skip
    report.row(
        f"{title}: requests answered", str(seen.answered),
        f"p50 {percentile(waits, 0.5):.2f} s, p99 {percentile(waits, 0.99):.2f} s; refused with a reason: "
        f"{sum(seen.refused.values())}, broken off: {seen.broken}, wrong: {len(seen.wrong)}",
    )  # fmt: skip


def main() -> None:
    parser = arguments("seats_soak", str(__doc__).partition("\n")[0])
    parser.add_argument("--switches", type=int, default=SWITCHES)
    parser.add_argument("--killing", type=float, default=KILLING, help="seconds for which all that can be killed is")
    options = parser.parse_args()
    if why := unavailable():
        raise SystemExit(f"No real kubelet can run here: {why}")
    report = Report("Three model servers on two GPUs under a real kubelet, simulated GPUs")
    with tempfile.TemporaryDirectory(prefix="berth-seats-") as folder, seated(Path(folder), lost_percent=50) as node:
        node.node.apply(*(service(name) for name in NAMES), *(server(name, node.folder) for name in NAMES))
        progress("they start ...")
        with ThreadPoolExecutor(3) as clients:
            list(clients.map(node.ask_until_answered, NAMES))
        progress(f"{options.switches} switches ...")
        before, first, began = sizes(node), switches(node), time.monotonic()
        asked = Seen()
        while switches(node) - first < options.switches:
            soak(node, min(_SLICE, 5.0 + options.switches), kills=False, seen=asked)
            progress(f"{switches(node) - first} switches")
        made, took, after = switches(node) - first, time.monotonic() - began, sizes(node)
        over, events = asyncio.run(overheads(node))
        report.note({
            "switches": made, "seconds": round(took, 1), "overhead": over, "events": events,
            "memory before": before, "memory after": after,
        })  # fmt: skip
        report.row("switches", str(made), f"{took / made:.2f} s each with what was served between them")
        report.row(
            "overhead of a switch", f"{1000 * statistics.median(over):.0f} / {1000 * percentile(over, 0.99):.0f} ms",
            f"p50 / p99 of {len(over)}: from the signal until it serves, less drain and backend; goal "
            f"{GOAL * 1000:.0f} ms",
        )  # fmt: skip
        report.row("events of history", f"{events:.1f}", "for each switch, with all looks that changed nothing")
        for name, size in after.items():
            grown = f"{(size - before[name]) / MEGABYTE:+.1f} MB since the start"
            report.row(f"memory of {name}", f"{size / MEGABYTE:.0f} MB", grown)
        tell_requests(asked, "switching", report)
        if options.killing:
            progress(f"kills for {options.killing:.0f} s ...")
            killed = soak(node, options.killing, kills=True)
            victims = ", ".join(f"{name} {count}" for name, count in killed.victims.items())
            report.row("kills", str(sum(killed.victims.values())), victims)
            tell_requests(killed, "under kills", report)
        verdict = node.verdict()
        report.note({"wrong on the GPUs": verdict.wrong, "restores": verdict.restores})
        report.row("wrong by the GPUs' own log", str(len(verdict.wrong)), f"{verdict.restores} times memory came back")
    report.finish(options.json)


if __name__ == "__main__":
    main()
