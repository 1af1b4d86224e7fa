"""The two layouts of cache images, and indexes with an image for each GPU: what a manifest and a config say, checked.

compat is an ordinary image whose layers hold `io.triton.cache/` or `io.vllm.cache/` and whose config has the labels;
the older artifact layout is one layer of a media type of its own. Which manifest media type it came with does not
matter, and nobody's platform field says anything of GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from images.descriptor import DOCKER_LAYER, MANIFESTS, OCI_LAYER, Descriptor
from images.reference import is_digest
from images.refused import Refused, shown
from planning.caches import labels, limits
from planning.caches.compatibility import Variant, target_of
from planning.caches.labels import Kind, Packed, parse_json

LAYERS = (OCI_LAYER, DOCKER_LAYER)

_ARTIFACT = re.compile(r"application/cache\.(triton|vllm)\.content\.layer\.v1\+(triton|vllm)")


def cache_folder(kind: Kind) -> str:
    """The folder in the layer whose content is mounted."""
    return f"io.{kind}.cache"


def manifest_folder(kind: Kind) -> str:
    """The folder in the layer with manifest.json, which only informs."""
    return f"io.{kind}.manifest"


@dataclass(frozen=True, slots=True)
class CacheManifest:
    """What a manifest names: `artifact` is the kind that its only layer's media type tells, if it is the old layout."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    artifact: Kind | None

    @property
    def size(self) -> int:
        """Compressed bytes of all layers."""
        return sum(each.size for each in self.layers)


@dataclass(frozen=True, slots=True)
class CacheImage:
    """A cache image as far as its manifest and config tell it."""

    variant: Literal["compat", "artifact"]
    kind: Kind
    layers: tuple[Descriptor, ...]
    packed: Packed
    labels: Mapping[str, str]


def read_manifest(body: bytes) -> CacheManifest:
    """Reads an image's manifest; Refused for anything that is none, or whose layers berth does not mount."""
    raw = _object(body, limits.MANIFEST_BYTES, "the manifest")
    if isinstance(raw.get("manifests"), list):
        raise Refused("Unsupported", "The manifest is an index, where one of its images was expected.")
    config = _descriptor(raw.get("config"), "the manifest's config")
    if config.size > limits.CONFIG_BYTES:
        raise Refused("TooLarge", f"The config has {config.size:,} bytes, more than {limits.CONFIG_BYTES:,}.")
    listed = raw.get("layers")
    if not isinstance(listed, list) or not listed:
        raise Refused("Malformed", "The manifest names no layers.")
    if len(listed) > limits.LAYERS:
        raise Refused("TooLarge", f"The manifest names {len(listed)} layers, more than {limits.LAYERS}.")
    layers = tuple(_descriptor(each, f"layer {number}") for number, each in enumerate(listed))
    for number, layer in enumerate(layers):
        if layer.size == 0:
            raise Refused("Malformed", f"Layer {number} has 0 bytes.")
        if layer.size > limits.LAYER_BYTES:
            most = limits.LAYER_BYTES // limits.GIB
            raise Refused("TooLarge", f"Layer {number} has {layer.size:,} bytes, more than {most} GiB.")
    special = [_ARTIFACT.fullmatch(layer.media_type) for layer in layers]
    first = special[0]
    if len(layers) == 1 and first is not None and first[1] == first[2]:
        return CacheManifest(config, layers, "triton" if first[1] == "triton" else "vllm")
    for number, layer in enumerate(layers):
        if layer.media_type not in LAYERS:
            told = f"Layer {number} is of media type {shown(layer.media_type)}; a cache image has {LAYERS[0]}"
            raise Refused("Unsupported", f"{told}, or one layer application/cache.<kind>.content.layer.v1+<kind>.")
    return CacheManifest(config, layers, None)


def read_image(manifest: CacheManifest, config: bytes) -> CacheImage:
    """What the config adds to a manifest; Refused if nothing says that it is a cache."""
    told = _labels(config, required=manifest.artifact is None)
    packed = labels.read(told)
    kind = packed.kind or manifest.artifact
    if kind is None:
        few = f"{labels.summary('triton')} or {labels.summary('vllm')}"
        raise Refused("Unsupported", f"The image has no label {few}, so that it is no kernel cache.")
    if manifest.artifact not in (None, kind):
        raise Refused("Inconsistent", f"The layer says {manifest.artifact}, the labels say {kind}.")
    return CacheImage("artifact" if manifest.artifact else "compat", kind, manifest.layers, packed, told)


