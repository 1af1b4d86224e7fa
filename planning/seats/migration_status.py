"""What a SeatMigration says of itself, and Events of both pods: for people who follow a move. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from crds.seatmigration import ENDED, MOST_STEPS, Phase, SeatMigrationStatus
from planning.conditions import condition
from planning.devices.report import cut
from planning.podspecs import mapping, mappings, text
from planning.seats.migration import Move, SeatAt
from planning.times import seconds, timestamp


@dataclass(frozen=True, slots=True)
class Told:
    """Where a SeatMigration stands: `seat` is the new server's, once it has one; `reason` a word."""

    phase: Phase
    reason: str
    message: str
    move: Move | None = None
    seat: SeatAt | None = None


def status(raw: Mapping[str, Any], told: Told, now: float) -> dict[str, Any]:
    """The status, as a merge patch of what the object shows now: steps that were taken stay."""
    before = mapping(raw.get("status"))
    generation = mapping(raw.get("metadata")).get("generation")
    observed = max(0, generation) if isinstance(generation, int) else 0
    steps = [
        {"name": text(each.get("name")), "at": text(each.get("at"))}
        for each in mappings(before.get("steps"))
        if text(each.get("name")) in get_args(Phase) and seconds(each.get("at")) is not None
    ]
    if told.phase not in {each["name"] for each in steps}:
        steps = [*steps, {"name": told.phase, "at": timestamp(now)}][-MOST_STEPS:]
    ended = told.phase in ENDED
    holds = told.phase == "Completed" if ended else None
    body: dict[str, Any] = {
        "observedGeneration": observed,
        "phase": told.phase,
        "reason": cut(told.reason, 128),
        "message": cut(told.message, 1024),
        "steps": steps,
        "conditions": [condition(before, "Completed", holds, told.reason, told.message, observed, now)],
    }
    if told.move is not None:
        body["source"] = _place(told.move.node, told.move.group, told.move.seat, told.move.pod)
        there = told.seat or _shown(before, told.move)
        body["destination"] = _place(told.move.to_node, there.group, there.seat, told.move.replacement)
    if ended:
        body["finished"] = timestamp(now)
    return SeatMigrationStatus.model_validate(body).model_dump(by_alias=True, exclude_none=True)


def _shown(before: Mapping[str, Any], move: Move) -> SeatAt:
    """What is shown already of the new server's seat: it is only said again."""
    shown = mapping(before.get("destination"))
    return SeatAt(move.to_node, text(shown.get("group")) or move.to_group, text(shown.get("seat")))


def _place(node: str, group: str, seat: str, pod: str) -> dict[str, str]:
    found = {"node": node, "group": group, "seat": seat, "pod": pod}
    return {key: cut(value, 253 if key in ("node", "pod") else 128) for key, value in found.items() if value}
