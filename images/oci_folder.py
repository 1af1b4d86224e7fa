"""An image in a folder, laid out as the OCI image layout specification has it: from a registry, and to one.

For `berth cache push` and `pull`, and for whoever carries images over an air gap. A folder is somebody else's too: what
is pushed has the digest by which its manifest names it, or it is not pushed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from images.descriptor import OCI_INDEX, Descriptor, Malformed, Manifest
from images.errors import RegistryError
from images.folder import BLOBS, INDEX, MARK, REF_NAME, VERSION, blob_path, called
from images.reference import Reference
from images.registry import Registry, side_by_side
from planning.caches.limits import LAYER_BYTES, MANIFEST_BYTES


class FolderError(ValueError):
    """A folder cannot be used; the message says which file and why."""


async def pull(registry: Registry, reference: Reference, folder: Path) -> Descriptor:
    """An image, or an index with all its images, into a layout, beside what is there. What was fetched before is not
    fetched again, and what was cut off is gone on with; where nothing came nothing is left. Raises RegistryError,
    FolderError and OSError."""
    index = _there(folder)
    top = await registry.manifest(reference)
    manifests = await _whole(registry, reference, top)
    wanted = _blobs(manifests, str(reference))
    with _leaving_nothing(folder, MARK):
        _begin(folder)
        files = [(each, blob_path(folder, each.digest)) for each in wanted]
        present = [await asyncio.to_thread(_is, path, each) for each, path in files]
        await registry.blobs(reference, [each for each, there in zip(files, present, strict=True) if not there])
    for manifest in manifests:
        _write(blob_path(folder, manifest.descriptor.digest), manifest.data)
    entry = top.descriptor.as_json()
    if reference.tag:
        entry["annotations"] = {REF_NAME: reference.tag}
    kept = [each for each in index if each.digest != entry["digest"] and not _is_named(each, reference.tag)]
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [*(each.as_json() for each in kept), entry],
    }
    _write(folder / INDEX, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return top.descriptor


async def pull_plain(registry: Registry, reference: Reference, folder: Path) -> Descriptor:
    """One image as plain files: manifest.json, config.json, layer-0.tar.gz and so on. All of it or nothing, for such a
    folder is not gone on with. Raises as `pull`."""
    _must_be_empty(folder)
    top = await registry.manifest(reference)
    if top.is_index:
        offered = ", ".join(each.digest for each in _said(top, str(reference)))
        raise RegistryError(
            "malformed", str(reference), f"it is an index of several images ({offered})",
            "Pull one of them by its digest, or all of them as a layout (without --plain).",
        )  # fmt: skip
    config, *layers = _blobs([top], str(reference))
    names = ["config.json", *(f"layer-{number}{_suffix(layer)}" for number, layer in enumerate(layers))]
    with _leaving_nothing(folder, *names, *(f"{name}.part" for name in names)):
        files = zip((config, *layers), (folder / name for name in names), strict=True)
        await registry.blobs(reference, list(files))
        _write(folder / "manifest.json", top.data)
    return top.descriptor


async def push(registry: Registry, folder: Path, reference: Reference) -> Descriptor:
    """The image of a layout under a reference, blobs before the manifests that name them. Raises as `pull`."""
    if not (folder / MARK).is_file():
        raise FolderError(f"{folder} is no OCI image layout: it has no file {MARK}")
    top = _read(folder, _chosen(folder, reference))
    manifests = [_read(folder, each) for each in _said(top, str(folder))] if top.is_index else []

    async def send(blob: Descriptor) -> None:
        path = blob_path(folder, blob.digest)
        if not await asyncio.to_thread(_is, path, blob):
            raise FolderError(f"{path} is missing, or not what the manifest says: {blob.size} bytes of that digest")
        await registry.push_blob(reference, blob, path)

    await side_by_side(_blobs([*manifests, top], str(folder)), send)
    for each in manifests:
        own = Reference(reference.registry, reference.repository, digest=each.descriptor.digest)
        await registry.push_manifest(own, each.data, each.descriptor.media_type)
    return await registry.push_manifest(reference, top.data, top.descriptor.media_type)


async def _whole(registry: Registry, reference: Reference, top: Manifest) -> list[Manifest]:
    """The manifest, and of an index those of its images."""
    found = [top]
    for each in _said(top, str(reference)) if top.is_index else ():
        manifest = await registry.manifest(reference.at(each.digest))
        if manifest.is_index:
            raise RegistryError("malformed", str(reference), f"it is an index of indexes ({each.digest})")
        found.append(manifest)
    return found


def _said(index: Manifest, what: str) -> tuple[Descriptor, ...]:
    try:
        return index.images()
    except Malformed as error:
        raise RegistryError("malformed", what, str(error)) from None


def _blobs(manifests: Iterable[Manifest], what: str) -> list[Descriptor]:
    """Of all images: config and layers, each once."""
    found: dict[str, Descriptor] = {}
    for manifest in manifests:
        if manifest.is_index:
            continue
        try:
            for each in (manifest.config(), *manifest.layers()):
                found.setdefault(each.digest, each)
        except Malformed as error:
            raise RegistryError("malformed", what, str(error)) from None
    return list(found.values())


def _must_be_empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise FolderError(f"{folder} is not empty")


def _there(folder: Path) -> tuple[Descriptor, ...]:
    """What a layout holds; nothing where there is none yet, but room for it."""
    if folder.exists() and not (folder / MARK).is_file() and any(folder.iterdir()):
        raise FolderError(f"{folder} is neither empty nor an OCI image layout")
    return _entries(folder) if (folder / INDEX).is_file() else ()


def _begin(folder: Path) -> None:
    """Makes a layout of the folder if it is none."""
    (folder / BLOBS).mkdir(parents=True, exist_ok=True)
    if not (folder / MARK).is_file():
        _write(folder / MARK, orjson.dumps({"imageLayoutVersion": VERSION}))


@contextmanager
def _leaving_nothing(folder: Path, *files: str) -> Iterator[None]:
    """Makes the folder. Where what is done within fails: takes away those of these files in the folder that were not
    there before, and the folders that were made for it; but all of them stay if blobs of a layout have come, to be gone
    on with.
    """
    blobs = folder / BLOBS
    ways = (blobs, blobs.parent, folder, *folder.parents)
    made = [each for each in (*(folder / name for name in files), *ways) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for begun in blobs.glob("*.part") if blobs in made else ():
            if not begun.stat().st_size:
                begun.unlink()
        if not (blobs.is_dir() and any(blobs.iterdir())):
            for each in made:
                with suppress(OSError):  # another put something there meanwhile, or it was never made
                    each.rmdir() if each in ways else each.unlink()
        raise


def _entries(folder: Path) -> tuple[Descriptor, ...]:
    try:
        return Manifest.read(_bounded(folder / INDEX, MANIFEST_BYTES), "", OCI_INDEX).images()
    except Malformed as error:
        raise FolderError(f"{folder / INDEX}: {error}") from None


def _chosen(folder: Path, reference: Reference) -> Descriptor:
    """The layout's only image, or the one that it calls by the reference's tag or digest."""
    entries = _entries(folder)
    named = [each for each in entries if each.digest == reference.digest or _is_named(each, reference.tag)]
    if len(named) == 1 or len(entries) == 1:
        return (named or list(entries))[0]
    names = ", ".join(called(each) for each in entries) or "nothing"
    raise FolderError(f"{folder / INDEX} holds {names[:500]}: none of them is {reference.target}, so say which")


def _is_named(entry: Descriptor, tag: str) -> bool:
    return bool(tag) and entry.annotations.get(REF_NAME) == tag


def _read(folder: Path, entry: Descriptor) -> Manifest:
    path = blob_path(folder, entry.digest)
    data = _bounded(path, MANIFEST_BYTES)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != entry.digest:
        raise FolderError(f"{path} has another digest")
    try:
        return Manifest.read(data, entry.digest, entry.media_type)
    except Malformed as error:
        raise FolderError(f"{path}: {error}") from None


def _bounded(path: Path, at_most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(at_most + 1)
    except FileNotFoundError:
        raise FolderError(f"{path} is missing") from None
    if len(data) > at_most:
        raise FolderError(f"{path} is longer than {at_most} bytes")
    return data


def _is(path: Path, blob: Descriptor) -> bool:
    """Whether a file is this blob. Blocks."""
    if not path.is_file() or path.stat().st_size != blob.size or blob.size > LAYER_BYTES:
        return False
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == blob.digest


def _suffix(layer: Descriptor) -> str:
    return ".tar.gz" if layer.media_type.endswith(("gzip", "gzip+tar")) else ""


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(data)
    os.replace(beside, path)
