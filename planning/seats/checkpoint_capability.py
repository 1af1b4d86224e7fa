"""What a node's GPU driver can do for parking by checkpoint, by its version: for the preflight of a node, which says to
people why seats cannot be parked there, or not moved.

From the README of NVIDIA/cuda-checkpoint (570-era and newest), of CRIU's CUDA plugin, and from what users report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SIMULATED = "simulated"
"""What the driver of simulated GPUs calls itself. It can do all."""
_FIRST, _ACTIONS, _API, _DEVICE_MAP, _ARM, _JOBS = 550, 555, 570, 580, 595, 610
_VERSION = re.compile(r"(\d{3,4})(\.\d{1,5}){1,2}")


@dataclass(frozen=True, slots=True)
class Capability:
    """`parks` if nothing is `missing`: sentences for people. `moves`: whether memory may come back on another GPU.
    `warnings`: what may fail all the same, as sentences.
    """

    moves: bool = False
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def parks(self) -> bool:
        return not self.missing


def capability(driver: str, machine: str = "x86_64", gpus: int = 1, mig: bool = False, mps: bool = False) -> Capability:
    """Of a driver such as 580.65.06 on a `machine` as uname says it, for groups of so many GPUs. `mig`: one of them is
    in MIG mode; `mps`: CUDA's multi-process server runs. A version that makes no sense can do nothing.
    """
    missing = []
    major = _JOBS if driver == SIMULATED else _major(driver)
    if major is None:
        missing.append(f"The driver calls itself {driver[:40]!r}, which is no version that anybody knows.")
        major = 0
    elif major < _API:
        missing.append(f"Driver {driver} {_lacks(major)}: parking needs {_API} or later.")
    if machine in ("aarch64", "arm64") and 0 < major < _ARM:
        missing.append(f"Driver {driver} cannot checkpoint on ARM processors: that needs {_ARM} or later.")
    if mig:
        missing.append(
            "A GPU is in MIG mode, of which no driver can checkpoint a process: it fails for want of memory."
        )
    if mps:
        missing.append("CUDA's multi-process server (MPS) runs, whose clients no driver can checkpoint.")
    if missing:
        return Capability(missing=tuple(missing))
    return Capability(major >= _DEVICE_MAP, (), _warnings(driver, major, gpus))


def _major(driver: str) -> int | None:
    found = _VERSION.fullmatch(driver)
    return int(found[1]) if found is not None else None


def _lacks(major: int) -> str:
    if major < _FIRST:
        return "cannot checkpoint processes at all"
    if major < _ACTIONS:
        return "can only toggle a process, and neither lock nor ask it by itself"
    return "locks without a limit of time, and by a program only"


def _warnings(driver: str, major: int, gpus: int) -> tuple[str, ...]:
    warnings = []
    if major < _DEVICE_MAP:
        warnings.append(
            f"With driver {driver} memory comes back only on the GPUs that it left: moving a seat in place needs "
            f"{_DEVICE_MAP} or later."
        )
    if gpus > 1 and driver != SIMULATED:
        warnings.append(
            "Servers that use several GPUs over NCCL's default transports hang or are lost when they are parked, with "
            "every driver so far. Such a server needs NCCL_P2P_DISABLE=1, NCCL_NVLS_ENABLE=0 and NCCL_SHM_DISABLE=1, "
            "and no custom all-reduce, or parks by its engine's sleep."
        )
        if major < _JOBS:
            warnings.append(
                f"Memory shared by CUDA IPC, as custom all-reduce does, cannot be checkpointed before driver {_JOBS}, "
                "nor later without a job (cuda-checkpoint --launch-job)."
            )
    return tuple(warnings)
