"""What the helper needs of a GPU driver: the calls by which a process's memory leaves its GPUs and comes back, and who
has how much memory on which card. The seam between what is done (`phases.py`) and who does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

RUNNING, LOCKED, CHECKPOINTED, FAILED = "RUNNING", "LOCKED", "CHECKPOINTED", "FAILED"
"""States of a process, as CUDA's driver has them. There are drivers with more: what is none of these is on its way."""


class DriverError(Exception):
    """A call ended with an error. `code` is the driver's name for it; `timed_out`: a lock's time was over, and the
    process goes on.
    """

    def __init__(self, code: str, *, timed_out: bool = False) -> None:
        super().__init__(code)
        self.code, self.timed_out = code, timed_out


@dataclass(frozen=True, slots=True)
class CardMemory:
    """A GPU's memory in bytes; `holders`: by pid, of the processes that have some of it."""

    free: int
    total: int
    holders: Mapping[int, int] = field(default_factory=dict)


class Driver(Protocol):
    """Calls that may take long, and are never broken off. Pids are those of the host. All raise DriverError."""

    def version(self) -> str:
        """Such as 580.65.06."""

    def devices(self) -> Sequence[str]:
        """UUIDs of all GPUs that the driver shows, in its order."""

    def state(self, pid: int) -> str | None:
        """The process's; None for one that has nothing to do with GPUs, or is gone."""

    def lock(self, pid: int, seconds: float) -> None:
        """Lets what was submitted end, and no further call begin."""

    def checkpoint(self, pid: int) -> None:
        """Moves its memory into the host's."""

    def restore(self, pid: int, devices: Mapping[str, str]) -> None:
        """Moves it back, to other GPUs where `devices` (UUID before -> UUID after, of all GPUs) is not empty."""

    def unlock(self, pid: int) -> None:
        """Lets its calls go on."""

    def memory(self, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        """Of these cards."""
