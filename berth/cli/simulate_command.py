"""`berth simulate`: what strategies would make of a trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from berth.cli.simulate_seats_command import seats
from berth.cli.stack_commands import errors_for_people

_MOST_SEEDS = 10_000
MOST_LOAD = 1000
ARRIVALS = 1.3


def register(app: typer.Typer) -> None:
    group = typer.Typer(invoke_without_command=True)
    group.callback()(simulate)
    group.command()(seats)
    app.add_typer(group, name="simulate")


def simulate(
    called: typer.Context,
    nodes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV of nodes: sn, cpu_milli, memory_mib, gpu, model.")
    ] = None,
    pods: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of pods: name, cpu_milli, memory_mib, num_gpu, gpu_milli, …"),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="May be given several times; left out: all installed.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="A-B", help="Such as 42-51, or 1,2,7.")] = "42",
    arrivals: Annotated[
        float | None,
        typer.Option(
            min=1.0, max=100.0, help="Pods are drawn again until they ask for so much of all GPUs; left out: 1.3."
        ),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT", help="Pods come and go, as often as keeps so much of all GPUs busy: who waits how long."
        ),
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(metavar="ORDER", help="With --load, who of the waiting is next: fifo (default), learned, oracle."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Simulations side by side; left out: one a CPU.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures to this file.")] = None,
) -> None:
    """Simulate a trace against placement strategies: unallocated and fragmented GPUs; with --load, waiting times.

    `berth simulate seats` simulates requests for the seats of a group of GPUs instead.
    """
    if called.invoked_subcommand is not None:
        return
    if nodes is None or pods is None:
        raise typer.BadParameter("is needed, a CSV file", param_hint="--nodes" if nodes is None else "--pods")
    from berth.extensions import load_strategies
    from berth.simulate.run import SimulateOptions, run
    from planning import strategies
    from planning.orders import ORDERS

    if load is not None and not 0 < load <= MOST_LOAD:
        raise typer.BadParameter(f"{load:g} is not above 0 and at most {MOST_LOAD} (percent)", param_hint="--load")
    if load is None and order:
        raise typer.BadParameter("without --load nobody waits, so there is no order", param_hint="--order")
    if load is not None and arrivals is not None:
        raise typer.BadParameter("with --load, that says how many pods arrive", param_hint="--arrivals")
    for each in order or ():
        if each not in ORDERS:
            raise typer.BadParameter(f"{each!r} is none of {', '.join(ORDERS)}", param_hint="--order")
    load_strategies()
    chosen = tuple(dict.fromkeys(strategy or strategies.installed()))
    orders = tuple(dict.fromkeys(order or ("fifo",)))
    with errors_for_people():
        run(SimulateOptions(nodes, pods, chosen, parse_seeds(seeds), arrivals or ARRIVALS, jobs, json, load, orders))


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
