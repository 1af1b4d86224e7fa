"""Gives the workloads in the queue their turns: a place, somebody else's place, or the reason why they wait.

For the placement round, which knows whose turn it is. Room is kept for the first for whom there is none, and so is what
the first of each tenant lacks of its quota: others use it only if they can be stopped, or will have ended by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from planning import status
from planning.capacity import Holding
from planning.floor import Floor, Kept, Wish, kept_for
from planning.lifecycle import JOB_REFUSED, NO_SUITABLE_NODE
from planning.model import (
    AVOIDED_NODES,
    Assignment,
    Decision,
    Ledger,
    Preemption,
    Resources,
    Turn,
    Verdict,
    Waiting,
    WorkloadView,
)
from planning.naming import job_name
from planning.preemption import Preemptor
from planning.quotas import Books, firm, topmost
from planning.strategies import StrategyError
from planning.strategies.random import Random

STRATEGY_FAILED = "StrategyFailed"
WAITING_FOR_CAPACITY = "WaitingForCapacity"
WAITING_FOR_QUOTA = "WaitingForQuota"
PREEMPTING = "Preempting"

# A decision goes through a history and must stay far below 1 MiB (law 4): beyond this the rest is left to the next
# round. An entry's own size is its message and about this much for names and punctuation.
_BUDGET = 384 * 1024
_ENTRY = 448

# For how many workloads room is kept at once: for one among those that compete for the same nodes.
_KEPT = 64

_ADVICE = "{}; choose another (spec.schedulingStrategy), or mend it"
_STOPPED = "preempted: its place on node {node} goes to {by}; it is queued again, and no retry is counted"
_PODLESS = (
    "no pod could be created for its Jobs: a quota, the namespace's PodSecurity level or a webhook refuses them "
    "(`kubectl get events` of the namespace names it)"
)


@dataclass(slots=True)
class Told:
    """What a round has decided so far: as much as a history takes."""

    decision: Decision = field(default_factory=Decision)
    reasons: Counter[str] = field(default_factory=Counter)  # of those who wait for a place
    more: bool = False
    left: int = _BUDGET

    @property
    def queued(self) -> int:
        return self.reasons.total()

    def affords(self, message: str) -> bool:
        """Whether one more entry with this message still fits; else the rest is for the next round."""
        cost = _ENTRY + len(message) * 2
        if cost > self.left:
            self.more = True
            return False
        self.left -= cost
        return True

    def waits(self, view: WorkloadView, reason: str, message: Callable[[], str]) -> None:
        """The workload stays in the queue, and is told why unless it is told already."""
        self.reasons[reason] += 1
        if not status.shows(view, reason) and self.affords(text := message()):
            self.decision.waiting.append(wait(view, reason, text))

    def judged(self, wish: Wish, reason: str, message: str) -> None:
        """The workload cannot go on by waiting."""
        view = wish.view
        if self.affords(message):
            self.decision.verdicts.append(
                Verdict(view.uid, view.namespace, view.name, wish.turn, reason, message, view.generation)
            )


@dataclass(slots=True)
class Turns:
    """One round's turns, one workload after the other; what is decided is added to `told`."""

    floor: Floor
    books: Books
    preemptor: Preemptor
    told: Told
    ledger: Ledger
    now: float
    seed: int
    reconsidered: list[str]
    held: list[Holding]
    first: dict[str, Wish] = field(default_factory=dict)  # by tenant, who waits for its quota
    borrowers: dict[str, str] = field(default_factory=dict)  # by topmost cohort, the first tenant that lacks quota
    releases: dict[str, list[tuple[float, Resources]]] = field(default_factory=dict)
    awaiting: set[str] = field(default_factory=set)  # UIDs for which others are being stopped

    def take(self, wish: Wish) -> None:
        shape, view, books, told = wish.shape, wish.view, self.books, self.told
        need, is_firm = shape.requests, firm(wish.view)
        if wish.turn.retries > wish.limit:
            told.judged(wish, JOB_REFUSED, _PODLESS)
            return
        if self.floor.never(shape):
            told.judged(wish, NO_SUITABLE_NODE, self.floor.explain(shape))
            return
        if books.short(view.namespace, need, firm=is_firm) is not None:
            self._lacks_quota(wish)
            return
        tenant = books.tenant(view.namespace).name
        before = self.first.get(tenant)
        if before is not None and not self._leaves_enough(before, wish):
            if is_firm:
                told.waits(view, WAITING_FOR_QUOTA, partial(_behind, tenant, before.view))
                return
        else:
            before = None
        avoided = self.ledger.avoided.get(view.uid) if view.uid not in self.reconsidered else None
        try:
            assignment, anew = _assigned(wish, self.floor, avoided.nodes if avoided else (), self.seed)
        except StrategyError as failed:
            told.waits(view, STRATEGY_FAILED, partial(_ADVICE.format, failed))
            return
        if assignment is None:
            assignment = self._in_between(wish)
        if assignment is not None:
            if before is not None or self._lent_on(wish):
                assignment = replace(assignment, backfill=0.0)
            told.decision.assignments.append(assignment)
            books.take(view.namespace, need, firm=is_firm)
            if anew:
                self.reconsidered.append(view.uid)
        else:
            self.floor.full.add(shape)
            self._lacks_room(wish)

    def _lacks_quota(self, wish: Wish) -> None:
        view, need, is_firm = wish.view, wish.shape.requests, firm(wish.view)
        account = self.books.tenant(view.namespace)
        tenant = account.name
        behind, attainable = tenant in self.first, self.books.attainable(view.namespace, need, firm=is_firm)
        # What comes free would be kept for the one before it.
        if attainable and not (behind and is_firm) and self._cleared(wish, head=not behind):
            return
        why = self.books.explain(view.namespace, need, firm=is_firm)
        if attainable:
            self.first.setdefault(tenant, wish)
            self.borrowers.setdefault(topmost(account).name, tenant)
        self.told.waits(view, WAITING_FOR_QUOTA, lambda: why)

    def _lacks_room(self, wish: Wish) -> None:
        head = not self.floor.competes(wish.shape)
        if self._cleared(wish, head=head):
            return
        self.told.waits(wish.view, WAITING_FOR_CAPACITY, partial(self.floor.explain, wish.shape))
        if head and len(self.floor.kept) < _KEPT:
            kept = kept_for(wish.view, wish.shape, self.floor, self._releases())
            if kept is not None:
                self.floor.keep(kept)

    def _cleared(self, wish: Wish, *, head: bool) -> bool:
        """Whether room is being made for the workload; who must go is told to."""
        found = self.preemptor.clear(wish, head=head)
        known = self.ledger.clearing.get(wish.view.uid) == wish.view.generation
        if found is None or not (found.victims or known):
            return False  # what comes free by itself is nobody's yet
        self.preemptor.reserve(wish, found)
        self.awaiting.add(wish.view.uid)
        for each in found.victims:
            message = _STOPPED.format(node=each.job.node, by=f"{wish.view.namespace}/{wish.view.name}")
            self.told.affords(message)  # it is for whom there is room now, so it is told in any case
            self.told.decision.preemptions.append(
                Preemption(
                    each.view.uid, each.view.namespace, each.view.name, each.job.name, each.job.uid,
                    each.job.resource_version, Turn(each.job.attempt + 1, each.job.retries), message, wish.view.uid,
                    wish.view.generation,
                )
            )  # fmt: skip
        names = sorted(f"{each.view.namespace}/{each.view.name}" for each in found.victims)
        self.told.waits(wish.view, PREEMPTING, partial(_making_room, found.node, names))
        return True

    def _leaves_enough(self, before: Wish, wish: Wish) -> bool:
        """Whether what the tenant may still take suffices for this one beside the one before it."""
        a, b = before.shape.requests, wish.shape.requests
        both = Resources(a.gpus + b.gpus, a.cpu_milli + b.cpu_milli, a.memory + b.memory)
        return self.books.short(wish.view.namespace, both, firm=firm(wish.view)) is None

    def _lent_on(self, wish: Wish) -> bool:
        """Whether it borrows what another tenant of its cohort waits for, which is before it: that may have it back."""
        account = self.books.tenant(wish.view.namespace)
        first = self.borrowers.get(topmost(account).name, account.name)
        return first != account.name and self.books.borrows(account, wish.shape.requests)

    def _in_between(self, wish: Wish) -> Assignment | None:
        """A place where room is kept for somebody else, who will find it free or have it back."""
        for kept in self.floor.kept:
            ends = self._ends(wish, kept)
            if (ends or not firm(wish.view)) and self.floor.take_kept(wish, kept):
                return replace(_assignment(wish, kept.node, wish.strategy), backfill=kept.start if ends else 0.0)
        return None

    def _ends(self, wish: Wish, kept: Kept) -> bool:
        """Whether it will have ended when the room is needed."""
        spec = wish.view.spec
        if kept.start is None or spec is None or spec.active_deadline_seconds is None:
            return False
        return self.now + spec.active_deadline_seconds <= kept.start

    def _releases(self) -> dict[str, list[tuple[float, Resources]]]:
        """By node, what is held there and when it will be free at the latest."""
        if not self.releases:
            for each in self.held:
                moment = self.now if each.leaving else each.until if each.until is not None else inf
                self.releases.setdefault(each.node, []).append((max(moment, self.now), each.requests))
        return self.releases


