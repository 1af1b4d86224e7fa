"""A fake kubelet, strict as the real one: what a device plugin meets on a node, without containers or a cluster.

For tests of device plugins in any language: it is started, stopped, killed, and asked to admit pods; it records all
that happened and what the plugin must not have done. README.md says what it is faithful to.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio

from nodeworkers.rpc import deviceplugin_pb2, podresources_pb2
from tests.fake_kubelet import checkpoint, checks
from tests.fake_kubelet.manager import DeviceManager, NotAllocated
from tests.fake_kubelet.podresources import PodResources
from tests.fake_kubelet.pods import Container, Pod
from tests.fake_kubelet.registration import RegistrationServer
from tests.fake_kubelet.transcript import Transcript, Violation
from tests.fake_kubelet.watcher import PluginWatcher
from tests.fake_kubelet.wire import PATH_LIMIT, serve

UNEXPECTED = "UnexpectedAdmissionError"
_REGISTRATION = deviceplugin_pb2.DESCRIPTOR.services_by_name["Registration"]
_PODRESOURCES = podresources_pb2.DESCRIPTOR.services_by_name["PodResourcesLister"]
_LOOK_SECONDS = 0.02


class FakeKubelet:
    """`folder` is what /var/lib/kubelet is on a node. Use it as an async context manager, or start and stop it."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        disconnect_race: bool = True,
        watch_registry: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seed` decides in which order devices are picked. `disconnect_race`: the end of a resource's old stream ends
        its newest registration, as up to Kubernetes 1.36. `watch_registry`: plugins may also be found in
        `folder`/plugins_registry. `clock` in seconds, for the grace period alone.
        """
        self.folder = folder.absolute()
        self.plugins = self.folder / "device-plugins"
        self.socket = self.plugins / "kubelet.sock"
        self.registry = self.folder / "plugins_registry"
        self.pod_resources = self.folder / "pod-resources" / "kubelet.sock"
        self.checkpoint = self.plugins / checkpoint.FILE
        self.disconnect_race = disconnect_race
        self.pods: list[Pod] = []
        self.transcript = Transcript(time.monotonic)
        self._random = random.Random(seed)
        self._clock = clock
        self._watch_registry = watch_registry
        self._sockets: dict[Path, tuple[int, int]] = {}
        self._admission = asyncio.Lock()
        self._written = 0
        self._life: _Life | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # Its life.

    async def start(self) -> None:
        """Reads the checkpoint, removes every socket in the folder, serves, and then admits its active pods again:
        containers that run go on, the others need their devices healthy at once.
        """
        if self._life is not None:
            raise RuntimeError("The fake kubelet runs already.")
        if len(str(self.socket).encode()) > PATH_LIMIT:
            raise ValueError(f"{self.socket} is too long for a socket ({PATH_LIMIT} bytes): choose a shorter folder.")
        for folder in (self.plugins, self.registry, self.pod_resources.parent):
            folder.mkdir(parents=True, exist_ok=True)
        manager = DeviceManager(self.plugins, self.transcript, self._random, self._clock)
        manager.read_checkpoint()
        removed = _remove_sockets(self.plugins)
        self.pod_resources.unlink(missing_ok=True)
        server = RegistrationServer(self.plugins, manager, self.transcript, self.disconnect_race, self._sockets)
        lister = PodResources(manager, self._active, self.transcript, time.monotonic)
        scratch = self.folder / ".fake"
        servers = [
            await serve(self.pod_resources, scratch, [(_PODRESOURCES, lister)]),
            await serve(self.socket, scratch, [(_REGISTRATION, server)]),
        ]
        self._life = _Life(manager, server, servers)
        self.transcript.note("started", "", f"{removed} sockets removed")
        if self._watch_registry:
            watcher = PluginWatcher(self.registry, server, self.transcript)
            self._life.watching = asyncio.create_task(watcher.run())
        for pod in self._active():
            await self._admit(pod, restored=True)

    async def stop(self) -> None:
        """The end that deviceManager.Stop describes: plugins are disconnected and kubelet.sock goes."""
        if self._life is not None:
            await self._end("stopped")
            self.socket.unlink(missing_ok=True)

    async def kill(self) -> None:
        """The end by SIGKILL, and by SIGTERM too: no kubelet calls deviceManager.Stop. Every socket stays."""
        await self._end("killed")

    async def restart(self) -> None:
        """`stop` and `start`. What the plugins notice is the same as after `kill` and `start`, but for the moment
        without a kubelet.sock.
        """
        await self.stop()
        await self.start()

    async def _end(self, how: str) -> None:
        life, self._life = self._running(), None
        self._written += life.manager.checkpoint_writes
        self.transcript.note(how, "")
        if life.watching is not None:
            life.watching.cancel()
            with suppress(asyncio.CancelledError):
                await life.watching
        await life.server.stop()
        for server in life.servers:
            await server.stop(grace=None)

    # What it knows.

    @property
    def capacity(self) -> dict[str, int]:
        """As the node's status would say now, by resource; empty while it does not run."""
        return self._life.manager.resources()[0] if self._life else {}

    @property
    def allocatable(self) -> dict[str, int]:
        """As the node's status would say now, by resource; empty while it does not run."""
        return self._life.manager.resources()[1] if self._life else {}

    def devices(self, resource: str) -> dict[str, Any]:
        """The plugin's last list: its Device messages by id."""
        return dict(self._life.manager.known.get(resource, {})) if self._life else {}

    def options(self, resource: str) -> Any:
        """DevicePluginOptions of the plugin that is registered; None without one."""
        endpoint = self._running().manager.endpoints.get(resource)
        return None if endpoint is None or endpoint.stopped_at is not None else endpoint.options

    @property
    def checkpoint_writes(self) -> int:
        """How often the checkpoint was written, over all lives."""
        return self._written + (self._life.manager.checkpoint_writes if self._life else 0)

    @property
    def violations(self) -> list[Violation]:
        """What plugins have done that they must not."""
        return self.transcript.violations

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits for a condition. Raises TimeoutError, which says `what` was waited for and how things stand."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                now = f"Allocatable: {self.allocatable}, capacity: {self.capacity}."
                raise TimeoutError(f"After {seconds:g} s still not: {what}. {now}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def until_allocatable(self, resource: str, count: int, seconds: float = 30.0) -> None:
        """Waits until the node's status offers exactly `count`; 0 also when the resource is not there. Raises
        TimeoutError.
        """
        what = f"{count} allocatable {resource}"
        await self.until(lambda: self.allocatable.get(resource, 0) == count, seconds, what)

    # Pods.

    async def admit(
        self,
        name: str,
        containers: Sequence[Mapping[str, int]],
        init_containers: Sequence[Mapping[str, int]] = (),
        namespace: str = "default",
    ) -> Pod:
        """A pod that was bound to this node: each container by what it wants, {resource: count}. They are admitted one
        after another, i0, i1, ... before c0, c1, ..., and started; one pod after another, so a plugin that hangs
        holds up all. The pod may have failed, or have containers that did not start: see there.
        """
        self._running()
        if any((pod.name, pod.namespace) == (name, namespace) for pod in self._active()):
            raise ValueError(f"A pod {namespace}/{name} is there already: choose another name, or delete it.")
        made = [Container(f"i{at}", dict(wants), init=True) for at, wants in enumerate(init_containers)]
        made += [Container(f"c{at}", dict(wants)) for at, wants in enumerate(containers)]
        pod = Pod(str(uuid.UUID(int=self._random.getrandbits(128), version=4)), name, namespace, made)
        self.pods.append(pod)
        if await self._admit(pod, restored=False):
            for container in pod.containers:
                if not await self._start(pod, container):
                    break
        return pod

    async def restart_container(self, pod: Pod, name: str) -> None:
        """The container has ended and is started again, with what the kubelet remembers. If it does not start, its
        `error` says why.
        """
        container = pod.container(name)
        container.running = False
        await self._start(pod, container)

    def delete(self, pod: Pod) -> None:
        """The pod is gone. Its devices are free when the kubelet next looks, as it does before it needs any."""
        pod.phase = "Deleted"
        self.transcript.note("deleted", "", f"pod {pod.name}")

    def health(self, pod: Pod) -> dict[str, dict[str, dict[str, str]]]:
        """The pod's allocatedResourcesStatus (KEP-4680): health by container, resource and device. A device that is
        not listed any more shows as Healthy.
        """
        known = self._running().manager.known
        return {
            container.name: {
                resource: {
                    device: "Healthy"
                    if device not in known.get(resource, {}) or known[resource][device].health == checks.HEALTHY
                    else "Unhealthy"
                    for device in devices
                }
                for resource, devices in container.devices.items()
            }
            for container in pod.containers
        }

    async def cut(self, resource: str) -> None:
        """Ends the connection to the plugin of a resource, as a disconnect race does: kubelet.sock stays, and so does
        the plugin's socket. The plugin's stream ends; the kubelet waits for a new registration.
        """
        await self._running().server.disconnect(resource)

    def _running(self) -> _Life:
        if self._life is None:
            raise RuntimeError("The fake kubelet does not run: start it first.")
        return self._life

    def _active(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.active]

    async def _admit(self, pod: Pod, restored: bool) -> bool:
        async with self._admission:
            manager = self._running().manager
            for container in pod.containers:
                try:
                    await manager.allocate(pod, container, {each.uid for each in self._active()}, restored)
                except NotAllocated as error:
                    pod.phase, pod.reason = "Failed", UNEXPECTED
                    pod.message = f"Allocate failed due to {error}, which is unexpected"
                    for each in pod.containers:
                        each.running = False
                    self.transcript.note("failed", "", f"pod {pod.name}: {pod.message}")
                    return False
                self._note_devices(pod, container)
            return True

    async def _start(self, pod: Pod, container: Container) -> bool:
        """GetDeviceRunContainerOptions, and what follows."""
        manager = self._running().manager
        try:
            await manager.before_start(pod, container)
            wanted = [each for each, count in container.wants.items() if count and each in manager.healthy]
            if any(manager.allocations.of(pod.uid, container.name, each) is None for each in wanted):
                await manager.allocate(pod, container, {each.uid for each in self._active()})
        except NotAllocated as error:
            container.error = str(error)
            self.transcript.note("not started", "", f"pod {pod.name}, container {container.name}: {error}")
            return False
        self._note_devices(pod, container)
        container.given = manager.allocations.given(pod.uid, container.name)
        container.error = ""
        container.starts += 1
        container.running = not container.init
        if all(each.init or each.running for each in pod.containers):
            pod.phase = "Running"
        return True

    def _note_devices(self, pod: Pod, container: Container) -> None:
        allocations = self._running().manager.allocations
        for resource in container.wants:
            devices = allocations.of(pod.uid, container.name, resource)
            if devices is not None:
                container.devices[resource] = tuple(sorted(devices))


class _Life:
    """What ends with the process."""

    def __init__(self, manager: DeviceManager, server: RegistrationServer, servers: list[grpc.aio.Server]) -> None:
        self.manager, self.server, self.servers = manager, server, servers
        self.watching: asyncio.Task[None] | None = None


def _remove_sockets(folder: Path) -> int:
    """CleanupPluginDirectory: sockets alone, and none in folders below."""
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    for path in sockets:
        path.unlink()
    return len(sockets)
