"""Decides which statuses are told when their workload is expected to start: who was told nothing yet, or something
that is no longer true.

For the placement round. Every telling is a write, so a change must be worth one.
"""

from __future__ import annotations

from collections.abc import Mapping

from planning.model import Expectation, Snapshot, WorkloadView
from planning.times import seconds

# At once, those that start soonest: the rest is told after the next forecast.
_TOLD = 50
# An expectation is told anew when it is off by more than this many seconds, and by more than this share of the wait.
_SECONDS, _SHARE = 60.0, 0.2


def expectations(
    snapshot: Snapshot, early: Mapping[str, float], late: Mapping[str, float], since: float
) -> list[Expectation]:
    """`early` and `late`: the median and the ninth decile of the seconds to start, by UID, as forecast at `since`. Who
    was told and of whom nobody can tell any more is told that, by a start of 0.
    """
    found = []
    for view in snapshot.workloads:
        wait = early.get(view.uid)
        if wait is None and view.phase == "Scheduling" and view.status.get("expectedStartTime") and not view.deleting:
            found.append(Expectation(view.uid, view.namespace, view.name, 0.0, 0.0))
            continue
        if not wait or view.uid not in late or view.phase != "Scheduling" or view.deleting:
            continue
        start = since + wait
        expected = Expectation(view.uid, view.namespace, view.name, start, max(start, since + late[view.uid]))
        if start > snapshot.now and not _told(view, expected, snapshot.now):
            found.append(expected)
    return sorted(found, key=lambda each: (each.start, each.uid))[:_TOLD]


def _told(view: WorkloadView, expected: Expectation, now: float) -> bool:
    """Whether the status says about that."""
    for shown, is_so in (("expectedStartTime", expected.start), ("expectedStartLatest", expected.latest)):
        told = seconds(view.status.get(shown))
        if told is None or abs(told - is_so) > max(_SECONDS, _SHARE * (is_so - now)):
            return False
    return True
