"""Decides whose work is stopped so that a workload gets the place it is entitled to: the fewest, the cheapest, and only
if it then fits, in its quota and on a node.

For the placement round. Entitled against another is: within a tenant, a higher priority; between tenants, who stays
within its nominal against who borrows; and whoever has room kept for it, by a GPUReservation too, against those that
use the room meanwhile. None of these holds both ways, so no two can stop each other in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from crds.settings import Settings
from planning.capacity import Belongings, Holding, Room
from planning.filters import lacking, slots, slots_when_empty
from planning.floor import Floor, Wish
from planning.gangs import domain_of
from planning.model import JobView, NodeView, Resources, Snapshot, WorkloadView
from planning.places import Gang, times
from planning.queue import turn_in_queue
from planning.quotas import Books, above, firm, vector
from planning.reservations import Reservations

# What a round may spend: preemptors served, victims of one (more for a large gang) and of all, searches for one tenant.
_SERVED = 8
_VICTIMS = 32
_ALL_VICTIMS = 256
_SEARCHES = 32
# Seconds for which a workload whose Job could not be stopped is left alone: whatever refuses that (an admission policy,
# say) would refuse it in every round.
SPARED = 600.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running Job. `held`: what its pods hold, by node, in all `requests`; `lost`: the GPU-seconds of its run so far;
    `firm`: it may not be preempted, but for what it should not have; `young`: it has not run for the minimum;
    `reserved`: it is in the window of its GPUReservation, where nobody stops it.
    """

    job: JobView
    view: WorkloadView
    held: Mapping[str, Resources]
    requests: Resources
    lost: float
    firm: bool
    young: bool
    reserved: bool = False

    @property
    def cost(self) -> tuple[bool, int, float, str, str]:
        """What orders the candidates: the cheapest first."""
        priority = self.view.spec.priority_value if self.view.spec else 0
        return self.firm, priority, self.lost, self.view.namespace, self.view.name


@dataclass(frozen=True, slots=True)
class Clearing:
    """Nodes on which there will be room for so many pods once all of `victims` are gone, and those that are going."""

    places: Mapping[str, int]
    victims: tuple[Candidate, ...]


def candidates(
    snapshot: Snapshot, mine: Belongings, settings: Settings, spared: Mapping[str, float], reservations: Reservations
) -> list[Candidate]:
    """Everything that runs and might be stopped for somebody, the cheapest first. `spared`: the ledger's."""
    found, tried = [], set(no_longer_spared(spared, snapshot.now))
    for view in snapshot.workloads:
        if view.finished or view.deleting or view.spec is None:
            continue
        if view.uid in spared and view.uid not in tried:
            continue
        pods = mine.pods.get((view.namespace, view.uid), ())
        for job in mine.jobs.get((view.namespace, view.uid), ()):
            if job.finished or job.deleting or job.preempted or job.withdrawn:
                continue
            # What the pods hold, for a Job's own annotations may say anything.
            held, asked = dict[str, Room](), Room(0, 0, 0, 0)
            for pod in pods:
                if pod.job_name == job.name and pod.node and not pod.terminating:
                    held.setdefault(pod.node, Room(0, 0, 0, 0)).give_back(pod.requests)
                    asked.give_back(pod.requests)
            if not held:
                continue
            since = job.started if job.started is not None else job.created
            age = max(0.0, snapshot.now - since)
            young = age < settings.minimum_runtime_seconds
            window = reservations.of(view)
            inside = window is not None and window.during(snapshot.now)
            if reservations.over(view):
                job = replace(job, backfill=0.0)  # its window may have been cut short since it began
            by_node = {name: each.as_resources() for name, each in held.items()}
            asked_for = asked.as_resources()
            lost = age * asked_for.all_gpus
            found.append(Candidate(job, view, by_node, asked_for, lost, firm(view), young, inside))
    return sorted(found, key=lambda each: each.cost)


def no_longer_spared(spared: Mapping[str, float], now: float) -> list[str]:
    """The UIDs that may be tried again: also those that would be spared for longer than anybody is, by a clock that was
    set back.
    """
    return [uid for uid, until in spared.items() if not now < until <= now + 2 * SPARED]


def next_stoppable(snapshot: Snapshot, mine: Belongings, settings: Settings) -> float | None:
    """Seconds until the next workload that may be preempted has run for the minimum."""
    ages = [
        snapshot.now - (job.started if job.started is not None else job.created)
        for view in snapshot.workloads
        if not view.finished and not view.deleting and not firm(view)
        for job in mine.jobs.get((view.namespace, view.uid), ())
        if not job.finished and not job.deleting and not job.preempted
    ]
    least = settings.minimum_runtime_seconds
    return min((least - age for age in ages if 0 <= age < least), default=None)


