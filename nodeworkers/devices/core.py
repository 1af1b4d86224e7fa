"""The allocation core: turns what providers see, what is configured and who holds what into the devices of this node,
and hands them out. Both front ends answer the kubelet from it.

One loop brings it up to date (`run`): whoever has news says so, and some of them are taken together. Nothing is offered
before the container runtime can find it: CDI documents are written first. Calls of the kubelet wait for none of that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, get_args

from nodeworkers.devices.cdi_files import CdiError, CdiFiles
from nodeworkers.devices.holdings import Holdings
from nodeworkers.devices.profiles import Profiles
from nodeworkers.devices.records import Records
from nodeworkers.ledger import LedgerError
from planning.devices import cdi
from planning.devices.cards import Card, Link, Sight, Vendor
from planning.devices.cdi import DriverFiles
from planning.devices.health import UNSEEN, Health, changes, judged, unanswered
from planning.devices.held import device_of, replaced, seat_of
from planning.devices.injection import allocated, lasting, pages_lacking
from planning.devices.offering import Offering, Terms, offered
from planning.devices.offers import Device, Held, Injection, Refused
from planning.devices.preference import Affinity, preferred
from planning.devices.report import FrontEnd
from planning.devices.seats import SeatPlan, configured
from planning.devices.slices import names

TOGETHER = 0.1  # seconds in which news are taken together
SILENCE = 5.0  # seconds between two looks at who is silent
AWAITED = 24 * 3600.0  # seconds for which a group of seats waits for a GPU that has vanished
ANEW = 60.0  # seconds after which all is settled again without news: somebody may have emptied the CDI folder
_log = logging.getLogger(__name__)

Told = Callable[[str, Health, str], None]
"""Called with a card's id, its health and a sentence whenever the health became another."""


@dataclass(frozen=True, slots=True)
class FrontEnds:
    """Which resources are offered by what: patterns as a shell has them. One that fits neither is not offered."""

    device_plugin: tuple[str, ...] = ()
    dra: tuple[str, ...] = ()

    def of(self, resource: str) -> FrontEnd | None:
        """By what a resource is offered. Where both fit it is the device plugin's: never both."""
        if any(fnmatchcase(resource, each) for each in self.device_plugin):
            return "device-plugin"
        return "dra" if any(fnmatchcase(resource, each) for each in self.dra) else None


@dataclass(frozen=True, slots=True)
class State:
    """What the core knows at one moment; another object whenever that is something else."""

    cards: Mapping[str, Card] = field(default_factory=dict)
    health: Mapping[str, Health] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    host: Mapping[str, str] = field(default_factory=dict)
    plan: SeatPlan = field(default_factory=SeatPlan)
    offering: Offering = field(default_factory=lambda: Offering({}))
    devices: Mapping[str, Device] = field(default_factory=dict)
    affinity: Affinity = field(default_factory=lambda: Affinity((), ()))
    problems: tuple[str, ...] = ()


