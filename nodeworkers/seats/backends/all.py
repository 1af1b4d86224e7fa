"""The backends of a node by name: the one place where a new one is made known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nodeworkers.seats.backend import Backend
from nodeworkers.seats.backends.cold import Cold
from nodeworkers.seats.backends.composition import Composition
from nodeworkers.seats.backends.cuda_checkpoint import CudaCheckpoint
from nodeworkers.seats.backends.engine_sleep import EngineSleep
from nodeworkers.seats.backends.engines import APIS
from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.helper.driver import CardMemory
from nodeworkers.seats.tenants import Tenant
from nodeworkers.seats.world import UntouchedError
from planning.seats.parking import Engine, Way


class Host(Protocol):
    """What ends a container (`NodeHost`)."""

    async def end(self, tenant: Tenant) -> None:
        """All processes of it. Raises UntouchedError and UnsettledError."""


class Backends:
    """One node's. `helper`: that of a seat's group."""

    def __init__(self, helper: Callable[[str], HelperClient], host: Host) -> None:
        self._helper, self._host = helper, host
        self._sleeps: dict[tuple[Engine, str], EngineSleep] = {}

    def of(self, tenant: Tenant, way: Way) -> Backend:
        """What parks this tenant in this way. Raises UntouchedError where its pod does not say which engine serves."""
        match way:
            case "cuda-checkpoint":
                return CudaCheckpoint(self._helper(tenant.seat))
            case "engine-sleep":
                return self._sleep(tenant)
            case "engine-sleep+cuda-checkpoint":
                return Composition(self._sleep(tenant), CudaCheckpoint(self._helper(tenant.seat)))
            case "cold":
                return Cold(lambda: self._host.end(tenant))

    def _sleep(self, tenant: Tenant) -> EngineSleep:
        engine = tenant.settings.engine
        if engine is None:
            raise UntouchedError(f"The pod of {tenant.seat} does not say which engine serves (kyb.ai/engine).")
        key = engine, tenant.seat  # it keeps in mind what is under way

        async def memory(cards: Sequence[str]) -> Mapping[str, CardMemory]:
            return await self._helper(tenant.seat).memory(cards)

        if key not in self._sleeps:
            self._sleeps[key] = EngineSleep(APIS[engine], memory)
        return self._sleeps[key]
