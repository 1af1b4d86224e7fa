"""In which order those who wait for a place are tried: by age as berth does, or the shortest run first.

For simulations. How long a run will take is learned from those that ended before, as berth learns it; or it is known,
which it never is: that bounds what learning may bring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from planning.durations import Durations
from planning.filters import Shape
from planning.model import Resources
from planning.profiles import Gpus, Mark, Profile, Run, fold

# Estimates are made anew after so many seconds, if anything ended since.
PAUSE = 300.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that comes at a moment (`at`, seconds) and runs for `seconds` once it has a place.

    `ran`: the seconds that it ran before the simulation began.
    """

    name: str
    tenant: str
    shape: Shape
    at: float
    seconds: float
    ran: float = 0.0

    @property
    def gpu_milli(self) -> int:
        need = self.shape.requests
        return need.gpus * need.gpu_milli


class Order(Protocol):
    """Ranks whoever begins to wait, for good; the lowest goes first, and among equals the oldest."""

    def rank(self, waiting: Submission, now: float) -> float: ...

    def ended(self, run: Submission, now: float) -> None:
        """It ended now: all that may be learned from."""
        ...


class Fifo:
    """By age: berth's order within a tenant and a priority."""

    def rank(self, waiting: Submission, now: float) -> float:
        return 0.0

    def ended(self, run: Submission, now: float) -> None:
        pass


class Oracle(Fifo):
    """The shortest first, as if everybody said truly how long they will run."""

    def rank(self, waiting: Submission, now: float) -> float:
        return waiting.seconds


class Learned:
    """The one first that is expected to take the shortest, by the runs of its kind that have ended: their median.

    A kind is what a run asks for, in the place of a model's name, which traces do not have, and its tenant.
    """

    def __init__(self) -> None:
        self._profiles: dict[tuple[str, str], Profile] = {}
        self._ended: list[Run] = []
        self._count = 0
        self._durations = Durations((), 0.0)
        self._made = -PAUSE

    def rank(self, waiting: Submission, now: float) -> float:
        if self._ended and now >= self._made + PAUSE:
            self._durations, self._made = Durations(self.profiles(), now), now
        need = waiting.shape.requests
        known = self._durations.run_time(waiting.tenant, model(need), Gpus(need.gpus))
        return known.seconds if known is not None else 0.0

    def ended(self, run: Submission, now: float) -> None:
        self._count += 1
        need = run.shape.requests
        # Ends are numbered, so that each is later than all before it, also within a second.
        mark = Mark(int(now), f"{self._count:012}")
        self._ended.append(
            Run(mark, run.tenant, model(need), need.gpus, run.at, True, "", 0, run.ran + run.seconds)
        )  # fmt: skip

    def profiles(self) -> list[Profile]:
        """What is known of each kind."""
        news: dict[tuple[str, str], list[Run]] = {}
        for run in self._ended:
            news.setdefault((run.namespace, run.model), []).append(run)
        self._ended.clear()
        for key, runs in news.items():
            self._profiles[key] = fold(self._profiles.get(key) or Profile(*key), runs)
        return list(self._profiles.values())


ORDERS: dict[str, Callable[[], Order]] = {"fifo": Fifo, "learned": Learned, "oracle": Oracle}


def model(need: Resources) -> str:
    """What stands for a model's name: requests of one model are mostly alike, and others are mostly not."""
    return f"{need.gpus}x{need.gpu_milli}-{need.cpu_milli}m-{need.memory >> 20}Mi"
