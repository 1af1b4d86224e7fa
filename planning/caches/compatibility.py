"""Decides which GPUs of a node can run a cache's kernels, and which image of an index a node takes, each with the
sentence why not. For preflight on the nodes and for the command line.

Kernels and GPU must agree in backend, architecture and warp size: Triton compiles for exactly one of each, and neither
runs nor looks up those of another. ROCm and HIP are two names of one backend. A warp is what the GPU reports (AMD has
both 32 and 64); `sm_` is a prefix, and the letter in `sm_90a` says which instructions of that same GPU are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_CUDA = re.compile(r"(?:sm_?|compute_)?([0-9]{2,4})[af]?")
MOST_WARP = 1024
MOST_NAMED = 3
MESSAGE = 256  # characters of a sentence: what a GPU's entry in a status holds


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """What kernels were compiled for, in the one spelling by which targets are compared: see `target`."""

    backend: str
    arch: str
    warp_size: int

    def __str__(self) -> str:
        return f"{self.backend} {'sm_' if self.backend == 'cuda' else ''}{self.arch} with warps of {self.warp_size}"


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU of a node, as the hardware's own tools report it."""

    id: str
    product: str
    backend: str
    arch: str
    warp_size: int
    driver: str

    @property
    def target(self) -> Target | None:
        """What kernels must have been compiled for to run on it; None if the report makes no sense."""
        return target(self.backend, self.arch, self.warp_size)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a GPU can run the kernels; if not, `message` is the reason."""

    gpu: GPU
    compatible: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Variant:
    """One image of an OCI index and what its kernels are for."""

    digest: str
    size: int
    target: Target


def target(backend: object, arch: object, warp_size: object) -> Target | None:
    """The target that a cache, an image or a driver names, in the one spelling; None if that is no target.

    `arch` may be a number (Triton writes 90 for CUDA) or text (`sm_90a`, `gfx90a:sramecc+:xnack-`).
    """
    if not isinstance(backend, str) or not _TEXT.fullmatch(backend):
        return None
    if isinstance(warp_size, bool) or not isinstance(warp_size, int) or not 0 < warp_size <= MOST_WARP:
        return None
    if isinstance(arch, bool) or not isinstance(arch, str | int):
        return None
    kind = backend.lower()
    name = str(arch).lower().split(":")[0] if isinstance(arch, str) else _number(arch)
    if not _TEXT.fullmatch(name):
        return None
    if kind == "cuda":
        match = _CUDA.fullmatch(name)
        return Target(kind, match[1], warp_size) if match else None
    return Target("hip" if kind == "rocm" else kind, name, warp_size)


def _number(arch: int) -> str:
    """Small numbers only: longer ones are no architecture, and Python refuses to write the longest."""
    return str(arch) if 0 < arch < 10_000 else ""


def target_of(raw: object) -> Target | None:
    """The same from an object with backend, arch and warp_size, as it stands in JSON."""
    if not isinstance(raw, Mapping):
        return None
    return target(raw.get("backend"), raw.get("arch"), raw.get("warp_size"))


def compatible(gpus: Sequence[GPU], targets: Iterable[Target]) -> tuple[Verdict, ...]:
    """One verdict for each GPU, in their order."""
    wanted = sorted(set(targets))
    return tuple(_verdict(gpu, wanted) for gpu in gpus)


def _verdict(gpu: GPU, wanted: Sequence[Target]) -> Verdict:
    own = gpu.target
    if own is None:
        return Verdict(gpu, False, _cut(f"its driver calls it {gpu.backend} {gpu.arch}, which berth does not know"))
    if own in wanted:
        return Verdict(gpu, True)
    if not wanted:
        return Verdict(gpu, False, "the image does not say for which GPUs its kernels are")
    return Verdict(gpu, False, _cut(f"it is {own}, the kernels are for {named(wanted)}"))


def named(targets: Sequence[Target]) -> str:
    """A few targets by name, and how many more there are."""
    few = ", ".join(map(str, targets[:MOST_NAMED]))
    return few if len(targets) <= MOST_NAMED else f"{few} and {len(targets) - MOST_NAMED} more"


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE else text[: MESSAGE - 1] + "…"


def on_node(verdicts: Sequence[Verdict]) -> tuple[bool, str]:
    """Whether a node can use the cache at all (some GPU can), and a sentence for its condition."""
    if not verdicts:
        return False, "The node has no GPU."
    fitting = [each for each in verdicts if each.compatible]
    if len(fitting) == len(verdicts):
        return True, f"All {len(fitting)} GPUs can run the kernels." if len(fitting) > 1 else "Its GPU can run them."
    first = next(each for each in verdicts if not each.compatible)
    why = f"GPU {first.gpu.id} ({first.gpu.product}) cannot: {first.message}."
    if not fitting:
        return False, f"No GPU can run the kernels. {why}"
    return True, f"{len(fitting)} of {len(verdicts)} GPUs can run the kernels. {why}"


def choose(variants: Sequence[Variant], gpus: Sequence[GPU]) -> tuple[Variant | None, str]:
    """The image that the most GPUs of a node can run, the first in the index among equals; or None and why.

    A node mounts one image of a cache, so that on a mixed node some GPUs may be left without: `compatible` names them.
    """
    if not variants:
        return None, "The index names no image with the GPU that it is for."
    if not gpus:
        return None, "The node has no GPU."
    served = [sum(gpu.target == variant.target for gpu in gpus) for variant in variants]
    most = max(served)
    if most:
        return variants[served.index(most)], ""
    has = sorted({each for gpu in gpus if (each := gpu.target) is not None})
    of_the_node = named(has) if has else "GPUs that berth does not know"
    return None, (
        f"The index has images for {named(sorted({each.target for each in variants}))}; the node has {of_the_node}."
    )
