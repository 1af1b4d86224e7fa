"""Which container is a seat's, and which processes: asked of the node's container runtime over the CRI, v1.

For whoever looks at a group's seats. Nothing is kept in mind: each look asks the runtime and reads /proc and the
container's control group, and what ends in between is looked at again. What changes is told by `changed`, which only
says that a look may show something else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nodeworkers.rpc import cri_pb2 as cri
from nodeworkers.seats import cgroups
from nodeworkers.seats.backend import Process
from nodeworkers.seats.cgroups import Cgroup, CgroupError
from nodeworkers.seats.cri import Cri, CriError, GoneError, Session
from nodeworkers.seats.processes import started

SOCKET = Path("/run/containerd/containerd.sock")
# As the kubelet labels pods and containers (pkg/kubelet/types/labels.go).
_NAMESPACE, _POD, _UID = "io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.pod.uid"
_CONTAINER = "io.kubernetes.container.name"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{11,127}")
_SECONDS = 10.0  # for one look, with all attempts
_ATTEMPTS, _PAUSE = 4, 0.05  # for what ends or begins while it is looked at
_MOST_PID = 2**22  # of Linux on 64 bits (include/linux/threads.h)
_SHOWN = 300  # letters of a runtime's own words
_NANO = 1e9


class ContainersError(Exception):
    """What is asked cannot be told now. The text is a sentence; asking again later may do."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the runtime has it. `sandbox`: its id there; `address`: its IP, '' where it has none (yet), or the
    host's; `annotations`: those it had when it was started; `created`: seconds of the epoch.
    """

    namespace: str
    name: str
    uid: str
    sandbox: str
    ready: bool
    address: str
    created: float
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Container:
    """One that runs. `attempt` counts its restarts; `created` and `began` in seconds of the epoch; `root`: its first
    process; `processes`: all of it, that one as well.
    """

    id: str
    attempt: int
    created: float
    began: float
    root: Process
    cgroup: Cgroup
    processes: tuple[Process, ...]

    def among(self, pids: Collection[int]) -> tuple[Process, ...]:
        """Those of its processes that somebody else names by pid, such as a driver: who holds memory of GPUs."""
        return tuple(process for process in self.processes if process.pid in pids)


@dataclass(frozen=True, slots=True)
class Ended:
    """One that ran. `at`: when it ended, in seconds of the epoch; `code`: its exit status, 128 + n for a signal;
    `reason` such as OOMKilled or Error; `told`: the runtime's words, '' for none.
    """

    id: str
    attempt: int
    code: int
    reason: str
    at: float
    told: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What the runtime has of one container of a pod. `pod`: None where it has no such pod; `running`: None where it
    does not run; `created`: whether there is one that has not been started; `ended`: the last that did run.
    """

    pod: Pod | None = None
    running: Container | None = None
    created: bool = False
    ended: Ended | None = None


class _AgainError(Exception):
    """It changed while it was looked at. The text is a sentence, for when it does not stop to."""


class Containers:
    """The containers of one node, by the socket of its runtime."""

    def __init__(self, socket: Path = SOCKET, proc: Path = cgroups.PROC, mounted: Path = cgroups.MOUNTED) -> None:
        """`proc` and `mounted`: the host's /proc and /sys/fs/cgroup."""
        self._cri, self._proc, self._mounted = Cri(socket), proc, mounted

    async def look(self, namespace: str, pod: str, container: str, uid: str = "") -> Found:
        """What there is of a container of a pod; `uid` '': of the pod that has this name now, the newest of them.
        Raises ContainersError, within ten seconds.
        """
        try:
            async with asyncio.timeout(_SECONDS), self._cri.session() as session:
                for attempt in range(_ATTEMPTS):
                    try:
                        return await _Look(session, self._proc, self._mounted).look(namespace, pod, container, uid)
                    except (GoneError, _AgainError) as error:
                        if attempt == _ATTEMPTS - 1:
                            raise ContainersError(f"{namespace}/{pod}, container {container}: {error}") from error
                    await asyncio.sleep(_PAUSE * 2**attempt)
                raise AssertionError  # the last attempt returns or raises
        except TimeoutError as error:
            raise ContainersError(
                f"The container runtime did not say within {_SECONDS:.0f} s what it has of {namespace}/{pod}."
            ) from error
        except CriError as error:
            raise ContainersError(f"{namespace}/{pod}, container {container}: {error}") from error


