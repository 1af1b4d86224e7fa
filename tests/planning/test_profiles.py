"""Every run counts once in its model's profile, whatever the order and the batches, and a profile stays small."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crds.gpumodelprofile import MOST_COUNTS, GPUModelProfileStatus
from crds.gpuworkload import GPUWorkloadSpec
from planning.accelerators import SEAT
from planning.decay import DAY, HALF_LIFE, UNIT, WEEKS, faded, runs_today, weight
from planning.model import WHOLE, Ended, WorkloadView
from planning.profile_status import manifest, profile_view, span, status_of
from planning.profiles import (
    FORGET,
    KINDS,
    NOTHING,
    OTHER,
    PROFILES,
    REASONS,
    SETTLE,
    Gpus,
    Mark,
    Profile,
    Run,
    expired,
    fold,
    mark_of,
    next_due,
    run_of,
    settled,
    unlearned,
)
from planning.samples import Usage
from planning.typical import Kind
from planning.views import workload_view
from tests.planning.builders import job, workload

EPOCH = 20_000  # a day since 1970
NOW = EPOCH * DAY

usages = st.builds(
    Usage,
    samples=st.integers(3, 9),
    active_gpus=st.integers(0, 8),
    peak_memory_mib=st.integers(0, 80_000),
    engine=st.dictionaries(st.integers(0, 20), st.integers(1, 9), max_size=3),
    power=st.dictionaries(st.integers(0, 40), st.integers(1, 9), max_size=3),
    simulated=st.booleans(),
)
kinds = st.builds(
    Kind,
    st.integers(1, 8),
    st.just(WHOLE),
    st.integers(0, 60).map(lambda n: n * 1000),
    resource=st.sampled_from(["", "amd.com/gpu"]),
)


@st.composite
def run(draw: st.DrawFn) -> Run:
    told = int(NOW) + draw(st.integers(0, 400 * int(DAY)))
    return Run(
        mark=Mark(told, draw(st.text("ab", min_size=1, max_size=5))),
        namespace="ns",
        model="m",
        gpus=draw(st.integers(1, 8)),
        created=told - draw(st.floats(0, 200 * DAY)),
        succeeded=draw(st.booleans()),
        reason=draw(st.text("AB", min_size=1, max_size=5)),
        retries=draw(st.integers(0, 3)),
        seconds=draw(st.none() | st.floats(0, 10**7)),
        kind=draw(st.none() | kinds),
        usage=draw(st.none() | usages),
    )


runs = st.lists(run(), max_size=30, unique_by=lambda each: each.mark)
EMPTY = Profile("ns", "m")


def stored(profile: Profile) -> Profile:
    """As it comes back from the cluster."""
    raw = {**manifest(profile), "status": json.loads(json.dumps(status_of(profile, NOW)))}
    raw["metadata"] |= {"uid": profile.uid, "resourceVersion": str(profile.resource_version)}
    found = profile_view(raw)
    assert found is not None
    return found


@settings(max_examples=100)
@given(runs, st.randoms(use_true_random=False), st.integers(1, 9))
def test_in_whatever_batches_and_order_the_profile_is_the_same(given_runs: list[Run], draw: Any, size: int) -> None:
    """As long as they come in the order of ends, which settling sees to; within a batch they may come in any."""
    profile = EMPTY
    ordered = sorted(given_runs, key=lambda each: each.mark)
    for begin in range(0, len(ordered), size):
        batch = ordered[begin : begin + size]
        draw.shuffle(batch)
        profile = stored(fold(profile, batch))
    assert profile == stored(fold(EMPTY, given_runs))


@given(runs, st.data())
def test_what_comes_again_counts_nothing(given_runs: list[Run], data: st.DataObject) -> None:
    once = fold(EMPTY, given_runs)
    again = data.draw(st.lists(st.sampled_from(given_runs), max_size=9)) if given_runs else []
    assert fold(once, again) == once
    assert fold(EMPTY, [*given_runs, *again]) == once
    assert once.runs == len(given_runs) == once.succeeded + sum(once.failures.values())


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.lists(run(), min_size=1, max_size=30, unique_by=lambda each: each.mark))
def test_a_profile_stays_small(seed: int, given_runs: list[Run]) -> None:
    many = [
        replace(
            each,
            mark=Mark(int(NOW) + i * 7 * (seed % 997), f"{i}"),
            gpus=1 + i % 8,
            reason=f"R{i}",
            seconds=1.1 ** (i % 190),
            succeeded=i % 3 > 0,
            kind=Kind(1, WHOLE, i, tuple("x" * 63 for _ in range(20)), "r" * 253 + f"/{i // 8 % 3}"),
            usage=Usage(5, i % 9, i * 999, {i % 21: 1}, {i % 81: 1}),
        )
        for i, each in enumerate(given_runs * 20)
    ]
    profile = fold(EMPTY, many)
    assert len(profile.failures) <= REASONS and len(profile.typical) <= KINDS and len(profile.at) <= MOST_COUNTS
    text = json.dumps(status_of(profile, NOW))
    assert len(text) < 64 * 1024
    GPUModelProfileStatus.model_validate(json.loads(text))


def test_the_reason_that_is_one_too_many_is_another() -> None:
    failed = [replace(RUN, mark=Mark(int(NOW) + i, "u"), succeeded=False, reason=f"R{i}") for i in range(40)]
    failures = fold(EMPTY, failed).failures
    assert failures == {**{f"R{i}": 1 for i in range(REASONS - 1)}, OTHER: 40 - REASONS + 1}


RUN = Run(Mark(int(NOW), "u"), "ns", "m", 2, NOW, True, "Completed", 0, 60.0)


def test_what_is_learned_of_a_run() -> None:
    usage = Usage(5, 1, 20_000, {16: 5}, {12: 5}, simulated=True)
    profile = fold(EMPTY, [replace(RUN, retries=2, kind=Kind(2, WHOLE, 4000), usage=usage)])
    assert (profile.runs, profile.succeeded, profile.retries, profile.failures) == (1, 1, 2, {})
    assert profile.typical == {Kind(2, WHOLE, 4000): UNIT}
    status = status_of(profile, NOW)
    assert (status["p50"], status["activeGPUs"], status["peakMemoryMiB"]) == ("58s", 1, 20_000)
    (count,) = status["gpuCounts"]
    assert (count["gpuCount"], count["runs"], count["p95"]) == (2, 1, "1m")
    told = {key: count["usage"][key] for key in ("engineActiveP95Percent", "powerP95Watts", "simulated", "runs")}
    assert told == {"engineActiveP95Percent": 80, "powerP95Watts": 300, "simulated": True, "runs": 1}


def test_what_is_learned_with_one_resource_is_kept_apart_and_an_old_status_is_the_installations() -> None:
    usage = Usage(5, 1, 20_000)
    seat = replace(RUN, gpus=1, kind=Kind(1, WHOLE, 0, resource=SEAT), usage=usage)
    card = replace(
        RUN, gpus=1, mark=Mark(int(NOW) + 1, "v"), kind=Kind(1, WHOLE, 0), usage=replace(usage, peak_memory_mib=7)
    )
    profile = fold(EMPTY, [seat, card])
    assert {gpus: at.peak_memory_mib for gpus, at in profile.at.items()} == {Gpus(1): 7, Gpus(1, SEAT): 20_000}
    status = status_of(profile, NOW)
    assert [(each["gpuCount"], each["resource"]) for each in status["gpuCounts"]] == [(1, ""), (1, SEAT)]
    assert stored(profile).at == profile.at
    for count in status["gpuCounts"]:
        del count["resource"]
    old = profile_view({**manifest(profile), "status": {**status, "gpuCounts": status["gpuCounts"][:1]}})
    assert old is not None and set(old.at) == {Gpus(1)}


def test_of_too_many_kinds_of_gpus_those_are_kept_of_which_most_is_known() -> None:
    often = [replace(RUN, mark=Mark(int(NOW) + i, "u")) for i in range(3)]
    rare = [
        replace(RUN, mark=Mark(int(NOW) + 9 + i, "u"), kind=Kind(2, WHOLE, 0, resource=f"tenstorrent.com/n{i}"))
        for i in range(3 * MOST_COUNTS)
    ]
    profile = fold(EMPTY, [*often, *rare])
    assert len(profile.at) == MOST_COUNTS and Gpus(2) in profile.at
    assert Gpus(2, f"tenstorrent.com/n{3 * MOST_COUNTS - 1}") in profile.at, "the newest is learned all the same"
    GPUModelProfileStatus.model_validate(status_of(profile, NOW))


def test_a_failed_run_tells_no_run_time_but_what_it_used() -> None:
    failed = replace(RUN, succeeded=False, reason="DeadlineExceeded", usage=Usage(5, 2, 79_000))
    profile = fold(EMPTY, [failed])
    assert profile.failures == {"DeadlineExceeded": 1}
    assert profile.at[Gpus(2)].durations == {} and profile.at[Gpus(2)].peak_memory_mib == 79_000


@given(st.integers(0, 6), st.integers(0, 30))
def test_a_run_counts_half_after_a_week_and_nothing_in_the_end(day: int, weeks: int) -> None:
    worth = weight(EPOCH + day, EPOCH)
    assert worth == pytest.approx(UNIT * 2 ** (day / HALF_LIFE), abs=1)
    left = faded({0: worth}, weeks)
    assert left == ({0: worth >> weeks} if weeks < WEEKS - 1 or worth >> weeks else {})
    assert not faded({0: worth}, WEEKS)
    assert runs_today({0: worth}, EPOCH, EPOCH + day + HALF_LIFE) == pytest.approx(0.5, abs=0.001)
    assert weight(EPOCH + day - HALF_LIFE, EPOCH) == worth >> 1


@pytest.mark.parametrize("thin", ["engine", "power"])
def test_what_was_seen_is_forgotten_as_a_whole_though_what_is_spread_thinner_fades_sooner(thin: str) -> None:
    """Two runs that used as many GPUs, and differed in how busy those were."""
    usage = [
        Usage(5, 1, 9, {step if thin == "engine" else 16: 5}, {step if thin == "power" else 12: 5}) for step in (3, 9)
    ]
    told, weeks = RUN.mark.told, UNIT.bit_length()
    before = [replace(RUN, mark=Mark(told, str(i)), usage=each) for i, each in enumerate(usage)]
    late = replace(RUN, mark=Mark(int(told + weeks * HALF_LIFE * DAY), "z"))
    profile = fold(EMPTY, [*before, late])
    at = profile.at[RUN.asked]
    assert (at.active, at.engine, at.power) == ({}, {}, {})
    (count,) = status_of(profile, NOW)["gpuCounts"]
    assert "usage" not in count or count["usage"] is None


def test_what_nobody_ran_for_weeks_is_forgotten_by_the_next_run() -> None:
    old = fold(EMPTY, [replace(RUN, usage=Usage(5, 2, 79_000), kind=Kind(2, WHOLE, 0))])
    late = Mark(int(NOW + FORGET * DAY), "v")
    new = fold(old, [replace(RUN, mark=late, gpus=1)])
    assert set(new.at) == {Gpus(1)} and new.typical == {} and new.runs == 2
    assert not expired(old, NOW + (FORGET - 1) * DAY) and expired(old, NOW + FORGET * DAY)
    assert not expired(EMPTY, NOW)


# --- from tombstones -----------------------------------------------------------------------------------------------


def ended(uid: str = "u", told: float = NOW, **changes: Any) -> WorkloadView:
    view = workload(uid, 2, status={"phase": "Succeeded"}, ended=Ended(told, told - 5, told - 65, "Completed", 1))
    return replace(view, **changes)


def test_a_tombstone_tells_of_a_run() -> None:
    found = run_of(ended())
    assert found is not None
    assert (found.mark, found.model, found.gpus, found.seconds) == (Mark(int(NOW), "u"), "m", 2, 60.0)
    assert found.succeeded and found.retries == 1
    few = run_of(ended(), usage=Usage(samples=2, active_gpus=1))
    assert few is not None and few.usage is None, "two samples tell nothing"
    going = ended(status={"phase": "Running"})
    assert run_of(going) is None and mark_of(ended(spec=None)) is None


@pytest.mark.parametrize(("started", "seconds"), [(NOW + 9, None), (None, None), (-1e18, None), (NOW - 6, 1.0)])
def test_impossible_run_times_are_none(started: float | None, seconds: float | None) -> None:
    found = run_of(ended(ended=Ended(NOW, NOW - 5, started)))
    assert found is not None and found.seconds == seconds


HOSTILE: list[Any] = [
    {},
    {"finishTime": "2026-01-01T00:00:00Z"},
    {"finishTime": "never", "conditions": [{"type": "Finished", "status": "True", "lastTransitionTime": "x"}]},
    {"finishTime": [], "conditions": [{"type": "Finished", "status": "True", "lastTransitionTime": {}}]},
    {"finishTime": "2026-01-01T00:00:00Z", "conditions": [{"type": "Finished", "status": "True"}]},
    {"finishTime": "2026-01-01T00:00:00Z", "conditions": ["Finished", 7, None]},
    {"finishTime": "2026-01-01T00:00:00Z", "conditions": [{"type": "Finished", "status": "False"}]},
    {
        "finishTime": "2026-01-01T00:00:00Z",
        "conditions": [{"type": "Finished", "status": "True", "lastTransitionTime": "0001-01-01T00:00:00Z"}],
    },
]


@pytest.mark.parametrize("status", HOSTILE)
def test_a_tombstone_that_does_not_say_when_tells_nothing(status: dict[str, Any]) -> None:
    raw = {"metadata": {"uid": "u"}, "spec": {"modelName": "m", "gpuCount": 1}, "status": {"phase": "Failed", **status}}
    view = workload_view(raw)
    assert view.finished and view.ended is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [str(field.alias) for field in GPUModelProfileStatus.model_fields.values()]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values) | json_values)
def test_a_profile_that_somebody_else_wrote_is_learned_anew(status: Any) -> None:
    raw = {"metadata": {"name": "m", "namespace": "ns"}, "spec": {"modelName": "m"}, "status": status}
    found = profile_view(raw)
    assert found is not None
    fold(found, [RUN])


def test_one_bad_value_spoils_the_whole_and_unknown_fields_nothing() -> None:
    good = status_of(fold(EMPTY, [RUN]), NOW)
    raw = {**manifest(EMPTY), "status": good}
    known = profile_view(raw)
    assert known is not None and known.runs == 1
    assert profile_view({**raw, "status": {**good, "newer": {"a": 1}}}) == known
    far = {**good, "gpuCounts": [{"gpuCount": 1, "runs": 1, "durationHistogram": {"200": 1}}]}
    for bad in ({**good, "runs": -1}, {**good, "referenceDay": 10**8}, far, {**good, "runs": "1"}):
        assert profile_view({**raw, "status": bad}) == EMPTY


@pytest.mark.parametrize(
    "raw", [None, {}, {"spec": {"modelName": 7}}, {"metadata": {"name": "n"}, "spec": {"modelName": "m"}}]
)
def test_an_object_that_is_no_models_is_none(raw: Any) -> None:
    assert profile_view(raw) is None


# --- what is due ---------------------------------------------------------------------------------------------------


def test_an_end_is_due_once_it_has_settled_and_never_again() -> None:
    view = ended()
    assert next_due([view], [], {}, NOW) == SETTLE
    assert next_due([view], [], {}, NOW + SETTLE) == 0 == next_due([view], [], {}, NOW + 99)
    assert settled(Mark(int(NOW), "u"), NOW + SETTLE) and not settled(Mark(int(NOW), "u"), NOW + SETTLE - 1)
    learned = {("ns", "m"): fold(EMPTY, [found for found in [run_of(view)] if found])}
    assert next_due([view], [], learned, NOW + 99) is None
    assert next_due([view, ended("v")], [], learned, NOW + 99) == 0, "the same second, a later UID"
    assert next_due([view], [], {}, NOW + FORGET * DAY) is None
    assert next_due([workload("w")], [], {}, NOW) is None


def test_a_job_that_completed_announces_an_end() -> None:
    done = job("w", "n", finished="Complete")
    assert next_due([workload("w")], [done], {}, NOW) == SETTLE
    assert next_due([workload("w")], [replace(done, finished="Failed")], {}, NOW) is None
    assert next_due([workload("w")], [replace(done, deleting=True)], {}, NOW) is None


def test_a_namespace_has_so_many_profiles_and_no_more() -> None:
    full = {("ns", f"m{i}"): Profile("ns", f"m{i}", mark=NOTHING) for i in range(PROFILES)}
    assert list(unlearned([ended()], full, NOW)) == []
    assert len(list(unlearned([ended()], {**full, ("ns", "m"): EMPTY}, NOW))) == 1
    full.popitem()
    newer = [ended(f"u{i}", spec=GPUWorkloadSpec(model_name=f"n{i}", gpu_count=1)) for i in (1, 2)]
    assert len(list(unlearned(newer, full, NOW))) == 1


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.31, "0.3s"),
        (1, "1s"),
        (59.6, "1m"),
        (61, "1m1s"),
        (3600, "1h"),
        (3780, "1h3m"),
        (90_000, "1d1h"),
        (864_000, "10d"),
    ],
)
def test_run_times_for_people(seconds: float, told: str) -> None:
    assert span(seconds) == told
