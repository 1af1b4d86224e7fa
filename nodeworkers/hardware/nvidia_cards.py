"""Asks NVML about one GPU and its MIG instances, and makes cards and readings of the answers: for the provider of
NVIDIA's GPUs. No answer is taken for granted: what a driver or a GPU does not tell is left out.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from nodeworkers.hardware.provider import UNKNOWN, said
from planning.devices.cards import Card, Reading, Trouble

GPU_RESOURCE = "nvidia.com/gpu"
MOST_ID = 63  # characters: what the kubelet and labels take
MOST_PIDS = 4096  # of one GPU
_MIB = 1 << 20
_GIB = 1 << 30
_NO_INSTANCE = 0xFFFFFFFF  # in an event
_MOST_NUMAS, _MOST_DIGITS = 4096, 16
_MINOR = re.compile(r"[0-9]{1,7}")  # Linux has 20 bits for it
_MOST_MINORS = 1 << 20  # bytes of the file that numbers the nodes of MIG instances
_ID = re.compile(r"[^A-Za-z0-9._-]+")
_PROFILE = re.compile(r"\bMIG (?P<profile>[0-9a-z.+-]{1,40})", re.IGNORECASE)
_NOT_IN_RESOURCES = re.compile(r"[^a-z0-9.-]")
# Errors that mean no more than that this driver, GPU or process is not told.
_NOT_TOLD = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_INSUFFICIENT_SIZE",
    "NVML_ERROR_NO_DATA",
    "NVML_ERROR_NOT_READY",
    "NVML_ERROR_DEPRECATED",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_CORRUPTED_INFOROM",
    "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
)
_NEEDS_RESET, _LOST = 2, 3  # how bad an error is; any other is 1


class Asker:
    """Asks NVML about one GPU, and keeps the worst error that speaks against the GPU: `failed`, None so far."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.failed: Any = None
        self._not_told = {getattr(nvml, name) for name in _NOT_TOLD}

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; None if it fails, or if the GPU is known to be lost by now."""
        if self.lost:
            return None
        try:
            return function(*arguments)
        except self.nvml.NVMLError as error:
            if error.value not in self._not_told and self._rank(error) > self._rank(self.failed):
                self.failed = error
        except (self.nvml.NVMLLibraryMismatchError, UnicodeDecodeError):
            pass  # an older library, or text that is none: not told
        return None

    @property
    def lost(self) -> bool:
        return self._rank(self.failed) == _LOST

    @property
    def needs_reset(self) -> bool:
        return self._rank(self.failed) == _NEEDS_RESET

    def _rank(self, error: Any) -> int:
        if error is None:
            return 0
        nvml = self.nvml
        return {nvml.NVML_ERROR_GPU_IS_LOST: _LOST, nvml.NVML_ERROR_RESET_REQUIRED: _NEEDS_RESET}.get(error.value, 1)


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance: its card and NVML handle, and the numbers by which events name it (GPU and compute instance)."""

    card: Card
    handle: Any
    numbers: tuple[int | None, int | None]

    def holds(self, gpu_instance: int, compute_instance: int) -> bool:
        """Whether an event that names these is about this one; it may name the GPU instance alone, or neither."""
        gpu, compute = self.numbers
        return gpu == gpu_instance and compute_instance in (compute, _NO_INSTANCE)


@dataclass(frozen=True, slots=True)
class Condition:
    """How well a GPU says it is. `action` and `uncorrected`: the driver's recovery action and volatile count of
    uncorrected ECC errors, None where it does not tell. `told`: sentences that do not speak against using it. `fabric`:
    where it stands with the NVSwitch fabric, '' where it has none; `clique`: what part of it, `<cluster>.<number>`.
    """

    action: int | None
    uncorrected: int | None
    troubles: tuple[Trouble, ...]
    told: tuple[str, ...]
    persistence: bool | None
    fabric: str
    clique: str


def identity(uuid: object) -> str:
    """A card's id of an NVML UUID; '' if that is no text."""
    return _ID.sub("-", said(uuid))[:MOST_ID].strip("-._")


