"""Decides what the status of a kernel cache says of all its nodes together, and when it is worth a write.

For the look of a cache's workflow, which writes it. What nodes answered comes from the workflow; pods come and go
without it, and are counted from what nodes show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crds.kernelcache import MOST_SHOWN
from planning.caches.model import CacheView
from planning.caches.rollout import Member, Rollout
from planning.caches.trust import REFUSALS
from planning.conditions import condition, conditions
from planning.times import seconds

PAUSE = 2.0  # seconds between two writes while a rollout goes on
_NAMED = 3  # nodes in a message
_WORSE = {"failed": 0, "retrying": 1, "busy": 2, "incompatible": 3}
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_TRUST = ("Verified", "VerificationDisabled", "ValidationSkipped", "UnsignedAllowed")

Fact = tuple[bool | None, str, str]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a cache stands. `trouble`: reason and sentence why it cannot go on at all, such as a reference that cannot be
    resolved; `pods`: how many have it mounted; `queued`: nodes are told nothing until other caches have had their turn.
    """

    view: CacheView
    rollout: Rollout
    selected: Mapping[str, bool]
    pods: int = 0
    trouble: tuple[str, str] | None = None
    queued: bool = False


def cache_status(standing: Standing, now: float) -> dict[str, Any]:
    """The status as it is due, without `updated`."""
    view, aim = standing.view, standing.rollout.aim
    counts = _counts(standing)
    facts = {
        "Verified": _verified(standing),
        "Ready": _ready(standing, counts),
        "Error": _error(standing),
        "Outdated": _outdated(standing, counts),
    }
    status: dict[str, Any] = {
        "observedGeneration": view.generation,
        "rollout": f"{counts['ready']}/{counts['nodes']}",
        "counts": {**counts, "pods": standing.pods},
        "failing": _failing(standing),
        "conditions": [condition(view.status, kind, *fact, view.generation, now) for kind, fact in facts.items()],
    }
    # Told also as null: a merge patch would leave what is no longer so.
    status["resolvedDigest"] = aim.latest.digest or None
    status["lastKnownGoodDigest"] = aim.good.digest or None
    return status


def worth(view: CacheView, due: Mapping[str, Any], now: float) -> float | None:
    """Seconds until the status should be written: 0 at once, None: it says so already. What changes by itself, such as
    counts while a rollout goes on, waits a moment.
    """
    shown = {key: value for key, value in view.status.items() if key != "updated"}
    wanted = {key: value for key, value in due.items() if value is not None}
    if shown == wanted:
        return None
    if news(view, due) or not view.status:
        return 0.0
    since = now - (seconds(view.status.get("updated")) or 0.0)
    return PAUSE - since if 0 <= since < PAUSE else 0.0


