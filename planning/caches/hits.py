"""Predicts whether pods will find a cache's kernels: True, False or None (unknown), with a reason. For the condition
HitPredicted, which informs and never blocks.

Triton's key for a kernel holds, beside its source and options, the exact build of Triton, what `ptxas --version` says
and a list of environment variables. What the image tells of these is compared with what the pods will bring.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from crds.kernelcache import Runtime
from planning.caches.labels import Packed

Reason = Literal[
    "ListenerSawHits", "ListenerSawMisses",
    "RuntimeMatches", "TritonDiffers", "PtxasDiffers", "EnvironmentDiffers", "PathDiffers",
    "RuntimeNotGiven", "ImageDoesNotSay", "FrameworkDecides",
]  # fmt: skip

_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+")
_EXACT = re.compile(r"\bV([0-9]+(?:\.[0-9]+)+)")
_TRUE, _FALSE = ("on", "true", "1"), ("off", "false", "0")


@dataclass(frozen=True, slots=True)
class Seen:
    """What pods that have this digest mounted reported through Triton's own listener: kernels of its that they found,
    kernels that they compiled, and how long that took them.
    """

    hits: int
    misses: int
    compile_seconds: float = 0.0

    def __add__(self, other: Seen) -> Seen:
        seconds = self.compile_seconds + other.compile_seconds
        return Seen(self.hits + other.hits, self.misses + other.misses, seconds)


@dataclass(frozen=True, slots=True)
class Prediction:
    """`hit` is None where it cannot be known."""

    hit: bool | None
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class _Compared:
    """One part of the key; `same` is None when a side is not known."""

    same: bool | None
    reason: Reason
    message: str


def predict(packed: Packed, runtime: Runtime, mount_path: str | None, seen: Seen | None) -> Prediction:
    """Whether pods of `runtime` will hit when the cache is mounted at `mount_path` (None: where it was compiled).

    What pods reported wins over what labels say. A difference that is known wins over whatever is not known.
    """
    told_by_pods = reported(seen)
    if told_by_pods is not None:
        return told_by_pods
    parts = [_triton(packed, runtime), *_ptxas(packed, runtime), _environment(packed, runtime)]
    parts += _path(packed, mount_path)
    differing = next((each for each in parts if each.same is False), None)
    if differing is not None:
        return Prediction(False, differing.reason, differing.message)
    unknown = next((each for each in parts if each.same is None), None)
    if unknown is not None:
        return Prediction(None, unknown.reason, unknown.message)
    if packed.kind == "vllm":
        told = (
            "Triton, ptxas and environment match; vLLM compares its own configuration and code, which no label tells."
        )
        return Prediction(None, "FrameworkDecides", told)
    told = " ".join(each.message for each in parts if each.message)
    return Prediction(True, "RuntimeMatches", told or "All that the image tells of its making is what the pods bring.")


def reported(seen: Seen | None) -> Prediction | None:
    """What pods found themselves; None while none has reported anything."""
    total = seen.hits + seen.misses if seen is not None else 0
    if seen is None or not total:
        return None
    if seen.misses == 0:
        return Prediction(True, "ListenerSawHits", f"Pods found all {total} kernels that they asked for.")
    return Prediction(
        False, "ListenerSawMisses", f"Pods found {seen.hits} of {total} kernels and compiled {seen.misses}."
    )


def _triton(packed: Packed, runtime: Runtime) -> _Compared:
    given, key, version = runtime.triton, packed.triton_key, packed.triton_version
    if given is None:
        return _Compared(None, "RuntimeNotGiven", "spec.runtime.triton does not say which Triton the pods have.")
    if key is None and version is None:
        return _Compared(None, "ImageDoesNotSay", "The image does not say which Triton compiled its kernels.")
    if given.startswith("sha256:"):
        if key is None:
            told = f"The image tells Triton {version} and not its build key, which spec.runtime.triton gives."
            return _Compared(None, "ImageDoesNotSay", told)
        same = given == build_key_digest(key)
        return _Compared(same, "TritonDiffers", "" if same else "The kernels are of another build of Triton.")
    if key is not None and given == key:
        return _Compared(True, "RuntimeMatches", "")
    known = version if version is not None else _leading_version(key or "")
    if known is None:
        return _Compared(None, "ImageDoesNotSay", "The image tells a build key of Triton in which no version stands.")
    if known != given:
        told = f"The kernels were compiled by Triton {known}, the pods have {given}."
        return _Compared(False, "TritonDiffers", told)
    return _Compared(True, "RuntimeMatches", f"Triton {given} on both sides (its version, not its build).")


def build_key_digest(key: str) -> str:
    """A build key of Triton as it is given in spec.runtime.triton: it has kilobytes, its digest does as well."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _leading_version(key: str) -> str | None:
    """A key begins with the version, and 64 hexadecimal digits follow at once."""
    match = re.match(r"([0-9]+(?:\.[0-9A-Za-z+]+)*?)[0-9a-f]{64}(?:-|$)", key[:256])
    return match[1] if match else None


