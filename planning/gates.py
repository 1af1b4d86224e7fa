"""Decides when a gang's gates are lifted, and which gangs are taken back because they cannot start.

For the placement round. A gate is lifted only when all pods of the gang are there and all of its nodes still take them;
then each is told its node. Until a pod is bound, what the gang's Job claims holds its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from crds.settings import Settings
from planning.capacity import Belongings, patience
from planning.filters import Constraints, refusal
from planning.model import JobView, NodeView, Pin, Places, PodView, Snapshot, Turn, Withdrawal, WorkloadView
from planning.places import gang_of, pods_in, ranks
from planning.podspecs import mapping
from planning.views import is_gated, pod_index

# How soon it is looked for pods that are not there yet, in seconds; later ever less often.
_SOON = 1.0

# What a workload's pods demand of a node, whatever is free there.
Demands = Callable[[WorkloadView], Constraints]


@dataclass(frozen=True, slots=True)
class Start:
    """A gang whose Job goes on, and whose pods are not all bound yet. `pods`: the live ones; `waiting`: those of them
    that have no node.
    """

    view: WorkloadView
    job: JobView
    pods: list[PodView]
    waiting: list[PodView]

    @property
    def held_back(self) -> bool:
        """Whether some pod is gated, or not there at all."""
        return not self.pods or self.job.missing > 0 or any(pod.gated for pod in self.waiting)


def is_gang(view: WorkloadView, job: JobView) -> bool:
    """Whether this is a gang's Job that tells its places; one whose annotation was damaged is taken back like any."""
    return bool(job.places) and view.spec is not None and gang_of(view.spec) is not None


def standing(snapshot: Snapshot) -> dict[str, int]:
    """How many gangs are waiting for places, starting (they have them, but not all of their pods run), and running."""
    live = {(job.namespace, job.workload_uid): job for job in snapshot.jobs if not (job.finished or job.preempted)}
    found = dict.fromkeys(("waiting", "starting", "running"), 0)
    for view in snapshot.workloads:
        if view.spec is None or view.spec.replicas == 1 or view.finished or view.deleting:
            continue
        job = live.get((view.namespace, view.uid))
        if job is not None:
            found["running" if job.ready else "starting"] += 1
        elif view.phase != "Pending":
            found["waiting"] += 1
    return found


def pins(found: Sequence[Start], nodes: Mapping[str, NodeView], demands: Demands, but: Set[str]) -> Iterator[Pin]:
    """Gangs of which all pods are there and some are still gated, `but` those Jobs, by UID."""
    for start in found:
        view, job = start.view, start.job
        there = {pod.index for pod in start.pods if not pod.terminating} | job.done
        all_there = there.issuperset(range(pods_in(job.places)))
        gated = any(pod.gated for pod in start.waiting)
        if job.uid not in but and gated and all_there and not _unfit(start, nodes, demands):
            yield Pin(view.uid, view.namespace, view.name, job.name, job.uid, job.places)


