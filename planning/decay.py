"""How what was learned fades: a run weighs half as much for each week that another is newer. For profiles and demand.

Weights are integers, in units of a run at a profile's reference day, so that adding up in the same order gives the
same, however the sums were stored in between. After ten halvings a single run is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

DAY = 24 * 3600.0
HALF_LIFE = 7  # days
UNIT = 1024  # the weight of one run at the reference day
# Weeks after which nothing is left of a run, whatever the days in between; with one to spare for the reference.
WEEKS = UNIT.bit_length()

Weights = Mapping[int, int]
"""Weight by bucket."""

_STEPS = tuple(round(UNIT * 2 ** (days / HALF_LIFE)) for days in range(HALF_LIFE))


def weight(day: int, reference: int) -> int:
    """The weight of what happened on `day` (since the epoch), less than two units: it is in the reference's week or
    before it.
    """
    weeks, days = divmod(day - reference, HALF_LIFE)
    return _STEPS[days] >> -weeks if weeks < 0 else _STEPS[days]


def faded(weights: Weights, weeks: int) -> dict[int, int]:
    """The weights in terms of a reference so many weeks later; what weighs nothing any more is dropped."""
    return {bucket: left for bucket, value in weights.items() if (left := value >> weeks)}


def runs_today(weights: Weights, reference: int, today: int) -> float:
    """How many runs of today weigh as much as all of these."""
    return sum(weights.values()) / UNIT * fade(reference, today)


def fade(reference: int, today: int) -> float:
    """What a unit at the reference day is worth today, in runs of today."""
    return float(2.0 ** min((reference - today) / HALF_LIFE, 1.0))


def quantile(weights: Mapping[int, float], share: float, value: Callable[[int], float]) -> float:
    """The least `value` of a bucket up to which at least `share` of the weight lies; ValueError if there is none."""
    total, seen = sum(weights.values()), 0.0
    for bucket in sorted(weights):
        seen += weights[bucket]
        if seen >= share * total:
            return value(bucket)
    raise ValueError("nothing was seen")
