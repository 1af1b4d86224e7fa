"""NVIDIA GPUs that are not there: the `nvidia:` section of a simulated machine's YAML file, what it says of each GPU,
and the files that a driver would put beside. `machine_nvml` serves the rest.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

MOST_GPUS = 128  # their pairs have to fit into a line of the watcher
MOST_NVLINKS = 36  # of one GPU: NVML_NVLINK_MAX_LINKS
SWITCH = "0000:f0:00.0"  # the NVSwitch, as one
_PAIR_LANES, _SWITCH_LANES = 4, 18
_NULL = os.makedev(1, 3)
_SHARED_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
# Product -> name, compute capability, MiB.
PRODUCTS: dict[str, tuple[str, tuple[int, int], int]] = {
    "T4": ("Tesla T4", (7, 5), 15_360),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 81_920),
    "L4": ("NVIDIA L4", (8, 9), 23_034),
    "L40S": ("NVIDIA L40S", (8, 9), 46_068),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 81_559),
    "H200": ("NVIDIA H200", (9, 0), 143_771),
    "B200": ("NVIDIA B200", (10, 0), 183_359),
}
Product = Literal["T4", "A100", "L4", "L40S", "H100", "H200", "B200"]
Profile = Annotated[str, Field(pattern=r"^([1-7]c\.)?[1-7]g\.[1-9][0-9]{0,2}gb(\+[a-z]{2,4})?$")]
Pid = Annotated[int, Field(ge=1, le=2**22)]
FAULTS = r"^(none|hang|lost|gone|ecc|hot|remap-pending|remap-failed|crash|xid:[1-9][0-9]{0,3})$"
OverPcie = Literal["same-board", "single-switch", "multi-switch", "host-bridge", "same-cpu", "cross-cpu"]


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class Gpus(_Model):
    """So many GPUs that are alike. `mig`: the profiles of the instances of each; [] is MIG mode without one."""

    product: Product = "H100"
    count: int = Field(default=1, ge=1, le=MOST_GPUS)
    numa: int | None = Field(default=None, ge=0, le=63)
    mig: list[Profile] | None = Field(default=None, max_length=7)
    fault: str = Field(default="none", pattern=FAULTS)
    pids: list[Pid] = Field(default=[], max_length=64)


class Wire(_Model):
    """How two GPUs are connected, by their numbers: so many NVLinks, or a connection over PCIe."""

    a: int = Field(ge=0, lt=MOST_GPUS)
    b: int = Field(ge=0, lt=MOST_GPUS)
    nvlinks: int = Field(default=0, ge=0, le=MOST_NVLINKS)
    connection: OverPcie = "same-cpu"


class NvidiaMachine(_Model):
    """A machine's GPUs, numbered from 0 in the order of `gpus`. The first half of them stands on NUMA node 0 and the
    others on 1, where they do not say. `topology`: a preset, or what differs from pcie-2-sockets. `driver`: none is a
    machine without one.
    """

    gpus: list[Gpus] = Field(default=[], max_length=MOST_GPUS)
    topology: Literal["nvlink-pairs", "nvswitch", "pcie-2-sockets"] | list[Wire] = "pcie-2-sockets"
    driver: str = Field(default="590.44.01", pattern=r"^(none|[0-9]{3}(\.[0-9]{1,3}){1,2})$")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        count = sum(each.count for each in self.gpus)
        if count > MOST_GPUS:
            raise ValueError(f"{count} GPUs; a machine has at most {MOST_GPUS}")
        for wire in self.topology if isinstance(self.topology, list) else ():
            if wire.a == wire.b or max(wire.a, wire.b) >= count:
                raise ValueError(f"topology connects GPU {wire.a} with {wire.b}; there are {count}, numbered from 0")
        return self


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """One GPU of a machine. `lanes`: where each of its NVLinks leads, a PCI address."""

    number: int
    spec: Gpus
    numa: int
    lanes: tuple[str, ...]

    @property
    def uuid(self) -> str:
        """5170: it is simulated."""
        return f"GPU-5170{self.number:04x}-0000-4000-8000-{self.number:012x}"

    @property
    def address(self) -> str:
        return _address(self.number)


def simulated_gpus(machine: NvidiaMachine) -> dict[int, SimulatedGpu]:
    """The GPUs that are there, by number; none without a driver."""
    if machine.driver == "none":
        return {}
    specs = [each for each in machine.gpus for _ in range(each.count)]
    return {
        number: SimulatedGpu(
            number,
            spec,
            int(2 * number >= len(specs)) if spec.numa is None else spec.numa,
            _lanes(machine, number, len(specs)),
        )
        for number, spec in enumerate(specs)
        if spec.fault != "gone"
    }


def over_pcie(machine: NvidiaMachine, one: SimulatedGpu, other: SimulatedGpu) -> OverPcie:
    """How two GPUs are connected, NVLinks aside."""
    if isinstance(machine.topology, list):
        for wire in machine.topology:
            if {wire.a, wire.b} == {one.number, other.number}:
                return wire.connection
    if one.numa != other.numa:
        return "cross-cpu"
    return "single-switch" if one.number // 2 == other.number // 2 else "same-cpu"


def lay_out(folder: Path, machine: NvidiaMachine) -> None:
    """What the driver puts into `folder`/dev, sys and proc, made to agree with the machine. Device nodes are those of
    /dev/null where this process may make nodes, and plain files elsewhere.
    """
    dev, devices, driver = folder / "dev", folder / "sys/bus/pci/devices", folder / "sys/bus/pci/drivers/nvidia"
    gpus = simulated_gpus(machine).values()
    caps = [
        f"gpu{gpu.number}/gi{1 + index}{part}/access"
        for gpu in gpus
        for index in range(len(gpu.spec.mig or ()))
        for part in ("", "/ci0")
    ]
    nodes = {dev / name for name in _SHARED_NODES} if gpus else set()
    nodes |= {dev / f"nvidia{gpu.number}" for gpu in gpus}
    nodes |= {dev / f"nvidia-caps/nvidia-cap{minor}" for minor, _ in enumerate(caps, 3)}
    for node in {
        *dev.glob("nvidia[0-9]*"),
        *dev.glob("nvidia-caps/*"),
        *(dev / name for name in _SHARED_NODES),
    } - nodes:
        node.unlink(missing_ok=True)
    for node in nodes:
        _node(node)
    for gpu in gpus:
        _write(devices / gpu.address / "numa_node", f"{gpu.numa}\n")
        _write(driver / gpu.address, "")
    for entry in set(driver.glob("*")) - {driver / gpu.address for gpu in gpus}:
        entry.unlink()
    _write(folder / "proc/driver/nvidia-caps/mig-minors", "".join(f"{cap} {n}\n" for n, cap in enumerate(caps, 3)))


def _lanes(machine: NvidiaMachine, number: int, count: int) -> tuple[str, ...]:
    match machine.topology:
        case "pcie-2-sockets":
            return ()
        case "nvswitch":
            return (SWITCH,) * _SWITCH_LANES
        case "nvlink-pairs":
            return (_address(number ^ 1),) * _PAIR_LANES if number ^ 1 < count else ()
        case wires:
            ends = [({wire.a, wire.b} - {number}, wire.nvlinks) for wire in wires if number in (wire.a, wire.b)]
            lanes = [_address(end) for others, nvlinks in ends for end in others for _ in range(nvlinks)]
            return tuple(lanes[:MOST_NVLINKS])


def _address(number: int) -> str:
    return f"{number // 128:04x}:{0x10 + number % 128:02x}:00.0"


def _node(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, _NULL)
        path.chmod(0o666)  # whatever the umask
    except PermissionError:
        path.touch()


def _write(path: Path, text: str) -> None:
    """So that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
