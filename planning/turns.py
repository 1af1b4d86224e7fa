"""Gives the workloads in the queue their turns: a place, somebody else's place, or the reason why they wait.

For the placement round, which knows whose turn it is. Room is kept for the first for whom there is none, and so is what
the first of each tenant lacks of its quota: others use it only if they can be stopped, or will have ended by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from planning import gangs, status
from planning.capacity import Holding
from planning.filters import Shape
from planning.fleet import Place
from planning.floor import Floor, Kept, Kind, Wish, kept_for
from planning.lifecycle import JOB_REFUSED, NO_SUITABLE_NODE
from planning.model import (
    AVOIDED_NODES,
    Assignment,
    Decision,
    Ledger,
    Places,
    Preemption,
    Resources,
    Turn,
    Verdict,
    Waiting,
    WorkloadView,
)
from planning.naming import job_name
from planning.places import Gang, on_nodes, pods_in, times
from planning.preemption import Preemptor
from planning.provisioning import PROVISIONING, Orders
from planning.quotas import Books, firm, topmost
from planning.strategies import StrategyError
from planning.strategies.random import Random
from planning.windows import Window, before_it_begins, when_all_is_used

STRATEGY_FAILED = "StrategyFailed"
WAITING_FOR_CAPACITY = "WaitingForCapacity"
WAITING_FOR_QUOTA = "WaitingForQuota"
PREEMPTING = "Preempting"
NEXT_ROUND = "NextRound"  # this one was full
# In place of a strategy, which has no choice there.
BY_RESERVATION = "reservation"

# A decision goes through a history and must stay far below 1 MiB (law 4): beyond this the rest is left to the next
# round. An entry's own size is its message and about this much for names and punctuation.
_BUDGET = 384 * 1024
_ENTRY = 448
# What a gang's pod costs of that beside its node's name: it takes some time to place, too.
_POD = 256
# Characters of the places that may be promised at once: the ledger goes through the history with each round.
_PLACES = 384 * 1024

# For how many workloads room is kept at once, for one among those that compete for the same nodes; and on how many
# nodes: for a gang it is kept on several.
_KEPT = 64
_KEPT_NODES = 1024

_ADVICE = "{}; choose another (spec.schedulingStrategy), or mend it"
_STOPPED = "preempted: its place on {nodes} goes to {by}; it is queued again, and no retry is counted"
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

    def affords(self, message: str, beside: int = 0) -> bool:
        """Whether one more entry with this message, and so many characters beside, still fits; else the rest is for the
        next round.
        """
        cost = _ENTRY + len(message) * 2 + beside
        if cost > self.left:
            self.more = True
            return False
        self.left -= cost
        return True

    def waits(self, view: WorkloadView, reason: str, message: Callable[[], str]) -> None:
        """The workload stays in the queue, and is told why unless it is told already."""
        self.reasons[reason] += 1
        if not status.tells(view, reason, message) and self.affords(text := message()):
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
    orders: Orders
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
    impossible: dict[Kind, str] = field(default_factory=dict)  # of gangs, why they can never run; '' if they can
    keeping: int = 0  # workloads for which room is kept
    in_vain: dict[Shape, int] = field(default_factory=dict)  # preemptible, no place in between so many that are kept
    longest: int = 0  # of the nodes' names
    rooms: dict[str, list[tuple[Place, Resources]]] = field(default_factory=dict)  # held for whom others are stopped

    def __post_init__(self) -> None:
        self.longest = max((len(node.name) for node in self.floor.nodes), default=0)

    def hold(self, wishes: Iterable[Wish]) -> None:
        """Until it is their turn, nobody takes the room that is being made for these, nor what they need of quotas."""
        for wish in wishes:
            room = self.rooms.setdefault(wish.view.uid, [])
            for node, pods in self.ledger.rooms.get(wish.view.uid, ()):
                if node in self.floor.left:
                    need = times(wish.shape.requests, pods)
                    room.append((self.floor.reserve(wish, node, need), need))
            self.books.take(wish.view.namespace, wish.need, firm=firm(wish.view))

    def take(self, wish: Wish) -> None:
        """The workload's turn."""
        if wish.view.uid in self.rooms:
            for place, held in self.rooms[wish.view.uid]:
                self.floor.take_back(wish, place, held)
            self.books.give_back(wish.view.namespace, wish.need, firm=firm(wish.view))
        self._take(wish)

    def _take(self, wish: Wish) -> None:
        shape, view, books, told = wish.shape, wish.view, self.books, self.told
        need, is_firm = wish.need, firm(wish.view)
        if wish.turn.retries > wish.limit:
            told.judged(wish, JOB_REFUSED, _PODLESS)
            return
        never = self._never(wish)
        if never and not self.orders.hopes(wish):
            told.judged(wish, NO_SUITABLE_NODE, never)
            return
        if self._lacks(wish):
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
        if wish.gang is not None and not self._affords(wish.gang):
            told.reasons[NEXT_ROUND] += 1
            return
        if wish.window is not None:
            self._in_its_window(wish, wish.window)
            return
        avoided = self.ledger.avoided.get(view.uid) if view.uid not in self.reconsidered else None
        try:
            assignment, anew = self._assigned(wish, avoided.nodes if avoided else ())
        except StrategyError as failed:
            told.waits(view, STRATEGY_FAILED, partial(_ADVICE.format, failed))
            return
        if assignment is None:
            assignment = self._in_between(wish)
        if assignment is not None:
            taken = times(shape.requests, pods_in(assignment.places)) if assignment.places else need
            if before is not None or self._lent_on(view, taken):
                assignment = replace(assignment, backfill=0.0)
            if (booking := self.orders.booking(view)) is not None:
                assignment = replace(assignment, booking=booking)
            told.decision.assignments.append(assignment)
            told.left -= self._cost(pods_in(assignment.places))
            books.take(view.namespace, taken, firm=is_firm)
            self.orders.wishes.pop(view.uid, None)
            if anew:
                self.reconsidered.append(view.uid)
        else:
            self.floor.full.add(wish.kind)
            self._lacks_room(wish)

    def _in_its_window(self, wish: Wish, window: Window) -> None:
        """A place on its reservation's GPUs; while the window is only about to begin, nobody else gets that."""
        known, gang = self.ledger.avoided.get(wish.view.uid), wish.gang
        avoided = known.nodes if known else ()
        places: Places = ()
        if gang is None:
            node = self.floor.take_reserved(wish, window, avoided)
        else:
            places = gangs.place_reserved(self.floor, wish, gang, self._most(wish, gang), window, avoided)
            node = places[0][0] if places else ""
        waits: Callable[[], str] = partial(before_it_begins, window)
        if node:
            taken = times(wish.shape.requests, pods_in(places)) if places else wish.shape.requests
            self.books.take(wish.view.namespace, taken, firm=firm(wish.view))
            if window.during(self.now):
                place = replace(self._assignment(wish, node, BY_RESERVATION, places), backfill=window.end)
                self.told.decision.assignments.append(place)
                self.told.left -= self._cost(pods_in(places))
                return
        elif self._cleared(wish, head=False):
            return
        elif window.during(self.now):
            waits = partial(when_all_is_used, window, wish.shape.requests.gpus)
            if gang is not None:
                waits = partial(gangs.when_its_window_is_full, self.floor, wish, gang, window)
        self.told.waits(wish.view, status.WAITING_FOR_RESERVATION, waits)

    def _never(self, wish: Wish) -> str:
        """Why the workload could not run even if all nodes were empty; '' if it could."""
        if wish.gang is None:
            return self.floor.explain(wish.shape) if self.floor.never(wish.shape) else ""
        if wish.kind not in self.impossible:
            self.impossible[wish.kind] = gangs.never(self.floor.nodes, wish.shape, wish.gang, self.now)
        return self.impossible[wish.kind]

    def _affords(self, gang: Gang) -> bool:
        """Whether the places of one more gang can be told in this round, and remembered."""
        if self._cost(gang.pods) > self.told.left:
            self.told.more = True
            return False
        promised = [*self.ledger.in_flight.values(), *self.told.decision.assignments]
        length = sum(len(name) for each in promised for name, _ in each.places)
        return not length or length + gang.pods * self.longest <= _PLACES  # else when some were seen

    def _cost(self, pods: int) -> int:
        return pods * (self.longest + _POD)

    def _assigned(self, wish: Wish, avoided: tuple[str, ...]) -> tuple[Assignment | None, bool]:
        """The workload's place: on nodes where it was not withdrawn before, if there are; if not (True) it begins anew.

        A strategy that always chooses alike would go round in a circle among the nodes that are remembered and the next
        one. Where that many were tried in vain, chance goes on: it gets everywhere in the end.
        """
        if wish.kind in self.floor.full:
            return None, False
        if len(avoided) >= AVOIDED_NODES:
            # Its caches do not count then: among more warm nodes than are remembered it would go round for ever.
            assignment = self._found(replace(wish, caches=()), Random.name, avoided)
        else:
            assignment = self._found(wish, wish.strategy, avoided)
        anew = False
        if assignment is None and avoided:
            anew = True
            assignment = self._found(wish, wish.strategy, ())
        return assignment, anew and assignment is not None

    def _found(self, wish: Wish, strategy: str, avoided: tuple[str, ...]) -> Assignment | None:
        if wish.gang is None:
            node = self.floor.take(wish, strategy, self.seed, avoided)
            return self._assignment(wish, node, strategy) if node else None
        most = self._most(wish, wish.gang)
        places = gangs.place(self.floor, wish, wish.gang, most, strategy, self.seed, avoided)
        return self._assignment(wish, places[0][0], strategy, places) if places else None

    def _most(self, wish: Wish, gang: Gang) -> int:
        """How many pods its tenant may have, beside the one before it where there is enough for both."""
        namespace, is_firm = wish.view.namespace, firm(wish.view)
        before = self.first.get(self.books.tenant(namespace).name)
        if before is not None and not self._leaves_enough(before, wish):
            before = None

        def may(pods: int) -> bool:
            need = times(wish.shape.requests, pods)
            # For whom others were stopped takes no more than it was entitled to: else those could stop it in turn.
            if wish.view.uid in self.rooms and self.books.borrows(self.books.tenant(namespace), need):
                return False
            return self.books.short(namespace, before.beside(need) if before else need, firm=is_firm) is None

        low, high = gang.least, gang.pods
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if may(middle) else (low, middle - 1)
        return low

    def _lacks_quota(self, wish: Wish) -> None:
        view, need, is_firm = wish.view, wish.need, firm(wish.view)
        account = self.books.tenant(view.namespace)
        tenant = account.name
        behind, attainable = tenant in self.first, self.books.attainable(view.namespace, need, firm=is_firm)
        # What comes free would be kept for the one before it.
        if attainable and not (behind and is_firm) and self._cleared(wish, head=not behind):
            return
        if attainable:
            self.first.setdefault(tenant, wish)
            self.borrowers.setdefault(topmost(account).name, tenant)
        self.told.waits(view, WAITING_FOR_QUOTA, lambda: self.books.explain(view.namespace, need, firm=is_firm))

    def _lacks_room(self, wish: Wish) -> None:
        head = not self.floor.competes(wish.shape)
        if self._cleared(wish, head=head):
            return
        found: list[Kept] = []
        if head and self.keeping < _KEPT and len(self.floor.kept) < _KEPT_NODES:
            found = self._keep(wish)
            self.keeping += bool(found)
        ordered = ""
        if self._may_order(wish):
            ordered = self.orders.asked(wish, found[0] if found else None, never=bool(self._never(wish)))
        reason = PROVISIONING if ordered else WAITING_FOR_CAPACITY
        self.told.waits(wish.view, reason, lambda: self._lacking(wish) + ordered)
        for kept in found:
            self.floor.keep(kept)

    def _may_order(self, wish: Wish) -> bool:
        """Whether its tenant's quota suffices for it beside all who have an order open and could have their place now;
        those of other tenants count if it borrows, for they may borrow the same.
        """
        if wish.view.uid in self.orders.wishes:
            return True
        mine, taken = self.books.tenant(wish.view.namespace), list[Wish]()

        def is_others(other: Wish) -> bool:
            return self.books.tenant(other.view.namespace) is not mine

        for other in sorted(self.orders.wishes.values(), key=is_others):  # its own tenant's first
            counts = not is_others(other) or self.books.borrows(mine, wish.need)
            if counts and not self._lacks(other):
                self.books.take(other.view.namespace, other.need, firm=firm(other.view))
                taken.append(other)
        enough = not self._lacks(wish)
        for other in taken:
            self.books.give_back(other.view.namespace, other.need, firm=firm(other.view))
        return enough

    def _lacks(self, wish: Wish) -> bool:
        return self.books.short(wish.view.namespace, wish.need, firm=firm(wish.view)) is not None

    def _lacking(self, wish: Wish) -> str:
        if wish.gang is None:
            return self.floor.explain(wish.shape)
        return gangs.explain_now(self.floor, wish.shape, wish.gang)

    def _keep(self, wish: Wish) -> list[Kept]:
        if wish.gang is not None:
            return gangs.kept_for(wish, wish.gang, self.floor, self._releases())
        kept = kept_for(wish.view, wish.shape, self.floor, self._releases())
        return [] if kept is None else [kept]

    def _cleared(self, wish: Wish, *, head: bool) -> bool:
        """Whether room is being made for the workload; who must go is told to."""
        found = self.preemptor.clear(wish, head=head)
        known = self.ledger.clearing.get(wish.view.uid) == wish.view.generation
        if found is None or not (found.victims or known or wish.window):
            return False  # what comes free by itself is nobody's yet
        self.preemptor.reserve(wish, found)
        self.orders.wishes.pop(wish.view.uid, None)
        self.awaiting.add(wish.view.uid)
        room = tuple(sorted(found.places.items()))
        if room != self.ledger.rooms.get(wish.view.uid) and self.told.affords("", sum(len(name) for name, _ in room)):
            self.told.decision.rooms[wish.view.uid] = room
        for each in found.victims:
            message = _STOPPED.format(nodes=on_nodes(each.held), by=f"{wish.view.namespace}/{wish.view.name}")
            self.told.affords(message)  # it is for whom there is room now, so it is told in any case
            self.told.decision.preemptions.append(
                Preemption(
                    each.view.uid, each.view.namespace, each.view.name, each.job.name, each.job.uid,
                    each.job.resource_version, Turn(each.job.attempt + 1, each.job.retries), message, wish.view.uid,
                    wish.view.generation,
                )
            )  # fmt: skip
        names = sorted(f"{each.view.namespace}/{each.view.name}" for each in found.victims)
        self.told.waits(wish.view, PREEMPTING, partial(_making_room, on_nodes(found.places), names))
        return True

    def _leaves_enough(self, before: Wish, wish: Wish) -> bool:
        """Whether what the tenant may still take suffices for this one beside the one before it."""
        return self.books.short(wish.view.namespace, before.beside(wish.need), firm=firm(wish.view)) is None

    def _lent_on(self, view: WorkloadView, need: Resources) -> bool:
        """Whether it borrows what another tenant of its cohort waits for, which is before it: that may have it back."""
        account = self.books.tenant(view.namespace)
        first = self.borrowers.get(topmost(account).name, account.name)
        return first != account.name and self.books.borrows(account, need)

    def _in_between(self, wish: Wish) -> Assignment | None:
        """A place where room is kept for somebody else, who will find it free or have it back. A gang gets none."""
        if wish.gang is not None:
            return None
        is_firm, kept_now = firm(wish.view), len(self.floor.kept)
        if is_firm or self.in_vain.get(wish.shape) != kept_now:
            for kept in self.floor.kept_near(wish):
                ends = kept.start is not None and wish.until <= kept.start
                if (ends or not is_firm) and self.floor.take_kept(wish, kept):
                    place = self._assignment(wish, kept.node, wish.strategy)
                    return replace(place, backfill=kept.start if ends else 0.0)
            if not is_firm:
                self.in_vain[wish.shape] = kept_now
        found = self.floor.take_claimed(wish)
        if found is None:
            return None
        node, until = found
        return replace(self._assignment(wish, node, wish.strategy), backfill=until, lent=not is_firm)

    def _assignment(self, wish: Wish, node: str, strategy: str, places: Places = ()) -> Assignment:
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
            job_name=job_name(view.name, view.uid, turn.attempt, indexed=bool(places)),
            places=places,
            resumes=wish.resumes,
            warmth=self.floor.warmth(wish, [name for name, _ in places] or [node]),
        )

    def _releases(self) -> dict[str, list[tuple[float, Resources]]]:
        """By node, what is held there and when it will be free at the latest."""
        if not self.releases:
            for each in self.held:
                moment = self.now if each.leaving else each.until if each.until is not None else inf
                self.releases.setdefault(each.node, []).append((max(moment, self.now), each.requests))
            for node, claim in self.floor.claims.items():
                self.releases.setdefault(node, []).append(claim.kept())
        return self.releases


def _behind(tenant: str, before: WorkloadView) -> str:
    return (
        f"GPUQuota {tenant}: what is left of it is kept for {before.namespace}/{before.name}, which is before it "
        "(preemptible work may use it meanwhile)"
    )


def _making_room(where: str, names: list[str]) -> str:
    """What is said to the workload that gets the room."""
    if not names:
        return f"room is being made on {where}; it is placed when those that were stopped there are gone"
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"room is being made on {where}: {shown} must stop; it is placed when they are gone"


def wait(view: WorkloadView, reason: str, message: str) -> Waiting:
    return Waiting(view.uid, view.namespace, view.name, view.resource_version, reason, message)
