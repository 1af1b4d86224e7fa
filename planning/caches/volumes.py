"""What an inline csi.tkm.io volume asks for, and whether this node may mount that cache into that pod, or why not.

For the node's CSI server, which answers the kubelet from these and the node's ledger alone. Every sentence here ends up
in an Event of the pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from crds.kernelcache import CLUSTER_KIND, MountPath

DRIVER = "csi.tkm.io"
UPPER_BYTES = 4 * 1024**3  # of a pod's private writable layer: twice what the caches of large models weigh
VOLUMES = 1024  # of one node: several times the pods that a kubelet runs

Kind = Literal["TritonKernelCache", "TritonKernelCacheCluster"]
State = Literal["Pending", "Ready", "Failed", "Removing"]
Code = Literal[
    "InvalidArgument", "NotFound", "AlreadyExists", "FailedPrecondition", "ResourceExhausted", "Internal", "Unavailable"
]

NAME, SCOPE, MOUNT_PATH, READ_ONLY = ATTRIBUTES = ("kernel-name", "scope", "mountPath", "readOnly")
_KUBELETS = "csi.storage.k8s.io/"
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
_mount_path: TypeAdapter[str] = TypeAdapter(MountPath)


@dataclass(frozen=True, slots=True)
class NodeCache:
    """A cache as it stands on one node. `compatible` is None while nobody has looked; `reason` says why it is not Ready
    or not compatible. New pods get `digest`, which stays the old one while another is being prepared.

    `goal` is the digest as orders have it (an index's, perhaps) whose image on this node is `digest`. `epoch` is that
    of the newest order begun, `signatures` are the places of signatures that were good at the last check.
    """

    uid: str
    kind: Kind
    namespace: str
    name: str
    state: State = "Pending"
    generation: int = 0
    digest: str = ""
    mount_path: str = ""
    size_bytes: int = 0
    compatible: bool | None = None
    reason: str = ""
    last_known_good: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    goal: str = ""
    signatures: tuple[str, ...] = ()

    @property
    def serves(self) -> str:
        """The digest, as orders have it, that new pods get; '' none."""
        return self.goal if self.state == "Ready" and self.compatible and self.digest else ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a volume is not mounted: a gRPC status by its name, and a sentence for the pod's Event."""

    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class VolumeRequest:
    """What a pod asks for. `mount_path` is '' where the cache's own is meant."""

    kind: Kind
    name: str
    mount_path: str
    read_only: bool
    pod_uid: str
    pod_namespace: str
    pod_name: str

    @property
    def cache(self) -> str:
        """The cache as a person would name it."""
        return f"{self.kind} {self.name if self.kind == CLUSTER_KIND else f'{self.pod_namespace}/{self.name}'}"


@dataclass(frozen=True, slots=True)
class Admission:
    """What is mounted, and where the kernels in it must believe to be."""

    cache: NodeCache
    mount_path: str


def volume_request(attributes: Mapping[str, str], read_only: bool) -> VolumeRequest | Refusal:
    """Reads the attributes of a volume, of which those of the pod are the kubelet's. `read_only` is what
    `csi.readOnly` of the volume says. Never raises, whatever the attributes are.
    """
    unknown = sorted(key for key in attributes if key not in ATTRIBUTES and not key.startswith(_KUBELETS))
    if unknown:
        hint = " A pod mounts caches of its own namespace, or the cluster's." if "namespace" in unknown[0] else ""
        return _invalid(
            f"the volume has an attribute {_shown(unknown[0])}, which {DRIVER} does not know; there are "
            f"{', '.join(ATTRIBUTES)}.{hint}"
        )
    if attributes.get(f"{_KUBELETS}ephemeral") != "true":
        return _invalid(
            f"{DRIVER} serves inline volumes only: name the driver under csi in the pod's own volumes, in no "
            f"PersistentVolume. (If it is there, the CSIDriver {DRIVER} lacks podInfoOnMount: true.)"
        )
    uid, namespace, pod = (attributes.get(f"{_KUBELETS}pod.{key}", "") for key in ("uid", "namespace", "name"))
    if not (uid and namespace and pod):
        return _invalid(f"the kubelet did not say which pod it is: the CSIDriver {DRIVER} needs podInfoOnMount: true.")
    name, scope = attributes.get(NAME, ""), attributes.get(SCOPE, "namespace")
    if not _OBJECT_NAME.fullmatch(name):
        said = f"says {_shown(name)}, which is no name of an object" if name else "is missing"
        return _invalid(f"the volume's attribute {NAME} {said}; it names the kernel cache to mount.")
    if scope not in ("namespace", "cluster"):
        return _invalid(f"the volume's attribute {SCOPE} says {_shown(scope)}; it is namespace (default) or cluster.")
    if attributes.get(READ_ONLY, "false") not in ("true", "false"):
        return _invalid(
            f"the volume's attribute {READ_ONLY} says {_shown(attributes[READ_ONLY])}; it is true or false."
        )
    path = attributes.get(MOUNT_PATH, "")
    if MOUNT_PATH in attributes and not _is_mount_path(path):
        return _invalid(
            f"the volume's attribute {MOUNT_PATH} says {_shown(path)}; it must be the container's mountPath, an "
            "absolute path without empty parts, . or .."
        )
    return VolumeRequest(
        kind="TritonKernelCacheCluster" if scope == "cluster" else "TritonKernelCache",
        name=name,
        mount_path=path,
        read_only=read_only or attributes.get(READ_ONLY) == "true",
        pod_uid=uid,
        pod_namespace=namespace,
        pod_name=pod,
    )


def admit(request: VolumeRequest, caches: Iterable[NodeCache]) -> Admission | Refusal:
    """Which of the node's caches the pod gets, or why none. Caches of other namespaces count as absent: their names
    are nobody else's business.
    """
    wanted, hint = None, ""
    for cache in caches:
        if cache.name != request.name:
            continue
        if cache.kind == request.kind and cache.namespace in ("", request.pod_namespace):
            wanted = cache
        elif cache.kind == CLUSTER_KIND:
            hint = f" There is one of that name for the whole cluster, which the attribute {SCOPE}: cluster asks for."
    if wanted is None:
        where = "" if request.kind == CLUSTER_KIND else " in the pod's own namespace"
        return Refusal(
            "NotFound",
            f"{request.cache} is not known on this node: it must exist{where}, and its nodeSelector must take this "
            f"node.{hint}",
        )
    reason = f": {_shown_reason(wanted.reason)}" if wanted.reason else "."
    if wanted.state == "Removing":
        return Refusal("FailedPrecondition", f"{request.cache} is being deleted, so that new pods do not get it.")
    if wanted.compatible is False:
        return Refusal("FailedPrecondition", f"{request.cache} does not fit the GPUs of this node{reason}")
    if wanted.state != "Ready" or wanted.compatible is None or not wanted.digest:
        yet = " yet" if wanted.state == "Pending" else ""
        return Refusal("FailedPrecondition", f"{request.cache} is not Ready on this node{yet}{reason}")
    path = request.mount_path or wanted.mount_path
    if not path:
        return Refusal(
            "FailedPrecondition",
            f"{request.cache} does not say where its kernels were compiled: give the container's mountPath as the "
            f"volume's attribute {MOUNT_PATH}, or as spec.mountPath of the cache.",
        )
    return Admission(wanted, path)


def _invalid(message: str) -> Refusal:
    return Refusal("InvalidArgument", message)


def _is_mount_path(path: str) -> bool:
    try:
        _mount_path.validate_python(path)
    except ValidationError:
        return False
    return not _CONTROL.search(path)


def _shown(value: str) -> str:
    """A value of a stranger's in a sentence."""
    return repr(value if len(value) <= 64 else f"{value[:61]}...")


def _shown_reason(reason: str) -> str:
    """Reasons quote registries and images."""
    flat = _CONTROL.sub(" ", reason)
    return flat if len(flat) <= 512 else f"{flat[:511]}…"
