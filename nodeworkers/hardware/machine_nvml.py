"""An NVML that serves the GPUs of a simulated machine to the provider of NVIDIA's GPUs, with faults on command. All
that it names says that it is simulated.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import pynvml

from nodeworkers.hardware.machine_nvidia import (
    PRODUCTS,
    SWITCH,
    NvidiaMachine,
    OverPcie,
    SimulatedGpu,
    over_pcie,
    simulated_gpus,
)
from nodeworkers.hardware.nvidia_faults import affects_all

_CLUSTER = bytes.fromhex("51700000000040008000000000000000")
_TELLS_RECOVERY = (565,)  # the first driver that says what it wants done about a GPU
_WHOLE = 0xFFFFFFFF  # no MIG instance


@dataclass(slots=True)
class _State:
    """What happened to a GPU."""

    uncorrected: int = 0
    action: int = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    lost: bool = False


@dataclass(frozen=True, slots=True)
class _Handle:
    """Of a GPU, or of a MIG instance of it (from 0)."""

    number: int
    instance: int | None = None


class SimulatedNvml:
    """Serves as the module pynvml for the provider of NVIDIA's GPUs: the functions that it calls, and pynvml's own
    constants, structures and errors. The list of GPUs is that of the machine at each call.
    """

    simulated = True

    def __init__(self, machine: NvidiaMachine) -> None:
        self._open = 0
        self._gpus: dict[int, SimulatedGpu] = {}
        self._states: dict[int, _State] = {}
        self._sets: dict[int, dict[int, int]] = {}  # event set -> the kinds of events of each GPU
        self._events: deque[tuple[int, int, int]] = deque(maxlen=1024)  # GPU, kind, data
        self._changed = threading.Condition()
        self._machine = machine
        self.apply(machine)

    def apply(self, machine: NvidiaMachine) -> None:
        """From now on the GPUs are these. An error of `fault` happens when it is new, and what a GPU had before is
        ended by a reset. May be called while another thread waits for events.
        """
        with self._changed:
            before, now = self._gpus, simulated_gpus(machine)
            self._states = {
                number: self._states[number]
                if number in before and before[number].spec.fault == gpu.spec.fault
                else self._struck(number, gpu.spec.fault)
                for number, gpu in now.items()
            }
            self._machine, self._gpus = machine, now
            if machine.driver == "none":
                self._open = 0
            self._changed.notify_all()

    def _struck(self, number: int, fault: str) -> _State:
        xid = 48 if fault == "ecc" else int(fault.partition(":")[2] or 0)
        state = _State(uncorrected=int(fault == "ecc"), lost=fault == "lost" or xid == 79)
        if xid:
            self._events.append((number, pynvml.nvmlEventTypeXidCriticalError, xid))
        if xid and affects_all(xid):
            state.action = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
        if fault == "ecc":
            self._events.append((number, pynvml.nvmlEventTypeDoubleBitEccError, 0))
        return state

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("nvmlDevice", "nvmlSystem", "nvmlInit", "nvmlEventSet", "_")):
            raise AttributeError(f"the simulated NVML has no {name}")
        return getattr(pynvml, name)

    def _listed(self) -> list[SimulatedGpu]:
        if not self._open:
            _fail(pynvml.NVML_ERROR_UNINITIALIZED)
        return list(self._gpus.values())

    def _gpu(self, handle: _Handle, instances: bool = False) -> SimulatedGpu:
        """The GPU, which fails as it has to. `instances`: MIG instances are told of as well."""
        gpu = next((each for each in self._listed() if each.number == handle.number), None)
        if gpu is None or self._states[gpu.number].lost:
            _fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        while gpu.spec.fault == "hang":
            time.sleep(3600)
        if gpu.spec.fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if handle.instance is not None and not instances:
            _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu

    def _profile(self, handle: _Handle) -> str:
        """Of a MIG instance."""
        profiles = self._gpu(handle, instances=True).spec.mig or []
        if handle.instance is None:
            _fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if handle.instance >= len(profiles):
            _fail(pynvml.NVML_ERROR_NOT_FOUND)
        return profiles[handle.instance]

    def nvmlInit(self) -> None:
        if self._machine.driver == "none":
            _fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self._open += 1

    def nvmlShutdown(self) -> None:
        self._listed()
        self._open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._listed()
        return f"{self._machine.driver}-simulated"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._listed()
        return 13_010

    def nvmlDeviceGetCount(self) -> int:
        return len(self._listed())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        listed = self._listed()
        if index >= len(listed):
            _fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        handle = _Handle(listed[index].number)
        self._gpu(handle)
        return handle

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        gpu = self._gpu(handle, instances=True)
        if handle.instance is None:
            return gpu.uuid
        self._profile(handle)
        return f"MIG-5170{gpu.number:04x}-0000-4000-8000-{handle.instance:012x}"

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        name = PRODUCTS[self._gpu(handle, instances=True).spec.product][0]
        return f"{name} (simulated)" if handle.instance is None else f"{name} MIG {self._profile(handle)} (simulated)"

    def nvmlDeviceGetPciInfo(self, handle: _Handle) -> Any:
        return _pci(self._gpu(handle).address)

    def nvmlDeviceGetMinorNumber(self, handle: _Handle) -> int:
        return self._gpu(handle).number

    def nvmlDeviceGetCudaComputeCapability(self, handle: _Handle) -> tuple[int, int]:
        return PRODUCTS[self._gpu(handle, instances=True).spec.product][1]

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle, version: int | None = None) -> Any:
        gpu = self._gpu(handle, instances=True)
        mib = PRODUCTS[gpu.spec.product][2] if handle.instance is None else _mib(self._profile(handle))
        return SimpleNamespace(total=mib << 20, used=(len(gpu.spec.pids) * 512) << 20)

    def nvmlDeviceGetTemperature(self, handle: _Handle, sensor: int) -> int:
        return 95 if self._gpu(handle).spec.fault == "hot" else 41

    def nvmlDeviceGetTemperatureThreshold(self, handle: _Handle, threshold: int) -> int:
        self._gpu(handle)
        return 92

    def nvmlDeviceGetPowerUsage(self, handle: _Handle) -> int:
        return 400_000 if self._gpu(handle).spec.pids else 70_000

    def nvmlDeviceGetComputeRunningProcesses(self, handle: _Handle) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self._gpu(handle).spec.pids]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: _Handle) -> list[Any]:
        self._gpu(handle)
        return []

    def nvmlDeviceGetPersistenceMode(self, handle: _Handle) -> int:
        self._gpu(handle)
        return 1

    def nvmlDeviceGetRemappedRows(self, handle: _Handle) -> tuple[int, int, int, int]:
        fault = self._gpu(handle).spec.fault
        return (0, int(fault.startswith("remap")), int(fault == "remap-pending"), int(fault == "remap-failed"))

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: _Handle) -> NoReturn:
        self._gpu(handle)
        _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)  # as GPUs that remap rows say

    def nvmlDeviceGetTotalEccErrors(self, handle: _Handle, kind: int, counter: int) -> int:
        return self._states[self._gpu(handle).number].uncorrected

    def nvmlDeviceGetFieldValues(self, handle: _Handle, fields: list[int]) -> list[Any]:
        gpu = self._gpu(handle)
        values = [pynvml.c_nvmlFieldValue_t() for _ in fields]
        tells = tuple(map(int, self._machine.driver.split("."))) >= _TELLS_RECOVERY
        for value, asked in zip(values, fields, strict=True):
            told = tells and asked == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
            value.nvmlReturn = pynvml.NVML_SUCCESS if told else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.value.uiVal = self._states[gpu.number].action if told else 0
        return values

    def nvmlDeviceGetGpuFabricInfoV(self, handle: _Handle, info: Any) -> int:
        self._gpu(handle)
        if self._machine.topology != "nvswitch":
            _fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        told = info._obj  # what ctypes.byref refers to
        told.state, told.status, told.cliqueId = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_SUCCESS, 1
        told.clusterUuid[:] = _CLUSTER
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetMigMode(self, handle: _Handle) -> list[int]:
        enabled = int(self._gpu(handle).spec.mig is not None)
        return [enabled, enabled]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: _Handle) -> int:
        return 0 if self._gpu(handle).spec.mig is None else 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: _Handle, index: int) -> _Handle:
        found = _Handle(handle.number, index)
        self._profile(found)
        return found

    def nvmlDeviceGetGpuInstanceId(self, handle: _Handle) -> int:
        self._profile(handle)
        return 1 + (handle.instance or 0)

    def nvmlDeviceGetComputeInstanceId(self, handle: _Handle) -> int:
        self._profile(handle)
        return 0

    def nvmlDeviceGetAttributes(self, handle: _Handle) -> Any:
        profile = self._profile(handle)
        slices = int(profile[profile.index("g.") - 1])
        compute = int(profile[0])
        return SimpleNamespace(
            gpuInstanceSliceCount=slices, computeInstanceSliceCount=compute, memorySizeMB=_mib(profile)
        )

    def nvmlDeviceGetNvLinkState(self, handle: _Handle, link: int) -> int:
        self._lane(handle, link)
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: _Handle, link: int) -> Any:
        return _pci(self._lane(handle, link))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: _Handle, link: int) -> int:
        switch = self._lane(handle, link) == SWITCH
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def _lane(self, handle: _Handle, link: int) -> str:
        lanes = self._gpu(handle).lanes
        if link >= len(lanes):
            _fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return lanes[link]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: _Handle, other: _Handle) -> int:
        ancestors: Mapping[OverPcie, int] = {
            "same-board": pynvml.NVML_TOPOLOGY_INTERNAL,
            "single-switch": pynvml.NVML_TOPOLOGY_SINGLE,
            "multi-switch": pynvml.NVML_TOPOLOGY_MULTIPLE,
            "host-bridge": pynvml.NVML_TOPOLOGY_HOSTBRIDGE,
            "same-cpu": pynvml.NVML_TOPOLOGY_NODE,
            "cross-cpu": pynvml.NVML_TOPOLOGY_SYSTEM,
        }
        return ancestors[over_pcie(self._machine, self._gpu(one), self._gpu(other))]

    def nvmlDeviceGetSupportedEventTypes(self, handle: _Handle) -> int:
        self._gpu(handle)
        return int(pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError)

    def nvmlEventSetCreate(self) -> int:
        self._listed()
        number = max(self._sets, default=0) + 1
        self._sets[number] = {}
        return number

    def nvmlDeviceRegisterEvents(self, handle: _Handle, kinds: int, events: int) -> None:
        self._sets[events][self._gpu(handle).number] = kinds

    def nvmlEventSetFree(self, events: int) -> None:
        self._sets.pop(events, None)

    def nvmlEventSetWait(self, events: int, milliseconds: int) -> Any:
        deadline = time.monotonic() + milliseconds / 1000
        with self._changed:
            while True:
                registered = self._sets[events]
                while self._events:
                    number, kind, data = self._events.popleft()
                    if registered.get(number, 0) & kind:
                        return SimpleNamespace(
                            device=_Handle(number),
                            eventType=kind,
                            eventData=data,
                            gpuInstanceId=_WHOLE,
                            computeInstanceId=_WHOLE,
                        )
                if any(number in registered and state.lost for number, state in self._states.items()):
                    _fail(pynvml.NVML_ERROR_GPU_IS_LOST)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    _fail(pynvml.NVML_ERROR_TIMEOUT)


def _fail(code: int) -> NoReturn:
    raise pynvml.NVMLError(code)  # type: ignore[no-untyped-call]


def _pci(address: str) -> Any:
    domain, bus, device = address.partition(".")[0].split(":")
    return SimpleNamespace(domain=int(domain, 16), bus=int(bus, 16), device=int(device, 16))


def _mib(profile: str) -> int:
    """A little less than its name says, as real ones have."""
    return int(profile.partition("g.")[2].partition("gb")[0]) * 985
