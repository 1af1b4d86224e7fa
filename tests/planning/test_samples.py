"""A run's samples, summed up: bounded, whatever a sampler says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.gpuworkload import GPUWorkloadSpec
from planning.samples import (
    ENOUGH_SAMPLES,
    MOST_MEMORY,
    GpuSample,
    PodSample,
    Usage,
    observed,
    parse_simulated,
    simulated_usage,
)

wild = st.floats() | st.integers(-(10**20), 10**20).map(float)
gpus = st.builds(GpuSample, wild, st.integers(-(10**20), 10**20), wild)
samples = st.lists(st.lists(gpus, max_size=4), max_size=20)


def usage_of(given_samples: list[list[GpuSample]]) -> Usage:
    usage = Usage()
    for each in given_samples:
        usage = observed(usage, PodSample("ns", "u", tuple(each)))
    return usage


@given(samples)
def test_whatever_a_sampler_says_the_usage_is_possible(given_samples: list[list[GpuSample]]) -> None:
    usage = usage_of(given_samples)
    assert usage.samples == len(given_samples) and usage.tells == (len(given_samples) >= ENOUGH_SAMPLES)
    assert 0 <= usage.active_gpus <= max(map(len, given_samples), default=0)
    assert 0 <= usage.peak_memory_mib <= MOST_MEMORY
    assert 0 <= usage.engine_p95 <= 100 and usage.power_p95 >= 0
    assert len(usage.engine) <= 21 and len(usage.power) <= 401


@given(samples, st.lists(gpus, max_size=4))
def test_another_sample_never_lowers_what_was_seen(given_samples: list[list[GpuSample]], more: list[GpuSample]) -> None:
    before, after = usage_of(given_samples), usage_of([*given_samples, more])
    assert after.active_gpus >= before.active_gpus and after.peak_memory_mib >= before.peak_memory_mib


def test_engines_and_power_are_those_of_gpus_in_use() -> None:
    idle = GpuSample(0.9, 400, 60.0)
    usage = usage_of([[GpuSample(50.0, 9_000, 200.0), idle]] * 19 + [[GpuSample(98.0, 100, 390.0), idle]] * 2)
    assert (usage.active_gpus, usage.peak_memory_mib) == (1, 9_000)
    assert (usage.engine_p95, usage.power_p95) == (100, 400)
    assert Usage().engine_p95 == Usage().power_p95 == 0
    assert observed(Usage(), PodSample("ns", "u", (GpuSample(math.nan, 5, math.inf),))).peak_memory_mib == 5


def test_what_a_simulated_run_is_told_to_do() -> None:
    assert parse_simulated("gpus=1, engine=80,memory=20000,power=300", 3) == (
        GpuSample(80.0, 20_000, 300.0),
        GpuSample(0.0, 0, 0.0),
        GpuSample(0.0, 0, 0.0),
    )
    assert parse_simulated("engine=5", 2) == (GpuSample(5.0, 0, 0.0),) * 2
    assert len(parse_simulated("gpus=9", 2)) == 2


@pytest.mark.parametrize(
    ("given_text", "told"),
    [
        ("", "'' is none of gpus=N, engine=N, memory=N, power=N"),
        ("cpu=1", "'cpu=1' is none of"),
        ("gpus", "'gpus' is none of"),
        ("engine=101", "engine must be a whole number from 0 to 100 (percent), not '101'"),
        ("memory=-1", "memory must be a whole number"),
        ("power=1e3", "power must be a whole number"),
        ("gpus=" + "9" * 5000, "gpus must be a whole number"),
    ],
)
def test_what_it_cannot_be_told(given_text: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_simulated(given_text, 2)
    assert told in str(refused.value) and len(str(refused.value)) < 200


def test_where_it_is_told() -> None:
    def spec(**more: object) -> GPUWorkloadSpec:
        found, refused = GPUWorkloadSpec.parse({"modelName": "m", "gpuCount": 1, **more})
        assert found is not None, refused
        return found

    env = [{"name": "A", "value": "b"}, {"name": "SIMULATED_USAGE", "value": "gpus=1"}]
    assert simulated_usage(spec(env=env)) == "gpus=1"
    assert simulated_usage(spec()) == simulated_usage(spec(env=env[:1])) == ""
    containers: list[object] = [{"name": "a"}, {"name": "b", "env": ["no", *env]}]
    assert simulated_usage(spec(template={"spec": {"containers": containers}})) == "gpus=1"
    bad = {"name": "a", "env": [{"name": "SIMULATED_USAGE", "value": 7}]}
    assert simulated_usage(spec(template={"spec": {"containers": [bad]}})) == ""