class Preemptor:
    """For one round: who must go, asked for one workload after the other in the order of the queue."""

    def __init__(
        self, floor: Floor, books: Books, held: Iterable[Holding], found: list[Candidate],
        views: Mapping[tuple[str, str], WorkloadView], now: float,
    ) -> None:  # fmt: skip
        self._floor, self._books, self._candidates = floor, books, found
        self._leaving = [each for each in held if each.leaving]
        self._coming: dict[str, Room] = {}
        for each in self._leaving:
            self._coming.setdefault(each.node, Room(0, 0, 0, 0)).give_back(each.requests)
        self._by_node: dict[str, list[Candidate]] = {}
        for candidate in found:
            for node in candidate.held:
                self._by_node.setdefault(node, []).append(candidate)
        self._views = views
        self._gone: set[str] = set()
        self._in_vain: dict[tuple[object, ...], int] = {}  # the highest rank that searched in vain
        self._searches: Counter[str] = Counter()  # by tenant
        self._now = now
        self._served = self._stopped = 0

    def clear(self, wish: Wish, *, head: bool) -> Clearing | None:
        """Where room is made for the workload, and by whom; None if nobody can or may be stopped for it. `head`: of
        those for whom there is no room it is the first, and so the one for whom room is kept.
        """
        if not self._leaving and not self._candidates:
            return None
        view, is_firm = wish.view, firm(wish.view)
        account, rank = self._books.tenant(view.namespace), view.spec.priority_value if view.spec else 0
        key = (account.name, wish.kind, is_firm, head, wish.window and wish.window.uid)
        if self._in_vain.get(key, rank - 1) >= rank or self._searches[account.name] >= _SEARCHES:
            return None
        self._searches[account.name] += 1
        given = [(each.namespace, each.requests, self._kind(each)) for each in self._leaving]
        for namespace, requests, kind in given:
            self._books.give_back(namespace, requests, firm=kind)
        found = self._search(wish, head)
        for namespace, requests, kind in given:
            self._books.take(namespace, requests, firm=kind)
        if found is None:
            self._in_vain[key] = rank
        elif found.victims:
            self._served += 1
            if self._served > _SERVED or self._stopped + len(found.victims) > _ALL_VICTIMS:
                return None
        return found

    def reserve(self, wish: Wish, found: Clearing) -> None:
        """From now on the room is the workload's: neither that nor its quota is given to anybody else in this round."""
        self._gone |= {each.job.uid for each in found.victims}
        self._stopped += len(found.victims)
        for each in found.victims:
            for node, held in each.held.items():
                self._coming.setdefault(node, Room(0, 0, 0, 0)).give_back(held)
                self._leaving.append(Holding(each.view.namespace, each.view.uid, node, held, True))
        for node, pods in found.places.items():
            if wish.window is not None:
                self._floor.hold_reserved(wish, wish.window, node, pods)
            else:
                self._floor.reserve(wish, node, times(wish.shape.requests, pods))
        self._books.take(wish.view.namespace, wish.need, firm=firm(wish.view))

    def _kind(self, holding: Holding) -> bool:
        return firm(self._views.get((holding.namespace, holding.workload_uid)))

    def _search(self, wish: Wish, head: bool) -> Clearing | None:
        chosen: list[Candidate] = []
        with self._without(chosen):
            if not self._enough_quota(wish, chosen, head):
                return None
            window, shape = wish.window, wish.shape
            nodes = self._floor.allowed(shape) if window is None else self._floor.suited(shape, window)
            if wish.gang is not None:
                return self._for_gang(nodes, wish, wish.gang, chosen, head)
            options = [each for node in nodes if (each := self._on(node, wish, chosen, head))]
            return min(options, key=lambda each: (_price(each), *each.places), default=None)

    def _for_gang(
        self, suited: Iterable[NodeView], wish: Wish, gang: Gang, chosen: list[Candidate], head: bool
    ) -> Clearing | None:
        """The cheapest domain, where all must be in one; else all nodes are."""
        domains: dict[str, list[NodeView]] = {}
        for node in suited:
            domains.setdefault(domain_of(gang, node) if gang.required else "", []).append(node)
        if gang.required:
            domains.pop("", None)
        options = []
        for domain, nodes in sorted(domains.items()):
            empty = sum(slots_when_empty(wish.shape, node) for node in nodes)
            if empty >= gang.least and (each := self._among(nodes, wish, gang.least, chosen, head)):
                options.append((_price(each), domain, each))
        return min(options, key=lambda each: each[:2])[2] if options else None

    def _among(
        self, nodes: list[NodeView], wish: Wish, pods: int, chosen: list[Candidate], head: bool
    ) -> Clearing | None:
        """Who must go from these nodes, beside those chosen for the quota, so that all of so many pods fit there."""
        names = {node.name for node in nodes}
        free = {name: self._free(name, chosen) for name in names}
        fits = {name: self._slots(name, wish, room) for name, room in free.items()}
        more: list[Candidate] = []

        def stop(each: Candidate, sign: int) -> None:
            """It goes, or stays after all."""
            for name in each.held.keys() & names:
                (free[name].give_back if sign > 0 else free[name].take)(each.held[name])
                fits[name] = self._slots(name, wish, free[name])

        with self._without(more):
            steps = [step for name in sorted(names) if (step := self._step(name, wish, free[name], chosen, head))]
            heapify(steps)
            while steps and sum(fits.values()) < pods and len(more) + len(chosen) < _most_victims(pods):
                price, name, _ = heappop(steps)
                now = self._step(name, wish, free[name], [*chosen, *more], head)
                if now is None or now[0] > price:  # others went meanwhile, or it is entitled no more
                    if now is not None:
                        heappush(steps, now)
                    continue
                for each in now[2]:
                    self._stop(each, more)
                    stop(each, 1)
                if again := self._step(name, wish, free[name], [*chosen, *more], head):
                    heappush(steps, again)
            if sum(fits.values()) < pods:
                return None
            needed = self._spared(wish, [*chosen, *more], stop, lambda: sum(fits.values()) >= pods)
        places = dict[str, int]()
        for name in sorted(names, key=lambda name: (-fits[name], name)):
            if share := min(fits[name], pods - sum(places.values())):
                places[name] = share
        return Clearing(places, tuple(needed))

    def _step(
        self, node: str, wish: Wish, free: Room, stopped: list[Candidate], head: bool
    ) -> tuple[tuple[float, ...], str, tuple[Candidate, ...]] | None:
        """Who must go from a node so that one more pod fits there; the cheapest step comes first."""
        left, going = free.copy(), list[Candidate]()
        before = self._slots(node, wish, left)
        need = times(wish.shape.requests, before + 1)
        for each in self._by_node.get(node, ()):
            if each in stopped or not _helps(each.held[node], need, left):
                continue
            if not (self._entitled(wish, each, head) or self._uses_its_window(wish, each, node)):
                continue
            going.append(each)
            left.give_back(each.held[node])
            if gained := self._slots(node, wish, left) - before:
                lost = sum(one.lost for one in going) / gained
                return (going[-1].cost[1], len(going) / gained, lost), node, tuple(going)
        return None

    @contextmanager
    def _without(self, stopped: list[Candidate]) -> Iterator[None]:
        """The books as if those were gone: now, and those that are added meanwhile by `_stop`."""
        for each in stopped:
            self._books.give_back(each.view.namespace, each.requests, firm=each.firm)
        try:
            yield
        finally:
            for each in stopped:
                self._books.take(each.view.namespace, each.requests, firm=each.firm)

    def _stop(self, each: Candidate, stopped: list[Candidate]) -> None:
        self._books.give_back(each.view.namespace, each.requests, firm=each.firm)
        stopped.append(each)

    def _enough_quota(self, wish: Wish, chosen: list[Candidate], head: bool) -> bool:
        """Stops candidates until the tenant's quota suffices."""
        view, need, is_firm = wish.view, wish.need, firm(wish.view)
        account = self._books.tenant(view.namespace)
        cohorts = {each.name for each in above(account)}
        while (short := self._books.short(view.namespace, need, firm=is_firm)) is not None:
            if short.firm or len(chosen) >= _most_victims(wish.gang.least if wish.gang is not None else 1):
                return False
            for each in self._candidates:
                theirs = self._books.tenant(each.view.namespace)
                related = theirs is account or not cohorts.isdisjoint(c.name for c in above(theirs))
                useful = related and vector(each.requests)[short.what] and each not in chosen
                if useful and self._entitled(wish, each, head):
                    self._stop(each, chosen)
                    break
            else:
                return False
        return True

    def _on(self, node: NodeView, wish: Wish, chosen: list[Candidate], head: bool) -> Clearing | None:
        """Who must go from this node, beside those chosen for the quota; None if it cannot be cleared."""
        need, free, allowed = wish.need, self._free(node.name, chosen), self._allowed(node.name, wish)
        if allowed is not None and lacking(need, allowed):
            return None
        more: list[Candidate] = []
        with self._without(more):
            for each in self._by_node.get(node.name, ()):
                if not lacking(need, free) or len(more) + len(chosen) >= _VICTIMS:
                    break
                if each in chosen or not _helps(each.held[node.name], need, free):
                    continue
                if self._entitled(wish, each, head) or self._uses_its_window(wish, each, node.name):
                    free.give_back(each.held[node.name])
                    self._stop(each, more)
        if lacking(need, free):
            return None

        def stop(each: Candidate, sign: int) -> None:
            if node.name in each.held:
                (free.give_back if sign > 0 else free.take)(each.held[node.name])

        with self._without(more):
            needed = self._spared(wish, [*chosen, *more], stop, lambda: not lacking(need, free))
        return Clearing({node.name: 1}, tuple(needed))

    def _spared(
        self, wish: Wish, stopped: list[Candidate], stop: Callable[[Candidate, int], None], fits: Callable[[], bool]
    ) -> list[Candidate]:
        """Those without whom it would not do: the dearest are let off first. `stop` tells the nodes who goes, or with
        -1 that somebody stays; `fits`: whether there is room.
        """
        needed = list(stopped)
        for each in sorted(stopped, key=lambda each: each.cost, reverse=True):
            stop(each, -1)
            self._books.take(each.view.namespace, each.requests, firm=each.firm)
            if fits() and self._books.short(wish.view.namespace, wish.need, firm=firm(wish.view)) is None:
                needed.remove(each)
                continue
            stop(each, 1)
            self._books.give_back(each.view.namespace, each.requests, firm=each.firm)
        for each in (each for each in stopped if each not in needed):
            self._books.give_back(each.view.namespace, each.requests, firm=each.firm)
        return needed

    def _entitled(self, wish: Wish, each: Candidate, head: bool) -> bool:
        """Whether this workload may stop that one, as the books stand."""
        mine, theirs = (self._books.tenant(view.namespace) for view in (wish.view, each.view))
        if each.job.uid in self._gone or each.view.uid == wish.view.uid or each.reserved:
            return False
        within, borrowing = not self._books.borrows(mine, wish.need), self._books.borrows(theirs)
        if head and self._had_on_demand(each):
            if theirs is mine:
                return turn_in_queue(wish.view) < turn_in_queue(each.view)
            return within or borrowing
        if each.young or (each.firm and (theirs is mine or not self._books.overdrawn(theirs))):
            return False
        if theirs is mine:
            return turn_in_queue(wish.view)[0] < turn_in_queue(each.view)[0]
        return within and borrowing and mine.nominal[0] is not None

    def _allowed(self, node: str, wish: Wish) -> Room | None:
        """The most that may be the workload's on the node: the rest is kept for GPUReservations, whoever is stopped.
        None where nothing is.
        """
        claim = self._floor.claims.get(node)
        return None if claim is None or wish.window is not None else claim.slack(wish.stays)

    def _slots(self, node: str, wish: Wish, free: Room) -> int:
        """How many of the workload's pods fit there."""
        need, allowed = wish.shape.requests, self._allowed(node, wish)
        if wish.window is not None:
            return min(slots(need, free), wish.window.slots(node, need.gpus))
        return slots(need, free) if allowed is None else min(slots(need, free), slots(need, allowed))

    def _uses_its_window(self, wish: Wish, each: Candidate, node: str) -> bool:
        """Whether that one has, on this node of the workload's reservation, what was only lent to it."""
        if wish.window is None or each.job.uid in self._gone or each.reserved:
            return False
        stoppable = not each.firm or each.job.lent or self._had_on_demand(each)
        return stoppable and wish.window.left(node) > 0

    def _had_on_demand(self, each: Candidate) -> bool:
        """Whether it has what is kept for somebody else, and no longer for sure."""
        return each.job.backfill is not None and self._now >= each.job.backfill

    def _free(self, node: str, stopped: Iterable[Candidate]) -> Room:
        """What will be free on the node once those are gone, and those that are going."""
        free = self._floor.unpromised(node)
        coming = self._coming.get(node)
        if coming is not None:
            free.give_back(coming.as_resources())
        for each in stopped:
            if node in each.held:
                free.give_back(each.held[node])
        return free


def _helps(held: Resources, need: Resources, free: Room) -> bool:
    """Whether something is given back of what is lacking: stopping whoever else is on the node would be for nothing."""
    kind = need.gpu_resource
    return (
        (need.gpus > free.of(kind) and held.of(kind) > 0)
        or (need.cpu_milli > free.cpu_milli and held.cpu_milli > 0)
        or (need.memory > free.memory and held.memory > 0)
        or (need.pods > free.pods and held.pods > 0)
    )


def _most_victims(pods: int) -> int:
    return max(_VICTIMS, min(8 * pods, _ALL_VICTIMS))


def _price(clearing: Clearing) -> tuple[int, int, float]:
    """What it costs: the highest priority that is stopped, then how many, then the GPU-seconds that are lost."""
    victims = clearing.victims
    highest = max((each.cost[1] for each in victims), default=-(10**9))
    return highest, len(victims), sum(each.lost for each in victims)
