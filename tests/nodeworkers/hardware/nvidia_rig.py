"""For tests: a simulated machine with NVIDIA GPUs, the provider that looks at it, and an NVML that fails on command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from nodeworkers.hardware.machine_nvidia import NvidiaMachine, lay_out
from nodeworkers.hardware.machine_nvml import SimulatedNvml
from nodeworkers.hardware.nvidia import Nvidia


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Failing:
    """A simulated NVML of which some functions raise an error: (name, GPU number) -> code. The number is None for all
    GPUs, and for functions that are about none. `calls`: the names of those called.
    """

    def __init__(self, nvml: SimulatedNvml, failing: Mapping[tuple[str, int | None], int] | None = None) -> None:
        self._nvml = nvml
        self.failing = dict(failing or {})
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        if not name.startswith("nvml") or not callable(value):
            return value

        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            about = arguments[0] if arguments else None
            number = about if name == "nvmlDeviceGetHandleByIndex" else getattr(about, "number", None)
            for key in ((name, number), (name, None)):
                if key in self.failing:
                    raise pynvml.NVMLError(self.failing[key])  # type: ignore[no-untyped-call]
            return value(*arguments)

        return called


class Rig:
    """`machine`: the `nvidia:` section of a simulated machine, as YAML has it."""

    def __init__(self, folder: Path, machine: Mapping[str, Any]) -> None:
        self.folder = folder
        self.clock = Clock()
        self.simulated = SimulatedNvml(NvidiaMachine.model_validate(machine))
        self.nvml = Failing(self.simulated)
        self.change(machine)
        self.source = self.provider()

    def provider(self) -> Nvidia:
        """Another, as after a restart of the watcher."""
        return Nvidia(self.nvml, self.folder / "sys", self.folder / "dev", self.folder / "proc", self.clock)

    def change(self, machine: Mapping[str, Any]) -> None:
        """The machine is another now."""
        read = NvidiaMachine.model_validate(machine)
        lay_out(self.folder, read)
        self.simulated.apply(read)


def uuid(number: int) -> str:
    """Of a simulated GPU."""
    return f"GPU-5170{number:04x}-0000-4000-8000-{number:012x}"


def gpus(*faults: str, **more: Any) -> dict[str, Any]:
    """The `nvidia:` section of a machine with one H100 for each fault."""
    return {"gpus": [{"product": "H100", "fault": fault} for fault in faults], **more}
