"""CSI's node service: the kubelet's calls as calls of `volumes.py`, one at a time for each volume, each carried to its
end though the kubelet may have given up waiting, each refusal a status with a sentence.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from nodeworkers.csi.volumes import Refused, Volumes
from nodeworkers.ledger import LedgerError, Mount
from nodeworkers.rpc import csi_pb2
from planning.caches.volumes import VOLUMES, Code, Refusal, VolumeRequest, volume_request

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
_RPC = csi_pb2.NodeServiceCapability.RPC

_CODES: dict[Code, grpc.StatusCode] = {
    "InvalidArgument": grpc.StatusCode.INVALID_ARGUMENT,
    "NotFound": grpc.StatusCode.NOT_FOUND,
    "AlreadyExists": grpc.StatusCode.ALREADY_EXISTS,
    "FailedPrecondition": grpc.StatusCode.FAILED_PRECONDITION,
    "ResourceExhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "Internal": grpc.StatusCode.INTERNAL,
    "Unavailable": grpc.StatusCode.UNAVAILABLE,
}
CAPABILITIES = (_RPC.GET_VOLUME_STATS, _RPC.VOLUME_CONDITION, _RPC.VOLUME_MOUNT_GROUP)

_VOLUME_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")  # it becomes a folder's name; the kubelet's are csi-<hex>
_GROUP_LIMIT = 2**32 - 1  # that one means none
_THREADS = 8  # a mount that hangs holds up one of them
_NEARLY = 0.95  # of a writable layer
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class Node:
    """csi.v1.Node. Staging and expansion are not offered: an inline volume has neither."""

    def __init__(self, volumes: Volumes, node_name: str) -> None:
        self.volumes = volumes
        self.node_name = node_name
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="csi")
        self._turns: dict[str, _Turn] = {}
        self._under_way: set[asyncio.Task[Any]] = set()
        self.calm = asyncio.Event()  # set whenever the last call under way has ended; whoever waits for it clears it

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._under_way)

    def close(self) -> None:
        """Waits for what is under way."""
        self._threads.shutdown()

    async def NodeGetInfo(self, request: csi_pb2.NodeGetInfoRequest, context: Context) -> csi_pb2.NodeGetInfoResponse:
        """The node's name in the cluster, and how many volumes it takes."""
        return csi_pb2.NodeGetInfoResponse(node_id=self.node_name, max_volumes_per_node=VOLUMES)

    async def NodeGetCapabilities(
        self, request: csi_pb2.NodeGetCapabilitiesRequest, context: Context
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        """What is served beside publishing."""
        offered = [csi_pb2.NodeServiceCapability(rpc=_RPC(type=each)) for each in CAPABILITIES]
        return csi_pb2.NodeGetCapabilitiesResponse(capabilities=offered)

    async def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Mounts a cache into a pod."""
        await self._answer(context, request.volume_id, "target", request.target_path, lambda: self._publish(request))
        return csi_pb2.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """Takes it away again."""
        volume_id, target = request.volume_id, request.target_path
        await self._answer(context, volume_id, "target", target, lambda: self.volumes.unpublish(volume_id, target))
        return csi_pb2.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, context: Context
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        """How much of the writable layer is used, and whether the volume is well."""
        volume_id, path = request.volume_id, request.volume_path
        return await self._answer(context, volume_id, "volume", path, lambda: self._stats(volume_id, path))

    def _publish(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        wanted, group = _wanted(request)
        self.volumes.publish(request.volume_id, request.target_path, wanted, group)

    def _stats(self, volume_id: str, path: str) -> csi_pb2.NodeGetVolumeStatsResponse:
        mount, found = self.volumes.stats(volume_id, path)
        unit = csi_pb2.VolumeUsage
        if mount.upper:
            size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
            usage = [
                unit(unit=unit.BYTES, total=size, used=size - found.f_bfree * found.f_frsize, available=free),
                unit(
                    unit=unit.INODES, total=found.f_files, used=found.f_files - found.f_ffree, available=found.f_favail
                ),
            ]
            full = free < (1 - _NEARLY) * size or found.f_favail < (1 - _NEARLY) * found.f_files
        else:
            usage, full = [unit(unit=unit.BYTES, total=mount.size_bytes, used=mount.size_bytes)], False
        wrong = self.volumes.lacking(mount)
        if full and not wrong:
            wrong = (
                f"the pod's writable layer of {mount.size_cap // 1024**2} MiB is nearly full: soon kernels that it "
                "compiles cannot be written"
            )
        condition = csi_pb2.VolumeCondition(abnormal=bool(wrong), message=wrong or _well(mount))
        return csi_pb2.NodeGetVolumeStatsResponse(usage=usage, volume_condition=condition)

    async def _answer(self, context: Context, volume_id: str, what: str, path: str, act: Callable[[], T]) -> T:
        """What `act` returns; what it refuses, or what goes wrong, as a status with a sentence."""
        try:
            if not _VOLUME_ID.fullmatch(volume_id):
                said = f"{volume_id[:64]!r} is no volume id of a kubelet" if volume_id else "the volume id is missing"
                raise Refused("InvalidArgument", f"{said}.")
            if not path:
                raise Refused("InvalidArgument", f"the {what} path is missing.")
            return await self._alone(volume_id, act)
        except Refused as refused:
            status, message = _CODES[refused.code], refused.message
        except LedgerError as error:
            # By most codes a kubelet takes it that nothing is left of a publish, and never asks to unpublish once the
            # pod goes. By this one it does.
            status, message = grpc.StatusCode.UNAVAILABLE, str(error)
        except Exception as error:  # a defect of ours must not end the server, and must be found
            _log.exception("A call for volume %s failed.", volume_id)
            status, message = grpc.StatusCode.INTERNAL, f"berth node failed: {error!r:.256}. Its log has the rest."
        return await context.abort(status, message)

    async def _alone(self, volume_id: str, act: Callable[[], T]) -> T:
        """Runs it in a thread when those before it are done. Who waits may go away: what was begun is finished."""
        task = asyncio.create_task(self._in_turn(volume_id, act))
        self._under_way.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not self._under_way:
            self.calm.set()
        if not task.cancelled():
            task.exception()  # whoever asked may be gone; it was answered or logged otherwise

    async def _in_turn(self, volume_id: str, act: Callable[[], T]) -> T:
        turn = self._turns.setdefault(volume_id, _Turn())
        turn.waiting += 1
        try:
            async with turn.lock:
                return await asyncio.get_running_loop().run_in_executor(self._threads, act)
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                self._turns.pop(volume_id, None)


def _wanted(request: csi_pb2.NodePublishVolumeRequest) -> tuple[VolumeRequest, int | None]:
    """What is to be mounted, and the group that may write. Raises Refused."""
    capability = request.volume_capability
    if not request.HasField("volume_capability"):
        raise Refused("InvalidArgument", "the volume capability is missing.")
    if capability.WhichOneof("access_type") != "mount":
        raise Refused("InvalidArgument", "a kernel cache is a folder: it cannot be had as a block device.")
    if capability.mount.fs_type or capability.mount.mount_flags:
        raise Refused("InvalidArgument", "a kernel cache has neither fsType nor mountOptions: leave them out.")
    if request.secrets:
        raise Refused(
            "InvalidArgument",
            "nodePublishSecretRef does nothing here: the secret to pull with is spec.ociImage.pullSecret of the cache.",
        )
    group, said = None, capability.mount.volume_mount_group
    if said:
        if not (said.isascii() and said.isdigit() and len(said) <= 10 and int(said) < _GROUP_LIMIT):
            raise Refused("InvalidArgument", f"the group {said[:64]!r} is no number of a group.")
        group = int(said)
    wanted = volume_request(dict(request.volume_context), request.readonly)
    if isinstance(wanted, Refusal):
        raise Refused(wanted.code, wanted.message)
    return wanted, group


def _well(mount: Mount) -> str:
    return f"{mount.cache_name} is mounted, {mount.digest}"
