"""What every benchmark has in common: its arguments, the machine it ran on, a table for people and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def arguments(module: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    return parser


def machine() -> dict[str, Any]:
    """Where and when it ran; the load tells whether anything else was running."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average_before": [round(each, 2) for each in os.getloadavg()],
    }


@dataclass
class Report:
    """Rows for people and values for machines, under one title. Make it before measuring: it notes the load."""

    title: str
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values["benchmark"] = self.title
        self.values["machine"] = machine()

    def row(self, name: str, value: str, note: str = "") -> None:
        """One line of the table."""
        self.rows.append((name, value, note))

    def note(self, values: Mapping[str, Any]) -> None:
        """More values for the file."""
        self.values |= values

    def finish(self, file: Path | None) -> None:
        """Prints the table and writes the file."""
        load = self.values["machine"]["load_average_before"][0]
        cpus = self.values["machine"]["cpus"]
        console = Console(highlight=False)
        table = Table(title=self.title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(justify="right", style="bold", no_wrap=True)
        table.add_column(style="dim")
        for name, value, note in self.rows:
            table.add_row(name, value, note)
        console.print(table)
        if load > cpus / 4:
            console.print(f"The machine was busy before (load {load:.1f} on {cpus} CPUs): other runs will differ.")
        if file is not None:
            file.write_text(json.dumps(self.values, indent=2) + "\n")
            console.print(f"The figures are in {file}.")


def progress(text: str) -> None:
    """What a long benchmark is doing, on stderr."""
    print(text, file=sys.stderr, flush=True)
