"""Strategies that others wrote: what one may return, and how a mistake of theirs is told instead of stopping placement.

For the register. Our own are not checked each time; their tests are in this repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from crds.gpuworkload import STRATEGY_PATTERN
from planning.strategies.candidates import Candidate, Rank, Request

if TYPE_CHECKING:
    from planning.strategies import Strategy

_SHOWN = 200  # characters of a foreign error


class StrategyError(Exception):
    """A strategy did not rank a node; the text says which, and what it did instead."""


class Checked:
    """A strategy from outside. Raises StrategyError where it raises, or returns what is no rank."""

    def __init__(self, strategy: Strategy) -> None:
        """Raises StrategyError if it is no strategy at all."""
        name = getattr(strategy, "name", None)
        if not isinstance(name, str) or not re.fullmatch(STRATEGY_PATTERN, name):
            raise StrategyError(f"its name is {name!r:.80}, which {STRATEGY_PATTERN} does not match")
        if not callable(getattr(strategy, "rank", None)):
            raise StrategyError("it has no method rank(request, candidate)")
        self.name = name
        self.steady = getattr(strategy, "steady", False) is True
        self._strategy = strategy
        self._length = 0

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        try:
            rank: object = self._strategy.rank(request, candidate)
        except Exception as error:  # of others' code, which may raise anything
            text = f"{type(error).__name__}: {error}"[:_SHOWN]
            raise StrategyError(f"strategy {self.name!r} failed at node {candidate.node.name}: {text}") from error
        if not isinstance(rank, tuple) or not rank or len(rank) != (self._length or len(rank)) or not _ordered(rank):
            raise StrategyError(
                f"strategy {self.name!r} ranked node {candidate.node.name} as {rank!r:.80}: a rank is a tuple of "
                "numbers, always as many"
            )
        self._length = len(rank)
        return rank


def _ordered(rank: Iterable[object]) -> bool:
    """Whether each part is a number that can be compared: not NaN."""
    return all(isinstance(part, int | float) and part == part for part in rank)
