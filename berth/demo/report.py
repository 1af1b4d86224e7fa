"""The figures of a run and how they are shown: a table, a JSON file, and lines to paste for looking further.

Everything is computed from what was measured (`live.Fleet`, `measure`). What cannot be measured is left out.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from berth.demo.cut import FAILS_AFTER, Cut
from berth.demo.live import Fleet, Sample
from berth.demo.manifests import NAMESPACE
from berth.demo.measure import Histories
from stack import Endpoints

# The fleet counts as full from the moment it first came this near to the most it ever had in use.
_FULL = 0.98


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds by the wall clock: stack up, nodes ready, all workloads applied, the last one ended, all in all."""

    stack: float
    nodes: float
    applied: float
    ended: float
    total: float


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` from 0 to 1. ValueError when there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def unallocated(samples: Sequence[Sample], total: int) -> dict[str, float | int]:
    """GPUs nobody used while somebody waited: at the fullest moment, and on average from then until nobody waits.

    The average is over time and starts when the fleet first was about as full as it ever got: before that, GPUs are
    free because placing takes its time, not because of how it is done. Empty when nobody ever waited.
    """
    while_waiting = [sample for sample in samples if sample.waiting]
    if not while_waiting:
        return {}
    fullest = max(while_waiting, key=lambda sample: sample.in_use)
    first = next(i for i, sample in enumerate(samples) if sample.waiting and sample.in_use >= fullest.in_use * _FULL)
    seconds = area = 0.0
    for one, following in zip(samples[first:], samples[first + 1 :], strict=False):
        if one.waiting:
            seconds += following.at - one.at
            area += (following.at - one.at) * (total - one.in_use)
    result: dict[str, float | int] = {
        "at_fullest": total - fullest.in_use,
        "waiting_at_fullest": fullest.waiting,
        "seconds_full_and_waiting": round(seconds, 2),
    }
    if seconds:
        result["mean_while_waiting"] = round(area / seconds, 1)
    return result


def figures(
    cut: Cut, fleet: Fleet, timings: Timings, histories: Histories, writes: Mapping[str, int], *, seed: int
) -> dict[str, Any]:
    """Everything that was measured, as plain values; seconds, GPUs, bytes."""
    items = list(fleet.items.values())
    placing = [item.placed - item.applied for item in items if item.placed is not None and item.applied is not None]
    count = max(1, len(items))
    last_placed = max((item.placed for item in items if item.placed is not None), default=0.0)
    result: dict[str, Any] = {
        "input": {
            "trace": "Alibaba openb (cluster-trace-gpu-v2023)",
            "nodes": len(cut.nodes),
            "gpus": cut.gpus,
            "workloads": len(cut.runs),
            "gpus_wanted": cut.gpus_wanted,
            "left_out": len(cut.left_out),
            "seed": seed,
        },
        "simulated": {
            "nodes": "kwok",
            "run_seconds_shortest": min(_run_seconds(cut)),
            "run_seconds_longest": max(_run_seconds(cut)),
            "trace_seconds_shortest": min(run.pod.seconds for run in cut.runs),
            "trace_seconds_longest": max(run.pod.seconds for run in cut.runs),
            "failing_workloads": sum(run.fails != 0 for run in cut.runs),
        },
        "workloads": {
            "applied": sum(item.applied is not None for item in items),
            "placed": sum(item.placed is not None for item in items),
            "ran": sum(item.ran is not None for item in items),
            "retried": sum(item.retries > 0 for item in items),
            "succeeded": sum(item.state == "succeeded" for item in items),
            "failed": sum(item.state == "failed" for item in items),
            "unfinished": sum(item.ended is None for item in items),
            "jobs": fleet.placements,
        },
        "gpus": {
            "most_in_use": max((sample.in_use for sample in fleet.samples), default=0),
            "most_waiting_workloads": max((sample.waiting for sample in fleet.samples), default=0),
            "unallocated_while_waiting": unallocated(fleet.samples, cut.gpus),
            "node_overcommitted": fleet.overcommitted,
        },
        "histories": {
            "workflows": histories.workflows,
            "still_open": histories.still_open,
            "ledger_events": histories.ledger_events,
            "ledger_bytes": histories.ledger_bytes,
            "ledger_runs": histories.ledger_runs,
            "ledger_events_per_workload": round(histories.ledger_events / count, 2),
        },
        "api_writes": {"total": sum(writes.values()), "per_workload": round(sum(writes.values()) / count, 2)},
        "api_writes_by_kind": dict(writes),
        "seconds": {name: round(getattr(timings, name), 2) for name in timings.__dataclass_fields__},
    }
    if placing:
        result["time_to_placement"] = {
            "p50": round(percentile(placing, 0.5), 3),
            "p99": round(percentile(placing, 0.99), 3),
            "max": round(max(placing), 3),
        }
        result["workloads"]["placed_per_second"] = round(len(placing) / last_placed, 1) if last_placed else None
    if histories.events:
        result["histories"] |= {
            "events_mean": round(sum(histories.events) / len(histories.events), 2),
            "events_p50": percentile(histories.events, 0.5),
            "events_max": max(histories.events),
            "bytes_mean": round(sum(histories.size) / len(histories.size)),
            "bytes_max": max(histories.size),
        }
    return result


def table(result: Mapping[str, Any]) -> RenderableType:
    """The figures for a person."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(justify="right", style="bold", no_wrap=True)
    grid.add_column(style="dim")
    for name, value, note in rows(result):
        grid.add_row(name, value, note)
    return Group(Rule("what was measured", style="blue"), grid)


def rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The table's rows: name, value, and what it means."""
    given, simulated, work = result["input"], result["simulated"], result["workloads"]
    gpus, histories, seconds = result["gpus"], result["histories"], result["seconds"]
    lines: list[tuple[str, str, str]] = [
        ("applied", _n(work["applied"]), f"GPUWorkloads that want {given['gpus_wanted']:,} GPUs"),
        ("placed", _n(work["placed"]), f"{work['jobs']:,} Jobs on {given['nodes']} nodes with {given['gpus']:,} GPUs"),
        ("ran", _n(work["ran"]), ""),
        ("retried", _n(work["retried"]), f"{simulated['failing_workloads']} of all were made to fail (simulated)"),
        ("succeeded", _n(work["succeeded"]), ""),
        ("failed", _n(work["failed"]), "after their retry"),
    ]
    if work["unfinished"]:
        lines.append(("unfinished", _n(work["unfinished"]), "not ended when the time was over"))
    if placing := result.get("time_to_placement"):
        lines += [
            ("time to placement, p50", f"{placing['p50']:.2f} s", "from being applied to its first Job"),
            ("time to placement, p99", f"{placing['p99']:.2f} s", "with the wait for free GPUs"),
            ("placed per second", f"{work['placed_per_second']}", "until the last first Job"),
        ]
    lines.append(("most GPUs in use", _n(gpus["most_in_use"]), f"of {given['gpus']:,}"))
    if idle := gpus["unallocated_while_waiting"]:
        waited = idle["waiting_at_fullest"]
        note = f"while {waited:,} {'workload' if waited == 1 else 'workloads'} waited"
        lines.append(("GPUs left unallocated", _n(idle["at_fullest"]), f"at the fullest moment, {note}"))
        if "mean_while_waiting" in idle:
            after = f"on average in the {idle['seconds_full_and_waiting']:.0f} s from then on while any waited"
            lines.append(("", f"{idle['mean_while_waiting']:.1f}", after))
    else:
        lines.append(("GPUs left unallocated", "–", "no workload waited"))
    lines.append(("overcommitted", _n(gpus["node_overcommitted"]), "times a node had more GPUs in use than it has"))
    if "events_mean" in histories:
        lines += [
            ("history of a workload", f"{histories['events_mean']:.1f}", f"events, at most {histories['events_max']}"),
            ("", f"{histories['bytes_mean']:,}", f"bytes, at most {histories['bytes_max']:,}"),
        ]
    runs = f"in {histories['ledger_runs']} runs, " if histories["ledger_runs"] > 1 else ""
    ledger = f"events for all, {runs}{histories['ledger_bytes']:,} bytes"
    lines.append(("history of the ledger", _n(histories["ledger_events"]), ledger))
    writes = result["api_writes"]
    who = "by everybody: berth, kwok, Kubernetes' own, this demo"
    lines.append(("API writes a workload", f"{writes['per_workload']:.1f}", who))
    lines.append(
        ("wall clock", f"{seconds['total']:.0f} s", f"{seconds['stack']:.0f} s of it until berth and its stack were up")
    )
    return lines


def simulation(cut: Cut) -> str:
    """What is not real here, in one sentence."""
    times = _run_seconds(cut)
    trace = [run.pod.seconds for run in cut.runs]
    failing = sum(run.fails != 0 for run in cut.runs)
    return (
        f"Simulated: the nodes and pods (kwok), the run times ({_duration(min(trace))} to {_duration(max(trace))} in "
        f"the trace, here {min(times):g} to {max(times):g} s by their logarithm), the failures (of {failing} of them, "
        f"after at most {FAILS_AFTER:g} s). "
        "Real: the API server, etcd, scheduler, Job controller, Temporal, and berth."
    )


def _run_seconds(cut: Cut) -> list[float]:
    """How long the runs last that are left to end by themselves; of all of them, where all are made to fail."""
    return [run.seconds for run in cut.runs if not run.fails] or [run.seconds for run in cut.runs]


def _duration(seconds: int) -> str:
    """In the largest unit that leaves at least two of it."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds} s"


def where_to_look(endpoints: Endpoints, *, kept: bool) -> RenderableType:
    """Addresses and lines to paste, with the tools that the stack found."""
    kubectl = endpoints.tools.get("kubectl", "kubectl")
    temporal = endpoints.tools.get("temporal", "temporal")
    kube = f"{_q(kubectl)} --kubeconfig {_q(endpoints.kubeconfig())}"
    stop = f"berth down --data {_q(endpoints.data)}"
    if not kept:
        return Text(f"The stack was stopped; its data is in {endpoints.data}.", style="dim")
    text = Text()
    text.append("Temporal UI   ", "cyan")
    text.append(f"{endpoints.temporal_ui or '(off)'}\n", "bold underline")
    for label, command in (
        ("workloads     ", f"{kube} get gpuw -n {NAMESPACE}"),
        ("one, in words ", f"{kube} describe gpuw -n {NAMESPACE} openb-pod-0017"),
        (
            "workflows     ",
            f"{_q(temporal)} workflow list --address {endpoints.temporal_address} --query 'BerthKind=\"GPUWorkload\"'",
        ),
        (
            "the ledger    ",
            f"{_q(temporal)} workflow describe --address {endpoints.temporal_address} -w placement/default",
        ),
        ("stop it       ", stop),
    ):
        text.append(label, "cyan")
        text.append(f"{command}\n")
    text.rstrip()
    return Group(Rule("where to look (the stack keeps running)", style="blue"), text)


def _q(value: object) -> str:
    return shlex.quote(str(value))


def _n(value: int) -> str:
    return f"{value:,}"
