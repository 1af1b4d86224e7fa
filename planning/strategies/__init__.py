"""How a node is chosen among those that fit: the interface of a placement strategy and the register of them all.

A new strategy is one new file and one line in the register below, or comes from another package (`berth.extensions`).
Strategies see only candidates that hold the request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from planning.strategies.best_fit import BestFit
from planning.strategies.candidates import Candidate, Rank, Request
from planning.strategies.cost_optimized import CostOptimized
from planning.strategies.fgd import FGD
from planning.strategies.headroom import Headroom
from planning.strategies.least_loaded import LeastLoaded
from planning.strategies.most_allocated import MostAllocated
from planning.strategies.outside import Checked, StrategyError
from planning.strategies.random import Random
from planning.typical import Typical


class Strategy(Protocol):
    """Ranks nodes, one at a time. Pure: the rank depends on the arguments alone, so that it can be kept until they
    change; `steady` says that of the request only what it asks for matters, and its constraints.
    """

    @property
    def name(self) -> str: ...

    @property
    def steady(self) -> bool: ...

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        """The lowest rank gets the request; among equals the first name does, and the fullest GPU."""
        ...


_INSTALLED: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        LeastLoaded(),
        Random(),
        CostOptimized(),
        MostAllocated(),
        BestFit(),
    )
}
# Those that look ahead: one of each for a set of typical requests, so that what it found out about nodes goes on to
# serve until the set changes.
_informed: dict[str, Callable[[tuple[Typical, ...]], Strategy]] = {
    FGD.name: lru_cache(maxsize=1)(FGD),
    Headroom.name: lru_cache(maxsize=1)(Headroom),
}


def installed() -> tuple[str, ...]:
    """The names of the installed strategies, sorted."""
    return tuple(sorted({*_INSTALLED, *_informed}))


def install(strategy: Strategy) -> None:
    """Adds a strategy from outside, for good. Raises StrategyError if it is none, or its name is taken."""
    checked = Checked(strategy)
    if checked.name in installed():
        raise StrategyError(f"the name {checked.name!r} is taken")
    _INSTALLED[checked.name] = checked


def informed(name: str, typical: Callable[[], tuple[Typical, ...]]) -> Strategy:
    """The installed strategy of that name; one that looks ahead knows what is typically asked for.

    KeyError: none has that name. An unknown one is never replaced by another.
    """
    looks_ahead = _informed.get(name)
    return looks_ahead(typical()) if looks_ahead else _INSTALLED[name]


__all__ = ["Candidate", "Rank", "Request", "Strategy", "StrategyError", "informed", "install", "installed"]
