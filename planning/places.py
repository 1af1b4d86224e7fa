"""What a gang asks for beyond one pod, and where its pods are: node by node, in the order of their indices.

For whoever places, counts or tells of gangs. On a Job the places stand as JSON, so that it alone tells them; anybody
may write anything there, so what is read is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from crds.gpuworkload import MAX_REPLICAS, GPUWorkloadSpec
from planning.model import JobView, NodeView, Places, Resources

# Characters of a node's name, and of all places of a Job as JSON: Kubernetes bounds both, the latter at 256 KiB.
_NAME = 253
_TEXT = (_NAME + 10) * MAX_REPLICAS
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Gang:
    """So many pods, of which `least` must find a place. `level`: the node label whose value names a domain, '' if it
    does not matter; `required`: all must be in one.
    """

    pods: int
    least: int
    level: str = ""
    required: bool = False


def gang_of(spec: GPUWorkloadSpec) -> Gang | None:
    """None for a single pod, which is near to itself wherever it is."""
    if spec.replicas == 1:
        return None
    least, near = spec.min_replicas or spec.replicas, spec.topology
    if near is None:
        return Gang(spec.replicas, least)
    return Gang(spec.replicas, least, near.level, near.mode == "Required")


def least_pods(spec: GPUWorkloadSpec) -> int:
    """With how many pods it may start: what its tenant's quota was asked for."""
    gang = gang_of(spec)
    return gang.least if gang is not None else 1


def times(requests: Resources, pods: int) -> Resources:
    """What so many pods ask for."""
    return replace(
        requests,
        gpus=requests.gpus * pods,
        cpu_milli=requests.cpu_milli * pods,
        memory=requests.memory * pods,
        pods=requests.pods * pods,
    )


def pods_in(places: Places) -> int:
    return sum(count for _, count in places)


def ranks(places: Places) -> list[str]:
    """The node of each pod, by its index."""
    return [node for node, count in places for _ in range(count)]


def left_of(places: Places, present: Collection[int]) -> Iterator[tuple[str, int]]:
    """How many pods are still to come to each node: those whose index is not `present`."""
    index = 0
    for node, count in places:
        left = sum(i not in present for i in range(index, index + count))
        index += count
        if left:
            yield node, left


def places_text(places: Places) -> str:
    """Places as a Job's annotation holds them."""
    return json.dumps(places, separators=(",", ":"))


def places_from(annotation: object, pods: object) -> Places:
    """Places out of a Job's annotation; none if it holds no places of just so many pods."""
    if not isinstance(annotation, str) or len(annotation) > _TEXT:
        return ()
    try:
        found = json.loads(annotation)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(found, list) or len(found) > MAX_REPLICAS:
        return ()
    places = tuple(place for item in found if (place := _place(item)) is not None)
    known = len(places) == len(found) == len({node for node, _ in places})
    return places if known and 0 < pods_in(places) <= MAX_REPLICAS and pods_in(places) == pods else ()


def _place(item: object) -> tuple[str, int] | None:
    if not isinstance(item, list) or len(item) != 2:
        return None
    node, count = item
    if not isinstance(node, str) or not 0 < len(node) <= _NAME or not (node.isascii() and node.isprintable()):
        return None
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_REPLICAS:
        return None
    return node, count


def amiss(job: JobView, node: Callable[[str], NodeView | None]) -> tuple[str, NodeView | None]:
    """The first of the Job's nodes that cannot be relied on, else the first; its name, and the node if it is there."""
    found = [(name, node(name)) for name, _ in job.places or ((job.node, 1),)]
    bad = (each for each in found if each[1] is None or each[1].out_of_service or not each[1].ready)
    return next(bad, found[0])


def on_nodes(names: Iterable[str]) -> str:
    """`node a`, or `3 nodes (a, b, c)`."""
    found = list(names)
    if len(found) == 1:
        return f"node {found[0]}"
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{len(found)} nodes ({', '.join(found[:_SHOWN])}{more})"
