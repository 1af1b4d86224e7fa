"""Decides what the status of a GPUSeatProfile says, from what each node made of it.

For whoever writes it. A node's verdict is its own (`verdicts`); the status counts them and names the nodes that refuse
it, with their reasons, as many as a condition has room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crds.gpuseatprofile import MOST_GROUPS, MOST_SEATS, MOST_SHOWN, GPUSeatProfileSpec
from planning.conditions import condition
from planning.devices.seat_profiles import Configuration, SeatProfileView
from planning.devices.seats import SeatPlan

_NAMED = 5  # nodes that a condition names
_SAID = 150  # characters of each
_MESSAGE = 512  # characters of what the status says of one node


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a node made of a GPUSeatProfile. `generation`: the one it looked at; `groups` and `seats`: what it offers;
    `problems` and `waiting`: sentences, as in SeatPlan. `instead`: the older GPUSeatProfile that it follows, or ''.
    """

    node: str
    uid: str
    generation: int
    groups: int = 0
    seats: int = 0
    problems: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    instead: str = ""


def verdicts(node: str, configuration: Configuration, plan: SeatPlan) -> list[Verdict]:
    """A node's verdicts: on the GPUSeatProfile that it follows, and on those that come second there."""
    first = configuration.profile
    if first is None:
        return []
    problems = (*((configuration.problem,) if configuration.problem else ()), *plan.problems)
    mine = Verdict(node, first.uid, first.generation, len(plan.groups), len(plan.seats), problems, plan.waiting)
    others = (Verdict(node, each.uid, each.generation, instead=first.name) for each in configuration.overruled)
    return [mine, *others]


def reported(node: str, configuration: Configuration, seats: Mapping[str, Any] | None) -> list[Verdict]:
    """The same, from what the node's NodeDevices says (`status.seats`), for whoever is not that node. `configuration`:
    what `seat_profiles.chosen` makes of its labels. A node that names another source has not looked at this one yet.
    None has more groups and seats than there can be: a sum of whatever nodes say would not fit its field, and the API
    server would then take no status at all.
    """
    first, said = configuration.profile, seats if isinstance(seats, Mapping) else {}
    if first is None:
        return []
    source = str(said.get("source") or "")
    cut = source.endswith("…") and configuration.source.startswith(source[:-1])
    others = [Verdict(node, each.uid, each.generation, instead=first.name) for each in configuration.overruled]
    if not cut and source != configuration.source:
        return [Verdict(node, first.uid, 0), *others]
    generation, groups, count = (_count(said.get(key)) for key in ("generation", "groups", "seats"))
    problems, waiting = (_sentences(said.get(key)) for key in ("problems", "waiting"))
    groups, count = min(groups, MOST_GROUPS), min(count, MOST_GROUPS * MOST_SEATS)
    return [Verdict(node, first.uid, generation, groups, count, problems, waiting), *others]


def seat_status(
    view: SeatProfileView, before: Mapping[str, Any], verdicts: Iterable[Verdict], now: float
) -> dict[str, Any]:
    """The status that is due. `before`: what it shows; `verdicts`: all that nodes said, of other profiles too."""
    mine = sorted((each for each in verdicts if each.uid == view.uid), key=lambda each: each.node)
    ready, error = _told(view, mine)
    shown = sorted(mine, key=lambda each: (not _news(each), each.node))[:MOST_SHOWN]
    return {
        "observedGeneration": view.generation,
        "groups": sum(each.groups for each in mine),
        "seats": sum(each.seats for each in mine),
        "nodesServing": sum(each.seats > 0 for each in mine),
        "nodesRefused": sum(_refuses(each, view) for each in mine),
        "nodes": [_node(each) for each in shown],
        "conditions": [
            condition(before, "Ready", *ready, view.generation, now),
            condition(before, "Error", *error, view.generation, now),
        ],
    }


def _told(view: SeatProfileView, mine: Sequence[Verdict]) -> tuple[tuple[bool, str, str], tuple[bool, str, str]]:
    """What Ready and Error say: whether it is so, the reason and the message."""
    seats = sum(each.seats for each in mine)
    serving = f"Seats: {seats}, on {_nodes(sum(each.seats > 0 for each in mine))}."
    spec, invalid = GPUSeatProfileSpec.parse(view.spec)
    if spec is None:
        text = f"{invalid}. Nodes keep the configuration that they had. {serving}"
        return (False, "Invalid", text), (True, "Invalid", text)
    refusing = [each for each in mine if _refuses(each, view)]
    second = [each for each in mine if each.instead]
    if refusing:
        said = f"It, or a part of it, is refused by {_nodes(len(refusing))} of {len(mine)}. {_each(refusing)}"
        return (False, "Refused", f"{said} {serving}"), (True, "Refused", said)
    if second:
        said = f"An older GPUSeatProfile comes first on {_nodes(len(second))} of {len(mine)}. {_each(second)}"
        return (False, "Overruled", f"{said} {serving}"), (True, "Overruled", said)
    return _going_well(view, mine, serving), (False, "NothingRefused", "No node refuses anything of it.")


def _going_well(view: SeatProfileView, mine: Sequence[Verdict], serving: str) -> tuple[bool, str, str]:
    if not mine:
        text = "No node has reported it: its nodeSelector matches none, or berth does not run there as it should."
        return False, "NoNodes", text
    behind = [each for each in mine if each.generation < view.generation]
    if behind:
        names = ", ".join(each.node for each in behind[:_NAMED])
        return False, "Pending", f"Still to look at it: {_nodes(len(behind))} of {len(mine)} ({names}). {serving}"
    if late := [each for each in mine if each.waiting]:
        return (
            False,
            "Waiting",
            f"Pods that run are waited for on {_nodes(len(late))} of {len(mine)}. {_each(late)} {serving}",
        )
    return True, "Serving", serving


def _refuses(verdict: Verdict, view: SeatProfileView) -> bool:
    """What a node refused of an older generation may be mended by now."""
    return bool(verdict.problems) and verdict.generation >= view.generation


def _each(nodes: Sequence[Verdict]) -> str:
    """The first few nodes, each with what it says."""
    parts = [f"{each.node}: {_short(_news(each), _SAID)}" for each in nodes[:_NAMED]]
    more = f" And {len(nodes) - _NAMED} more." if len(nodes) > _NAMED else ""
    return " ".join(parts) + more


def _news(verdict: Verdict) -> str:
    if verdict.instead:
        return f"GPUSeatProfile {verdict.instead} is older and selects it too."
    return " ".join((*verdict.problems, *verdict.waiting))


def _node(verdict: Verdict) -> dict[str, Any]:
    told = _short(_news(verdict), _MESSAGE)
    counts = {"name": verdict.node, "groups": verdict.groups, "seats": verdict.seats}
    return {**counts, "message": told} if told else counts


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _sentences(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
