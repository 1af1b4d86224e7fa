"""What Temporal recorded about one workload, as entries for people: from the ledger's rounds, and from the looks of its
own workflow. Both are read event by event, the newest first; what cannot be understood is counted and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from temporalio.api.common.v1 import Payload
from temporalio.api.history.v1 import HistoryEvent
from temporalio.converter import PayloadConverter

from activities.messages import Requeue
from activities.signatures import ARRANGE, CARRY_OUT, DECIDE, FOLLOW, Arranged, CarriedOut, DecideResult, Followed
from berth.converter import data_converter
from planning.caches.preference import told
from planning.model import Assignment, Decision, Places
from planning.places import on_nodes
from planning.times import timestamp

T = TypeVar("T")

OWN = "own workflow"
ORDER = "its order"
_LOOK = "core_local_activity"  # the marker that the SDK records for a local activity
_PLAIN = (b"json/plain", b"json/protobuf", b"binary/plain", b"binary/null")  # what Temporal itself encodes to


@dataclass(frozen=True, slots=True)
class Entry:
    """`at`: seconds since the epoch. `by`: a round, `OWN` or `ORDER`. `times`: how often it was said in a row."""

    at: float
    by: str
    what: str
    where: str
    why: str
    times: int = 1


_ARRANGED = {"retry": "failed", "fail": "given up", "over": "over"}
"""What a look at an order came to, where it does not go on as it is."""

_Said = tuple[str, str, str]
"""What, where, why."""


@dataclass
class Rounds:
    """What the ledger's rounds said of the workload."""

    uid: str
    entries: list[Entry] = field(default_factory=list)
    unreadable: int = 0
    _results: dict[int, tuple[float, Payload]] = field(default_factory=dict)  # by the event that asked for them
    _carried_out: list[Entry] = field(default_factory=list)  # in a round whose number comes with the next older event

    def read(self, event: HistoryEvent) -> None:
        """The next older event of a run; the first of a run is followed by the last of the run before it."""
        match event.WhichOneof("attributes"):
            case "activity_task_completed_event_attributes":
                completed = event.activity_task_completed_event_attributes
                for payload in completed.result.payloads[:1]:
                    self._results[completed.scheduled_event_id] = moment(event), payload
            case "activity_task_scheduled_event_attributes":
                self._asked(event)
            case "workflow_execution_signaled_event_attributes":
                signal = event.workflow_execution_signaled_event_attributes
                if signal.signal_name == "requeue":
                    self._came_back(event)
            case "workflow_execution_started_event_attributes":
                self.end()

    def end(self) -> None:
        """No older event follows."""
        self.entries += self._carried_out
        self._results, self._carried_out = {}, []

    def _asked(self, event: HistoryEvent) -> None:
        name = event.activity_task_scheduled_event_attributes.activity_type.name
        at, payload = self._results.pop(event.event_id, (0.0, None))
        if name == DECIDE:
            number = _decoded(event.user_metadata.summary, str) or ""
            by = number if re.fullmatch(r"round \d+", number) else "a round"
            self.entries += [replace(entry, by=by) for entry in self._carried_out]
            self._carried_out = []
            result = self._about(payload, DecideResult)
            if result is not None:
                self.entries += [Entry(at, by, *said) for said in _decided(result.decision, self.uid)]
        elif name == CARRY_OUT:
            done = self._about(payload, CarriedOut)
            if done is not None:
                self._carried_out += [Entry(at, "a round", *said) for said in _carried_out(done, self.uid)]

    def _came_back(self, event: HistoryEvent) -> None:
        for payload in event.workflow_execution_signaled_event_attributes.input.payloads[:1]:
            back = self._about(payload, Requeue)
            if back is not None and back.uid == self.uid:
                entry = Entry(
                    moment(event), OWN, "queued again", "",
                    f"for attempt {back.turn.attempt}, {_retries(back.turn.retries)}",
                )  # fmt: skip
                # The signal is often repeated, also when it has had its effect; the first one tells.
                self.entries = [each for each in self.entries if (each.what, each.why) != (entry.what, entry.why)]
                self.entries.append(entry)

    def _about(self, payload: Payload | None, kind: type[T]) -> T | None:
        """The payload, if it names the workload: most do not, and need not be decoded."""
        if payload is None or not _may_name(payload, self.uid):
            return None
        value = _decoded(payload, kind)
        self.unreadable += value is None
        return value