class Core:
    """One node's devices. `view` gives each front end what is its own."""

    def __init__(
        self,
        records: Records,
        holdings: Holdings,
        profiles: Profiles,
        cdi_files: CdiFiles,
        fronts: FrontEnds,
        terms: Terms,
        files: Callable[[], DriverFiles],
        told: Told,
        ready: Callable[[Sequence[Card]], None] = lambda cards: None,
        may_start: Callable[[Sequence[Device]], None] = lambda devices: None,
    ) -> None:
        """`files`: the driver's files as they are now; called in a thread. `ready` makes cards ready for a container
        that starts with them; called in a thread as well, it may take its time, and raises Refused.
        `may_start` says whether a container may start with these devices at all; called as `ready` is, and before it.
        """
        self.state = State()
        self.version = 1
        self._records, self._holdings, self._profiles, self._cdi_files = records, holdings, profiles, cdi_files
        self._fronts, self._terms, self._find_files, self._told = fronts, terms, files, told
        self._ready, self._may_start = ready, may_start
        self.written: Mapping[str, int] = {}  # cards by id, with the numbers for which CDI documents are there
        self._sights: dict[Vendor, Sight] = {}
        self._silent: dict[Vendor, str] = {}
        self._files = DriverFiles()
        self._with_cdi = True
        self._taken: tuple[str, ...] = ()
        self._group_first = ("", 0.0)  # a group of seats, and until when
        self._called: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._due = asyncio.Event()
        self._due.set()  # what is remembered is offered at once
        self._news = asyncio.Event()
        # Until providers have looked, the cards of the last run are offered: they are there, as a rule.
        self._cards = {id: known.card for id, known in records.cards().items()}
        self._health = {id: _remembered(known.health) for id, known in records.cards().items()}
        self._host = {key: fact for known in records.cards().values() for key, fact in _facts(known.health).items()}

    # ---- news

    def seen(self, sight: Sight) -> None:
        """A provider has looked."""
        back = self._silent.pop(sight.vendor, None) is not None
        before = self._sights.get(sight.vendor)
        self._sights[sight.vendor] = sight
        judged_anew = self._judge(sight.vendor, lambda before, now: judged(before, sight, now))
        self._cards.update({card.id: card for card in sight.cards})
        self._host.update(lasting(sight.host))
        # A look every two seconds is no news by itself.
        if back or judged_anew or before is None or replace(sight, readings={}) != replace(before, readings={}):
            self.poke()

    def silent(self, vendor: Vendor, why: str) -> None:
        """A provider hangs, or is gone; `why` is a sentence."""
        self._silent[vendor] = why
        self._judge(vendor, lambda before, now: unanswered(before, why, now))
        self.poke()

    def poke(self) -> None:
        """Something else is news: who holds what, or the configuration."""
        self._due.set()

    def _judge(self, vendor: Vendor, judge: Callable[[Mapping[str, Health], float], dict[str, Health]]) -> bool:
        """Whether anything became something else."""
        before = {id: self._health[id] for id, card in self._cards.items() if card.vendor == vendor}
        after = judge(before, time.time())
        sight = self._sights.get(vendor)
        cards = self._cards | ({card.id: card for card in sight.cards} if sight is not None else {})
        for card, sentence in changes(before, after, cards):
            self._told(card, after[card], sentence)
        self._health.update(after)
        return any(
            id not in before or (each.state, each.reason, each.message) != (old.state, old.reason, old.message)
            for id, each in after.items()
            for old in (before.get(id, each),)
        )

    # ---- the loop

    async def run(self) -> None:
        """Brings the state up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mind_silence())
            group.create_task(self._follow_configuration())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(ANEW):  # `wait_for` of Python 3.11 may lose a cancellation
                        await self._due.wait()
                await asyncio.sleep(TOGETHER)
                self._due.clear()
                try:
                    await self.settle()
                except Exception:  # a mistake of ours: what was offered stays, and the kubelet is answered
                    _log.exception("the devices of this node could not be brought up to date")

    async def _mind_silence(self) -> None:
        while True:
            await asyncio.sleep(SILENCE)
            for vendor, why in list(self._silent.items()):
                self.silent(vendor, why)

    async def _follow_configuration(self) -> None:
        version = self._profiles.version
        while True:
            version = await self._profiles.changed(version)
            self.poke()

    async def settle(self) -> None:
        """Takes in all that is news. What somebody has seen before is offered for as long as somebody holds it."""
        # What takes a while comes first: from here on to the new state nothing is given.
        problems = await self._write_cdi()
        cards, health = dict(self._cards), dict(self._health)
        links = tuple(link for sight in self._sights.values() for link in sight.links)
        host = self._host | {key: value for sight in self._sights.values() for key, value in sight.host.items()}
        held = self._held()
        plan = self._plan(cards, links, held)
        known = self.state.offering.devices.keys()
        offering = offered(list(cards.values()), health, plan.seats, self._terms, held, known, plan.withheld)
        in_use = {card for device in held.values() for card in device.cards}
        free = [card for card in cards.values() if health[card.id].usable and card.id not in in_use]
        lacking = pages_lacking(free, host)
        affinity = self.state.affinity
        if links != self.state.links or cards != self.state.cards:
            affinity = Affinity(cards.values(), links)
        devices = {device.id: device for each in offering.devices.values() for device in each}
        before = self.state
        self.state = State(
            cards, health, links, host, plan, offering, devices, affinity,
            (*offering.problems, *problems, *filter(None, (lacking, self._holdings.problem))),
        )  # fmt: skip
        self._taken = tuple(self._holdings.held)
        self._remember(cards, health)
        if before.offering.devices != offering.devices:
            self.version += 1
            self._news.set()
            self._news = asyncio.Event()
        if self._forget_vanished():
            self.poke()
        await self._profiles.accept(plan.accepted)

    def _forget_vanished(self) -> bool:
        """Cards that their provider does not show any more, once nobody holds a device of theirs. A group of seats
        waits for a GPU of its own, for what it is called is another's otherwise; not where another one was put in its
        place, and not for ever.
        """
        known = len(self._cards)
        in_use = {card for device in self._held().values() for card in device.cards}
        grouped = {card for seat in self.state.plan.seats for card in seat.cards}
        for vendor, sight in self._sights.items():
            if sight.problem or vendor in self._silent:
                continue
            there = {card.id for card in sight.cards}
            for id, card in [each for each in self._cards.items() if each[1].vendor == vendor]:
                waited = time.time() - self._health[id].since > AWAITED
                if id in there or id in in_use or (id in grouped and not waited and not replaced(card, sight.cards)):
                    continue
                del self._cards[id], self._health[id]
                self._host.pop(f"iommu/{id}", None)
        return len(self._cards) < known

    def _held(self) -> dict[str, Device]:
        """The devices that containers have, as they were offered."""
        found = {}
        given = {id: each for each in self._records.allocations() for id in each.ids}
        for id, holder in self._holdings.held.items():
            device = self.state.devices.get(id)
            if device is None or not device.cards:
                device = device_of(id, holder.resource, given[id].injection if id in given else None)
            if device.cards:
                found[id] = device
        return found

    def _plan(self, cards: Mapping[str, Card], links: tuple[Link, ...], held: Mapping[str, Device]) -> SeatPlan:
        # Before a provider has looked, groups are those of the last run: indices may be others by now.
        seats = [seat for device in held.values() if (seat := seat_of(device)) is not None]
        whole = {card for device in held.values() if seat_of(device) is None for card in device.cards}
        return configured(
            self._profiles.now.spec, list(cards.values()), links, seats, busy=whole, last=self._profiles.last
        )

    async def _write_cdi(self) -> list[str]:
        """Before anything is offered that needs them. What is wrong: sentences.

        Of cards that are seen now and no others: what the kernel called a card that is gone, another may be called. The
        documents of a vendor whose cards were not looked at yet stay as they are.
        """
        cards = [card for sight in self._sights.values() for card in sight.cards]
        nvidia = any(card.vendor == "nvidia" for card in cards)
        self._files = await asyncio.to_thread(self._find_files) if nvidia else DriverFiles()
        documents = cdi.documents(cards, self._files)
        unseen = [cdi.kind(vendor) for vendor in get_args(Vendor) if vendor not in self._sights]
        try:
            await asyncio.to_thread(self._cdi_files.write, documents, unseen)
        except CdiError as error:
            # Device nodes by their paths do as well, for whoever comes next.
            self._with_cdi = False
            return [str(error)]
        finally:
            self.written = {card.id: card.index for card in cards}
        self._with_cdi = True
        return []

    def _remember(self, cards: Mapping[str, Card], health: Mapping[str, Health]) -> None:
        facts = [key for key in self._host if not key.startswith("iommu/")]
        seen = [
            (card, {
                "state": each.state, "reason": each.reason, "message": each.message, "since": each.since,
                "host": {key: self._host[key] for key in (*facts, f"iommu/{card.id}") if key in self._host},
            })
            for card in cards.values()
            if (each := health[card.id]).state != "Unknown"
        ]  # fmt: skip
        try:
            self._records.remember_cards(seen, time.time(), set(cards))
        except LedgerError as error:
            _log.warning("the node's cards are not on record: %s", error)

    # ---- for the front ends

    def view(self, front: FrontEnd) -> View:
        """The part of it that one front end offers."""
        return View(self, front)

    def by_name(self, name: str) -> tuple[str, str] | None:
        """The id and the resource of the device that DRA calls so; None if none is offered."""
        devices = self.state.devices
        if self._called.keys() != devices.keys():  # of ten thousand it takes a while
            self._called = names(devices)
            self._ids = {called: id for id, called in self._called.items()}
        id = self._ids.get(name)
        return None if id is None else (id, devices[id].resource)

    def front_end(self, resource: str) -> FrontEnd | None:
        """By what a resource is offered; None: by nothing."""
        return self._fronts.of(resource)

    async def changed(self, version: int) -> int:
        """As `Devices.changed`."""
        while self.version == version:
            await self._news.wait()
        return self.version

    def prefer(self, group: str, seconds: float) -> None:
        """Of seats this group's come first for so long: somebody is about to start there whose pod cannot say so."""
        self._group_first = group, time.monotonic() + seconds

    def preferred(self, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        """As `Devices.preferred`; called in a thread."""
        state, taken = self.state, self._taken
        cards = {id: device.cards for id, device in state.devices.items()}
        group, until = self._group_first
        first = [id for id, device in state.devices.items() if group and device.group == group]
        return preferred(state.affinity, cards, available, must, size, taken, first if time.monotonic() < until else ())

    def allocate(self, resource: str, ids: Sequence[str], claim: str, admin: bool) -> Injection:
        """As `Devices.allocate`."""
        state = self.state
        found = allocated(ids, resource, state.devices, state.cards, state.host, self._files, with_cdi=self._with_cdi)
        if admin:
            return found
        for id in ids:
            holder = self._holdings.held.get(id)
            # The kubelet asks anew for a pod's next container, the scheduler for a claim's next pod: nobody else may.
            if holder is not None and holder.claim != claim:
                who = f"the claim {holder.claim}" if holder.claim else f"a pod, as {holder.resource}"
                raise Held(f"{id} is held by {who}. Delete the pod, so that it gets another device.")
        try:
            self._records.remember_allocation(resource, ids, found, time.time(), claim)
        except LedgerError as error:
            # The kubelet remembers it as well, and is asked.
            _log.warning("that %s were given is not on record: %s", ", ".join(ids), error)
        self._holdings.given(resource, ids, claim)
        self._taken = tuple(self._holdings.held)
        self.poke()
        return found

    def before_start(self, resource: str, ids: Sequence[str]) -> None:
        """As `Devices.before_start`; called in a thread."""
        state = self.state
        for id in ids:
            device = state.devices.get(id)
            if device is None or device.resource != resource:
                raise Refused(f"This node no longer offers {id} as {resource}. Delete the pod, so that it moves.")
            if not device.healthy:
                raise Refused(f"{id} is not well ({device.reason}): {device.message}")
        self._may_start([state.devices[id] for id in ids])
        used = dict.fromkeys(card for id in ids for card in state.devices[id].cards)
        self._ready([state.cards[card] for card in used if card in state.cards])

    def holds(self, claim: str) -> bool:
        """As `Devices.holds`."""
        return any(holder.claim == claim for holder in self._holdings.held.values())

    def release(self, claim: str) -> None:
        """As `Devices.release`."""
        ids = [id for each in self._records.claim(claim) for id in each.ids]
        try:
            self._records.forget(ids, claim)
        except LedgerError as error:
            _log.warning("that the claim %s was given back is not on record: %s", claim, error)
        self._holdings.released(claim)
        self.poke()


def _remembered(told: Mapping[str, Any]) -> Health:
    """How a card is that was not looked at yet: ill where it was."""
    message = "It has not been checked since berth node was started."
    if told.get("state") == "Unhealthy":
        since = told.get("since")
        known = float(since) if isinstance(since, int | float) else 0.0
        return Health("Unhealthy", str(told.get("reason")), str(told.get("message")), known)
    return Health("Unknown", UNSEEN, message, time.time())


def _facts(told: Mapping[str, Any]) -> dict[str, str]:
    """What was known of the machine when a card was seen last."""
    found = told.get("host")
    told_so = found if isinstance(found, dict) else {}
    return lasting({key: value for key, value in told_so.items() if isinstance(key, str) and isinstance(value, str)})


class View:
    """A front end's `Devices`: the resources that are its own."""

    def __init__(self, core: Core, front: FrontEnd) -> None:
        self._core = core
        self._front = front
        self._last: tuple[Offering, dict[str, tuple[Device, ...]]] | None = None

    @property
    def version(self) -> int:
        return self._core.version

    def offered(self) -> Mapping[str, tuple[Device, ...]]:
        offering = self._core.state.offering
        if self._last is None or self._last[0] is not offering:
            mine = {name: each for name, each in offering.devices.items() if self._core.front_end(name) == self._front}
            self._last = offering, mine
        return self._last[1]

    async def changed(self, version: int) -> int:
        return await self._core.changed(version)

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        return self._core.preferred(available, must, size)

    def allocate(self, resource: str, ids: Sequence[str], claim: str = "", admin: bool = False) -> Injection:
        return self._core.allocate(resource, ids, claim, admin)

    def before_start(self, resource: str, ids: Sequence[str]) -> None:
        self._core.before_start(resource, ids)

    def holds(self, claim: str) -> bool:
        return self._core.holds(claim)

    def release(self, claim: str) -> None:
        self._core.release(claim)
