"""What a folder of Triton's holds: kernels, what they were compiled for and by, and where. For building images, for
checking extracted ones and for mounting one at another path.

Triton keeps a kernel in a folder whose name is the base32 of its key's hash, writes that hash into `<kernel>.json`
beside what was compiled, and lists the files of it in `__grp__<kernel>.json` by absolute paths. So the name can be
checked, the path at which it was compiled is known, and moving a cache means rewriting these lists. Formats as written
by Triton 2.2 to 3.9 (triton/runtime/cache.py and triton/compiler/compiler.py).
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from images.refused import Refused, shown
from images.tree import FILE_MODE, FOLDER_MODE, File, files
from planning.caches import limits
from planning.caches.compatibility import Target, target_of
from planning.caches.labels import parse_json

GROUP = "__grp__"
_KEY_FOLDER = re.compile(r"[A-Z2-7]{52}")
_HASH = re.compile(r"[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,127}")  # options in a kernel's JSON are in lower case
_PTXAS = re.compile(rb"Cuda compilation tools, release [0-9.]{1,16}, V[0-9.]{1,32}")
MOST_TOLD = 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel; `version` and `environment` only where Triton was new enough to write them (3.2)."""

    name: str
    folder: str
    hash: str
    target: Target | None
    raw_target: Mapping[str, object]
    version: str | None
    environment: Mapping[str, str] | None
    options: Mapping[str, object]


@dataclass
class TritonCache:
    """What was found. `wrong` are reasons not to mount it; `warnings` what will miss, or cannot be told."""

    kernels: list[Kernel] = field(default_factory=list)
    groups: int = 0
    capture_paths: dict[str, str] = field(default_factory=dict)  # path → a group that says so
    wrong: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(sorted({each.target for each in self.kernels if each.target is not None}))

    @property
    def capture_path(self) -> str | None:
        """Where it was compiled, if all groups say the same."""
        return next(iter(self.capture_paths)) if len(self.capture_paths) == 1 else None

    @property
    def versions(self) -> Counter[str]:
        return Counter(each.version for each in self.kernels if each.version is not None)

    @property
    def environment(self) -> Mapping[str, str] | None:
        """The variables that were set, if every kernel tells them and all tell the same."""
        told = {json.dumps(each.environment, sort_keys=True) for each in self.kernels}
        return self.kernels[0].environment if len(told) == 1 else None

    def require(self) -> None:
        """Refused if anything is wrong, with the first of it."""
        if self.wrong:
            more = f" ({len(self.wrong) - 1} more like it)" if len(self.wrong) > 1 else ""
            raise Refused("Inconsistent", f"{self.wrong[0]}{more}")


def folder_name(hash_: str) -> str:
    """The folder of a kernel by its hash (64 hexadecimal digits): base32 without padding, 52 characters."""
    return base64.b32encode(binascii.unhexlify(hash_)).decode().rstrip("=")


def read(found: Sequence[File]) -> TritonCache:
    """Reads the JSON of a cache, whatever it holds; kernels may lie at any depth, as within vLLM's folders."""
    cache = TritonCache()
    names = {each.path for each in found}
    for file in found:
        if not file.name.endswith(".json"):
            continue
        within = _KEY_FOLDER.fullmatch(file.folder.rpartition("/")[2]) is not None
        group = file.name.startswith(GROUP)
        if not within and group:
            cache.warnings.append(f"{shown(file.path)} lies in no folder of a kernel, so that nothing finds it.")
            continue
        try:
            content = _json(file)
        except Refused as refused:
            if within:
                cache.wrong.append(str(refused))
            continue
        if group:
            _group(cache, file, content, names)
        elif isinstance(content, Mapping):
            _kernel(cache, file, content, within)
    return cache


