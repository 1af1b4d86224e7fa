"""The kinds berth speaks of, as the API server addresses them: group, version, plural, and the URL paths made of them.

For the client and for everyone who names a kind. A kind that is not listed here is one `Resource(...)` away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Resource:
    """One collection of the API server.

    `group` is empty for the core group. `namespaced` decides whether paths carry a namespace.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """`plural.group`, the name kubectl and RBAC messages use."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path, percent-encoded, of an object or (without a name) of the collection.

        A namespaced collection without namespace means all namespaces. An empty name is a ValueError, never the
        collection: otherwise deleting "" would delete everything.
        """
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if namespace is not None:
            if not self.namespaced:
                raise ValueError(f"{self.kind} has no namespace, but {namespace!r} was given")
            base = f"{base}/namespaces/{_segment(namespace, 'namespace')}"
        base = f"{base}/{self.plural}"
        if name is None:
            if subresource is not None:
                raise ValueError(f"the subresource {subresource!r} of {self.kind} needs a name")
            return base
        if self.namespaced and namespace is None:
            raise ValueError(f"{self.kind} {name!r} needs a namespace")
        base = f"{base}/{_segment(name, 'name')}"
        return f"{base}/{_segment(subresource, 'subresource')}" if subresource is not None else base


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A reference to one object, as Events carry it (core/v1 ObjectReference)."""

    api_version: str
    kind: str
    name: str
    namespace: str | None = None
    uid: str = ""
    resource_version: str = ""

    def to_dict(self) -> dict[str, str]:
        fields = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "namespace": self.namespace or "",
            "uid": self.uid,
            "resourceVersion": self.resource_version,
        }
        return {key: value for key, value in fields.items() if value}


def _segment(text: str, what: str) -> str:
    if text in ("", ".", ".."):
        raise ValueError(f"{text!r} cannot be a {what} in a request path")
    return quote(text, safe="")


_ADMISSION = "admissionregistration.k8s.io"
_RBAC = "rbac.authorization.k8s.io"

GPUWORKLOADS = Resource("gpu.warp.dev", "v1alpha1", "gpuworkloads", "GPUWorkload", True)
GPUQUOTAS = Resource("gpu.warp.dev", "v1alpha1", "gpuquotas", "GPUQuota", False)
GPURESERVATIONS = Resource("gpu.warp.dev", "v1alpha1", "gpureservations", "GPUReservation", False)
GPUMODELPROFILES = Resource("gpu.warp.dev", "v1alpha1", "gpumodelprofiles", "GPUModelProfile", True)
TRITONKERNELCACHES = Resource("tkm.io", "v1alpha1", "tritonkernelcaches", "TritonKernelCache", True)
TRITONKERNELCACHECLUSTERS = Resource(
    "tkm.io", "v1alpha1", "tritonkernelcacheclusters", "TritonKernelCacheCluster", False
)
TRITONKERNELCACHENODESTATUSES = Resource(
    "tkm.io", "v1alpha1", "tritonkernelcachenodestatuses", "TritonKernelCacheNodeStatus", True
)
TRITONKERNELCACHENODESTATUSCLUSTERS = Resource(
    "tkm.io", "v1alpha1", "tritonkernelcachenodestatusclusters", "TritonKernelCacheNodeStatusCluster", False
)
NODEDEVICES = Resource("gpu.warp.dev", "v1alpha1", "nodedevices", "NodeDevices", False)
KERNELCACHEPOLICIES = Resource("tkm.io", "v1alpha1", "kernelcachepolicies", "KernelCachePolicy", False)
GPUSEATGROUPS = Resource("kyb.ai", "v1alpha1", "gpuseatgroups", "GPUSeatGroup", False)
SEATMIGRATIONS = Resource("kyb.ai", "v1alpha1", "seatmigrations", "SeatMigration", True)
GPUSEATPROFILES = Resource("kyb.ai", "v1alpha1", "gpuseatprofiles", "GPUSeatProfile", False)

RESOURCESLICES = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", False)
RESOURCECLAIMS = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", True)
RESOURCECLAIMTEMPLATES = Resource("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate", True)
DEVICECLASSES = Resource("resource.k8s.io", "v1", "deviceclasses", "DeviceClass", False)

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", False)
NODES = Resource("", "v1", "nodes", "Node", False)
PODS = Resource("", "v1", "pods", "Pod", True)
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap", True)
SECRETS = Resource("", "v1", "secrets", "Secret", True)
SERVICEACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", True)
SERVICES = Resource("", "v1", "services", "Service", True)
ENDPOINTSLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", True)
PODTEMPLATES = Resource("", "v1", "podtemplates", "PodTemplate", True)
PROVISIONINGREQUESTS = Resource("autoscaling.x-k8s.io", "v1", "provisioningrequests", "ProvisioningRequest", True)
REPLICASETS = Resource("apps", "v1", "replicasets", "ReplicaSet", True)
JOBS = Resource("batch", "v1", "jobs", "Job", True)
EVENTS = Resource("events.k8s.io", "v1", "events", "Event", True)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", True)
CSIDRIVERS = Resource("storage.k8s.io", "v1", "csidrivers", "CSIDriver", False)
CSINODES = Resource("storage.k8s.io", "v1", "csinodes", "CSINode", False)
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
ROLES = Resource(_RBAC, "v1", "roles", "Role", True)
ROLEBINDINGS = Resource(_RBAC, "v1", "rolebindings", "RoleBinding", True)
CLUSTERROLES = Resource(_RBAC, "v1", "clusterroles", "ClusterRole", False)
CLUSTERROLEBINDINGS = Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", False)
VALIDATING_WEBHOOKS = Resource(
    _ADMISSION, "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", False
)
ADMISSION_POLICIES = Resource(_ADMISSION, "v1", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", False)
ADMISSION_BINDINGS = Resource(
    _ADMISSION, "v1", "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", False
)
MUTATING_WEBHOOKS = Resource(_ADMISSION, "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", False)

KNOWN: Mapping[tuple[str, str], Resource] = {
    (resource.api_version, resource.kind): resource
    for resource in list(globals().values())
    if type(resource) is Resource
}


def resource_for(manifest: Mapping[str, Any]) -> Resource:
    """The resource a manifest belongs to, by its apiVersion and kind; LookupError for kinds berth does not know."""
    key = (manifest.get("apiVersion", ""), manifest.get("kind", ""))
    try:
        return KNOWN[key]
    except (KeyError, TypeError):
        raise LookupError(f"berth does not know the kind {key[1]!r} of {key[0]!r}") from None
