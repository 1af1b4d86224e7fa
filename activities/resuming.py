"""Lets a Job that was stopped go on in its workload's next turn, in one write; or clears the way for another, which a
later round makes.

For the activity that carries out a round, and like all of that to be repeated at any point.
"""

from __future__ import annotations

import time
from typing import Any

from activities.patience import cut, may_pass
from activities.writes import delete_job
from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound
from kube.resources import JOBS
from planning import jobs
from planning.model import Assignment


class Changed(Exception):
    """The Job that was to go on is no longer as it was decided upon. It may be this very turn's by now."""


class Replaced(Exception):
    """The Job could not go on, and was deleted; the text says why, for a person."""


async def resume(kube: KubeClient, assignment: Assignment, manifest: jobs.Manifest) -> dict[str, Any] | None:
    """The stopped Job, now that of `manifest`. None: there is none, and a new one is to be made. Raises Replaced for
    one that is not let go on, and ValueError if it may not be deleted either.
    """
    stopped = assignment.resumes
    if stopped is None:
        return None
    try:
        body = jobs.resumed(manifest, stopped, time.time())
        return await kube.merge_patch(JOBS, stopped.name, assignment.namespace, body)
    except NotFound:
        return None
    except Conflict:
        raise Changed from None
    except KubeError as refused:
        if may_pass(refused):
            raise
        why = (
            f"Job {stopped.name} could not be resumed on {assignment.node}, and another takes its place: {cut(refused)}"
        )
    try:
        # Until it is gone there is no other: the namespace's quota may have room for one Job alone.
        deleted = await delete_job(
            kube, assignment.namespace, stopped.name, stopped.uid, finished=False, version=stopped.version
        )
    except KubeError as refused:
        if may_pass(refused):
            raise
        raise ValueError(f"Job {stopped.name}, whose place it takes, could not be deleted: {cut(refused)}") from None
    raise Replaced(why) if deleted else Changed
