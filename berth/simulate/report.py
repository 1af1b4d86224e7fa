"""Shows what a simulation found: a table, and bars to compare the strategies at a glance."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_BAR = 40

# What the tables show of each figure: its name in the file, a heading, and how to write its mean.
COLUMNS = (
    ("unallocated_gpu_percent", "unallocated GPU %", "{:.2f}"),
    ("fragmented_gpu_percent", "fragmented GPU %", "{:.2f}"),
    ("unplaced_pods", "pods without a place", "{:,.0f}"),
    ("decisions_per_second", "decisions/s", "{:,.0f}"),
)


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report."""
    nodes, pods, found = report["nodes"], report["pods"], report["strategies"]
    seeds = f"{len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else f"seed {report['seeds'][0]}"
    console.print(
        f"[bold]simulated[/]: {nodes['count']:,} nodes with {nodes['gpus']:,} GPUs ({escape(nodes['file'])}), "
        f"{pods['count']:,} pods ({escape(pods['file'])}); they arrive and stay until they have asked for all GPUs; "
        f"{seeds}, mean ± standard deviation",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("strategy", style="cyan", no_wrap=True)
    for _, heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for name, told in found.items():
        table.add_row(name, *(_cell(told[key], form) for key, _, form in COLUMNS))
    console.print(table)
    key, heading, form = COLUMNS[0]
    console.print()
    _bars(console, heading, form, {name: told[key]["mean"] for name, told in found.items()})
    console.print(f"\n{report['seconds']:.1f} s")


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
