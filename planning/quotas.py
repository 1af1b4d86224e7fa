"""The books of the GPUQuotas: what each tenant holds, may still take, lends and borrows; and what is wrong with them.

For the placement round, `berth explain` and the admission webhooks. The arithmetic of lending and borrowing among
cohorts within cohorts is that of Kueue's KEP-79; unlike there only preemptible work borrows, so that what was lent can
be had back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from crds.gpuquota import EVERY_OTHER, Amounts
from planning.capacity import Holding
from planning.filters import show_amount, show_gpus
from planning.model import Lately, NodeView, QuotaView, Resources, Snapshot, WorkloadView
from planning.quantities import milli, whole

Vector = tuple[int, int, int]
Limits = tuple[int | None, int | None, int | None]
"""GPUs, millicores of CPU, bytes of memory; None is no limit."""

COUNTED = ("GPUs", "CPU", "memory")
# How deep cohorts may lie within each other.
_DEPTH = 8
# Seconds after which what a tenant held counts half: a day's use is mostly forgotten after a weekend.
HALF_LIFE = 24 * 3600.0
# What a tenant held lately is in every round's history: so many are remembered, those who held the most; and none whose
# share has faded to this, after about seventeen half-lives where it had the whole fleet.
REMEMBERED = 256
FADED = 1e-5


def vector(need: Resources) -> Vector:
    return need.all_gpus, need.cpu_milli, need.memory


@dataclass(slots=True)
class Account:
    """One GPUQuota in the tree. `subtree`: what it and all below it bring; `kept`: what of that it never lends.

    `used`: what it, or what is below it beyond what that keeps, holds. `firm`: what of a tenant's is not preemptible.
    """

    name: str
    nominal: Limits
    borrowing: Limits = (None, None, None)
    lending: Limits = (None, None, None)
    weight: int = 1
    tenant: bool = True
    cohort: Account | None = None
    subtree: list[int] = field(default_factory=lambda: [0, 0, 0])
    kept: list[int] = field(default_factory=lambda: [0, 0, 0])
    used: list[int] = field(default_factory=lambda: [0, 0, 0])
    firm: list[int] = field(default_factory=lambda: [0, 0, 0])
    held: bool = False  # whether anything is held at all: else its share need not be reckoned

    def add(self, what: int, amount: int) -> None:
        beyond = max(0, self.used[what] - self.kept[what])
        self.used[what] += amount
        if self.cohort is not None and (more := max(0, self.used[what] - self.kept[what]) - beyond):
            self.cohort.add(what, more)

    def available(self, what: int) -> int:
        """What may still be taken; below zero where a quota was lowered under what is held."""
        if self.cohort is None:
            return self.subtree[what] - self.used[what]
        above, limit = self.cohort.available(what), self.borrowing[what]
        if limit is not None:
            lent = self.subtree[what] - self.kept[what] - max(0, self.used[what] - self.kept[what])
            above = min(above, lent + limit)
        return max(0, self.kept[what] - self.used[what]) + max(0, above)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Which of `COUNTED` a tenant lacks. `firm`: it has it, but only for work that is preemptible."""

    what: int
    firm: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a GPUQuota, with its place in the spec, and what follows while it stands."""

    wrong: str
    effect: str = ""
    awaited: bool = False  # it names a GPUQuota that may still be written

    def __str__(self) -> str:
        return f"{self.wrong}; {self.effect}" if self.effect else self.wrong


class Books:
    """For one round; `take` and `give_back` keep them while it goes on, and undo each other exactly."""

    def __init__(self, quotas: Iterable[QuotaView], nodes: Iterable[NodeView] = ()) -> None:
        self.problems: dict[str, list[Problem]] = {}  # by the name of the GPUQuota, the gravest first
        self._fleet = [0, 0, 0]
        for node in nodes:
            if node.allocatable.gpus:
                for what, amount in enumerate(vector(node.allocatable)):
                    self._fleet[what] += amount
        self._outside = Account("", (None, None, None))
        self._tenants: dict[str, Account] = {}  # by namespace
        self.accounts = self._opened(sorted(quotas, key=lambda quota: (quota.created, quota.name)))

    def _opened(self, quotas: list[QuotaView]) -> dict[str, Account]:
        specs = {quota.name: quota.spec for quota in quotas if quota.spec is not None}
        cohorts = {name: spec.cohort for name, spec in specs.items()}
        accounts = {
            name: Account(
                name,
                _limits(spec.nominal),
                _limits(spec.borrowing_limit),
                _limits(spec.lending_limit),
                spec.weight,
                bool(spec.namespaces),
            )
            for name, spec in specs.items()
        }
        cohorts = {name: spec.cohort for name, spec in specs.items()}
        for quota in quotas:
            found = []
            if quota.spec is None:
                self.problems[quota.name] = [Problem(quota.invalid, "it does not count until it is mended")]
                continue
            cohort = quota.spec.cohort
            problem = _misplaced(quota.name, cohorts, accounts)
            if problem:
                alone, awaited = "until then it neither lends nor borrows", cohort not in accounts
                found.append(Problem(f"spec.cohort: {problem}", alone, awaited))
            elif cohort is not None:
                accounts[quota.name].cohort = accounts[cohort]
            for namespace in quota.spec.namespaces:
                owner = self._tenants.setdefault(namespace, accounts[quota.name])
                if owner.name != quota.name:
                    why = f"{namespace} belongs to GPUQuota {owner.name}, which is older, and counts there"
                    found.append(Problem(f"spec.namespaces: {why}"))
            if found:
                self.problems[quota.name] = found
        for account in sorted(accounts.values(), key=_depth, reverse=True):
            for what, nominal in enumerate(account.nominal):
                account.subtree[what] += nominal or 0
                limit = account.lending[what]
                lent = account.subtree[what] if limit is None else min(limit, account.subtree[what])
                account.kept[what] = account.subtree[what] - lent
                if account.cohort is not None:
                    account.cohort.subtree[what] += lent
                else:
                    account.kept[what] = account.subtree[what]
        return accounts

    def tenant(self, namespace: str) -> Account:
        """Who answers for the namespace; the account without a name where no GPUQuota does."""
        return self._tenants.get(namespace) or self._tenants.get(EVERY_OTHER) or self._outside

    def short(self, namespace: str, need: Resources, *, firm: bool) -> Shortage | None:
        """What the tenant lacks for this request; None if it may have it. `firm`: it is not preemptible."""
        account = self.tenant(namespace)
        for what, amount in enumerate(vector(need)):
            nominal = account.nominal[what]
            if nominal is None or not amount:
                continue
            if amount > account.available(what):
                return Shortage(what, firm=False)
            if firm and account.firm[what] + amount > nominal:
                return Shortage(what, firm=True)
        return None

    def attainable(self, namespace: str, need: Resources, *, firm: bool) -> bool:
        """Whether the tenant could have it if nobody else held anything."""
        account = self.tenant(namespace)
        return all(
            account.nominal[what] is None or amount <= self.most(account, what, firm=firm)
            for what, amount in enumerate(vector(need))
        )

    def most(self, account: Account, what: int, *, firm: bool) -> int:
        """What the tenant may ever hold of this, in work that is firm or in all."""
        ceiling = _ceiling(account, what)
        return min(ceiling, account.nominal[what] or 0) if firm else ceiling

    def overdrawn(self, account: Account) -> bool:
        """Whether more of its work than its nominal may not be preempted: an edit made it so, or the quota was lowered.
        The rest must not be kept from those it was borrowed from.
        """
        return any(
            nominal is not None and held > nominal for nominal, held in zip(account.nominal, account.firm, strict=True)
        )

    def take(self, namespace: str, need: Resources, *, firm: bool) -> None:
        self._add(self.tenant(namespace), need, 1, firm)

    def give_back(self, namespace: str, need: Resources, *, firm: bool) -> None:
        self._add(self.tenant(namespace), need, -1, firm)

    def _add(self, account: Account, need: Resources, times: int, firm: bool) -> None:
        account.held = True
        for what, amount in enumerate(vector(need)):
            if account.nominal[what] is None:
                account.used[what] += amount * times  # not limited, and so nobody else's concern
            else:
                account.add(what, amount * times)
            if firm:
                account.firm[what] += amount * times

    def borrows(self, account: Account, need: Resources | None = None) -> bool:
        """Whether it holds more than its nominal of anything, or would with this."""
        more = vector(need) if need is not None else (0, 0, 0)
        return any(
            nominal is not None and used + amount > nominal
            for nominal, used, amount in zip(account.nominal, account.used, more, strict=True)
        )

    def share(self, account: Account) -> float:
        """The largest part of the fleet's GPUs, CPU or memory that it holds, divided by its weight."""
        share = 0.0
        for used, there in zip(account.used, self._fleet, strict=True):
            if there > 0:
                share = max(share, used / there)
        return share / account.weight

    def explain(self, namespace: str, need: Resources, *, firm: bool) -> str:
        """Why the tenant cannot have it now, for a person."""
        account, short = self.tenant(namespace), self.short(namespace, need, firm=firm)
        if short is None:
            return ""
        what, nominal = short.what, account.nominal[short.what] or 0
        asked, used = vector(need)[what], account.used[what]
        text = f"GPUQuota {account.name}: needs {_show(what, asked)}"
        most = self.most(account, what, firm=firm)
        if asked > most:
            kind = " for work that is not preemptible" if firm and account.cohort is not None else ""
            return f"{text}, more than the {_show(what, most)} it may ever hold{kind}; ask for less, or have it raised"
        if short.firm:
            left = max(0, nominal - account.firm[what])
            text += (
                f", but of its nominal {_show(what, nominal)} only {_show(what, left)} are left for work that is not"
            )
            return f"{text} preemptible (spec.preemptible: true would let it borrow)"
        left = max(0, account.available(what))
        text += f", {_show(what, left)} left; {_show(what, used)} used of its nominal {_show(what, nominal)}"
        if account.cohort is None:
            return text
        limit = account.borrowing[what]
        if limit is not None and used + asked - nominal > limit:
            return f"{text}, and it may borrow {_show(what, limit)} at most"
        return f"{text}, and cohort {account.cohort.name} has no more to lend"

    def told(self, namespace: str) -> tuple[str, ...]:
        """What the tenant and the cohorts above it hold and may still take, a line each, for a person."""
        account = self.tenant(namespace)
        lines = []
        for each in (account, *above(account)):
            parts = [
                f"{_show(what, each.used[what])} of {_show(what, each.subtree[what])} used, "
                f"{_show(what, max(0, each.available(what)))} to be had"
                for what in range(len(COUNTED))
                if (each.nominal[what] is not None if each.tenant else each.subtree[what])
            ]
            if each.name:
                lines.append(f"{'GPUQuota' if each.tenant else 'cohort'} {each.name}: {'; '.join(parts) or 'no limit'}")
        return tuple(lines)


