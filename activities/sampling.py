"""Samples what running pods do with their GPUs, and keeps a summary of each run until its profile has learned it.

A sampler says where samples come from; today there is one, and it measures nothing: it repeats what simulated pods are
told to do. Every worker samples for itself, and what a worker has not sampled, its profiles do not tell.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Sequence
from typing import Protocol

from activities.cache import ClusterCache
from planning.model import PodView
from planning.naming import SIMULATED_LABEL
from planning.samples import SIMULATED_USAGE, PodSample, Usage, observed, parse_simulated, simulated_usage

log = logging.getLogger(__name__)

# Pods that one interval samples at most; if more run, it is chance which.
LIMIT = 2000


class Sampler(Protocol):
    """Where samples come from."""

    async def sample(self, pods: Sequence[PodView]) -> list[PodSample]:
        """One sample of each of these running pods whose GPUs can be seen; quick, for the next interval waits."""
        ...


class SimulatedSampler:
    """Measures nothing: what a pod of a simulated node does with its GPUs, its variable SIMULATED_USAGE says."""

    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache
        self._refused: set[str] = set()

    async def sample(self, pods: Sequence[PodView]) -> list[PodSample]:
        nodes = self._cache.nodes.items.values()
        simulated = {node.name for node in nodes if node.labels.get(SIMULATED_LABEL) == "true"}
        self._refused &= {pod.workload_uid for pod in pods}
        return [sample for pod in pods if pod.node in simulated and (sample := self._of(pod)) is not None]

    def _of(self, pod: PodView) -> PodSample | None:
        view = self._cache.workloads.items.get(pod.workload_uid)
        if view is None or view.spec is None or view.namespace != pod.namespace:
            return None
        given = simulated_usage(view.spec)
        if not given or view.uid in self._refused:
            return None
        try:
            gpus = parse_simulated(given, pod.requests.gpus)
        except ValueError as refused:
            self._refused.add(view.uid)
            log.warning(
                "GPUWorkload %s/%s: its variable %s is passed over: %s",
                view.namespace, view.name, SIMULATED_USAGE, refused,
            )  # fmt: skip
            return None
        return PodSample(pod.namespace, view.uid, gpus, simulated=True)


class Usages:
    """What the runs that this worker has sampled did so far, by the UID of their workload."""

    def __init__(self) -> None:
        self._known: dict[str, Usage] = {}

    def take(self, sample: PodSample) -> None:
        self._known[sample.workload_uid] = observed(self._known.get(sample.workload_uid, Usage()), sample)

    def of(self, uid: str) -> Usage | None:
        return self._known.get(uid)

    def keep(self, uids: Collection[str]) -> None:
        """Forgets all others."""
        self._known = {uid: usage for uid, usage in self._known.items() if uid in uids}


async def keep_sampling(cache: ClusterCache, sampler: Sampler, usages: Usages) -> None:
    """Samples until cancelled."""
    await cache.wait_synced()
    while True:
        await sample_once(cache, sampler, usages)
        await asyncio.sleep(cache.settings.sample_seconds)


async def sample_once(cache: ClusterCache, sampler: Sampler, usages: Usages) -> None:
    """One interval's samples. A sampler that fails is logged, and asked again next time."""
    running = [pod for pod in cache.pods.items.values() if pod.workload_uid and pod.running and pod.requests.gpus]
    if len(running) > LIMIT:
        running = random.sample(running, LIMIT)
    try:
        for sample in await sampler.sample(running):
            usages.take(sample)
    except Exception:  # a vendor's library, say: the worker has other things to do
        log.exception("%s: no samples this time", type(sampler).__name__)
    usages.keep(cache.workloads.items.keys() | cache.departed.keys())