def describe(asker: Asker, handle: Any, number: int, driver: str, sys: Path, dev: Path) -> Card | None:
    """The card of a GPU, the `number`th of the driver; None if not even its UUID is told. In MIG mode its resource is
    '': only its instances can be had.
    """
    nvml, ask = asker.nvml, asker.ask
    name = identity(ask(nvml.nvmlDeviceGetUUID, handle))
    if not name:
        return None
    pci = address(ask(nvml.nvmlDeviceGetPciInfo, handle))
    minor = ask(nvml.nvmlDeviceGetMinorNumber, handle)
    capability = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = _memory(asker, handle)
    mode = ask(nvml.nvmlDeviceGetMigMode, handle)
    return Card(
        id=name,
        vendor="nvidia",
        product=said(ask(nvml.nvmlDeviceGetName, handle)) or UNKNOWN,
        resource="" if mode and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE else GPU_RESOURCE,
        index=number if minor is None else minor,
        address=pci,
        numa=_numa(sys, pci),
        memory_mib=0 if memory is None else memory.total // _MIB,
        nodes=() if minor is None else (str(dev / f"nvidia{minor}"),),
        arch="" if capability is None else str(capability[0] * 10 + capability[1]),
        driver=driver,
    )


def instances(asker: Asker, handle: Any, parent: Card, proc: Path, dev: Path) -> Iterator[Instance]:
    """The MIG instances of a GPU in MIG mode. Their `nodes` are their own, in nvidia-caps; a container needs their
    parent's beside. The capability files are numbered by the GPU's minor number.
    """
    nvml, ask = asker.nvml, asker.ask
    minors = _cap_minors(proc)
    for index in range(ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        name = "" if instance is None else identity(ask(nvml.nvmlDeviceGetUUID, instance))
        if not name:
            continue  # NVML leaves gaps where instances were removed
        gpu = ask(nvml.nvmlDeviceGetGpuInstanceId, instance)
        compute = ask(nvml.nvmlDeviceGetComputeInstanceId, instance)
        attributes = ask(nvml.nvmlDeviceGetAttributes, instance)
        product = said(ask(nvml.nvmlDeviceGetName, instance)) or parent.product
        place = f"gpu{parent.index}/gi{gpu}"
        caps = (f"{place}/access", f"{place}/ci{compute}/access")
        card = Card(
            id=name,
            vendor="nvidia",
            product=product,
            resource=_mig_resource(product, attributes, parent.memory_mib),
            index=parent.index,
            address=parent.address,
            numa=parent.numa,
            memory_mib=0 if attributes is None else attributes.memorySizeMB,
            nodes=tuple(str(dev / "nvidia-caps" / f"nvidia-cap{minors[cap]}") for cap in caps if cap in minors),
            arch=parent.arch,
            driver=parent.driver,
            parent=parent.id,
        )
        yield Instance(card, instance, (gpu, compute))


def measure(asker: Asker, handle: Any) -> Reading:
    """Temperature, power, memory in use, and who holds it, of a GPU or an instance (which tells less)."""
    nvml, ask = asker.nvml, asker.ask
    temperature = ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    memory = _memory(asker, handle)
    pids: set[int] = set()
    for processes in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        pids |= {process.pid for process in ask(processes, handle) or ()}
    return Reading(
        temperature=None if temperature is None else float(temperature),
        power=None if milliwatts is None else milliwatts / 1000,
        memory_used_mib=None if memory is None else memory.used // _MIB,
        pids=tuple(sorted(pids - {0}))[:MOST_PIDS],
    )


def examine(asker: Asker, handle: Any, temperature: float | None) -> Condition:
    """How well a GPU is, by asking it; `temperature` as measured."""
    nvml, ask = asker.nvml, asker.ask
    troubles, told = [], []
    remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle)
    if remapped is not None:
        _, _, pending, failed = remapped
        if failed:
            troubles.append(
                Trouble(
                    "RowRemapFailed",
                    "Its memory has bad rows and no spare ones to replace them. Have it replaced.",
                    True,
                )
            )
        if pending:
            told.append(
                "RemapPending: bad rows of its memory are replaced at the next reset. It can be used until then; reset "
                "it when its node is drained anyway."
            )
    if ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        told.append(
            "RetirementPending: bad pages of its memory are retired at the next reset. It can be used until then; "
            "reset it when its node is drained anyway."
        )
    limit = ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    if limit and temperature is not None and temperature >= limit:
        troubles.append(
            Trouble("Hot", f"It is so hot that it slows itself down, from {limit} °C on. Look at the node's cooling.")
        )
    persistence = ask(nvml.nvmlDeviceGetPersistenceMode, handle)
    fabric, clique = _fabric(asker, handle)
    return Condition(
        action=_recovery_action(asker, handle),
        uncorrected=ask(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        troubles=tuple(troubles),
        told=tuple(told),
        persistence=None if persistence is None else bool(persistence),
        fabric=fabric,
        clique=clique,
    )


def _recovery_action(asker: Asker, handle: Any) -> int | None:
    """What the driver wants done about a GPU, NVML_GPU_RECOVERY_ACTION_*; drivers before 565 do not say."""
    nvml = asker.nvml
    values = asker.ask(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _fabric(asker: Asker, handle: Any) -> tuple[str, str]:
    nvml = asker.nvml
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if asker.ask(nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None:
        return "", ""
    state = {
        nvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
        nvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
        nvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
    }.get(info.state, "")
    if state == "completed" and info.status != nvml.NVML_SUCCESS:
        return "failed", ""
    cluster = bytes(info.clusterUuid)
    clique = f"{UUID(bytes=cluster)}.{info.cliqueId}" if state == "completed" and any(cluster) else ""
    return state, clique


def address(pci: Any) -> str:
    """A PCI address as the kernel writes it, `0000:3b:00.0`; '' of None."""
    return "" if pci is None else f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _memory(asker: Asker, handle: Any) -> Any:
    """`total` and `used` in bytes. The second version does not count what the driver keeps for itself as used; drivers
    before 510 have the first alone.
    """
    function = asker.nvml.nvmlDeviceGetMemoryInfo
    return asker.ask(function, handle, asker.nvml.nvmlMemory_v2) or asker.ask(function, handle)


def _numa(sys: Path, pci: str) -> int | None:
    """The NUMA node of a PCI device. The kernel says -1 where there are none, which would be a wrong affinity."""
    if not pci:
        return None
    try:
        with (sys / "bus/pci/devices" / pci / "numa_node").open("rb") as file:
            node = int(file.read(_MOST_DIGITS))
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MOST_NUMAS else None


def _cap_minors(proc: Path) -> dict[str, int]:
    """What the driver writes into mig-minors: `gpu0/gi1/ci0/access 13`."""
    try:
        with (proc / "driver/nvidia-caps/mig-minors").open("rb") as file:
            lines = file.read(_MOST_MINORS).decode("ascii", "replace").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {each[0]: int(each[1]) for each in words if len(each) == 2 and _MINOR.fullmatch(each[1])}


def _mig_resource(product: str, attributes: Any, parent_mib: int) -> str:
    """`nvidia.com/mig-1g.10gb`, as NVIDIA's device plugin names it under its strategy "mixed": by the profile at the
    end of the instance's name, or, where an older driver leaves that out, by its slices.

    Source: go-nvlib, pkg/nvlib/device/mig_profile.go; a `+` cannot stand in a resource's name and becomes a dot.
    """
    found = _PROFILE.search(product)
    if found is not None:
        profile = found["profile"].lower()
    elif attributes is not None:
        slices, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
        part = f"{compute}c." if compute != slices else ""
        profile = f"{part}{slices}g.{_mig_gigabytes(attributes.memorySizeMB, parent_mib)}gb"
    else:
        return ""
    return f"nvidia.com/mig-{_NOT_IN_RESOURCES.sub('', profile.replace('+', '.'))}"


def _mig_gigabytes(mib: int, parent_mib: int) -> int:
    """The memory in a profile's name: the GPU's, in whole GiB, times the share in eighths, both rounded up."""
    if not parent_mib:
        return round(mib / 1024)
    eighths = -(-8 * mib // parent_mib)
    return round(eighths / 8 * -(-parent_mib * _MIB // _GIB))
