"""The Sources of a simulated machine, for the watchers of its vendors: each over its own section of the machine's file,
which may be edited meanwhile, and over a tree of files of its own.
"""

from __future__ import annotations

from pathlib import Path

from nodeworkers.hardware.source import Source
from planning.devices.cards import Vendor


def tree_of(tree: Path, vendor: Vendor) -> Path:
    """The folder of a vendor's files below that of the machine's."""
    return tree / vendor


def tenstorrent(file: Path, tree: Path) -> Source:
    """Tenstorrent's cards of the machine that a file describes."""
    from nodeworkers.hardware.machine_tenstorrent import simulated

    return simulated(file, tree_of(tree, "tenstorrent"))


def nvidia(file: Path, tree: Path) -> Source:
    """NVIDIA's GPUs of the machine that a file describes: its provider over a simulated NVML."""
    from nodeworkers.hardware.machine import read
    from nodeworkers.hardware.machine_nvidia import NvidiaMachine, lay_out
    from nodeworkers.hardware.machine_nvml import SimulatedNvml
    from nodeworkers.hardware.nvidia import Nvidia
    from nodeworkers.hardware.simulating import Simulated

    folder = tree_of(tree, "nvidia")
    nvml = SimulatedNvml(NvidiaMachine(driver="none"))

    def apply(file: Path) -> None:
        machine = read(file).nvidia
        lay_out(folder, machine)
        nvml.apply(machine)

    gpus = Nvidia(nvml, folder / "sys", folder / "dev", folder / "proc")
    return Simulated(gpus, file, apply, lambda: None)
