"""A look at a workload sees what is that workload's, and nothing that a label claims to be."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from temporalio.testing import ActivityEnvironment

from activities.cache import ClusterCache
from activities.signatures import Followed, FollowRequest, WorkloadRef
from activities.workloads import Workloads
from kube.errors import NotFound
from planning.model import JobView, Resources, Turn
from planning.views import workload_view

REAL = JobView("j", "ns", "w-u-0", 5, "u", 0, 0, "n", Resources(gpus=1), time.time(), started=time.time(), ready=True)
FORGED = replace(REAL, uid="evil", namespace="attacker", name="evil", attempt=99, ready=False, finished="Complete")


class Server:
    """Takes note of every write."""

    def __init__(self) -> None:
        self.patched: list[tuple[str, str]] = []
        self.deleted: list[tuple[str, str]] = []

    async def merge_patch(self, _: Any, name: str, namespace: str, body: dict[str, Any], **__: Any) -> dict[str, Any]:
        self.patched.append((namespace, body.get("status", {}).get("phase", "")))
        return stored()

    async def delete(self, _: Any, name: str, namespace: str, **__: Any) -> None:
        self.deleted.append((namespace, name))

    async def get(self, _: Any, name: str, namespace: str) -> dict[str, Any]:
        if namespace != "ns":
            raise NotFound("no such object", reason="NotFound", request=name)
        return stored()


def stored() -> dict[str, Any]:
    return {
        "metadata": {
            "uid": "u", "namespace": "ns", "name": "w", "generation": 1, "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["gpu.warp.dev/finalizer"],
        },
        "spec": {"modelName": "m", "gpuCount": 1},
        "status": {"phase": "Scheduled"},
    }  # fmt: skip


async def look(namespace: str, server: Server) -> Followed:
    cache = ClusterCache(cast(Any, None))
    for reflector in cache.reflectors.values():
        reflector.synced.set()
    cache.workloads._put("u", 7, workload_view(stored()))
    for job in (REAL, FORGED):
        cache.jobs._put(job.uid, 5, job)
    events = SimpleNamespace(record=lambda **_: None)
    workloads = Workloads(cache, cast(Any, server), cast(Any, None), cast(Any, events))
    request = FollowRequest(WorkloadRef("u", namespace, "w"), Turn(), {}, 0.0)
    followed: Followed = await ActivityEnvironment().run(workloads.follow, request)
    return followed


async def test_a_job_of_another_namespace_does_not_end_a_workload() -> None:
    server = Server()
    followed = await look("ns", server)
    assert followed.next == "wait"
    assert server.deleted == []
    assert [phase for _, phase in server.patched] in ([], ["Running"], ["Scheduled"])


async def test_a_workflow_begun_for_a_forged_job_touches_its_own_namespace_only() -> None:
    server = Server()
    followed = await look("attacker", server)
    assert (followed.next, followed.phase) == ("end", "Deleted")
    assert server.deleted == [("attacker", "evil")]
    assert server.patched == []
