"""Requests for a simulation of seats: read from a CSV file, or drawn by a seed, and the seats that they are for.

Whatever a file holds, its reader learns what is wrong, in which file, line and column.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite, pi, sin
from pathlib import Path
from random import Random

from berth.simulate.trace import text_of
from crds.gpuseatprofile import MOST_SEATS
from planning.devices.seats import seat_id
from planning.seats.group import Phase, SeatView
from planning.seats.simulation import Request
from stack.errors import StackError

DOCUMENTED = "docs/seats.md says what a trace looks like."

_MOST = 1e9  # seconds: some thirty years
_NAMED = ("seat", "model")  # the first of these columns that there is
_DAY = 86_400.0
_WEEK = 7 * _DAY

# Bursts: so many requests in a row on average, so much closer together than they are on average.
_BURST = 40
_CLOSER = 20
# A day's curve: by how much of the mean the rate goes up and down. Each model has its noon at another time.
_SWING = 0.9


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time, for seats by their place in `names`. `source`: where they come from, for people."""

    names: tuple[str, ...]
    requests: tuple[Request, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """What requests to draw. rate: a second, for all models together. seconds: that one is answered, on average."""

    kind: str
    models: int
    requests: int
    rate: float
    seconds: float
    seed: int


def read_trace(path: Path) -> Trace:
    """The requests of a CSV file with the columns time, seat (or model) and seconds, in any order, plain or in gzip.

    Raises StackError: what is wrong, in which line of the file.
    """
    reader = csv.DictReader(text_of(path, DOCUMENTED).splitlines())
    numbers: dict[str, int] = {}
    requests: list[Request] = []
    try:
        present = reader.fieldnames or ()
        named = next((each for each in _NAMED if each in present), "")
        if missing := [each for each in ("time", named or "seat", "seconds") if each not in present]:
            raise StackError(f"{path} has no column {missing[0]}.", f"It needs time, seat, seconds. {DOCUMENTED}")
        for row in reader:
            if None in row:
                raise ValueError(f"it has more values than the {len(present)} columns of the first line")
            name = (row[named] or "").strip()
            if not name:
                raise ValueError(f"{named} is empty")
            number = numbers.setdefault(name, len(numbers))
            if number >= MOST_SEATS:
                raise ValueError(f"{named} is the {number + 1}th different one, and a group has {MOST_SEATS} at most")
            requests.append((_seconds(row["time"], "time"), number, _seconds(row["seconds"], "seconds")))
    except (ValueError, csv.Error) as wrong:
        raise StackError(f"{path}, line {reader.line_num}: {wrong}.", DOCUMENTED) from None
    if not requests:
        raise StackError(f"{path} has no rows.", DOCUMENTED)
    # Whole weeks before the first one tell nothing; the rest of it is its day and hour, for a schedule.
    weeks = min(at for at, _, _ in requests) // _WEEK * _WEEK
    requests = sorted((at - weeks, number, seconds) for at, number, seconds in requests)
    return Trace(tuple(numbers), tuple(requests), path.name)


def draw(drawn: Drawn) -> Trace:
    """Requests by a seed, the first model asked for most, the second half as often, and so on."""
    chance = Random(drawn.seed)
    popular = [1 / (number + 1) for number in range(drawn.models)]
    arrivals = KINDS[drawn.kind](drawn, popular, chance)
    requests = tuple(
        (at, number, chance.expovariate(1 / drawn.seconds))
        for (at, number), _ in zip(arrivals, range(drawn.requests), strict=False)
    )
    names = tuple(f"model-{number + 1}" for number in range(drawn.models))
    what = f"{drawn.kind}, {drawn.rate:g} requests a second, {drawn.seconds:g} s each, seed {drawn.seed}"
    return Trace(names, requests, f"drawn: {what}")


def _poisson(drawn: Drawn, popular: Sequence[float], chance: Random) -> Iterator[tuple[float, int]]:
    """Each request comes by itself."""
    at, upto = 0.0, list(accumulate(popular))
    while True:
        at += chance.expovariate(drawn.rate)
        yield at, chance.choices(range(drawn.models), cum_weights=upto)[0]


def _bursts(drawn: Drawn, popular: Sequence[float], chance: Random) -> Iterator[tuple[float, int]]:
    """Requests for one model come in a row, then a pause, then some for a model that is drawn anew."""
    at, upto = 0.0, list(accumulate(popular))
    while True:
        number = chance.choices(range(drawn.models), cum_weights=upto)[0]
        at += chance.expovariate(drawn.rate / _BURST) * (1 - 1 / _CLOSER)
        more = True
        while more:
            at += chance.expovariate(drawn.rate * _CLOSER)
            yield at, number
            more = chance.random() >= 1 / _BURST


def _day(drawn: Drawn, popular: Sequence[float], chance: Random) -> Iterator[tuple[float, int]]:
    """Rates go up and down with the hours, those of each model at other ones."""
    for at, number in _poisson(replace(drawn, rate=drawn.rate * (1 + _SWING)), popular, chance):
        phase = at / _DAY - number / drawn.models
        if chance.random() * (1 + _SWING) < 1 + _SWING * sin(2 * pi * phase):
            yield at, number


KINDS: dict[str, Callable[[Drawn, Sequence[float], Random], Iterator[tuple[float, int]]]] = {
    "poisson": _poisson,
    "bursts": _bursts,
    "day": _day,
}


def seats_of(trace: Trace, described: Sequence[str], park: float, wake: float) -> tuple[SeatView, ...]:
    """The seats of a trace, as `name,priority=1,weight=2,park=3,wake=4,batch` describes them; those that nobody
    describes are as all. Seats that are described as batch need no requests. ValueError: what is wrong, for a person.
    """
    names = list(trace.names)
    given: dict[str, SeatView] = {}
    for text in described:
        name, *parts = (part.strip() for part in text.split(","))
        view = _described(SeatView("", Phase.PARKED, name=name, park=park, wake=wake), parts)
        if name not in names:
            if not view.batch:
                raise ValueError(f"{name[:64]!r} is asked for by no request; there are {', '.join(names[:8])}")
            names.append(name)
        if name in given:
            raise ValueError(f"{name[:64]!r} is described twice")
        given[name] = view
    if len(names) > MOST_SEATS:
        raise ValueError(f"{len(names)} are more than the {MOST_SEATS} that a group has at most")
    plain = SeatView("", Phase.PARKED, park=park, wake=wake)
    return tuple(
        replace(given.get(name, plain), name=name, seat=seat_id("G", number)) for number, name in enumerate(names, 1)
    )


def _described(view: SeatView, parts: Sequence[str]) -> SeatView:
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            match key:
                case "batch" if not equals:
                    view = replace(view, batch=True)
                case "priority":
                    view = replace(view, priority=int(value))
                case "weight":
                    view = replace(view, weight=_above(float(value)))
                case "park":
                    view = replace(view, park=_seconds(value, key))
                case "wake":
                    view = replace(view, wake=_seconds(value, key))
                case _:
                    raise ValueError
        except ValueError:
            known = "priority=N, weight=W, park=S, wake=S, batch"
            raise ValueError(f"{part[:64]!r} of {view.name[:64]!r} is none of {known}") from None
    return view


def _above(weight: float) -> float:
    if not 0 < weight <= _MOST:
        raise ValueError
    return weight


def _seconds(text: str | None, column: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{column} is {(text or '')[:40]!r}, not a number of seconds") from None
    if not isfinite(value) or not 0 <= value <= _MOST:
        raise ValueError(f"{column} is {value:g}, not from 0 to {_MOST:g} seconds")
    return value
