"""Shows what a simulation of seats found: tables, how long requests waited at a glance, and who had the slot when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planning.seats.group import spoken
from planning.seats.simulation import Stay

_COLUMNS = 64  # of the picture of the slot
_SEATS = 6  # in a table; the file has all
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

Report = dict[str, Any]


def show(report: Report, stays: Mapping[str, Sequence[Stay]], console: Console) -> None:
    """Prints the report. stays: of each policy, who had the slot when."""
    seats, found = report["seats"], report["policies"]
    names = [each["name"] for each in seats]
    deadline, queue = report["proxy"]["deadline_seconds"], report["proxy"]["queue"]
    console.print(
        f"[bold]simulated[/]: {report['trace']['requests']:,} requests ({escape(report['trace']['source'])}) for "
        f"{len(seats)} seats on one group of GPUs; {_switch(seats)}. A request is held for at most {spoken(deadline)}, "
        f"{queue:,} for a seat at a time. Switches may take {report['lost_percent_allowed']:g} % of the time from "
        "seats that are asked.",
        soft_wrap=True,
    )
    _table(console, found)
    console.print("\ntime to first byte that waiting for the slot adds: p50/p99 by seat", style="bold")
    _by_seat(console, found, names)
    console.print()
    _slot_shares(console, found, names)
    console.print()
    _pictures(console, stays, names, found)


def _switch(seats: Sequence[Mapping[str, Any]]) -> str:
    parks, wakes = {each["park_seconds"] for each in seats}, {each["wake_seconds"] for each in seats}
    return f"parking takes {_range(parks)}, waking {_range(wakes)}"


def _range(values: set[float]) -> str:
    least, most = spoken(min(values)), spoken(max(values))
    return least if least == most else f"{least} to {most}"


def _table(console: Console, found: Mapping[str, Report]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("policy", style="cyan", no_wrap=True)
    for heading in ("p50", "p99", "switches", "in use", "lost", "refused", "told/took", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, each in found.items():
        expected = each["expected_wait_seconds"]
        table.add_row(
            name,
            _time(each["p50_seconds"]),
            _time(each["p99_seconds"]),
            f"{each['switches']:,}",
            f"{each['utilisation_percent']:.1f}%",
            f"{each['lost_percent']:.1f}%",
            f"{each['refused_requests']:,}",
            f"{_time(expected['told'])}/{_time(expected['took'])}",
            spoken(each["longest_possible_seconds"]),
        )
    console.print(table)
    console.print(
        "in use: somebody is answered. lost: to switches, most of them where nobody used the slot. told/took: what "
        "Retry-After says to whoever is the first to wait, and what it is. at most: what anybody could have waited.",
        style="dim",
    )


def _by_seat(console: Console, found: Mapping[str, Report], names: Sequence[str]) -> None:
    shown = names[:_SEATS]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("policy", style="cyan", no_wrap=True)
    for name in shown:
        table.add_column(escape(name), justify="right", overflow="fold")
    for policy, each in found.items():
        cells = [each["seats"][name] for name in shown]
        table.add_row(policy, *(f"{_short(cell['p50_seconds'])}/{_short(cell['p99_seconds'])}" for cell in cells))
    console.print(table)
    if len(names) > len(shown):
        console.print(f"{len(names) - len(shown)} more are in the file of --json", style="dim")


def _slot_shares(console: Console, found: Mapping[str, Report], names: Sequence[str]) -> None:
    """One bar a policy: what part of the time each seat had the slot, and what switches took."""
    console.print("who had the slot", style="bold", end="   ")
    legend = Text()
    for number, name in enumerate(names[: 2 * _SEATS]):
        legend.append(f"{_letter(number)} ", style=_colour(number))
        legend.append(f"{name}  ")
    legend.append("- switching  . empty", style="dim")
    console.print(legend, soft_wrap=True)
    table = _bare()
    for policy, each in found.items():
        bar, reached, drawn = Text(), 0.0, 0
        shares = [(number, each["seats"][name]["slot_percent"]) for number, name in enumerate(names)]
        marks = [(_letter(number), _colour(number), share) for number, share in shares]
        for mark, style, share in (*marks, ("-", "dim", each["lost_percent"]), (".", "dim", 100.0)):
            reached = min(reached + share, 100.0)
            width = round(_COLUMNS * reached / 100) - drawn
            bar.append(mark * width, style=style)
            drawn += width
        table.add_row(policy, bar)
    console.print(table)


def _pictures(
    console: Console, stays: Mapping[str, Sequence[Stay]], names: Sequence[str], found: Mapping[str, Report]
) -> None:
    """Who has the slot in a stretch from the middle of each: as long as some twenty stays are on average."""
    spans = {name: (each[0].begin, each[-1].end) for name, each in stays.items() if each}
    if not spans:
        return
    busiest = max(stays.values(), key=len)
    whole = busiest[-1].end - busiest[0].begin
    stretch = min(whole, max(20 * whole / len(busiest), 60.0))
    console.print(f"the slot for {spoken(stretch)} from the middle on", style="bold")
    table = _bare()
    for name, (begin, end) in spans.items():
        middle = max(begin, min(begin + (end - begin) / 2, end - stretch))
        table.add_row(name, _picture(stays[name], middle, stretch))
    console.print(table)


def _picture(stays: Sequence[Stay], begin: float, stretch: float) -> Text:
    """The seat that has the slot in the middle of each column's time."""
    picture, at = Text(), 0
    for column in range(_COLUMNS):
        moment = begin + stretch * (column + 0.5) / _COLUMNS
        while at < len(stays) and stays[at].end <= moment:
            at += 1
        if at < len(stays) and stays[at].begin <= moment:
            picture.append(_letter(stays[at].seat), style=_colour(stays[at].seat))
        else:
            picture.append("-" if 0 < at < len(stays) else ".", style="dim")
    return picture


def _bare() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    return table


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number % 26]


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else spoken(seconds)


def _short(seconds: float | None) -> str:
    """As `_time`, where many stand beside each other: 72s, 3.8m."""
    return _time(seconds).replace(" min", "m").replace(" ", "")
