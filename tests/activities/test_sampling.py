"""Running pods of simulated nodes are sampled as they are told to be, and nothing else is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from activities import sampling
from activities.cache import ClusterCache
from activities.sampling import SimulatedSampler, Usages, sample_once
from planning.model import PodView
from planning.naming import SIMULATED_LABEL
from planning.samples import PodSample
from tests.planning.builders import job, node, pod, workload


def cluster(usage: str = "gpus=1,engine=80,memory=20000,power=300") -> ClusterCache:
    """A simulated node and another one, with a pod on each; the first is asked to use one of its two GPUs."""
    cache = ClusterCache(cast(Any, None))
    env = [{"name": "SIMULATED_USAGE", "value": usage}]
    for number, uid in enumerate(("simulated", "real"), 1):
        cache.nodes._put(uid, number, node(uid, labels={SIMULATED_LABEL: "true"} if uid == "simulated" else {}))
        cache.workloads._put(uid, number, workload(uid, 2, spec={"env": env}))
        runs = pod(uid, uid, of=job(uid, uid, gpus=2), running=True)
        cache.pods._put(uid, number, runs)
    return cache


async def test_a_simulated_pod_does_what_it_is_told_and_says_so() -> None:
    cache, usages = cluster(), Usages()
    for _ in range(3):
        await sample_once(cache, SimulatedSampler(cache), usages)
    found = usages.of("simulated")
    assert found is not None and found.tells and found.simulated
    assert (found.active_gpus, found.peak_memory_mib, found.engine_p95, found.power_p95) == (1, 20_000, 80, 300)
    assert usages.of("real") is None, "what runs on a real node is not simulated"


async def test_only_what_runs_is_sampled_and_what_is_gone_is_forgotten() -> None:
    cache, usages = cluster(), Usages()
    cache.pods._put("simulated", 9, replace(cache.pods.items["simulated"], running=False))
    await sample_once(cache, SimulatedSampler(cache), usages)
    assert usages.of("simulated") is None
    cache.pods._put("simulated", 10, replace(cache.pods.items["simulated"], running=True))
    await sample_once(cache, SimulatedSampler(cache), usages)
    assert usages.of("simulated") is not None
    cache.workloads._remove("simulated", 99)
    await sample_once(cache, SimulatedSampler(cache), usages)
    assert usages.of("simulated") is None


async def test_of_another_namespace_nobody_can_be_sampled_for() -> None:
    cache, usages = cluster(), Usages()
    cache.pods._put("simulated", 9, replace(cache.pods.items["simulated"], namespace="other"))
    await sample_once(cache, SimulatedSampler(cache), usages)
    assert usages.of("simulated") is None


async def test_what_cannot_be_read_is_told_once_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    cache, usages = cluster("gpus=lots"), Usages()
    sampler = SimulatedSampler(cache)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await sample_once(cache, sampler, usages)
    (told,) = caplog.messages
    assert "GPUWorkload ns/simulated: its variable SIMULATED_USAGE" in told and "gpus must be a whole number" in told
    assert usages.of("simulated") is None


async def test_a_sampler_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def sample(self, pods: Sequence[PodView]) -> list[PodSample]:
            raise OSError("NVML: driver not loaded")

    await sample_once(cluster(), Broken(), Usages())
    assert "Broken: no samples this time" in caplog.text


async def test_one_interval_samples_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Counting:
        async def sample(self, pods: Sequence[PodView]) -> list[PodSample]:
            asked.append(len(pods))
            return []

    cache = cluster()
    await sample_once(cache, Counting(), Usages())
    monkeypatch.setattr(sampling, "LIMIT", 1)
    await sample_once(cache, Counting(), Usages())
    assert asked == [2, 1]
