"""Decides what the status of a GPUReservation says, and when it is worth a write.

For the activity that carries out a round, which shows the reservations with it, and for the metrics of rounds. How much
is in use is written at most every few seconds; that all is kept, or that it begins, at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crds.gpureservation import MOST_SHOWN
from crds.settings import Settings
from planning.capacity import Belongings
from planning.conditions import condition, conditions
from planning.filters import show_gpus
from planning.held import visible
from planning.model import Snapshot
from planning.podspecs import mappings
from planning.quota_status import PAUSE
from planning.reservations import Reservations
from planning.times import timestamp
from planning.windows import ReservationView, Window, where


@dataclass(frozen=True, slots=True)
class Standing:
    """A GPUReservation at one moment. `reserved`: the GPUs that it is sure to have; `lent`: those of them that others
    hold who can be stopped; `waiting`: workloads; `missing`: the GPUs that it lacks, once its nodes are cleared.
    `window` is None once it has ended, and where it is not valid.
    """

    view: ReservationView
    window: Window | None
    reserved: int = 0
    used: int = 0
    lent: int = 0
    waiting: int = 0
    missing: int = 0


@dataclass(frozen=True, slots=True)
class ReservationLag:
    """A GPUReservation and the status that is due. `news`: what an Event should say of it, '' if nothing."""

    view: ReservationView
    status: dict[str, Any]
    news: str


def standings(snapshot: Snapshot, recorded: Mapping[str, Mapping[str, int]], settings: Settings) -> list[Standing]:
    """All of them. `recorded`: the ledger's choice of nodes."""
    if not snapshot.reservations:
        return []
    mine = Belongings.of(snapshot.jobs, snapshot.pods)
    known = Reservations(snapshot, recorded)
    known.as_recorded(snapshot, visible(snapshot, mine, settings))
    waiting = Counter(
        window.name
        for view in snapshot.workloads
        if not view.finished
        and not view.deleting
        and (window := known.of(view)) is not None
        and all(job.preempted for job in mine.jobs.get((view.namespace, view.uid), ()))
    )
    return [_standing(view, known, waiting[view.name], snapshot.now) for view in snapshot.reservations]


def lagging_reservations(
    snapshot: Snapshot,
    recorded: Mapping[str, Mapping[str, int]],
    settings: Settings,
    known: list[Standing] | None = None,
) -> tuple[list[ReservationLag], bool]:
    """Those whose status says something else than what is and may be written now, and whether others lag too. `known`:
    how they stand, if it was reckoned already.
    """
    found, later = [], False
    for each in standings(snapshot, recorded, settings) if known is None else known:
        view, due = each.view, _status(each, snapshot.now)
        shown = {key: value for key, value in view.status.items() if key != "updated"}
        if shown == due:
            continue
        (now,) = due["conditions"]
        before = next(iter(conditions(shown)), {})
        news = any(before.get(key) != now[key] for key in ("status", "reason")) or shown.get("phase") != due["phase"]
        if news or timestamp(snapshot.now - PAUSE) >= str(view.status.get("updated", "")):
            status = {**due, "updated": timestamp(snapshot.now)}
            found.append(ReservationLag(view, status, now["message"] if news else ""))
        else:
            later = True
    return found, later


def shown_nodes(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    """The choice of nodes as the statuses tell it, for whoever cannot ask the ledger."""
    found: dict[str, dict[str, int]] = {}
    for view in snapshot.reservations:
        for each in mappings(view.status.get("nodes")):
            name, gpus = each.get("name"), each.get("gpus")
            if isinstance(name, str) and isinstance(gpus, int) and gpus > 0:
                found.setdefault(view.uid, {})[name] = gpus
    return found


def _standing(view: ReservationView, known: Reservations, waiting: int, now: float) -> Standing:
    window = known.named(view.name)
    if window is None:
        return Standing(view, None)
    used = sum(room.gpus for room in window.used.values())
    kept = known.kept_now(window)
    missing = max(0, window.gpus - kept) if now >= window.opens else 0
    return Standing(view, window, kept, used, known.lent(window), waiting, missing)


def _status(each: Standing, now: float) -> dict[str, Any]:
    view, window = each.view, each.window
    phase, holds, reason, message = _told(each, now)
    nodes = sorted(window.nodes.items()) if window is not None else []
    return {
        "observedGeneration": view.generation,
        "phase": phase,
        "reserved": each.reserved,
        "used": each.used,
        "lent": each.lent,
        "waiting": each.waiting,
        "nodes": [{"name": name, "gpus": gpus} for name, gpus in nodes[:MOST_SHOWN]],
        "conditions": [condition(view.status, "Reserved", holds, reason, message, view.generation, now)],
    }


def _told(each: Standing, now: float) -> tuple[str, bool, str, str]:
    """Phase, and the condition: whether all is kept, the reason, and one sentence."""
    window, spec = each.window, each.view.spec
    if spec is None:
        return "Pending", False, "Invalid", f"{each.view.invalid}; nothing is kept until that is mended"
    if window is None:
        text = f"it ended at {timestamp(spec.ends)}; its workloads that still run go on until others need the room"
        return "Ended", False, "Ended", text
    active = window.during(now)
    when = f"until {timestamp(window.end)}" if active else f"from {timestamp(window.start)} on"
    if each.reserved >= window.gpus:
        return "Active" if active else "Reserved", True, "Kept", f"{where(window)} {when}"
    if window.total >= window.gpus:
        rest = "the rest is in the hands of work that may not be stopped, and is kept as it comes free"
    else:
        rest = "the nodes that match its nodeSelector and can be used have no more beside other reservations"
    text = f"{each.reserved} of {show_gpus(window.gpus)} are kept {when}; {rest}"
    return "Active" if active else "Pending", False, "Short", text
