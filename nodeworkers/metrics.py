"""What a node's kernel caches do for its pods, and what they cost it, for Prometheus: mounts, and hits, misses and
seconds of compiling as the pods report them; orders, refusals, pulls, extractions and the disk.

What belongs to a cache or a pod is observed when it is read, from what was told last, so that a series goes with it. Of
pods there are those that have a cache mounted now, which bounds their number. What happened is counted as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from nodeworkers.ledger import Mount
from planning.caches.hits import Seen
from planning.caches.orders import Outcome
from planning.caches.volumes import NodeCache


@dataclass(frozen=True, slots=True)
class Counted:
    """`mounts`, `ready` and `caches` by cache, `pods` by cache and pod; each named namespace/name, a cluster's cache by
    its name alone. `ready`: whether new pods get it; caches are left out that go, or that no GPU of the node can run.
    """

    mounts: Mapping[str, int]
    ready: Mapping[str, bool]
    caches: Mapping[str, Seen]
    pods: Mapping[tuple[str, str], Seen]


def counted(
    caches: Iterable[NodeCache],
    mounts: Iterable[Mount],
    by_digest: Mapping[tuple[str, str], Seen],
    by_volume: Mapping[str, Seen],
) -> Counted:
    """Adds up what the ledger has: by UID and digest for all that was ever reported, by volume for what is mounted."""
    caches = list(caches)
    names = {cache.uid: f"{cache.namespace}/{cache.name}" if cache.namespace else cache.name for cache in caches}
    wanted = [cache for cache in caches if cache.state != "Removing" and cache.compatible is not False]
    ready = {names[cache.uid]: bool(cache.serves) for cache in wanted}
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
    return Counted(volumes, ready, every, pods)


_counts: list[Counted] = []


def tell(latest: Counted) -> None:
    """From now on this is what is read."""
    _counts[:] = [latest]


_disk: list[tuple[int, int]] = []


def on_disk(taken: int, quota: int) -> None:
    """From now on caches take so many bytes of their quota."""
    _disk[:] = [(taken, quota)]


def begin(reasons: Iterable[str]) -> None:
    """Refusals for these reasons count from zero, so that the first one is an increase. For a process that begins."""
    for reason in reasons:
        _refusals.add(0, {"reason": reason})


def carried_out(outcome: Outcome) -> None:
    """An order came to its end, for now."""
    _outcomes.add(1, {"outcome": outcome})


def refused(reason: str) -> None:
    """An order cannot be carried out as it is; `reason` is one of those that conditions have."""
    _refusals.add(1, {"reason": reason})


def pulled(size: int) -> None:
    """So many bytes of layers came from a registry, whether they were all or not."""
    _pulled.add(size)


def extracted(seconds: float, size: int) -> None:
    """An image that had been pulled was unpacked into so many bytes."""
    _pulls.add(1)
    _extraction.record(seconds)
    _extracted.add(size)


def _taken(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(taken) for taken, _ in _disk]


def _quota(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(quota) for _, quota in _disk]


def _ready(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(int(ready), {"cache": cache}) for latest in _counts for cache, ready in latest.ready.items()]


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
_meter.create_observable_gauge(
    "berth_cache_ready", [_ready], description="1 while new pods of this node get the cache, else 0"
)
_meter.create_observable_gauge(
    "berth_cache_disk", [_taken], unit="By", description="What images of caches take on this node's disk"
)
_meter.create_observable_gauge("berth_cache_quota", [_quota], unit="By", description="What they may take")
_outcomes = _meter.create_counter("berth_cache_order_outcomes", description="Orders that this node carried out")
_refusals = _meter.create_counter("berth_cache_refusals", description="Orders that fail until somebody acts")
_pulls = _meter.create_counter("berth_cache_pulls", description="Images that were pulled and unpacked")
_pulled = _meter.create_counter("berth_cache_pulled", unit="By", description="What came of layers from registries")
_extraction = _meter.create_histogram("berth_cache_extraction", unit="s", description="Unpacking one image")
_extracted = _meter.create_counter("berth_cache_extracted", unit="By", description="What was unpacked")
