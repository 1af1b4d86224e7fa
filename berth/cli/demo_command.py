"""`berth demo`: the whole system on one machine, fed with a real trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from berth.cli.stack_commands import errors_for_people
from berth.demo.cut import RunTimes

TIMES = RunTimes()


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    workloads: Annotated[int, typer.Option(min=1, help="How many of the trace's whole-GPU pods become workloads.")] = (
        1000
    ),
    gpus: Annotated[int, typer.Option(min=1, help="About how many GPUs the simulated nodes have in all.")] = 800,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures to this file as well.")] = None,
    keep: Annotated[bool, typer.Option(help="Leave the stack running afterwards, to look around.")] = True,
    data: Annotated[
        Path | None,
        typer.Option(help="Data folder of the demo's own stack, emptied at the start; left out: a default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses which workloads are made to fail.")] = 1,
    failing: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of workloads whose simulated runs fail.")
    ] = 0.03,
    shortest: Annotated[float, typer.Option(min=0.1, help="Seconds of the shortest simulated run.")] = TIMES.shortest,
    longest: Annotated[float, typer.Option(min=0.1, help="Seconds of the longest simulated run.")] = TIMES.longest,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which unfinished workloads are given up.")] = (
        600.0
    ),
    trace: Annotated[Path | None, typer.Option(help="Folder with the extract of the trace; left out: berth's own.")] = (
        None
    ),
) -> None:
    """Watch a real trace flow through berth: simulated nodes, real Kubernetes and Temporal."""
    from berth.demo.run import DemoOptions, run_demo

    if longest < shortest:
        raise typer.BadParameter("must not be less than --shortest", param_hint="--longest")
    options = DemoOptions(
        data=data,
        trace=trace,
        gpus=gpus,
        workloads=workloads,
        seed=seed,
        failing=failing,
        times=RunTimes(shortest, longest),
        json_file=json,
        keep=keep,
        timeout=timeout,
    )
    try:
        with errors_for_people():
            result = run_demo(options)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    unfinished = result["workloads"]["unfinished"]
    if unfinished:
        typer.echo(f"berth demo: {unfinished} workloads had not ended after {timeout:.0f} s", err=True)
        raise typer.Exit(1)
