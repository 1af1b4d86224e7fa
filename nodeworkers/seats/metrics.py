"""What Prometheus reads of a node's seats: who is where, what switches, parks and wakes take, how many bytes they move,
and what became of requests.

Labels are names of groups, backends and phases, of stages and outcomes as the code has them: never a pod's, never a
seat's. What happened is counted as it happens; how it is, is observed when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import get_args

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from nodeworkers.seats.proxy_words import HoldTimes, SeatMetrics
from nodeworkers.seats.world import Moved
from planning.seats.group import Phase
from planning.seats.orders import GroupPhase
from planning.seats.status import GroupPicture, Outcome, SwitchPicture

OUTCOMES = (
    "requests", "forwarded", "held", "released", "left", "refused_away", "refused_queue", "refused_deadline",
    "refused_connections", "blocked", "quiet", "unreached", "broken", "cut", "upgraded",
)  # fmt: skip
"""What the seat proxy counts (`native/seat-proxy/src/counts.rs`)."""
REFUSED = ("refused_away", "refused_queue", "refused_deadline", "refused_connections")
STAGES = ("settle", "drain", "park", "verify free", "wake", "start", "verify serving")
# A switch whose server is parked by its engine takes a second, one of a full card by the driver half a minute, a cold
# start minutes (shared field notes on seats, sections 5 and 6).
BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 900.0)

_meter = metrics.get_meter("berth.node")
_NOTHING = SeatMetrics({}, HoldTimes((), (), 0.0))
_look: list[Callable[[], Sequence[GroupPicture]]] = []
_proxy: list[bool] = []


def observe(look: Callable[[], Sequence[GroupPicture]]) -> None:
    """From now on this is what is read of the groups."""
    _look[:] = [look]


def begin(groups: Iterable[str]) -> None:
    """What makes somebody act counts from zero for these groups, so that the first one is an increase."""
    for group in groups:
        _quarantines.add(0, {"group": group})
        for outcome in get_args(Outcome):
            _switches.add(0, {"group": group, "outcome": outcome})
        for refused in REFUSED:
            _requests.add(0, {"group": group, "outcome": refused})


def switched(group: str, switch: SwitchPicture) -> None:
    """A switch ended, one way or the other."""
    _switches.add(1, {"group": group, "outcome": switch.outcome})
    if switch.outcome == "Switched":
        _switch.record(switch.whole, {"group": group})
    for stage in STAGES:
        if stage in switch.seconds:
            _stages.record(max(0.0, switch.seconds[stage]), {"group": group, "stage": stage})


def quarantined(group: str) -> None:
    """The group is left alone from now on."""
    _quarantines.add(1, {"group": group})


def parked(group: str, backend: str, moved: Moved, seconds: float) -> None:
    """A server's memory left the GPUs, which took so long."""
    _park.record(max(0.0, seconds), {"group": group, "backend": backend})
    _moved.add(max(0, moved.bytes), {"group": group, "backend": backend, "direction": "out"})


def woken(group: str, backend: str, moved: Moved, seconds: float) -> None:
    """A server's memory is on the GPUs again, which took so long."""
    _wake.record(max(0.0, seconds), {"group": group, "backend": backend})
    _moved.add(max(0, moved.bytes), {"group": group, "backend": backend, "direction": "in"})


