"""Shows what is recommended: for each model and number of GPUs what is asked for, what is proposed, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from berth.recommend.collect import Row
from planning.filters import show_gpus
from planning.recommendation import Ask, Recommendation

TOO_LITTLE = "nothing yet: too few of its runs of the last weeks were sampled, or ended well"


def show(rows: list[Row], console: Console) -> None:
    """Prints a block for each; where too little is known it says so."""
    for row in rows:
        console.print(f"[bold]{escape(row.model)}[/]", soft_wrap=True)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        found = row.recommendation
        table.add_row("  asked", escape(_asked(row.asked)))
        table.add_row("  proposed", TOO_LITTLE if found is None else escape(_proposed(row.asked, found)))
        if found is not None:
            table.add_row("  confidence", f"{found.confidence:.2f}, after {row.runs:,} runs of the model in all")
            table.add_row("  why", escape(found.reason))
        console.print(table)
    console.print("Nothing of this is applied.", style="dim")


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [asdict(row) for row in rows]


def _asked(ask: Ask) -> str:
    of_type = f" of type {ask.gpu_type}" if ask.gpu_type else ""
    return (
        show_gpus(ask.gpu_count, ask.gpu_resource)
        + of_type
        + (f", priority {ask.priority}" if ask.priority is not None else "")
    )


def _proposed(ask: Ask, found: Recommendation) -> str:
    parts = []
    if found.gpu_count is not None:
        memory = f" with {found.memory_mib:,} MiB each" if found.memory_mib else ""
        parts.append(
            show_gpus(found.gpu_count, ask.gpu_resource)
            + memory
            + (f" (type {found.gpu_type})" if found.gpu_type else "")
        )
    return ", ".join([*parts, *([f"priority {found.priority}"] if found.priority else [])])
