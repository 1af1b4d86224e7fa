"""A cluster in a few lines, for planners that decide many rounds: Jobs get pods, run, end, are suspended and go.

Everything takes effect at once but the end of a pod that is stopped, which takes until `tick` is called the next time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from planning.ledger import after_carrying_out, after_deciding
from planning.model import Decision, JobView, Ledger, NodeView, PodView, QuotaView, WorkloadView
from tests.planning.builders import NOW, round_of, snapshot


@dataclass
class Cluster:
    """`runs`: how many seconds each workload needs, by UID; what is not there never ends by itself."""

    nodes: list[NodeView]
    quotas: list[QuotaView] = field(default_factory=list)
    workloads: dict[str, WorkloadView] = field(default_factory=dict)
    runs: dict[str, float] = field(default_factory=dict)
    now: float = NOW
    ledger: Ledger = field(default_factory=Ledger)
    jobs: dict[str, JobView] = field(default_factory=dict)  # by UID of their workload
    pods: dict[str, PodView] = field(default_factory=dict)
    stopped: list[tuple[str, str]] = field(default_factory=list)  # who, and what it was told
    ended: list[str] = field(default_factory=list)

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
        )
        decision = round_of(seen, self.ledger)
        self.ledger = after_deciding(self.ledger, decision)
        self.ledger = after_carrying_out(self.ledger, decision.withdrawals, (), (), {}, {}, {})
        for withdrawal in decision.withdrawals:
            del self.jobs[withdrawal.uid]
        for stop in decision.preemptions:
            assert self.jobs[stop.uid].uid == stop.job_uid and not self.jobs[stop.uid].preempted
            self.jobs[stop.uid] = replace(self.jobs[stop.uid], preempted=True)
            self.stopped.append((stop.uid, stop.message))
        for place in decision.assignments:
            assert place.uid not in self.jobs and place.uid not in self.pods, f"{place.uid} has a Job already"
            view = self.workloads[place.uid]
            job = JobView(
                f"{place.uid}-{place.turn.attempt}", view.namespace, place.job_name, 1, view.uid, place.turn.attempt, 0,
                place.node, place.requests, self.now, self.now, True, backfill=place.backfill, counted=True,
                active_deadline=view.spec.active_deadline_seconds if view.spec else None,
            )  # fmt: skip
            self.jobs[view.uid] = job
            self.pods[view.uid] = PodView(
                f"pod-{job.uid}", view.namespace, job.name, 1, job.node, job.requests, view.uid, job.name, running=True
            )
        return decision

    def settle(self, most: int = 50) -> None:
        """Rounds until one decides nothing."""
        for _ in range(most):
            decision = self.round()
            if not (decision.assignments or decision.preemptions or decision.withdrawals or decision.seen):
                return
        raise AssertionError(f"still deciding after {most} rounds: {decision}")

    def tick(self, seconds: float) -> None:
        """Time passes: what is stopped is gone, what has run its time ends."""
        self.now += seconds
        for uid, job in list(self.jobs.items()):
            if job.preempted:
                self.pods.pop(uid, None)
            elif job.started is not None and self.now - job.started >= self.runs.get(uid, float("inf")):
                del self.jobs[uid], self.workloads[uid]
                self.pods.pop(uid, None)
                self.ended.append(uid)

    @property
    def running(self) -> dict[str, str]:
        """Where each workload is."""
        return {uid: job.node for uid, job in self.jobs.items() if not job.preempted}

    def check(self) -> None:
        """Raises AssertionError where a node, or a tenant that may not borrow, holds more than it has."""
        for node in self.nodes:
            held = sum(pod.requests.gpus for pod in self.pods.values() if pod.node == node.name)
            assert held <= node.allocatable.gpus, f"{node.name} holds {held} GPUs"
        for quota in self.quotas:
            if quota.spec is not None and quota.spec.cohort is None and quota.spec.nominal.gpus is not None:
                mine = [pod for pod in self.pods.values() if pod.namespace in quota.spec.namespaces]
                assert sum(pod.requests.gpus for pod in mine) <= quota.spec.nominal.gpus, f"{quota.name} holds too much"
