"""What Temporal recorded is told entry by entry, from histories of today's and of older builds; what is not ours harms
nobody.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import WorkflowHistory

from activities.messages import Requeue
from activities.signatures import CARRY_OUT, DECIDE, CarriedOut, DecideResult, Followed
from berth.converter import data_converter
from berth.explain.history import ORDER, OWN, Entry, Looks, Rounds, in_order
from planning.model import (
    Assignment,
    Completion,
    Decision,
    Expectation,
    Order,
    Pin,
    Preemption,
    Resources,
    Stopped,
    Turn,
    Verdict,
    Waiting,
    Warmth,
    Withdrawal,
)

HISTORIES = Path(__file__).parent.parent / "workflows" / "histories"
LEDGERS = sorted(HISTORIES.glob("placement-rounds--*.json"))

UID = "11111111-2222-3333-4444-555555555555"


def load(path: Path) -> list[HistoryEvent]:
    """A recorded history, the newest event first."""
    recorded = json.loads(path.read_text())
    return list(reversed(WorkflowHistory.from_json(recorded["workflowId"], recorded["history"]).events))


def told(reader: Rounds | Looks, events: Iterable[HistoryEvent]) -> list[tuple[str, str, str]]:
    for event in events:
        reader.read(event)
    assert reader.unreadable == 0
    return [(each.what, each.where, each.why) for each in in_order(reader.entries)]


def uid_of(events: list[HistoryEvent], name: str) -> str:
    """Of the workload of that name, by whatever the ledger decided about it."""
    for event in events:
        for payload in event.activity_task_completed_event_attributes.result.payloads:
            decision = (json.loads(payload.data or b"null") or {}).get("decision", {})
            for each in (*decision.get("assignments", ()), *decision.get("verdicts", ())):
                if each["name"] == name:
                    return str(each["uid"])
    raise AssertionError(f"nothing was decided about {name}")


# --- recorded by real ledgers and workflows ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.stem)
def test_a_real_ledgers_rounds_are_told(path: Path) -> None:
    events = load(path)
    rounds = Rounds(uid_of(events, "retried"))
    placed = "attempt 0, 0 retries used, by leastLoaded"
    # Whether a round fell between the old Job's end and its going is chance.
    assert [each for each in told(rounds, events) if each[0] != "waits"] == [
        ("placed", "record-a", placed),
        ("made", "", "its Job is there"),
        ("queued again", "", "for attempt 1, 1 retry used"),
        ("placed", "record-a", "attempt 1, 1 retry used, by leastLoaded"),
        ("made", "", "its Job is there"),
    ]
    first, made, back, *_ = in_order(rounds.entries)
    assert first.by == made.by == "round 4" and back.by == OWN
    assert told(Rounds(uid_of(events, "impossible")), events)[0] == (
        "cannot go on", "", "NoSuitableNode: no node has 8 GPUs; the largest has 2",
    )  # fmt: skip
    assert told(Rounds("nobody"), events) == []


def test_a_real_workflows_looks_are_told() -> None:
    (path,) = HISTORIES.glob("gpuworkload-evicted--*.json")
    looks = Looks()
    lost, made, runs, ended = told(looks, load(path))
    assert lost[0] == "Scheduling" and "lost its place on node record-a" in lost[2]
    assert made[:2] == ("Scheduling", "record-a") and runs == ("Running", "record-a", "running on node record-a")
    assert ended[0] == "Succeeded" and ended[2].endswith("completed on node record-a in 5 s")
    entries = in_order(looks.entries)
    assert [each.times for each in entries] == [1, 1, 2, 1] and {each.by for each in entries} == {OWN}


def test_a_real_gang_and_a_real_order_of_a_node_are_told() -> None:
    (ledger,) = HISTORIES.glob("placement-rounds--0.1.0-a62238ad40.json")
    events = load(ledger)
    placed, made, released, *_ = told(Rounds(uid_of(events, "gang")), events)
    assert placed[:2] == ("placed", "record-a") and made[0] == "made"
    assert released[:2] == ("released", "record-a")
    (path,) = HISTORIES.glob("provisioning-given-up--*.json")
    looks = Looks()
    tries = told(looks, load(path))
    assert [what for what, *_ in tries] == ["ordered", "failed", "ordered", "given up"]
    assert {each.by for each in looks.entries} == {ORDER} and tries[-1][2].endswith("given up after 2 tries")
    (ledger,) = HISTORIES.glob("placement-provisioning--*.json")
    events = load(ledger)
    orders, waits, *_ = told(Rounds(uid_of(events, "given-up")), events)
    assert orders == ("orders", "", "a node of an autoscaler") and waits[2].startswith("Provisioning: ")


def test_a_look_is_told_before_what_followed_from_it() -> None:
    """Its marker is written later, with the workflow task in which it ran."""
    (path,) = HISTORIES.glob("gpuworkload-evicted--0.1.0-0c276f8c47.json")
    (ledger,) = HISTORIES.glob("placement-rounds--0.1.0-0c276f8c47.json")
    events = load(ledger)
    looks, rounds = Looks(), Rounds(uid_of(events, "evicted"))
    told(looks, load(path))
    told(rounds, events)
    order = [each.what for each in in_order([*looks.entries, *rounds.entries])]
    assert order[:5] == ["placed", "made", "Scheduling", "queued again", "placed"]


# --- made here ------------------------------------------------------------------------------------------------------


def payload(value: Any) -> Payload:
    (found,) = data_converter.payload_converter.to_payloads([value])
    return found


class Ledger:
    """A ledger's history in the making."""

    def __init__(self) -> None:
        self.events: list[HistoryEvent] = []

    def _add(self) -> HistoryEvent:
        event = HistoryEvent(event_id=len(self.events) + 1)
        event.event_time.seconds = 1_000_000 + len(self.events)
        self.events.append(event)
        return event

    def activity(self, name: str, result: Payload, summary: str = "") -> None:
        asked, done = self._add(), self._add()
        asked.activity_task_scheduled_event_attributes.activity_type.name = name
        if summary:
            asked.user_metadata.summary.CopyFrom(payload(summary))
        attributes = done.activity_task_completed_event_attributes
        attributes.scheduled_event_id = asked.event_id
        attributes.result.CopyFrom(Payloads(payloads=[result]))

    def round(self, number: int, decision: Decision, done: CarriedOut | None = None) -> None:
        self.activity(DECIDE, payload(DecideResult(decision, {})), f"round {number}")
        if done is not None:
            self.activity(CARRY_OUT, payload(done), "1 placed")

    def begins(self) -> None:
        self._add().workflow_execution_started_event_attributes.workflow_type.name = "Placement"

    def signalled(self, name: str, value: Payload) -> None:
        attributes = self._add().workflow_execution_signaled_event_attributes
        attributes.signal_name = name
        attributes.input.CopyFrom(Payloads(payloads=[value]))

    def read(self, uid: str = UID) -> Rounds:
        rounds = Rounds(uid)
        for event in reversed(self.events):
            rounds.read(event)
        rounds.end()
        return rounds

    def told(self, uid: str = UID) -> list[tuple[str, str, str, str]]:
        return [(each.by, each.what, each.where, each.why) for each in in_order(self.read(uid).entries)]


