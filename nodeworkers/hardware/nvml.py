"""NVIDIA's GPUs of a node, by NVML: the library that comes with the driver, and that nvidia-smi asks.

A GPU in MIG mode stays one GPU here: its instances run what their parent runs, and preflight asks for nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from nodeworkers.hardware.provider import UNKNOWN, HardwareError, said
from planning.caches.compatibility import GPU

WARP = 32  # of every NVIDIA GPU; NVML does not tell it


class Nvml:
    """A provider. `library`: what serves as the module pynvml; None imports that one, at the first call."""

    simulated = False

    def __init__(self, library: Any = None) -> None:
        self._library = library

    def gpus(self) -> tuple[GPU, ...]:
        """The GPUs that the driver lists; () where there is no driver. Blocks for as long as the driver does. Raises
        HardwareError if the driver fails, or if one GPU does not answer: then with the others.
        """
        nvml = self._library or importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                return ()
            raise HardwareError(f"NVIDIA's driver does not start: {_sentence(nvml, error)}") from error
        try:
            return _listed(nvml)
        finally:
            # The GPUs are known by now, or the error that counts is on its way.
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def _listed(nvml: Any) -> tuple[GPU, ...]:
    try:
        driver = said(nvml.nvmlSystemGetDriverVersion()) or UNKNOWN
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise HardwareError(f"NVIDIA's driver lists no GPUs: {_sentence(nvml, error)}") from error
    found: list[GPU] = []
    problems: list[str] = []
    for index in range(count):
        try:
            found.append(_gpu(nvml, index, driver))
        except nvml.NVMLError as error:
            problems.append(f"NVIDIA GPU {index} of {count} does not answer: {_sentence(nvml, error)}")
    if problems:
        raise HardwareError(" ".join(problems), tuple(found))
    return tuple(found)


def _gpu(nvml: Any, index: int, driver: str) -> GPU:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return GPU(
        id=said(nvml.nvmlDeviceGetUUID(handle)),
        product=said(nvml.nvmlDeviceGetName(handle)) or UNKNOWN,
        backend="cuda",
        arch=str(major * 10 + minor),
        warp_size=WARP,
        driver=driver,
    )


def _sentence(nvml: Any, error: Any) -> str:
    """NVML's own words, and what to do."""
    advice = {
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "the driver was replaced while the old one runs; drain the node and restart it"
        ),
        nvml.NVML_ERROR_NO_PERMISSION: "let berth's node process open /dev/nvidiactl and /dev/nvidia*",
        nvml.NVML_ERROR_GPU_IS_LOST: "it fell off the bus; drain the node and restart it",
        nvml.NVML_ERROR_RESET_REQUIRED: "drain the node and reset the GPU with nvidia-smi --gpu-reset",
    }.get(error.value, "run nvidia-smi on the node and look for NVRM in its kernel log")
    return f"{str(error).rstrip('.')}; {advice}."
