"""A cluster in a few lines, for planners that decide many rounds: Jobs get pods, run, end, are stopped and go on.

Everything takes effect at once but the end of a pod that is stopped, which takes until `tick` is called the next time,
and a gang's pods, which are there one after the other and wait for their gates to be lifted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from planning.ledger import after_carrying_out, after_deciding
from planning.model import (
    Assignment,
    Decision,
    JobView,
    Ledger,
    NodeView,
    Pin,
    PodView,
    QuotaView,
    WorkloadView,
)
from planning.naming import spec_hash
from planning.places import pods_in, ranks
from planning.preemption import SPARED
from planning.windows import ReservationView
from tests.planning.builders import NOW, round_of, snapshot


@dataclass
class Cluster:
    """`runs`: how many seconds each workload needs, by UID; what is not there never ends by itself. `unstoppable`: UIDs
    whose Jobs nobody may suspend; `refused`: until when each of these, once that was tried, must be left alone.
    `modern`: its Job controller takes a suspended Job's start time back; `lets_go_on`: it lets such a one change.
    """

    nodes: list[NodeView]
    quotas: list[QuotaView] = field(default_factory=list)
    reservations: list[ReservationView] = field(default_factory=list)
    workloads: dict[str, WorkloadView] = field(default_factory=dict)
    runs: dict[str, float] = field(default_factory=dict)
    now: float = NOW
    ledger: Ledger = field(default_factory=Ledger)
    jobs: dict[str, JobView] = field(default_factory=dict)  # by UID of their workload
    pods: dict[str, PodView] = field(default_factory=dict)
    stopped: list[tuple[str, str]] = field(default_factory=list)  # who, and what it was told
    lent: list[bool] = field(default_factory=list)  # of those, who had what was kept for somebody
    ended: list[str] = field(default_factory=list)
    lifts: int = 512  # gates that a round lifts
    unstoppable: set[str] = field(default_factory=set)
    refused: dict[str, float] = field(default_factory=dict)
    modern: bool = True
    lets_go_on: bool = True
    resumed: list[str] = field(default_factory=list)

    def add(self, *views: WorkloadView, run: float | None = None) -> None:
        for view in views:
            self.workloads[view.uid] = view
            if run is not None:
                self.runs[view.uid] = run

    def round(self) -> Decision:
        seen = snapshot(
            self.nodes,
            list(self.workloads.values()),
            jobs=list(self.jobs.values()),
            pods=list(self.pods.values()),
            now=self.now,
            quotas=self.quotas,
            reservations=self.reservations,
        )
        decision = round_of(seen, self.ledger)
        self.ledger = after_deciding(self.ledger, decision)
        refused = {stop.uid: self.now + SPARED for stop in decision.preemptions if stop.uid in self.unstoppable}
        assert all(self.now >= self.refused.get(uid, 0.0) for uid in refused), "it is tried again too soon"
        self.refused |= refused
        self.ledger = after_carrying_out(self.ledger, decision.withdrawals, (), (), {}, {}, {}, refused)
        for withdrawal in decision.withdrawals:
            assert withdrawal.job_uid == self.jobs[withdrawal.uid].uid
            if not withdrawal.keep:
                del self.jobs[withdrawal.uid]
                self._remove_pods(withdrawal.uid)
        for pin in decision.pins:
            self.lift(pin, self.lifts)
        for stop in decision.preemptions:
            if stop.uid in refused:
                continue
            assert self.jobs[stop.uid].uid == stop.job_uid and not self.jobs[stop.uid].preempted
            self.jobs[stop.uid] = replace(self.jobs[stop.uid], preempted=True)
            self.stopped.append((stop.uid, stop.message))
            self.lent.append(self.jobs[stop.uid].backfill is not None)
        for place in decision.assignments:
            view = self.workloads[place.uid]
            uid, name = self._made(place)
            job = JobView(
                uid, view.namespace, name, 1, view.uid, place.turn.attempt, 0, place.node, place.requests, self.now,
                self.now, not place.places, backfill=place.backfill, lent=place.lent, counted=True, places=place.places,
                missing=pods_in(place.places), active_deadline=view.spec.active_deadline_seconds if view.spec else None,
                spec_hash=spec_hash(view.spec) if view.spec else "",
            )  # fmt: skip
            self.jobs[view.uid] = job
            if place.places:
                self._gang(view, place)
            else:
                self.pods[view.uid] = PodView(
                    f"pod-{job.uid}", view.namespace, job.name, 1, job.node, job.requests, view.uid, job.name,
                    running=True,
                )  # fmt: skip
        return decision

    def _made(self, place: Assignment) -> tuple[str, str]:
        """UID and name of its Job: the one that was stopped, where that can go on, else a new one."""
        stopped, known = place.resumes, self.jobs.get(place.uid)
        assert place.uid not in self.pods, f"{place.uid} has a pod already"
        assert (stopped.uid if stopped else None) == (known.uid if known else None), f"{place.uid} has a Job already"
        if stopped is None or known is None or not self.lets_go_on:
            return f"{place.uid}-{place.turn.attempt}", place.job_name
        assert known.halted and known.started is None and not known.places and not place.places
        assert known.attempt < place.turn.attempt
        self.resumed.append(place.uid)
        return known.uid, known.name

    def _gang(self, view: WorkloadView, place: Assignment) -> None:
        """All or nothing, and in one domain if it must be."""
        spec, nodes = view.spec, {node.name: node for node in self.nodes}
        assert spec is not None
        assert (spec.min_replicas or spec.replicas) <= pods_in(place.places) <= spec.replicas
        assert len({node for node, _ in place.places}) == len(place.places) and place.places[0][0] == place.node
        if spec.topology is not None and spec.topology.mode == "Required":
            domains = {nodes[node].labels.get(spec.topology.level, "") for node, _ in place.places}
            assert len(domains) == 1 and "" not in domains, f"{view.uid} is spread over {domains}"

    def create(self, most: int = 512) -> None:
        """The Job controller creates so many of the gated pods that are missing."""
        for uid, job in list(self.jobs.items()):
            for index in range(pods_in(job.places) - job.missing, pods_in(job.places)):
                if most and not job.preempted:
                    self.pods[f"{uid}/{index}"] = PodView(
                        f"pod-{job.uid}-{index}", job.namespace, f"{job.name}-{index}", 1, "", job.requests, uid,
                        job.name, index=index, gated=True,
                    )  # fmt: skip
                    job = self.jobs[uid] = replace(job, missing=job.missing - 1)
                    most -= 1

    def lift(self, pin: Pin, most: int = 512) -> None:
        """The gates are lifted, or only so many of them; the scheduler binds the pods at once where they fit."""
        job = self.jobs[pin.uid]
        assert (job.uid, job.places) == (pin.job_uid, pin.places) and not job.missing
        for index, node in enumerate(ranks(pin.places)):
            pod = self.pods[f"{pin.uid}/{index}"]
            if pod.gated and most:
                self.pods[f"{pin.uid}/{index}"] = replace(pod, gated=False, node=node, running=True)
                most -= 1
        mine = [self.pods[f"{pin.uid}/{index}"] for index in range(pods_in(pin.places))]
        self.jobs[pin.uid] = replace(job, ready=all(pod.running for pod in mine), started=self.now)

    def settle(self, most: int = 50) -> None:
        """Rounds until one decides nothing."""
        for _ in range(most):
            decision = self.round()
            self.create()
            due = decision.assignments or decision.preemptions or decision.withdrawals or decision.seen or decision.pins
            if not due:
                return
        raise AssertionError(f"still deciding after {most} rounds: {decision}")

    def tick(self, seconds: float) -> None:
        """Time passes: what is stopped is gone, what has run its time ends."""
        self.now += seconds
        for uid, job in list(self.jobs.items()):
            if job.preempted:
                self._remove_pods(uid)
                self.jobs[uid] = replace(job, halted=True, started=None if self.modern else job.started)
            elif job.ready and job.started is not None and self.now - job.started >= self.runs.get(uid, float("inf")):
                del self.jobs[uid], self.workloads[uid]
                self._remove_pods(uid)
                self.ended.append(uid)

    def _remove_pods(self, of: str) -> None:
        self.pods = {key: pod for key, pod in self.pods.items() if pod.workload_uid != of}

    @property
    def running(self) -> dict[str, str]:
        """Where each workload is."""
        return {uid: job.node for uid, job in self.jobs.items() if not job.preempted}

    def claims(self, node: str, resource: str) -> int:
        """GPUs of this resource that gangs on their way will have on the node."""
        present = {(pod.job_name, pod.index) for pod in self.pods.values() if pod.node}
        return sum(
            job.requests.of(resource)
            for job in self.jobs.values()
            if not job.preempted
            for index, where in enumerate(ranks(job.places))
            if where == node and (job.name, index) not in present
        )

    def check(self) -> None:
        """Raises AssertionError where a node, or a tenant that may not borrow, holds more than it has."""
        for node in self.nodes:
            here = [pod for pod in self.pods.values() if pod.node == node.name]
            asked = [pod.requests for pod in here] + [job.requests for job in self.jobs.values()]
            for resource in {each.gpu_resource for each in asked}:
                held = sum(pod.requests.of(resource) for pod in here) + self.claims(node.name, resource)
                there = node.allocatable.of(resource)
                assert held <= there, f"{node.name} holds {held} {resource or 'GPUs'}"
        for quota in self.quotas:
            if quota.spec is not None and quota.spec.cohort is None and quota.spec.nominal.gpus is not None:
                mine = [pod for pod in self.pods.values() if pod.namespace in quota.spec.namespaces]
                assert sum(pod.requests.all_gpus for pod in mine) <= quota.spec.nominal.gpus, (
                    f"{quota.name} holds too much"
                )
