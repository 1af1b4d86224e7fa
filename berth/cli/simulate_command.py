"""`berth simulate`: what strategies would make of a trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from berth.cli.stack_commands import errors_for_people

_MOST_SEEDS = 10_000


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    nodes: Annotated[Path, typer.Option(metavar="FILE", help="CSV of nodes: sn, cpu_milli, memory_mib, gpu, model.")],
    pods: Annotated[
        Path, typer.Option(metavar="FILE", help="CSV of pods: name, cpu_milli, memory_mib, num_gpu, gpu_milli, …")
    ],
    strategy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="May be given several times; left out: all installed.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="A-B", help="Such as 42-51, or 1,2,7.")] = "42",
    arrivals: Annotated[
        float, typer.Option(min=1.0, max=100.0, help="Pods are drawn again until they ask for so much of all GPUs.")
    ] = 1.3,
    jobs: Annotated[int | None, typer.Option(min=1, help="Simulations side by side; left out: one a CPU.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures to this file.")] = None,
) -> None:
    """Simulate a trace against placement strategies: unallocated and fragmented GPUs."""
    from berth.extensions import load_strategies
    from berth.simulate.run import SimulateOptions, run
    from planning import strategies

    load_strategies()
    chosen = tuple(dict.fromkeys(strategy or strategies.installed()))
    with errors_for_people():
        run(SimulateOptions(nodes, pods, chosen, parse_seeds(seeds), arrivals, jobs, json))


def parse_seeds(text: str) -> tuple[int, ...]:
    """`42-51`, `7`, or `1,2,7-9`. Raises typer.BadParameter."""
    found: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,12})(?:-(\d{1,12}))?\s*", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(_MOST_SEEDS):
            raise typer.BadParameter(f"{part!r} is neither a number nor a range such as 42-51", param_hint="--seeds")
        found |= dict.fromkeys(range(int(match[1]), int(match[2] or match[1]) + 1))
    if len(found) > _MOST_SEEDS:
        raise typer.BadParameter(f"{len(found)} are more than {_MOST_SEEDS}", param_hint="--seeds")
    return tuple(found)