def _ptxas(packed: Packed, runtime: Runtime) -> list[_Compared]:
    if packed.targets and all(each.backend != "cuda" for each in packed.targets):
        return []
    if runtime.ptxas is None:
        return [_Compared(None, "RuntimeNotGiven", "spec.runtime.ptxas does not say which ptxas the pods have.")]
    if packed.ptxas is None:
        return [_Compared(None, "ImageDoesNotSay", "The image does not say which ptxas assembled its kernels.")]
    ours, theirs = ptxas_version(packed.ptxas), ptxas_version(runtime.ptxas)
    if ours is None or theirs is None:
        same: bool | None = True if packed.ptxas.strip() == runtime.ptxas.strip() else None
        return [_Compared(same, "ImageDoesNotSay", "" if same else "No version stands in what is told of ptxas.")]
    if ours != theirs:
        told = f"The kernels were assembled by ptxas {ours}, the pods have {theirs}."
        return [_Compared(False, "PtxasDiffers", told)]
    return [_Compared(True, "RuntimeMatches", "")]


def ptxas_version(text: str) -> str | None:
    """The version in what `ptxas --version` says (`…, V12.9.86`), or in a bare `12.9.86`; None if there is none."""
    exact = _EXACT.search(text)
    if exact:
        return exact[1]
    bare = _VERSION.search(text)
    return bare[0] if bare else None


def _environment(packed: Packed, runtime: Runtime) -> _Compared:
    if packed.environment is None:
        return _Compared(None, "ImageDoesNotSay", "The image does not say which variables were set for the compiler.")
    ours, theirs = _as_in_key(packed.environment), _as_in_key(runtime.environment)
    if ours == theirs:
        return _Compared(True, "RuntimeMatches", "")
    name = min(each for each in ours.keys() | theirs.keys() if ours.get(each) != theirs.get(each))
    told = f"{name} was {_shown(ours.get(name))} when the kernels were compiled and is {_shown(theirs.get(name))} now."
    return _Compared(False, "EnvironmentDiffers", told)


def _as_in_key(environment: Mapping[str, str]) -> dict[str, str]:
    """As Triton puts variables into its key: empty ones not at all, words for yes and no as true and false."""
    found = {}
    for name, value in environment.items():
        lower = value.lower()
        if value:
            found[name] = "true" if lower in _TRUE else "false" if lower in _FALSE else value
    return found


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value[:64])


def _path(packed: Packed, mount_path: str | None) -> list[_Compared]:
    """Paths of Triton's are rewritten for the mount; those of vLLM cannot be."""
    if packed.kind != "vllm" or mount_path is None or packed.capture_path in (None, mount_path):
        return []
    told = f"vLLM compiled it at {packed.capture_path} and stores that path; it is mounted at {mount_path}."
    return [_Compared(False, "PathDiffers", told)]
