"""What a node's kernel caches do for its pods, for Prometheus: mounts, and hits, misses and seconds of compiling as the
pods report them.

Observed when it is read, from what was told last, so that a series goes with its cache or its pod. Of pods there are
those that have a cache mounted now, which bounds their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from nodeworkers.ledger import Mount
from planning.caches.hits import Seen
from planning.caches.volumes import NodeCache


@dataclass(frozen=True, slots=True)
class Counted:
    """`mounts` and `caches` by cache, `pods` by cache and pod; each named namespace/name, a cluster's cache by its name
    alone.
    """

    mounts: Mapping[str, int]
    caches: Mapping[str, Seen]
    pods: Mapping[tuple[str, str], Seen]


def counted(
    caches: Iterable[NodeCache],
    mounts: Iterable[Mount],
    by_digest: Mapping[tuple[str, str], Seen],
    by_volume: Mapping[str, Seen],
) -> Counted:
    """Adds up what the ledger has: by UID and digest for all that was ever reported, by volume for what is mounted."""
    names = {cache.uid: f"{cache.namespace}/{cache.name}" if cache.namespace else cache.name for cache in caches}
    volumes = dict.fromkeys(names.values(), 0)
    every: dict[str, Seen] = {}
    pods: dict[tuple[str, str], Seen] = {}
    for (uid, _), seen in by_digest.items():
        if uid in names:
            every[names[uid]] = every.get(names[uid], Seen(0, 0)) + seen
    for mount in mounts:
        if mount.cache_uid not in names:
            continue  # deleted, or made anew under its name, while a pod still has it
        cache, pod = names[mount.cache_uid], f"{mount.pod_namespace}/{mount.pod_name}"
        volumes[cache] += mount.published_at is not None
        if mount.volume_id in by_volume:
            pods[cache, pod] = pods.get((cache, pod), Seen(0, 0)) + by_volume[mount.volume_id]
    return Counted(volumes, every, pods)


_counts: list[Counted] = []


def tell(latest: Counted) -> None:
    """From now on this is what is read."""
    _counts[:] = [latest]


def _mounts(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(count, {"cache": cache}) for latest in _counts for cache, count in latest.mounts.items()]


def _by_cache(of: Callable[[Seen], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [
        Observation(of(seen), {"cache": cache}) for latest in _counts for cache, seen in latest.caches.items()
    ]


def _by_pod(of: Callable[[Seen], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [
        Observation(of(seen), {"cache": cache, "pod": pod})
        for latest in _counts
        for (cache, pod), seen in latest.pods.items()
    ]


_meter = metrics.get_meter("berth.node")
_meter.create_observable_gauge(
    "berth_cache_mounts", [_mounts], description="Volumes of this node that have the cache mounted"
)
_meter.create_observable_counter(
    "berth_cache_hits", [_by_cache(lambda seen: seen.hits)], description="Kernels of a cache that pods found in it"
)
_meter.create_observable_counter(
    "berth_cache_misses",
    [_by_cache(lambda seen: seen.misses)],
    description="Kernels that pods compiled although they had the cache mounted",
)
_meter.create_observable_counter(
    "berth_cache_compile",
    [_by_cache(lambda seen: seen.compile_seconds)],
    unit="s",
    description="What compiling these took",
)
_meter.create_observable_gauge(
    "berth_cache_pod_hits", [_by_pod(lambda seen: seen.hits)], description="Of a pod that has the cache mounted now"
)
_meter.create_observable_gauge(
    "berth_cache_pod_misses", [_by_pod(lambda seen: seen.misses)], description="Of a pod that has it mounted now"
)
_meter.create_observable_gauge(
    "berth_cache_pod_compile",
    [_by_pod(lambda seen: seen.compile_seconds)],
    unit="s",
    description="What compiling took a pod that has it mounted now",
)
