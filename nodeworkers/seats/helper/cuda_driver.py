"""NVIDIA's driver, for the helper: processes by cuda-bindings, memory by NVML.

`pip install 'berth[cuda]'` brings cuda-bindings; libcuda and NVML come with the driver. Calls of the checkpoint API are
there from driver 570 on (CUDA 12.8).
"""

from __future__ import annotations

import ctypes
import importlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nodeworkers.seats.helper.driver import CHECKPOINTED, FAILED, LOCKED, RUNNING, CardMemory, DriverError

_STATES = {0: RUNNING, 1: LOCKED, 2: CHECKPOINTED, 3: FAILED}  # CUprocessState; later drivers have more
_NONE = frozenset({"CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"})


class CudaDriver:
    """Attaches to the driver when it is made, which takes seconds; after that calls are quick."""

    def __init__(self) -> None:
        """Raises DriverError."""
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.driver")
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise DriverError(f"{error.name} is missing: pip install 'berth[cuda]'") from error
        if not hasattr(self._cuda, "cuCheckpointProcessLock"):
            raise DriverError("cuda-bindings is older than 12.8, which has no checkpoints: pip install 'berth[cuda]'")
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # there is no libcuda
            raise DriverError(str(error).partition("\n")[0]) from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise DriverError(str(error)) from error

    def version(self) -> str:
        return str(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def devices(self) -> Sequence[str]:
        count = self._ask(self._nvml.nvmlDeviceGetCount)
        handles = [self._ask(self._nvml.nvmlDeviceGetHandleByIndex, number) for number in range(count)]
        return [str(self._ask(self._nvml.nvmlDeviceGetUUID, handle)) for handle in handles]

    def state(self, pid: int) -> str | None:
        try:
            state = int(self._call("cuCheckpointProcessGetState", pid))
            if _STATES.get(state) == RUNNING:
                # One that has no context runs as well, but has no thread that could restore it, and cannot be locked.
                self._call("cuCheckpointProcessGetRestoreThreadId", pid)
        except DriverError as error:
            if error.code in _NONE:
                return None
            raise
        return _STATES.get(state, f"state {state}")

    def lock(self, pid: int, seconds: float) -> None:
        arguments = self._cuda.CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, int(seconds * 1000))  # 0 would be for ever
        try:
            self._call("cuCheckpointProcessLock", pid, arguments)
        except DriverError as error:
            raise DriverError(error.code, timed_out=error.code == "CUDA_ERROR_NOT_READY") from error

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, self._cuda.CUcheckpointCheckpointArgs())

    def restore(self, pid: int, devices: Mapping[str, str]) -> None:
        arguments = self._cuda.CUcheckpointRestoreArgs()
        if devices:
            pairs = []
            for old, new in devices.items():
                pair = self._cuda.CUcheckpointGpuPair()
                pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
                pairs.append(pair)
            arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
        self._call("cuCheckpointProcessRestore", pid, arguments)

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, self._cuda.CUcheckpointUnlockArgs())

    def memory(self, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        found = {}
        for card in cards:
            handle = self._ask(self._nvml.nvmlDeviceGetHandleByUUID, card)
            told = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            processes = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
            holders = {int(each.pid): int(each.usedGpuMemory or 0) for each in processes}
            found[card] = CardMemory(int(told.free), int(told.total), holders)
        return found

    def _uuid(self, text: str) -> Any:
        made = self._cuda.CUuuid()
        # Its bytes can be read only; it is a struct of 16 of them.
        ctypes.memmove(made.getPtr(), uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
        return made

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._cuda, name)(*arguments)
        if int(result) != 0:
            raise DriverError(getattr(result, "name", str(result)))
        return values[0] if values else None

    def _ask(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            raise DriverError(str(error)) from error
