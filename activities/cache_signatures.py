"""What the workflows of kernel caches may ask of activities, and the signals between them: names and values, and
nothing that does the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from temporalio.common import SearchAttributePair, TypedSearchAttributes

from activities.messages import KIND, NAME, NAMESPACE, NODE
from activities.signatures import Versions
from planning.caches.orders import CacheRef, NodeOrder, Report
from planning.caches.rollout import Rollout, Step

LOOK_AT_CACHE = "look_at_cache"
TELL_CACHE = "tell_cache"
LOOK_AT_NODE = "look_at_node"


@dataclass
class CacheState:
    """What a cache's workflow starts with and carries over continue-as-new. `rechecked`: nodes whose hardware or store
    is another than it was.
    """

    ref: CacheRef
    rollout: Rollout = field(default_factory=Rollout)
    seen: Versions = field(default_factory=dict)
    rechecked: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CacheLook:
    ref: CacheRef
    rollout: Rollout
    fresh: Versions
    rechecked: list[str]


@dataclass(frozen=True)
class CacheLooked:
    """What a look decided and did: `step` is to be applied. `over`: the cache is gone, and so is all that was made of
    it. `within`: look again after so many seconds.
    """

    phase: str
    message: str
    step: Step | None = None
    over: bool = False
    within: float | None = None


@dataclass
class NodeCacheState:
    """What the workflow of a cache on one node starts with. Carried over continue-as-new: the `order` that is not
    answered for good yet, `tries` that were in vain, `pods` and `told` as last reported.
    """

    ref: CacheRef
    node: str
    order: NodeOrder | None = None
    tries: int = 0
    pods: int = -1
    told: Report | None = None


@dataclass(frozen=True)
class TellCache:
    """A node's report on its way to the cache's workflow."""

    ref: CacheRef
    report: Report


@dataclass
class NodeState:
    """What a node's workflow carries: the fingerprint that its process told last."""

    node: str
    fingerprint: str = ""


@dataclass(frozen=True)
class NodeLook:
    """`changed`: the hardware or the store is another, so that caches must be checked anew there."""

    node: str
    changed: bool


@dataclass(frozen=True)
class NodeLooked:
    next: Literal["wait", "end"]
    message: str


def cache_attributes(ref: CacheRef) -> TypedSearchAttributes:
    return _attributes("KernelCache", ref)


def node_cache_attributes(ref: CacheRef, node: str) -> TypedSearchAttributes:
    return _attributes("NodeKernelCache", ref, node)


def node_attributes(node: str) -> TypedSearchAttributes:
    return TypedSearchAttributes([SearchAttributePair(KIND, "Node"), SearchAttributePair(NODE, node)])


def _attributes(kind: str, ref: CacheRef, node: str = "") -> TypedSearchAttributes:
    pairs = [SearchAttributePair(KIND, kind), SearchAttributePair(NAME, ref.name)]
    if ref.namespace:
        pairs.append(SearchAttributePair(NAMESPACE, ref.namespace))
    if node:
        pairs.append(SearchAttributePair(NODE, node))
    return TypedSearchAttributes(pairs)