def due(places: Places, pods: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    """The gated ones among a gang's pods as the API server has them, each with its node; none unless all are there."""
    nodes, there, found = ranks(places), set[int](), []
    for pod in pods:
        meta, spec = mapping(pod.get("metadata")), mapping(pod.get("spec"))
        index = pod_index(meta)
        failed = mapping(pod.get("status")).get("phase") == "Failed"
        if not 0 <= index < len(nodes) or failed or meta.get("deletionTimestamp") is not None:
            continue
        there.add(index)
        if is_gated(spec):
            found.append((pod, nodes[index]))
    return found if len(there) == len(nodes) else []


def withdrawals(
    found: Sequence[Start], nodes: Mapping[str, NodeView], demands: Demands, settings: Settings, now: float
) -> Iterator[Withdrawal]:
    """Gangs that cannot start: a node takes no pods any more and their gates are not all lifted, or some pod has found
    no place in time. A gang goes back as a whole, with the pods that have found theirs.
    """
    for start in found:
        job, why, retry, avoid = start.job, "", False, ""
        if start.held_back and (wrong := _unfit(start, nodes, demands)):
            why = f"was not started: {wrong}"
        elif now - job.created >= _patience(start, settings):
            why, retry, avoid = _overdue(start, settings, nodes)
        if why:
            yield Withdrawal(
                uid=job.workload_uid,
                namespace=job.namespace,
                name=start.view.name,
                generation=start.view.generation,
                job_name=job.name,
                job_uid=job.uid,
                next_turn=Turn(job.attempt + 1, job.retries + retry),
                message=f"Job {job.name} {why}; it is placed anew",
                job_version=job.resource_version,
                avoid=avoid,
            )


def next_look(found: Iterable[Start], settings: Settings, now: float) -> float | None:
    """Seconds until a gang is to be looked at again: its pods may be there, or it may have to be taken back."""
    waits = []
    for start in found:
        age, patience = now - start.job.created, _patience(start, settings)
        if start.held_back:
            waits.append(min(max(_SOON, age / 4), patience))
        if age < patience:
            waits.append(min(patience - age, patience))  # a clock that jumped back must not add to it
    return min(waits, default=None)


def starts(snapshot: Snapshot, mine: Belongings) -> Iterator[Start]:
    """All gangs that are being started."""
    for view in snapshot.workloads:
        key = view.namespace, view.uid
        if view.finished or view.deleting or key not in mine.jobs:
            continue
        for job in mine.jobs[key]:
            if job.ready or job.finished or job.deleting or job.preempted or not is_gang(view, job):
                continue
            pods = [pod for pod in mine.pods.get(key, ()) if pod.job_name == job.name]
            waiting = [pod for pod in pods if not pod.node]
            # Without any pod, a Job whose controller once counted some may have ended, which is yet to be seen.
            if waiting or (job.missing if pods else not job.counted):
                yield Start(view, job, pods, waiting)


def _unfit(start: Start, nodes: Mapping[str, NodeView], demands: Demands) -> str:
    """Which of the gang's nodes does not take its pods any more, and why; '' if all do."""
    asked = demands(start.view)
    for name, _ in start.job.places:
        if name not in nodes:
            return f"node {name} is gone"
        if why := refusal(asked, nodes[name]):
            return f"node {name} is {why}"
    return ""


def _overdue(start: Start, settings: Settings, nodes: Mapping[str, NodeView]) -> tuple[str, bool, str]:
    """Why the gang is taken back, whether that counts as a failure, and which node to avoid."""
    job, pods = start.job, pods_in(start.job.places)
    time = f"in {settings.bind_deadline_seconds} s"
    blocked = next((pod for pod in start.waiting if pod.blocked), None)
    if blocked is not None:
        node = ranks(job.places)[blocked.index] if 0 <= blocked.index < pods else ""
        at = f"pod {blocked.index} found no place on node {node}" if node else "a pod found no place"
        # A node that is there: anybody may write anything on a Job, and this will be remembered.
        return f"did not start {time}: {at} ({blocked.blocked})", False, node if node in nodes else ""
    # Without its pods nobody took the place: something refuses them. A Job that was never looked at (it has no start
    # time) waits for its controller, and that is nobody's failure.
    made = len(start.pods)
    if made < pods:
        return f"did not start {time}: {made} of its {pods} pods were created", job.started is not None, ""
    if any(pod.gated for pod in start.waiting):
        return f"did not start {time}: the gates of its pods could not be lifted (the worker's log says why)", True, ""
    return f"did not start {time}: {len(start.waiting)} of its {pods} pods are not bound", False, ""


def _patience(start: Start, settings: Settings) -> float:
    """Seconds from the Job's creation after which the gang is taken back."""
    tried = any(pod.blocked for pod in start.waiting)
    return patience(settings.bind_deadline_seconds, pods_in(start.job.places), tried=tried)
