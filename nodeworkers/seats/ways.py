"""How each tenant of a node is parked, and what of that is on record: by which way, what it takes of the host, and how
trying it went.

For `node_world.py`, which parks and wakes. What is possible, and what comes first, is decided by
`planning/seats/parking.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from nodeworkers.seats.backend import Backend, Process, Server
from nodeworkers.seats.records import Known, SeatRecords
from nodeworkers.seats.tenants import Tenant
from nodeworkers.seats.world import Moved
from planning.seats.host_memory import Level
from planning.seats.parking import Asked, Choice, Way, choose, host_bytes


class Host(Protocol):
    """What is asked of the machine (`node_world.Host`)."""

    async def levels(self, tenant: Tenant) -> tuple[Level, ...]:
        """The limits that the container is under, its own first."""


class Ways:
    """One node's. `by_way`: what parks a tenant in a way; `missing`: what a seat's driver lacks for a checkpoint."""

    def __init__(
        self, by_way: Callable[[Tenant, Way], Backend], missing: Callable[[str], Sequence[str]], records: SeatRecords,
        host: Host,
    ) -> None:  # fmt: skip
        self._by_way, self._missing, self._records, self._host = by_way, missing, records, host

    def of(self, tenant: Tenant) -> Way:
        """By which it is parked: what was parked one way is woken the same."""
        return self._known(tenant).way or self._choice(tenant).ways[0]

    def note(self, tenant: Tenant) -> str:
        """What its pod says that makes no sense, or cannot be had; '' for nothing."""
        told, asked, way = [f"{each}." for each in tenant.settings.problems], tenant.settings.park, self.of(tenant)
        if asked is not None and way != asked:
            why = self._choice(tenant).why_not.get(asked, "")
            told.append(f"It is parked by {way} instead of {asked}. {why}".rstrip())
        return " ".join(told)

    def backend(self, tenant: Tenant) -> Backend:
        """What parks and wakes it."""
        return self._by_way(tenant, self.of(tenant))

    def server(self, tenant: Tenant) -> Server:
        """As backends take it."""
        known = self._known(tenant)
        return tenant.server([Process(pid, started) for pid, started in known.processes], known.bytes)

    def need(self, tenant: Tenant, held: int) -> int:
        """Bytes of the host that parking takes of one that has so many on its GPUs."""
        return host_bytes(self.of(tenant), held, self._known(tenant).kept)

    def begun(self, tenant: Tenant, held: Mapping[str, int]) -> Server:
        """Parking it begins, while it has so many bytes on each GPU. On record before anything is done: whoever takes
        over finds out by it how far that came.
        """
        way, known = self.of(tenant), self._known(tenant)
        cards = {card: size for card, size in held.items() if size} or known.cards
        self._records.put(tenant.seat, replace(known, way=way, cards=cards))
        return self.server(tenant)

    def refused(self, tenant: Tenant, why: str, *, by_way: bool) -> None:
        """It was not parked; `by_way`: the way was to blame, and may be given up."""
        known = self._known(tenant)
        self._records.put(tenant.seat, known.tried(self.of(tenant) if by_way else None, why))

    async def parked(self, tenant: Tenant, moved: Moved, before: Sequence[Level]) -> None:
        """It is parked. `before`: its limits, and what was in use, when that began."""
        way, known = self.of(tenant), self._known(tenant)
        cold = way == "cold"
        kept = 0 if cold else await self._kept(tenant, way, before, known)
        processes = () if cold else moved.processes or known.processes
        self._records.put(
            tenant.seat,
            replace(known, processes=processes, parkable=True, why_not="", tries=0, kept=kept, ended=cold),
        )

    async def _kept(self, tenant: Tenant, way: Way, before: Sequence[Level], known: Known) -> int | None:
        """Bytes of the host that an engine keeps which sleeps: what its container grew by."""
        if "engine-sleep" not in way or not before:
            return known.kept
        after = await self._host.levels(tenant)
        return max(0, after[0].used - before[0].used) if after else known.kept

    def _choice(self, tenant: Tenant) -> Choice:
        settings = tenant.settings
        asked = Asked(settings.park, settings.engine, bool(settings.port))
        return choose(asked, self._missing(tenant.seat), self._known(tenant).failed)

    def _known(self, tenant: Tenant) -> Known:
        return self._records.held_by(tenant.seat, tenant.uid).known
