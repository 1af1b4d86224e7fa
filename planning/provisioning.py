"""Decides for which waiting workloads a node is ordered from the cluster's autoscaler.

For the placement round, which asks in the order of its turns. One order for each workload that neither what runs nor
what is coming will make room for, and so many at once at most: the autoscaler puts several on one node where they fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from crds.settings import Provisioning as Rules
from planning.arrivals import Arrivals
from planning.floor import Floor, Kept, Wish
from planning.model import Booking, Ledger, Order, Provisioning, WorkloadView
from planning.quotas import Books

PROVISIONING = "Provisioning"

# Seconds from when an order was given up until the workload may have another.
AGAIN = 1800.0
# Seconds after which an open order is given again. Whoever carries it out takes it for the same; but should somebody
# have terminated that workflow, nobody would.
RENEWED = 3600.0

_ORDERED = "; a node is ordered for it"
_IN_TURN = "; a node will be ordered for it when one of the {} orders that may be open at once is done"
_FOR_OTHERS = (
    "; a node will be ordered for it when an order of its tenant is done: the rest of the {} that may be open at once "
    "is for other tenants"
)

Tenant = tuple[str, str]
"""A GPUQuota's name; a namespace that none answers for is a tenant of its own."""


@dataclass(slots=True)
class Slots:
    """So many at once. Who has some gets another only while more are free than it has, so that whoever comes later
    finds one; unless there is one tenant `alone`.
    """

    most: int
    alone: bool = False
    used: Counter[Tenant] = field(default_factory=Counter)

    @property
    def free(self) -> int:
        return max(0, self.most - self.used.total())

    def open_to(self, tenant: Tenant) -> bool:
        return self.free > (0 if self.alone else self.used[tenant])


@dataclass(slots=True)
class Orders:
    """One round's: asked for every workload that finds no room, in the order of the turns. Without `rules` nothing is
    ever ordered.
    """

    rules: Rules | None
    ledger: Ledger
    floor: Floor
    now: float
    arrivals: Arrivals
    books: Books
    slots: Slots
    notes: Slots
    placed: list[Order] = field(default_factory=list)
    changed: dict[str, Provisioning] = field(default_factory=dict)
    due_in: float = inf  # seconds until somebody will have waited long enough
    wishes: dict[str, Wish] = field(default_factory=dict)  # by UID, whose order is open and who hold nothing yet
    _short: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, rules: Rules | None, ledger: Ledger, floor: Floor, books: Books, views: Iterable[WorkloadView],
        queue: Iterable[Wish], now: float,
    ) -> Orders:  # fmt: skip
        """`views`: all workloads, `queue`: those that want a place. What is coming is first of all for those who have
        an order open. Who only has workloads that will never want a place needs no order left.
        """
        arrivals = Arrivals(floor.nodes if rules is not None else (), floor.left, now)
        most = rules.max_orders if rules is not None else 0
        namespaces = {view.namespace for view in views if _may_want_one(view)}
        alone = rules is None or len({_tenant(books, namespace) for namespace in namespaces}) < 2
        mine = cls(rules, ledger, floor, now, arrivals, books, Slots(most, alone), Slots(most))
        for wish in queue:
            known = ledger.provisioning.get(wish.view.uid)
            tenant = _tenant(books, wish.view.namespace)
            if known is not None and known.state == "waiting":
                mine.notes.used[tenant] += 1
            if known is not None and known.open:
                mine.slots.used[tenant] += 1
                mine.wishes[wish.view.uid] = wish
                if known.generation == wish.view.generation:
                    mine.arrivals.serve(wish.shape, wish.gang)
        return mine

    def hopes(self, wish: Wish) -> bool:
        """Whether a workload that no node could hold even empty should wait for a node that can."""
        known = self._known(wish.view)
        return self.rules is not None and (known is None or known.state != "failed")

    def asked(self, wish: Wish, kept: Kept | None, *, never: bool) -> str:
        """Has a node ordered if it is time to. Returns what the workload is told of that; '' if it waits without one.

        `kept`: the room that is kept for it. `never`: the nodes that are there could not hold it even empty.
        """
        rules, view = self.rules, wish.view
        known = self._known(view)
        if known is not None and known.open:
            if self.now - known.since >= RENEWED:
                self._order(view, replace(known, since=self.now))
            return _ORDERED
        if rules is None or (known is not None and known.state == "failed"):
            return ""
        if self._comes_anyway(wish, kept, rules):
            return ""
        since = known.since if known is not None else self.now
        self._short.add(view.uid)
        if not never and self.now - since < rules.wait_seconds:
            if self._note(view, known, since):
                self.due_in = min(self.due_in, since + rules.wait_seconds - self.now)
            return ""
        older = self.ledger.provisioning.get(view.uid)
        if older is None or not older.open:  # else the order of the spec before gives way
            tenant = _tenant(self.books, view.namespace)
            if not self.slots.open_to(tenant):
                self._note(view, known, since)
                why = _FOR_OTHERS if self.slots.free else _IN_TURN
                return why.format(rules.max_orders) if never else ""
            self.slots.used[tenant] += 1
        self._order(view, Provisioning(view.generation, "ordered", self.now))
        self.wishes[view.uid] = wish
        return _ORDERED

    def booking(self, view: WorkloadView) -> Booking | None:
        """What the autoscaler keeps for the workload's pod."""
        known = self._known(view)
        return known.booking if known is not None else None

    def dropped(self, unseen: Collection[str]) -> list[str]:
        """Workloads of which nothing need be remembered: who waited does so no more, or an order was given up long
        ago. `unseen`: those whose turn did not come in this round.
        """
        keep = self._short | set(unseen) if self.rules is not None else set()
        found = []
        for uid, known in self.ledger.provisioning.items():
            over = known.state == "failed" and (self.rules is None or self.now - known.since >= AGAIN)
            if (over or (known.state == "waiting" and uid not in keep)) and uid not in self.changed:
                found.append(uid)
        return found

    def _order(self, view: WorkloadView, entry: Provisioning) -> None:
        self.placed.append(Order(view.uid, view.namespace, view.name, view.generation))
        self.changed[view.uid] = entry

    def _known(self, view: WorkloadView) -> Provisioning | None:
        """What the ledger remembers of this very spec, as far as it still counts."""
        known = self.ledger.provisioning.get(view.uid)
        if known is None or known.generation != view.generation:
            return None
        return None if known.state == "failed" and self.now - known.since >= AGAIN else known

    def _note(self, view: WorkloadView, known: Provisioning | None, since: float) -> bool:
        """Remembers since when the workload waits; not of more than could have a node ordered."""
        if known is not None:
            return True
        tenant = _tenant(self.books, view.namespace)
        if not self.notes.open_to(tenant):
            return False
        self.notes.used[tenant] += 1
        self.changed[view.uid] = Provisioning(view.generation, "waiting", since)
        return True

    def _comes_anyway(self, wish: Wish, kept: Kept | None, rules: Rules) -> bool:
        """Whether it will have room no later than an order might bring it."""
        if kept is not None and kept.start is not None and kept.start <= self.now + rules.timeout_seconds:
            return True
        return self.arrivals.serve(wish.shape, wish.gang)


def _may_want_one(view: WorkloadView) -> bool:
    """Whether a node may be ordered for the workload, now or when its Job comes back."""
    return not (view.finished or view.deleting or view.spec is None or view.spec.suspend)


def _tenant(books: Books, namespace: str) -> Tenant:
    name = books.tenant(namespace).name
    return name, "" if name else namespace
