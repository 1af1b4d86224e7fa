"""Simulated node agents and images of kernel caches, for `benchmarks.caches`: no GPU, no extraction, no signature.

An agent serves its node's task queue, answers every order at once, and first writes the node's status object as the
node's process does: created at the first order, then its status by merge patch at each. So API writes count honestly.
Tests use the parts that any simulated node needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from images.descriptor import OCI_MANIFEST, Descriptor
from images.endpoints import Settings
from images.reference import Reference
from images.registry import Registry
from kube.client import KubeClient
from kube.resources import CSINODES, TRITONKERNELCACHENODESTATUSES
from planning.caches.orders import PREPARE, CacheRef, NodeTask, Report, node_queue
from planning.caches.volumes import DRIVER
from planning.times import timestamp
from stack.proc import die_with_parent

GPU = {"id": "simulated-0", "product": "simulated", "compatible": True}


def node_status(ref: CacheRef, node: str) -> dict[str, Any]:
    """The object that tells how a cache stands on a node, without its status."""
    return {
        "apiVersion": TRITONKERNELCACHENODESTATUSES.api_version,
        "kind": TRITONKERNELCACHENODESTATUSES.kind,
        "metadata": {"name": f"{ref.name}-{node}", "namespace": ref.namespace},
        "spec": {"nodeName": node, "kernelCacheRef": {"name": ref.name, "uid": ref.uid}},
    }


def ready_status(digest: str, generation: int) -> dict[str, Any]:
    """The status of a node that has the cache, as large as a real one with a single GPU."""
    now = timestamp(time.time())
    conditions = [
        {"type": kind, "status": "True", "reason": kind, "message": "simulated", "lastTransitionTime": now,
         "observedGeneration": generation}
        for kind in ("Verified", "Compatible", "HitPredicted", "Ready")
    ]  # fmt: skip
    return {
        "observedGeneration": generation, "gpuType": "simulated", "driverVersion": "0", "simulated": True,
        "gpus": [GPU], "digest": digest, "targetDigest": digest, "sizeBytes": 0, "kernels": 0, "podsUsing": 0,
        "updated": now, "conditions": conditions,
    }  # fmt: skip


async def write(kube: KubeClient, ref: CacheRef, node: str, digest: str, generation: int, *, new: bool) -> None:
    """What a node writes for one order. Raises KubeError."""
    body = node_status(ref, node)
    if new:
        await kube.create(TRITONKERNELCACHENODESTATUSES, body)
    name, status = body["metadata"]["name"], {"status": ready_status(digest, generation)}
    await kube.merge_patch(TRITONKERNELCACHENODESTATUSES, name, ref.namespace, status, subresource="status")


@dataclass
class SimulatedAgent:
    """One node's. `serves` is what it answered last, by the cache's UID; `orders` counts all that came."""

    node: str
    kube: KubeClient
    serves: dict[str, str] = field(default_factory=dict)
    orders: int = 0

    @activity.defn(name=PREPARE)
    async def prepare(self, task: NodeTask) -> Report:
        order, uid = task.order, task.ref.uid
        self.orders += 1
        await write(self.kube, task.ref, self.node, order.digest, order.generation, new=uid not in self.serves)
        self.serves[uid] = order.digest
        return Report(self.node, order.epoch, "ready", order.digest, "Verified", "simulated: nothing was checked")

    def worker(self, temporal: Client) -> Worker:
        return node_worker(temporal, self.node, self.prepare)


def node_worker(temporal: Client, node: str, *activities: Callable[..., Any]) -> Worker:
    """What serves the node's task queue by these activities."""
    return Worker(
        temporal,
        task_queue=node_queue(node),
        activities=activities,
        max_concurrent_activities=8,
        max_concurrent_activity_task_polls=1,
    )


@contextlib.asynccontextmanager
async def serving(workers: Iterable[Worker]) -> AsyncIterator[None]:
    """They run within the block."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        yield


async def register(kube: KubeClient, node: str) -> None:
    """What the kubelet writes once berth's CSI driver has registered with it."""
    spec = {"drivers": [{"name": DRIVER, "nodeID": node, "topologyKeys": None}]}
    await kube.create(CSINODES, {"apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": {"name": node},
                                 "spec": spec})  # fmt: skip


@contextlib.contextmanager
def registry(program: Path) -> Iterator[str]:
    """A real registry on a free port, until the block ends; its host and port."""
    command = [str(program), "-address", "127.0.0.1:0", "-referrers=true"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=die_with_parent
    )
    with process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith("serving on "):
                raise SystemExit(f"The registry {program} did not start: it said {line!r}.")
            yield line.removeprefix("serving on ").strip()
        finally:
            process.kill()


async def push(host: str, images: Iterable[str]) -> dict[str, str]:
    """Pushes an image without kernels for each reference; its digest by reference, no two alike."""
    digests = {}
    async with Registry(Settings(insecure=frozenset({host}))) as into:
        for image in images:
            reference, config = Reference.parse(image), json.dumps({"simulated": image}).encode()
            digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
            blob = Descriptor("application/vnd.oci.image.config.v1+json", digest, len(config))
            manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": blob.as_json(),
                        "layers": [blob.as_json()]}  # fmt: skip
            await into.push_blob(reference, blob, config)
            digests[image] = (await into.push_manifest(reference, json.dumps(manifest).encode(), OCI_MANIFEST)).digest
    return digests
