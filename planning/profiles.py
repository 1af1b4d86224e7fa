"""Learns from workloads that ended: a profile per namespace and model, in which every run counts exactly once.

For the ledger's side, which writes them. A profile says up to where it has learned (`mark`: when an end was told, then
the UID), in the same write as what it learned, so that a write may be lost or repeated. Runs are learned in that order,
and only once they have settled: news of an end may come a little late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from crds.gpumodelprofile import MOST_COUNTS
from planning.decay import DAY, HALF_LIFE, WEEKS, Weights, faded, weight
from planning.model import JobView, WorkloadView
from planning.runtimes import bucket
from planning.samples import Usage
from planning.typical import Kind

# An end is learned so many seconds after it was told: clocks of workers differ a little, and watches lag.
SETTLE = 15.0
# Nothing is learned of what ended so many days ago, and a profile without a newer run goes: all has faded.
FORGET = HALF_LIFE * (WEEKS + 1)
# Bounds, so that nobody's model names and templates grow the cluster's database: of a profile, and of their number.
KINDS = 32
MODELS = 8
REASONS = 16
PROFILES = 1000  # of one namespace
OTHER = "Other"
# Profiles that are written in one go; the rest comes a minute later.
BATCH = 200
LONGEST = 10 * 365 * DAY  # a run that took longer was written by somebody else


class Mark(NamedTuple):
    """A place in the order of ends: when it was told (seconds since the epoch, whole), then the UID."""

    told: int
    uid: str


NOTHING = Mark(0, "")


class Gpus(NamedTuple):
    """How many GPUs a run asked for, and of which resource: '' is the installation's."""

    number: int
    resource: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A workload that ended. `seconds`: of its last Job, where that is known; `kind` and `usage` as well."""

    mark: Mark
    namespace: str
    model: str
    gpus: int
    created: float
    succeeded: bool
    reason: str
    retries: int
    seconds: float | None
    kind: Kind | None = None
    usage: Usage | None = None

    @property
    def asked(self) -> Gpus:
        return Gpus(self.gpus, self.kind.resource if self.kind is not None else "")


@dataclass(frozen=True, slots=True)
class AtCount:
    """The runs of a model with one number of GPUs of one resource; weights as in `planning.decay`.

    durations: of succeeded runs, by bucket of `planning.runtimes`. active: most GPUs in use at once. engine, power:
    95th percentiles of a run, in percent and watts. peaks: most memory of a GPU in MiB, by week since the epoch.
    """

    durations: Weights = field(default_factory=dict)
    active: Weights = field(default_factory=dict)
    engine: Weights = field(default_factory=dict)
    power: Weights = field(default_factory=dict)
    peaks: Mapping[int, int] = field(default_factory=dict)
    simulated: bool = False  # some of those samples were

    @property
    def peak_memory_mib(self) -> int:
        return max(self.peaks.values(), default=0)


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a model in a namespace. `resource_version` is 0 until it is stored.

    reference: the day since the epoch at which a run weighs a unit. at: by GPUs asked for.
    """

    namespace: str
    model: str
    runs: int = 0
    succeeded: int = 0
    retries: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    reference: int = 0
    at: Mapping[Gpus, AtCount] = field(default_factory=dict)
    typical: Mapping[Kind, int] = field(default_factory=dict)
    mark: Mark = NOTHING
    uid: str = ""
    resource_version: int = 0


Key = tuple[str, str]
"""A namespace and a model's name."""


def by_key(profiles: Iterable[Profile]) -> dict[Key, Profile]:
    return {(profile.namespace, profile.model): profile for profile in profiles}


def mark_of(view: WorkloadView) -> Mark | None:
    """Its place in the order of ends; None for a workload that has not ended, or from which nothing can be learned."""
    if view.ended is None or view.spec is None or not view.finished:
        return None
    return Mark(int(view.ended.told), view.uid)


def run_of(view: WorkloadView, kind: Kind | None = None, usage: Usage | None = None) -> Run | None:
    """The run that a workload's tombstone tells of; None if it tells of none."""
    mark, ended, spec = mark_of(view), view.ended, view.spec
    if mark is None or ended is None or spec is None:
        return None
    took = ended.finished - ended.started if ended.started is not None else None
    succeeded = view.phase == "Succeeded"
    return Run(
        mark=mark,
        namespace=view.namespace,
        model=spec.model_name,
        gpus=spec.gpu_count,
        created=view.created,
        succeeded=succeeded,
        reason=ended.reason,
        retries=ended.retries,
        seconds=took if took is not None and 0 <= took <= LONGEST else None,
        kind=kind,
        usage=usage if usage is not None and usage.tells else None,
    )


def unlearned(
    workloads: Iterable[WorkloadView], profiles: Mapping[Key, Profile], now: float
) -> Iterator[tuple[Mark, WorkloadView]]:
    """Ends that no profile knows yet, settled or not. None where a namespace has as many profiles as it may have."""
    counts: dict[str, int] = {}
    for namespace, _ in profiles:
        counts[namespace] = counts.get(namespace, 0) + 1
    begins: set[Key] = set()
    for view in workloads:
        mark = mark_of(view)
        if mark is None or view.spec is None or mark.told <= now - FORGET * DAY:
            continue
        key = view.namespace, view.spec.model_name
        known = profiles.get(key)
        if known is None and key not in begins:
            if counts.get(view.namespace, 0) >= PROFILES:
                continue
            counts[view.namespace] = counts.get(view.namespace, 0) + 1
            begins.add(key)
        if known is None or mark > known.mark:
            yield mark, view


