"""TritonKernelCache and TritonKernelCacheCluster (tkm.io/v1alpha1): compiled GPU kernels in an OCI image, which berth
checks on every node that it selects and mounts warm into pods. For everyone who reads one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictStr

from crds.gpuworkload import (
    SPEC_LIMIT,
    Condition,
    Count,
    CRDModel,
    Generation,
    Int,
    LabelKey,
    LabelValue,
    NamespaceName,
    ObjectName,
    Time,
    serialised_size,
)

GROUP = "tkm.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TritonKernelCache"
PLURAL = "tritonkernelcaches"
CLUSTER_KIND = "TritonKernelCacheCluster"
CLUSTER_PLURAL = "tritonkernelcacheclusters"
MOST_SHOWN = 16  # failing nodes in a status
PATH_LIMIT = 1024  # bytes of a mount path

PullPolicy = Literal["Always", "IfNotPresent", "Never"]
UpdateType = Literal["Manual", "OnTagChange"]

IMAGE_PATTERN = r"^[^\s@]{1,512}(@sha256:[0-9a-f]{64})?$"
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
PERCENT_PATTERN = r"^[0-9]{1,3}%$"
_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _mount_path(path: str) -> str:
    parts = path.split("/")
    if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]) or "\0" in path:
        raise ValueError("must be an absolute path without empty parts, . or .. (such as /home/app/.triton/cache)")
    return path


def _environment_name(name: str) -> str:
    if not _ENVIRONMENT.fullmatch(name):
        raise ValueError("is not the name of an environment variable")
    return name


def _percent(value: int | str) -> int | str:
    if isinstance(value, str) and not 1 <= int(value[:-1]) <= 100:
        raise ValueError("must be from 1% to 100%")
    return value


Digest = Annotated[StrictStr, Field(max_length=71, pattern=DIGEST_PATTERN)]
MountPath = Annotated[StrictStr, Field(min_length=2, max_length=PATH_LIMIT), AfterValidator(_mount_path)]
EnvironmentName = Annotated[StrictStr, Field(max_length=128), AfterValidator(_environment_name)]
Unavailable = Annotated[
    Annotated[str, Field(strict=True, max_length=4, pattern=PERCENT_PATTERN)]
    | Annotated[int, Field(strict=True, ge=1, le=10_000)],
    AfterValidator(_percent),
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "pattern": PERCENT_PATTERN, "maxLength": 4}),
]


class OCIImage(CRDModel):
    """Where a cache comes from."""

    image: Annotated[StrictStr, Field(min_length=1, max_length=600, pattern=IMAGE_PATTERN)] = Field(
        description="A reference with its registry, such as registry.example/team/cache:v1 or one with @sha256:…."
    )
    pull_policy: PullPolicy = Field(
        default="IfNotPresent",
        description="Always asks the registry at every check; Never takes only what the node already has.",
    )
    pull_secret: ObjectName | None = Field(
        default=None,
        description="A Secret of type kubernetes.io/dockerconfigjson, which berth must have been granted to read.",
    )


class ClusterOCIImage(OCIImage):
    """Where a cache of the whole cluster comes from."""

    pull_secret_namespace: NamespaceName | None = Field(default=None, description="The namespace of the pullSecret.")

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.pullSecret) == has(self.pullSecretNamespace)",
                    "message": "pullSecret and pullSecretNamespace go together",
                }
            ]
        }
    )


class Runtime(CRDModel):
    """What the pods will bring along; it decides whether they find the kernels, and is compared, never enforced."""

    triton: Annotated[StrictStr, Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="Version of Triton, such as 3.9.0, or sha256:… of its build key (`berth cache inspect` shows it).",
    )
    ptxas: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="What ptxas --version says, or the version in it, such as 12.9.86. From Triton 3.9 on, GPUs from "
        "sm_90 on are assembled by ptxas-blackwell, whose version then counts.",
    )
    environment: Annotated[
        dict[EnvironmentName, Annotated[StrictStr, Field(max_length=1024)]], Field(max_length=64)
    ] = Field(default_factory=dict, description="Environment variables of the pods that make Triton compile anew.")


class UpdatePolicy(CRDModel):
    """What happens when the tag points to another image."""

    type: UpdateType = Field(default="Manual", description="Manual keeps the digest until the image is edited.")
    interval_seconds: Annotated[Int, Field(ge=30, le=604_800, json_schema_extra={"format": "int32"})] = Field(
        default=600, description="How often the tag is asked for."
    )
    max_unavailable: Unavailable = Field(
        default=1,
        description="How many nodes may be without the new digest's cache at once while it is rolled out.",
    )
    automatic_rollback: StrictBool = Field(
        default=True,
        description="Goes back to the last digest that was Ready everywhere if a node fails with the new one.",
    )


class TritonKernelCacheSpec(CRDModel):
    """What a person asks for."""

    oci_image: OCIImage
    validate_signature: StrictBool = Field(
        default=True,
        description="False skips the signature, where every KernelCachePolicy that matches the image permits that.",
    )
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(
        default_factory=dict, description="Labels of the nodes that prepare the cache; none: all."
    )
    mount_path: MountPath | None = Field(
        default=None,
        description="Where pods mount it; left out, the path at which the kernels were compiled.",
    )
    runtime: Runtime = Field(default_factory=Runtime)
    update_policy: UpdatePolicy = Field(default_factory=UpdatePolicy, json_schema_extra={"default": {}})

    @classmethod
    def parse(cls, raw: object) -> tuple[TritonKernelCacheSpec | None, str]:
        """The spec, or None and a sentence with path and reason. Never raises, whatever `raw` is."""
        if not isinstance(raw, Mapping):
            return None, "spec: must be an object"
        if serialised_size(raw, SPEC_LIMIT) > SPEC_LIMIT:
            return None, f"spec: must be at most {SPEC_LIMIT // 1024} KiB as JSON"
        return cls.validated(raw, "spec")


class TritonKernelCacheClusterSpec(TritonKernelCacheSpec):
    """What a platform engineer offers to every namespace."""

    oci_image: ClusterOCIImage


class CacheCounts(CRDModel):
    """Nodes by what they said last, and pods."""

    nodes: Count | None = Field(default=None, description="Nodes that the selector takes.")
    ready: Count | None = None
    pending: Count | None = None
    incompatible: Count | None = None
    failed: Count | None = None
    outdated: Count | None = Field(default=None, description="Nodes that still serve another digest.")
    pods: Count | None = Field(default=None, description="Pods that have it mounted.")


class FailingNode(CRDModel):
    """A node on which the cache is not Ready, and why."""

    name: ObjectName
    reason: Annotated[StrictStr, Field(max_length=128)]
    message: Annotated[StrictStr, Field(max_length=512)]


class TritonKernelCacheStatus(CRDModel):
    """What berth reports of all nodes together."""

    observed_generation: Generation | None = None
    resolved_digest: Digest | None = Field(default=None, description="What the image stands for now.")
    last_known_good_digest: Digest | None = Field(default=None, description="The last that was Ready everywhere.")
    rollout: Annotated[StrictStr, Field(max_length=64)] | None = Field(
        default=None, description="How far the new digest got, such as 3/40."
    )
    counts: CacheCounts | None = None
    failing: Annotated[list[FailingNode], Field(max_length=MOST_SHOWN)] | None = Field(
        default=None,
        description=f"Nodes on which it is not Ready, at most {MOST_SHOWN} of them.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    updated: Time | None = None
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        default=None,
        description="Verified, Ready, Error and Outdated.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
