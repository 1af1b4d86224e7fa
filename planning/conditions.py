"""Conditions of a status, as metav1.Condition has them: read leniently, and written so that the moment of the last
change stays while nothing changes. For whoever writes a status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planning.times import timestamp

LONGEST = 1024  # characters of a message


def conditions(status: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The conditions that a status shows."""
    found = status.get("conditions")
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def condition(
    status: Mapping[str, Any], kind: str, holds: bool | None, reason: str, message: str, generation: int, now: float
) -> dict[str, Any]:
    """The condition as it is due (None: unknown); it changed now unless the status shows the same value already."""
    before = next((c for c in conditions(status) if c.get("type") == kind), {})
    value = {True: "True", False: "False", None: "Unknown"}[holds]
    same = before.get("status") == value and isinstance(before.get("lastTransitionTime"), str)
    return {
        "type": kind,
        "status": value,
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if same else timestamp(now),
        "reason": reason,
        "message": message if len(message) <= LONGEST else message[: LONGEST - 1] + "…",
    }
