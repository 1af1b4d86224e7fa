"""All of a node's device work in one place: watchers of the hardware, the allocation core, both front ends, what is
told to people. For the node's process, which runs it beside its other work.

Each part may fail or wait without the others: a watcher that hangs, a kubelet or an API server that is away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kube.client import KubeClient
from kube.events import EventRecorder
from kube.resources import NODEDEVICES, ObjectRef
from nodeworkers.device_plugin.checkpoint import Checkpoint
from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.device_plugin.registration import PLUGINS, Folders
from nodeworkers.device_plugin.supervisor import Supervisor
from nodeworkers.devices.cdi_files import FOLDER, CdiFiles
from nodeworkers.devices.core import Core, FrontEnds
from nodeworkers.devices.holdings import Drift, Holdings
from nodeworkers.devices.metrics import observe
from nodeworkers.devices.profiles import Profiles
from nodeworkers.devices.records import Records
from nodeworkers.dra import prepared
from nodeworkers.dra.driver import Driver, Places
from nodeworkers.hardware import resetter
from nodeworkers.hardware.driver_files import driver_files
from nodeworkers.hardware.machine_sources import tree_of
from nodeworkers.hardware.resetting import Resets, reset_for
from nodeworkers.hardware.tenstorrent import DOMAIN as TENSTORRENT
from nodeworkers.hardware.watching import Watching, command
from nodeworkers.inventory import Hardware
from nodeworkers.keeping import Keeping
from nodeworkers.ledger import Ledger, LedgerError
from nodeworkers.own_object import OwnObject
from nodeworkers.sockets import SocketError
from planning.accelerators import seat_size
from planning.devices.cards import Card, Sight, Vendor
from planning.devices.cdi import DriverFiles
from planning.devices.health import Health
from planning.devices.injection import lasting
from planning.devices.labels import labels
from planning.devices.offering import Terms
from planning.devices.offers import Device
from planning.devices.report import CardHealth, Holder, Offer, Picture, Seats, document, status

VENDORS: tuple[Vendor, ...] = ("nvidia", "tenstorrent")
# Seconds that resets get to end with the process. They come last, when the worker has drained and servers have ended:
# the DaemonSet's terminationGracePeriodSeconds covers all of it.
_LAST_RESETS = 20.0
_FIRST_LOOKS = 60.0  # seconds after the start for which labels wait for a vendor of which nothing was seen
_AGAIN = 10.0  # seconds until DRA's sockets are tried again
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """`simulated`: the file that describes a machine that is pretended, None for this one. `seats`: a file instead of
    the cluster's GPUSeatProfiles. `plugins`: the kubelet's folder of device plugins. `root`: where the host's root is.
    `reset`: whether Tenstorrent's cards are reset before containers start with them. `switched`: whether seats are, so
    that containers with one start when theirs has the slot.
    """

    fronts: FrontEnds = field(default_factory=FrontEnds)
    terms: Terms = field(default_factory=Terms)
    simulated: Path | None = None
    seats: Path | None = None
    cdi: Path = FOLDER
    root: Path = Path("/")
    reset: bool = False
    switched: bool = False
    plugins: Path = PLUGINS


def restore(records: Records, claims: Iterable[prepared.Prepared]) -> None:
    """Takes down what is prepared for claims and on no record, for the ledger was lost. Prepared is what containers
    have: it outlives the ledger, and a claim that was given back is not there any more.
    """
    for claim in claims:
        on_record = {id for each in records.claim(claim.uid) for id in each.ids}
        for part in claim.parts:
            if on_record.issuperset(part.ids):
                continue
            ids, told = ", ".join(part.ids), f"{claim.namespace}/{claim.name}"
            _log.warning("The record of %s was lost, and is restored from the prepared claim %s.", ids, told)
            try:
                records.remember_allocation(part.resource, part.ids, part.injection, time.time(), claim.uid)
            except LedgerError as error:
                _log.warning("that the claim %s has %s is not on record: %s", told, ids, error)


class DeviceService:
    """One node's."""

    def __init__(
        self, node: str, kubelet_root: Path, folder: Path, ledger: Ledger, kube: KubeClient, options: DeviceOptions,
        hardware: Hardware,
    ) -> None:  # fmt: skip
        """`hardware`: what kernel caches know of GPUs; it is told what watchers see."""
        self._node, self._options, self._hardware = node, options, hardware
        self.may_start: Callable[[Sequence[Device]], None] = lambda devices: None
        """Before a container starts with these; called in a thread, and raises Refused."""
        self._tree = folder / "simulated-machine"
        self._simulated = options.simulated is not None
        self._events = EventRecorder(kube, "berth-node", node)
        records = Records(ledger)
        claims = prepared.found(folder / "claims", options.cdi)
        self._left = frozenset(claim.uid for claim in claims)
        restore(records, claims)
        podresources = PodResources(kubelet_root / "pod-resources" / "kubelet.sock", node)
        self.holdings = Holdings(
            podresources, records, self._by_plugin, self._drifted, kept=Checkpoint(kubelet_root, options.plugins).kept,
            by_name=lambda name: self.core.by_name(name), prepared=self._prepared,
        )  # fmt: skip
        self._profiles = Profiles(kube, node, folder, options.seats)
        self.core = Core(
            records, self.holdings, self._profiles, CdiFiles(options.cdi), options.fronts, options.terms, self._files,
            self._told, self._make_ready, lambda devices: self.may_start(devices),
        )  # fmt: skip
        tree = tree_of(self._tree, "tenstorrent") if self._simulated else None
        self._resets = Resets(lambda card: resetter.command(card, tree))
        self._folders = Folders(options.plugins)
        self._supervisor = Supervisor(self.core.view("device-plugin"), podresources, self._folders, self._gated)
        self._dra: Driver | None = None
        if options.fronts.dra:
            self._dra = Driver(
                Places(kubelet_root, folder, options.cdi), node, kube, self.core.view("dra"), self._cards,
                None if self._simulated else Path("/sys"), simulated=self._simulated,
            )  # fmt: skip
        self._dra_problem = ""
        self._keeping = Keeping()
        self._reporting = OwnObject(
            kube, node, NODEDEVICES, lambda owner: document(node, owner), lambda: status(self.picture(), time.time())
        )
        self._looks: dict[Vendor, Sight] = {}  # the last without a problem; until there is one, the last
        self._began = time.monotonic()
        self._watchings = [self._watching(vendor) for vendor in VENDORS]

    async def run(self) -> None:
        """Until cancelled."""
        observe(lambda: (self.core.state, self.holdings.held, self._supervisor.statuses(), self._simulated))
        try:
            async with asyncio.TaskGroup() as group:
                for name, work in self._works().items():
                    group.create_task(self._keeping.keep(name, work))
        finally:
            await asyncio.to_thread(self._resets.finish, _LAST_RESETS)

    def _works(self) -> dict[str, Callable[[], Coroutine[None, None, None]]]:
        works: dict[str, Callable[[], Coroutine[None, None, None]]] = {
            f"watching {watching.vendor}": watching.run for watching in self._watchings
        }
        works |= {
            "allocation": self.core.run,
            "seat profiles": self._profiles.run,
            "holdings": self._follow_holdings,
            "NodeDevices": self._reporting.run,
            "Events": self._events.run,
            "device plugin": self._supervisor.run,
        }
        if (driver := self._dra) is not None:
            works["DRA"] = lambda: self._serve_dra(driver)
        return works

    @property
    def note(self) -> str:
        """What people should know who look at the process; '' if nothing."""
        silent = [f"{each.vendor}: {each.problem}" for each in self._watchings if each.problem]
        simulated = "its devices are simulated" if self._simulated else ""
        reported = self._reporting.trouble and f"its NodeDevices cannot be written: {self._reporting.trouble}"
        return "; ".join(
            filter(None, (*self._keeping.broken.values(), *silent, *self.core.state.problems[:3], reported, simulated))
        )

    def picture(self) -> Picture:
        """What there is, for NodeDevices."""
        state, plan = self.core.state, self.core.state.plan
        problems = [f"{each.vendor}: {each.problem}" for each in self._watchings if each.problem]
        problems += [sight.problem for each in self._watchings if (sight := each.sight) is not None and sight.problem]
        configuration = self._profiles.now
        wrong = tuple(filter(None, (configuration.problem, *plan.problems)))
        seats = None
        if configuration.source or plan.seats:
            source = configuration.source or "what was configured before"
            generation = configuration.profile.generation if configuration.profile is not None else 0
            seats = Seats(source, generation, len(plan.groups), len(plan.seats), wrong, plan.waiting)
        return Picture(
            cards=list(state.cards.values()),
            health={
                id: CardHealth(each.state, each.reason, each.message, each.since)
                for id, each in state.health.items()
            },
            devices=state.offering.devices,
            holders=self._holders(),
            offers={resource: self._offer(resource) for resource in state.offering.devices},
            links=state.links,
            problems=[*dict.fromkeys([*problems, *state.problems])],
            seats=seats,
            simulated=self._simulated,
            labels=self._labels(),
        )  # fmt: skip

    def _labels(self) -> dict[str, str] | None:
        """None until something is known of each vendor's hardware: of what nobody has looked at yet, no label is taken
        away. Not for long: one vendor that shows nothing would keep the labels of all others from being said.
        """
        waits = time.monotonic() - self._began < _FIRST_LOOKS
        known = [self._known(each.vendor, waits) for each in self._watchings]
        if waits and None in known:
            return None
        return labels(filter(None, known), self._options.terms.aliases)

    def _known(self, vendor: Vendor, waits: bool) -> Sight | None:
        """What labels tell of a vendor. Where it was not seen without a problem yet, that may last: its cards are those
        that the core knows then, also from the last run. None where there are none, or a look is waited for.
        """
        look, state = self._looks.get(vendor), self.core.state
        if look is None or look.problem:
            cards = tuple(card for card in state.cards.values() if card.vendor == vendor)
            if not cards or (look is None and waits):
                return None
            look = replace(look or Sight(vendor, simulated=self._simulated), cards=cards)
        # What is gone for its reset, or was not looked at, tells no facts.
        return replace(look, host={**lasting(state.host), **look.host})

    def _holders(self) -> dict[str, Holder]:
        found = {}
        for id, each in self.holdings.held.items():
            told = f"claim {each.claim}" if each.claim else "not shown yet"
            found[id] = Holder(each.namespace, each.pod or told, ", ".join(each.containers))
        return found

    def _offer(self, resource: str) -> Offer:
        front = self.core.front_end(resource)
        if front is None:
            return Offer("none", f"Nothing offers {resource}: start berth node with --device-plugin or --dra for it.")
        if front == "dra":
            trouble = self._dra_problem or (self._dra.publisher.problem if self._dra is not None else "")
            return Offer("dra", trouble)
        status = next((each for each in self._supervisor.statuses() if each.resource == resource), None)
        if status is None or not status.serving:
            return Offer("device-plugin", (status.error if status else "") or "the kubelet has not registered it yet")
        return Offer("device-plugin")

    # ---- parts

    def _watching(self, vendor: Vendor) -> Watching:
        line = command(vendor, self._options.simulated, self._tree)
        there: Callable[[], bool] | None = (lambda: True) if self._simulated else None
        return Watching(vendor, line, self._saw, lambda why: self._fell_silent(vendor, why), there)

    def _saw(self, sight: Sight) -> None:
        shown = self._resets.shown(sight)
        if not shown.problem or self._looks.get(shown.vendor, shown).problem:
            self._looks[shown.vendor] = shown
        self._hardware.seen(shown)
        self.core.seen(shown)

    def _fell_silent(self, vendor: Vendor, why: str) -> None:
        self._hardware.silent(vendor, why)
        self.core.silent(vendor, why)

    def _files(self) -> DriverFiles:
        tree = tree_of(self._tree, "nvidia")
        return driver_files(tree, tree / "dev", tree / "sys") if self._simulated else driver_files(self._options.root)

    def _gated(self, resource: str) -> bool:
        # Where nothing is done before a start the kubelet does not ask: containers start without this process as well.
        if self._options.switched and seat_size(resource):
            return True
        return self._options.reset and resource.startswith(f"{TENSTORRENT}/")

    def _make_ready(self, cards: Sequence[Card]) -> None:
        """Called in a thread, before a container starts with these cards."""
        mine = [card for card in cards if card.vendor == "tenstorrent"]
        if self._options.reset and mine:
            reset_for(mine, self._resets, lambda: self.core.written)

    def _by_plugin(self, resource: str) -> bool:
        return self._options.fronts.of(resource) == "device-plugin"

    def _prepared(self, claim: str) -> bool:
        return claim in self._left or (self._dra is not None and self._dra.claims.get(claim) is not None)

    def _cards(self) -> Mapping[str, Card]:
        return self.core.state.cards

    async def _follow_holdings(self) -> None:
        """Who holds what decides what stays listed, and which seats may change."""
        group = asyncio.create_task(self.holdings.run())
        try:
            before, kubelet = dict(self.holdings.held), self._folders.kubelet
            while not group.done():
                await asyncio.sleep(1.0)
                if (there := self._folders.kubelet) != kubelet:
                    kubelet = there
                    self.holdings.kubelet_restarted()
                now = dict(self.holdings.held)
                if now.keys() != before.keys():
                    self.core.poke()
                before = now
            await group
        finally:
            group.cancel()

    async def _serve_dra(self, driver: Driver) -> None:
        while True:
            try:
                await driver.start()
                break
            except (SocketError, OSError) as error:
                self._dra_problem = str(error)
                _log.warning("DRA is not served: %s", error)
                await asyncio.sleep(_AGAIN)
        self._dra_problem = ""
        try:
            await driver.watch()
        finally:
            await driver.stop()

    # ---- for people

    def _told(self, card: str, health: Health, sentence: str) -> None:
        well = health.state == "Healthy"
        _log.log(logging.INFO if well else logging.WARNING, "%s", sentence)
        self._events.record(
            regarding=ObjectRef("v1", "Node", self._node, uid=self._node),
            type="Normal" if well else "Warning",
            reason=f"Device{health.state}",
            action="WatchDevices",
            note=sentence,
        )

    def _drifted(self, drift: Drift) -> None:
        self._events.record(
            regarding=ObjectRef("v1", "Node", self._node, uid=self._node), type="Warning",
            reason=f"Device{drift.kind}", action="CompareWithKubelet", note=drift.message,
        )  # fmt: skip