def opened(snapshot: Snapshot, held: Iterable[Holding]) -> Books:
    """The books as they stand. A pod of nobody's counts if it holds GPUs."""
    books, views = Books(snapshot.quotas, snapshot.nodes), snapshot.by_uid()
    for holding in held:
        view = views.get((holding.namespace, holding.workload_uid))
        if view is not None or holding.requests.gpus:
            books.take(holding.namespace, holding.requests, firm=firm(view))
    return books


def firm(view: WorkloadView | None) -> bool:
    """Whether it may not be preempted; nor may what is nobody's workload."""
    return view is None or view.spec is None or not view.spec.may_be_preempted


def recalled(lately: Lately | None, now: float) -> float:
    """The share that a tenant held on average up to now; what it held a `HALF_LIFE` ago counts half."""
    if lately is None:
        return 0.0
    kept: float = 0.5 ** (max(0.0, now - lately.at) / HALF_LIFE)
    return lately.value * kept + lately.share * (1.0 - kept)


def remembered(books: Books, lately: Mapping[str, Lately], now: float) -> dict[str, Lately]:
    """What is known of the tenants from now on: of those who hold or held anything, and the most of them if there are
    too many. All others count as if they had never held anything.
    """
    found = {
        name: known
        for name, account in sorted(books.accounts.items())
        if account.tenant
        and (account.held or name in lately)
        and _counts(known := Lately(round(recalled(lately.get(name), now), 6), round(books.share(account), 6), now))
    }
    if len(found) > REMEMBERED:
        most = sorted(found, key=lambda name: (-max(found[name].value, found[name].share), name))[:REMEMBERED]
        found = {name: found[name] for name in sorted(most)}
    return found


