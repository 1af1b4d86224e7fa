"""What an image says about its kernels: the labels' names, and how they are read. For those who write and read images.

Labels are claims of whoever packed the image. They decide what is worth mounting, never what is trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from planning.caches.compatibility import Target, target_of
from planning.caches.limits import PATH_BYTES, SUMMARY_BYTES

Kind = Literal["triton", "vllm"]
KINDS: tuple[Kind, ...] = ("triton", "vllm")

# Those that other tools read too: `cache.<kind>.image/…`, and hints where KServe mounts a vLLM cache.
TITLE = "org.opencontainers.image.title"
VLLM_FORMAT = "cache.vllm.image/format"
KSERVE = "io.kserve.km"

# Ours: what a hit depends on.
OURS = "io.berth.cache"
TRITON_KEY = f"{OURS}/triton-key"
TRITON_VERSION = f"{OURS}/triton-version"
PTXAS_VERSION = f"{OURS}/ptxas-version"
ENVIRONMENT = f"{OURS}/environment"
CAPTURE_PATH = f"{OURS}/capture-path"
TARGET = f"{OURS}/target"  # annotation of an index's entries

MOST_TARGETS = 256
MOST_VARIABLES = 256
_NUMBER = re.compile(r"[0-9]{1,18}")


def entry_count(kind: Kind) -> str:
    return f"cache.{kind}.image/entry-count"


def summary(kind: Kind) -> str:
    return f"cache.{kind}.image/summary"


def size_bytes(kind: Kind) -> str:
    return f"cache.{kind}.image/cache-size-bytes"


@dataclass(frozen=True, slots=True)
class Packed:
    """What an image says of itself; None wherever it says nothing, `problems` what it says wrongly."""

    kind: Kind | None = None
    targets: tuple[Target, ...] = ()
    entries: int | None = None
    size: int | None = None
    triton_key: str | None = None
    triton_version: str | None = None
    ptxas: str | None = None
    environment: Mapping[str, str] | None = None
    capture_path: str | None = None
    problems: tuple[str, ...] = ()


def read(labels: Mapping[str, object]) -> Packed:
    """Reads an image's labels, whatever they hold; the kind is decided by whose summary there is."""
    problems: list[str] = []
    kind = next((each for each in KINDS if summary(each) in labels), None)
    targets: tuple[Target, ...] = ()
    if kind is not None:
        targets = _targets(labels[summary(kind)], summary(kind), problems)
    return Packed(
        kind=kind,
        targets=targets,
        entries=_number(labels, entry_count(kind), problems) if kind else None,
        size=_number(labels, size_bytes(kind), problems) if kind else None,
        triton_key=_text(labels, TRITON_KEY, 64 * 1024, problems),
        triton_version=_text(labels, TRITON_VERSION, 128, problems),
        ptxas=_text(labels, PTXAS_VERSION, 4096, problems),
        environment=_environment(labels, problems),
        capture_path=_path(labels, problems),
        problems=tuple(problems),
    )


def parse_json(text: object, most: int) -> object:
    """JSON from an image; ValueError in words if it is none, or longer than `most` bytes."""
    if not isinstance(text, str | bytes):
        raise ValueError("is not text")
    if len(text) > most or (isinstance(text, str) and len(text.encode("utf-8", "surrogatepass")) > most):
        raise ValueError(f"is longer than {most} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None


def _targets(raw: object, label: str, problems: list[str]) -> tuple[Target, ...]:
    try:
        parsed = parse_json(raw, SUMMARY_BYTES)
    except ValueError as wrong:
        problems.append(f"label {label}: {wrong}")
        return ()
    listed = parsed.get("targets") if isinstance(parsed, Mapping) else None
    if not isinstance(listed, list) or len(listed) > MOST_TARGETS:
        problems.append(f"label {label}: has no list of at most {MOST_TARGETS} targets")
        return ()
    found: dict[Target, None] = {}
    for number, each in enumerate(listed):
        one = target_of(each)
        if one is None:
            problems.append(f"label {label}: target {number} has no backend, arch and warp_size that berth knows")
        else:
            found[one] = None
    return tuple(found)


def _number(labels: Mapping[str, object], label: str, problems: list[str]) -> int | None:
    raw = labels.get(label)
    if raw is None:
        return None
    if not isinstance(raw, str) or not _NUMBER.fullmatch(raw):
        problems.append(f"label {label}: is no number")
        return None
    return int(raw)


def _text(labels: Mapping[str, object], label: str, most: int, problems: list[str]) -> str | None:
    raw = labels.get(label)
    if raw is None or raw == "":
        return None
    if not isinstance(raw, str) or len(raw) > most:
        problems.append(f"label {label}: is no text of at most {most} characters")
        return None
    return raw


def _environment(labels: Mapping[str, object], problems: list[str]) -> Mapping[str, str] | None:
    raw = labels.get(ENVIRONMENT)
    if raw is None:
        return None
    try:
        parsed = parse_json(raw, SUMMARY_BYTES)
    except ValueError as wrong:
        problems.append(f"label {ENVIRONMENT}: {wrong}")
        return None
    if not isinstance(parsed, dict) or len(parsed) > MOST_VARIABLES or not _all_text(parsed.values()):
        problems.append(f"label {ENVIRONMENT}: is no object of at most {MOST_VARIABLES} texts")
        return None
    return parsed


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(each, str) for each in values)


def _path(labels: Mapping[str, object], problems: list[str]) -> str | None:
    raw = _text(labels, CAPTURE_PATH, PATH_BYTES, problems)
    if raw is None:
        return None
    parts = raw.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]) or "\0" in raw:
        problems.append(f"label {CAPTURE_PATH}: is no absolute path without empty parts, . or ..")
        return None
    return raw