@dataclass
class Looks:
    """What the workload's own workflow saw, look by look, or that of its order of a node."""

    entries: list[Entry] = field(default_factory=list)
    unreadable: int = 0

    def read(self, event: HistoryEvent) -> None:
        if event.WhichOneof("attributes") != "marker_recorded_event_attributes":
            return
        marker = event.marker_recorded_event_attributes
        data = marker.details["data"].payloads if "data" in marker.details else ()
        about: dict[str, Any] = (_decoded(data[0], dict) if data else None) or {}
        kind = about.get("activity_type", FOLLOW)
        if marker.marker_name != _LOOK or kind not in (FOLLOW, ARRANGE):
            return
        by = OWN if kind == FOLLOW else ORDER
        at = _completed(about) or moment(event)
        if marker.HasField("failure"):
            why = marker.failure.cause.message or marker.failure.message
            self.entries.append(Entry(at, by, "no answer", "", f"{why}; it is tried again"))
            return
        results = marker.details["result"].payloads if "result" in marker.details else ()
        seen = _decoded(results[0], Followed if kind == FOLLOW else Arranged) if results else None
        if isinstance(seen, Followed):
            self.entries.append(Entry(at, by, seen.phase or "gone", seen.node, seen.message))
        elif isinstance(seen, Arranged):
            what = _ARRANGED.get(seen.next, seen.stage)
            self.entries.append(Entry(at, by, what, "", seen.message))
        else:
            self.unreadable += 1


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """The oldest first; what was said several times in a row is one entry, of the first time."""
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda each: each.at):
        last = found[-1] if found else None
        if last is not None and (last.what, last.where, last.why) == (entry.what, entry.where, entry.why):
            found[-1] = replace(last, times=last.times + 1)
        else:
            found.append(entry)
    return found


def moment(event: HistoryEvent) -> float:
    """When it happened, in seconds since the epoch."""
    return event.event_time.seconds + event.event_time.nanos / 1e9


def _decided(decision: Decision, uid: str) -> Iterator[_Said]:
    for stop in decision.preemptions:
        if stop.uid == uid:
            yield "stopped", "", stop.message
        if stop.winner == uid:
            yield "gets room", "", f"{stop.namespace}/{stop.name} is stopped for it"
    for place in decision.assignments:
        if place.uid == uid:
            yield "placed", _where(place.places) or place.node, _placed(place)
    for pin in decision.pins:
        if pin.uid == uid:
            yield "released", _where(pin.places), "all of its pods are there; each is told its node and may begin"
    for order in decision.orders:
        if order.uid == uid:
            yield "orders", "", "a node of an autoscaler"
    for entry in (*decision.waiting, *decision.examine):
        if entry.uid == uid:
            yield "waits", "", f"{entry.reason}: {entry.message}"
    for expected in decision.expected:
        if expected.uid == uid:
            yield (
                "expected",
                "",
                f"to start {timestamp(expected.start)}; nine times in ten by {timestamp(expected.latest)}",
            )
    for verdict in decision.verdicts:
        if verdict.uid == uid:
            yield "cannot go on", "", f"{verdict.reason}: {verdict.message}"
    for withdrawal in decision.withdrawals:
        if withdrawal.uid == uid:
            what = "queued again" if withdrawal.keep else "taken back"
            yield what, withdrawal.avoid, f"{withdrawal.reason}: {withdrawal.message}"
    for end in decision.completions:
        if end.uid == uid:
            yield "ended", "", f"Job {end.job_name} completed"


def _carried_out(done: CarriedOut, uid: str) -> Iterator[_Said]:
    if uid in done.made:
        yield "made", "", "its Job is there"
    if uid in done.stale:
        yield "not done", "", "it had changed since it was decided upon; it is decided anew"
    for verdict in done.refused:
        if verdict.uid == uid:
            yield "cannot go on", "", f"{verdict.reason}: {verdict.message}"
    if uid in done.accepted:
        yield "examined", "", "the API server takes its template"
    if uid in done.rejected:
        yield "examined", "", "the API server refuses its template"
    if uid in done.spared:
        yield "not stopped", "", f"the API server refused that; it is left alone until {timestamp(done.spared[uid])}"


def _placed(place: Assignment) -> str:
    why = f"attempt {place.turn.attempt}, {_retries(place.turn.retries)}, by {place.strategy}"
    if place.resumes is not None:
        why += f"; Job {place.resumes.name} goes on there if the API server lets it"
    if warm := told(place):
        why += f"; {warm}"
    if place.backfill is None:
        return why
    until = "it is wanted" if place.backfill == 0 else timestamp(place.backfill)
    return f"{why}; the room is kept for somebody else, and lent until {until}"


def _where(places: Places) -> str:
    return on_nodes(node for node, _ in places).removeprefix("node ") if places else ""


def _retries(count: int) -> str:
    return f"{count} {'retry' if count == 1 else 'retries'} used"


def _completed(about: Mapping[str, Any]) -> float | None:
    """When a local activity was done: its marker comes later, with the task that it ran in."""
    when = about.get("complete_time")
    seconds, nanos = (when.get("seconds"), when.get("nanos")) if isinstance(when, dict) else (None, None)
    return seconds + nanos / 1e9 if isinstance(seconds, int) and isinstance(nanos, int) else None


def _may_name(payload: Payload, uid: str) -> bool:
    """False if it certainly says nothing of the workload. What went through somebody's codec might."""
    return uid.encode() in payload.data or payload.metadata.get("encoding") not in _PLAIN


def _decoded(payload: Payload, kind: type[T]) -> T | None:
    """None if it is not that: recorded by another build, by somebody else, or encrypted on its way."""
    converter: PayloadConverter = data_converter.payload_converter
    try:
        value = converter.from_payload(payload, kind)
    except Exception:  # whatever stands in it, the rest of the history should be told
        return None
    return value if isinstance(value, kind) else None
