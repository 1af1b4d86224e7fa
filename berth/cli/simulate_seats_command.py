"""`berth simulate seats`: what the rules for who is active would make of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from berth.cli.stack_commands import errors_for_people
from planning.seats.group import DEFAULT_PARK, DEFAULT_WAKE


def seats(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of requests: time, seat (or model), seconds. Left out: some are drawn."),
    ] = None,
    kind: Annotated[str, typer.Option(metavar="KIND", help="How they are drawn: poisson, bursts or day.")] = "poisson",
    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many are drawn.")] = 20_000,
    models: Annotated[int, typer.Option(min=1, max=64, help="For how many models they are drawn.")] = 4,
    rate: Annotated[float, typer.Option(help="How many a second, for all models together.")] = 0.2,
    seconds: Annotated[float, typer.Option(help="For how long one is answered, on average.")] = 8.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 42,
    park: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds that parking a seat takes.")] = DEFAULT_PARK,
    wake: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds that waking one takes.")] = DEFAULT_WAKE,
    seat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,…",
            help="Of one seat, after its name: priority=N, weight=W, park=S, wake=S, batch. May be given again.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="onDemand, priority, fair or schedule; may be given several times."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A GPUSeatProfile as YAML: its policy's hours, window and lostPercent."),
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds that the proxy holds a request.")] = 300.0,
    queue: Annotated[int, typer.Option(min=1, help="Requests that it holds for a seat at a time.")] = 1000,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures to this file.")] = None,
) -> None:
    """Simulate requests for the seats of a group: time to first byte, switches and what they cost, by policy."""
    from berth.simulate_seats.run import SeatOptions, policies, run
    from berth.simulate_seats.traces import KINDS, Drawn, draw, read_trace, seats_of
    from planning.seats.simulation import Proxy

    if kind not in KINDS:
        raise typer.BadParameter(f"{kind[:64]!r} is none of {', '.join(KINDS)}", param_hint="--kind")
    for option, value, most in (("--rate", rate, 1e4), ("--seconds", seconds, 86_400), ("--deadline", deadline, 1e6)):
        if not 0 < value <= most:
            raise typer.BadParameter(f"{value:g} is not above 0 and at most {most:g}", param_hint=option)
    with errors_for_people():
        drawn = Drawn(kind, models, requests, rate, seconds, seed)
        found = read_trace(trace) if trace is not None else draw(drawn)
        try:
            seats = seats_of(found, seat or (), park, wake)
        except ValueError as wrong:
            raise typer.BadParameter(str(wrong), param_hint="--seat") from None
        try:
            chosen = policies(policy or (), profile)
        except ValueError as wrong:
            raise typer.BadParameter(str(wrong), param_hint="--policy") from None
        run(SeatOptions(found, seats, chosen, Proxy(deadline, queue), json))
