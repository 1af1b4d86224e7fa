"""The few writes that activities make to workloads and Jobs: each is safe to repeat, and bound to the version that was
looked at, so that a late writer never undoes a newer truth.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from crds.gpuworkload import API_VERSION, KIND
from kube.client import KubeClient, Propagation
from kube.errors import Conflict, Invalid, NotFound
from kube.resources import GPUWORKLOADS, JOBS, ObjectRef, Resource
from planning.model import JobView, QuotaView, WorkloadView
from planning.naming import FINALIZER, PREEMPTED_ANNOTATION, WITHDRAWN_ANNOTATION
from planning.views import job_view
from planning.windows import ReservationView

# Writes a workload's status, so that the cache knows it too; the object as it is then, or None as `write_status` does.
Write = Callable[[WorkloadView, Mapping[str, Any]], Awaitable[dict[str, Any] | None]]


def reference(view: WorkloadView) -> ObjectRef:
    return ObjectRef(API_VERSION, KIND, view.name, view.namespace, view.uid, str(view.resource_version))


async def write_status(kube: KubeClient, view: WorkloadView, status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Patches the status if the object is still at the version that was looked at. None: it changed or is gone, and
    whoever changed it has the newer truth.
    """
    body = {
        "metadata": {"uid": view.uid, "resourceVersion": str(view.resource_version)},
        "status": dict(status),
    }
    try:
        return await kube.merge_patch(GPUWORKLOADS, view.name, view.namespace, body, subresource="status")
    except (Conflict, NotFound):
        return None


async def add_finalizer(kube: KubeClient, view: WorkloadView) -> dict[str, Any] | None:
    """Adds berth's finalizer (others' stay), if the object is still at that version. Returns the object as it is then,
    or None: it changed, is being deleted, or is gone.
    """
    try:
        if view.finalizer:
            raw = await kube.get(GPUWORKLOADS, view.name, view.namespace)
            same = int(raw["metadata"]["resourceVersion"]) == view.resource_version
            return raw if same and raw["metadata"]["uid"] == view.uid else None
        # A merge patch costs the API server half of a server-side apply; the version makes replacing the list safe.
        body = {
            "metadata": {
                "uid": view.uid,
                "resourceVersion": str(view.resource_version),
                "finalizers": [*view.other_finalizers, FINALIZER],
            }
        }
        return await kube.merge_patch(GPUWORKLOADS, view.name, view.namespace, body)
    except (Conflict, NotFound):
        return None
    except Invalid:
        # No finalizer may be added to what is being deleted; anything else is a refusal that somebody must hear of.
        try:
            raw = await kube.get(GPUWORKLOADS, view.name, view.namespace)
        except NotFound:
            return None
        if raw["metadata"]["uid"] != view.uid or "deletionTimestamp" in raw["metadata"]:
            return None
        raise


async def remove_finalizer(kube: KubeClient, view: WorkloadView, raw: Mapping[str, Any] | None = None) -> bool:
    """Removes berth's finalizer. False: the object changed meanwhile, look again. `raw`: its newest state, if known."""
    try:
        for _ in range(3):
            newest = raw if raw is not None else await kube.get(GPUWORKLOADS, view.name, view.namespace)
            meta = newest["metadata"]
            if meta["uid"] != view.uid or FINALIZER not in meta.get("finalizers", ()):
                return True
            left = [f for f in meta["finalizers"] if f != FINALIZER]
            body = {"metadata": {"finalizers": left, "uid": view.uid, "resourceVersion": meta["resourceVersion"]}}
            try:
                await kube.merge_patch(GPUWORKLOADS, view.name, view.namespace, body)
                return True
            except Conflict:
                raw = None
    except NotFound:
        return True
    return False


async def mark_withdrawn(
    kube: KubeClient, namespace: str, name: str, uid: str, message: str | None, *, version: int | None = None
) -> int | None:
    """Writes on a Job why it is withdrawn, or with None that it is not. Returns the resourceVersion that it has then;
    None: it is gone, another has its name, or it is no longer what it was at `version`.
    """
    metadata: dict[str, Any] = {"uid": uid, "annotations": {WITHDRAWN_ANNOTATION: message}}
    if version is not None:
        metadata["resourceVersion"] = str(version)
    try:
        raw = await kube.merge_patch(JOBS, name, namespace, {"metadata": metadata})
    except (NotFound, Conflict):
        return None
    return int(raw["metadata"]["resourceVersion"])


async def suspend_job(kube: KubeClient, namespace: str, name: str, uid: str, message: str, *, version: int) -> bool:
    """Suspends a Job, and writes on it why. False: it is gone, or no longer what it was at `version`."""
    metadata = {"uid": uid, "resourceVersion": str(version), "annotations": {PREEMPTED_ANNOTATION: message}}
    try:
        await kube.merge_patch(JOBS, name, namespace, {"metadata": metadata, "spec": {"suspend": True}})
    except (NotFound, Conflict):
        return False
    return True


async def write_cluster_status(
    kube: KubeClient, kind: Resource, view: QuotaView | ReservationView, status: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Writes the status of a cluster-scoped kind; None if it is gone or was changed since it was looked at."""
    body = {"metadata": {"uid": view.uid, "resourceVersion": str(view.resource_version)}, "status": dict(status)}
    try:
        return await kube.merge_patch(kind, view.name, None, body, subresource="status")
    except (NotFound, Conflict):
        return None


async def delete_job(
    kube: KubeClient, namespace: str, name: str, uid: str, *, finished: bool, version: int | None = None
) -> bool:
    """Deletes a Job. One that still claims GPUs goes last, after its pods: as long as it is there, they are not free.
    A finished one claims nothing, and its pods go after it, which costs the cluster fewer writes.

    False: it is gone, another has its name, or it is no longer what it was at `version`.
    """
    propagation: Propagation = "Background" if finished else "Foreground"
    try:
        await kube.delete(JOBS, name, namespace, uid=uid, resource_version=version, propagation=propagation)
    except (NotFound, Conflict):
        return False
    return True


async def delete_job_before(kube: KubeClient, job: JobView, attempt: int, gpu_resource: str) -> None:
    """Deletes a Job of a turn before `attempt`. It may be that turn's by now, if it had been stopped: then it stays."""
    while not job.deleting and job.attempt < attempt:
        version, ended = job.resource_version, bool(job.finished)
        if await delete_job(kube, job.namespace, job.name, job.uid, finished=ended, version=version):
            return
        try:
            found = job_view(await kube.get(JOBS, job.name, job.namespace), gpu_resource)
        except NotFound:
            return
        if found is None or found.uid != job.uid:
            return
        job = found
