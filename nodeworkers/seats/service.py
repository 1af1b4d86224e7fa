"""All that a node does for its seats in one place: tenants, the proxy, helpers, the gate, and attention to each group.
For the node's process, which runs it beside its other work.

What switches seats is `switches`, activities of the groups' workflows; while Temporal is away whoever serves goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kube.client import KubeClient
from kube.events import EventRecorder
from nodeworkers.devices.core import Core
from nodeworkers.devices.holdings import Holdings
from nodeworkers.keeping import Keeping
from nodeworkers.ledger import Ledger
from nodeworkers.nri.plugin import SOCKET as NRI_SOCKET
from nodeworkers.nri.plugin import Plugin
from nodeworkers.seats.activities import Switches
from nodeworkers.seats.attention import Attention
from nodeworkers.seats.backends.all import Backends
from nodeworkers.seats.containers import SOCKET, Containers
from nodeworkers.seats.creation import Creation
from nodeworkers.seats.doors import Doors
from nodeworkers.seats.following import Following
from nodeworkers.seats.gate import Gate
from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.node_host import NodeHost
from nodeworkers.seats.node_tenants import NodeTenants
from nodeworkers.seats.node_world import NodeWorld
from nodeworkers.seats.preflight import Preflight
from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_process import ProxyProcess
from nodeworkers.seats.proxy_words import News, ProxyError
from nodeworkers.seats.records import SeatRecords
from nodeworkers.seats.reporting import GroupFacts, SeatReporting, SwitchLog
from nodeworkers.seats.routes import Routes
from nodeworkers.seats.simulated_gpu.machine import SimulatedCard, SimulatedMachine
from nodeworkers.seats.slots import Slots
from planning.devices.offers import Device
from planning.seats.preflight import Check, asked_by_runtime

LOOK = 0.5  # seconds between looks at which groups there are, and whose seats are
SIMULATED_GPUS = "simulated-gpus"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SeatOptions:
    """`proxy`: the program that carries seats' requests, None where somebody else starts it; `listen`: the address that
    it takes them on; `runtime`: the container runtime's socket; `simulated`: whether GPUs are; `nri`: where the runtime
    takes plugins.
    """

    proxy: Path | None
    listen: str
    runtime: Path = SOCKET
    simulated: bool = False
    nri: Path = NRI_SOCKET


class SeatService:
    """One node's. `poke` tells a group's workflow that it is to look; `away`: why no workflow is told of anything, ''
    while they are.
    """

    def __init__(
        self, node: str, folder: Path, ledger: Ledger, kube: KubeClient, core: Core, holdings: Holdings,
        options: SeatOptions, poke: Callable[[str], None], away: Callable[[], str],
    ) -> None:  # fmt: skip
        self._folder, self._core, self._holdings, self._options = folder / "seats", core, holdings, options
        self._poke, self._away = poke, away
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.slots, self._records = Slots(ledger), SeatRecords(ledger)
        self.gate = Gate(self.slots, self._touched)
        creation = Creation(self.gate, holdings, self._group_of, self._all_touched)
        self._nri = Plugin(creation.decide, creation.observe, socket=options.nri)
        self._following = Following(options.runtime)
        self._tenants = NodeTenants(core, holdings, Containers(options.runtime), lambda: self._following.news)
        socket = self._folder / "proxy.sock"
        self._control = ProxyControl(socket)
        self._proxy = ProxyProcess(options.proxy, socket, self._folder / "proxy.log", self._control)
        self._routes = Routes(self._control, self._heard)
        self._doors = Doors(self._routes, self._records, options.listen)
        self._helpers: dict[str, HelperClient] = {}
        host = NodeHost(self._helper, self._tenants.cgroup_of)
        backends = Backends(lambda seat: self._helper(self._group(seat)), host)
        self._world = NodeWorld(
            self._tenants, backends.of, self._doors, host, self.slots, self._records, self.gate,
            lambda seat: self._preflight.missing(self._group(seat)),
        )  # fmt: skip
        self._preflight = Preflight(lambda: core.state.plan.seats, lambda: core.state.cards, self._helper)
        self._log = SwitchLog()
        self.switches = Switches(self.slots, self._world, log=self._log, prefer=core.prefer)
        self._events = EventRecorder(kube, "berth-node", node)
        self._reporting = SeatReporting(kube, node, self._events, self._facts, self._control)
        self._keeping = Keeping()
        self._attention: dict[str, tuple[Attention, asyncio.Task[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def groups(self) -> Sequence[str]:
        """All groups that have seats."""
        return self._tenants.groups()

    @property
    def note(self) -> str:
        """What people should know who look at the process; '' if nothing."""
        reported = self._reporting.trouble and f"its GPUSeatGroups cannot be written: {self._reporting.trouble}"
        unasked = any(self._claimed(group) for group in self.groups) and not self._nri.status.connected
        nri = f"containers with seats start anew without the slot: {self._nri.status.message}" if unasked else ""
        broken = self._keeping.broken.values()
        return "; ".join(
            filter(None, (*broken, nri, self._proxy.trouble, self._following.trouble, self._tenants.trouble, reported))
        )

    def may_start(self, devices: Sequence[Device]) -> None:
        """Before a container starts with these devices, or a claim of them is prepared; called in a thread. Raises
        Refused.
        """
        for device in devices:
            # A claim that is refused is prepared again after a minute or more: where the runtime asks, it is prepared
            # at once, and the container waits, which is tried again far sooner, and at each restart.
            if device.group and not (self._nri.status.connected and self._claimed(device.group)):
                self.gate.start(device.group, device.id)

    async def run(self) -> None:
        """Until cancelled. The proxy and the helpers go on."""
        self._loop = asyncio.get_running_loop()
        for seat in self.slots.active():
            self._doors.was_open(seat)
        works = {
            "seat proxy": self._proxy.run,
            "routes of seats": self._routes.run,
            "containers of seats": self._following.run,
            "news of containers": self._hear_containers,
            "GPUSeatGroups": self._reporting.run,
            "Events of seats": self._events.run,
            "preflight": self._preflight.run,
            "creation of containers": self._nri.run,
        }
        async with asyncio.TaskGroup() as tasks:
            for name, work in works.items():
                tasks.create_task(self._keeping.keep(name, work))
            await self._keeping.keep("groups of seats", lambda: self._attend(tasks))

    async def _attend(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            if self._options.simulated:
                await asyncio.to_thread(self._simulate)
            self._doors.away = self._away()
            for group in self.groups:
                if group not in self._attention or self._attention[group][1].done():
                    attention = Attention(group, self._world, self.slots, self._poke)
                    self._attention[group] = attention, tasks.create_task(attention.run())
            if self._tenants.unknown:
                await self._holdings.look()
            await self._forget()
            await asyncio.sleep(LOOK)

    def _facts(self) -> list[GroupFacts] | None:
        if not self._core.state.cards:
            return None  # nobody has looked yet
        simulated = self._options.simulated
        found = [
            self._world.facts(group, self._log.last(group), self._checks(group), simulated=simulated)
            for group in self.groups
        ]
        return None if None in found else [each for each in found if each is not None]

    def _checks(self, group: str) -> Sequence[Check]:
        found, trouble = self._preflight.checks(group), "" if self._nri.status.connected else self._nri.status.message
        return [*found, asked_by_runtime(trouble, claimed=self._claimed(group))] if found else found

    def _claimed(self, group: str) -> bool:
        """Whether its seats are handed out by DRA."""
        resources = {seat.resource for seat in self._core.state.plan.seats if seat.group == group}
        return any(self._core.front_end(resource) == "dra" for resource in resources)

    async def _forget(self) -> None:
        """Seats that the node has no longer, and doors of those that nobody holds."""
        seats = {seat.id for seat in self._core.state.plan.seats}
        if not seats and not self._core.state.cards:
            return  # nobody has looked yet
        self._records.keep(seats)
        held = self._holdings.held
        try:
            await self._doors.keep({seat for seat in seats if seat in held})
        except ProxyError:
            return  # it is told when it is there again

    async def _hear_containers(self) -> None:
        news = -1
        while True:
            heard = await self._following.changed(news, 60.0)
            if heard != news:
                news = heard
                self._all_touched()

    def _all_touched(self) -> None:
        for group in self.groups:
            self._touched(group)

    def _heard(self, news: News) -> None:
        for group in self._world.heard(news):
            if group in self._attention:
                self._attention[group][0].touch(requests=True)

    def _touched(self, group: str) -> None:
        """Something is news there. Called by any thread."""
        if self._loop is None:
            return
        self._loop.call_soon_threadsafe(self._touch, group)

    def _touch(self, group: str) -> None:
        self._world.stir(group)
        if group in self._attention:
            self._attention[group][0].touch()

    def _helper(self, group: str) -> HelperClient:
        if group not in self._helpers:
            driver = f"simulated:{self._folder.parent / SIMULATED_GPUS}" if self._options.simulated else "cuda"
            self._helpers[group] = HelperClient(self._folder / f"{group}.sock", driver)
        return self._helpers[group]

    def _group(self, seat: str) -> str:
        return next(each.group for each in self._core.state.plan.seats if each.id == seat)

    def _group_of(self, seat: str) -> str:
        """'' for what is no seat of this node."""
        return next((each.group for each in self._core.state.plan.seats if each.id == seat), "")

    def _simulate(self) -> None:
        """Lays out simulated GPUs with the UUIDs that the simulated machine shows, where they are not there yet."""
        folder = self._folder.parent / SIMULATED_GPUS
        gpus = [card for card in self._core.state.cards.values() if card.vendor == "nvidia" and not card.parent]
        if not gpus:
            return
        machine = SimulatedMachine(folder)
        if (folder / "cards.json").exists() and machine.cards().keys() == {card.id for card in gpus}:
            return
        SimulatedMachine.make(folder, [SimulatedCard(card.id, card.memory_mib * 2**20) for card in gpus])
