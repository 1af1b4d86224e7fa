"""Decides what the API server is told of a resource that somebody writes: refused or not, warnings, and what is filled
in. For the admission webhooks.

Nothing relies on it: whatever is refused here is refused again where it is used, for it may have been written while no
webhook answered. A kind's checks are one function and one line in a register below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from crds import gpuquota, gpureservation, gpuworkload, kernelcache, kernelcachepolicy
from crds.gpuworkload import GPUWorkloadSpec
from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from crds.settings import Settings
from planning import strategies
from planning.caches.admission import cache_refusal, cache_warnings, policy_refusal, policy_warnings
from planning.jobs import refusal as spec_refusal
from planning.model import Defaults, NodeView, QuotaView
from planning.overbooking import overbooked
from planning.quotas import Books
from planning.strategy_names import not_installed, strategy_name
from planning.times import timestamp
from planning.views import quota_view, reservation_view
from planning.windows import ReservationView, unusable, window_of

Object = Mapping[str, Any]
Patch = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Installation:
    """What a resource is held against, beside itself. `now`: in seconds since the epoch."""

    settings: Settings = field(default_factory=Settings)
    namespace_strategies: Mapping[str, str] = field(default_factory=dict)
    quotas: tuple[QuotaView, ...] = ()
    reservations: tuple[ReservationView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    now: float = 0.0

    @property
    def defaults(self) -> Defaults:
        return Defaults(self.settings.default_strategy, self.namespace_strategies)

    def reservation(self, name: str) -> ReservationView | None:
        """The GPUReservation of that name, if there is one."""
        return next((view for view in self.reservations if view.name == name), None)


@dataclass(frozen=True, slots=True)
class Review:
    """A write that the API server asks about. `old` is None for a creation, `namespace` '' for cluster-scoped kinds."""

    kind: str
    namespace: str
    new: Object
    old: Object | None = None


def checked(group: str, kind: str) -> bool:
    """Whether anything is known of this kind; all else is taken as it comes."""
    return kind in _REFUSALS and group == (kernelcache.GROUP if kind in _TKM_KINDS else gpuworkload.GROUP)


def refusal(review: Review, installation: Installation) -> str:
    """'' if the write may happen, else where and why not, for a person.

    What stood there already is not refused, so that a resource which became wrong, by other settings, a strategy that
    was removed or another resource, can still be edited, suspended and deleted.
    """
    check = _REFUSALS.get(review.kind)
    metadata = review.new.get("metadata")
    if check is None or (isinstance(metadata, Mapping) and metadata.get("deletionTimestamp")):
        return ""
    return check(review, installation)


def warnings(review: Review, installation: Installation) -> list[str]:
    """What a person should know who writes this, though it is no fault of the resource."""
    check = _WARNINGS.get(review.kind)
    return check(review, installation) if check else []


def filled_in(review: Review, installation: Installation) -> Patch:
    """A JSON patch (RFC 6902) with what a new resource leaves to others; empty if that is nothing."""
    fill = _DEFAULTS.get(review.kind)
    return fill(review, installation) if fill else []


def _gpuworkload_refusal(review: Review, installation: Installation) -> str:
    namespace, wrong = review.namespace, _gpuworkload_wrong(review.new, review.namespace, installation)
    if wrong and review.old is not None and _gpuworkload_wrong(review.old, namespace, installation) == wrong:
        return ""
    return wrong


def _gpuworkload_wrong(workload: Object, namespace: str, installation: Installation) -> str:
    spec, invalid = GPUWorkloadSpec.parse(workload.get("spec"))
    if spec is None:
        return invalid
    wrong = spec_refusal(spec, installation.settings)
    if not wrong and spec.scheduling_strategy:
        wrong = not_installed(spec.scheduling_strategy, "spec.schedulingStrategy")
    if wrong or spec.reservation is None:
        return wrong
    found = installation.reservation(spec.reservation)
    if found is None or found.spec is None:
        return ""  # it may still be written, or mended
    return unusable(spec.reservation, namespace, found, installation.now)


def _gpuworkload_warnings(review: Review, installation: Installation) -> list[str]:
    """A wrong default of its namespace or the installation is not this workload's fault; and files are applied in any
    order, so a reservation may well be written after its workloads.
    """
    spec, _ = GPUWorkloadSpec.parse(review.new.get("spec"))
    if spec is None:
        return []
    missing = [
        "" if spec.scheduling_strategy else not_installed(*strategy_name(spec, review.namespace, installation.defaults))
    ]
    if spec.reservation is not None:
        found = installation.reservation(spec.reservation)
        missing.append(unusable(spec.reservation, review.namespace, found, installation.now))
    return [f"{each}; the workload waits until that is mended" for each in missing if each]


def _gpuworkload_defaults(review: Review, installation: Installation) -> Patch:
    """The namespace's strategy, unless that is none: then the workload waits, and the namespace may be corrected."""
    spec, chosen = review.new.get("spec"), installation.namespace_strategies.get(review.namespace)
    if not isinstance(spec, Mapping) or spec.get("schedulingStrategy") is not None:
        return []
    if chosen not in strategies.installed():
        return []
    return [{"op": "add", "path": "/spec/schedulingStrategy", "value": chosen}]


