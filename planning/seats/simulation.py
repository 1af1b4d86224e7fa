"""What a policy would have made of a trace of requests: a group of seats played in simulated time, by what decides on
nodes.

For `berth simulate seats` and for tests, which hold what is promised against it. Simulated are the servers, the
switches (which take exactly what is expected of them) and the proxy: it holds requests up to a deadline and up to so
many a seat, releases them when the seat serves, and a server takes all that come side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from planning.seats.choosing import choose
from planning.seats.group import Choice, GroupView, Phase, Policy, SeatView
from planning.seats.recent import Asked, Late, Recent

_NEWER = 0.1  # of a mean of what was measured: how much the newest counts

Request = tuple[float, int, float]
"""When it comes (seconds), to which seat (its place among them), and how long it is answered (seconds)."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """How long a request is held (seconds), and how many are for one seat at a time."""

    deadline: float = inf
    queue: float = inf


@dataclass(frozen=True, slots=True)
class Stay:
    """A seat in the slot from when it serves until it has drained, in seconds."""

    seat: int
    begin: float
    end: float


@dataclass(slots=True)
class Outcome:
    """What became of a trace. waits: by seat, of each request that was answered, the seconds until it was. refused: by
    seat, how many were not. seconds: how long all of it took; of them were `lost` to switches, `taken` by those among
    these that took the slot from a seat that was asked, and in `used` somebody was answered, or a batch seat had the
    slot. told: what was told to whoever waited first for a seat, and how long it took then.
    """

    waits: list[list[float]]
    refused: list[int]
    switches: int = 0
    lost: float = 0.0
    used: float = 0.0
    seconds: float = 0.0
    taken: float = 0.0
    stays: list[Stay] = field(default_factory=list)
    told: list[tuple[float, float]] = field(default_factory=list)


class _Seat:
    """One seat's server and what the proxy knows of it."""

    def __init__(self, setup: SeatView, window: float) -> None:
        self.setup = setup
        self.held: deque[tuple[float, float]] = deque()
        self.since: float | None = None
        self.told: tuple[float, float] | None = None
        self.asked_from = self.asked_until = -inf
        self.left = 0.0
        self.used = Recent(window)
        self.asked = Asked()
        self.late = Late()
        self.cut = False
        self.drain: float | None = None


def simulate(
    seats: Sequence[SeatView],
    requests: Iterable[Request],
    policy: Policy,
    proxy: Proxy = Proxy(),
    *,
    begin: float = 0.0,
) -> Outcome:
    """Plays requests, which come in order of time, from `begin` on. seats: as they would be if nobody had ever asked
    for them: of each its names, priority, weight, whether it is batch, and what switches take.
    """
    played = _Played(seats, policy, proxy, begin)
    for at, seat, seconds in requests:
        while played.upcoming <= at:
            played.go_on()
        played.ask(at, seat, seconds)
    return played.ended()


