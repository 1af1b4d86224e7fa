"""What is measured of a side, alike for both: the time it took, and what its processes used meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from berth.demo import measure

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Outcome:
    """`wall`: seconds from the first workload's creation (the peer: its own start) until all have ended.

    `admission`: mean seconds from creation to admission by class. `writes`: the API server's, by verb and resource.
    `cpu` seconds and highest resident `memory` (bytes) by process; `durable_memory`: the most that those which decide
    and remember held at one moment. `evictions`: how often a workload lost its place again.
    """

    workloads: int
    wall: float
    admission: Mapping[str, float]
    writes: Mapping[str, int]
    cpu: Mapping[str, float]
    memory: Mapping[str, int]
    durable_memory: int
    evictions: int = 0

    @property
    def per_second(self) -> float:
        return self.workloads / self.wall


@dataclass
class Usage:
    """CPU and memory of the processes that `find` names now (name → process id), sampled every second by `run`.

    What a process used before it was first found does not count. `deciding`: the names whose memory is added up.
    """

    find: Callable[[], Mapping[str, int]]
    deciding: frozenset[str]
    cpu: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    together: int = 0
    _before: dict[int, float] = field(default_factory=dict)

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(1.0)

    def sample(self) -> None:
        resident: dict[str, int] = {}
        for name, pid in self.find().items():
            with suppress(OSError, IndexError):  # it has just ended
                used = measure.cpu_seconds(pid)
                self.cpu[name] = round(used - self._before.setdefault(pid, used), 2)
                resident[name] = int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * _PAGE
                self.memory[name] = max(self.memory.get(name, 0), resident[name])
        self.together = max(self.together, sum(held for name, held in resident.items() if name in self.deciding))