def settled(mark: Mark, now: float) -> bool:
    return mark.told <= now - SETTLE


def next_due(
    workloads: Iterable[WorkloadView], jobs: Iterable[JobView], profiles: Mapping[Key, Profile], now: float
) -> float | None:
    """Seconds until there is something to learn (0: now); None while nothing ends.

    A Job that completed counts: its workload's end is told in a moment, and of that nobody pokes the ledger.
    """
    due = [mark.told + SETTLE - now for mark, _ in unlearned(workloads, profiles, now)]
    if any(job.finished == "Complete" and not job.deleting for job in jobs):
        due.append(SETTLE)
    return max(0.0, min(due)) if due else None


def fold(profile: Profile, runs: Iterable[Run]) -> Profile:
    """The profile once it has learned these runs; those that it knows already, or passed over, change nothing."""
    for run in sorted(runs, key=lambda run: run.mark):
        if run.mark > profile.mark:
            profile = _learned(profile, run)
    return profile


def expired(profile: Profile, now: float) -> bool:
    """Whether all that it knows has faded."""
    return profile.mark > NOTHING and profile.mark.told <= now - FORGET * DAY


def _learned(profile: Profile, run: Run) -> Profile:
    day = run.mark.told // int(DAY)
    profile = _rebased(profile, day)
    worth = weight(day, profile.reference)
    failures = dict(profile.failures)
    if not run.succeeded:
        reason = run.reason if run.reason in failures or len(failures) < REASONS - 1 else OTHER
        failures[reason] = failures.get(reason, 0) + 1
    return replace(
        profile,
        runs=profile.runs + 1,
        succeeded=profile.succeeded + run.succeeded,
        retries=profile.retries + run.retries,
        failures=failures,
        at=_bounded({**profile.at, run.asked: _at(profile.at.get(run.asked, AtCount()), run, day, worth)}, run.asked),
        typical=_typical(profile, run),
        mark=run.mark,
    )


def _bounded(at: dict[Gpus, AtCount], newest: Gpus) -> dict[Gpus, AtCount]:
    """Without those of which least is remembered where they are too many; the newest stays."""

    def remembered(gpus: Gpus) -> tuple[int, Gpus]:
        return sum(at[gpus].durations.values()) + sum(at[gpus].active.values()), gpus

    while len(at) > MOST_COUNTS:
        del at[min((gpus for gpus in at if gpus != newest), key=remembered)]
    return at


def _at(at: AtCount, run: Run, day: int, worth: int) -> AtCount:
    if run.succeeded and run.seconds is not None:
        at = replace(at, durations=_plus(at.durations, bucket(run.seconds), worth))
    usage = run.usage
    if usage is None:
        return at
    week = day // HALF_LIFE
    return replace(
        at,
        active=_plus(at.active, min(usage.active_gpus, run.gpus), worth),
        engine=_plus(at.engine, usage.engine_p95, worth),
        power=_plus(at.power, usage.power_p95, worth),
        peaks={**at.peaks, week: max(at.peaks.get(week, 0), usage.peak_memory_mib)},
        simulated=at.simulated or usage.simulated,
    )


def _typical(profile: Profile, run: Run) -> dict[Kind, int]:
    """The most frequent kinds. A request counts from when it was made, as those do that have not ended yet."""
    found = dict(profile.typical)
    if run.kind is None:
        return found
    kind = replace(run.kind, models=run.kind.models[:MODELS])
    day = min(run.mark.told, int(max(run.created, 0.0))) // int(DAY)
    found[kind] = found.get(kind, 0) + weight(day, profile.reference)
    kept = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:KINDS]
    return {kind: value for kind, value in kept if value}


def _rebased(profile: Profile, day: int) -> Profile:
    """The profile with its reference in the week before `day`; a new one begins there."""
    if not profile.runs:
        return replace(profile, reference=day)
    weeks = (day - profile.reference) // HALF_LIFE
    if weeks <= 0:
        return profile
    first = day // HALF_LIFE - WEEKS
    return replace(
        profile,
        reference=profile.reference + weeks * HALF_LIFE,
        at={gpus: at for gpus, old in profile.at.items() if (at := _faded(old, weeks, first)) != AtCount()},
        typical={kind: left for kind, value in profile.typical.items() if (left := value >> weeks)},
    )


def _faded(at: AtCount, weeks: int, first: int) -> AtCount:
    durations = faded(at.durations, weeks)
    active, engine, power = (faded(each, weeks) for each in (at.active, at.engine, at.power))
    if not (active and engine and power):
        # A run counts once in each, but what is spread over more buckets fades sooner.
        return AtCount(durations=durations)
    peaks = {week: peak for week, peak in at.peaks.items() if week >= first}
    return AtCount(durations, active, engine, power, peaks, at.simulated)


def _plus(weights: Weights, key: int, worth: int) -> dict[int, int]:
    return {**weights, key: weights.get(key, 0) + worth}
