"""What is said between a kernel cache's workflows and the nodes: orders, reports, and the names by which both find each
other. Values only, and small, for they go through histories.

An order carries an epoch, larger than that of every order before it for that cache: a node that has begun a newer one
refuses an older, however late it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planning.caches.volumes import Kind

PREPARE = "prepare_cache"
"""Activity on a node's queue: NodeTask -> Report. Verifies, preflights, extracts and marks the cache Ready."""
REMOVE = "remove_cache"
"""Activity on a node's queue: NodeTask -> Report. New pods no longer get the cache; gone once no pod has it mounted."""
INVENTORY = "inventory"
"""Signal of a node's process to its workflow: Inventory."""
NODE_WORKFLOW = "Node"

SUPERSEDED = "Superseded"
"""Reason of the Report with which a node refuses an order that is older than one that it has begun, and type of the
ApplicationError with which it ends one that a newer one overtakes."""

Outcome = Literal["ready", "incompatible", "failed", "retrying", "busy", "removed"]
"""`failed` is the image's fault and stays so; `retrying` may pass, or needs somebody: it is tried again. `busy`: pods
have it mounted, so that it cannot be removed yet."""


@dataclass(frozen=True, slots=True)
class CacheRef:
    """A cache by its kind, namespace ('' for one of the cluster), name and UID."""

    kind: Kind
    namespace: str
    name: str
    uid: str

    @property
    def told(self) -> str:
        """As a person names it."""
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """What a node is to do. `image` (registry/repository) and `digest` (an image's or an index's) say what is to be
    prepared; both are empty where it is to be removed. `generation` is that of the cache's spec.
    """

    epoch: int
    task: Literal["prepare", "remove"]
    image: str = ""
    digest: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class NodeTask:
    """An order to one node. `pods`: how many the last report told of; a removal that is told so returns when that
    changed, -1: at once.
    """

    ref: CacheRef
    node: str
    order: NodeOrder
    pods: int = -1


@dataclass(frozen=True, slots=True)
class Report:
    """What became of an order. `serves`: the digest (as orders have it) that new pods get on that node now, '' none.
    `within`: seconds after which a `retrying` one is to be tried again. `newest`: the epoch of a newer order that the
    node has begun, where that is why this one was not; else 0.
    """

    node: str
    epoch: int
    outcome: Outcome
    serves: str = ""
    reason: str = ""
    message: str = ""
    pods: int = 0
    within: float = 0.0
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node's process found at its start, or finds changed: `fingerprint` is of GPUs, driver and ledger."""

    node: str
    fingerprint: str


def node_queue(node: str) -> str:
    """The task queue that a node's process serves."""
    return f"node-{node}"


def node_id(node: str) -> str:
    """The id of a node's workflow."""
    return f"node/{node}"


def cache_id(uid: str) -> str:
    """The id of a cache's workflow."""
    return f"kernelcache/{uid}"


def node_cache_id(uid: str, node: str) -> str:
    """The id of the workflow that has one node carry out the orders for one cache."""
    return f"kernelcache/{uid}/{node}"
