"""Which image of an order a node takes, what is remembered of it beside its content, and its layers as files. For
`preparing.py`; what is fetched lies below one folder for as long as it takes, and is gone on with after a crash.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from images import layout
from images.descriptor import Descriptor
from images.extraction import Extracted
from images.reference import Reference
from images.refused import Refused
from images.registry import Registry
from nodeworkers import metrics
from nodeworkers.caches.stopped import Stopped
from nodeworkers.store import Cached
from planning.caches import labels, limits
from planning.caches.compatibility import GPU, Target, Variant, choose

_LEFT = 24 * 3600.0  # seconds after which nobody goes on with what was fetched of an image


@dataclass(frozen=True, slots=True)
class Chosen:
    """The image that a node takes. Of an index: its `variants`, and what the index says that this one is for."""

    digest: str
    image: layout.CacheImage
    variants: tuple[Variant, ...] = ()
    target: Target | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        """What the image says that its kernels are for, or its index where the image says nothing."""
        return self.image.packed.targets or ((self.target,) if self.target is not None else ())


@dataclass(frozen=True, slots=True)
class About:
    """What is told of a cache in the store. `goal`: the digest by which it was ordered, of whose `variants` it is one;
    `targets` and the rest are what was found in it, or said where nothing could be found.
    """

    goal: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    capture_path: str | None = None
    groups: int | None = None
    kernels: int | None = None
    warnings: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()

    @classmethod
    def of(cls, cached: Cached) -> About:
        """As far as it can be read."""
        try:
            return _about.validate_python(dict(cached.about))
        except ValidationError:
            return cls()

    @classmethod
    def made(cls, goal: str, chosen: Chosen, extracted: Extracted, warnings: Sequence[str]) -> About:
        packed = chosen.image.packed
        return cls(
            goal=goal,
            labels=_kept(chosen.image.labels),
            targets=extracted.targets or chosen.targets,
            capture_path=extracted.capture_path or packed.capture_path,
            groups=extracted.groups,
            kernels=extracted.kernels,
            warnings=tuple(warnings),
            variants=chosen.variants,
        )

    def told(self) -> dict[str, object]:
        """As the store keeps it."""
        raw: dict[str, object] = _about.dump_python(self, mode="json")
        return raw


_about: TypeAdapter[About] = TypeAdapter(About)


def _kept(told: Mapping[str, str]) -> dict[str, str]:
    """The labels that berth reads, for images may have megabytes of others."""
    known = {labels.VLLM_FORMAT, labels.TITLE}
    for kind in labels.KINDS:
        known |= {labels.entry_count(kind), labels.summary(kind), labels.size_bytes(kind)}
    return {
        name: value
        for name, value in told.items()
        if (name in known or name.startswith(f"{labels.OURS}/")) and len(value) <= limits.SUMMARY_BYTES
    }


async def chosen_image(
    registry: Registry, reference: Reference, goal: str, gpus: Sequence[GPU], machine: str
) -> Chosen:
    """Reads the image, or that image of the index, which `goal` stands for on a node with these GPUs. Raises
    RegistryError, Refused, or Stopped where the index has none for them.
    """
    body = (await registry.manifest(reference.at(goal))).data
    digest = goal
    variants: tuple[Variant, ...] = ()
    target: Target | None = None
    if layout.is_index(body):
        variants = layout.read_index(body)
        if variants:
            digest, target = pick(variants, gpus)
        else:
            digest = _for_the_cpu(body, machine)
        body = (await registry.manifest(reference.at(digest))).data
    manifest = layout.read_manifest(body)
    config = Descriptor(manifest.config.media_type, manifest.config.digest, manifest.config.size)
    return Chosen(digest, layout.read_image(manifest, await registry.small(reference, config)), variants, target)


def pick(variants: Sequence[Variant], gpus: Sequence[GPU]) -> tuple[str, Target]:
    """The digest and target of the variant for these GPUs. Raises Stopped where there is none."""
    variant, why = choose(variants, gpus)
    if variant is None:
        raise Stopped("incompatible", "Incompatible", why)
    return variant.digest, variant.target


def _for_the_cpu(body: bytes, machine: str) -> str:
    plain = layout.image_for(body, machine)
    if plain is None:
        raise Refused("Unsupported", f"The index names neither a GPU nor an image for {machine}.")
    return plain.digest


class Incoming:
    """Where layers lie while an image is fetched. One caller at a time for each digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sweep(self, under_way: Collection[str] = ()) -> int:
        """Removes what nobody has gone on with for a day, but for images `under_way` (digests); how much that was.
        Blocks.
        """
        kept, old = {self._of(digest) for digest in under_way}, time.time() - _LEFT
        left = [place for place in self._folder.iterdir() if place not in kept and place.stat().st_mtime < old]
        for place in left:
            self._remove(place)
        return len(left)

    async def fetch(self, registry: Registry, reference: Reference, chosen: Chosen) -> list[Path]:
        """The layers, in their order. Raises RegistryError, and OSError where the disk does not take them."""
        folder = self._of(chosen.digest)
        folder.mkdir(exist_ok=True)
        os.utime(folder)  # it is gone on with
        places = [folder / layer.digest.removeprefix("sha256:") for layer in chosen.image.layers]
        # A file is there only once its digest was right; what came of one is beside it as .part.
        wanted = {
            place: Descriptor(layer.media_type, layer.digest, layer.size)
            for layer, place in zip(chosen.image.layers, places, strict=True)
            if not place.exists()
        }
        before = self.there(chosen.digest)
        try:
            await registry.blobs(reference, [(blob, place) for place, blob in wanted.items()])
        finally:
            # Less than before: what had come of a layer was not what its digest says, and is gone.
            metrics.pulled(max(0, self.there(chosen.digest) - before))
        return places

    def there(self, digest: str) -> int:
        """Bytes that have come of an image."""
        total = 0
        with suppress(OSError):
            for place in self._of(digest).iterdir():
                with suppress(OSError):
                    total += place.stat().st_size
        return total

    async def discard(self, digest: str) -> None:
        """Removes what was fetched of an image."""
        await asyncio.to_thread(self._remove, self._of(digest))

    def _of(self, digest: str) -> Path:
        return self._folder / digest.removeprefix("sha256:")

    def _remove(self, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
