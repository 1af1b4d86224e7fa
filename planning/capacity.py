"""Decides what is free on every node: allocatable, less what all live pods ask for, less what berth has promised.

For the placement round. A promise is counted in exactly one form at a time: as the assignment in flight until its Job
is visible, as the Job until its pod is visible on the node, then as the pod; terminating pods still hold their place.
Of a gang each pod is counted so for itself, by its index.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from crds.gpuworkload import MAX_GPUS, MAX_REPLICAS, GPUWorkloadSpec
from planning.model import Assignment, JobView, Ledger, NodeView, Places, PodView, Resources, Snapshot, WorkloadView
from planning.naming import spec_hash
from planning.places import left_of, pods_in, times

# A Job whose pods the kube-scheduler has not tried yet has lost its place to nobody: the Job controller or the
# scheduler is behind, or something refuses its pods. It is given this many bind deadlines before it is taken back.
_UNTRIED = 4
# Seconds that a gang is given beside, for each of its pods: they are created and bound one after the other.
_EACH = 0.1
# Seconds after its grace period from when on a pod counts as stuck, and the longest grace that is waited for.
STUCK = 30.0
PATIENCE = 600.0

Asked = Callable[[GPUWorkloadSpec], Resources]
"""What a pod of such a workload asks for."""


@dataclass(slots=True)
class Room:
    """What is left on one node; may be below zero where others over-committed it.

    `gpus` are those of `gpu_resource` ('' is the installation's), `other_gpus` those of all other names.
    """

    gpus: int
    cpu_milli: int
    memory: int
    pods: int
    gpu_resource: str = ""
    other_gpus: tuple[tuple[str, int], ...] = ()

    def copy(self) -> Room:
        return Room(self.gpus, self.cpu_milli, self.memory, self.pods, self.gpu_resource, self.other_gpus)

    def take(self, requests: Resources) -> None:
        self.cpu_milli -= requests.cpu_milli
        self.memory -= requests.memory
        self.pods -= requests.pods
        if requests.gpu_resource == self.gpu_resource and not requests.other_gpus:
            self.gpus -= requests.gpus
            return
        for resource, count in requests.gpus_by_resource():
            self.add_gpus(resource, -count)

    def give_back(self, requests: Resources) -> None:
        self.cpu_milli += requests.cpu_milli
        self.memory += requests.memory
        self.pods += requests.pods
        if requests.gpu_resource == self.gpu_resource and not requests.other_gpus:
            self.gpus += requests.gpus
            return
        for resource, count in requests.gpus_by_resource():
            self.add_gpus(resource, count)

    def add_gpus(self, resource: str, count: int) -> None:
        """So many more of this resource are left; of one that the node does not offer as well."""
        if resource == self.gpu_resource:
            self.gpus += count
        elif count:
            others = dict(self.other_gpus)
            others[resource] = others.get(resource, 0) + count
            self.other_gpus = tuple(others.items())

    def of(self, resource: str) -> int:
        """The GPUs of this resource that are left."""
        if resource == self.gpu_resource:
            return self.gpus
        return next((count for name, count in self.other_gpus if name == resource), 0)

    def gpus_by_resource(self) -> tuple[tuple[str, int], ...]:
        return ((self.gpu_resource, self.gpus), *self.other_gpus)

    def as_resources(self) -> Resources:
        rest = max(self.cpu_milli, 0), max(self.memory, 0), max(self.pods, 0)
        if self.other_gpus or self.gpu_resource:
            return Resources.counting(self.gpus_by_resource(), *rest)
        return Resources(max(self.gpus, 0), *rest)


@dataclass(slots=True)
class Belongings:
    """Which Jobs and live pods each workload has: by (namespace, uid), so that no other namespace can pose as one."""

    jobs: dict[tuple[str, str], list[JobView]] = field(default_factory=dict)
    pods: dict[tuple[str, str], list[PodView]] = field(default_factory=dict)

    @classmethod
    def of(cls, jobs: Iterable[JobView], pods: Iterable[PodView]) -> Belongings:
        found = cls()
        for job in jobs:
            found.jobs.setdefault((job.namespace, job.workload_uid), []).append(job)
        for pod in pods:
            if pod.workload_uid:
                found.pods.setdefault((pod.namespace, pod.workload_uid), []).append(pod)
        return found

    def bound(self, namespace: str, uid: str, *job_names: str) -> bool:
        """Whether a live pod of these Jobs is visible on a node: then the pod counts, and nothing else does."""
        return any(pod.node and pod.job_name in job_names for pod in self.pods.get((namespace, uid), ()))

    def present(self, namespace: str, uid: str, job_name: str) -> set[int]:
        """Which of a gang's pods are visible on a node, by index."""
        pods = self.pods.get((namespace, uid), ())
        return {pod.index for pod in pods if pod.node and pod.job_name == job_name}

    def empty(self, job: JobView) -> bool:
        """Whether the Job was stopped for another workload, and has no live pod any more: it will have none."""
        pods = self.pods.get((job.namespace, job.workload_uid), ())
        return job.preempted and not any(pod.job_name == job.name for pod in pods)

    def visible(self, assignment: Assignment) -> bool:
        """Whether the assignment's Job, or a later one, is visible."""
        jobs = self.jobs.get((assignment.namespace, assignment.uid), ())
        return any(job.attempt >= assignment.turn.attempt for job in jobs)


def standing(snapshot: Snapshot, ledger: Ledger, belongings: Belongings) -> dict[str, Assignment]:
    """The promises still to be counted: their Job is neither visible nor known to have come and gone."""
    return {
        uid: promise
        for uid, promise in ledger.in_flight.items()
        if not belongings.visible(promise) and not (0 < ledger.made.get(uid, 0) <= snapshot.jobs_version)
    }


@dataclass(frozen=True, slots=True)
class Holding:
    """What something holds on a node: a live pod, a Job whose pod is not there yet, or a promise.

    `leaving`: it is being stopped already. `until`: the moment after which Kubernetes stops it, where there is one.
    """

    namespace: str
    workload_uid: str
    node: str
    requests: Resources
    leaving: bool = False
    until: float | None = None


def patience(deadline: float, pods: int, *, tried: bool) -> float:
    """Seconds from a Job's creation after which it is taken back if its pods (of a gang so many, else 0) have not found
    their places. `deadline`: the settings' `bindDeadlineSeconds`; `tried`: whether the kube-scheduler has tried.
    """
    return deadline * (1 if tried else _UNTRIED) + _EACH * pods


def holdings(
    snapshot: Snapshot, promised: Mapping[str, Assignment], mine: Belongings, asked: Asked, deadline: float
) -> Iterator[Holding]:
    """All that holds something on a node; of all promises only those that are `standing` count. `deadline`: the
    settings' `bindDeadlineSeconds`.
    """
    nodes = {node.name for node in snapshot.nodes}
    jobs = {(job.namespace, job.name): job for job in snapshot.jobs if job.active_deadline or _leaving(job)}
    for pod in snapshot.pods:
        if pod.node in nodes:
            job = jobs.get((pod.namespace, pod.job_name))
            leaving = _going(pod, snapshot.now) if pod.terminating else job is not None and _leaving(job)
            until = _until(job) if job is not None else None
            yield Holding(pod.namespace, pod.workload_uid, pod.node, pod.requests, leaving, until)
    for job, claimed, pods in _claims(snapshot, mine, asked, deadline):
        if job.places:
            present = (
                mine.present(job.namespace, job.workload_uid, job.name) | job.done | set(range(pods, MAX_REPLICAS))
            )
            for node, requests in _places(job.places, present, nodes, claimed):
                yield Holding(job.namespace, job.workload_uid, node, requests, _leaving(job), _until(job))
        elif job.node in nodes and not mine.bound(job.namespace, job.workload_uid, job.name):
            yield Holding(job.namespace, job.workload_uid, job.node, claimed, _leaving(job), _until(job))
    for promise in promised.values():
        if promise.places:
            present = mine.present(promise.namespace, promise.uid, promise.job_name)
            for node, requests in _places(promise.places, present, nodes, promise.requests):
                yield Holding(promise.namespace, promise.uid, node, requests)
        elif promise.node in nodes and not mine.bound(promise.namespace, promise.uid, *promise.job_names):
            yield Holding(promise.namespace, promise.uid, promise.node, promise.requests)


def _places(
    places: Places, present: Set[int], nodes: Container[str], each: Resources
) -> Iterator[tuple[str, Resources]]:
    """What a gang claims for those of its pods that are not present, by node."""
    for node, left in left_of(places, present):
        if node in nodes:
            yield node, times(each, left)


def room(nodes: Iterable[NodeView], held: Iterable[Holding]) -> dict[str, Room]:
    """What is left on each node, by name."""
    left = {node.name: whole(node) for node in nodes}
    for holding in held:
        left[holding.node].take(holding.requests)
    return left


def _going(pod: PodView, now: float) -> bool:
    """Whether a terminating pod may be expected to be gone soon: one that is stuck holds its place like any other."""
    return pod.gone_by is None or now - STUCK <= pod.gone_by <= now + PATIENCE


def _leaving(job: JobView) -> bool:
    return job.deleting or job.preempted


def _until(job: JobView) -> float | None:
    return job.started + job.active_deadline if job.started is not None and job.active_deadline else None


def _claims(
    snapshot: Snapshot, mine: Belongings, asked: Asked, deadline: float
) -> Iterator[tuple[JobView, Resources, int]]:
    """Unfinished Jobs that may claim room before their pods do, with what each of how many pods claims: only of a
    workload that exists in its namespace, and of its Jobs only the newest that may. Their pods count as anybody's do.
    """
    for view in snapshot.workloads:
        jobs = [job for job in mine.jobs.get((view.namespace, view.uid), ()) if not (job.finished or mine.empty(job))]
        jobs.sort(key=lambda job: (job.attempt, job.created, job.name), reverse=True)
        for job in jobs:
            young = abs(snapshot.now - job.created) < 2 * patience(deadline, pods_in(job.places), tried=False)
            claimed, pods = _believed(view, job, asked, young=young)
            if pods:
                yield job, claimed, pods
                break


def _believed(view: WorkloadView, job: JobView, asked: Asked, *, young: bool) -> tuple[Resources, int]:
    """What the Job claims for each pod that is not there yet, and for how many pods at most. `young`: it was created
    so lately that pods of it may well be on their way.

    Whoever may create Jobs can write berth's labels and annotations on one, and the ledger remembers a promise only
    until its Job is visible. So the truth is the workload, of which the promise was made, whatever its Job says.

    Of a Job of another spec the GPUs are believed, as many as any workload can want, and nothing else: it may have
    wanted more until it was edited, and until the Job is taken back its pods may still get them. Which CPU and memory
    are too much nobody can tell, nor whether there were more pods than now; where such a pod takes them after all, the
    kube-scheduler lets another wait for that moment.

    Nobody makes pods for a Job that is deleted or suspended, and one of another spec is taken back. Those made before
    may only not be visible yet; a Job that stays all the same claims nothing for ever.
    """
    spec, said = view.spec, job.requests
    if not young and (spec is None or job.deleting or job.suspended or job.preempted):
        return Resources(), 0
    foreign = Resources(min(said.gpus, MAX_GPUS), gpu_resource=said.gpu_resource)
    if spec is None:
        return foreign, 1
    wanted = asked(spec)
    # Most Jobs ask for just what is wanted; only the others are worth a hash.
    other = said.gpus != wanted.gpus or said.gpu_resource != wanted.gpu_resource or pods_in(job.places) > spec.replicas
    if other and job.spec_hash and job.spec_hash != spec_hash(spec):
        return foreign, spec.replicas if young else 0
    return wanted, spec.replicas


def whole(node: NodeView) -> Room:
    """All that the node offers."""
    offered = node.allocatable
    return Room(offered.gpus, offered.cpu_milli, offered.memory, offered.pods, offered.gpu_resource, offered.other_gpus)
