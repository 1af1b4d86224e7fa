"""TritonKernelCacheNodeStatus and TritonKernelCacheNodeStatusCluster (tkm.io/v1alpha1): how one cache stands on one
node. The node's own process writes it and nobody else; the cache's workflow adds them up.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictStr

from crds.gpuworkload import Condition, Count, CRDModel, Generation, ObjectName, Time
from crds.kernelcache import Digest, MountPath

KIND = "TritonKernelCacheNodeStatus"
PLURAL = "tritonkernelcachenodestatuses"
CLUSTER_KIND = "TritonKernelCacheNodeStatusCluster"
CLUSTER_PLURAL = "tritonkernelcachenodestatusclusters"
MOST_GPUS = 64  # of one node
MOST_PODS = 256  # shown of those that have it mounted


class KernelCacheRef(CRDModel):
    """Which cache: one of the same namespace, or of the cluster."""

    name: ObjectName
    uid: Annotated[StrictStr, Field(min_length=1, max_length=64)]


class NodeStatusSpec(CRDModel):
    """What this object is about."""

    node_name: ObjectName
    kernel_cache_ref: KernelCacheRef


class GPUCompatibility(CRDModel):
    """Whether one GPU of the node can run the kernels."""

    id: Annotated[StrictStr, Field(max_length=128)]
    product: Annotated[StrictStr, Field(max_length=128)]
    compatible: StrictBool
    message: Annotated[StrictStr, Field(max_length=256)] = ""


class PodUse(CRDModel):
    """A pod that has the cache mounted, and which digest of it."""

    namespace: Annotated[StrictStr, Field(max_length=63)]
    name: ObjectName
    uid: Annotated[StrictStr, Field(max_length=64)]
    digest: Digest


class NodeCacheStatus(CRDModel):
    """What the node found and has."""

    observed_generation: Generation | None = Field(
        default=None, description="The generation of the cache that this is about."
    )
    gpu_type: Annotated[StrictStr, Field(max_length=128)] | None = Field(default=None)
    driver_version: Annotated[StrictStr, Field(max_length=64)] | None = Field(default=None)
    gpus: Annotated[list[GPUCompatibility], Field(max_length=MOST_GPUS)] | None = Field(
        default=None, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"]}
    )
    simulated: StrictBool | None = Field(default=None, description="True: the node's GPUs are pretended.")
    digest: Digest | None = Field(default=None, description="The image that is mounted into new pods.")
    target_digest: Digest | None = Field(default=None, description="The one it was asked for.")
    mount_path: MountPath | None = Field(default=None)
    size_bytes: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})] | None = Field(default=None)
    kernels: Count | None = None
    pods: Annotated[list[PodUse], Field(max_length=MOST_PODS)] | None = Field(
        default=None, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["uid"]}
    )
    pods_using: Count | None = Field(default=None)
    updated: Time | None = None
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        default=None,
        description="Verified, Compatible, HitPredicted and Ready.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
