"""Shows cache images that were built or looked into, as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from images.build import Built
from images.inspection import Inspected
from planning.caches import labels
from planning.caches.compatibility import Target
from planning.caches.hits import build_key_digest

Rows = list[tuple[str, str]]


def built_as_json(built: Built) -> dict[str, Any]:
    """What was built."""
    return {
        "digest": built.top.digest,
        "mediaType": built.top.media_type,
        "kind": built.contents.kind,
        "capturePath": built.contents.capture_path,
        "images": [
            {
                "digest": each.blob.digest,
                "targets": [_target(one) for one in each.targets],
                "entries": each.entries,
                "sizeBytes": each.size,
            }
            for each in built.images
        ],
        "warnings": list(built.contents.warnings),
    }


def show_built(built: Built, out: Path, console: Console) -> None:
    """The images with their digests, what a hit depends on, and what could not be told."""
    said = built.contents.said
    table: Rows = []
    for each in built.images:
        table.append(("image", each.blob.digest))
        table.append(("", f"{_targets(each.targets)}; {each.entries} entries, {_size(each.size)}"))
    if built.top.digest != built.images[0].blob.digest:
        table.append(("index", built.top.digest))
    _depends(table, said.triton_version, said.triton_key, said.ptxas, said.environment, built.contents.capture_path)
    _print(table, console)
    _warn(built.contents.warnings, console)
    console.print(f"It is in {escape(str(out))}.")


def inspected_as_json(found: Inspected) -> dict[str, Any]:
    """What an image says and holds."""
    packed, extracted = found.image.packed, found.extracted
    return {
        "digest": found.digest,
        "layout": f"{found.image.kind}, {found.image.variant}",
        "indexTarget": None if found.target is None else _target(found.target),
        "targets": [_target(each) for each in packed.targets],
        "compressedBytes": sum(each.size for each in found.image.layers),
        "triton": {"version": packed.triton_version, "key": packed.triton_key},
        "ptxas": packed.ptxas,
        "environment": None if packed.environment is None else dict(packed.environment),
        "capturePath": packed.capture_path,
        "refused": found.refused or None,
        "warnings": list(found.warnings),
        "extracted": None
        if extracted is None
        else {
            "files": extracted.files,
            "bytes": extracted.bytes,
            "kernels": extracted.kernels,
            "targets": [_target(each) for each in extracted.targets],
            "tritonVersion": extracted.triton_version,
            "capturePath": extracted.capture_path,
        },
    }


def show_inspected(found: Sequence[Inspected], console: Console) -> None:
    """A table for each image."""
    for each in found:
        packed, extracted = each.image.packed, each.extracted
        table: Rows = []
        table.append(("image", each.digest))
        table.append(("layout", f"{each.image.kind}, {each.image.variant}"))
        if each.image.kind == "vllm":
            table.append(("format", escape(each.image.labels.get(labels.VLLM_FORMAT, "not said")[:64])))
        if each.target is not None:
            table.append(("in the index for", _targets((each.target,))))
        table.append(("targets", _targets(packed.targets)))
        sizes = _size(sum(layer.size for layer in each.image.layers))
        if extracted is not None:
            sizes = f"{_size(extracted.bytes)} in {extracted.files:,} files, {sizes} compressed"
            table.append(("kernels", f"{extracted.kernels:,}"))
        table.append(("size", sizes))
        _depends(table, packed.triton_version, packed.triton_key, packed.ptxas, packed.environment, packed.capture_path)
        _print(table, console)
        _warn(each.warnings, console)
        if each.refused:
            console.print(f"[bold red]a node refuses it:[/] {escape(each.refused)}", soft_wrap=True)


def _depends(
    table: Rows,
    version: str | None,
    key: str | None,
    ptxas: str | None,
    environment: Mapping[str, str] | None,
    path: str | None,
) -> None:
    """What a hit depends on, beside the GPU."""
    build = f", build key {build_key_digest(key)}" if key is not None else ""
    table.append(("triton", escape(f"{version or 'not said'}{build}")))
    table.append(("ptxas", escape((ptxas or "not said").strip().replace("\n", " "))))
    told = (
        "not said" if environment is None else " ".join(f"{name}={environment[name]}" for name in sorted(environment))
    )
    table.append(("environment", escape(told or "none set")))
    table.append(("compiled at", escape(path or "not said")))


def _print(rows: Rows, console: Console) -> None:
    """Lines that are not broken, so that digests can be copied."""
    for name, value in rows:
        console.print(f"[cyan]{name:<12}[/] {value}", soft_wrap=True)


def _warn(warnings: Iterable[str], console: Console) -> None:
    for each in warnings:
        console.print(f"[yellow]note:[/] {escape(each)}", soft_wrap=True)


def _targets(targets: Sequence[Target]) -> str:
    return "; ".join(map(str, targets)) or "not said"


def _target(target: Target) -> dict[str, Any]:
    return {"backend": target.backend, "arch": target.arch, "warp_size": target.warp_size}


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
