"""Status conditions as Kubernetes means them (metav1.Condition): one entry per type, with the time it last flipped.

For whoever writes a status. Pure: the time comes in as text (RFC 3339).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

ConditionStatus = Literal["True", "False", "Unknown"]

_LONGEST_MESSAGE = 32_768  # characters, the maxLength of metav1.Condition


def set_condition(
    conditions: Sequence[Mapping[str, Any]],
    type: str,
    status: ConditionStatus,
    reason: str,
    message: str,
    observed_generation: int,
    now: str,
) -> list[dict[str, Any]]:
    """The conditions with this one set, the others and their order as they were.

    `lastTransitionTime` moves to `now` only when the status differs from before, as the API conventions ask. Of entries
    with the same type, which a merge patch can leave behind, the first counts and the others go.
    """
    fresh = {
        "type": type,
        "status": status,
        "observedGeneration": observed_generation,
        "lastTransitionTime": now,
        "reason": reason,
        "message": message[:_LONGEST_MESSAGE],
    }
    result: list[dict[str, Any]] = []
    placed = False
    for condition in conditions:
        if condition.get("type") != type:
            result.append(dict(condition))
        elif not placed:
            if condition.get("status") == status and condition.get("lastTransitionTime"):
                fresh["lastTransitionTime"] = condition["lastTransitionTime"]
            result.append(fresh)
            placed = True
    if not placed:
        result.append(fresh)
    return result
