"""What the kubelet says about devices on its podresources socket: which it advertises, and which container has which.

For the registration's self-check and for whoever compares with the node's ledger. Knows pods by name, not by UID, and
leaves out plain init containers and, since Kubernetes 1.34, pods that have ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from nodeworkers.devices.holdings import Claimed, Holding, Listed, PodResourcesError
from nodeworkers.rpc import podresources_pb2 as messages
from planning.devices.claims import uid_of
from planning.devices.slices import DRIVER

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
_MESSAGE_LIMIT = 16 * 1024 * 1024  # as the kubelet's own clients have it; a full node tells more than grpc's 4 MiB
_SECONDS = 10.0  # for one question, with all attempts
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # the kubelet answers 100 questions a second of all who ask, and 10 at once
_Answer = TypeVar("_Answer", bound=Message)


class PodResources:
    """The kubelet's podresources service, v1."""

    def __init__(self, socket: Path = SOCKET, node: str = "") -> None:
        """`node`: the kubelet's name for itself, of which names of static pods end."""
        self._socket, self._node = socket, node

    async def list(self) -> tuple[Holding, ...]:
        """Who has which device of a device plugin. Raises PodResourcesError."""
        return (await self.pods()).devices

    async def pods(self) -> Listed:
        """Who has which device, by device plugin or DRA, and whether the kubelet knows its pods."""
        request = messages.ListPodResourcesRequest()
        answer = await self._ask("List", request, messages.ListPodResourcesResponse)
        return Listed(
            tuple(
                Holding(pod.namespace, pod.name, container.name, devices.resource_name, device)
                for pod in answer.pod_resources
                for container in pod.containers
                for devices in container.devices
                for device in devices.device_ids
            ),
            tuple(
                each
                for pod in answer.pod_resources
                for container in pod.containers
                for resource in container.dynamic_resources
                for each in self._claimed(pod, container, resource)
            ),
            # Static pods (pkg/kubelet/config/common.go: generatePodName) come from files of the node.
            any(not (self._node and pod.name.endswith(f"-{self._node.lower()}")) for pod in answer.pod_resources),
        )

    def _claimed(
        self, pod: messages.PodResources, container: messages.ContainerResources, claim: messages.DynamicResource
    ) -> Iterator[Claimed]:
        mine = [each for each in claim.claim_resources if each.driver_name == DRIVER]
        names = [device.name for each in mine for device in each.cdi_devices]
        uid = next(filter(None, map(uid_of, names)), "")
        for each in mine:
            if each.pool_name == self._node or not self._node:
                yield Claimed(pod.namespace, pod.name, container.name, each.device_name, uid)

    async def allocatable(self) -> Mapping[str, frozenset[str]]:
        """The ids of the healthy devices by resource, whether a pod has them or not. Raises PodResourcesError."""
        request = messages.AllocatableResourcesRequest()
        answer = await self._ask("GetAllocatableResources", request, messages.AllocatableResourcesResponse)
        found: dict[str, set[str]] = {}
        for devices in answer.devices:
            found.setdefault(devices.resource_name, set()).update(devices.device_ids)
        return {resource: frozenset(ids) for resource, ids in found.items()}

    async def _ask(self, method: str, request: Message, answer: type[_Answer]) -> _Answer:
        until = time.monotonic() + _SECONDS
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._call(method, request, answer, until - time.monotonic())
            except grpc.aio.AioRpcError as error:
                # The same code means too many questions and too long an answer; only the first may pass.
                busy = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in _details(error)
                if not busy or time.monotonic() + pause >= until:
                    raise PodResourcesError(
                        f"The kubelet does not answer {method} on {self._socket}: "
                        f"{_details(error) or 'no reason given'} ({error.code().name})."
                    ) from error
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _call(self, method: str, request: Message, answer: type[_Answer], seconds: float) -> _Answer:
        # A channel for each question: one that is kept may wait two minutes before it finds a new kubelet.
        options = (("grpc.max_receive_message_length", _MESSAGE_LIMIT), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            call = channel.unary_unary(
                f"/v1.PodResourcesLister/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            return await call(request, timeout=seconds)


def _details(error: grpc.aio.AioRpcError) -> str:
    return (error.details() or "").rstrip(".")[:500]
