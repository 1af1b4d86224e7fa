"""What a run does with its GPUs, from samples of its pods: how many are in use, their memory, engines and power.

For samplers (NVML's, or a simulated one) and profiles. A run's samples are summed up as they come, so that what is kept
of a run does not grow with its length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from crds.gpuworkload import GPUWorkloadSpec
from planning.decay import Weights, quantile
from planning.podspecs import mapping, mappings, text

SIMULATED_USAGE = "SIMULATED_USAGE"  # the environment variable that says what a simulated run does with its GPUs

# A GPU is in use in a sample if its engine was active for this share of the time, in percent.
IN_USE = 1.0
# Samples that a run must have before it counts: a few moments, perhaps of its start, tell nothing of a run.
ENOUGH_SAMPLES = 3
ENGINE_STEP = 5  # percent
POWER_STEP = 25  # watts
MOST_MEMORY = 2**21  # MiB of one GPU, and so on: what is beyond is no measurement
MOST_POWER = 10_000


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment: engine active (percent of the time, as DCGM's GR_ENGINE_ACTIVE), memory in use, power."""

    engine: float
    memory_mib: int
    power_watts: float


@dataclass(frozen=True, slots=True)
class PodSample:
    """All GPUs of a pod at one moment. `simulated`: nobody measured this."""

    namespace: str
    workload_uid: str
    gpus: tuple[GpuSample, ...]
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What is kept of a run's samples.

    active_gpus: most GPUs in use at once. peak_memory_mib: the most of any one GPU. engine, power: how often which
    value was seen on GPUs in use, in steps.
    """

    samples: int = 0
    active_gpus: int = 0
    peak_memory_mib: int = 0
    engine: Weights = field(default_factory=dict)
    power: Weights = field(default_factory=dict)
    simulated: bool = False

    @property
    def tells(self) -> bool:
        return self.samples >= ENOUGH_SAMPLES

    @property
    def engine_p95(self) -> int:
        """Percent, rounded up to a step; 0 if no GPU was in use."""
        return int(quantile(self.engine, 0.95, float)) * ENGINE_STEP if self.engine else 0

    @property
    def power_p95(self) -> int:
        """Watts, rounded up to a step."""
        return int(quantile(self.power, 0.95, float)) * POWER_STEP if self.power else 0


def observed(usage: Usage, sample: PodSample) -> Usage:
    """The usage with one more sample. Values that no GPU can have are cut to those that it can."""
    gpus = [_possible(gpu) for gpu in sample.gpus]
    used = [gpu for gpu in gpus if gpu.engine >= IN_USE]
    return Usage(
        samples=usage.samples + 1,
        active_gpus=max(usage.active_gpus, len(used)),
        peak_memory_mib=max([usage.peak_memory_mib, *(gpu.memory_mib for gpu in gpus)]),
        engine=_counted(usage.engine, (math.ceil(gpu.engine / ENGINE_STEP) for gpu in used)),
        power=_counted(usage.power, (math.ceil(gpu.power_watts / POWER_STEP) for gpu in used)),
        simulated=usage.simulated or sample.simulated,
    )


def simulated_usage(spec: GPUWorkloadSpec) -> str:
    """What SIMULATED_USAGE says in the first container that has it; '' if none has."""
    if spec.template is None:
        return next((item.value or "" for item in spec.env or () if item.name == SIMULATED_USAGE), "")
    for container in mappings(mapping(spec.template.get("spec")).get("containers")):
        for item in mappings(container.get("env")):
            if item.get("name") == SIMULATED_USAGE:
                return text(item.get("value"))
    return ""


_PARTS: Mapping[str, tuple[str, int]] = {
    "gpus": ("GPUs in use", 64),
    "engine": ("percent", 100),
    "memory": ("MiB", MOST_MEMORY),
    "power": ("watts", MOST_POWER),
}


def parse_simulated(given: str, gpus: int) -> tuple[GpuSample, ...]:
    """The GPUs of a pod as `gpus=1,engine=80,memory=20000,power=300` says it: of so many that are in use, engine in
    percent, memory in MiB, power in watts; the others idle. What is left out is 0, but for gpus: all.

    ValueError: what is wrong, for a person.
    """
    said = {"gpus": gpus, "engine": 0, "memory": 0, "power": 0}
    for part in given.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in _PARTS or not equals:
            raise ValueError(f"{part.strip()[:64]!r} is none of {', '.join(f'{key}=N' for key in _PARTS)}")
        unit, most = _PARTS[name]
        if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) > most:
            raise ValueError(f"{name} must be a whole number from 0 to {most} ({unit}), not {value[:64]!r}")
        said[name] = int(value)
    busy = GpuSample(float(said["engine"]), said["memory"], float(said["power"]))
    in_use = min(said["gpus"], gpus)
    return (busy,) * in_use + (GpuSample(0.0, 0, 0.0),) * (gpus - in_use)


def _possible(gpu: GpuSample) -> GpuSample:
    def within(value: float, most: float) -> float:
        return min(max(value, 0.0), most) if math.isfinite(value) else 0.0

    return GpuSample(
        within(gpu.engine, 100.0), int(within(gpu.memory_mib, MOST_MEMORY)), within(gpu.power_watts, MOST_POWER)
    )


def _counted(known: Weights, steps: Iterable[int]) -> dict[int, int]:
    found = dict(known)
    for step in steps:
        found[step] = found.get(step, 0) + 1
    return found
