"""A real node's tenants: seats from the allocation core, who holds each from the kubelet, containers and processes from
the container runtime.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nodeworkers.devices.core import Core
from nodeworkers.devices.holdings import Holder, Holdings
from nodeworkers.seats.cgroups import CgroupError, processes
from nodeworkers.seats.containers import Containers, ContainersError, Found
from nodeworkers.seats.tenants import GroupTenants, Tenant
from nodeworkers.seats.world import UntouchedError
from planning.devices.offering import Seat
from planning.seats.group import Policy, policy_of
from planning.seats.pod_settings import pod_settings

FRESH = 2.0  # seconds for which what a look found counts while nothing is heard of the runtime
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Seen:
    found: Found
    holder: Holder
    news: int
    at: float


class NodeTenants:
    """Tenants by the core of `nodeworkers/devices`. `news`: counts what was heard of the runtime's containers."""

    def __init__(self, core: Core, holdings: Holdings, containers: Containers, news: Callable[[], int]) -> None:
        self._core, self._holdings, self._containers, self._news = core, holdings, containers, news
        self._seen: dict[str, _Seen] = {}
        self.trouble = ""
        """Why the runtime does not tell of a seat's container; '' if it does."""

    def groups(self) -> Sequence[str]:
        return sorted(self._core.state.plan.groups)

    @property
    def unknown(self) -> bool:
        """Whether somebody holds a seat of whom the kubelet has not told yet."""
        held = self._holdings.held
        return any(seat.id in held and not held[seat.id].pod for seat in self._core.state.plan.seats)

    async def of(self, group: str, *, anew: bool = False) -> GroupTenants | None:
        plan, held = self._core.state.plan, self._holdings.held
        seats = [seat for seat in plan.seats if seat.group == group]
        if not seats:
            return None
        found = await asyncio.gather(*(self._tenant(seat, held, anew) for seat in seats))
        policy, zone = Policy(), "UTC"
        for profile in plan.accepted.profiles if plan.accepted is not None else ():
            if profile.resource == seats[0].resource and profile.policy is not None:
                policy, zone = policy_of(profile.policy), profile.policy.time_zone
        rebalance = plan.accepted.rebalance if plan.accepted is not None else None
        tenants = {seat.id: tenant for seat, tenant in zip(seats, found, strict=True)}
        return GroupTenants(group, seats[0].cards, tenants, policy, zone, rebalance)

    def cgroup_of(self, tenant: Tenant) -> Found | None:
        """What the last look found of the tenant's container."""
        seen = self._seen.get(tenant.seat)
        return seen.found if seen is not None else None

    async def _tenant(self, seat: Seat, held: Mapping[str, Holder], anew: bool) -> Tenant | None:
        holder = held.get(seat.id)
        if holder is None:
            self._seen.pop(seat.id, None)
            return None
        if not holder.pod or not holder.containers:
            return Tenant(seat.id, seat.cards, "", "", "", told="The kubelet has not said yet whose it is.")
        who = (seat.id, seat.cards, holder.namespace, holder.pod, holder.containers[0])
        try:
            found = await self._look(seat.id, holder)
            if anew:
                found = await self._anew(seat.id, holder, found)
        except ContainersError as error:
            if str(error) != self.trouble:
                _log.warning("%s", error)
            self.trouble = str(error)
            # Who runs, and as what, is not known: the last that was known goes on to count, for its processes are
            # compared with those that there are before anything is done to them.
            before = self._seen.get(seat.id)
            if before is None or before.holder != holder:
                raise UntouchedError(str(error)) from error
            found = before.found
        else:
            self.trouble = ""
        if found.pod is None:
            return Tenant(*who, told="Its pod has not been started yet.")
        pod, running = found.pod, found.running
        told = ""
        if running is None and found.ended is not None:
            told = f"Its container ended with status {found.ended.code} ({found.ended.reason})."
        return Tenant(
            *who,
            uid=pod.uid,
            id=running.id if running is not None else "",
            running=running is not None,
            processes=running.processes if running is not None else (),
            address=pod.address,
            began=pod.created,
            settings=pod_settings(pod.annotations),
            told=told,
            ended=found.ended.at if found.ended is not None else 0.0,
        )

    async def _anew(self, seat: str, holder: Holder, found: Found) -> Found:
        """The same with the processes that its container has now, which start and end without news."""
        if found.running is None:
            return found
        try:
            now = await asyncio.to_thread(processes, found.running.cgroup)
        except CgroupError:  # it has ended
            self._seen.pop(seat, None)
            return await self._look(seat, holder)
        return replace(found, running=replace(found.running, processes=tuple(now)))

    async def _look(self, seat: str, holder: Holder) -> Found:
        now, news, seen = time.monotonic(), self._news(), self._seen.get(seat)
        if seen is not None and seen.holder == holder and seen.news == news and now - seen.at < FRESH:
            return seen.found
        found = await self._containers.look(holder.namespace, holder.pod, holder.containers[0])
        self._seen[seat] = _Seen(found, holder, news, now)
        return found
