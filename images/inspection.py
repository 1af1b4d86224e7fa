"""Looks into the cache images of an OCI layout folder: what they say, what really lies in them, and what differs. For
`berth cache inspect`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from platform import machine

from images import layout
from images.extraction import Extracted, extract
from images.folder import Folder
from images.refused import Refused
from planning.caches import limits
from planning.caches.compatibility import Target, named


@dataclass(frozen=True, slots=True)
class Inspected:
    """One image: `target` as an index names it, `extracted` None where `refused` says why."""

    digest: str
    target: Target | None
    image: layout.CacheImage
    extracted: Extracted | None
    refused: str
    warnings: tuple[str, ...]


async def inspect(path: Path, wanted: str | None = None) -> tuple[Inspected, ...]:
    """The folder's only image, or the one it calls `wanted` (a tag or a digest); of an index all its images. Refused if
    it is no such folder, or a manifest or config in it is wrong."""
    folder = Folder(path)
    top = folder.top(wanted)
    body = folder.read(top.digest, limits.MANIFEST_BYTES, "manifest")
    if not layout.is_index(body):
        return (await _image(folder, top.digest, body, None),)
    listed: list[tuple[str, Target | None]] = [(each.digest, each.target) for each in layout.read_index(body)]
    if not listed:
        plain = layout.image_for(body, machine())
        if plain is None:
            raise Refused("Unsupported", f"The index in {path} names neither a GPU nor an image for {machine()}.")
        listed = [(plain.digest, None)]
    found = []
    for digest, target in listed:
        manifest = folder.read(digest, limits.MANIFEST_BYTES, "manifest")
        found.append(await _image(folder, digest, manifest, target))
    return tuple(found)


async def _image(folder: Folder, digest: str, body: bytes, target: Target | None) -> Inspected:
    manifest = layout.read_manifest(body)
    config = folder.read(manifest.config.digest, limits.CONFIG_BYTES, "config")
    image = layout.read_image(manifest, config)
    warnings = list(image.packed.problems)
    try:
        layers = [folder.check(each) for each in image.layers]
        with tempfile.TemporaryDirectory(prefix="berth-inspect-") as into:
            extracted = await extract(layers, image.kind, Path(into))
    except Refused as refused:
        return Inspected(digest, target, image, None, str(refused), tuple(warnings))
    return Inspected(digest, target, image, extracted, "", (*warnings, *differences(image, extracted, target)))


def differences(image: layout.CacheImage, extracted: Extracted, target: Target | None) -> list[str]:
    """Where an image does not hold what it, or the index that names it, says: sentences."""
    told, found = list(extracted.warnings), image.packed
    if extracted.warned > len(told):
        told.append(f"… and {extracted.warned - len(told)} more of these.")
    if extracted.targets and set(extracted.targets) != set(found.targets):
        said = named(sorted(found.targets)) if found.targets else "no GPU"
        told.append(f"Its labels say {said}, its kernels are for {named(extracted.targets)}.")
    if target is not None and extracted.targets and set(extracted.targets) != {target}:
        told.append(f"The index says {target}, its kernels are for {named(extracted.targets)}.")
    if found.capture_path is not None and extracted.capture_path not in (None, found.capture_path):
        told.append(f"Its labels say {found.capture_path}, its kernels were compiled at {extracted.capture_path}.")
    if image.kind == "triton" and found.entries not in (None, extracted.kernels):
        told.append(f"Its labels say {found.entries} kernels, {extracted.kernels} lie there.")
    return told
