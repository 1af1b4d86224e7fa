"""Decides which seat configuration is a node's: of several GPUSeatProfiles that select it the oldest, or a file's.

For the node, which follows them, and for whoever tells in a GPUSeatProfile's status that another comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from crds.gpuseatprofile import API_VERSION, KIND


@dataclass(frozen=True, slots=True)
class SeatProfileView:
    """A GPUSeatProfile as it was read. `spec` is what somebody wrote, whatever it is; `selector` None where it cannot
    be read, and then it selects no node: a mistake in one must not take nodes from the others.
    """

    uid: str
    name: str
    generation: int
    created: str
    selector: Mapping[str, str] | None
    spec: object


@dataclass(frozen=True, slots=True)
class Named:
    """A GPUSeatProfile at one generation."""

    uid: str
    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is to be configured on a node. `source` says where it comes from, '' where nothing configures seats; `spec`
    is what is written there, for `seats.configured`. `profile`: the GPUSeatProfile, None for a file's; `overruled`:
    those that select the node too and come second. `problem`: why this is not what the source says now, a sentence.
    """

    source: str = ""
    spec: Any = None
    profile: Named | None = None
    overruled: tuple[Named, ...] = ()
    problem: str = ""


def seat_profile_view(raw: Mapping[str, Any]) -> SeatProfileView:
    """A GPUSeatProfile as the API server has it; raises where it lacks what every object has."""
    meta, spec = raw["metadata"], raw.get("spec")
    selector = spec.get("nodeSelector") if isinstance(spec, Mapping) else None
    absent = isinstance(spec, Mapping) and selector is None
    readable = isinstance(selector, Mapping) and all(
        isinstance(each, str) for pair in selector.items() for each in pair
    )
    return SeatProfileView(
        uid=str(meta["uid"]),
        name=str(meta["name"]),
        generation=int(meta.get("generation") or 0),
        created=str(meta.get("creationTimestamp") or ""),
        selector={} if absent else dict(selector) if readable and selector is not None else None,
        spec=spec,
    )


def chosen(profiles: Iterable[SeatProfileView], labels: Mapping[str, str]) -> Configuration:
    """The oldest that selects a node with these labels, by name where two are of one second. It stays the node's also
    where its spec is bad: what the node accepted before stays then, instead of another's groups.
    """
    selecting = sorted(
        (each for each in profiles if each.selector is not None and each.selector.items() <= labels.items()),
        key=lambda each: (each.created, each.name),
    )
    if not selecting:
        return Configuration()
    first, *others = selecting
    return Configuration(f"{KIND} {first.name}", first.spec, _named(first), tuple(map(_named, others)))


def document_of(document: object) -> tuple[Any, str]:
    """The spec in a file's document, which is the resource itself; or None and a sentence. Its nodeSelector selects
    nothing: a file is for the node that reads it.
    """
    if not isinstance(document, Mapping):
        return None, f"It must be one document with apiVersion {API_VERSION} and kind {KIND}"
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(key) != wanted:
            return None, f"Its {key} must be {wanted}, not {document.get(key)!r:.80}"
    if not isinstance(document.get("spec"), Mapping):
        return None, "It has no spec"
    return document["spec"], ""


def _named(view: SeatProfileView) -> Named:
    return Named(view.uid, view.name, view.generation)
