"""Packs a cache folder into an OCI image, or into an index with one image for each GPU. For `berth cache build`.

Everything that the labels say is read from the folder, or was said by the person: never taken from the machine that
packs, which may have another GPU or none. The same folder gives the same digest: names sorted, times and owners zero.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from platform import machine
from typing import IO

from images import layout, triton, vllm
from images.descriptor import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, Descriptor
from images.folder import Folder, move_into
from images.refused import Refused, shown
from images.tree import File, files
from planning.caches import hits, labels
from planning.caches.compatibility import Target, named
from planning.caches.labels import Kind

EPOCH = "1970-01-01T00:00:00Z"
COMPRESSION = 6


@dataclass(frozen=True, slots=True)
class Said:
    """What a person says of a cache, for what it does not tell itself; where it does, both must agree."""

    kind: Kind | None = None
    targets: tuple[Target, ...] = ()
    triton_key: str | None = None
    triton_version: str | None = None
    ptxas: str | None = None
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """A cache folder, read: what goes into images and what their labels say."""

    kind: Kind
    files: Sequence[File]
    kernels: Sequence[triton.Kernel]
    parts: Sequence[vllm.Part]
    targets: tuple[Target, ...]
    said: Said
    capture_path: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """An image that was built."""

    blob: Descriptor
    targets: tuple[Target, ...]
    entries: int
    size: int


@dataclass(frozen=True, slots=True)
class Built:
    """What was built; `top` is the index if there is one, else the only image."""

    top: Descriptor
    images: tuple[Image, ...]
    contents: Contents


def read(folder: Path, said: Said) -> Contents:
    """Reads a cache folder; Refused if it holds none, or one that no node would take or no pod would hit."""
    found = files(folder)
    prefix = vllm.prefix_of(found, folder.resolve().name) if said.kind != "triton" else None
    kind: Kind = "triton" if prefix is None else "vllm"
    if said.kind not in (None, kind):
        raise Refused("Unsupported", f"{folder} holds no layout of vLLM's.")
    found = [replace(each, path=f"{prefix or ''}{each.path}") for each in found]
    cache = triton.read(found)
    cache.require()
    if kind == "triton" and not cache.kernels:
        raise Refused("Unsupported", f"{folder} holds no kernel that Triton compiled (<kernel>.json with its hash).")
    unknown = next((each for each in cache.kernels if each.target is None), None)
    if unknown is not None:
        told = shown(json.dumps(dict(unknown.raw_target)))
        raise Refused("Unsupported", f"Kernel {shown(unknown.name)} is for {told}, which berth does not know.")
    warnings = list(cache.warnings)
    paths = {**cache.capture_paths, **(vllm.capture_paths(found) if kind == "vllm" else {})}
    parts = vllm.read(found) if kind == "vllm" else []
    targets = cache.targets
    if kind == "vllm":
        targets = tuple(sorted({*targets, *vllm.bundled_targets(found)}))
    return Contents(
        kind=kind,
        files=found,
        kernels=cache.kernels,
        parts=parts,
        targets=_targets(folder, targets, said),
        said=_said(cache, found, said, warnings),
        capture_path=_capture_path(paths, warnings),
        warnings=tuple(warnings),
    )


def _targets(folder: Path, found: tuple[Target, ...], said: Said) -> tuple[Target, ...]:
    if not found and not said.targets:
        raise Refused("Unsupported", f"Nothing in {folder} tells for which GPU it is; say it with --target.")
    if found and said.targets and set(found) != set(said.targets):
        raise Refused("Inconsistent", f"The kernels are for {named(found)}, --target says {named(said.targets)}.")
    return found or tuple(sorted(set(said.targets)))


def _capture_path(paths: Mapping[str, str], warnings: list[str]) -> str | None:
    if len(paths) > 1:
        (one, first), (other, second) = list(paths.items())[:2]
        raise Refused(
            "Inconsistent",
            f"{shown(first)} was written at {shown(one)} and {shown(second)} at {shown(other)}: a cache that was moved "
            "misses at one of them. Compile it anew at one path, or pack the two apart.",
        )
    if not paths:
        warnings.append("Nothing tells at which path it was compiled, so that pods must be told where to mount it.")
        return None
    path = next(iter(paths))
    if not path.startswith("/"):
        raise Refused("Inconsistent", f"{shown(paths[path])} was written at {shown(path)}, which is no absolute path.")
    return path


def _said(cache: triton.TritonCache, found: Sequence[File], said: Said, warnings: list[str]) -> Said:
    """What the cache tells of its making, completed by what the person says."""
    versions, assemblers = sorted(cache.versions), sorted(triton.ptxas_versions(found))
    version = _one("Triton", versions, said.triton_version, "--triton-version", warnings)
    ptxas = said.ptxas
    if any(each.name.endswith(".cubin") for each in found):
        ptxas = _one("ptxas", assemblers, said.ptxas, "--ptxas-version", warnings)
    environment = cache.environment if cache.kernels else None
    if environment is not None and said.environment is not None and dict(environment) != dict(said.environment):
        raise Refused(
            "Inconsistent",
            f"The kernels were compiled with {shown(json.dumps(dict(environment)))}, --env says "
            f"{shown(json.dumps(dict(said.environment)))}.",
        )
    if environment is None:
        environment = said.environment
    if environment is None:
        warnings.append("Nothing tells which variables were set for the compiler, or kernels differ; see --env.")
    if said.triton_key and version and not said.triton_key.startswith(version):
        raise Refused("Inconsistent", f"The kernels are Triton {version}'s, --triton-key begins otherwise.")
    return replace(said, triton_version=version, ptxas=ptxas, environment=environment)


def _one(what: str, found: Sequence[str], said: str | None, option: str, warnings: list[str]) -> str | None:
    if len(found) > 1:
        warnings.append(f"Kernels of several versions of {what} lie there ({', '.join(found[:3])}): most will miss.")
        return said
    if found and said is not None and hits.ptxas_version(found[0]) != hits.ptxas_version(said):
        raise Refused("Inconsistent", f"The kernels are {what} {found[0]}'s, {option} says {said}.")
    if not found and said is None:
        warnings.append(f"Nothing tells which {what} it was compiled by; see {option}.")
    return said if said is not None else found[0] if found else None


def build(contents: Contents, out: Path, *, tag: str | None, index: bool) -> Built:
    """Writes an OCI layout folder with one image, or with an index of one image for each target."""
    if index and len(contents.targets) > 1 and contents.kind == "vllm":
        raise Refused("Unsupported", "A cache of vLLM's cannot be divided by GPU; pack each GPU's by itself.")
    folder = Folder.create(out)
    if not index:
        image = _image(folder, contents, contents.targets)
        folder.name(image.blob, tag)
        return Built(image.blob, (image,), contents)
    images = tuple(_image(folder, contents, (each,)) for each in contents.targets)
    entries = [
        {
            **replace(each.blob, annotations={labels.TARGET: target_json(each.targets[0])}).as_json(),
            "platform": layout.platform(machine()),
        }
        for each in images
    ]
    top = folder.add_json({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}, OCI_INDEX)
    folder.name(top, tag)
    return Built(top, images, contents)


def target_json(target: Target) -> str:
    """A target as an index's entry names it."""
    return json.dumps({"backend": target.backend, "arch": target.arch, "warp_size": target.warp_size})


