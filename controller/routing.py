"""Who must hear of a change: the placement ledger, a workload's own workflow, both, or nobody.

Pure. A poke carries no content (law 2), so routing too much is harmless and costs history events, while routing too
little is repaired by the sweep. A workload's workflow is begun only when there is something for it to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from activities.messages import provisioning_id, workload_id
from controller.digests import JobDigest, NodeDigest, RequestDigest, WorkloadDigest
from planning import endings


@dataclass(frozen=True, slots=True)
class WorkloadPoke:
    """`begin`: start the workflow if none is open; else only an open one hears of it. `node` and `phase` are what a
    workflow shows from its start, so that it need not write them later. `ended`: by the ledger, of which a workflow
    that is open does not know; nothing else goes to a tombstone. `order`: it is for the workflow of the workload's
    order of a node, not for its own.
    """

    uid: str
    namespace: str
    name: str
    begin: bool
    node: str = ""
    phase: str = "Running"
    ended: bool = False
    order: bool = False

    @property
    def receiver(self) -> str:
        """The workflow's id."""
        return provisioning_id(self.uid) if self.order else workload_id(self.uid)


@dataclass(frozen=True, slots=True)
class Route:
    ledger: bool = False
    workloads: tuple[WorkloadPoke, ...] = field(default_factory=tuple)


NOBODY = Route()


def on_workload(
    uid: str,
    old: WorkloadDigest | None,
    new: WorkloadDigest | None,
    jobs: Iterable[JobDigest],
    *,
    followed: bool = False,
) -> Route:
    """A GPUWorkload was added, changed or deleted; `jobs` are its Jobs as far as the controller knows. `followed`:
    whether its workflow may be open.
    """
    if new is None:
        if old is None or old.finished:
            return NOBODY
        return Route(ledger=True, workloads=(WorkloadPoke(uid, old.namespace, old.name, begin=False),))
    if new.finished:
        if followed and old is not None and not old.finished and any(ends_plainly(job, new) for job in jobs):
            return Route(workloads=(WorkloadPoke(uid, new.namespace, new.name, begin=False, ended=True),))
        return NOBODY  # a tombstone: nothing is ever started for it again
    if new.deleting:
        if old is not None and old.deleting:
            return NOBODY
        return Route(ledger=True, workloads=(WorkloadPoke(uid, new.namespace, new.name, begin=new.finalizer),))
    if old is not None and old.generation == new.generation:
        return NOBODY  # our own status writes end here
    # An edit concerns a Job from the moment it exists: a suspension takes it back also while its image is being pulled.
    # A new workload's Job is left alone until it has something to tell.
    mine = [job for job in jobs if job.namespace == new.namespace and (job.telling or new.generation > 1)]
    if new.generation == 1 and not mine:
        return Route(ledger=True)
    poke = WorkloadPoke(uid, new.namespace, new.name, bool(mine), mine[0].node if mine else "")
    return Route(ledger=True, workloads=(poke,))


def ends_plainly(job: JobDigest, workload: WorkloadDigest) -> bool:
    """Whether the ledger tells of this Job's end, and nobody else need look."""
    return endings.ends_plainly(
        attempt=job.attempt, complete=job.complete, generation=workload.generation, deleting=workload.deleting
    )


def on_job(
    old: JobDigest | None, new: JobDigest | None, workload: WorkloadDigest | None, *, followed: bool = True
) -> Route:
    """A Job of ours changed; `workload` is its owner as far as the controller knows. `followed`: whether its workflow
    may be open.
    """
    job = new or old
    if job is None or (workload is not None and workload.finished):
        # A tombstone's Job that goes unfinished frees its place; a finished one did so when it finished.
        return Route(ledger=new is None and job is not None and not job.finished)
    if workload is not None and workload.namespace != job.namespace:
        return NOBODY  # a Job that somebody labelled with another namespace's workload
    # A Job seen before its workload begins nothing: the label may be wrong, and a workload, once seen, finds its Jobs.
    name, known = workload.name if workload else job.workload, workload is not None
    poke = WorkloadPoke(job.workload_uid, job.namespace, name, known, job.node)
    if new is None:
        # Somebody took an unfinished Job away; its workload must hear of it even if nobody follows it yet. One that is
        # deleted and has no finalizer (any more) is past helping.
        alive = workload is not None and (workload.finalizer or not workload.deleting)
        if job.complete and workload is not None and not workload.deleting:
            # Its own workflow has just deleted it. A signal now would make Temporal refuse that workflow's end, and
            # everything it did be done again.
            return Route(ledger=True)
        return Route(ledger=True, workloads=(replace(poke, begin=alive and not job.finished),))
    if new.finished and not (old is not None and old.finished):
        # A Job claims its GPUs until it is finished, a moment after its pod has gone.
        if workload is not None and ends_plainly(new, workload) and not followed:
            return Route(ledger=True)
        return Route(ledger=True, workloads=(replace(poke, phase="Succeeded") if new.complete else poke,))
    if old is None and workload is not None and workload.generation > 1 and not workload.caught_up:
        return Route(workloads=(poke,))  # made for a spec that was edited meanwhile; the edit was seen before the Job
    # A teardown deletes its own Jobs: whoever follows that workload knows.
    torn_down = workload is not None and workload.deleting
    if new.deleting and not (old is not None and old.deleting) and not new.finished and not torn_down:
        return Route(workloads=(poke,))
    if new.assembled and not (old is not None and old.assembled) and not new.ready:
        return Route(ledger=True)  # it lifts the gates
    if new.halted and not (old is not None and old.halted):
        return Route(ledger=True)  # its turn is over
    if not new.ready or (old is not None and old.ready):
        return NOBODY
    # That it runs, the ledger shows for all at once; it begins no workflow. Who came back or was edited may have one
    # open, which would go on showing what was before.
    followed = new.attempt > 0 or (workload is not None and workload.generation > 1)
    return Route(ledger=True, workloads=(replace(poke, begin=False),) if followed else ())


def on_request(old: RequestDigest | None, new: RequestDigest | None) -> Route:
    """A ProvisioningRequest changed. That one was made is no news to whoever made it."""
    request = new or old
    if request is None or (new is not None and new.told == (old.told if old is not None else frozenset())):
        return NOBODY
    return with_order(Route(), request.workload_uid)


def with_order(route: Route, uid: str) -> Route:
    """The same for a workload that has a ProvisioningRequest: whatever concerns others may end its order too."""
    if route is NOBODY:
        return NOBODY
    return replace(route, workloads=(*route.workloads, WorkloadPoke(uid, "", "", begin=False, order=True)))


def on_node(old: NodeDigest | None, new: NodeDigest | None, jobs_on: Callable[[str], Iterable[JobDigest]]) -> Route:
    """A node came, changed or went. Those who run on it hear of it when it can no longer be relied on, or can again."""
    node = new or old
    if node is None or (old is not None and new is not None and old.fingerprint == new.fingerprint):
        return NOBODY
    workloads: tuple[WorkloadPoke, ...] = ()
    if old is not None and (new is None or new.able != old.able):
        workloads = tuple(
            WorkloadPoke(job.workload_uid, job.namespace, job.workload, begin=True, node=job.node)
            for job in jobs_on(node.name)
            if not job.finished and not job.halted
        )
    return Route(ledger=True, workloads=workloads)
