"""Whole lives of queues, round after round: nothing is over-committed, nobody waits for ever, nobody is stopped for
nothing, and no two stop each other in turn. Gangs start as a whole, or not at all.
"""

from __future__ import annotations

import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planning.accelerators import AMD, SEAT
from planning.model import QuotaView, Resources, WorkloadView
from tests.planning.builders import GIB, NOW, node, quota, workload
from tests.planning.cluster import Cluster

SEATED = Resources.counting([("", 2), (SEAT, 3)], 64_000, 256 * GIB, 110)
NODES = [
    node("n0", 8, labels={"rack": "a"}),
    node("n1", 8, labels={"rack": "b"}, allocatable=Resources.counting([("", 8), (AMD, 2)], 64_000, 256 * GIB, 110)),
    node("n2", 4, labels={"rack": "b"}, allocatable=Resources(4, 64_000, 256 * GIB, 110, gpu_resource=AMD)),
    node("n3", 2, allocatable=SEATED),
]
NAMESPACES = "abc"
# Whose Jobs nobody may suspend: mostly nobody's.
UNSTOPPABLE = st.one_of(st.just(set[int]()), st.sets(st.integers(0, 13), max_size=4))


@st.composite
def quotas(draw: st.DrawFn) -> list[QuotaView]:
    """None, or tenants under one cohort, which in all may hold more or less than there is."""
    if draw(st.booleans()):
        return []
    found = [quota("c", gpus=draw(st.integers(0, 4)))]
    for namespace in NAMESPACES:
        above: dict[str, Any] = {"cohort": "c"} if draw(st.booleans()) else {}
        if draw(st.booleans()):
            above["borrowingLimit"] = {"gpus": draw(st.integers(0, 8))}
        if draw(st.booleans()):
            above["lendingLimit"] = {"gpus": draw(st.integers(0, 8))}
        found.append(
            quota(f"q{namespace}", namespace, gpus=draw(st.integers(0, 12)), weight=draw(st.integers(1, 3)), **above)
        )
    return found


@st.composite
def gangs(draw: st.DrawFn) -> dict[str, Any]:
    pods = draw(st.integers(2, 5))
    spec: dict[str, Any] = {"replicas": pods}
    if draw(st.booleans()):
        spec["minReplicas"] = draw(st.integers(1, pods))
    if draw(st.booleans()):
        spec["topology"] = {"level": "rack", "mode": draw(st.sampled_from(["Required", "Preferred"]))}
    return spec


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[WorkloadView, float]]:
    """Workloads with the seconds that each runs, in the order in which they come."""
    found = []
    for i in range(draw(st.integers(1, 14))):
        run = draw(st.sampled_from([30.0, 90.0, 200.0]))
        spec: dict[str, Any] = {"priority": draw(st.sampled_from(["low", "normal", "high"]))}
        spec |= draw(st.sampled_from([{}, {"preemptible": True}, {"preemptible": False}]))
        if draw(st.booleans()):
            spec["activeDeadlineSeconds"] = int(run) + draw(st.integers(1, 100))
        size = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
        if draw(st.integers(0, 3)) == 0:
            spec |= draw(gangs())
        spec |= draw(st.sampled_from([{}, {}, {"gpuResource": AMD}, {"gpuFraction": 0.5}]))
        size = 1 if "gpuFraction" in spec else size
        view = workload(f"w{i}", size, spec=spec, namespace=draw(st.sampled_from(NAMESPACES)), created=NOW + i)
        found.append((view, run))
    return found


def attainable(cluster: Cluster, view: WorkloadView) -> bool:
    """Whether it could run if it were alone."""
    alone = Cluster(cluster.nodes, cluster.quotas)
    alone.add(view)
    alone.settle()
    return view.uid in alone.running


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(quotas(), arrivals(), st.lists(st.integers(0, 3), max_size=14), UNSTOPPABLE, st.booleans(), st.booleans())
def test_everything_that_can_run_runs_and_ends(
    granted: list[QuotaView], coming: list[tuple[WorkloadView, float]], together: list[int], firm: set[int],
    modern: bool, lets_go_on: bool,
) -> None:  # fmt: skip
    cluster = Cluster(NODES, granted, modern=modern, lets_go_on=lets_go_on)
    cluster.unstoppable = {f"w{i}" for i in firm}
    waiting, served = list(coming), set[tuple[str, str]]()
    for step in range(400):
        for view, run in waiting[: (together[step] if step < len(together) else 2)]:
            cluster.add(view, run=run)
            waiting.pop(0)
        before = len(cluster.stopped)
        cluster.lifts = 2 if step % 3 else 512
        cluster.settle()
        cluster.check()
        stops = [
            (uid, _for_whom(message), lent)
            for (uid, message), lent in zip(cluster.stopped[before:], cluster.lent[before:], strict=True)
        ]
        # What is stopped is gone a moment later; nothing else happens meanwhile. Then its place must be taken.
        now = cluster.now
        cluster.tick(0.0)
        cluster.settle()
        cluster.check()
        for victim, winner, lent in stops:
            # Beside one who then could not be, somebody may be stopped in vain.
            placed = winner in cluster.running or cluster.refused
            assert placed, f"{victim} was stopped for {winner}, which does not run"
            assert (winner, victim) not in served, f"{winner} and {victim} stop each other"
            if not lent:  # else it may have the better claim when what it holds is no longer borrowed
                served.add((victim, winner))
        if not waiting and not cluster.running:
            break
        cluster.now = now
        cluster.tick(20.0)
    left = set(cluster.workloads)
    able = {view.uid for view, _ in coming if view.uid in left and attainable(cluster, view)}
    assert not able, f"{sorted(able)} could run, and never did"


def _for_whom(message: str) -> str:
    found = re.search(r"goes to [a-z]/(w[0-9]+)", message)
    assert found, message
    return found[1]
