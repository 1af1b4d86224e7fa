"""The order of the queue: among tenants whoever holds least of what is due to it, within a tenant by priority and age.

For the placement round and `berth explain`. Without GPUQuotas there is one tenant, and priority and age decide alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from typing import TypeVar

from planning.model import Lately, Resources, WorkloadView
from planning.quotas import Account, Books, recalled

T = TypeVar("T")
Turn = tuple[int, float, str, str]
_Key = tuple[bool, float, Turn]


def turn_in_queue(view: WorkloadView) -> Turn:
    """What orders a tenant's workloads: the lowest goes first."""
    priority = view.spec.priority_value if view.spec else 0
    return (-priority, view.created, view.namespace, view.name)


def in_order(
    wishes: Iterable[T], about: Callable[[T], tuple[WorkloadView, Resources]], books: Books,
    lately: Mapping[str, Lately], now: float,
) -> Iterator[T]:  # fmt: skip
    """The wishes, the next one first; what `books` take between two of them counts for the second.

    A tenant that stays within its nominal goes before one that would borrow. Then decides the share of the fleet that a
    tenant holds, on average with what it held lately.
    """
    waiting: dict[str, list[tuple[Turn, T]]] = {}
    accounts: dict[str, Account] = {}
    for wish in wishes:
        view, _ = about(wish)
        account = books.tenant(view.namespace)
        accounts[account.name] = account
        waiting.setdefault(account.name, []).append((turn_in_queue(view), wish))
    for line in waiting.values():
        line.sort(key=lambda each: each[0], reverse=True)
    if len(waiting) < 2:
        for line in waiting.values():
            yield from (wish for _, wish in reversed(line))
        return
    before = {name: recalled(lately.get(name), now) for name in waiting}

    def key(name: str) -> _Key:
        turn, wish = waiting[name][-1]
        _, need = about(wish)
        account = accounts[name]
        share = books.share(account) + before[name]
        return books.borrows(account, need), round(share, 6), turn

    heap = [(key(name), name) for name in sorted(waiting)]
    heapify(heap)
    while heap:
        _, name = heap[0]
        _, wish = waiting[name].pop()
        yield wish
        if waiting[name]:
            heapreplace(heap, (key(name), name))
        else:
            heappop(heap)