def _gpuquota_refusal(review: Review, installation: Installation) -> str:
    """What the books would find wrong with it, or because of it with another, and did not before."""
    new, others = _quota(review, installation)
    old = () if review.old is None else (quota_view(review.old),)
    before, after = Books([*others, *old]).problems, Books([*others, new]).problems
    for name in sorted(after, key=lambda name: (name != new.name, name)):
        for problem in after[name]:
            if not problem.awaited and problem not in before.get(name, ()):
                return problem.wrong if name == new.name else f"GPUQuota {name} would be wrong then: {problem.wrong}"
    return ""


def _gpuquota_warnings(review: Review, installation: Installation) -> list[str]:
    """Files are applied in any order, so a cohort may well be written after its members."""
    new, others = _quota(review, installation)
    return [str(problem) for problem in Books([*others, new]).problems.get(new.name, ()) if problem.awaited]


def _quota(review: Review, installation: Installation) -> tuple[QuotaView, list[QuotaView]]:
    """The GPUQuota as it would be, and all others; a new one is younger than all."""
    new = quota_view(review.new)
    if review.old is None:
        new = replace(new, created=inf)
    return new, [other for other in installation.quotas if other.name != new.name]


def _gpureservation_refusal(review: Review, installation: Installation) -> str:
    """What stood there already is not refused, nor is it that a window is ended by an edit."""
    new, old = reservation_view(review.new), None if review.old is None else reservation_view(review.old)
    if new.spec is None:
        return new.invalid
    if old is None and new.spec.ends <= installation.now:
        return f"spec.end: {new.spec.end} is past; it is {timestamp(installation.now)}"
    if old is not None and old.spec == new.spec:
        return ""
    window = window_of(new)
    others = [each for view in installation.reservations if view.name != new.name and (each := window_of(view))]
    return overbooked(window, others, installation.nodes) if window is not None else ""


def _cache_refusal(review: Review, _: Installation) -> str:
    return cache_refusal(_CACHES[review.kind], review.new.get("spec"), _old_spec(review))


def _cache_warnings(review: Review, _: Installation) -> list[str]:
    return cache_warnings(_CACHES[review.kind], review.new.get("spec"))


def _policy_refusal(review: Review, _: Installation) -> str:
    return policy_refusal(review.new.get("spec"), _old_spec(review))


def _policy_warnings(review: Review, _: Installation) -> list[str]:
    return policy_warnings(review.new.get("spec"))


def _old_spec(review: Review) -> object:
    return None if review.old is None else review.old.get("spec")


_CACHES: Mapping[str, type[TritonKernelCacheSpec]] = {
    kernelcache.KIND: TritonKernelCacheSpec,
    kernelcache.CLUSTER_KIND: TritonKernelCacheClusterSpec,
}
_TKM_KINDS = frozenset((*_CACHES, kernelcachepolicy.KIND))
_REFUSALS: Mapping[str, Callable[[Review, Installation], str]] = {
    gpuworkload.KIND: _gpuworkload_refusal,
    gpuquota.KIND: _gpuquota_refusal,
    gpureservation.KIND: _gpureservation_refusal,
    **dict.fromkeys(_CACHES, _cache_refusal),
    kernelcachepolicy.KIND: _policy_refusal,
}
_WARNINGS: Mapping[str, Callable[[Review, Installation], list[str]]] = {
    gpuworkload.KIND: _gpuworkload_warnings,
    gpuquota.KIND: _gpuquota_warnings,
    **dict.fromkeys(_CACHES, _cache_warnings),
    kernelcachepolicy.KIND: _policy_warnings,
}
_DEFAULTS: Mapping[str, Callable[[Review, Installation], Patch]] = {gpuworkload.KIND: _gpuworkload_defaults}
