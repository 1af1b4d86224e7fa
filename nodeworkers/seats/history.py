"""What happened at a group of seats of late, for whoever decides who is next: since when each has the slot or waits for
it, how long it was asked, what switches took.

Kept in memory for as long as the process runs: after a restart a group counts as one that nothing is known of, and what
lasts (how long parking and waking take) is on record (`records.py`). Times are seconds of the epoch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from nodeworkers.seats.proxy_words import Traffic
from nodeworkers.seats.records import Known
from planning.seats.group import DEFAULT_PARK, DEFAULT_WAKE, Phase, SeatView
from planning.seats.pod_settings import PodSettings
from planning.seats.recent import Asked, Late, Recent, Share


@dataclass(slots=True)
class _Seat:
    used: Recent
    wanted: Share
    left: float
    asked: Asked = field(default_factory=Asked)
    late: Late = field(default_factory=Late)
    came: float | None = None  # since when it serves, None where it does not
    since: float | None = None  # of the first request that it has not served
    told: tuple[float, float] | None = None  # when somebody was told how long it takes, and how long
    asked_from: float | None = None
    wanted_from: float | None = None  # of requests, whether it serves or not
    traffic: Traffic | None = None
    ended: float | None = None  # when its last request did


class GroupHistory:
    """One group's. `window`: seconds over which time is counted; `began`: now."""

    def __init__(self, window: float, began: float) -> None:
        self.window = window
        self._switches = Recent(window)
        self._switching: float | None = None
        self._seats: defaultdict[str, _Seat] = defaultdict(lambda: _Seat(Recent(window), Share(window), began))
        self._began = began

    def closed(self, seat: str, now: float) -> None:
        """Its requests are held from now on; those in flight go on."""
        each = self._seats[seat]
        if each.came is not None:
            each.used.add(each.came, now)
            each.came, each.left = None, now

    def drained(self, seat: str, now: float) -> None:
        """Nothing of it is in flight any more: from here on a switch takes time from whoever could be served."""
        each = self._seats[seat]
        if each.asked_from is not None:
            each.asked.ended(now - each.asked_from, cut=True)
            each.asked_from = None
        self._switching = now

    def opened(self, seat: str, now: float) -> None:
        """It serves from now on."""
        each = self._seats[seat]
        if each.came is not None:
            return
        each.came = now
        if self._switching is not None:
            self._switches.add(self._switching, now)
            self._switching = None
        if each.told is not None:
            at, wait = each.told
            each.late.served(wait, now - at)
        each.since = each.told = None

    def ended(self, seat: str, now: float) -> None:
        """Its server is gone."""
        self.closed(seat, now)
        self._seats[seat].asked_from = None

    def told(self, seat: str, wait: float, now: float) -> None:
        """Whoever waits first for the seat is told that it takes so many seconds."""
        each = self._seats[seat]
        if each.told is None and each.since is not None:
            each.told = (now, wait)

    def heard(self, traffic: Traffic, now: float, *, starts: bool = False) -> bool:
        """The proxy tells of a seat's requests: whether that may change who is next. `starts`: its container is yet to
        start, so that what waits for it says nothing of how busy it is.
        """
        each = self._seats[traffic.seat]
        before, each.traffic = each.traffic, traffic
        each.ended = now - traffic.ended if traffic.ended is not None else None
        if traffic.held and each.came is None and each.since is None:
            each.since = now - (traffic.oldest or 0.0)
        busy = traffic.in_flight > 0
        if busy and each.asked_from is None:
            each.asked_from = now
        elif not busy and each.asked_from is not None:
            each.asked.ended(now - each.asked_from, cut=False)
            each.asked_from = None
        if (busy or traffic.held) and not starts:
            each.wanted_from = now if each.wanted_from is None else each.wanted_from
        elif each.wanted_from is not None:
            each.wanted.add(each.wanted_from, now)
            each.wanted_from = None
        if before is None:
            return True
        return bool(traffic.held) != bool(before.held) or busy != (before.in_flight > 0)

    def forgotten(self, seat: str) -> None:
        """The proxy serves it no more."""
        self._seats[seat].traffic = None

    def traffic(self, seat: str) -> Traffic | None:
        """What the proxy said last."""
        return self._seats[seat].traffic

    def busy(self, seat: str, now: float) -> float:
        """The share of the window in which requests for it waited or were in flight; of a process that is younger, of
        its life.
        """
        each, counted = self._seats[seat], max(min(self.window, now - self._began), 1.0)
        under_way = min(now - each.wanted_from, counted) if each.wanted_from is not None else 0.0
        return min(1.0, (each.wanted.within(now) + under_way) / counted)

    def lost(self, now: float) -> float:
        """Seconds that switches took within the window."""
        under_way = min(now - self._switching, self.window) if self._switching is not None else 0.0
        return self._switches.within(now) + under_way

    def view(
        self, seat: str, phase: Phase, since: float, asked: float | None, settings: PodSettings, known: Known,
        now: float,
    ) -> SeatView:  # fmt: skip
        """The seat as planning sees it, but for the memory that parking it takes. `since`: when its phase began;
        `asked`: since when its container wants to start, None where it does not.
        """
        each = self._seats[seat]
        traffic = each.traffic
        came = each.came if each.came is not None else since
        oldest = now - (each.since if each.since is not None else each.left)
        running = traffic.in_flight if traffic is not None else 0
        idle = now - (each.ended if each.ended is not None else came)
        used = each.used.within(now)
        if each.came is not None:
            used += min(now - each.came, self.window)
        comes = known.start if phase in (Phase.WAITING, Phase.LOST, Phase.STARTING) else known.wake
        return SeatView(
            seat=seat,
            phase=phase,
            name=settings.name,
            held=traffic.held if traffic is not None else 0,
            oldest=oldest if asked is None else max(oldest if each.since is not None else 0.0, now - asked),
            running=running,
            idle=0.0 if running else idle,
            resident=now - (came if phase is Phase.ACTIVE else since),
            used=used,
            priority=settings.priority,
            weight=settings.weight,
            batch=not settings.port,
            park=known.park if known.park is not None else DEFAULT_PARK,
            wake=comes if comes is not None else DEFAULT_WAKE,
            drain=known.drain or 0.0,
            busy=each.asked.mean,
            late=each.late.factor,
            parkable=known.parkable is not False,
            why_not=known.why_not,
        )
