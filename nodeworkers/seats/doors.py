"""Which seats' requests are passed on, held or refused: what the seat proxy is told of each, for switches and between
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from nodeworkers.seats.proxy_words import ENGINE_CONTROL, Drained, Quiet, Route, State, models
from nodeworkers.seats.records import SeatRecords
from nodeworkers.seats.routes import Routes
from nodeworkers.seats.tenants import Tenant

UNKNOWN_WAIT = 60.0  # seconds that whoever is refused is told where nobody can say
_CHANGED = 0.2  # by which share a wait must become another before the proxy is told


class Doors:
    """One node's. `listen`: the address on which the proxy takes requests. Raises as ProxyControl does."""

    def __init__(self, routes: Routes, records: SeatRecords, listen: str) -> None:
        self._routes, self._records = routes, records
        self._listen = f"[{listen}]" if ":" in listen else listen
        self._open: set[str] = set()
        self.away = ""
        """Why nobody is woken on this node now; '' where seats are switched. Requests for whoever does not serve are
        refused then."""

    def port(self, tenant: Tenant) -> int:
        """Where requests for its seat are taken; 0 for a server that takes none. Raises NoPortError."""
        return self._records.of(tenant.seat).port if tenant.settings.port else 0

    def was_open(self, seat: str) -> None:
        """It had the slot, and served, when this process began."""
        self._open.add(seat)

    async def open(self, tenant: Tenant, epoch: int) -> None:
        """Passes its requests on, those first that were held."""
        self._open.add(tenant.seat)
        await self._put(tenant, epoch)

    async def hold(self, tenant: Tenant, epoch: int) -> None:
        """Holds its requests from now on; those in flight go on."""
        self._open.discard(tenant.seat)
        await self._put(tenant, epoch)

    async def drain(self, tenant: Tenant, epoch: int) -> Drained:
        """Waits until none is in flight, for as long as the pod allows. Raises Overruled as well."""
        if not tenant.settings.port or self._passed_on(tenant):
            return Drained(0, 0)  # those in flight are with another server
        return await self._routes.drain(tenant.seat, epoch, tenant.settings.drain)

    async def show(self, tenants: Iterable[Tenant], epoch: int, waits: Mapping[str, float]) -> None:
        """Tells the proxy what is new of these: another address, another wait (seconds by seat)."""
        for tenant in tenants:
            if not tenant.settings.port:
                continue
            before = self._routes.wanted.get(tenant.seat)
            wait = waits.get(tenant.seat, UNKNOWN_WAIT)
            if before is not None and abs(before.retry_after - wait) <= _CHANGED * before.retry_after:
                wait = before.retry_after
            newest = max(epoch, before.epoch if before is not None else 0)
            await self._routes.amend(self._route(tenant, newest, wait))

    async def keep(self, seats: Collection[str]) -> None:
        """Serves these and no other seats of the node."""
        self._open &= {*seats}
        await self._routes.keep(seats)

    async def _put(self, tenant: Tenant, epoch: int) -> None:
        if not tenant.settings.port:
            return
        before = self._routes.wanted.get(tenant.seat)
        await self._routes.put(self._route(tenant, epoch, before.retry_after if before is not None else UNKNOWN_WAIT))

    async def pass_on(self, tenant: Tenant, epoch: int) -> None:
        """Its requests go where its record says, or to its server again."""
        await self._put(tenant, epoch)

    def _passed_on(self, tenant: Tenant) -> str:
        return self._records.held_by(tenant.seat, tenant.uid).known.passed_on

    def _route(self, tenant: Tenant, epoch: int, wait: float) -> Route:
        passed_on = self._passed_on(tenant)
        state = State.OPEN if tenant.seat in self._open and tenant.endpoint else State.HELD
        if state is State.HELD and self.away:
            state = State.AWAY
        if passed_on:
            state = State.OPEN  # whoever has them now holds or refuses them
        settings = tenant.settings
        quiet: tuple[Quiet, ...] = (Quiet("/health"), Quiet("/metrics"))
        if settings.health not in ("/health", "/metrics"):
            quiet = (*quiet, Quiet(settings.health))
        if settings.models:
            quiet = (*quiet, *models(settings.models, int(tenant.began)))
        return Route(
            seat=tenant.seat,
            epoch=epoch,
            listen=f"{self._listen}:{self._records.of(tenant.seat).port}",
            backend=passed_on or tenant.endpoint or None,
            state=state,
            retry_after=round(wait, 1),
            deadline=settings.deadline,
            queue=settings.queue,
            h2c=settings.h2c,
            quiet=quiet,
            blocked=ENGINE_CONTROL,
            keepalive=settings.keepalive,
        )
