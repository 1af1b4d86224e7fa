"""Which kernel caches a workload's pods mount, and how the nodes on which these are Ready come before others.

For the placement round. It is a preference and no filter: among the nodes that hold the request those with more of its
caches come first, and the workload's strategy decides among equals. Strategies know nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from crds.gpuworkload import GPUWorkloadSpec
from crds.kernelcache import CLUSTER_KIND
from planning.caches.volumes import DRIVER, VolumeRequest, volume_request
from planning.caches.warmth import Cache, Warm
from planning.model import Assignment
from planning.podspecs import mapping, mappings
from planning.strategies import Candidate, Rank, Request, Strategy

# What the kubelet adds to an inline volume's attributes, whoever the pod is.
_OF_A_POD = {
    "csi.storage.k8s.io/ephemeral": "true",
    "csi.storage.k8s.io/pod.uid": "-",
    "csi.storage.k8s.io/pod.namespace": "-",
    "csi.storage.k8s.io/pod.name": "-",
}

Mounted = tuple[bool, str]
"""Whether it is a cache of the cluster, else one of the pod's own namespace; and its name."""


def mounted(spec: GPUWorkloadSpec) -> tuple[Mounted, ...]:
    """The caches that the template's pods mount, each once, sorted. A volume that nodes would refuse is no cache's, and
    one that no container mounts is never asked for.
    """
    if spec.template is None:
        return ()
    pod = mapping(spec.template.get("spec"))
    used = {mount.get("name") for each in _containers(pod) for mount in mappings(each.get("volumeMounts"))}
    found = set()
    for volume in mappings(pod.get("volumes")):
        csi = mapping(volume.get("csi"))
        if csi.get("driver") != DRIVER or volume.get("name") not in used:
            continue
        attributes = mapping(csi.get("volumeAttributes"))
        if not all(isinstance(part, str) for item in attributes.items() for part in item):
            continue
        asked = volume_request({**attributes, **_OF_A_POD}, read_only=csi.get("readOnly") is True)
        if isinstance(asked, VolumeRequest):
            found.add((asked.kind == CLUSTER_KIND, asked.name))
    return tuple(sorted(found))


def caches(mounts: Iterable[Mounted], namespace: str) -> tuple[Cache, ...]:
    """The same for the pods of a namespace."""
    return tuple(("" if whole else namespace, name) for whole, name in mounts)


class WarmFirst:
    """A strategy that first looks at how many of some caches are Ready on a node, and then asks another one.

    One for each moment at which other nodes are warm: where they changed, ranks that are kept of an older one are of no
    use. `counts`: by node, how many of the caches are Ready there; nodes with none are left out.
    """

    def __init__(self, strategy: Strategy, wanted: tuple[Cache, ...], warm: Warm) -> None:
        self._strategy, self._nodes = strategy, _nodes(wanted, warm)
        self.counts = Counter(node for nodes in self._nodes for node in nodes)
        self.most = max(self.counts.values(), default=0)
        self.name = f"{strategy.name} near {', '.join('/'.join(cache) for cache in wanted)}"
        self.steady = strategy.steady

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        return (-self.counts.get(candidate.node.name, 0), *self._strategy.rank(request, candidate))

    def holds(self, strategy: Strategy, wanted: tuple[Cache, ...], warm: Warm) -> bool:
        """Whether it is still the one for that strategy: the caches, the same as ever, are on the same nodes."""
        nodes = _nodes(wanted, warm)
        return self._strategy is strategy and all(a is b for a, b in zip(self._nodes, nodes, strict=True))


def told(assignment: Assignment) -> str:
    """What a decision says of the caches, for people; '' where the workload mounts none, or they did not matter."""
    found = assignment.warmth
    if found is None:
        return ""
    one, many = found.caches == 1, bool(assignment.places)
    its, are = ("its kernel cache", "is") if one else (f"its {found.caches} kernel caches", "are")
    if found.ready == found.caches:
        return f"{its} {are} ready {'on all of its nodes' if many else 'there'}"
    if not found.most:
        return f"{its} {are} ready on no node yet"
    if many:  # which of its nodes lack what, and why, is more than a sentence
        return f"{its} {are} not {'' if one else 'all '}ready on all of its nodes"
    if one:
        return f"{its} is not ready there: no node where it is ready could take it"
    some = f"{found.ready or 'none'} of {its} {'is' if found.ready < 2 else 'are'} ready there"
    return f"{some}, and no node has more" if found.most == found.ready else f"{some}: no node with more could take it"


_NOWHERE: frozenset[str] = frozenset()


def _nodes(wanted: Iterable[Cache], warm: Warm) -> tuple[frozenset[str], ...]:
    """Where each of the caches is Ready."""
    return tuple(warm.get(cache, _NOWHERE) for cache in wanted)


def _containers(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from mappings(pod.get("containers"))
    yield from mappings(pod.get("initContainers"))
