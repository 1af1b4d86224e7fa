"""The rules by which seats come before each other, and the register of them all.

A new rule is one new file and one line in the register below. What all rules have in common (residency, patience, who
is idle, who is pinned) is in `planning/seats/choosing.py`; a rule says only who comes first.
"""

from __future__ import annotations

from planning.seats.rules.fair import FairSlices
from planning.seats.rules.on_demand import OnDemand
from planning.seats.rules.priority import Priority
from planning.seats.rules.rule import Moment, Rule
from planning.seats.rules.schedule import Schedule

_INSTALLED: dict[str, Rule] = {rule.name: rule for rule in (OnDemand(), Priority(), FairSlices(), Schedule())}


def installed() -> tuple[str, ...]:
    """The names of the rules, the default first."""
    return tuple(_INSTALLED)


def rule_of(name: str) -> Rule | None:
    """The rule of that name; an unknown one is never replaced by another."""
    return _INSTALLED.get(name)


__all__ = ["Moment", "Rule", "installed", "rule_of"]
