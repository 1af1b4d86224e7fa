"""A kernel cache's object as its workflow's activities see it, read from whatever the API server has.

For the look at a cache; nothing here raises, whatever stands in the object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crds.kernelcache import CLUSTER_KIND, TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from planning.caches.orders import CacheRef
from planning.podspecs import mapping, text

FINALIZER = "tkm.io/finalizer"
FORCE_ANNOTATION = "tkm.io/force-delete"
"""On a cache that is being deleted: "true" lets it go although pods have it mounted or nodes do not answer."""


@dataclass(frozen=True, slots=True)
class CacheView:
    """`spec` is None where it cannot be read, and `problem` says why."""

    ref: CacheRef
    resource_version: str
    generation: int
    deleting: bool
    finalizer: bool
    other_finalizers: tuple[str, ...]
    forced: bool
    spec: TritonKernelCacheSpec | None
    problem: str
    status: Mapping[str, Any] = field(default_factory=dict)


def cache_view(raw: object) -> CacheView:
    """The view of a TritonKernelCache or TritonKernelCacheCluster."""
    obj = mapping(raw)
    meta = mapping(obj.get("metadata"))
    whole = obj.get("kind") == CLUSTER_KIND
    spec, problem = (TritonKernelCacheClusterSpec if whole else TritonKernelCacheSpec).parse(obj.get("spec"))
    found = meta.get("finalizers")
    finalizers = [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
    generation = meta.get("generation")
    return CacheView(
        ref=CacheRef(
            kind="TritonKernelCacheCluster" if whole else "TritonKernelCache",
            namespace=text(meta.get("namespace")),
            name=text(meta.get("name")),
            uid=text(meta.get("uid")),
        ),
        resource_version=text(meta.get("resourceVersion")),
        generation=generation if isinstance(generation, int) else 0,
        deleting="deletionTimestamp" in meta,
        finalizer=FINALIZER in finalizers,
        other_finalizers=tuple(each for each in finalizers if each != FINALIZER),
        forced=mapping(meta.get("annotations")).get(FORCE_ANNOTATION) == "true",
        spec=spec,
        problem=problem,
        status=mapping(obj.get("status")),
    )
