"""Lets a Job that was stopped go on in its workload's next turn, in one write; or clears the way for another.

For the activity that carries out a round, and like all of that to be repeated at any point.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from activities.patience import TRANSIENT, cut
from activities.writes import delete_job, mark_withdrawn
from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound
from kube.resources import JOBS
from planning import jobs
from planning.model import Assignment

log = logging.getLogger(__name__)


class Changed(Exception):
    """The Job that was to go on is no longer as it was decided upon. It may be this very turn's by now."""


async def resume(kube: KubeClient, assignment: Assignment, manifest: jobs.Manifest) -> dict[str, Any] | None:
    """The stopped Job, now that of `manifest`. None: there is none, or the API server did not let it go on and it was
    deleted; a new one is to be made.
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
    except TRANSIENT:
        raise
    except KubeError as refused:
        log.info("Job %s/%s is replaced: %s", assignment.namespace, stopped.name, cut(refused))
    # The mark is for the workload's own workflow, which takes any other deletion of a Job for somebody's.
    job, why = (assignment.namespace, stopped.name, stopped.uid), "another Job takes its place"
    marked = await mark_withdrawn(kube, *job, why, version=stopped.version)
    if marked is None or not await delete_job(kube, *job, finished=False, version=marked):
        raise Changed
    return None
