"""One figure over several seeds, as reports give it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation, and the values in the order of the seeds."""
    return {
        "mean": round(statistics.fmean(values), 4),
        "sd": round(statistics.stdev(values), 4) if len(values) > 1 else 0.0,
        "by_seed": [round(value, 4) for value in values],
    }
