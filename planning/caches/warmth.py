"""What placement and a cache's own status need of how a cache stands on one node: read from the node's status object.

There may be a hundred thousand of these, so little is kept of each, and placement is given an index that costs what
changed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from planning.conditions import conditions
from planning.podspecs import mapping, text

Cache = tuple[str, str]
"""A kernel cache's namespace, '' for one of the cluster, and its name."""

Warm = Mapping[Cache, frozenset[str]]
"""The nodes on which each cache is Ready; no entry where there are none."""


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


class WarmNodes:
    """Where each cache is Ready, kept up to date use by use. What was given out once never changes, so that a round may
    go on with it meanwhile; and the nodes of a cache stay one object until they are others.
    """

    def __init__(self) -> None:
        # Counted: a cache that was made anew may have two statuses for a node for a moment.
        self._uses: dict[Cache, Counter[str]] = {}
        self._changed: set[Cache] = set()
        self._known: dict[Cache, frozenset[str]] = {}

    def change(self, old: CacheUse | None, new: CacheUse | None) -> None:
        """A use came (no `old`), changed, or went (no `new`)."""
        before, now = _where(old), _where(new)
        if before == now:
            return
        if before is not None:
            cache, node = before
            nodes = self._uses[cache]
            nodes[node] -= 1
            if not nodes[node]:
                del nodes[node]
                self._changed.add(cache)
            if not nodes:
                del self._uses[cache]
        if now is not None:
            cache, node = now
            nodes = self._uses.setdefault(cache, Counter())
            nodes[node] += 1
            if nodes[node] == 1:
                self._changed.add(cache)

    def now(self) -> Warm:
        """All of them at this moment."""
        if self._changed:
            known = dict(self._known)
            for cache in self._changed:
                nodes = frozenset(self._uses.get(cache, ()))
                if not nodes:
                    known.pop(cache, None)
                elif nodes != known.get(cache):
                    known[cache] = nodes
            self._known = known
            self._changed.clear()
        return self._known


def _where(use: CacheUse | None) -> tuple[Cache, str] | None:
    """The cache and the node, if it is Ready there."""
    if use is None or not (use.ready and use.cache and use.node):
        return None
    return (use.namespace, use.cache), use.node