def news(view: CacheView, due: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The conditions that say something else than they did: each is worth an Event."""
    before = {each.get("type"): (each.get("status"), each.get("reason")) for each in conditions(view.status)}
    return [each for each in due["conditions"] if before.get(each["type"]) != (each["status"], each["reason"])]


def _counts(standing: Standing) -> dict[str, int]:
    members, goal = standing.rollout.members, standing.rollout.aim.goal.digest
    found = Counter(_state(members.get(name), goal) for name in standing.selected)
    return {
        "nodes": len(standing.selected),
        "ready": found["ready"],
        "pending": found["pending"],
        "incompatible": found["incompatible"],
        "failed": found["failed"],
        "outdated": sum(each.serves not in ("", goal) for each in members.values()),
    }


def _state(member: Member | None, goal: str) -> str:
    if member is None or not goal or member.digest != goal or member.outcome in ("busy", "removed"):
        return "pending"
    if not member.outcome:  # what is checked anew stays in place meanwhile
        return "ready" if member.serves == goal else "pending"
    return "failed" if member.outcome == "retrying" else str(member.outcome)


def _failing(standing: Standing) -> list[dict[str, str]]:
    bad = [(name, each) for name, each in standing.rollout.members.items() if each.outcome in _WORSE]
    bad.sort(key=lambda each: (_WORSE[str(each[1].outcome)], each[0]))
    return [
        {"name": name, "reason": _reason(each)[:128], "message": each.message[:512]} for name, each in bad[:MOST_SHOWN]
    ]


def _by(standing: Standing, *outcomes: str) -> list[tuple[str, Member]]:
    return sorted((name, each) for name, each in standing.rollout.members.items() if each.outcome in outcomes)


def _verified(standing: Standing) -> Fact:
    refused = [(name, each) for name, each in _by(standing, "failed") if each.reason in REFUSALS]
    if refused:
        name, member = refused[0]
        return False, member.reason, f"{name}: {member.message}"
    ready = [(name, each) for name, each in _by(standing, "ready") if each.reason in _TRUST]
    skipped = [(name, each) for name, each in ready if each.reason != "Verified"]
    if skipped:
        name, member = skipped[0]
        return False, member.reason, f"{name} uses it without verified signatures: {member.message}"
    if not ready:
        return None, "NotChecked", "no node has checked it yet"
    return True, "Verified", f"{_nodes(len(ready))} verified its signatures: {ready[0][1].message}"


def _ready(standing: Standing, counts: Mapping[str, int]) -> Fact:
    if standing.view.deleting:
        busy = _by(standing, "busy")
        if busy:
            pods = sum(each.pods for _, each in busy)
            force = "annotate it with tkm.io/force-delete=true to let it go regardless"
            names = _names([name for name, _ in busy])
            using = "1 pod has" if pods == 1 else f"{pods} pods have"
            gone = "it is" if pods == 1 else "they are"
            return False, "InUse", f"{using} it mounted on {names}: it goes once {gone} gone, or {force}"
        left = _names(sorted(standing.rollout.members))
        return False, "Deleting", f"waiting for {left} to let go of it" if left else "no node has it any more"
    if standing.trouble is not None and not counts["ready"]:
        return False, *standing.trouble
    if not counts["nodes"]:
        return False, "NoNodes", "no node with berth's CSI driver fits its nodeSelector"
    whole = counts["ready"] + counts["incompatible"] == counts["nodes"]
    if whole and counts["ready"]:
        other = f"; {_nodes(counts['incompatible'])} cannot run its kernels" if counts["incompatible"] else ""
        return True, "Ready", f"{_nodes(counts['ready'])} can mount it{other}"
    if counts["incompatible"] == counts["nodes"]:
        name, member = _by(standing, "incompatible")[0]
        return False, "Incompatible", f"no node can run its kernels; {name}: {member.message}"
    if counts["failed"]:
        failed = "its only node" if counts["nodes"] == 1 else f"{counts['failed']} of {counts['nodes']} nodes"
        return False, "Failing", f"{failed} cannot prepare it: {_worst(standing)}"
    if standing.queued:
        told = f"{counts['ready']} of {_nodes(counts['nodes'])} can mount it"
        return False, "Queued", f"{told}; it goes on once other caches have had their turn"
    if counts["nodes"] == 1:
        return False, "Preparing", "its only node cannot mount it yet"
    return False, "Preparing", f"{counts['ready']} of {counts['nodes']} nodes can mount it"


def _error(standing: Standing) -> Fact:
    aim = standing.rollout.aim
    if standing.trouble is not None:
        return True, *standing.trouble
    if aim.rejected:
        told = f"{aim.rejected} was given up for {aim.good.digest}, which was good before: {aim.why}"
        return True, "RolledBack", told
    if _by(standing, "failed", "retrying"):
        return True, _worst_reason(standing), _worst(standing)
    return False, "None", ""


def _outdated(standing: Standing, counts: Mapping[str, int]) -> Fact:
    aim = standing.rollout.aim
    if aim.goal.digest and aim.latest.digest != aim.goal.digest:
        asked = f"{aim.reference} stands for {aim.latest.digest} now"
        if "@" in aim.reference:
            asked = f"{aim.reference} is asked for"
        return True, "TagMoved", f"{asked}; nodes are to have {aim.goal.digest}"
    if counts["outdated"]:
        have = "has" if counts["outdated"] == 1 else "have"
        return True, "RollingOut", f"{_nodes(counts['outdated'])} still {have} another digest than {aim.goal.digest}"
    return False, "UpToDate", ""


def _worst_reason(standing: Standing) -> str:
    _, member = (_by(standing, "failed") or _by(standing, "retrying"))[0]
    return _reason(member)


def _reason(member: Member) -> str:
    """What the node gives, if a condition may have it."""
    return member.reason if _REASON.fullmatch(member.reason) else str(member.outcome).capitalize()


def _worst(standing: Standing) -> str:
    bad = _by(standing, "failed") or _by(standing, "retrying")
    name, member = bad[0]
    others = len(bad) - 1
    more = f" (and {others} more {'node' if others == 1 else 'nodes'})" if others else ""
    return f"{name}: {member.message}{more}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _names(names: list[str]) -> str:
    few = ", ".join(names[:_NAMED])
    return few if len(names) <= _NAMED else f"{few} and {len(names) - _NAMED} more"
