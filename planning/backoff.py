"""Decides how long a GPUWorkload waits after a failure before its next Job, or before a node is ordered anew."""

from __future__ import annotations

MAX_DELAY = 300.0
_JITTER_SHARE = 0.1


def delay(base_seconds: float, attempt: int, jitter: float, longest: float = MAX_DELAY) -> float:
    """Seconds to wait: min(longest, base * 2**attempt * (1 + 0.1 * jitter)).

    `attempt` counts from 0 (the first wait is the base), `jitter` is in [0, 1) and comes from the caller. The formula
    is upstream's (scheduling.md 2.2) with the cap applied last, so that no wait exceeds the longest.
    """
    exponent = min(max(attempt, 0), 16)  # 2**16 s is beyond the cap for every base
    return min(longest, base_seconds * 2.0**exponent * (1.0 + _JITTER_SHARE * min(max(jitter, 0.0), 1.0)))