def place(uid: str = UID, **more: Any) -> Assignment:
    return Assignment(uid, "ns", "w", 1, 1, Turn(2, 1), "n", Resources(gpus=1), "fgd", "w-2", **more)


LENT = "the room is kept for somebody else, and lent until"
OTHER = "99999999-2222-3333-4444-555555555555"
STOP = Preemption(UID, "ns", "w", "w-0", "j", 1, Turn(1, 0), "preempted: its place goes to ns/x", OTHER, 1)


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (Decision(assignments=[place(OTHER), place()]), ("placed", "n", "attempt 2, 1 retry used, by fgd")),
        (
            Decision(assignments=[place(backfill=0.0)]),
            ("placed", "n", f"attempt 2, 1 retry used, by fgd; {LENT} it is wanted"),
        ),
        (
            Decision(assignments=[place(warmth=Warmth(1, 1, 1))]),
            ("placed", "n", "attempt 2, 1 retry used, by fgd; its kernel cache is ready there"),
        ),
        (
            Decision(assignments=[place(backfill=60.0)]),
            ("placed", "n", f"attempt 2, 1 retry used, by fgd; {LENT} 1970-01-01T00:01:00Z"),
        ),
        (Decision(waiting=[Waiting(UID, "ns", "w", 1, "WaitingForQuota", "m")]), ("waits", "", "WaitingForQuota: m")),
        (Decision(examine=[Waiting(UID, "ns", "w", 1, "Examining", "m")]), ("waits", "", "Examining: m")),
        (
            Decision(expected=[Expectation(UID, "ns", "w", 60.0, 3600.0)]),
            ("expected", "", "to start 1970-01-01T00:01:00Z; nine times in ten by 1970-01-01T01:00:00Z"),
        ),
        (
            Decision(verdicts=[Verdict(UID, "ns", "w", Turn(), "NoSuitableNode", "m")]),
            ("cannot go on", "", "NoSuitableNode: m"),
        ),
        (
            Decision(withdrawals=[Withdrawal(UID, "ns", "w", "w-0", "j", Turn(1, 0), "m", avoid="n")]),
            ("taken back", "n", "Withdrawn: m"),
        ),
        (
            Decision(withdrawals=[Withdrawal(UID, "ns", "w", "w-0", "j", Turn(1), "m", reason="Preempted", keep=True)]),
            ("queued again", "", "Preempted: m"),
        ),
        (
            Decision(assignments=[place(resumes=Stopped("w-0", "j", 9))]),
            ("placed", "n", "attempt 2, 1 retry used, by fgd; Job w-0 goes on there if the API server lets it"),
        ),
        (
            Decision(assignments=[place(places=(("n", 2), ("m", 1)))]),
            ("placed", "2 nodes (n, m)", "attempt 2, 1 retry used, by fgd"),
        ),
        (
            Decision(pins=[Pin(UID, "ns", "w", "w-0", "j", (("n", 2),))]),
            ("released", "n", "all of its pods are there; each is told its node and may begin"),
        ),
        (Decision(orders=[Order(UID, "ns", "w", 1)]), ("orders", "", "a node of an autoscaler")),
        (Decision(preemptions=[STOP]), ("stopped", "", "preempted: its place goes to ns/x")),
        (Decision(completions=[Completion(UID, "ns", "w", "w-0")]), ("ended", "", "Job w-0 completed")),
    ],
)  # fmt: skip
def test_each_kind_of_decision_is_told_to_whom_it_concerns(decision: Decision, expected: tuple[str, str, str]) -> None:
    ledger = Ledger()
    ledger.round(7, decision)
    assert ledger.told() == [("round 7", *expected)]
    assert ledger.told("somebody-else") == []


