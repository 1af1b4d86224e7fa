"""Conditions keep their transition time until they flip."""

from __future__ import annotations

from typing import Any

from kube.conditions import set_condition

READY: dict[str, Any] = {
    "type": "Ready",
    "status": "False",
    "observedGeneration": 1,
    "lastTransitionTime": "t0",
    "reason": "Waiting",
    "message": "for a node",
}


def test_new_ones_are_appended_and_others_left_alone() -> None:
    other = {"type": "Other", "status": "True"}
    result = set_condition([other], "Ready", "False", "Waiting", "for a node", 1, "t0")
    assert result == [other, READY]
    assert set_condition([], "Ready", "False", "Waiting", "for a node", 1, "t0") == [READY]


def test_the_transition_time_moves_only_when_the_status_does() -> None:
    (same,) = set_condition([READY], "Ready", "False", "Queued", "third in line", 2, "t1")
    assert same == {**READY, "reason": "Queued", "message": "third in line", "observedGeneration": 2}
    (flipped,) = set_condition([same], "Ready", "True", "Running", "", 2, "t2")
    assert flipped["lastTransitionTime"] == "t2"


def test_order_stays_inputs_stay_and_doubles_go() -> None:
    before = [READY, {"type": "Other"}, {**READY, "status": "True"}]
    after = set_condition(before, "Ready", "True", "R", "m", 1, "t1")
    assert [c["type"] for c in after] == ["Ready", "Other"] and after[0]["lastTransitionTime"] == "t1"
    assert before[0] is READY and READY["status"] == "False" and len(before) == 3


def test_a_condition_without_a_time_gets_one() -> None:
    (fixed,) = set_condition([{"type": "Ready", "status": "True"}], "Ready", "True", "R", "m", 1, "t1")
    assert fixed["lastTransitionTime"] == "t1"
    (cut,) = set_condition([], "Ready", "True", "R", "m" * 40_000, 1, "t1")
    assert len(cut["message"]) == 32_768
