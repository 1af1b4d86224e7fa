"""podresources v1 as the kubelet serves it: which container has which devices, and which devices can be allocated.

After pkg/kubelet/apis/podresources/server_v1.go and pkg/kubelet/apis/grpc/ratelimit.go of Kubernetes 1.36.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from nodeworkers.rpc import podresources_pb2
from tests.fake_kubelet.manager import DeviceManager
from tests.fake_kubelet.pods import WITHOUT_NUMA, Container, Pod, ids
from tests.fake_kubelet.transcript import Transcript
from tests.fake_kubelet.wire import Context

QUERIES_PER_SECOND = 100.0
BURST = 10.0


class PodResources:
    """v1.PodResourcesLister. `active`: the pods that hold their devices."""

    def __init__(
        self,
        manager: DeviceManager,
        active: Callable[[], Iterable[Pod]],
        transcript: Transcript,
        clock: Callable[[], float],
    ) -> None:
        self._manager, self._active, self._transcript, self._clock = manager, active, transcript, clock
        self._tokens, self._at = BURST, clock()

    async def List(self, request: Any, context: Context) -> podresources_pb2.ListPodResourcesResponse:
        """All active pods, also those without devices."""
        await self._limit(context, "List")
        pods = list(self._active())
        self._manager.free_ended({pod.uid for pod in pods})
        return podresources_pb2.ListPodResourcesResponse(pod_resources=[self._shown(pod) for pod in pods])

    async def Get(self, request: Any, context: Context) -> podresources_pb2.GetPodResourcesResponse:
        """One pod, by name."""
        await self._limit(context, "Get")
        name, namespace = request.pod_name, request.pod_namespace
        for pod in self._active():
            if (pod.name, pod.namespace) == (name, namespace):
                return podresources_pb2.GetPodResourcesResponse(pod_resources=self._shown(pod))
        await context.abort(grpc.StatusCode.UNKNOWN, f"pod {name} in namespace {namespace} not found")
        raise AssertionError("abort does not return")

    async def GetAllocatableResources(
        self, request: Any, context: Context
    ) -> podresources_pb2.AllocatableResourcesResponse:
        """The healthy devices, whoever has them; one entry for each device and NUMA node. A device with a topology
        that has no nodes has no entry.
        """
        await self._limit(context, "GetAllocatableResources")
        manager = self._manager
        devices = [
            _entry(resource, device, node)
            for resource, healthy in manager.healthy.items()
            for device in sorted(healthy)
            for node in _nodes(manager.known[resource][device])
        ]
        return podresources_pb2.AllocatableResourcesResponse(devices=devices)

    def _shown(self, pod: Pod) -> podresources_pb2.PodResources:
        containers = [self._container(pod, each) for each in pod.containers if not each.init]
        return podresources_pb2.PodResources(name=pod.name, namespace=pod.namespace, containers=containers)

    def _container(self, pod: Pod, container: Container) -> podresources_pb2.ContainerResources:
        devices = []
        for resource, entry in self._manager.allocations.of_container(pod.uid, container.name).items():
            for device in sorted(ids(entry)):
                nodes: list[int | None] = [
                    node for node in entry.devices if node != WITHOUT_NUMA and device in entry.devices[node]
                ]
                devices += [_entry(resource, device, node) for node in nodes or [None]]
        return podresources_pb2.ContainerResources(name=container.name, devices=devices)

    async def _limit(self, context: Context, method: str) -> None:
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._at) * QUERIES_PER_SECOND)
        self._at = now
        if self._tokens < 1:
            self._transcript.note("rate limited", "", method)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1
        self._transcript.note("podresources", "", method)


def _nodes(device: Any) -> Iterator[int | None]:
    if not device.HasField("topology"):
        yield None
    for node in device.topology.nodes:
        yield node.ID


def _entry(resource: str, device: str, node: int | None) -> podresources_pb2.ContainerDevices:
    topology = None
    if node is not None:
        topology = podresources_pb2.TopologyInfo(nodes=[podresources_pb2.NUMANode(ID=node)])
    return podresources_pb2.ContainerDevices(resource_name=resource, device_ids=[device], topology=topology)
