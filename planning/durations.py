"""Predicts how long a workload runs, and how long one that runs already still will: from its tenant's profiles.

For whoever predicts when a waiting workload starts. Succeeded runs alone count: one that failed tells how long failing
takes. Why by tenant, kind of work and GPUs: Weng et al., "MLaaS in the Wild" (NSDI 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from planning.decay import DAY, UNIT, fade
from planning.profiles import Gpus, Profile
from planning.runtimes import longer, quantile

# Of a narrower kind of run so many must be remembered before it is believed rather than a broader one: three of the
# last days.
ENOUGH = 2.5

Basis = Literal["model and GPUs", "model", "namespace", "all"]
"""Which runs an estimate comes from: of the same namespace, model and number of such GPUs, and so on."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A prediction; `runs` is how many runs it rests on, older ones counting less: the confidence that it deserves."""

    seconds: float
    runs: float
    basis: Basis


class Durations:
    """The run times that profiles know, as they count today; made once for many questions."""

    def __init__(self, profiles: Iterable[Profile], now: float) -> None:
        self._known: dict[tuple[str | Gpus, ...], dict[int, float]] = {}
        today = int(now // DAY)
        for profile in profiles:
            worth = fade(profile.reference, today) / UNIT
            for gpus, at in profile.at.items():
                for key, _ in _levels(profile.namespace, profile.model, gpus):
                    known = self._known.setdefault(key, {})
                    for bucket, weight in at.durations.items():
                        known[bucket] = known.get(bucket, 0.0) + weight * worth

    def run_time(self, namespace: str, model: str, gpus: Gpus, share: float = 0.5) -> Estimate | None:
        """The run time that `share` of such runs do not exceed; None if nothing is known of any run."""
        return self.remaining(namespace, model, gpus, 0.0, share)

    def remaining(self, namespace: str, model: str, gpus: Gpus, elapsed: float, share: float = 0.5) -> Estimate | None:
        """The seconds that `share` of such runs, having taken `elapsed`, still take at most. None: nothing is known of
        any run that took as long.
        """
        narrowest: Estimate | None = None
        for estimate in self._estimates(namespace, model, gpus, max(0.0, elapsed), share):
            if estimate.runs >= ENOUGH:
                return estimate
            narrowest = narrowest or estimate
        return narrowest

    def _estimates(self, namespace: str, model: str, gpus: Gpus, elapsed: float, share: float) -> Iterator[Estimate]:
        """From the narrowest kind of run to the broadest."""
        for key, basis in _levels(namespace, model, gpus):
            parts = longer(self._known.get(key, {}), elapsed)
            took = quantile(parts, share)
            if took is not None:
                yield Estimate(took - elapsed, sum(mass for *_, mass in parts), basis)


def _levels(namespace: str, model: str, gpus: Gpus) -> Iterator[tuple[tuple[str | Gpus, ...], Basis]]:
    yield (namespace, model, gpus), "model and GPUs"
    yield (namespace, model), "model"
    yield (namespace,), "namespace"
    yield (), "all"