def _counts(lately: Lately) -> bool:
    return lately.share > 0 or lately.value >= FADED


def topmost(account: Account) -> Account:
    """The cohort that has none above it: the account itself where it is in none."""
    while account.cohort is not None:
        account = account.cohort
    return account


def above(account: Account) -> Iterator[Account]:
    """The cohorts above an account, the nearest first."""
    cohort = account.cohort
    while cohort is not None:
        yield cohort
        cohort = cohort.cohort


def _misplaced(name: str, cohorts: Mapping[str, str | None], accounts: Mapping[str, Account]) -> str:
    """What is wrong with the place of a quota in the tree; '' if nothing."""
    cohort = cohorts[name]
    if cohort is None:
        return ""
    if cohort not in accounts:
        return f"there is no GPUQuota {cohort}"
    if accounts[cohort].tenant:
        return f"GPUQuota {cohort} names namespaces, so it is a tenant and not a cohort: move them to one below it"
    way, each = [name], cohorts.get(name)
    while each is not None and each in accounts and len(way) <= _DEPTH:
        if each == name:
            return f"{' → '.join([*way, name])} is a circle"
        if each in way:
            break  # a circle above: its members are told, and stand alone
        way.append(each)
        each = cohorts.get(each)
    return f"it lies more than {_DEPTH} cohorts deep" if len(way) > _DEPTH else ""


def _depth(account: Account) -> int:
    return sum(1 for _ in above(account))


def _ceiling(account: Account, what: int) -> int:
    """The most it could hold if nobody else held anything."""
    if account.cohort is None:
        return account.subtree[what]
    beyond, limit = _ceiling(account.cohort, what), account.borrowing[what]
    if limit is not None:
        beyond = min(beyond, account.subtree[what] - account.kept[what] + limit)
    return account.kept[what] + beyond


def _limits(amounts: Amounts | None) -> Limits:
    if amounts is None:
        return None, None, None
    cpu = None if amounts.cpu is None else milli(amounts.cpu)
    return amounts.gpus, cpu, None if amounts.memory is None else whole(amounts.memory)


def _show(what: int, amount: int) -> str:
    match COUNTED[what]:
        case "GPUs":
            return show_gpus(amount)
        case "CPU":
            return show_amount("CPU", Resources(cpu_milli=amount))
    return show_amount("memory", Resources(memory=amount))
