"""Whole lives of queues with GPUReservations: they are honoured on time, nobody without a right is on them, and who
uses his own is stopped by nobody.
"""

from __future__ import annotations

import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planning.accelerators import AMD
from planning.model import Resources, WorkloadView
from planning.windows import ReservationView
from tests.planning.builders import GIB, NOW, node, reservation, workload
from tests.planning.cluster import Cluster

NODES = [
    node("n0", 8),
    node("n1", allocatable=Resources.counting([("", 8), (AMD, 4)], 64_000, 256 * GIB, 110)),
    node("n2", 4),
    node("n3", allocatable=Resources(2, 64_000, 256 * GIB, 110, gpu_resource=AMD)),
]
STEP = 20.0


@st.composite
def windows(draw: st.DrawFn) -> list[tuple[int, ReservationView]]:
    """Reservations with the step at which they are made, the oldest first; they may want more than there is."""
    found = []
    for i in range(draw(st.integers(1, 3))):
        made, block = draw(st.integers(0, 12)), draw(st.sampled_from([1, 1, 2, 4, 8]))
        start = STEP * (made + draw(st.integers(0, 15)))
        found.append(
            (
                made,
                reservation(
                    f"r{i}",
                    *draw(st.sampled_from(["a", "b", "ab"])),
                    gpus=block * draw(st.integers(1, max(1, 12 // block))),
                    start=start,
                    end=start + STEP * draw(st.integers(1, 12)),
                    created=NOW + made * STEP,
                    **({"gpusPerNode": block} if block > 1 else {}),
                ),
            )
        )
    return sorted(found, key=lambda each: each[0])


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, WorkloadView, float]]:
    """Workloads with the step at which each comes and the seconds that it runs."""
    found = []
    for i in range(draw(st.integers(1, 14))):
        come, run = draw(st.integers(0, 25)), draw(st.sampled_from([30.0, 90.0, 600.0]))
        spec: dict[str, Any] = {"priority": draw(st.sampled_from(["low", "normal", "high"]))}
        spec |= draw(st.sampled_from([{}, {"preemptible": True}, {"preemptible": True}, {"preemptible": False}]))
        other: dict[str, Any] = {
            "gpuResource": AMD,
            "resources": {"requests": {"cpu": draw(st.sampled_from(["0", "40"]))}},
        }
        spec |= draw(st.sampled_from([{}, other, {"reservation": "r0"}, {"reservation": "r1"}]))
        if draw(st.booleans()):
            spec["activeDeadlineSeconds"] = int(run) + draw(st.integers(1, 100))
        size, namespace = draw(st.sampled_from([1, 1, 2, 3, 4, 8])), draw(st.sampled_from("ab"))
        if "reservation" in spec and size <= 4:
            spec |= draw(st.sampled_from([{}, {"replicas": 2}, {"replicas": 4, "minReplicas": 2}]))
        if "gpuResource" in spec:
            size, run = min(size, 4), min(run, 90.0)
        found.append((come, workload(f"w{i}", size, spec=spec, namespace=namespace, created=NOW + STEP * come), run))
    return found


class Judge:
    """What must hold at every step, reckoned from what there is and from nothing that the planner says of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.there = cluster
        self.excess: dict[tuple[str, str, int], int] = {}

    def window(self, view: WorkloadView) -> ReservationView | None:
        """The reservation that the workload may use now."""
        for each in self.there.reservations:
            if (
                view.spec
                and each.spec
                and view.spec.reservation == each.name
                and view.namespace in each.spec.namespaces
            ):
                return each if each.spec.starts <= self.there.now < each.spec.ends else None
        return None

    def same_window(self, uid: str, window: ReservationView) -> bool:
        return self.window(self.there.workloads[uid]) is window

    def used(self, name: str, of: str = "") -> int:
        """GPUs on the node in the hands of those who are in their window: all, or those of one reservation."""
        found = 0
        for pod in self.there.pods.values():
            window = self.window(self.there.workloads[pod.workload_uid])
            if pod.node == name and window is not None and of in ("", window.name):
                found += pod.requests.of("")
        return found

    def stays(self, name: str, moment: float) -> int:
        """GPUs on the node of others who can neither be stopped nor will have ended by then."""
        found = 0
        for pod in self.there.pods.values():
            view, job = self.there.workloads[pod.workload_uid], self.there.jobs[pod.workload_uid]
            assert view.spec is not None
            deadline = view.spec.active_deadline_seconds
            ends = deadline is not None and (job.started or 0) + deadline <= moment
            own = view.spec.reservation is not None
            if pod.node == name and not (view.spec.may_be_preempted or ends or own):
                found += pod.requests.of("")
        return found

    def nobody_without_a_right(self) -> None:
        """What is kept on a node stays kept: of those who cannot be stopped in time no more get in its way than were
        there before.
        """
        sizes = {node.name: node.allocatable.of("") for node in self.there.nodes}
        excess = {}
        for each in self.there.reservations:
            for name, gpus in self.there.ledger.reserved.get(each.uid, {}).items():
                assert each.spec is not None
                begin = max(self.there.now, each.spec.starts - 60)
                over = max(0, self.stays(name, begin) + gpus - sizes[name])
                key = (each.name, name, gpus)
                assert over <= self.excess.get(key, over), f"{name}: what is kept for {each.name} was given away"
                excess[key] = over
        self.excess = excess

    def in_time(self, workloads: set[str], reservations: set[str]) -> None:
        """Whoever waits in its window waits for others of it, or for those who were there before; or for those who are
        being stopped at the moment, which they are before it begins unless for somebody who came late, or out of a
        window that ended only then. Only of those of whom it was known for more than a minute.
        """
        for uid, view in self.there.workloads.items():
            window = self.window(view)
            if window is None or uid in self.there.running or view.spec is None:
                continue
            if uid not in workloads or window.name not in reservations:
                continue
            there = {pod.workload_uid for pod in self.there.pods.values()}
            going = {who for who, job in self.there.jobs.items() if job.preempted and who in there}
            served = {_for_whom(why) for who, why in self.there.stopped if who in going}
            peers = {each for each in served & set(self.there.workloads) if self.same_window(each, window)}
            begins = window.spec is not None and self.there.now == window.spec.starts
            after_another = any(self.there.workloads[who].spec.reservation for who in going)  # type: ignore[union-attr]
            if peers and (peers - workloads or after_another or not begins):
                continue
            need, begin, fits = view.spec.gpu_count, self.there.now, 0
            for each in self.there.nodes:
                kept = self.there.ledger.reserved.get(window.uid, {}).get(each.name, 0) - self.used(
                    each.name, window.name
                )
                free = each.allocatable.of("") - self.stays(each.name, begin) - self.used(each.name)
                fits += max(0, min(kept, free)) // need
            least = view.spec.min_replicas or view.spec.replicas
            assert fits < least, f"{uid} waits, though {fits} of its pods have room that is kept for it"


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@given(windows(), arrivals())
def test_reservations_are_honoured(
    made: list[tuple[int, ReservationView]], coming: list[tuple[int, WorkloadView, float]]
) -> None:
    there = Cluster(NODES)
    judge, judged = Judge(there), 0
    for step in range(80):
        there.reservations = [each for at, each in made if at <= step]
        for at, view, run in coming:
            if at == step:
                there.add(view, run=run)
        there.settle()
        for uid, message in there.stopped[judged:]:
            assert judge.window(there.workloads[uid]) is None, f"{uid} was stopped in its window: {message}"
        judged = len(there.stopped)
        there.check()
        judge.nobody_without_a_right()
        known = {each.name for at, each in made if at <= step - 4}
        judge.in_time({view.uid for at, view, _ in coming if at <= step - 4}, known)
        there.tick(STEP)
    over = {view.uid for _, view, _ in coming if view.spec is not None and view.spec.reservation is not None}
    _nobody_evicts_mutually(there, over)
    there.settle()
    left = {uid for uid in there.workloads if uid not in there.running}
    assert left <= over, "when all windows are over, all others run"


def _nobody_evicts_mutually(there: Cluster, over: set[str]) -> None:
    pairs = [(victim, _for_whom(message)) for victim, message in there.stopped]
    # Who had the place of another in its window may lose it to that one after its end, for it cannot come back.
    pairs = [(victim, winner) for victim, winner in pairs if victim not in over]
    back = {(winner, victim) for victim, winner in pairs} & set(pairs)
    assert not back, f"{back} stopped each other"


def _for_whom(message: str) -> str:
    found = re.search(r"goes to [ab]/(w[0-9]+)", message)
    assert found, message
    return found[1]