class _Look:
    """One look."""

    def __init__(self, session: Session, proc: Path, mounted: Path) -> None:
        self._session, self._proc, self._mounted = session, proc, mounted

    async def look(self, namespace: str, pod: str, container: str, uid: str) -> Found:
        labels = {_NAMESPACE: namespace, _POD: pod} | ({_UID: uid} if uid else {})
        sandboxes, listed = await asyncio.gather(
            self._session.sandboxes(labels), self._session.containers(labels | {_CONTAINER: container})
        )
        # A runtime that knows no such filter answers with all it has.
        named = [
            each
            for each in sandboxes
            if (each.metadata.namespace, each.metadata.name) == (namespace, pod) and uid in ("", each.metadata.uid)
        ]
        if not named:
            return Found()
        newest = max(named, key=lambda each: (each.state == cri.SANDBOX_READY, each.created_at))
        of_pod = {each.id for each in named if each.metadata.uid == newest.metadata.uid}
        mine = [each for each in listed if each.metadata.name == container and each.pod_sandbox_id in of_pod]
        mine.sort(key=lambda each: each.created_at)
        by_state = {state: [each for each in mine if each.state == state] for state in cri.ContainerState.values()}
        if by_state[cri.CONTAINER_UNKNOWN]:
            raise ContainersError(
                f"The container runtime does not know whether container {container} of {namespace}/{pod} runs "
                f"({by_state[cri.CONTAINER_UNKNOWN][0].id[:12]}): `crictl inspect` on the node tells more."
            )
        running, exited = by_state[cri.CONTAINER_RUNNING], by_state[cri.CONTAINER_EXITED]
        home = next((each for each in named if running and each.id == running[-1].pod_sandbox_id), newest)
        return Found(
            await self._pod(home),
            await self._running(running[-1]) if running else None,
            bool(by_state[cri.CONTAINER_CREATED]),
            await self._ended(exited[-1]) if exited else None,
        )

    async def _pod(self, sandbox: cri.PodSandbox) -> Pod:
        status = await self._session.sandbox(sandbox.id)
        if status.id != sandbox.id:
            raise _AgainError(f"the container runtime was asked for the pod {sandbox.id!r} and told of {status.id!r}.")
        return Pod(
            sandbox.metadata.namespace, sandbox.metadata.name, sandbox.metadata.uid, sandbox.id,
            status.state == cri.SANDBOX_READY, _address(status.network.ip), status.created_at / _NANO,
            dict(status.annotations),
        )  # fmt: skip

    async def _running(self, listed: cri.Container) -> Container:
        if not _ID.fullmatch(listed.id):
            raise CriError(f"The container runtime has a container with the id {listed.id[:80]!r}, which is none.")
        answer = await self._session.container(listed.id, verbose=True)
        status, short = answer.status, listed.id[:12]
        if status.id != listed.id or status.state != cri.CONTAINER_RUNNING:
            raise _AgainError(f"container {short} is listed as running, and is not.")
        pid = _pid(answer.info.get("info", ""))
        if pid is None:
            raise CriError(f"The container runtime does not tell the first process of container {short}.")
        try:
            root, cgroup, found = await asyncio.to_thread(self._processes, pid, listed.id)
        except CgroupError as error:
            raise _AgainError(str(error)) from error
        return Container(
            listed.id, status.metadata.attempt, status.created_at / _NANO, status.started_at / _NANO, root, cgroup,
            found,
        )  # fmt: skip

    def _processes(self, pid: int, id: str) -> tuple[Process, Cgroup, tuple[Process, ...]]:
        began = started(pid, self._proc)
        cgroup = cgroups.of_container(pid, id, self._proc, self._mounted)
        found = cgroups.processes(cgroup, self._proc)
        if began is None or Process(pid, began) not in found:
            raise CgroupError(f"Its first process, {pid}, has ended, and it is listed as running.")
        return Process(pid, began), cgroup, found

    async def _ended(self, listed: cri.Container) -> Ended:
        status = (await self._session.container(listed.id)).status
        if status.id != listed.id or status.state != cri.CONTAINER_EXITED:
            raise _AgainError(f"container {listed.id[:12]} is listed as exited, and is not.")
        return Ended(
            status.id, status.metadata.attempt, status.exit_code, status.reason[:_SHOWN], status.finished_at / _NANO,
            status.message[:_SHOWN],
        )  # fmt: skip


def _pid(info: str) -> int | None:
    """The pid in what a runtime tells of a container in its own words: JSON, with containerd and with CRI-O."""
    try:
        pid = json.loads(info)["pid"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return pid if type(pid) is int and 0 < pid < _MOST_PID else None


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""
