"""How a node is chosen among those that fit: the interface of a placement strategy and the register of them all.

A new strategy is one new file and one line in `_INSTALLED`. Strategies see only candidates that hold the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from planning.strategies.candidates import Candidate, Request
from planning.strategies.cost_optimized import CostOptimized
from planning.strategies.least_loaded import LeastLoaded
from planning.strategies.random import Random


class Strategy(Protocol):
    """Chooses a node. Pure: the same request, candidates and seed give the same node, in whatever order they come."""

    @property
    def name(self) -> str: ...

    def choose(self, request: Request, candidates: Sequence[Candidate], seed: int) -> str:
        """The chosen node's name. `candidates` is never empty and holds each node once."""
        ...


_INSTALLED: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        LeastLoaded(),
        Random(),
        CostOptimized(),
    )
}


def installed() -> tuple[str, ...]:
    """The names of the installed strategies, sorted."""
    return tuple(sorted(_INSTALLED))


def find(name: str) -> Strategy | None:
    """The strategy of that name, or None: an unknown one is never replaced by another."""
    return _INSTALLED.get(name)


__all__ = ["Candidate", "Request", "Strategy", "find", "installed"]
