"""Decides what the status of a GPUQuota says, and when it is worth a write.

For the activity that carries out a round, which shows the quotas with it, and for the metrics of rounds. What a tenant
holds changes with every round; it is written at most every few seconds, what is wrong with a quota at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crds.settings import Settings
from planning.capacity import Belongings
from planning.conditions import condition
from planning.held import visible
from planning.model import Lately, QuotaView, Snapshot
from planning.quotas import Account, Books, opened, recalled
from planning.times import timestamp

# Seconds between two writes of what is held.
PAUSE = 10.0
_FADING = ("updated", "lately")


@dataclass(frozen=True, slots=True)
class Standing:
    """What the GPUQuotas hold at one moment, and how many workloads of each wait for a place."""

    books: Books
    waiting: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's GPUs, workloads in the queue, share of the fleet; `nominal` is None where it is not limited."""

    name: str
    used: int
    nominal: int | None
    borrowed: int
    waiting: int
    share: float


@dataclass(frozen=True, slots=True)
class QuotaLag:
    """A GPUQuota and the status that is due."""

    view: QuotaView
    status: dict[str, Any]


def standing(snapshot: Snapshot, settings: Settings) -> Standing | None:
    """None where nobody has a quota."""
    if not snapshot.quotas:
        return None
    mine = Belongings.of(snapshot.jobs, snapshot.pods)
    books = opened(snapshot, visible(snapshot, mine, settings))
    waiting = Counter(
        books.tenant(view.namespace).name
        for view in snapshot.workloads
        if not view.finished
        and not view.deleting
        and view.phase != "Pending"
        and all(job.preempted for job in mine.jobs.get((view.namespace, view.uid), ()))
    )
    return Standing(books, waiting)


def tenants(held: Standing | None) -> list[Tenant]:
    """All tenants that can be understood; cohorts are none."""
    if held is None:
        return []
    return [
        Tenant(
            account.name,
            max(0, account.used[0]),
            account.nominal[0],
            _borrowed(account)[0],
            held.waiting.get(account.name, 0),
            held.books.share(account),
        )
        for account in held.books.accounts.values()
        if account.tenant
    ]


def lagging_quotas(
    snapshot: Snapshot, lately: Mapping[str, Lately], settings: Settings, held: Standing | None = None
) -> tuple[list[QuotaLag], bool]:
    """The quotas whose status says something else than what is and may be written now, and whether others lag too.
    `held`: what is known to be held, if it was reckoned already.
    """
    held = held or standing(snapshot, settings)
    if held is None:
        return [], False
    found, later = [], False
    for view in snapshot.quotas:
        due = _status(view, held.books, held.waiting, lately, snapshot.now)
        # What was held lately fades by itself, which is no reason to write.
        shown = {key: value for key, value in view.status.items() if key not in _FADING}
        if shown == {key: value for key, value in due.items() if key not in _FADING}:
            continue
        news = shown.get("conditions") != due["conditions"]
        if news or timestamp(snapshot.now - PAUSE) >= str(view.status.get("updated", "")):
            found.append(QuotaLag(view, {**due, "updated": timestamp(snapshot.now)}))
        else:
            later = True
    return found, later


def _status(
    view: QuotaView, books: Books, waiting: Mapping[str, int], lately: Mapping[str, Lately], now: float
) -> dict[str, Any]:
    problem = str(next(iter(books.problems.get(view.name, ())), ""))
    reason = "Misconfigured" if problem else "Valid"
    status: dict[str, Any] = {
        "observedGeneration": view.generation,
        "conditions": [condition(view.status, "Valid", not problem, reason, problem, view.generation, now)],
    }
    account = books.accounts.get(view.name)
    if account is None:
        return status
    status |= {"used": _held(account.used), "borrowed": _held(_borrowed(account))}
    if account.tenant:
        status["waiting"] = waiting.get(view.name, 0)
        status["share"] = _percent(books.share(account))
        status["lately"] = _percent(recalled(lately.get(view.name), now))
    return status


def _borrowed(account: Account) -> list[int]:
    return [
        max(0, used - nominal) if nominal is not None else 0
        for used, nominal in zip(account.used, account.nominal, strict=True)
    ]


def _held(amounts: list[int]) -> dict[str, Any]:
    gpus, cpu, memory = amounts
    return {
        "gpus": max(0, gpus),
        "cpu": f"{cpu // 1000}" if cpu % 1000 == 0 else f"{cpu}m",
        "memory": f"{memory // 2**30}Gi" if memory % 2**30 == 0 else f"{memory // 2**20}Mi",
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