def _image(folder: Folder, contents: Contents, targets: tuple[Target, ...]) -> Image:
    kernels = [each for each in contents.kernels if each.target in targets]
    others = {each.folder for each in contents.kernels} - {each.folder for each in kernels}
    chosen = [each for each in contents.files if each.folder not in others]
    size = sum(each.size for each in chosen)
    if contents.kind == "triton":
        listed: list[dict[str, object]] = [triton.entry(each) for each in kernels]
        entries = len(kernels)
    else:
        listed = vllm.manifest(contents.parts, kernels)
        entries = len({each.hash for each in contents.parts})
    told = json.dumps({contents.kind: listed}, indent=1).encode()
    layer, diff_id = _layer(folder, contents.kind, chosen, told)
    config = {
        **layout.platform(machine()),
        "created": EPOCH,
        "config": {"Labels": _labels(contents, targets, entries, size)},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": EPOCH, "created_by": "berth cache build"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": folder.add_json(config, OCI_CONFIG).as_json(),
        "layers": [layer.as_json()],
        "annotations": {f"cache.{contents.kind}.image/variant": "compat"},
    }
    return Image(folder.add_json(manifest, OCI_MANIFEST), targets, entries, size)


def _labels(contents: Contents, targets: Sequence[Target], entries: int, size: int) -> dict[str, str]:
    kind, said = contents.kind, contents.said
    told = {
        labels.TITLE: f"{'Triton' if kind == 'triton' else 'vLLM'} kernel cache",
        labels.entry_count(kind): str(entries),
        labels.size_bytes(kind): str(size),
        labels.summary(kind): json.dumps({"targets": _summary(contents, targets)}, separators=(",", ":")),
    }
    if kind == "vllm":
        told |= _for_kserve(contents)
    ours = {
        labels.TRITON_KEY: said.triton_key,
        labels.TRITON_VERSION: said.triton_version,
        labels.PTXAS_VERSION: said.ptxas,
        labels.ENVIRONMENT: None if said.environment is None else json.dumps(dict(said.environment), sort_keys=True),
        labels.CAPTURE_PATH: contents.capture_path,
    }
    return told | {name: value for name, value in ours.items() if value is not None}