class Requests:
    """Adds up by group what the seat proxy counts by seat. A seat's counters begin anew with its route, and all with
    the proxy: what was counted stays counted.
    """

    def __init__(self) -> None:
        self._seen: dict[str, SeatMetrics] | None = None
        self.refused: dict[str, int] = {}
        """Requests refused with 503 since this process began, by group."""

    def heard(self, counted: Mapping[str, SeatMetrics] | None, group_of: Mapping[str, str]) -> None:
        """The proxy's counters now, None while it does not answer; `group_of`: by seat. What it had counted when this
        process came is not this process's to tell.
        """
        _proxy[:] = [counted is not None]
        if counted is None:
            return
        if self._seen is not None:
            for seat, now in counted.items():
                if seat in group_of:
                    self._add(group_of[seat], self._seen.get(seat, _NOTHING), now)
        self._seen = dict(counted)

    def _add(self, group: str, before: SeatMetrics, now: SeatMetrics) -> None:
        if any(now.counts.get(name, 0) < count for name, count in before.counts.items()):
            before = _NOTHING
        for name in OUTCOMES:
            more = now.counts.get(name, 0) - before.counts.get(name, 0)
            if more > 0:
                _requests.add(more, {"group": group, "outcome": name})
                if name in REFUSED:
                    self.refused[group] = self.refused.get(group, 0) + more
        waits, were = now.held_seconds, before.held_seconds
        _waited.add(max(0.0, waits.sum - were.sum), {"group": group})
        # As a histogram's buckets are: each has all that are no longer.
        whole = 0
        for bound, count, had in zip_longest(waits.bounds, waits.buckets, were.buckets):
            whole += max(0, (count or 0) - (had or 0))
            _waits.add(whole, {"group": group, "le": "+Inf" if bound is None else f"{bound:g}"})


def _phases(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        for picture in look():
            for phase in get_args(GroupPhase):
                yield Observation(int(picture.phase == phase), {"group": picture.group, "phase": phase})


def _seats(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        for picture in look():
            for phase in Phase:
                count = sum(seat.phase == phase for seat in picture.seats)
                yield Observation(count, {"group": picture.group, "phase": phase.value})


def _parked_bytes(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        for picture in look():
            yield Observation(sum(seat.parked_bytes for seat in picture.seats), {"group": picture.group})


def _waiting(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        for picture in look():
            yield Observation(sum(seat.requests for seat in picture.seats), {"group": picture.group})


def _oldest(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        for picture in look():
            yield Observation(picture.oldest or 0.0, {"group": picture.group})


def _proxy_up(_: CallbackOptions) -> Iterable[Observation]:
    for answers in _proxy:
        yield Observation(int(answers))


_meter.create_observable_gauge(
    "berth_seat_group_phase", [_phases], description="1 for the phase in which a group of seats is, else 0"
)
_meter.create_observable_gauge("berth_seats", [_seats], description="Seats of a group, by phase")
_meter.create_observable_gauge(
    "berth_seat_parked", [_parked_bytes], unit="By", description="What of GPUs' memory is in the host's"
)
_meter.create_observable_gauge(
    "berth_seat_requests_waiting", [_waiting], description="Requests that wait for a seat to wake"
)
_meter.create_observable_gauge(
    "berth_seat_oldest_wait", [_oldest], unit="s", description="For how long the first of them has waited"
)
_meter.create_observable_gauge(
    "berth_seat_proxy_up", [_proxy_up], description="1 while the node's seat proxy answers the node's process, else 0"
)
_switches = _meter.create_counter("berth_seat_switches", description="Changes of who has the slot, by how they ended")
_quarantines = _meter.create_counter("berth_seat_quarantines", description="Times that a group was left alone")
_requests = _meter.create_counter("berth_seat_requests", description="Requests to seats, by what became of them")
_waits = _meter.create_counter("berth_seat_waits", description="Requests that waited and were let in, up to so long")
_waited = _meter.create_counter("berth_seat_waited", unit="s", description="How long these waited in all")
_moved = _meter.create_counter("berth_seat_moved", unit="By", description="What parks and wakes moved")
_switch = _meter.create_histogram(
    "berth_seat_switch", unit="s", description="One switch", explicit_bucket_boundaries_advisory=BUCKETS
)
_stages = _meter.create_histogram(
    "berth_seat_stage", unit="s", description="One stage of a switch", explicit_bucket_boundaries_advisory=BUCKETS
)
_park = _meter.create_histogram(
    "berth_seat_park", unit="s", description="Parking one server", explicit_bucket_boundaries_advisory=BUCKETS
)
_wake = _meter.create_histogram(
    "berth_seat_wake", unit="s", description="Waking one server", explicit_bucket_boundaries_advisory=BUCKETS
)
