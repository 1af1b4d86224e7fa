"""Predicts when a waiting workload starts: by letting rounds of placement go on while what runs ends when it should.

For `berth explain`, and for what statuses tell. When something ends is learned from its model's and tenant's past
runs, and is its deadline at the latest; who gets what comes free then is decided by the rounds themselves. What is yet
to come is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, nsmallest

from crds.settings import Settings
from planning.accelerators import asked_resource, known_as
from planning.durations import Durations
from planning.memory import Memory
from planning.model import Assignment, JobView, Ledger, PodView, Snapshot, Waiting, WorkloadView
from planning.placement import decide
from planning.places import ranks
from planning.profiles import Gpus
from planning.reservation_status import shown_nodes
from planning.status import waiting
from planning.windows import window_of

# Rounds that are looked ahead at most; in a large cluster fewer, for each looks at every node and workload, and each of
# them lets more than one run end.
_ROUNDS = 300
_LOOKS = 100_000
_ASSIGNMENTS = 1000


@dataclass(slots=True)
class _Future:
    """The cluster as it will be at `now`."""

    seen: Snapshot
    durations: Durations
    share: float
    now: float
    gpu_resource: str
    jobs: dict[str, JobView] = field(default_factory=dict)  # by UID of their workload
    pods: dict[str, PodView] = field(default_factory=dict)  # by UID
    workloads: dict[str, WorkloadView] = field(default_factory=dict)
    ends: list[tuple[float, str]] = field(default_factory=list)

    def snapshot(self) -> Snapshot:
        return replace(
            self.seen,
            now=self.now,
            jobs=tuple(self.jobs.values()),
            pods=tuple(self.pods.values()),
            workloads=tuple(self.workloads.values()),
        )

    def end_of(self, view: WorkloadView, started: float) -> float | None:
        """When a workload that runs since `started` ends; None if nobody can tell."""
        spec = view.spec
        if spec is None:
            return None
        asked = Gpus(spec.gpu_count, known_as(asked_resource(spec, self.gpu_resource), self.gpu_resource))
        known = self.durations.remaining(
            view.namespace, spec.model_name, asked, max(0.0, self.now - started), self.share
        )
        deadline = None if spec.active_deadline_seconds is None else started + spec.active_deadline_seconds
        if known is None:
            return deadline
        end = self.now + known.seconds
        return end if deadline is None else min(end, deadline)

    def begin(self, place: Assignment) -> None:
        view = self.workloads[place.uid]
        job = JobView(
            f"future-{place.uid}", view.namespace, place.job_name, 0, place.uid, place.turn.attempt, place.turn.retries,
            place.node, place.requests, self.now, self.now, ready=True, counted=True, backfill=place.backfill,
            lent=place.lent, places=place.places,
            active_deadline=view.spec.active_deadline_seconds if view.spec else None,
        )  # fmt: skip
        self.jobs[place.uid] = job
        for index, node in enumerate(ranks(place.places) or [place.node]):
            uid = f"{job.uid}-{index}"
            self.pods[uid] = PodView(
                uid, view.namespace, job.name, 0, node, job.requests, view.uid, job.name, running=True, index=index
            )
        end = self.end_of(view, self.now)
        if end is not None:
            heappush(self.ends, (end, place.uid))

    def show(self, entry: Waiting) -> None:
        """What the workload is told stands in its status: told in every round anew, it would use up what a round may
        tell, and with that a gang's places.
        """
        view = self.workloads[entry.uid]
        self.workloads[entry.uid] = replace(view, status=waiting(view, entry, self.now) or view.status)

    def leave(self, uid: str, *, ended: bool) -> None:
        """What the workload holds comes free; unless it ended it waits again."""
        self.jobs.pop(uid, None)
        self.pods = {key: pod for key, pod in self.pods.items() if pod.workload_uid != uid}
        self.ends = [entry for entry in self.ends if entry[1] != uid]
        heapify(self.ends)
        if ended:
            self.workloads.pop(uid, None)


def seconds_to_start(snapshot: Snapshot, settings: Settings, uid: str, share: float) -> float | None:
    """Seconds until the workload gets a place, if of all runs that `share` of their kind takes no longer than they do;
    None if nobody can tell.
    """
    return starts(snapshot, settings, share, uid).get(uid)


def starts(snapshot: Snapshot, settings: Settings, share: float, uid: str = "") -> dict[str, float]:
    """The same of all that wait, by UID, without those of whom nobody can tell; of `uid` alone if that is given."""
    found: dict[str, float] = {}
    future = _Future(snapshot, Durations(snapshot.profiles, snapshot.now), share, snapshot.now, settings.gpu_resource)
    _begin(future)
    # Whoever has a template and waits was examined.
    examined = {w.uid: w.generation for w in snapshot.workloads if w.spec is not None and w.spec.template is not None}
    memory, ledger = Memory(), Ledger(accepted=examined, reserved=shown_nodes(snapshot))
    rounds = max(10, min(_ROUNDS, _LOOKS // (len(snapshot.nodes) + len(snapshot.workloads) + 1)))
    for _ in range(rounds):
        decision = decide(future.snapshot(), ledger, settings, limit=_ASSIGNMENTS, seed=0, memory=memory)
        for place in decision.assignments:
            found.setdefault(place.uid, future.now - snapshot.now)
            if place.uid == uid:
                return found
            future.begin(place)
        for stop in decision.preemptions:
            future.leave(stop.uid, ended=False)
        for verdict in decision.verdicts:
            future.workloads.pop(verdict.uid, None)
        for entry in decision.waiting:
            future.show(entry)
        # That not all could be told why they wait keeps nobody's place back, but for a gang's: it is looked for when
        # there is nothing else to happen.
        unheard = decision.waiting and not future.ends
        if decision.preemptions or (decision.more and (decision.assignments or decision.verdicts or unheard)):
            continue
        if not future.ends or (not decision.queued and not uid):
            break
        future.now = max(future.now, nsmallest(1 + len(future.ends) // rounds, future.ends)[-1][0])
        while future.ends and future.ends[0][0] <= future.now:
            _, over = heappop(future.ends)
            if over:
                future.leave(over, ended=True)
    return found


def _begin(future: _Future) -> None:
    seen = future.seen
    moments = (moment for view in seen.reservations if (each := window_of(view)) for moment in (each.start, each.end))
    future.ends = sorted(
        (moment, "") for moment in moments if moment > seen.now
    )  # of nobody: there is only a round due
    future.pods = {pod.uid: pod for pod in seen.pods if not pod.terminating}
    future.workloads = {
        view.uid: view for view in seen.workloads if not view.finished and not view.deleting and view.phase != "Pending"
    }
    for job in seen.jobs:
        view = future.workloads.get(job.workload_uid)
        if view is None or view.namespace != job.namespace or job.finished or job.deleting or job.preempted:
            continue
        future.jobs[view.uid] = job
        end = future.end_of(view, job.started if job.started is not None else future.now)
        if end is not None:
            heappush(future.ends, (end, view.uid))