def is_index(body: bytes) -> bool:
    """Whether a manifest is an index of images."""
    return isinstance(_object(body, limits.MANIFEST_BYTES, "the manifest").get("manifests"), list)


def read_index(body: bytes) -> tuple[Variant, ...]:
    """The images of an index that say for which GPU they are; others (attestations, plain images) do not count."""
    listed = _object(body, limits.MANIFEST_BYTES, "the index").get("manifests")
    if not isinstance(listed, list):
        raise Refused("Malformed", "The index has no list of manifests.")
    if len(listed) > limits.INDEX_ENTRIES:
        raise Refused("TooLarge", f"The index names {len(listed)} images, more than {limits.INDEX_ENTRIES}.")
    found: list[Variant] = []
    for number, raw in enumerate(listed):
        told = raw.get("annotations") if isinstance(raw, Mapping) else None
        if not isinstance(told, Mapping) or labels.TARGET not in told:
            continue
        where = f"entry {number} of the index"
        named = _descriptor(raw, where)
        if named.media_type not in MANIFESTS:
            raise Refused("Unsupported", f"{where.capitalize()} is of media type {shown(named.media_type)}.")
        try:
            target = target_of(parse_json(told[labels.TARGET], limits.JSON_BYTES))
        except ValueError as wrong:
            raise Refused("Malformed", f"Annotation {labels.TARGET} of {where} {wrong}.") from None
        if target is None:
            raise Refused("Malformed", f"Annotation {labels.TARGET} of {where} names no GPU that berth knows.")
        found.append(Variant(named.digest, named.size, target))
    return tuple(found)


def platform(machine: str) -> Mapping[str, str]:
    """A builder's or a node's platform as images name it: a cache holds things for the CPU, too (launchers)."""
    return {"os": "linux", "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)}


def image_for(body: bytes, machine: str) -> Descriptor | None:
    """The first image for a node's CPU in an index that names no GPUs, as builders make them that attest their work."""
    wanted = platform(machine)
    listed = _object(body, limits.MANIFEST_BYTES, "the index").get("manifests")
    for number, raw in enumerate(listed if isinstance(listed, list) else ()):
        told = raw.get("platform") if isinstance(raw, Mapping) else None
        if isinstance(told, Mapping) and all(told.get(name) == value for name, value in wanted.items()):
            image = _descriptor(raw, f"entry {number} of the index")
            if image.media_type in MANIFESTS:
                return image
    return None


def _object(body: bytes, most: int, what: str) -> Mapping[str, object]:
    try:
        raw = parse_json(body, most)
    except ValueError as wrong:
        raise Refused("Malformed", f"{what.capitalize()} {wrong}.") from None
    if not isinstance(raw, dict):
        raise Refused("Malformed", f"{what.capitalize()} is no JSON object.")
    return raw


def _descriptor(raw: object, what: str) -> Descriptor:
    """Type, digest and size, which are all that counts here; the words go into a status, so they name the part."""
    entry = raw if isinstance(raw, Mapping) else {}
    media, digest, size = entry.get("mediaType"), entry.get("digest"), entry.get("size")
    if not isinstance(media, str) or not isinstance(digest, str) or not is_digest(digest):
        raise Refused("Malformed", f"{what.capitalize()} has no mediaType and digest (sha256).")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        raise Refused("Malformed", f"{what.capitalize()} has no size.")
    return Descriptor(media, digest, size)


def _labels(config: bytes, *, required: bool) -> Mapping[str, str]:
    """Labels of a config; an artifact's config may be anything, and then there are none."""
    try:
        raw = _object(config, limits.CONFIG_BYTES, "the config")
    except Refused:
        if required:
            raise
        return {}
    inner = raw.get("config")
    told = inner.get("Labels") if isinstance(inner, Mapping) else None
    if told is None:
        return {}
    if not isinstance(told, Mapping) or not all(isinstance(each, str) for each in told.values()):
        raise Refused("Malformed", "The config's Labels are no object of texts.")
    return {str(name): str(value) for name, value in told.items()}
