"""What NRI tells of pods and containers and what it may be answered, as values, for `session.py` and whoever decides.

Source: github.com/containerd/nri v0.12.0, pkg/api/api.proto; how adjustments are applied, pkg/adaptation/result.go and
pkg/runtime-tools/generate/generate.go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from nodeworkers.rpc import nri_pb2 as nri
from planning.devices.offers import Mount

SEAT_VARIABLE = "KYB_GPU_SEAT"  # every container with a seat has it, by CDI or by the kubelet
_MOST_SENTENCE = 500  # characters: it becomes a part of the pod's status and of Events


class Refused(Exception):
    """A container that may not be created now. The text is a sentence for the pod's owner; the kubelet shows it and
    tries again. It should stay the same while nothing changes, for each other text is another Event.
    """

    def __str__(self) -> str:
        return "".join(each if each.isprintable() else " " for each in super().__str__())[:_MOST_SENTENCE]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod sandbox. `id` is containerd's, `uid` Kubernetes'; `ips` are told by containerd 2.2 and later."""

    id: str
    uid: str
    namespace: str
    name: str
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    ips: tuple[str, ...] = ()


class State(Enum):
    """What containerd says of a container."""

    UNKNOWN = nri.CONTAINER_UNKNOWN
    CREATED = nri.CONTAINER_CREATED
    RUNNING = nri.CONTAINER_RUNNING
    STOPPED = nri.CONTAINER_STOPPED


@dataclass(frozen=True, slots=True)
class Container:
    """A container. `pid` is that of its first process as the host sees it, 0 where there is none yet; `cgroup` is the
    path that the runtime was given, in the notation of its driver; `env` has entries NAME=value.
    """

    id: str
    pod: str  # Pod.id
    name: str
    state: State = State.UNKNOWN
    pid: int = 0
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    cgroup: str = ""
    exit_code: int = 0


def seat_by_env(pod: Pod, container: Container) -> str | None:
    """The seat that a container carries in its environment, or None. A pod may say the variable itself: whether the
    seat is that pod's is for the ledger. By DRA it comes by CDI, which has the last word; what the kubelet brings for a
    device plugin a pod can overrule, so that one that must not get by is looked up in the ledger.
    """
    del pod
    prefix = f"{SEAT_VARIABLE}="
    return next((each.removeprefix(prefix) or None for each in container.env if each.startswith(prefix)), None)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What a container gets beside what its pod says. `args` replaces its whole command line (containerd 2.2 and later;
    earlier ones ignore it); left out, it stays.
    """

    mounts: tuple[Mount, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)

    def message(self) -> nri.ContainerAdjustment:
        """As NRI takes it. A first argument that is empty takes over from plugins that changed the command line before;
        a mount replaces what is mounted there.
        """
        return nri.ContainerAdjustment(
            annotations=self.annotations,
            mounts=[_mount(mount) for mount in self.mounts],
            env=[nri.KeyValue(key=key, value=value) for key, value in self.env.items()],
            args=["", *self.args] if self.args else [],
        )


def _mount(mount: Mount) -> nri.Mount:
    options = ["bind", "nosuid", "nodev", "ro" if mount.read_only else "rw"]
    return nri.Mount(destination=mount.container, type="bind", source=mount.host, options=options)


def pod_of(message: nri.PodSandbox) -> Pod:
    """Never raises: what is missing is empty."""
    return Pod(
        message.id,
        message.uid,
        message.namespace,
        message.name,
        dict(message.labels),
        dict(message.annotations),
        tuple(message.ips),
    )


def container_of(message: nri.Container) -> Container:
    """Never raises: what is missing is empty, a state that is not known UNKNOWN."""
    states = {state.value: state for state in State}
    return Container(
        message.id,
        message.pod_sandbox_id,
        message.name,
        states.get(message.state, State.UNKNOWN),
        message.pid,
        tuple(message.args),
        tuple(message.env),
        dict(message.labels),
        dict(message.annotations),
        message.linux.cgroups_path,
        message.exit_code,
    )


@dataclass(frozen=True, slots=True)
class Synchronized:
    """Everything that runs, told whenever a connection begins: what was thought before is void."""

    containers: tuple[tuple[Pod, Container], ...]


@dataclass(frozen=True, slots=True)
class Started:
    """A container's first process is there, and is about to become its command line."""

    pod: Pod
    container: Container


@dataclass(frozen=True, slots=True)
class Stopped:
    """A container ended, is being stopped, or was not created after all (a refusal is followed by one)."""

    pod: Pod
    container: Container


@dataclass(frozen=True, slots=True)
class Removed:
    """A container is gone. One may come more than once, and without a Stopped before it."""

    pod: Pod
    container: Container


Happening = Synchronized | Started | Stopped | Removed


def synchronized(pods: Iterable[nri.PodSandbox], containers: Iterable[nri.Container]) -> Synchronized:
    """Containers whose pod is not told of are left out."""
    known = {pod.id: pod_of(pod) for pod in pods}
    found = (container_of(container) for container in containers)
    return Synchronized(tuple((known[each.pod], each) for each in found if each.pod in known))
