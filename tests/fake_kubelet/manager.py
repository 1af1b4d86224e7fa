"""The kubelet's device manager: which devices there are, who has them, and what a plugin is asked when.

After pkg/kubelet/cm/devicemanager/manager.go and endpoint.go of Kubernetes 1.36.3, function by function; where Go's
maps have a random order, a seeded one takes its place. There is no topology manager: the default policy `none`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nodeworkers.rpc import deviceplugin_pb2
from tests.fake_kubelet import checkpoint, checks
from tests.fake_kubelet.pods import Allocations, Container, Pod, by_numa
from tests.fake_kubelet.transcript import Transcript
from tests.fake_kubelet.wire import CallFailed

GRACE_SECONDS = 300.0
"""How long capacity stays when a plugin is gone (endpointStopGracePeriod)."""
PRE_START_SECONDS = 30.0
T = TypeVar("T")


class NotAllocated(Exception):
    """The pod cannot have its devices; it fails with this text."""


class Plugin(Protocol):
    """A connection to a plugin."""

    async def call(self, name: str, request: Any, seconds: float | None = None) -> Any:
        """One of its methods. Raises CallFailed."""


@dataclass
class Endpoint:
    """Who serves a resource. `options` are None for one that is known from the checkpoint alone."""

    resource: str
    plugin: Plugin | None
    options: Any = None
    stopped_at: float | None = None

    async def call(self, name: str, request: Any, seconds: float | None = None) -> Any:
        """One of the plugin's methods. Raises CallFailed."""
        if self.stopped_at is not None or self.plugin is None:
            raise CallFailed("UNKNOWN", f"endpoint {self.resource} has been stopped")
        return await self.plugin.call(name, request, seconds)


