"""Decides for which waiting workloads a node is ordered from the cluster's autoscaler.

For the placement round, which asks in the order of its turns. One order for each workload that neither what runs nor
what is coming will make room for, and so many at once at most: the autoscaler puts several on one node where they fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from crds.settings import Provisioning as Rules
from planning.arrivals import Arrivals
from planning.floor import Floor, Kept, Wish
from planning.model import Booking, Ledger, Order, Provisioning, WorkloadView

PROVISIONING = "Provisioning"

# Seconds from when an order was given up until the workload may have another.
AGAIN = 1800.0
# Seconds after which an open order is given again. Whoever carries it out takes it for the same; but should somebody
# have terminated that workflow, nobody would.
RENEWED = 3600.0

_ORDERED = "; a node is ordered for it"
_IN_TURN = "; a node will be ordered for it when one of the {} orders that may be open at once is done"


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
    placed: list[Order] = field(default_factory=list)
    changed: dict[str, Provisioning] = field(default_factory=dict)
    due_in: float = inf  # seconds until somebody will have waited long enough
    wishes: dict[str, Wish] = field(default_factory=dict)  # by UID, whose order is open and who hold nothing yet
    _open: int = 0
    _noted: int = 0
    _short: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, rules: Rules | None, ledger: Ledger, floor: Floor, queue: Iterable[Wish], now: float) -> Orders:
        """`queue`: all who want a place. What is coming is first of all for those who have an order open."""
        mine = cls(rules, ledger, floor, now, Arrivals(floor.nodes if rules is not None else (), floor.left, now))
        for wish in queue:
            known = ledger.provisioning.get(wish.view.uid)
            if known is not None and known.open:
                mine._open += 1
                mine.wishes[wish.view.uid] = wish
                if known.generation == wish.view.generation:
                    mine.arrivals.serve(wish.shape, wish.gang)
        mine._noted = sum(known.state == "waiting" for known in ledger.provisioning.values())
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
            if self._note(view, known, since, rules):
                self.due_in = min(self.due_in, since + rules.wait_seconds - self.now)
            return ""
        older = self.ledger.provisioning.get(view.uid)
        if older is None or not older.open:  # else the order of the spec before gives way
            if self._open >= rules.max_orders:
                self._note(view, known, since, rules)
                return _IN_TURN.format(rules.max_orders) if never else ""
            self._open += 1
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

    def _note(self, view: WorkloadView, known: Provisioning | None, since: float, rules: Rules) -> bool:
        """Remembers since when the workload waits; not of more than could have a node ordered."""
        if known is not None:
            return True
        if self._noted >= rules.max_orders:
            return False
        self._noted += 1
        self.changed[view.uid] = Provisioning(view.generation, "waiting", since)
        return True

    def _comes_anyway(self, wish: Wish, kept: Kept | None, rules: Rules) -> bool:
        """Whether it will have room no later than an order might bring it."""
        if kept is not None and kept.start is not None and kept.start <= self.now + rules.timeout_seconds:
            return True
        return self.arrivals.serve(wish.shape, wish.gang)
