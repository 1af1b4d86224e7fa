"""`python -m benchmarks.kueue`: both sides one after the other, at equal client QPS and then without limits."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kueue import ours, peer
from benchmarks.kueue.load import BASELINE, Load
from benchmarks.kueue.outcome import Outcome
from benchmarks.report import Report, arguments, progress
from stack import Lines
from stack.tools import Toolbox

MEGABYTE = 1024 * 1024
RATES = ("equal", "unlimited")
SIDES = ("kueue", "berth")


def main() -> None:
    """Entry point."""
    parser = arguments("kueue", "Kueue's performance baseline by Kueue itself and by berth, in the same run")
    parser.add_argument("--scale", type=_share, default=1.0, help="share of the baseline's workloads (1.0)")
    parser.add_argument(
        "--rates", nargs="+", choices=RATES, default=list(RATES),
        help="equal: 50 requests/s for Kueue's client and for berth's creation of Jobs; default: both",
    )  # fmt: skip
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: both")
    parser.add_argument("--quotas", action="store_true", help="berth admits under GPUQuotas, as Kueue does anyway")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each run (1800)")
    options = parser.parse_args()
    load = BASELINE.scaled(options.scale)
    report = Report(f"Kueue's baseline: {load.workloads:,} workloads in {len(load.namespaces)} queues")
    report.note({"scale": options.scale, "quotas": options.quotas, "shortest_seconds": load.shortest})
    for rate in options.rates:
        sides = {side: _run(side, load, options, rate) for side in SIDES if side in options.sides}
        values = {side: _values(*measured) for side, measured in sides.items()}
        report.note({rate: values})
        _rows(report, rate, {side: outcome for side, (outcome, _) in sides.items()})
        if "berth" in values:
            _berth_rows(report, values["berth"])
    report.row("shortest possible, s", f"{load.shortest:.0f}", "a queue's work on its own cores, or its creation")
    if "berth" in options.sides and not options.quotas:
        report.row("no quotas", "", "berth places whatever there is room for; Kueue keeps its quotas")
    report.finish(options.json)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError("a share is above 0 and at most 1")
    return share


def _run(side: str, load: Load, options: argparse.Namespace, rate: str) -> tuple[Outcome, ours.Details | None]:
    limited = rate == "equal"
    progress(f"{side}, {'50 requests/s' if limited else 'without limits'}: {load.workloads:,} workloads …")
    folder = Path(tempfile.mkdtemp(prefix=f"berth-kueue-{side}-"))
    try:
        if side == "berth":
            return ours.run(ours.Asked(load, limited, options.quotas, options.timeout), folder)
        harness = peer.build()
        peer.check_baseline(harness)
        assets = folder / "assets"
        assets.mkdir()
        for name, found in Toolbox().ensure(("etcd", "kube-apiserver"), Lines()).items():
            (assets / name).symlink_to(found.path)
        return peer.run(harness, load, folder, assets, limited=limited, timeout=options.timeout), None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _values(outcome: Outcome, details: ours.Details | None) -> dict[str, Any]:
    values: dict[str, Any] = {**asdict(outcome), "per_second": round(outcome.per_second, 2)}
    values["writes_per_workload"] = round(sum(outcome.writes.values()) / outcome.workloads, 2)
    values["cpu_milliseconds_per_workload"] = {
        name: round(1000 * used / outcome.workloads, 2) for name, used in outcome.cpu.items()
    }
    if details is not None:
        found = details.histories
        values |= {
            "admitted_seconds": round(details.admitted, 2),
            "ended_seconds": round(details.ended, 2),
            "histories": {
                "workflows": found.workflows,
                "still_open": found.still_open,
                "events_mean": round(sum(found.events) / max(1, len(found.events)), 2),
                "events_max": max(found.events, default=0),
                "ledger_events": found.ledger_events,
                "ledger_events_per_workload": round(found.ledger_events / outcome.workloads, 3),
                "ledger_runs": found.ledger_runs,
                "ledger_bytes": found.ledger_bytes,
            },
        }
    return values


def _admission(outcome: Outcome, name: str) -> float:
    return outcome.admission[name]


def _rows(report: Report, rate: str, sides: Mapping[str, Outcome]) -> None:
    """Each measure: berth's, or the only side's, and beside it the peer's and the ratio."""

    def row(name: str, form: str, measure: Callable[[Outcome], float]) -> None:
        values = {side: measure(outcome) for side, outcome in sides.items()}
        note = ""
        if set(SIDES) <= set(values):
            note = f"Kueue {values['kueue']:{form}}; ratio {values['berth'] / values['kueue']:.2f}"
        report.row(name, f"{values[list(values)[-1]]:{form}}", note)

    report.row("50 requests/s" if rate == "equal" else "no limit", "", f"{' and '.join(sides)}")
    row("  workloads/s", ".1f", lambda each: each.per_second)
    for name in ("small", "medium", "large"):
        row(f"  s to admission, {name}", ".1f", partial(_admission, name=name))
    row("  API writes a workload", ".2f", lambda each: sum(each.writes.values()) / each.workloads)
    row("  CPU ms a workload", ".1f", lambda each: 1000 * sum(each.cpu.values()) / each.workloads)
    for side, outcome in sides.items():
        for name, used in sorted(outcome.cpu.items()):
            report.row(f"    {side}, {name}", f"{1000 * used / outcome.workloads:.1f}")
    row("  memory, MB", ".0f", lambda each: each.durable_memory / MEGABYTE)


def _berth_rows(report: Report, values: Mapping[str, Any]) -> None:
    found = values["histories"]
    report.row("  history events", f"{found['events_mean']}", f"of its own; at most {found['events_max']}")
    report.row("", f"{found['ledger_events_per_workload']}", "of the shared ledger, a workload")
    report.row("  s to the last Job", f"{values['admitted_seconds']}", f"to the last end {values['ended_seconds']}")


if __name__ == "__main__":
    main()
