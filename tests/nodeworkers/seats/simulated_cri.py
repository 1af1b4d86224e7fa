"""A simulated container runtime: its CRI on a real socket, strict as containerd is, over a simulated /proc and
simulated control groups in a folder.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from nodeworkers.rpc import cri_pb2 as cri
from nodeworkers.sockets import handler, serve

Context = grpc.aio.ServicerContext[Any, Any]
NAMESPACE, POD, UID, CONTAINER, IP = "team-a", "llama", "0a0a-1", "server", "10.1.2.3"


@dataclass
class Sandbox:
    id: str
    name: str = POD
    uid: str = UID
    namespace: str = NAMESPACE
    state: cri.PodSandboxState = cri.SANDBOX_READY
    created: int = 1
    ip: str = IP
    annotations: dict[str, str] = field(default_factory=lambda: {"kyb.ai/port": "8000"})

    @property
    def labels(self) -> dict[str, str]:
        return {
            "io.kubernetes.pod.namespace": self.namespace, "io.kubernetes.pod.name": self.name,
            "io.kubernetes.pod.uid": self.uid,
        }  # fmt: skip

    @property
    def metadata(self) -> cri.PodSandboxMetadata:
        return cri.PodSandboxMetadata(name=self.name, uid=self.uid, namespace=self.namespace)


@dataclass
class Box:
    """A container."""

    id: str
    sandbox: Sandbox
    pid: int = 0
    name: str = CONTAINER
    attempt: int = 0
    state: cri.ContainerState = cri.CONTAINER_RUNNING
    created: int = 2
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    info: str | None = None  # what is said in place of containerd's words

    @property
    def labels(self) -> dict[str, str]:
        return self.sandbox.labels | {"io.kubernetes.container.name": self.name}

    @property
    def metadata(self) -> cri.ContainerMetadata:
        return cri.ContainerMetadata(name=self.name, attempt=self.attempt)


class Node:
    """/proc and /sys/fs/cgroup in a folder. `path`: the control group of a container by its id."""

    def __init__(self, folder: Path, unified: bool = True) -> None:
        self.proc, self.mounted, self.unified = folder / "proc", folder / "cgroup", unified
        self.proc.mkdir()
        self.root = self.mounted if unified else self.mounted / "memory"
        self.root.mkdir(parents=True)

    @staticmethod
    def path(id: str) -> str:
        return f"/kubepods/pod{UID}/{id}"

    def process(self, pid: int, path: str, started: int = 100, state: str = "S", threads: int = 1) -> None:
        place = self.proc / str(pid)
        place.mkdir(exist_ok=True)
        stat = [state, *(["0"] * 16), str(threads), "0", str(started), "0"]
        (place / "stat").write_text(f"{pid} (a (b) c) {' '.join(stat)}\n")
        version1 = f"5:devices:/else\n4:cpu,memory:{path}\n1:name=systemd:/\n0::/\n"
        (place / "cgroup").write_text(f"0::{path}\n" if self.unified else version1)

    def group(self, path: str, *pids: int) -> Path:
        folder = self.root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return folder

    def memory(self, path: str, limit: int | None, used: int, idle: int = 0) -> None:
        folder = self.root / path.lstrip("/")
        most = "max" if limit is None else str(limit)
        if self.unified:
            texts = {"memory.max": most, "memory.current": used, "memory.stat": f"anon 1\ninactive_file {idle}"}
        else:
            none = str(2**63 - 4096)
            texts = {
                "memory.limit_in_bytes": none if limit is None else most, "memory.usage_in_bytes": used,
                "memory.stat": f"inactive_file 1\ntotal_inactive_file {idle}",
            }  # fmt: skip
        for name, text in texts.items():
            (folder / name).write_text(f"{text}\n")


class SimulatedCri:
    """The runtime's side. `hook` runs before each answer, with the method's name and the request."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "cri.sock"
        self.name, self.version = "containerd", "v2.3.7"
        self.sandboxes: list[Sandbox] = []
        self.boxes: list[Box] = []
        self.asked: list[str] = []
        self.hook: Callable[[str, Message], object] = lambda method, request: None
        self.filters = True  # whether filters are heeded
        self.events = True  # whether it knows this call
        self.listeners: list[asyncio.Queue[cri.ContainerEventResponse | None]] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = await serve(self.socket, [handler(cri.DESCRIPTOR.services_by_name["RuntimeService"], self)])

    async def stop(self) -> None:
        if self._server is not None:
            for queue in self.listeners:
                queue.put_nowait(None)
            await self._server.stop(grace=0)
            self._server = None
            self.socket.unlink(missing_ok=True)

    def happen(self, id: str) -> None:
        for queue in self.listeners:
            queue.put_nowait(cri.ContainerEventResponse(container_id=id, created_at=time.time_ns()))

    async def _asked(self, method: str, request: Message) -> None:
        self.asked.append(method)
        waits = self.hook(method, request)
        if asyncio.iscoroutine(waits):
            await waits

    async def Version(self, request: cri.VersionRequest, context: Context) -> cri.VersionResponse:
        await self._asked("Version", request)
        return cri.VersionResponse(
            version="0.1.0", runtime_name=self.name, runtime_version=self.version, runtime_api_version="v1"
        )

    async def ListPodSandbox(self, request: cri.ListPodSandboxRequest, context: Context) -> cri.ListPodSandboxResponse:
        await self._asked("ListPodSandbox", request)
        wanted = dict(request.filter.label_selector).items()
        return cri.ListPodSandboxResponse(
            items=[
                cri.PodSandbox(
                    id=each.id, metadata=each.metadata, state=each.state, created_at=each.created, labels=each.labels,
                    annotations=each.annotations,
                )
                for each in self.sandboxes
                if not self.filters or wanted <= each.labels.items()
            ]
        )  # fmt: skip

    async def PodSandboxStatus(
        self, request: cri.PodSandboxStatusRequest, context: Context
    ) -> cri.PodSandboxStatusResponse:
        await self._asked("PodSandboxStatus", request)
        found = next((each for each in self.sandboxes if each.id == request.pod_sandbox_id), None)
        if found is None:
            words = f'an error occurred when try to find sandbox: not found: "{request.pod_sandbox_id}"'
            await context.abort(grpc.StatusCode.NOT_FOUND, words)
        assert found is not None
        return cri.PodSandboxStatusResponse(
            status=cri.PodSandboxStatus(
                id=found.id, metadata=found.metadata, state=found.state, created_at=found.created,
                network=cri.PodSandboxNetworkStatus(ip=found.ip), labels=found.labels, annotations=found.annotations,
            )
        )  # fmt: skip

    async def ListContainers(self, request: cri.ListContainersRequest, context: Context) -> cri.ListContainersResponse:
        await self._asked("ListContainers", request)
        wanted = dict(request.filter.label_selector).items()
        return cri.ListContainersResponse(
            containers=[
                cri.Container(
                    id=each.id, pod_sandbox_id=each.sandbox.id, metadata=each.metadata, state=each.state,
                    created_at=each.created, labels=each.labels,
                )
                for each in self.boxes
                if not self.filters or wanted <= each.labels.items()
            ]
        )  # fmt: skip

    async def ContainerStatus(
        self, request: cri.ContainerStatusRequest, context: Context
    ) -> cri.ContainerStatusResponse:
        await self._asked("ContainerStatus", request)
        found = next((each for each in self.boxes if each.id == request.container_id), None)
        if found is None:
            words = f'an error occurred when try to find container "{request.container_id}": not found'
            await context.abort(grpc.StatusCode.NOT_FOUND, words)
        assert found is not None
        ran = found.state in (cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED)
        exited = found.state == cri.CONTAINER_EXITED
        info = found.info
        if info is None:
            info = json.dumps({"sandboxID": found.sandbox.id, "pid": 0 if exited else found.pid, "removing": False})
        return cri.ContainerStatusResponse(
            status=cri.ContainerStatus(
                id=found.id, metadata=found.metadata, state=found.state, created_at=found.created,
                started_at=3_000_000_000 if ran else 0, finished_at=4_500_000_000 if exited else 0,
                exit_code=found.exit_code, reason=found.reason, message=found.message, labels=found.labels,
            ),
            info={"info": info} if request.verbose else {},
        )  # fmt: skip

    async def GetContainerEvents(
        self, request: cri.GetEventsRequest, context: Context
    ) -> AsyncIterator[cri.ContainerEventResponse]:
        await self._asked("GetContainerEvents", request)
        if not self.events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method GetContainerEvents")
        queue: asyncio.Queue[cri.ContainerEventResponse | None] = asyncio.Queue()
        self.listeners.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self.listeners.remove(queue)
