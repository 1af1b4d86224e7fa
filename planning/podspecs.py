"""Reads pod specs as the scheduler does: what a pod asks for in all, and which nodes its spec allows.

For views (any pod of the cluster) and manifests (a template before it is a pod). Whatever the input, nothing raises:
what cannot be read counts as absent, for the API server has its own say on pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planning.accelerators import gpu_counts
from planning.filters import NodeTerm, Requirement, TolerationView
from planning.model import Resources
from planning.quantities import amounts

Amounts = dict[str, int]


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: object) -> Iterator[Mapping[str, Any]]:
    """The mappings in a list; nothing if it is no list."""
    if isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Mapping))


def text(value: object) -> str:
    """`value` if it is text, else ''."""
    return value if isinstance(value, str) else ""


def container_requests(container: Mapping[str, Any]) -> Amounts:
    """What one container asks for: its requests, or its limits where it has none (as the API server fills in)."""
    resources = mapping(container.get("resources"))
    return {**amounts(resources.get("limits")), **amounts(resources.get("requests"))}


def pod_requests(spec: object) -> Amounts:
    """The effective requests of a pod, by resource name (CPU in millicores).

    max(sum of containers and sidecars, each init container with the sidecars started before it) + overhead; requests
    set on the pod as a whole stand for CPU and memory of its containers. Source: KEP-753, KEP-2837 and
    k8s.io/component-helpers/resource.PodRequests.
    """
    pod = mapping(spec)
    total: Amounts = {}
    for container in mappings(pod.get("containers")):
        _add(total, container_requests(container))
    sidecars: Amounts = {}
    peak: Amounts = {}
    for container in mappings(pod.get("initContainers")):
        asked = container_requests(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, asked)
        else:
            _raise(peak, {name: asked.get(name, 0) + sidecars.get(name, 0) for name in {*asked, *sidecars}})
    _add(total, sidecars)
    _raise(total, peak)
    whole_pod = mapping(pod.get("resources"))
    for name, value in {**amounts(whole_pod.get("limits")), **amounts(whole_pod.get("requests"))}.items():
        if name in ("cpu", "memory"):
            total[name] = value
    _add(total, amounts(pod.get("overhead")))
    return total


def resources_of(asked: Mapping[str, int], gpu_resource: str) -> Resources:
    """The part of a pod's requests that placement counts; every pod takes one of the node's pods."""
    return Resources.counting(gpu_counts(asked, gpu_resource), asked.get("cpu", 0), asked.get("memory", 0), 1)


def tolerations(raw: object) -> tuple[TolerationView, ...]:
    """A pod's tolerations."""
    return tuple(
        TolerationView(
            text(item.get("key")),
            text(item.get("operator")) or "Equal",
            text(item.get("value")),
            text(item.get("effect")),
        )
        for item in mappings(raw)
    )


def selector(raw: object) -> tuple[tuple[str, str], ...]:
    """A pod's nodeSelector, sorted."""
    return tuple(sorted((str(key), str(value)) for key, value in mapping(raw).items()))


def node_terms(affinity: object) -> tuple[NodeTerm, ...] | None:
    """The required node affinity: one of these terms must hold; None when there is none."""
    required = mapping(mapping(affinity).get("nodeAffinity")).get("requiredDuringSchedulingIgnoredDuringExecution")
    if not isinstance(required, Mapping):
        return None
    return tuple(_term(term) for term in mappings(required.get("nodeSelectorTerms")))


def _term(term: Mapping[str, Any]) -> NodeTerm:
    found = [_requirement(item, False) for item in mappings(term.get("matchExpressions"))]
    found += [_requirement(item, True) for item in mappings(term.get("matchFields"))]
    return tuple(found)


def _requirement(item: Mapping[str, Any], field: bool) -> Requirement:
    values = item.get("values")
    given = tuple(str(value) for value in values) if isinstance(values, list | tuple) else ()
    return Requirement(text(item.get("key")), text(item.get("operator")), given, field)


def _add(total: Amounts, more: Mapping[str, int]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0) + value


def _raise(total: Amounts, floor: Mapping[str, int]) -> None:
    for name, value in floor.items():
        total[name] = max(total.get(name, 0), value)
