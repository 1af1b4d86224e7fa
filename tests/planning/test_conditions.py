"""Conditions keep the moment of their last change, and fit their schema."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crds.gpuworkload import Condition
from planning.conditions import LONGEST, condition, conditions
from planning.times import timestamp

NOW = 1_000_000.0


def test_only_what_can_be_read_is_a_condition() -> None:
    assert list(conditions({"conditions": [{"type": "Ready"}, 7, None]})) == [{"type": "Ready"}]
    for odd in (None, 7, "Ready", {"type": "Ready"}):
        assert list(conditions({"conditions": odd})) == []
    assert list(conditions({})) == []


def test_the_moment_stays_while_the_value_does() -> None:
    first = condition({}, "Ready", False, "Preparing", "", 1, NOW)
    assert first["lastTransitionTime"] == timestamp(NOW)
    status = {"conditions": [{"type": "Error"}, first]}
    other = condition(status, "Ready", False, "Failing", "why", 2, NOW + 9)
    assert (other["lastTransitionTime"], other["reason"], other["observedGeneration"]) == (timestamp(NOW), "Failing", 2)
    assert condition(status, "Ready", True, "Ready", "", 2, NOW + 9)["lastTransitionTime"] == timestamp(NOW + 9)
    assert condition(status, "Ready", None, "NotChecked", "", 2, NOW)["status"] == "Unknown"
    odd = {"conditions": [{**first, "lastTransitionTime": 7}]}
    assert condition(odd, "Ready", False, "Preparing", "", 1, NOW + 9)["lastTransitionTime"] == timestamp(NOW + 9)


@given(
    st.text(max_size=3000), st.sampled_from([True, False, None]), st.lists(st.dictionaries(st.text(), st.integers()))
)
def test_it_fits_its_schema(message: str, holds: bool | None, before: list[dict[str, Any]]) -> None:
    found = condition({"conditions": before}, "Ready", holds, "Reason", message, 1, NOW)
    parsed, problem = Condition.validated(found, "condition")
    assert parsed is not None, problem
    assert len(found["message"]) <= LONGEST
