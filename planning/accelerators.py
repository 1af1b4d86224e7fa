"""Which resources count as GPUs, whoever made them, and by which labels their vendors tell model and memory.

For views, which count them, and for manifests, which ask for them. What counts as one GPU is what a container gets of
such a resource: a card, or a seat on a group of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache

from crds.gpuworkload import GPUWorkloadSpec

NVIDIA = "nvidia.com/gpu"
AMD = "amd.com/gpu"
# A seat is one of several places on a group of GPUs, of which one at a time is active; this group is a single GPU.
SEAT = "kyb.ai/gpu-1x-seat"
KNOWN = f"{NVIDIA}, {AMD}, gpu.intel.com/…, tenstorrent.com/… and kyb.ai/gpu-…x-seat"

# Intel's device plugin registers these beside its GPUs (i915, xe): they are views of all GPUs, or measures of them.
_NO_GPU = re.compile(r"gpu\.intel\.com/(.*_monitoring|millicores|memory\.max|tiles)")
_GPU = re.compile(r"nvidia\.com/gpu|amd\.com/gpu|gpu\.intel\.com/.+|tenstorrent\.com/.+|kyb\.ai/gpu-[1-9][0-9]?x-seat")
_SEAT = re.compile(r"kyb\.ai/gpu-([1-9][0-9]?)x-seat")

# Where a node's labels tell the model of its GPUs: by NVIDIA's feature discovery, AMD's node labeller, Intel's rules.
MODEL_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "gpu.intel.com/product")
# Where they tell memory: in MiB; in GiB, as "192G"; in bytes of all GPUs, with how many these are in thousandths.
NVIDIA_MEMORY_LABEL = "nvidia.com/gpu.memory"
_AMD_MEMORY = ("amd.com/gpu.vram", "beta.amd.com/gpu.vram")
_INTEL_MEMORY, _INTEL_GPUS = "gpu.intel.com/memory.max", "gpu.intel.com/millicores"

# A node may say of itself whatever it likes: beyond so many resources nobody counts.
_MOST_RESOURCES = 16

Counts = tuple[tuple[str, int], ...]


@lru_cache(maxsize=4096)
def is_gpu(resource: str) -> bool:
    """Whether a resource of this name counts as a GPU in every installation."""
    return bool(_GPU.fullmatch(resource)) and not _NO_GPU.fullmatch(resource)


@lru_cache(maxsize=4096)
def seat_size(resource: str) -> int:
    """How many GPUs a seat of this resource is on; 0 if it is none."""
    found = _SEAT.fullmatch(resource)
    return int(found[1]) if found else 0


def gpu_counts(amounts: Mapping[str, int], installed: str) -> Counts:
    """The GPUs among these amounts by resource, sorted. `installed`, which the installation calls GPU, is ''."""
    found = [
        ("" if name == installed else sys.intern(name), amount)
        for name, amount in amounts.items()
        if amount > 0 and (name == installed or is_gpu(name))
    ]
    return tuple(sorted(found)[:_MOST_RESOURCES]) if len(found) > 1 else tuple(found)


def asked_resource(spec: GPUWorkloadSpec, installed: str) -> str:
    """The resource that the Job of this spec asks for: a part of a GPU is given as a seat."""
    return SEAT if spec.gpu_fraction is not None else spec.gpu_resource or installed


def taint_keys(resource: str, installed: str) -> tuple[str, ...]:
    """The keys of the taints that keep other work off nodes with such GPUs: a cloud taints them by their resource, and
    those with seats by that of the GPUs under these.
    """
    return tuple(dict.fromkeys((resource, installed, NVIDIA))) if seat_size(resource) else (resource,)


def known_as(resource: str, installed: str) -> str:
    """How planning calls a GPU resource: '' for the installation's."""
    return "" if resource == installed else sys.intern(resource)


def gpu_model(labels: Mapping[str, str], resource: str) -> str:
    """The model of a node's GPUs of this resource; '' where nobody tells. What one vendor tells is not another's; of a
    seat, or of what the installation alone calls a GPU, the first will do that is told.
    """
    told = {label.partition("/")[0]: labels[label] for label in MODEL_LABELS if labels.get(label)}
    own = is_gpu(resource) and not seat_size(resource)
    return told.get(resource.partition("/")[0], "") if own else next(iter(told.values()), "")


def memory_label(resource: str) -> str:
    """The label that tells in MiB how much memory each of a node's GPUs of this resource has; a seat is on NVIDIA's."""
    return NVIDIA_MEMORY_LABEL if seat_size(resource) else f"{resource}.memory"


def memory_mib(labels: Mapping[str, str], resource: str) -> int:
    """The memory of each of a node's GPUs of this resource, in MiB; 0 where no label tells.

    Whatever the resource, a label `<resource>.memory` in MiB does, as NVIDIA's feature discovery sets it for its own.
    """
    found = _number(labels.get(f"{resource}.memory", ""))
    if found:
        return found
    if seat_size(resource):
        return _number(labels.get(NVIDIA_MEMORY_LABEL, ""))
    if resource == AMD:
        return next((1024 * _number(text[:-1]) for text in _texts(labels, _AMD_MEMORY) if text.endswith("G")), 0)
    if resource.startswith("gpu.intel.com/"):
        gpus = _number(labels.get(_INTEL_GPUS, ""))
        return _number(labels.get(_INTEL_MEMORY, "")) * 1000 // gpus // 2**20 if gpus else 0
    return 0


def _texts(labels: Mapping[str, str], names: Iterable[str]) -> Iterable[str]:
    return (labels[name] for name in names if name in labels)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= 16 else 0