def _summary(contents: Contents, targets: Sequence[Target]) -> list[dict[str, object]]:
    """Other tools expect `75` of Triton's caches and `sm_75` with the CUDA version of vLLM's binary ones."""
    binary = any(each.format != "triton" for each in contents.parts)
    versions = {each.environment.get("VLLM_MAIN_CUDA_VERSION") for each in contents.parts}
    cuda = versions.pop() if len(versions) == 1 else None
    rows: list[dict[str, object]] = []
    for each in targets:
        prefix = "sm_" if binary and each.backend == "cuda" else ""
        row: dict[str, object] = {"backend": each.backend, "arch": f"{prefix}{each.arch}", "warp_size": each.warp_size}
        rows.append({**row, "cuda_version": cuda} if isinstance(cuda, str) and prefix else row)
    return rows


def _for_kserve(contents: Contents) -> dict[str, str]:
    """Where KServe would mount it."""
    only_aot = all(each.path.startswith(f"{vllm.COMPILE}/{vllm.AOT}/") for each in contents.files)
    return {
        labels.VLLM_FORMAT: vllm.formats(contents.parts),
        f"{labels.KSERVE}/framework": "vllm",
        f"{labels.KSERVE}/cache-type": "torch-compile",
        f"{labels.KSERVE}/cache-hash": ",".join(sorted({each.hash for each in contents.parts})),
        f"{labels.KSERVE}/cache-mount-subpath": f"{vllm.COMPILE}/{vllm.AOT}" if only_aot else vllm.COMPILE,
        f"{labels.KSERVE}/cache-root-env": f"VLLM_CACHE_ROOT={contents.capture_path or '/home/kserve/.cache/vllm'}",
    }


class _Counted(io.RawIOBase):
    """Passes bytes on and hashes them."""

    def __init__(self, below: IO[bytes] | gzip.GzipFile) -> None:
        self.below = below
        self.hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        self.hash.update(data)
        self.size += len(data)
        self.below.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self.hash.hexdigest()}"


def _layer(folder: Folder, kind: Kind, chosen: Sequence[File], manifest: bytes) -> tuple[Descriptor, str]:
    """The layer as a blob, and the digest of the archive in it."""
    with tempfile.NamedTemporaryFile(dir=folder.path, delete=False) as file:
        try:
            packed = _Counted(file)
            with gzip.GzipFile("", "wb", COMPRESSION, packed, mtime=0) as zipped:
                archive = _Counted(zipped)
                with tarfile.open(fileobj=archive, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                    _pack(tar, kind, chosen, manifest)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            move_into(folder, Path(file.name), packed.digest)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return Descriptor(OCI_LAYER, packed.digest, packed.size), archive.digest


def _pack(tar: tarfile.TarFile, kind: Kind, chosen: Sequence[File], manifest: bytes) -> None:
    root = layout.cache_folder(kind)
    folders = {root, layout.manifest_folder(kind)}
    for each in chosen:
        parts = each.path.split("/")[:-1]
        folders |= {"/".join((root, *parts[: depth + 1])) for depth in range(len(parts))}
    members: list[tuple[str, File | bytes | None]] = [(each, None) for each in folders]
    members += [(f"{root}/{each.path}", each) for each in chosen]
    members.append((f"{layout.manifest_folder(kind)}/manifest.json", manifest))
    for name, content in sorted(members, key=lambda each: each[0]):
        info = tarfile.TarInfo(name)
        if content is None:
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        elif isinstance(content, bytes):
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
        else:
            info.size, info.mode = content.size, 0o644
            with open(os.open(content.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
                try:
                    tar.addfile(info, opened)
                except OSError as error:
                    raise Refused(
                        "Inconsistent", f"{shown(content.path)} changed while it was packed: {error}."
                    ) from None
