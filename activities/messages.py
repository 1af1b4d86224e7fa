"""The signals between controller, ledger and workloads, and the ids and names by which they find each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

from activities.signatures import Versions, WorkloadRef
from planning.model import Ledger, Provisioning, Stage, Turn, Verdict

KIND = SearchAttributeKey.for_keyword("BerthKind")
NAMESPACE = SearchAttributeKey.for_keyword("BerthNamespace")
NAME = SearchAttributeKey.for_keyword("BerthName")
NODE = SearchAttributeKey.for_keyword("BerthNode")
PHASE = SearchAttributeKey.for_keyword("BerthPhase")


def placement_id(pool: str) -> str:
    return f"placement/{pool}"


def workload_id(uid: str) -> str:
    return f"gpuworkload/{uid}"


def provisioning_id(uid: str) -> str:
    return f"provisioning/{uid}"


def provisioning_attributes(ref: WorkloadRef) -> TypedSearchAttributes:
    return TypedSearchAttributes(
        [
            SearchAttributePair(KIND, "Provisioning"),
            SearchAttributePair(NAMESPACE, ref.namespace),
            SearchAttributePair(NAME, ref.name),
        ]
    )


def workload_attributes(ref: WorkloadRef, node: str, phase: str) -> TypedSearchAttributes:
    """The search attributes a workload's workflow starts with, so that none has to be written later."""
    pairs: list[SearchAttributePair[str]] = [
        SearchAttributePair(KIND, "GPUWorkload"),
        SearchAttributePair(NAMESPACE, ref.namespace),
        SearchAttributePair(NAME, ref.name),
        SearchAttributePair(PHASE, phase),
    ]
    if node:
        pairs.append(SearchAttributePair(NODE, node))
    return TypedSearchAttributes(pairs)


def placement_attributes(pool: str) -> TypedSearchAttributes:
    return TypedSearchAttributes([SearchAttributePair(KIND, "Placement"), SearchAttributePair(NAME, pool)])


@dataclass(frozen=True)
class Poke:
    """Something changed; go and look. Carries no content but how new the news is, per watched kind."""

    seen: Versions = field(default_factory=dict)


@dataclass(frozen=True)
class Requeue:
    """A workload comes back to the ledger for its next turn."""

    uid: str
    turn: Turn


@dataclass(frozen=True)
class OrderNews:
    """Where a workload's order stands, for the ledger; None: nobody follows it any more."""

    uid: str
    generation: int
    now: Provisioning | None


@dataclass
class ProvisioningState:
    """What the workflow of an order starts with and carries over continue-as-new. It is about no order until it is
    given one (`generation` 0). `known`: the attempt's request was made; `told`: how far others have heard of it.
    """

    ref: WorkloadRef
    generation: int = 0
    attempt: int = 0
    known: bool = False
    told: Stage = ""
    seen: Versions = field(default_factory=dict)


@dataclass
class PlacementState:
    """What the ledger carries over continue-as-new: its promises, what every later decision must have seen
    (`versions`), and how new the news is that it has yet to look at (`fresh`).
    """

    pool: str = "default"
    ledger: Ledger = field(default_factory=Ledger)
    versions: Versions = field(default_factory=dict)
    fresh: Versions = field(default_factory=dict)
    rounds: int = 0


@dataclass
class WorkloadState:
    """What a workload's workflow starts with and carries over continue-as-new.

    `due` is the moment (seconds since the epoch) at which a retry that is being waited for happens.
    """

    ref: WorkloadRef
    turn: Turn = field(default_factory=Turn)
    seen: Versions = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    due: float | None = None
