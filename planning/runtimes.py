"""Run times in buckets that grow exponentially, as in Kubernetes' Vertical Pod Autoscaler, and what they tell.

For profiles, which keep them, and predictions. Within a bucket run times count as evenly spread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

# Bucket 0 ends at one second, each further one is a tenth longer than the one before; the last ends at six years.
BUCKETS = 200
_ENDS = tuple(1.1**index for index in range(BUCKETS))

Part = tuple[float, float, float]
"""Run times from, to (seconds), and how much weight they have."""


def bucket(seconds: float) -> int:
    """The bucket that holds a run of so many seconds."""
    return min(bisect_right(_ENDS, seconds), BUCKETS - 1)


def longer(weights: Mapping[int, float], elapsed: float = 0.0) -> list[Part]:
    """The runs that took longer than `elapsed` seconds, the shortest first."""
    left = []
    for index in sorted(weights):
        begin, end = (_ENDS[index - 1] if index else 0.0), _ENDS[index]
        if weights[index] > 0 and end > elapsed:
            still = max(begin, elapsed)
            left.append((still, end, weights[index] * (end - still) / (end - begin)))
    return left


def quantile(parts: Sequence[Part], share: float) -> float | None:
    """The run time that `share` (0 to 1) of those runs do not exceed; None if there are none."""
    wanted, seen = share * sum(mass for *_, mass in parts), 0.0
    for begin, end, mass in parts:
        if seen + mass >= wanted:
            return begin + (end - begin) * min(1.0, (wanted - seen) / mass)
        seen += mass
    return parts[-1][1] if parts else None
