"""What placement and a cache's own status need of how a cache stands on one node: read from the node's status object.

There may be a hundred thousand of these, so little is kept of each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from planning.conditions import conditions
from planning.podspecs import mapping, text


@dataclass(frozen=True, slots=True)
class CacheUse:
    """`namespace` is '' for a cache of the cluster; `ready`: new pods on the node can mount it; `pods` have it."""

    cache_uid: str
    namespace: str
    cache: str
    node: str
    ready: bool
    pods: int


def cache_use(raw: object) -> CacheUse | None:
    """From a node status of either scope; None where it says nothing that counts."""
    obj = mapping(raw)
    spec, status = mapping(obj.get("spec")), mapping(obj.get("status"))
    reference = mapping(spec.get("kernelCacheRef"))
    pods = status.get("podsUsing")
    pods = pods if type(pods) is int and pods > 0 else 0  # True is none
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions(status))
    if not ready and not pods:
        return None
    return CacheUse(
        cache_uid=sys.intern(text(reference.get("uid"))),
        namespace=sys.intern(text(mapping(obj.get("metadata")).get("namespace"))),
        cache=sys.intern(text(reference.get("name"))),
        node=sys.intern(text(spec.get("nodeName"))),
        ready=ready,
        pods=pods,
    )