def _behind(tenant: str, before: WorkloadView) -> str:
    return (
        f"GPUQuota {tenant}: what is left of it is kept for {before.namespace}/{before.name}, which is before it "
        "(preemptible work may use it meanwhile)"
    )


def _making_room(node: str, names: list[str]) -> str:
    """What is said to the workload that gets the room."""
    if not names:
        return f"room is being made on node {node}; it is placed when those that were stopped there are gone"
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"room is being made on node {node}: {shown} must stop; it is placed when they are gone"


def wait(view: WorkloadView, reason: str, message: str) -> Waiting:
    return Waiting(view.uid, view.namespace, view.name, view.resource_version, reason, message)


def _assigned(wish: Wish, floor: Floor, avoided: tuple[str, ...], seed: int) -> tuple[Assignment | None, bool]:
    """The workload's place: on a node where it was not withdrawn before, if there is one; if not (True) it begins anew.

    A strategy that always chooses alike would go round in a circle among the nodes that are remembered and the next
    one. Where that many were tried in vain, chance goes on: it gets everywhere in the end.
    """
    if wish.shape in floor.full:
        return None, False
    strategy = Random.name if len(avoided) >= AVOIDED_NODES else wish.strategy
    node, anew = floor.take(wish, strategy, seed, avoided), False
    if not node and avoided:
        strategy, anew = wish.strategy, True
        node = floor.take(wish, strategy, seed)
    return (_assignment(wish, node, strategy), anew) if node else (None, False)


def _assignment(wish: Wish, node: str, strategy: str) -> Assignment:
    view, turn = wish.view, wish.turn
    return Assignment(
        uid=view.uid,
        namespace=view.namespace,
        name=view.name,
        generation=view.generation,
        resource_version=view.resource_version,
        turn=turn,
        node=node,
        requests=wish.shape.requests,
        strategy=strategy,
        job_name=job_name(view.name, view.uid, turn.attempt),
    )
