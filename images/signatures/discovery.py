"""Finds the signatures that lie beside an image: bundles that refer to it, and layers behind its .sig tag.

Whoever may push to the repository can put any number of false ones there, so a bounded number is looked at and nobody
can choose which: those that were good before come first, then each of the two places has half of the rest, drawn by
lot anew every time. A flood can delay the first verification of an image, never undo one, and what was left out is
told.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from images.descriptor import OCI_CONFIG
from images.reference import is_digest
from images.signatures import limits
from images.signatures.documents import BadSignature, member, read_json, shown
from images.signatures.envelopes import (
    BUNDLE_TYPE,
    BUNDLE_TYPES,
    PREDICATE,
    SIGNATURE_KEY,
    SIMPLE_TYPE,
    Candidate,
    Form,
)

PREDICATE_KEY = "dev.sigstore.bundle.predicateType"

# What registries that know no artifactType list instead: the type of a manifest's configuration.
_TELLS_NOTHING = ("", "application/vnd.oci.empty.v1+json", OCI_CONFIG)


@dataclass(frozen=True)
class Referrer:
    """A manifest that says it belongs to the image, as the registry lists it."""

    digest: str
    size: int
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


class Unreadable(Exception):
    """What lies there is not what its name or its descriptor says; the sentence is a clause for people."""


class Repository(Protocol):
    """What is needed of the registry: one repository of it. All its errors but Unreadable pass through."""

    async def manifest(self, reference: str) -> bytes | None:
        """A manifest by tag or digest, of at most 4 MiB; None where there is none. Raises Unreadable."""

    async def blob(self, digest: str, size: int) -> bytes:
        """A blob whose digest and size were checked. Raises Unreadable where it is missing or another."""

    async def referrers(self, digest: str) -> Sequence[Referrer]:
        """What refers to a manifest, by the API or by the fallback tag."""


@dataclass(frozen=True)
class Found:
    """What will be looked at, and how many more there are."""

    candidates: tuple[Candidate, ...] = ()
    more: int = 0


@dataclass(frozen=True)
class _Spot:
    """Where a signature may be: a listed manifest, or a layer behind the tag. `place` names its content."""

    place: str
    listed: Referrer | None = None
    layer: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def sig_tag(digest: str) -> str:
    """The tag behind which cosign before 3.0 keeps an image's signatures."""
    return digest.replace(":", "-") + ".sig"


async def discover(repository: Repository, digest: str, good: Sequence[str], seed: int) -> Found:
    """The candidates for an image. `good`: the places of those that were good before; `seed` draws the lot."""
    layers = await _layers(repository, digest)
    listed = [each for each in await repository.referrers(digest) if _may_be_signature(each)]
    bundles = [
        _Spot(f"bundle {shown(each.digest, 80)}", each) for each in {each.digest: each for each in listed}.values()
    ]
    chosen = _choose(layers, bundles, good, random.Random(seed))
    read = await asyncio.gather(*(_read(repository, spot) for spot in chosen))
    found = tuple(candidate for candidate in read if candidate is not None)
    return Found(found, len(layers) + len(bundles) - len(chosen))


def _may_be_signature(referrer: Referrer) -> bool:
    """What says of itself that it is something else is none; what says nothing may be one."""
    if referrer.artifact_type not in (*BUNDLE_TYPES, *_TELLS_NOTHING):
        return False
    return referrer.annotations.get(PREDICATE_KEY, PREDICATE) == PREDICATE


def _choose(layers: list[_Spot], bundles: list[_Spot], good: Sequence[str], lot: random.Random) -> list[_Spot]:
    for spots in (layers, bundles):
        lot.shuffle(spots)
        spots.sort(key=lambda spot: spot.place not in good)
    of_layers = max(limits.CANDIDATES // 2, limits.CANDIDATES - len(bundles))
    chosen = layers[:of_layers]
    return chosen + bundles[: limits.CANDIDATES - len(chosen)]


async def _layers(repository: Repository, digest: str) -> list[_Spot]:
    tag = sig_tag(digest)
    try:
        raw = await repository.manifest(tag)
        layers = [] if raw is None else read_json(raw, limits.MANIFEST, "its manifest").get("layers")
    except (BadSignature, Unreadable) as wrong:
        return [_Spot(f"tag {tag}", problem=str(wrong))]
    found = [each for each in layers if isinstance(each, Mapping)] if isinstance(layers, list) else []
    return [_Spot(_place(each), layer=each) for each in found if each.get("mediaType") == SIMPLE_TYPE]


def _place(layer: Mapping[str, Any]) -> str:
    """All layers of an image are over the same bytes, so what names one is the signature in its annotation."""
    signature = repr(member(layer, "annotations", SIGNATURE_KEY)).encode()
    return f"signature sha256:{hashlib.sha256(signature).hexdigest()}"


async def _read(repository: Repository, spot: _Spot) -> Candidate | None:
    """None where it turns out to be something else, or is gone."""
    form: Form = "bundle" if spot.listed is not None else "simple"
    try:
        if spot.problem:
            raise BadSignature(spot.problem)
        if spot.listed is None:
            content = await _blob(repository, spot.layer, limits.PAYLOAD)
            return Candidate(spot.place, "simple", content, _texts(member(spot.layer, "annotations")))
        layer = await _bundle_layer(repository, spot.listed)
        if layer is None:
            return None
        return Candidate(spot.place, "bundle", await _blob(repository, layer, limits.BUNDLE))
    except (BadSignature, Unreadable) as wrong:
        return Candidate(spot.place, form, problem=str(wrong))


async def _bundle_layer(repository: Repository, listed: Referrer) -> Mapping[str, Any] | None:
    if not is_digest(listed.digest):
        raise BadSignature("is listed with something that is no digest")
    raw = await repository.manifest(listed.digest)
    if raw is None:
        return None
    document = read_json(raw, limits.MANIFEST, "its manifest")
    layers = document.get("layers")
    kinds = [member(layer, "mediaType") for layer in layers] if isinstance(layers, list) else []
    if not any(kind in BUNDLE_TYPES for kind in (document.get("artifactType"), *kinds)):
        return None
    if member(document, "annotations", PREDICATE_KEY) not in (None, PREDICATE):
        return None
    if not isinstance(layers, list) or len(layers) != 1 or kinds[0] not in BUNDLE_TYPES:
        raise BadSignature(f"must have exactly one layer, of type {BUNDLE_TYPE}")
    layer: Mapping[str, Any] = layers[0]
    return layer


def _texts(value: Any) -> dict[str, str]:
    return {key: each for key, each in value.items() if isinstance(each, str)} if isinstance(value, Mapping) else {}


async def _blob(repository: Repository, descriptor: Mapping[str, Any], limit: int) -> bytes:
    digest, size = descriptor.get("digest"), descriptor.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise BadSignature("refers to something that is no digest")
    if not isinstance(size, int) or not 0 < size <= limit:
        raise BadSignature(f"has {shown(size)} bytes, and at most {limit} are read")
    return await repository.blob(digest, size)