class _Played:
    """The group while it is played. `upcoming`: when something happens of itself, but for requests."""

    def __init__(self, seats: Sequence[SeatView], policy: Policy, proxy: Proxy, begin: float) -> None:
        self._policy, self._proxy, self._begin = policy, proxy, begin
        self._seats = [_Seat(each, policy.window) for each in seats]
        for each in self._seats:
            each.left = begin
        self._number = {each.seat: number for number, each in enumerate(seats)}
        self._holder: int | None = None
        self._target: int | None = None
        self._came = begin
        self._drained = self._parked = self._ends = begin
        self._switches = Recent(policy.window)
        self._look = self._idle = inf
        self._now = begin
        self.upcoming = inf
        self.outcome = Outcome([[] for _ in seats], [0 for _ in seats])
        self._decide(begin)

    def ask(self, at: float, number: int, seconds: float) -> None:
        """A request comes."""
        seat = self._seats[number]
        self._now = at
        if self._holder == number and self._target is None:
            self._answer(number, at, at, seconds)
            if self._idle < inf or self._waited():
                self._idle = seat.asked_until
                self.upcoming = min(self._look, self._idle)
            return
        self._expire(seat, at)
        if seat.since is None:
            seat.since = at
        if len(seat.held) >= self._proxy.queue:
            self.outcome.refused[number] += 1
            return
        seat.held.append((at, seconds))
        if len(seat.held) == 1:
            choice = self._decide(at)
            if seat.told is None and (wait := choice.waits.get(seat.setup.seat)) is not None:
                seat.told = (at, wait)

    def go_on(self) -> None:
        """What is upcoming happens."""
        self._now = now = self.upcoming
        if self._target is not None:
            self._serve(self._target, now)
        if now >= self._idle:
            self._idle = inf
        self._decide(now)

    def ended(self) -> Outcome:
        """Plays on until no request waits any more, or those that do wait for ever."""
        while self.upcoming < inf and (self._target is not None or any(each.held for each in self._seats)):
            self.go_on()
        outcome, holder = self.outcome, self._holder
        for each in self._seats:
            self._expire(each, inf)
        end = self._now
        if holder is not None and self._target is None:
            end = max(end, self._seats[holder].asked_until)
            self._stayed(holder, end)
        outcome.seconds = end - self._begin
        return outcome

    def _decide(self, now: float) -> Choice:
        choice = choose(self._view(now), now)
        if self._target is not None:
            return choice  # it is only asked how long it takes
        self._look = now + choice.within if choice.within is not None else inf
        if choice.seat:
            self._switch(self._number[choice.seat], now)
        elif self._holder is not None and self._idle == inf and self._waited():
            until = self._seats[self._holder].asked_until
            self._idle = until if until > now else inf
        if self._target is None:
            self.upcoming = min(self._look, self._idle)
        return choice

    def _switch(self, number: int, now: float) -> None:
        comes, self._target, self._idle = self._seats[number], number, inf
        asked = False
        self._drained = self._parked = now
        if self._holder is not None:
            leaves = self._seats[self._holder]
            asked = leaves.setup.batch or leaves.asked_until > now
            if leaves.asked_until > now:
                self._drained, leaves.cut = leaves.asked_until, True
                leaves.drain = _mean(leaves.drain, self._drained - now)
            self._parked = self._drained + leaves.setup.park
            self._stayed(self._holder, self._drained)
            leaves.left = self._drained
            if leaves.setup.batch:
                leaves.since = self._drained
        self._ends = self.upcoming = self._parked + comes.setup.wake
        self._switches.add(self._drained, self._ends)
        self.outcome.switches += 1
        self.outcome.lost += self._ends - self._drained
        self.outcome.taken += self._ends - self._drained if asked else 0.0

    def _serve(self, number: int, now: float) -> None:
        """The switch has ended: what was held is answered."""
        seat, self._holder, self._target, self._came = self._seats[number], number, None, now
        if seat.told is not None:
            at, wait = seat.told
            self.outcome.told.append((wait, now - at))
            seat.late.served(wait, now - at)
        seat.since = seat.told = None
        self._expire(seat, now)
        while seat.held:
            at, seconds = seat.held.popleft()
            self._answer(number, at, now, seconds)

    def _answer(self, number: int, came: float, now: float, seconds: float) -> None:
        self.outcome.waits[number].append(now - came)
        seat = self._seats[number]
        until = now + seconds
        if now > seat.asked_until:
            if seat.asked_until > -inf:
                seat.asked.ended(seat.asked_until - seat.asked_from, cut=seat.cut)
                seat.cut = False
            seat.asked_from = now
        if until > seat.asked_until:
            if not seat.setup.batch:
                self.outcome.used += until - max(now, seat.asked_until)
            seat.asked_until = until

    def _expire(self, seat: _Seat, now: float) -> None:
        """Requests that were held for too long are refused; all of them at the end."""
        oldest = now - self._proxy.deadline if now < inf else inf
        while seat.held and seat.held[0][0] < oldest:
            seat.held.popleft()
            self.outcome.refused[self._number[seat.setup.seat]] += 1

    def _stayed(self, number: int, end: float) -> None:
        seat = self._seats[number]
        seat.used.add(self._came, end)
        self.outcome.stays.append(Stay(number, self._came, end))
        if seat.setup.batch:
            self.outcome.used += end - self._came

    def _waited(self) -> bool:
        return any(each.held or each.setup.batch for number, each in enumerate(self._seats) if number != self._holder)

    def _view(self, now: float) -> GroupView:
        for each in self._seats:
            self._expire(each, now)
        target = self._seats[self._target].setup.seat if self._target is not None else ""
        views = tuple(self._seen(number, now) for number in range(len(self._seats)))
        return GroupView(views, self._policy, self._switches.within(now), target=target)

    def _seen(self, number: int, now: float) -> SeatView:
        seat = self._seats[number]
        phase, since = self._phase(number, now)
        used = seat.used.within(now)
        if number == self._holder and phase is Phase.ACTIVE:
            used += min(now - self._came, self._policy.window)
        setup = seat.setup
        return SeatView(  # in full: a million times `dataclasses.replace` would be most of a simulation
            seat=setup.seat,
            phase=phase,
            name=setup.name,
            held=len(seat.held),
            oldest=now - (seat.since if seat.since is not None else seat.left),
            running=1 if seat.asked_until > now else 0,
            idle=now - max(seat.asked_until, self._came) if number == self._holder else 0.0,
            resident=now - since,
            used=used,
            priority=setup.priority,
            weight=setup.weight,
            batch=setup.batch,
            park=setup.park,
            wake=setup.wake,
            drain=seat.drain or 0.0,
            busy=seat.asked.mean,
            late=seat.late.factor,
        )

    def _phase(self, number: int, now: float) -> tuple[Phase, float]:
        """Where a seat is, and since when."""
        if self._target is None:
            return (Phase.ACTIVE, self._came) if number == self._holder else (Phase.PARKED, self._seats[number].left)
        if number == self._holder and now < self._parked:
            return (Phase.DRAINING, self._now) if now < self._drained else (Phase.PARKING, self._drained)
        if number == self._target and now >= self._parked:
            return Phase.WAKING, self._parked
        return Phase.PARKED, self._seats[number].left


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _NEWER * (new - before)
