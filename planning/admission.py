"""Decides what the API server is told of a resource that somebody writes: refused or not, warnings, and what is filled
in. For the admission webhooks.

Nothing relies on it: whatever is refused here is refused again where it is used, for it may have been written while no
webhook answered. A kind's checks are one function and one line in a register below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from crds.gpuworkload import KIND, GPUWorkloadSpec
from crds.settings import Settings
from planning import strategies
from planning.jobs import refusal as spec_refusal
from planning.model import Defaults
from planning.strategy_names import not_installed, strategy_name

Object = Mapping[str, Any]
Patch = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Installation:
    """What a resource is held against, beside itself."""

    settings: Settings = field(default_factory=Settings)
    namespace_strategies: Mapping[str, str] = field(default_factory=dict)

    @property
    def defaults(self) -> Defaults:
        return Defaults(self.settings.default_strategy, self.namespace_strategies)


@dataclass(frozen=True, slots=True)
class Review:
    """A write that the API server asks about. `old` is None for a creation, `namespace` '' for cluster-scoped kinds."""

    kind: str
    namespace: str
    new: Object
    old: Object | None = None


def checked(kind: str) -> bool:
    """Whether anything is known of this kind; all else is taken as it comes."""
    return kind in _REFUSALS


def refusal(review: Review, installation: Installation) -> str:
    """'' if the write may happen, else where and why not, for a person.

    What stood there already is not refused, so that a resource which became wrong, by other settings or a strategy that
    was removed, can still be edited, suspended and deleted.
    """
    check = _REFUSALS.get(review.kind)
    metadata = review.new.get("metadata")
    if check is None or (isinstance(metadata, Mapping) and metadata.get("deletionTimestamp")):
        return ""
    wrong = check(review.new, installation)
    return "" if wrong and review.old is not None and check(review.old, installation) == wrong else wrong


def warnings(review: Review, installation: Installation) -> list[str]:
    """What a person should know who writes this, though it is no fault of the resource."""
    check = _WARNINGS.get(review.kind)
    return check(review, installation) if check else []


def filled_in(review: Review, installation: Installation) -> Patch:
    """A JSON patch (RFC 6902) with what a new resource leaves to others; empty if that is nothing."""
    fill = _DEFAULTS.get(review.kind)
    return fill(review, installation) if fill else []


def _gpuworkload_refusal(workload: Object, installation: Installation) -> str:
    spec, invalid = GPUWorkloadSpec.parse(workload.get("spec"))
    if spec is None:
        return invalid
    wrong = spec_refusal(spec, installation.settings)
    if wrong or not spec.scheduling_strategy:
        return wrong
    return not_installed(spec.scheduling_strategy, "spec.schedulingStrategy")


def _gpuworkload_warnings(review: Review, installation: Installation) -> list[str]:
    """A wrong default of its namespace or the installation is not this workload's fault."""
    spec, _ = GPUWorkloadSpec.parse(review.new.get("spec"))
    if spec is None or spec.scheduling_strategy:
        return []
    missing = not_installed(*strategy_name(spec, review.namespace, installation.defaults))
    return [f"{missing}; the workload waits until that is mended"] if missing else []


def _gpuworkload_defaults(review: Review, installation: Installation) -> Patch:
    """The namespace's strategy, unless that is none: then the workload waits, and the namespace may be corrected."""
    spec, chosen = review.new.get("spec"), installation.namespace_strategies.get(review.namespace)
    if not isinstance(spec, Mapping) or spec.get("schedulingStrategy") is not None:
        return []
    if chosen not in strategies.installed():
        return []
    return [{"op": "add", "path": "/spec/schedulingStrategy", "value": chosen}]


_REFUSALS: Mapping[str, Callable[[Object, Installation], str]] = {KIND: _gpuworkload_refusal}
_WARNINGS: Mapping[str, Callable[[Review, Installation], list[str]]] = {KIND: _gpuworkload_warnings}
_DEFAULTS: Mapping[str, Callable[[Review, Installation], Patch]] = {KIND: _gpuworkload_defaults}
