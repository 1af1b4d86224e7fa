"""Predicted run times: near what was seen, from the narrowest kind of run that is known, and honest about the rest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.accelerators import AMD, SEAT
from planning.decay import DAY, HALF_LIFE
from planning.durations import ENOUGH, Durations
from planning.model import WHOLE
from planning.profiles import Gpus, Mark, Profile, Run, fold
from planning.runtimes import BUCKETS, bucket, longer, quantile
from planning.typical import Kind

NOW = 20_000 * DAY
times = st.floats(0.01, 10**7)


def learned(*took: float, namespace: str = "ns", model: str = "m", gpus: int = 1, now: float = NOW) -> Profile:
    runs = [
        Run(Mark(int(now) + i, "u"), namespace, model, gpus, now, True, "Completed", 0, seconds)
        for i, seconds in enumerate(took)
    ]
    return fold(Profile(namespace, model), runs)


def test_nothing_is_known_of_what_nobody_ran() -> None:
    assert Durations([], NOW).run_time("ns", "m", Gpus(1)) is None
    assert Durations([Profile("ns", "m")], NOW).remaining("ns", "m", Gpus(1), 5.0) is None


@given(times)
def test_a_single_run_is_predicted_to_a_tenth(seconds: float) -> None:
    found = Durations([learned(seconds)], NOW).run_time("ns", "m", Gpus(1))
    assert found is not None and found.runs == pytest.approx(1)
    assert found.seconds == pytest.approx(seconds, rel=0.1, abs=1)


@given(st.lists(times, min_size=1, max_size=40), st.floats(0, 1))
def test_a_share_of_the_runs_takes_no_longer(took: list[float], share: float) -> None:
    found = Durations([learned(*took)], NOW).run_time("ns", "m", Gpus(1), share)
    assert found is not None
    shorter = sum(bucket(each) <= bucket(found.seconds) for each in took)
    assert shorter >= share * len(took) - 1e-6
    assert 0 <= found.seconds <= max(took) * 1.1 + 1


@given(st.lists(times, min_size=1, max_size=20), st.floats(0, 10**7), st.floats(0, 1), st.floats(0, 1))
def test_what_remains_grows_with_the_share_and_is_of_those_that_took_longer(
    took: list[float], elapsed: float, one: float, other: float
) -> None:
    durations = Durations([learned(*took)], NOW)
    less, more = (durations.remaining("ns", "m", Gpus(1), elapsed, share) for share in sorted((one, other)))
    if less is None or more is None:
        assert less is more is None and bucket(max(took)) <= bucket(elapsed)
        return
    assert 0 <= less.seconds <= more.seconds + 1e-6
    assert less.runs <= len(took) + 1e-6
    assert elapsed + more.seconds <= max(took) * 1.1 + 1


def test_a_run_that_outlived_most_is_measured_by_the_others() -> None:
    durations = Durations([learned(*[60.0] * 8, *[600.0] * 8)], NOW)
    fresh, old = durations.remaining("ns", "m", Gpus(1), 0.0), durations.remaining("ns", "m", Gpus(1), 100.0)
    assert fresh is not None and old is not None
    assert fresh.seconds < 70 and old.seconds == pytest.approx(500, rel=0.1)
    assert fresh.runs == pytest.approx(16) and old.runs == pytest.approx(8)
    assert durations.remaining("ns", "m", Gpus(1), 700.0) is None


def test_the_narrowest_kind_of_run_of_which_enough_is_known() -> None:
    enough = math.ceil(ENOUGH)
    profiles = [
        learned(*[10.0] * enough, model="m", gpus=1),
        learned(*[100.0] * enough, model="n", gpus=2),
        learned(*[1000.0] * 9, namespace="other", model="m", gpus=1),
        learned(5.0, model="rare", gpus=4),
    ]
    durations = Durations(profiles, NOW)

    def basis(namespace: str, model: str, gpus: int) -> str:
        found = durations.run_time(namespace, model, Gpus(gpus))
        assert found is not None
        return found.basis

    assert basis("ns", "m", 1) == "model and GPUs"
    assert basis("ns", "n", 1) == "model"
    assert basis("ns", "unknown", 1) == "namespace"
    assert basis("nowhere", "m", 1) == "all"
    assert basis("ns", "rare", 4) == "namespace", "one run is not enough where more is known of others"
    alone = Durations([learned(5.0, model="rare", gpus=4)], NOW).run_time("ns", "rare", Gpus(4))
    assert alone is not None and alone.basis == "model and GPUs"


def test_run_times_with_gpus_of_one_resource_tell_nothing_of_anothers() -> None:
    profile = learned(*[10.0] * 9)
    amd = Kind(1, WHOLE, 0, resource=AMD)
    slow = [Run(Mark(int(NOW) + 60 + i, "u"), "ns", "m", 1, NOW, True, "Completed", 0, 1000.0, amd) for i in range(9)]
    durations = Durations([fold(profile, slow)], NOW)
    fast, slower = (durations.run_time("ns", "m", Gpus(1, resource)) for resource in ("", AMD))
    assert fast is not None and fast.seconds == pytest.approx(10, rel=0.1) and fast.runs == pytest.approx(9)
    assert slower is not None and slower.seconds == pytest.approx(1000, rel=0.1) and slower.basis == "model and GPUs"
    other = durations.run_time("ns", "m", Gpus(1, SEAT))
    assert other is not None and other.basis == "model", "of a kind that nobody ran any run is better than none"


def test_older_runs_count_less_also_across_profiles() -> None:
    week = HALF_LIFE * DAY
    old = learned(*[1000.0] * 6, model="a", now=NOW - 2 * week)
    new = learned(*[10.0] * 6, model="b")
    found = Durations([old, new], NOW).run_time("ns", "?", Gpus(1), 0.7)
    assert found is not None
    assert found.seconds < 20 and found.runs == pytest.approx(7.5, rel=0.01)
    later = Durations([new], NOW + week).run_time("ns", "b", Gpus(1))
    assert later is not None and later.runs == pytest.approx(3, rel=0.01)


@given(st.floats(0, 10**12))
def test_every_run_time_has_a_bucket(seconds: float) -> None:
    index = bucket(seconds)
    assert 0 <= index < BUCKETS
    ((begin, end, mass),) = longer({index: 1})
    assert mass == 1 and begin <= seconds and (seconds < end or index == BUCKETS - 1)
    assert quantile([], 0.5) is None


def test_of_the_bucket_that_a_run_is_in_only_what_is_still_ahead_counts() -> None:
    ((begin, end, _),) = longer({50: 8})
    middle = (begin + end) / 2
    ((still, last, mass),) = longer({50: 8}, middle)
    assert (still, last) == (middle, end) and mass == pytest.approx(4)
    assert longer({50: 8}, end) == []
