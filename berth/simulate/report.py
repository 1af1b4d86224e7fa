"""Shows what a simulation found: tables, and bars to compare the strategies at a glance."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_BAR = 40
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_GROUPS = 6  # in a table; the file has all

# What the tables show of each figure: its name in the file, a heading, and how to write its mean.
COLUMNS = (
    ("unallocated_gpu_percent", "unallocated GPU %", "{:.2f}"),
    ("fragmented_gpu_percent", "fragmented GPU %", "{:.2f}"),
    ("unplaced_pods", "pods without a place", "{:,.0f}"),
    ("decisions_per_second", "decisions/s", "{:,.0f}"),
)
# The same where work comes and goes.
WAITS = (
    ("mean_wait_seconds", "mean wait, s", "{:,.0f}"),
    ("median_wait_seconds", "median", "{:,.0f}"),
    ("p90_wait_seconds", "p90", "{:,.0f}"),
    ("p99_wait_seconds", "p99", "{:,.0f}"),
)
FLEET = (
    ("unallocated_gpu_percent", "unallocated GPU %", "{:.2f}"),
    ("fragmented_gpu_percent", "fragmented GPU %", "{:.2f}"),
    ("waiting_gpu_percent", "waiting GPU %", "{:.2f}"),
    ("never_placed_pods", "never placed", "{:,.0f}"),
)
_WITHOUT_SPREAD = ("median_wait_seconds", "p90_wait_seconds")  # in the table, for the sake of its width

Columns = tuple[tuple[str, str, str], ...]


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report."""
    nodes, pods, found = report["nodes"], report["pods"], report["strategies"]
    seeds = f"{len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else f"seed {report['seeds'][0]}"
    steady = "load_percent" in report
    happens = (
        f"they come and go, and would keep {report['load_percent']:g} % of the GPUs busy"
        if steady
        else "they arrive and stay until they have asked for all GPUs"
    )
    console.print(
        f"[bold]simulated[/]: {nodes['count']:,} nodes with {nodes['gpus']:,} GPUs ({escape(nodes['file'])}), "
        f"{pods['count']:,} pods ({escape(pods['file'])}); {happens}; {seeds}, mean ± standard deviation",
        soft_wrap=True,
    )
    if steady:
        _show_steady(pods, _labelled(found), console)
    else:
        _table(console, found, COLUMNS)
        console.print()
        _bars(console, COLUMNS[0], found)
    console.print(f"\n{report['seconds']:.1f} s")


def _labelled(found: dict[str, Any]) -> dict[str, Any]:
    """What was found by strategy and order, under one name each."""
    return {
        name if list(by_order) == ["fifo"] else f"{name}, {order}": told
        for name, by_order in found.items()
        for order, told in by_order.items()
    }


def _show_steady(pods: dict[str, Any], found: dict[str, Any], console: Console) -> None:
    if pods["left_out"]:
        console.print(f"{pods['left_out']:,} more pods fit on no node, even an empty one, and are left out")
    _table(console, found, WAITS)
    console.print()
    _table(console, found, FLEET)
    for key, heading in (("gpus", "mean wait by GPUs asked for, s"), ("tenants", "mean wait by tenant, s")):
        _groups(console, found, key, heading)
    console.print()
    _bars(console, WAITS[0], found)
    console.print()
    _curves(console, found)


def _table(console: Console, found: dict[str, Any], columns: Columns) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("strategy", style="cyan", no_wrap=True)
    for _, heading, _ in columns:
        table.add_column(heading, justify="right")
    for name, told in found.items():
        table.add_row(name, *(_cell(key, told[key], form) for key, _, form in columns))
    console.print(table)


def _groups(console: Console, found: dict[str, Any], key: str, heading: str) -> None:
    """The mean wait of the largest groups, if there are several."""
    pods = {name: told["pods"]["mean"] for each in found.values() for name, told in each[key].items()}
    if len(pods) < 2:
        return
    names = sorted(sorted(pods, key=lambda name: (-pods[name], name))[:_GROUPS])
    note = f" ({len(pods) - len(names):,} more are in the file of --json)" if len(pods) > len(names) else ""
    console.print(f"\n{heading}{note}", style="bold", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("strategy", style="cyan", no_wrap=True)
    for name in names:
        table.add_column(escape(name or "-"), justify="right", overflow="fold")
    for label, each in found.items():
        waits = [each[key][name]["mean_wait_seconds"]["mean"] if name in each[key] else None for name in names]
        table.add_row(label, *("-" if wait is None else f"{wait:,.0f}" for wait in waits))
    console.print(table)


def _curves(console: Console, found: dict[str, Any]) -> None:
    """How many wait in the course of the measured time; all with the same scale."""
    console.print("waiting pods over time", style="bold")
    most = max(max(told["waiting_pods_by_time_percent"]) for told in found.values()) or 1.0
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, told in found.items():
        looks = told["waiting_pods_by_time_percent"]
        picked = [looks[index * (len(looks) - 1) // (_BAR - 1)] for index in range(_BAR)]
        table.add_row(name, "".join(_HEIGHTS[_height(value / most)] for value in picked), f"{looks[-1]:,.0f}")
    console.print(table)


def _height(share: float) -> int:
    """Of nothing the lowest, of little at least the next."""
    return max(round((len(_HEIGHTS) - 1) * share), 1 if share > 0 else 0)


def _cell(key: str, spread: dict[str, Any], form: str) -> str:
    if key in _WITHOUT_SPREAD:
        return form.format(spread["mean"])
    return f"{form.format(spread['mean'])} ± {form.format(spread['sd'])}"


def _bars(console: Console, column: tuple[str, str, str], found: dict[str, Any]) -> None:
    """One bar a strategy; the longest fills the width."""
    key, heading, form = column
    values = {name: told[key]["mean"] for name, told in found.items()}
    console.print(heading, style="bold", markup=False)
    most = max(values.values()) or 1.0
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in values.items():
        table.add_row(name, "█" * max(round(_BAR * value / most), 1 if value > 0 else 0), form.format(value))
    console.print(table)
