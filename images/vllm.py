"""What a folder of vLLM's holds: which of its layouts, for which GPUs, and where it was compiled. For building images
and for looking at extracted ones.

All lie below `torch_compile_cache/<hash>/rank_<rank>_<dp rank>/` (vllm/compilation/): `triton_cache` beside
`inductor_cache` (legacy), `<prefix>/artifact_compile_range_*` with `cache_key_factors.json` (binary, or unpacked where
an artifact is a folder), and below `torch_aot_compile/<hash>/` one file `model` (AOT, or mega with a shared
`inductor_cache`). No layout but the legacy one names a GPU: the kernels bundled into its files do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from images.refused import Refused, shown
from images.tree import File
from images.triton import Kernel, entry
from planning.caches import limits
from planning.caches.compatibility import Target, target
from planning.caches.labels import parse_json

Format = Literal["triton", "binary", "aot_compile"]
FORMATS: tuple[Format, ...] = ("aot_compile", "binary", "triton")  # in the order in which other tools list them

COMPILE = "torch_compile_cache"
AOT = "torch_aot_compile"
_RANK = re.compile(r"rank_[0-9]+_[0-9]+")
_ARTIFACT = "artifact_compile_range_"
_FACTORS = "cache_key_factors.json"
_TARGET = re.compile(
    rb'"target": \{"backend": "([A-Za-z0-9]{1,16})", "arch": ("[A-Za-z0-9_:+-]{1,64}"|[0-9]{1,4}), '
    rb'"warp_size": ([0-9]{1,4})\}'
)
_CHUNK = 8 * limits.MIB
_OVERLAP = 256  # bytes: more than the pattern above can match


@dataclass
class Part:
    """What one rank of one hash has: a prefix of it in the binary layout."""

    hash: str
    rank: str
    format: Format
    prefix: str = ""
    save_format: str = ""  # binary, unpacked or mega-aot
    artifacts: dict[str, int] = field(default_factory=dict)  # name → bytes
    factors: Mapping[str, object] = field(default_factory=dict)

    @property
    def environment(self) -> Mapping[str, object]:
        told = self.factors.get("env")
        return told if isinstance(told, Mapping) else {}

    @property
    def device(self) -> str:
        told = self.environment.get("VLLM_TARGET_DEVICE")
        return told if isinstance(told, str) else ""


def prefix_of(found: Sequence[File], name: str) -> str | None:
    """What to put before the paths of a folder called `name` so that they begin with `torch_compile_cache/`; None if no
    layout of vLLM's lies there.
    """
    tops = set()
    for file in found:
        parts = file.path.split("/")
        rank = next((at for at, part in enumerate(parts) if at and _RANK.fullmatch(part)), None)
        if rank is not None and _recognised(parts[rank + 1 :]):
            tops.add("/".join(parts[: rank - 1]))
    if not tops:
        return None
    if tops <= {COMPILE, f"{COMPILE}/{AOT}"}:
        return ""
    if AOT in tops and tops <= {"", AOT}:
        return f"{COMPILE}/"
    if tops == {""}:
        return f"{COMPILE}/{AOT}/" if name == AOT else f"{COMPILE}/"
    told = ", ".join(shown(each or ".") for each in sorted(tops)[:3])
    raise Refused("Unsupported", f"Caches of vLLM lie in {told}; give the folder that holds {COMPILE}.")


def _recognised(rest: Sequence[str]) -> bool:
    return "triton_cache" in rest[:2] or list(rest) == ["model"] or (len(rest) > 1 and rest[1].startswith(_ARTIFACT))


def read(found: Sequence[File]) -> list[Part]:
    """The parts of a cache whose paths begin with `torch_compile_cache/`, by hash, rank and prefix."""
    parts: dict[tuple[str, str, str], Part] = {}
    shared = {file.path.split("/")[2] for file in found if file.path.startswith(f"{COMPILE}/{AOT}/")
              and "/inductor_cache/" in f"/{file.path}"}  # fmt: skip
    factors: dict[tuple[str, str, str], File] = {}
    for file in found:
        path = file.path.split("/")
        rank = next((at for at, part in enumerate(path) if at and _RANK.fullmatch(part)), None)
        if rank is None:
            continue
        hash_, rest = path[rank - 1], path[rank + 1 :]
        if len(rest) == 2 and rest[1] == _FACTORS:
            factors[hash_, path[rank], rest[0]] = file
        if not _recognised(rest):
            continue
        if rest == ["model"]:
            mega = hash_ in shared or "inductor_cache" in shared
            part = Part(hash_, path[rank], "binary", "", "mega-aot") if mega else Part(hash_, path[rank], "aot_compile")
            artifact = "model"
        elif "triton_cache" in rest[:2]:
            part, artifact = Part(hash_, path[rank], "triton"), ""
        else:
            saved = "binary" if len(rest) == 2 else "unpacked"
            part, artifact = Part(hash_, path[rank], "binary", rest[0], saved), rest[1]
        part = parts.setdefault((hash_, path[rank], part.prefix), part)
        if artifact:
            part.artifacts[artifact] = part.artifacts.get(artifact, 0) + file.size
    for key, file in factors.items():
        if key in parts:
            parts[key].factors = _factors(file)
    return [parts[key] for key in sorted(parts)]


def _factors(file: File) -> Mapping[str, object]:
    try:
        with open(file.source, "rb") as opened:
            told = parse_json(opened.read(limits.JSON_BYTES + 1), limits.JSON_BYTES)
    except ValueError as wrong:
        raise Refused("Malformed", f"{shown(file.path)} {wrong}.") from None
    if not isinstance(told, Mapping):
        raise Refused("Malformed", f"{shown(file.path)} is no object.")
    return told


def formats(parts: Iterable[Part]) -> str:
    """The label of the format: all there are, in the order of other tools."""
    there = {each.format for each in parts}
    return ",".join(each for each in FORMATS if each in there) or "unpacked"


def bundled_targets(found: Iterable[File]) -> tuple[Target, ...]:
    """What the kernels that are bundled into artifacts were compiled for: their JSON stands in the files as it is."""
    seen: set[Target] = set()
    for file in found:
        if file.name != "model" and _ARTIFACT not in file.path:
            continue
        with open(file.source, "rb") as opened:
            kept = b""
            while chunk := opened.read(_CHUNK):
                for match in _TARGET.finditer(kept + chunk):
                    arch: object = int(match[2]) if match[2].isdigit() else match[2].strip(b'"').decode()
                    one = target(match[1].decode(), arch, int(match[3]))
                    if one is not None:
                        seen.add(one)
                kept = chunk[-_OVERLAP:]
    return tuple(sorted(seen))


def capture_paths(found: Iterable[File]) -> dict[str, str]:
    """Where artifacts were stored when they were made, as `vllm_compile_cache.py` has it, and which file says so."""
    told: dict[str, str] = {}
    for file in found:
        if file.name != "vllm_compile_cache.py" or file.size > limits.CONFIG_BYTES:
            continue
        text = Path(file.source).read_text("utf-8", "replace")
        for match in re.finditer(rf"['\"](/[^'\"\n]{{0,1024}}?)/{re.escape(file.folder)}/{_ARTIFACT}", text):
            told.setdefault(match[1], file.path)
    return told


def manifest(parts: Sequence[Part], kernels: Sequence[Kernel]) -> list[dict[str, object]]:
    """The list below `vllm` in manifest.json."""
    rows: dict[tuple[str, Format], list[dict[str, object]]] = {}
    for part in parts:
        listed = rows.setdefault((part.hash, part.format), [])
        if part.format == "triton":
            inside = f"/{part.hash}/{part.rank}/"
            listed += [entry(each) for each in kernels if inside in f"/{each.folder}"]
        elif part.format == "aot_compile":
            size = part.artifacts["model"]
            listed.append({"hash": part.hash, "rank": part.rank, "model_file": "model", "file_size": size})
        else:
            hashes = {name: str(part.factors.get(name, "")) for name in ("code_hash", "config_hash", "compiler_hash")}
            listed.append(
                {
                    "rank": part.rank,
                    "prefix": part.prefix,
                    "artifact_count": len(part.artifacts),
                    "artifact_names": sorted(part.artifacts),
                    **hashes,
                    "cache_save_format": part.save_format,
                    "target_device": part.device,
                    "env": dict(part.environment),
                }
            )
    return [{"vllmHash": hash_, "cacheFormat": form, form: listed} for (hash_, form), listed in rows.items()]
