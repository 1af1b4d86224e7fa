"""The kubelet's device plugin service (v1beta1) for one resource: tells its devices, and hands them out.

Knows nothing but the allocation core (`Devices`). A call ends always, and soon: an error or a hang of Allocate fails
the pod for good or stalls all admissions of the node, for the kubelet has no deadline there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio

from nodeworkers.device_plugin.beside import Beside
from nodeworkers.devices.frontend import Devices
from nodeworkers.rpc import deviceplugin_pb2 as messages
from nodeworkers.sockets import handler
from planning.devices.offers import Injection, Refused

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
SNAPSHOT_LIMIT = 4 * 1024 * 1024  # bytes that the kubelet takes in one message (kubernetes#109304)
PREFERRED_SECONDS = 0.8
BEFORE_START_SECONDS = 25.0  # the kubelet waits for 30
_ERROR_LIMIT = 1024  # characters of a sentence: it travels in a header, and ends in the pod's status
_NAMED = 5  # devices that a sentence names
_SERVICE = messages.DESCRIPTOR.services_by_name["DevicePlugin"]
_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class DevicePlugin:
    """v1beta1.DevicePlugin. One object serves one socket; what the kubelet did with it tells whether it still listens.

    `asked`: somebody called at all. `streams` are those that are open, `opened` is when the last one was opened
    (monotonic seconds, None: none ever was).
    """

    def __init__(self, resource: str, devices: Devices, gated: bool = False) -> None:
        """`gated`: the kubelet asks `Devices.before_start` before each start of a container, also after a restart."""
        self.resource = resource
        self.asked = False
        self.streams = 0
        self.opened: float | None = None
        self._devices = devices
        self._gated = gated
        self._closing = asyncio.Event()
        self._built: tuple[int, messages.ListAndWatchResponse] | None = None
        self._beside = Beside()

    def service(self) -> grpc.GenericRpcHandler:
        """For a gRPC server."""
        return handler(_SERVICE, self)

    def close(self) -> None:
        """Ends the streams; calls that are being answered go on."""
        self._closing.set()

    def healthy(self) -> frozenset[str]:
        """The ids that the kubelet should count as allocatable now."""
        return frozenset(each.ID for each in self.snapshot().devices if each.health == HEALTHY)

    def snapshot(self) -> messages.ListAndWatchResponse:
        """What ListAndWatch sends now: the same object for as long as it says the same."""
        version = self._devices.version
        if self._built is not None and self._built[0] == version:
            return self._built[1]
        fresh = self._build()
        if self._built is not None and self._built[1] == fresh:
            fresh = self._built[1]
        self._built = version, fresh
        return fresh

    def _build(self) -> messages.ListAndWatchResponse:
        response = messages.ListAndWatchResponse()
        nodes: dict[tuple[int, ...], messages.TopologyInfo | None] = {(): None}
        for device in self._devices.offered().get(self.resource, ()):
            if device.numa not in nodes:
                # A negative node would be an affinity to a node that does not exist.
                known = [messages.NUMANode(ID=node) for node in device.numa if node >= 0]
                nodes[device.numa] = messages.TopologyInfo(nodes=known) if known else None
            health = HEALTHY if device.healthy else UNHEALTHY
            response.devices.add(ID=device.id, health=health, topology=nodes[device.numa])
        size = response.ByteSize()
        if size > SNAPSHOT_LIMIT:
            whole = len(response.devices)
            del response.devices[whole * SNAPSHOT_LIMIT // size :]
            while response.ByteSize() > SNAPSHOT_LIMIT:
                del response.devices[-max(1, len(response.devices) // 100) :]
            _log.error(
                "%s has %d devices, and no more than %d of them fit in a message that the kubelet takes (4 MiB): the "
                "others are not offered. Give fewer replicas to each card.",
                self.resource,
                whole,
                len(response.devices),
            )
        return response

    async def GetDevicePluginOptions(self, request: messages.Empty, context: Context) -> messages.DevicePluginOptions:
        """What of this interface there is; the kubelet asks while it registers."""
        self.asked = True
        return self.options()

    def options(self) -> messages.DevicePluginOptions:
        """The same for the request to register."""
        return messages.DevicePluginOptions(pre_start_required=self._gated, get_preferred_allocation_available=True)

    async def ListAndWatch(self, request: messages.Empty, context: Context) -> None:
        """All devices at once, and again when something changed: each message makes the kubelet write its checkpoint.
        Ends when the server goes.
        """
        self.asked = True
        self.streams += 1
        self.opened = time.monotonic()
        sent: messages.ListAndWatchResponse | None = None
        try:
            while not self._closing.is_set():
                version = self._devices.version
                if (snapshot := self.snapshot()) is not sent:
                    await context.write(snapshot)
                    sent = snapshot
                await self._until_changed(version)
        except (asyncio.CancelledError, grpc.aio.BaseError):
            raise  # the kubelet left
        except Exception as error:
            _log.exception("The kubelet's list of %s broke off.", self.resource)
            await _abort(context, grpc.StatusCode.INTERNAL, f"berth cannot list its {self.resource}: {error!r}.")
        finally:
            self.streams -= 1

    async def _until_changed(self, version: int) -> None:
        waiting = {
            asyncio.ensure_future(self._devices.changed(version)),
            asyncio.ensure_future(self._closing.wait()),
        }
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in waiting:
                each.cancel()

    async def GetPreferredAllocation(
        self, request: messages.PreferredAllocationRequest, context: Context
    ) -> messages.PreferredAllocationResponse:
        """Which of the free devices go best together. An error would fail the pod, so that there is none: with an empty
        list the kubelet chooses by itself.
        """
        self.asked = True
        until = time.monotonic() + PREFERRED_SECONDS
        response = messages.PreferredAllocationResponse()
        for each in request.container_requests:
            chosen = await self._preferred(each, until - time.monotonic())
            response.container_responses.add(deviceIDs=chosen)
        return response

    async def _preferred(self, request: messages.ContainerPreferredAllocationRequest, seconds: float) -> list[str]:
        available, must = list(request.available_deviceIDs), list(request.must_include_deviceIDs)
        try:
            return await self._beside.run(
                "preferred",
                lambda: self._devices.preferred(self.resource, available, must, request.allocation_size),
                seconds,
            )
        except TimeoutError:
            _log.warning(
                "Choosing %d of %d %s took too long: the kubelet chooses.",
                request.allocation_size,
                len(available),
                self.resource,
            )
        except Exception:
            _log.exception("No choice among %d %s: the kubelet chooses.", len(available), self.resource)
        return []

    async def Allocate(self, request: messages.AllocateRequest, context: Context) -> messages.AllocateResponse:
        """What each container gets with its devices. The same devices may come time and again: to a pod's init
        container and then to its app, or after the kubelet lost its checkpoint.
        """
        self.asked = True
        response = messages.AllocateResponse()
        ids: Sequence[str] = ()
        try:
            for each in request.container_requests:
                ids = list(each.devices_ids)
                response.container_responses.append(_answer(self._devices.allocate(self.resource, ids)))
        except Refused as refused:
            await self._refuse(context, ids, refused)
        except Exception as error:
            await self._fail(context, "be handed out", ids, error)
        return response

    async def PreStartContainer(
        self, request: messages.PreStartContainerRequest, context: Context
    ) -> messages.PreStartContainerResponse:
        """May a container start (again) with these devices? An error keeps it from it, and the kubelet tries later."""
        self.asked = True
        ids = list(request.devices_ids)
        try:
            # A key for each set of devices: one that hangs keeps no other container waiting.
            await self._beside.run(
                f"before_start {' '.join(sorted(ids))}",
                lambda: self._devices.before_start(self.resource, ids),
                BEFORE_START_SECONDS,
            )
        except Refused as refused:
            await self._refuse(context, ids, refused)
        except TimeoutError:
            sentence = (
                f"{_named(ids)} of {self.resource} cannot be made ready for a container within "
                f"{BEFORE_START_SECONDS:.0f} s. The kubelet tries again; see berth's log on this node."
            )
            _log.error("%s", sentence)
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, sentence)
        except Exception as error:
            await self._fail(context, "be made ready for a container", ids, error)
        return messages.PreStartContainerResponse()

    async def _refuse(self, context: Context, ids: Sequence[str], refused: Refused) -> NoReturn:
        known = {device.id for device in self._devices.offered().get(self.resource, ())}
        code = grpc.StatusCode.FAILED_PRECONDITION if known.issuperset(ids) else grpc.StatusCode.NOT_FOUND
        _log.warning("Refused: %s of %s. %s", _named(ids), self.resource, refused)
        await _abort(context, code, str(refused))

    async def _fail(self, context: Context, what: str, ids: Sequence[str], error: Exception) -> NoReturn:
        _log.exception("%s of %s cannot %s.", _named(ids), self.resource, what)
        sentence = f"{_named(ids)} of {self.resource} cannot {what}, by an error of berth's: {error!r}."
        await _abort(context, grpc.StatusCode.INTERNAL, f"{sentence} See berth's log on this node.")


def _answer(injection: Injection) -> messages.ContainerAllocateResponse:
    return messages.ContainerAllocateResponse(
        envs=injection.env,
        mounts=[
            messages.Mount(container_path=each.container, host_path=each.host, read_only=each.read_only)
            for each in injection.mounts
        ],
        devices=[
            messages.DeviceSpec(container_path=each.container, host_path=each.host, permissions=each.permissions)
            for each in injection.nodes
        ],
        annotations=injection.annotations,
        cdi_devices=[messages.CDIDevice(name=each) for each in injection.cdi],
    )


def _named(ids: Iterable[str]) -> str:
    names = list(ids)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more or "nothing"


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> NoReturn:
    await context.abort(code, sentence[:_ERROR_LIMIT])
    raise AssertionError("abort raises")
