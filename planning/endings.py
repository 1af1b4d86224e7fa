"""Decides which workloads end without a workflow of their own: those whose first Job completed, so that nothing is left
to decide. All other ends (failures, what was edited, what came back) are for the workload's own workflow.

For the placement round, whose ledger tells of them in batches.
"""

from __future__ import annotations

from hashlib import blake2b

from planning.capacity import Belongings
from planning.model import Completion, Snapshot

# Of one round: each costs two writes, and who waits for a place should not wait for many of them.
_ENDINGS = 200


def ends_plainly(*, attempt: int, complete: bool, generation: int, deleting: bool) -> bool:
    """Whether nobody but the ledger need look at the end of this Job: `attempt` and `complete` are the Job's,
    `generation` and `deleting` its workload's.
    """
    return complete and attempt == 0 and generation == 1 and not deleting


def completions(snapshot: Snapshot, mine: Belongings, seed: int) -> list[Completion]:
    """The workloads that end now. Of too many a part, by lot: some may be such as cannot be written, for whatever
    reason, and they must not keep the others out for ever.
    """
    views = snapshot.by_uid()
    found = []
    for job in snapshot.jobs:
        view = views.get((job.namespace, job.workload_uid))
        if view is None or view.finished or job.deleting or len(mine.jobs[view.namespace, view.uid]) > 1:
            continue
        complete = job.finished == "Complete"
        if ends_plainly(attempt=job.attempt, complete=complete, generation=view.generation, deleting=view.deleting):
            found.append(Completion(view.uid, view.namespace, view.name, job.name))
    return sorted(found, key=lambda each: _lot(each, seed))[:_ENDINGS] if len(found) > _ENDINGS else found


def _lot(completion: Completion, seed: int) -> bytes:
    return blake2b(f"{seed} {completion.uid}".encode(), digest_size=8).digest()
