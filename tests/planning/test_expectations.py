"""Whose status is told when it should start, and what it says then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning import expectations as module
from planning import status
from planning.expectations import expectations
from planning.model import Expectation, Waiting, WorkloadView
from planning.prediction import seconds_to_start, starts
from planning.times import seconds, timestamp
from tests.planning.builders import NOW, SETTINGS, snapshot, workload
from tests.planning.test_prediction import running


def waits(uid: str = "a", **changes: Any) -> WorkloadView:
    view = workload(uid, **changes)
    entry = Waiting(uid, "ns", uid, 1, "WaitingForCapacity", "needs 4 GPUs; none is free")
    return replace(view, status=status.waiting(view, entry, NOW) or {})


def told(view: WorkloadView, start: float, latest: float) -> WorkloadView:
    """As its status is after it was told."""
    patch = status.expected(view, start, latest)
    assert patch is not None
    return replace(view, status={**view.status, **patch})


def due(view: WorkloadView, early: float | None, late: float | None, *, now: float = NOW) -> list[Expectation]:
    forecast = [{} if wait is None else {view.uid: wait} for wait in (early, late)]
    return expectations(snapshot([], [view], now=now), forecast[0], forecast[1], NOW)


def test_who_waits_is_told_once_and_anew_when_that_is_no_longer_true() -> None:
    assert due(waits(), 600, 900) == [Expectation("a", "ns", "a", NOW + 600, NOW + 900)]
    view = told(waits(), NOW + 600, NOW + 900)
    assert due(view, 600, 900) == [] and due(view, 700, 1050) == [], "about that"
    assert due(view, 1200, 1300) == [Expectation("a", "ns", "a", NOW + 1200, NOW + 1300)]
    assert due(view, 600, 1900) == [Expectation("a", "ns", "a", NOW + 600, NOW + 1900)]


@pytest.mark.parametrize(
    ("view", "early", "late", "now"),
    [
        pytest.param(waits(), 0, 0, NOW, id="it is placed next"),
        pytest.param(waits(), None, 5, NOW, id="nobody can tell"),
        pytest.param(waits(), 5, None, NOW, id="nobody can tell the latest"),
        pytest.param(waits(), 5, 9, NOW + 6, id="the forecast was wrong"),
        pytest.param(waits(deleting=True), 5, 9, NOW, id="deleted"),
        pytest.param(workload("a", status={"phase": "Running"}), 5, 9, NOW, id="it runs"),
    ],
)
def test_nobody_else_is_told(view: WorkloadView, early: float | None, late: float | None, now: float) -> None:
    assert due(view, early, late, now=now) == []


def test_who_was_told_hears_when_nobody_can_tell_any_more() -> None:
    view = told(waits(), NOW + 600, NOW + 900)
    (nothing,) = due(view, None, None)
    assert (nothing.start, nothing.latest) == (0.0, 0.0)
    patch = status.expected(view, nothing.start, nothing.latest)
    assert patch is not None and patch["message"] == "needs 4 GPUs; none is free"
    assert patch["expectedStartTime"] is None is patch["expectedStartLatest"]
    cleared = replace(view, status={key: value for key, value in {**view.status, **patch}.items() if value is not None})
    assert due(cleared, None, None) == [] and status.condition(cleared, "Scheduled")["message"] == patch["message"]


def test_of_many_the_first_are_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOLD", 2)
    early = {"a": 300.0, "b": 100.0, "c": 200.0}
    found = expectations(snapshot([], [waits(uid) for uid in early]), early, early, NOW)
    assert [each.uid for each in found] == ["b", "c"]


def test_a_status_says_why_and_when_and_forgets_it_with_the_reason() -> None:
    view = told(told(waits(), NOW + 60, NOW + 120), NOW + 600, NOW + 900)
    assert view.status["message"] == (
        "needs 4 GPUs; none is free; expected to start at 1970-01-12 13:56 UTC, "
        "nine times in ten by 1970-01-12 14:01 UTC"
    )
    assert status.condition(view, "Scheduled")["message"] == view.status["message"]
    assert status.shows(view, "WaitingForCapacity"), "it is not told again why it waits"
    assert view.status["expectedStartTime"] == timestamp(NOW + 600)
    other = status.waiting(view, Waiting("a", "ns", "a", 1, "WaitingForQuota", "m"), NOW)
    assert other is not None and other["message"] == "m" and other["expectedStartTime"] is None
    assert status.expected(workload("a", status={"phase": "Running"}), NOW, NOW) is None
    assert status.expected(workload("a", status={"phase": "Scheduling", "conditions": 7}), NOW, NOW) is None


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 500)), max_size=2), st.lists(st.integers(1, 8), max_size=5))
def test_all_at_once_are_told_what_each_would_be_told_alone(sizes: list[tuple[int, float]], queue: list[int]) -> None:
    seen = running(*sizes, waiting=tuple(queue), took=(100.0,) * 5)
    alone = {view.uid: seconds_to_start(seen, SETTINGS, view.uid, 0.5) for view in seen.workloads if view.uid[0] == "w"}
    together = starts(seen, SETTINGS, 0.5)
    assert together == {uid: wait for uid, wait in alone.items() if wait is not None}


@given(st.one_of(st.text(max_size=80), st.integers(), st.none(), st.floats(0, 2e9).map(timestamp)))
def test_whatever_stands_there_is_read_as_a_time_or_as_none(value: object) -> None:
    read = seconds(value)
    assert read is None or isinstance(value, str)
