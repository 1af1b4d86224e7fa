"""Shows what a simulation found: a table, and bars to compare the strategies at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_BAR = 40

# What the tables show of each figure: its name in the file, a heading, and how to write its mean.
FILLED = (
    ("unallocated_gpu_percent", "unallocated GPU %", "{:.2f}"),
    ("fragmented_gpu_percent", "fragmented GPU %", "{:.2f}"),
    ("unplaced_pods", "pods without a place", "{:,.0f}"),
    ("decisions_per_second", "decisions/s", "{:,.0f}"),
)
LIVED = (
    ("wait_seconds_mean", "mean wait s", "{:,.1f}"),
    ("wait_seconds_p99", "p99 wait s", "{:,.0f}"),
    ("waited_pods_percent", "pods that waited %", "{:.1f}"),
    ("allocated_gpu_percent", "allocated GPU %", "{:.1f}"),
    ("unplaced_pods", "fit no node", "{:,.0f}"),
    ("arrivals_per_second", "arrivals/s", "{:,.0f}"),
)


def show(report: dict[str, Any], console: Console, file: Path | None) -> None:
    """Prints the report; `file` is where all of it was written to."""
    nodes, pods, found = report["nodes"], report["pods"], report["strategies"]
    filled = report["load"] is None
    seeds = f"{len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else f"seed {report['seeds'][0]}"
    what = (
        "pods arrive and stay until they have asked for all GPUs"
        if filled
        else f"pods come and go, {100 * report['load']:g} % load"
    )
    console.print(
        f"[bold]simulated[/]: {nodes['count']:,} nodes with {nodes['gpus']:,} GPUs ({nodes['file']}), "
        f"{pods['count']:,} pods ({pods['file']}); {what}; {seeds}, mean ± standard deviation",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("strategy", style="cyan", no_wrap=True)
    columns = FILLED if filled else LIVED
    for _, heading, _ in columns:
        table.add_column(heading, justify="right")
    for name, told in found.items():
        table.add_row(name, *(_cell(told[key], form) for key, _, form in columns))
    console.print(table)
    key, heading, form = columns[0]
    console.print()
    _bars(console, heading, form, {name: told[key]["mean"] for name, told in found.items()})
    for tenant in sorted({tenant for told in found.values() for tenant in told.get("wait_seconds_by_tenant", {})}):
        console.print()
        means = {name: told["wait_seconds_by_tenant"][tenant]["mean"] for name, told in found.items()}
        _bars(console, f"mean wait s of tenant {tenant or '(none)'}", "{:,.1f}", means)
    console.print(f"\n{report['seconds']:.1f} s" + (f"; all figures are in {file}" if file else ""))


def _cell(spread: dict[str, Any], form: str) -> str:
    return f"{form.format(spread['mean'])} ± {form.format(spread['sd'])}"


def _bars(console: Console, heading: str, form: str, values: dict[str, float]) -> None:
    """One bar a strategy; the longest fills the width."""
    console.print(heading, style="bold", markup=False)
    most = max(values.values()) or 1.0
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in values.items():
        table.add_row(name, "█" * max(round(_BAR * value / most), 1 if value > 0 else 0), form.format(value))
    console.print(table)
