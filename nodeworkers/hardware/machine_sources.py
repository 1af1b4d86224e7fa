"""The Sources of a simulated machine, for the watchers of its vendors: each over its own section of the machine's file,
which may be edited meanwhile, and over a tree of files of its own.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.source import Source
from planning.devices.cards import Sight, Vendor

_GLANCE = 0.25  # seconds between two glances at the file


def tree_of(tree: Path, vendor: Vendor) -> Path:
    """The folder of a vendor's files below that of the machine's."""
    return tree / vendor


def tenstorrent(file: Path, tree: Path) -> Source:
    """Tenstorrent's cards of the machine that a file describes."""
    from nodeworkers.hardware.machine import MachineFile
    from nodeworkers.hardware.machine_tenstorrent import SimulatedTenstorrent

    machine = MachineFile(file)
    return SimulatedTenstorrent(lambda: machine.machine().tenstorrent, tree_of(tree, "tenstorrent"))


def nvidia(file: Path, tree: Path) -> Source:
    """NVIDIA's GPUs of the machine that a file describes."""
    return SimulatedNvidia(file, tree_of(tree, "nvidia"))


class SimulatedNvidia:
    """NVIDIA's provider over a simulated NVML. While the file makes no sense the GPUs stay as they were, and the sight
    says so.
    """

    vendor: Vendor = "nvidia"

    def __init__(self, file: Path, tree: Path) -> None:
        from nodeworkers.hardware.machine import MachineFile
        from nodeworkers.hardware.machine_nvidia import NvidiaMachine
        from nodeworkers.hardware.machine_nvml import SimulatedNvml
        from nodeworkers.hardware.nvidia import Nvidia

        self._file = MachineFile(file)
        self._tree = tree
        self._applied: NvidiaMachine | None = None
        self._nvml = SimulatedNvml(NvidiaMachine(driver="none"))
        self._gpus = Nvidia(self._nvml, tree / "sys", tree / "dev", tree / "proc")
        self._problem = ""

    def look(self) -> Sight:
        """See Source."""
        self._follow()
        if self._applied is None:
            raise HardwareError(self._problem)
        sight = self._gpus.look()
        return replace(sight, simulated=True, problem=" ".join(filter(None, (self._problem, sight.problem))))

    def wait(self, seconds: float) -> None:
        """Also until the file says something else."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            began, glance = time.monotonic(), min(left, _GLANCE)
            self._gpus.wait(glance)
            if self._follow() or time.monotonic() - began < glance:  # or the driver has reported an error
                return

    def close(self) -> None:
        """The tree stays, for containers may hold its nodes."""
        self._gpus.close()

    def _follow(self) -> bool:
        """Makes the machine what the file says by now; whether that is news."""
        from nodeworkers.hardware.machine_nvidia import lay_out

        before = self._problem
        try:
            machine = self._file.machine().nvidia
        except HardwareError as error:
            self._problem = str(error)
            return self._problem != before
        self._problem = ""
        if machine is self._applied:
            return bool(before)
        lay_out(self._tree, machine)
        self._nvml.apply(machine)
        self._applied = machine
        return True
