"""What a CustomResourceDefinition says beside its models: names, columns, rules across fields; one entry for each kind.

For `crds.generate`. A new kind is one more `Definition` in `DEFINITIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel

from crds import (
    gpumodelprofile,
    gpuquota,
    gpureservation,
    gpuseatgroup,
    gpuseatprofile,
    gpuworkload,
    kernelcache,
    kernelcache_node,
    kernelcachepolicy,
    nodedevices,
    seatmigration,
)
from crds.gpumodelprofile import GPUModelProfileSpec, GPUModelProfileStatus
from crds.gpuquota import GPUQuotaSpec, GPUQuotaStatus
from crds.gpureservation import GPUReservationSpec, GPUReservationStatus
from crds.gpuseatgroup import GPUSeatGroupSpec, GPUSeatGroupStatus
from crds.gpuseatprofile import GPUSeatProfileSpec, GPUSeatProfileStatus
from crds.gpuworkload import MUTABLE, GPUWorkloadSpec
from crds.gpuworkload_status import GPUWorkloadStatus
from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec, TritonKernelCacheStatus
from crds.kernelcache_node import NodeCacheStatus, NodeStatusSpec
from crds.kernelcachepolicy import KernelCachePolicySpec
from crds.nodedevices import NodeDevicesSpec, NodeDevicesStatus
from crds.seatmigration import SeatMigrationSpec, SeatMigrationStatus

Schema = dict[str, Any]


@dataclass(frozen=True)
class Definition:
    """One kind. `module` is the file its models are in, `rules` are CEL rules of the root. Of a kind without `status`
    nothing is reported.
    """

    kind: str
    plural: str
    short_name: str
    scope: Literal["Namespaced", "Cluster"]
    module: str
    description: str
    spec: type[BaseModel]
    status: type[BaseModel] | None
    columns: list[Schema]
    rules: list[Schema] = field(default_factory=list)
    selectable: tuple[str, ...] = ()
    group: str = gpuworkload.GROUP


def _immutability() -> list[Schema]:
    """What is fixed once a Job was created. One rule, which the API server evaluates at every write of the object, most
    of them of the status: comparing the whole spec first settles those for next to nothing, where a rule for each field
    took an eighth of the write.
    """
    required = {field.alias for field in GPUWorkloadSpec.model_fields.values() if field.is_required()}
    names = [field.alias or name for name, field in GPUWorkloadSpec.model_fields.items()]
    fixed = [name for name in names if name not in MUTABLE]

    def same(name: str) -> str:
        new, old = f"self.spec.{name}", f"oldSelf.spec.{name}"
        equal = f"{new} == {old}"
        return equal if name in required else f"has({new}) == has({old}) && (!has({new}) || {equal})"

    changed = "".join(f"!({same(name)}) ? '{name}' : " for name in fixed[:-1]) + f"'{fixed[-1]}'"
    advice = (
        f"cannot change once a Job was created (only {', '.join(MUTABLE)} can): delete the workload and create it anew"
    )
    return [
        {
            "rule": "!has(oldSelf.status) || !has(oldSelf.status.jobName) || self.spec == oldSelf.spec || ("
            + " && ".join(same(name) for name in fixed)
            + ")",
            "fieldPath": ".spec",
            "messageExpression": f"'spec.' + ({changed}) + ' {advice}'",
            "message": f"the spec {advice}",
        }
    ]


def column(name: str, path: str, kind: str = "string", **more: Any) -> Schema:
    """A column of `kubectl get`; with `priority=1` it is shown by `-o wide` only.

    Of a path with several results the API server shows the first and is silent about the rest; a path that ends in a
    list shows it as JSON. So lists of texts can be columns, and names within a list of objects cannot.
    """
    return {"name": name, "type": kind, "jsonPath": path, **more}


def said(condition: str, what: str = "status") -> str:
    """The path to what a condition says."""
    return f'.status.conditions[?(@.type=="{condition}")].{what}'


_CACHE = Definition(
    kind=kernelcache.KIND,
    plural=kernelcache.PLURAL,
    short_name="tkc",
    scope="Namespaced",
    group=kernelcache.GROUP,
    module="crds/kernelcache.py",
    description="Compiled GPU kernels in an OCI image: verified, checked on every node and mounted warm into pods.",
    spec=TritonKernelCacheSpec,
    status=TritonKernelCacheStatus,
    columns=[
        column("Image", ".spec.ociImage.image"),
        column("Ready", ".status.rollout", description="Nodes that can mount it, of those that its selector takes."),
        column("Reason", said("Ready", "reason"), description="Why it is ready, or is not."),
        column("Verified", said("Verified")),
        column("Pods", ".status.counts.pods", "integer"),
        column("Age", ".metadata.creationTimestamp", "date"),
        column("Incompatible", ".status.counts.incompatible", "integer", priority=1),
        column("Failed", ".status.counts.failed", "integer", priority=1),
        column("Outdated", ".status.counts.outdated", "integer", priority=1),
        column("Tag", said("Outdated", "reason"), description="Whether its tag has moved on.", priority=1),
        column("Digest", ".status.resolvedDigest", priority=1),
        column("Message", said("Ready", "message"), priority=1),
    ],
)

_CACHE_ON_NODE = Definition(
    kind=kernelcache_node.KIND,
    plural=kernelcache_node.PLURAL,
    short_name="tkcn",
    scope="Namespaced",
    group=kernelcache.GROUP,
    module="crds/kernelcache_node.py",
    description="How a TritonKernelCache stands on one node, written by that node.",
    spec=NodeStatusSpec,
    status=NodeCacheStatus,
    columns=[
        column("Cache", ".spec.kernelCacheRef.name"),
        column("Node", ".spec.nodeName"),
        column("GPU", ".status.gpuType"),
        column("Ready", said("Ready")),
        column("Reason", said("Ready", "reason"), description="Why it is ready, or is not."),
        column("Verified", said("Verified")),
        column("Hits", said("HitPredicted"), description="Whether hits are predicted."),
        column("Pods", ".status.podsUsing", "integer"),
        column("Age", ".metadata.creationTimestamp", "date"),
        column("Compatible", said("Compatible"), priority=1),
        column("Simulated", ".status.simulated", "boolean", priority=1),
        column("Digest", ".status.digest", priority=1),
        column("Message", said("Ready", "message"), priority=1),
    ],
    rules=[{"rule": "self.spec == oldSelf.spec", "fieldPath": ".spec", "message": "spec cannot change"}],
    selectable=(".spec.nodeName",),
)

DEFINITIONS = (
    Definition(
        kind=gpuworkload.KIND,
        plural=gpuworkload.PLURAL,
        short_name="gpuw",
        scope="Namespaced",
        module="crds/gpuworkload.py",
        description="A model on a number of GPUs of one node: placed, run as a Job and retried by berth.",
        spec=GPUWorkloadSpec,
        status=GPUWorkloadStatus,
        rules=_immutability(),
        selectable=(".status.phase", ".status.assignedNode"),
        columns=[
            column("Model", ".spec.modelName"),
            column("GPUs", ".spec.gpuCount", "integer"),
            column("Strategy", ".status.strategy"),
            column("Phase", ".status.phase"),
            column("Node", ".status.assignedNode"),
            column("Retries", ".status.retryCount", "integer"),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("Priority", ".spec.priority", priority=1),
            column("Pods", ".spec.replicas", "integer", priority=1),
            column("Message", ".status.message", priority=1),
        ],
    ),
    Definition(
        kind=gpuquota.KIND,
        plural=gpuquota.PLURAL,
        short_name="gpuq",
        scope="Cluster",
        module="crds/gpuquota.py",
        description="What a tenant's GPU workloads may hold, and what it lends to and borrows from its cohort.",
        spec=GPUQuotaSpec,
        status=GPUQuotaStatus,
        columns=[
            column("Cohort", ".spec.cohort"),
            column("GPUs", ".spec.nominal.gpus", "integer"),
            column("Used", ".status.used.gpus", "integer"),
            column("Borrowed", ".status.borrowed.gpus", "integer"),
            column("Waiting", ".status.waiting", "integer"),
            column("Share", ".status.share"),
            column("Valid", said("Valid")),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("Lately", ".status.lately", priority=1),
            column("Message", said("Valid", "message"), priority=1),
        ],
    ),
    Definition(
        kind=gpureservation.KIND,
        plural=gpureservation.PLURAL,
        short_name="gpures",
        scope="Cluster",
        module="crds/gpureservation.py",
        description="GPUs that are kept for some namespaces' GPUWorkloads from a moment to another.",
        spec=GPUReservationSpec,
        status=GPUReservationStatus,
        columns=[
            column("Start", ".spec.start"),
            column("End", ".spec.end"),
            column("GPUs", ".spec.gpus", "integer"),
            column("Reserved", ".status.reserved", "integer"),
            column("Used", ".status.used", "integer"),
            column("Lent", ".status.lent", "integer"),
            column("Waiting", ".status.waiting", "integer"),
            column("Phase", ".status.phase"),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("Namespaces", ".spec.namespaces", priority=1),
            column("Message", said("Reserved", "message"), priority=1),
        ],
    ),
    Definition(
        kind=gpumodelprofile.PROFILE_KIND,
        plural=gpumodelprofile.PROFILE_PLURAL,
        short_name="gpump",
        scope="Namespaced",
        module="crds/gpumodelprofile.py",
        description="What berth learned of a model from its GPUWorkloads in this namespace that ended.",
        spec=GPUModelProfileSpec,
        status=GPUModelProfileStatus,
        columns=[
            column("Model", ".spec.modelName"),
            column("Runs", ".status.runs", "integer"),
            column("P50", ".status.p50"),
            column("P90", ".status.p90"),
            column("Active GPUs", ".status.activeGPUs", "integer"),
            column("Peak memory", ".status.peakMemoryMiB", "integer", description="MiB"),
            column("Age", ".metadata.creationTimestamp", "date"),
        ],
    ),
    _CACHE,
    replace(
        _CACHE,
        kind=kernelcache.CLUSTER_KIND,
        plural=kernelcache.CLUSTER_PLURAL,
        short_name="tkcc",
        scope="Cluster",
        description="Compiled GPU kernels in an OCI image, for the pods of every namespace.",
        spec=TritonKernelCacheClusterSpec,
    ),
    _CACHE_ON_NODE,
    replace(
        _CACHE_ON_NODE,
        kind=kernelcache_node.CLUSTER_KIND,
        plural=kernelcache_node.CLUSTER_PLURAL,
        short_name="tkccn",
        scope="Cluster",
        description="How a TritonKernelCacheCluster stands on one node, written by that node.",
    ),
    Definition(
        kind=kernelcachepolicy.KIND,
        plural=kernelcachepolicy.PLURAL,
        short_name="kcp",
        scope="Cluster",
        group=kernelcache.GROUP,
        module="crds/kernelcachepolicy.py",
        description="Who must have signed which cache images.",
        spec=KernelCachePolicySpec,
        status=None,
        columns=[
            column("Images", ".spec.images"),
            column("Namespaces", ".spec.namespaces", description="Whose caches; none: all."),
            column("May skip", ".spec.allowSkipping", "boolean", description="Whether caches may go unverified."),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("First signer", ".spec.signers[0].name", priority=1),
        ],
    ),
    Definition(
        kind=nodedevices.KIND,
        plural=nodedevices.PLURAL,
        short_name="nd",
        scope="Cluster",
        module="crds/nodedevices.py",
        description="The accelerators of one node, what they are offered as and who holds them, written by that node.",
        spec=NodeDevicesSpec,
        status=NodeDevicesStatus,
        columns=[
            column("Devices", ".status.summary"),
            column("Cards", ".status.count", "integer"),
            column("Unhealthy", ".status.unhealthy", "integer"),
            column("Held", ".status.held", "integer", description="Devices that containers have."),
            column("Seats", ".status.seats.seats", "integer"),
            column("Problem", ".status.problems[0]"),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("Seat profile", ".status.seats.source", priority=1),
            column("Simulated", ".status.simulated", "boolean", priority=1),
            column("Updated", ".status.updated", "date", priority=1),
        ],
        rules=[
            {
                "rule": "self.metadata.name == self.spec.nodeName",
                "fieldPath": ".spec.nodeName",
                "message": "must be the object's name",
            }
        ],
    ),
    Definition(
        kind=gpuseatprofile.KIND,
        plural=gpuseatprofile.PLURAL,
        short_name="gpusp",
        scope="Cluster",
        group=gpuseatprofile.GROUP,
        module="crds/gpuseatprofile.py",
        description="How many seats which groups of GPUs of which nodes have.",
        spec=GPUSeatProfileSpec,
        status=GPUSeatProfileStatus,
        columns=[
            column("Groups", ".status.groups", "integer"),
            column("Seats", ".status.seats", "integer"),
            column("Serving", ".status.nodesServing", "integer", description="Nodes with at least one of its seats."),
            column("Refused", ".status.nodesRefused", "integer", description="Nodes that refuse it or a part of it."),
            column("Ready", said("Ready")),
            column("Reason", said("Ready", "reason"), description="Why it is ready, or is not."),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("Error", said("Error", "message"), priority=1),
        ],
    ),
    Definition(
        kind=gpuseatgroup.KIND,
        plural=gpuseatgroup.PLURAL,
        short_name="gpusg",
        scope="Cluster",
        group=gpuseatprofile.GROUP,
        module="crds/gpuseatgroup.py",
        description="Who has the slot of a group of GPUs, who is parked and who waits, written by the group's node.",
        spec=GPUSeatGroupSpec,
        status=GPUSeatGroupStatus,
        columns=[
            column("Node", ".spec.nodeName"),
            column("Group", ".spec.group"),
            column("Phase", ".status.phase"),
            column("Active", ".status.active"),
            column("Waiting", ".status.requests", "integer", description="Requests that wait for a seat to wake."),
            column("Parked", ".status.parked", "integer"),
            column("Switches", ".status.switches", "integer", description="Since the node's ledger began."),
            column("Last", ".status.lastSwitch.at", "date", description="When it switched last."),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("Healthy", said("Healthy"), priority=1),
            column("Message", ".status.message", priority=1),
            column("Refused", ".status.refused", "integer", priority=1),
            column("Parked bytes", ".status.parkedBytes", "integer", priority=1),
            column("Simulated", ".status.simulated", "boolean", priority=1),
        ],
        rules=[
            {
                # A node's name of nearly full length leaves no room for the group's; that of a name which has small
                # letters of its own ends with a part by which G01 and g01 differ.
                "rule": "size(self.spec.nodeName) > 190"
                " || self.metadata.name == self.spec.nodeName + '.' + self.spec.group.lowerAscii()"
                " || self.metadata.name.startsWith(self.spec.nodeName + '.' + self.spec.group.lowerAscii() + '.')",
                "fieldPath": ".spec.group",
                "message": "the object's name must be its node's and its group's, with a dot between",
            }
        ],
        selectable=(".spec.nodeName",),
    ),
    Definition(
        kind=seatmigration.KIND,
        plural=seatmigration.PLURAL,
        short_name="smig",
        scope="Namespaced",
        group=gpuseatprofile.GROUP,
        module="crds/seatmigration.py",
        description="A model server moves to a seat of another group: a second one serves there before it goes.",
        spec=SeatMigrationSpec,
        status=SeatMigrationStatus,
        columns=[
            column("Pod", ".status.source.pod"),
            column("From", ".status.source.seat"),
            column("To", ".status.destination.seat"),
            column("Node", ".status.destination.node"),
            column("Phase", ".status.phase"),
            column("Reason", ".status.reason"),
            column("Age", ".metadata.creationTimestamp", "date"),
            column("Replacement", ".status.destination.pod", priority=1),
            column("Message", ".status.message", priority=1),
        ],
        rules=[
            {
                "rule": "self.spec == oldSelf.spec",
                "fieldPath": ".spec",
                "message": "a move is ordered once: delete it, which undoes it, and create another",
            },
            {
                "rule": "has(self.spec.pod) != has(self.spec.workload)",
                "fieldPath": ".spec",
                "message": "names either a pod or a workload",
            },
            {
                "rule": "has(self.spec.to.group) || has(self.spec.to.node)",
                "fieldPath": ".spec.to",
                "message": "names a group, a node, or both",
            },
        ],
    ),
)