def _json(file: File) -> object:
    if file.size > limits.JSON_BYTES:
        raise Refused("TooLarge", f"{shown(file.path)} is JSON of more than {limits.JSON_BYTES} bytes.")
    try:
        with open(os.open(file.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
            return parse_json(opened.read(limits.JSON_BYTES + 1), limits.JSON_BYTES)
    except ValueError as wrong:
        raise Refused("Malformed", f"{shown(file.path)} {wrong}; Triton could not read it either.") from None


def _kernel(cache: TritonCache, file: File, content: Mapping[str, object], within: bool) -> None:
    hash_, raw = content.get("hash"), content.get("target")
    if not hash_ or not isinstance(raw, Mapping):
        return  # results of autotuning, or a file of somebody else's
    if not isinstance(hash_, str) or not _HASH.fullmatch(hash_):
        cache.wrong.append(f"{shown(file.path)}: its hash is no SHA-256.")
        return
    if not within or file.folder.rpartition("/")[2] != folder_name(hash_):
        cache.wrong.append(
            f"{shown(file.path)} has the hash of folder {folder_name(hash_)}, so that it was moved or forged."
        )
        return
    target = target_of(raw)
    if target is None:
        cache.warnings.append(f"{shown(file.path)} does not name a GPU that berth knows.")
    version = content.get("triton_version")
    told = isinstance(version, str) and 0 < len(version) <= 128
    variables = {name: value for name, value in content.items() if _VARIABLE.fullmatch(name) and isinstance(value, str)}
    cache.kernels.append(
        Kernel(
            name=file.name.removesuffix(".json"),
            folder=file.folder,
            hash=hash_,
            target=target,
            raw_target=raw,
            version=str(version) if told else None,
            environment=variables if told else None,
            options={name: content[name] for name in ("num_warps", "num_stages", "ptx_version", "debug")
                     if isinstance(content.get(name), int)},
        )
    )  # fmt: skip


def _group(cache: TritonCache, file: File, content: object, names: set[str]) -> None:
    try:
        children = child_paths(content)
    except ValueError as wrong:
        cache.wrong.append(f"{shown(file.path)} {wrong}.")
        return
    cache.groups += 1
    for name, path in children.items():
        tail = f"/{file.folder}/{name}"
        if path.endswith(tail) and len(path) > len(tail):
            cache.capture_paths.setdefault(path.removesuffix(tail), file.path)
        else:
            cache.capture_paths.setdefault(path.rpartition("/")[0], file.path)
    missing = [name for name in children if f"{file.folder}/{name}" not in names]
    if missing:
        cache.warnings.append(f"{shown(file.path)}: {shown(missing[0])} is missing, so that the kernel will not hit.")


def child_paths(content: object) -> dict[str, str]:
    """The files of a group by name; ValueError, as the end of a sentence, if it is no group."""
    children = content.get("child_paths") if isinstance(content, Mapping) else None
    if not isinstance(children, dict) or not all(isinstance(path, str) for path in children.values()):
        raise ValueError("has no child_paths, an object of texts")
    if any(name in ("", ".", "..") or "/" in name or "\0" in name for name in children):
        raise ValueError("names a file outside its folder")
    return children


def entry(kernel: Kernel) -> dict[str, object]:
    """A kernel as manifest.json lists it."""
    told = {name: kernel.raw_target.get(name) for name in ("backend", "arch", "warp_size")}
    return {"hash": kernel.hash, **kernel.options, **told, "arch": str(told["arch"])}


def ptxas_versions(found: Iterable[File]) -> Counter[str]:
    """What `ptxas --version` says of itself, as it stands in the note of each cubin, and in how many."""
    told: Counter[str] = Counter()
    for file in found:
        if file.name.endswith(".cubin"):
            match = _PTXAS.search(Path(file.source).read_bytes())
            if match:
                told[match[0].decode()] += 1
    return told


def relocate(content: Path, mount_path: str, into: Path) -> int:
    """Writes the groups of an extracted cache anew for another mount path, into a folder that holds nothing else, to be
    laid above the content. How many it wrote; Refused if one cannot be read.
    """
    count = 0
    for file in files(content):
        if not (file.name.startswith(GROUP) and file.name.endswith(".json")):
            continue
        try:
            children = child_paths(_json(file))
        except ValueError as wrong:
            raise Refused("Malformed", f"{shown(file.path)} {wrong}.") from None
        moved = {"child_paths": {name: f"{mount_path}/{file.folder}/{name}" for name in children}}
        place = into / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(moved))
        place.chmod(FILE_MODE)
        for folder in itertools.takewhile(lambda each: each != into, place.parents):
            folder.chmod(FOLDER_MODE)
        count += 1
    return count
