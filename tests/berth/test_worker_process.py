"""The worker with more workflows under way than its cache is tempted to hold."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from temporalio.client import Client, WorkflowHandle

from activities.cache import ClusterCache
from activities.messages import WorkloadState, workload_id
from activities.sampling import Usages
from activities.signatures import TASK_QUEUE, WorkloadRef
from berth.process import ProcessOptions, connect_temporal
from berth.worker_process import build_worker, make_current
from kube.client import KubeClient
from kube.errors import NotFound
from kube.events import EventRecorder
from stack import Stack

SLOW, WAITING = 8, 150


class Api:
    """Has a GPUWorkload for every name but those in the namespace `slow`: that they are gone it tells late."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.cut_off: list[str] = []

    async def get(self, resource: object, name: str, namespace: str) -> dict[str, Any]:
        if namespace != "slow":
            meta = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1", "generation": 1}
            return {"metadata": meta, "spec": {"modelName": "m", "gpuCount": 1}}
        try:
            await asyncio.sleep(2.0)
        except asyncio.CancelledError:
            self.cut_off.append(name)
            raise
        self.told.append(name)
        raise NotFound(name, status=404)

    async def merge_patch(self, resource: object, name: str, namespace: str, body: object, **_: str) -> dict[str, Any]:
        return await self.get(resource, name, namespace)


async def begin(temporal: Client, namespace: str, number: int) -> WorkflowHandle[Any, Any]:
    ref = WorkloadRef(f"{namespace}-{number}", namespace, f"{namespace}-{number}")
    return await temporal.start_workflow(
        "GPUWorkload", WorkloadState(ref), id=workload_id(ref.uid), task_queue=TASK_QUEUE
    )


@pytest.mark.stack
async def test_no_look_is_cut_off_because_others_came(stack: Stack) -> None:
    endpoints = stack.endpoints
    temporal = await connect_temporal(
        ProcessOptions(temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace),
        lazy=False,
    )
    api = Api()
    kube = cast(KubeClient, api)  # all that looks at workloads without Jobs ask of it
    cache = ClusterCache(kube)
    for reflector in cache.reflectors.values():
        reflector.synced.set()  # of a cluster in which there is nothing
    worker = build_worker(temporal, cache, kube, EventRecorder(kube, "test", "here"), Usages())
    async with worker, asyncio.timeout(120):
        while not await make_current(temporal, only_if_none=False):
            await asyncio.sleep(0.1)
        slow = [await begin(temporal, "slow", number) for number in range(SLOW)]
        waiting = [await begin(temporal, "waiting", number) for number in range(WAITING)]
        assert {await handle.result() for handle in slow} == {"Deleted"}
        for handle in waiting:
            await handle.terminate()
    assert api.cut_off == []
    assert sorted(api.told) == [f"slow-{number}" for number in range(SLOW)], "each looked once"