class DeviceManager:
    """One life of the kubelet's device manager. `clock` in seconds, for the grace period."""

    def __init__(self, folder: Path, transcript: Transcript, chance: random.Random, clock: Callable[[], float]) -> None:
        self.folder, self.transcript, self._random, self._clock = folder, transcript, chance, clock
        self.endpoints: dict[str, Endpoint] = {}
        self.known: dict[str, dict[str, Any]] = {}
        self.healthy: dict[str, set[str]] = {}
        self.unhealthy: dict[str, set[str]] = {}
        self.allocated: dict[str, set[str]] = {}
        self.allocations = Allocations()
        self.checkpoint_writes = 0
        self._reusable: tuple[str, dict[str, set[str]]] = ("", {})

    # What the registration server tells.

    def connected(self, resource: str, plugin: Plugin, options: Any) -> None:
        """A plugin has registered: its endpoint takes the place of any other."""
        self.endpoints[resource] = Endpoint(resource, plugin, options)

    def disconnected(self, resource: str) -> None:
        """The resource's endpoint, whichever it is, is gone; all its devices are unhealthy."""
        endpoint = self.endpoints.get(resource)
        if endpoint is not None:
            self.unhealthy.setdefault(resource, set()).update(self.healthy.get(resource, ()))
            self.healthy[resource] = set()
            endpoint.stopped_at = self._clock()

    def received(self, resource: str, listed: Collection[Any]) -> None:
        """A list of ListAndWatch: it replaces all that was known, and the checkpoint is written."""
        self.known[resource] = {device.ID: device for device in listed}
        self.healthy[resource] = {device.ID for device in listed if device.health == checks.HEALTHY}
        self.unhealthy[resource] = {device.ID for device in listed if device.health != checks.HEALTHY}
        self.write_checkpoint()

    def others(self, resource: str) -> dict[str, str]:
        """The resource of each device that stands under another one that is served."""
        return {
            device: other
            for other, endpoint in self.endpoints.items()
            if other != resource and endpoint.stopped_at is None
            for device in self.known.get(other, ())
        }

    # What the node's status says.

    def resources(self) -> tuple[dict[str, int], dict[str, int]]:
        """Capacity and allocatable. A resource whose plugin is gone for longer than the grace period is dropped."""
        capacity: dict[str, int] = {}
        allocatable: dict[str, int] = {}
        dropped = False
        for resource in list(self.healthy):
            endpoint = self.endpoints.get(resource)
            gone = endpoint is None or (
                endpoint.stopped_at is not None and self._clock() - endpoint.stopped_at > GRACE_SECONDS
            )
            if gone:
                self.endpoints.pop(resource, None)
                self.healthy.pop(resource, None)
                self.unhealthy.pop(resource, None)
                dropped = True
            else:
                allocatable[resource] = len(self.healthy[resource])
                capacity[resource] = allocatable[resource] + len(self.unhealthy.get(resource, ()))
        if dropped:
            self.write_checkpoint()
        return capacity, allocatable

    # The checkpoint.

    def write_checkpoint(self) -> None:
        """Who has what, and which devices are healthy."""
        allocated = self._shuffled(self.allocations.entries.values())
        registered = {resource: self._shuffled(devices) for resource, devices in self.healthy.items()}
        checkpoint.write(self.folder, checkpoint.encode(allocated, registered))
        self.checkpoint_writes += 1

    def read_checkpoint(self) -> None:
        """At the start. Resources that were registered have no devices until their plugin registers again."""
        try:
            allocated, registered = checkpoint.decode((self.folder / checkpoint.FILE).read_bytes())
        except FileNotFoundError:
            return
        except checkpoint.Corrupt as error:
            self.transcript.note("checkpoint", "", f"{error}; going on without it")
            return
        for entry in allocated:
            self.allocations.insert(entry)
        self.allocated = self.allocations.held()
        for resource in registered:
            self.healthy[resource], self.unhealthy[resource] = set(), set()
            self.endpoints[resource] = Endpoint(resource, None, stopped_at=self._clock())

    # What pods ask for.

    def free_ended(self, active: Collection[str]) -> None:
        """Devices of pods that are not active any more are free."""
        if self.allocations.keep(active):
            self.allocated = self.allocations.held()

    async def allocate(self, pod: Pod, container: Container, active: Collection[str], restored: bool = False) -> None:
        """Devices for one container at the pod's admission. `active`: uids of pods that hold theirs. `restored`: the
        kubelet has just started and finds the pod; a container that runs has nothing to fear then.
        Raises NotAllocated.
        """
        if self._reusable[0] != pod.uid:
            self._reusable = (pod.uid, {})
        reusable = self._reusable[1]
        freed = changed = False
        for resource, needed in self._shuffled(container.wants.items()):
            if resource not in self.healthy and resource not in self.allocated:
                self.transcript.note("ignored", resource, f"pod {pod.name} wants what no plugin has registered")
                continue
            if not freed:
                self.free_ended(active)
                freed = True
            if restored and container.running:
                continue
            chosen = await self._choose(pod, container, resource, needed, reusable.get(resource, set()))
            if chosen:
                await self._ask(pod, container, resource, chosen)
                changed = True
        if changed:
            self.write_checkpoint()
        for resource in container.wants:
            had = self.allocations.of(pod.uid, container.name, resource) or set()
            left = reusable.get(resource, set())
            reusable[resource] = left | had if container.init else left - had

    async def before_start(self, pod: Pod, container: Container) -> None:
        """PreStartContainer of each resource that wants it. Raises NotAllocated."""
        for resource in self._shuffled(each for each, count in container.wants.items() if count):
            if resource not in self.healthy and resource not in self.allocated:
                continue
            endpoint = self.endpoints.get(resource)
            if endpoint is None:
                raise NotAllocated(f"endpoint not found in cache for a registered resource: {resource}")
            if endpoint.options is None or not endpoint.options.pre_start_required:
                continue
            devices = self.allocations.of(pod.uid, container.name, resource)
            if devices is None:
                raise NotAllocated(
                    f"no devices found allocated in local cache for pod {pod.uid}, container {container.name},"
                    f" resource {resource}"
                )
            request = deviceplugin_pb2.PreStartContainerRequest(devices_ids=self._shuffled(devices))
            self.transcript.note("PreStartContainer", resource, f"pod {pod.name}", devices=sorted(devices))
            try:
                await endpoint.call("PreStartContainer", request, PRE_START_SECONDS)
            except CallFailed as error:
                self.transcript.violated("pre-start-failed", resource, str(error))
                raise NotAllocated(f"device plugin PreStartContainer rpc failed with err: {error}") from error

    async def _choose(
        self, pod: Pod, container: Container, resource: str, required: int, reusable: set[str]
    ) -> set[str]:
        """devicesToAllocate: the devices to ask the plugin for; none if the container has them already."""
        had = self.allocations.of(pod.uid, container.name, resource)
        if had is not None and len(had) != required:
            raise NotAllocated(
                f'pod "{pod.uid}" container "{container.name}" changed request for resource "{resource}" from'
                f" {len(had)} to {required}"
            )
        needed = 0 if had is not None else required
        if resource not in self.healthy:
            raise NotAllocated(f"cannot allocate unregistered device {resource}")
        if not self.healthy[resource]:
            raise NotAllocated(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if not self.healthy[resource] >= (had or set()):
            raise NotAllocated(
                f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            )
        chosen: set[str] = set()
        if needed == 0:
            return chosen

        def take(devices: Iterable[str]) -> bool:
            """Whether that is enough."""
            for device in self._shuffled(set(devices) - chosen):
                self.allocated.setdefault(resource, set()).add(device)
                chosen.add(device)
                if len(chosen) == needed:
                    return True
            return False

        if take(reusable):
            return chosen
        available = self.healthy[resource] - self.allocated.get(resource, set())
        missing = needed - len(chosen)
        if len(available) < missing:
            raise NotAllocated(
                f"requested number of devices unavailable for {resource}. Requested: {missing}, Available:"
                f" {len(available)}"
            )
        preferred = await self._prefer(pod, resource, available | chosen, set(chosen), required)
        if take(preferred & available) or take(available):
            return chosen
        raise NotAllocated(
            f"unexpectedly allocated less resources than required. Requested: {required}, Got: {len(chosen)}"
        )

    async def _prefer(self, pod: Pod, resource: str, available: set[str], must: set[str], size: int) -> set[str]:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            raise NotAllocated(f"endpoint not found in cache for a registered resource: {resource}")
        if endpoint.options is None or not endpoint.options.get_preferred_allocation_available:
            return set()
        request = deviceplugin_pb2.PreferredAllocationRequest(
            container_requests=[
                deviceplugin_pb2.ContainerPreferredAllocationRequest(
                    available_deviceIDs=self._shuffled(available),
                    must_include_deviceIDs=self._shuffled(must),
                    allocation_size=size,
                )
            ]
        )
        self.transcript.note("GetPreferredAllocation", resource, f"pod {pod.name}", available=len(available), size=size)
        try:
            response = await endpoint.call("GetPreferredAllocation", request)
        except CallFailed as error:
            self.transcript.violated("preference-failed", resource, str(error))
            raise NotAllocated(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error
        for rule, text in checks.preference(available, must, size, response):
            self.transcript.violated(rule, resource, text)
        return {each for answer in response.container_responses[:1] for each in answer.deviceIDs}

    async def _ask(self, pod: Pod, container: Container, resource: str, chosen: set[str]) -> None:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            self.allocated = self.allocations.held()
            raise NotAllocated(f"unknown Device Plugin {resource}")
        request = deviceplugin_pb2.AllocateRequest(
            container_requests=[deviceplugin_pb2.ContainerAllocateRequest(devices_ids=self._shuffled(chosen))]
        )
        began = time.perf_counter()
        try:
            response = await endpoint.call("Allocate", request)
        except CallFailed as error:
            self.allocated = self.allocations.held()
            self._allocate_failed(endpoint, error)
            raise NotAllocated(str(error)) from error
        self.transcript.note(
            "Allocate",
            resource,
            f"pod {pod.name}, container {container.name}",
            devices=sorted(chosen),
            seconds=time.perf_counter() - began,
            response=response,
        )
        for rule, text in checks.allocation(chosen, self.known[resource], response):
            self.transcript.violated(rule, resource, text)
        if not response.container_responses:
            raise NotAllocated("no containers return in allocation response")
        known = self.known[resource]
        for device in sorted(chosen - known.keys()):
            self.transcript.violated("vanished-while-asked", resource, f"{device} left the list during its Allocate")
        self.allocations.insert(
            checkpoint.Allocated(
                pod.uid,
                container.name,
                resource,
                by_numa(self._shuffled(chosen), known),
                response.container_responses[0].SerializeToString(),
            )
        )

    def _allocate_failed(self, endpoint: Endpoint, error: CallFailed) -> None:
        large = checks.too_large(error.code, error.details)
        if large or endpoint.stopped_at is None:  # a plugin that is known to be gone was not asked
            self.transcript.violated("message-too-large" if large else "allocate-failed", endpoint.resource, str(error))

    def _shuffled(self, items: Iterable[T]) -> list[T]:
        listed = list(items)
        if listed and isinstance(listed[0], str):
            listed.sort(key=str)  # a set's own order differs from run to run
        self._random.shuffle(listed)
        return listed
