"""What switching seats needs of a real machine: GPUs' memory by each group's helper, limits and room in the host's
memory, whether servers answer, and their end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from nodeworkers.seats.cgroups import CgroupError
from nodeworkers.seats.containers import Found
from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.helper.driver import CardMemory
from nodeworkers.seats.limits import LimitsError, levels, node_memory
from nodeworkers.seats.serving import serves
from nodeworkers.seats.stopping import StoppingError, stop_container
from nodeworkers.seats.tenants import Tenant
from nodeworkers.seats.world import UntouchedError
from planning.seats.host_memory import Level, NodeMemory

GRACE = 10.0  # seconds that a server whose state is lost gets to end
_log = logging.getLogger(__name__)


class NodeHost:
    """A Host. `helper`: a group's; `found`: what the runtime has of a tenant's container."""

    def __init__(self, helper: Callable[[str], HelperClient], found: Callable[[Tenant], Found | None]) -> None:
        self._helper, self._found = helper, found

    async def memory(self, group: str, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        return await self._helper(group).memory(cards)

    async def serves(self, tenant: Tenant) -> str:
        if not tenant.settings.port:
            return ""  # it computes, and nobody can ask it
        if not tenant.endpoint:
            return f"{tenant.namespace}/{tenant.pod} has no address yet."
        return await serves(tenant.endpoint, tenant.settings.health)

    async def levels(self, tenant: Tenant) -> tuple[Level, ...]:
        found = self._found(tenant)
        if found is None or found.running is None:
            return ()
        try:
            return await asyncio.to_thread(levels, found.running.cgroup, tenant.uid)
        except (CgroupError, LimitsError) as error:
            raise UntouchedError(str(error)) from error

    async def node(self) -> NodeMemory | None:
        try:
            return await asyncio.to_thread(node_memory)
        except LimitsError as error:
            _log.warning("%s", error)
            return None

    async def end(self, tenant: Tenant) -> None:
        found = self._found(tenant)
        if found is None or found.running is None or found.running.id != tenant.id:
            return
        try:
            left = await stop_container(found.running.cgroup, GRACE)
        except (CgroupError, StoppingError) as error:
            raise UntouchedError(str(error)) from error
        if left:
            raise UntouchedError(
                f"{len(left)} processes of {tenant.namespace}/{tenant.pod} do not end, {left[0].pid} first of all: a "
                "driver's call may hold them."
            )