def test_who_gets_room_is_told_from_whom() -> None:
    ledger = Ledger()
    ledger.round(7, Decision(preemptions=[STOP]))
    assert ledger.told(OTHER) == [("round 7", "gets room", "", "ns/w is stopped for it")]


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (CarriedOut(made={UID: 9}), ("made", "its Job is there")),
        (CarriedOut(stale=[UID]), ("not done", "it had changed since it was decided upon; it is decided anew")),
        (
            CarriedOut(refused=[Verdict(UID, "ns", "w", Turn(), "JobRefused", "m")]),
            ("cannot go on", "JobRefused: m"),
        ),
        (CarriedOut(accepted={UID: 1}), ("examined", "the API server takes its template")),
        (CarriedOut(rejected={UID: 1}), ("examined", "the API server refuses its template")),
        (
            CarriedOut(spared={UID: 60.0}),
            ("not stopped", "the API server refused that; it is left alone until 1970-01-01T00:01:00Z"),
        ),
    ],
)
def test_what_became_of_a_decision_is_told_with_its_round(done: CarriedOut, expected: tuple[str, str]) -> None:
    ledger = Ledger()
    ledger.begins()
    ledger.round(3, Decision())
    ledger.round(4, Decision(), done)
    ledger.round(5, Decision())
    assert ledger.told() == [("round 4", expected[0], "", expected[1])]


def test_a_signal_that_is_repeated_is_told_once_when_it_came_first() -> None:
    ledger = Ledger()
    back = payload(Requeue(UID, Turn(1, 0)))
    ledger.signalled("requeue", back)
    ledger.round(4, Decision(assignments=[place()]))
    ledger.signalled("requeue", back)
    ledger.signalled("poke", back)
    assert [what for _, what, *_ in ledger.told()] == ["queued again", "placed"]


