"""What other packages may build on: placement strategies of their own.

A package offers one by an entry point of the group `berth.strategies`, which names a class without arguments:

    [project.entry-points."berth.strategies"]
    quietest = "example.strategies:Quietest"

It is installed beside berth where the worker and the controller run. docs/strategies.md has a whole one.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points

from planning import strategies
from planning.model import NodeView, Resources
from planning.strategies import Candidate, Rank, Request, Strategy
from planning.strategies.outside import StrategyError

__all__ = ["Candidate", "NodeView", "Rank", "Request", "Resources", "Strategy", "load_strategies"]

GROUP = "berth.strategies"

log = logging.getLogger(__name__)


def load_strategies() -> list[str]:
    """Installs the strategies that are found beside berth; what was wrong with any, which is left out, in words.

    One that cannot be had is no reason not to start: workloads that name it are told that it is not installed.
    """
    wrong = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            strategies.install(entry.load()())
        except StrategyError as refused:
            wrong.append(f"{_source(entry)} is left out: {refused}")
        except Exception as error:  # of others' code, which may raise anything
            wrong.append(f"{_source(entry)} cannot be loaded: {type(error).__name__}: {error}")
    for problem in wrong:
        log.error("%s", problem)
    return wrong


def _source(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"placement strategy {entry.name!r} ({entry.value}){package}"