def test_of_a_run_that_was_not_read_to_its_beginning_the_last_round_has_no_number() -> None:
    ledger = Ledger()
    ledger.round(4, Decision(), CarriedOut(made={UID: 9}))
    ledger.events = ledger.events[2:]
    assert ledger.told() == [("a round", "made", "", "its Job is there")]


# --- of other builds, and not ours at all -----------------------------------------------------------------------------


def test_what_older_and_newer_builds_recorded_is_told_as_far_as_it_is_understood() -> None:
    ledger = Ledger()
    kept = {key: value for key, value in asdict(place()).items() if key != "backfill"}
    ledger.activity(DECIDE, payload({"decision": {"assignments": [kept | {"new": 1}]}, "versions": {}}), "round 2")
    ledger.activity(DECIDE, payload({"decision": {"assignments": [{"uid": UID}]}, "versions": {}}), "round 3")
    ledger.activity(CARRY_OUT, payload({"made": {UID: 1}}))
    rounds = ledger.read()
    assert [(each.by, each.what) for each in in_order(rounds.entries)] == [("round 2", "placed"), ("round 3", "made")]
    assert rounds.unreadable == 1


def test_what_went_through_a_codec_is_counted_and_the_rest_told() -> None:
    ledger = Ledger()
    ledger.round(1, Decision(assignments=[place()]))
    ledger.activity(DECIDE, Payload(metadata={"encoding": b"binary/encrypted"}, data=b"?"), "round 2")
    ledger.activity("learn", Payload(metadata={"encoding": b"binary/encrypted"}, data=b"?"))
    rounds = ledger.read()
    assert rounds.unreadable == 1 and [each.what for each in rounds.entries] == ["placed"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(UID),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["decision", "assignments", "made", "spared", "uid", UID]), inner, max_size=3)
    ),
    max_leaves=8,
)
payloads = st.builds(
    lambda encoding, data: Payload(metadata={"encoding": encoding} if encoding else {}, data=data),
    st.sampled_from([b"json/plain", b"binary/null", b"binary/plain", b"json/protobuf", b"\xff", b""]),
    json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20),
)


@given(
    st.lists(st.tuples(st.sampled_from([DECIDE, CARRY_OUT, "requeue", "follow"]), payloads, payloads), max_size=6),
)
def test_nothing_that_stands_in_a_history_is_a_crash(events: list[tuple[str, Payload, Payload]]) -> None:
    ledger = Ledger()
    for name, first, second in events:
        if name == "requeue":
            ledger.signalled(name, first)
        elif name == "follow":
            marker = ledger._add().marker_recorded_event_attributes
            marker.marker_name = "core_local_activity"
            marker.details["data"].payloads.append(first)
            marker.details["result"].payloads.append(second)
        else:
            ledger.activity(name, first)
            ledger.events[-2].user_metadata.summary.CopyFrom(second)
    ledger.events.append(HistoryEvent())
    looks = Looks()
    for event in reversed(ledger.events):
        looks.read(event)
    in_order([*looks.entries, *ledger.read().entries])


# --- looks ----------------------------------------------------------------------------------------------------------


def look(about: dict[str, Any], result: Any = None, failure: str = "") -> HistoryEvent:
    event = HistoryEvent(event_id=1)
    event.event_time.seconds = 50
    marker = event.marker_recorded_event_attributes
    marker.marker_name = "core_local_activity"
    marker.details["data"].payloads.append(payload(about))
    if failure:
        marker.failure.message = "activity failed"
        marker.failure.cause.message = failure
    else:
        marker.details["result"].payloads.append(payload(result))
    return event


RUNS = Followed("wait", "Running", "m", Turn(), node="n")


def test_a_look_is_told_with_the_moment_of_its_end() -> None:
    looks = Looks()
    looks.read(look({"activity_type": "follow", "complete_time": {"seconds": 40, "nanos": 500_000_000}}, RUNS))
    looks.read(look({"activity_type": "follow", "complete_time": "?"}, RUNS))
    looks.read(look({"activity_type": "hand_back"}, None))
    assert looks.entries == [Entry(40.5, OWN, "Running", "n", "m"), Entry(50.0, OWN, "Running", "n", "m")]


def test_a_look_that_had_no_answer_says_why() -> None:
    looks = Looks()
    looks.read(look({"activity_type": "follow"}, failure="API server unavailable"))
    assert looks.entries == [Entry(50.0, OWN, "no answer", "", "API server unavailable; it is tried again")]
