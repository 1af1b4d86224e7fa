"""The world in which seats are switched, on a real node: its tenants, their backends, the seat proxy, the record of
seats.

Reads and acts. Who is next is decided by `planning/seats`, in which order things are done by `switching.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol
from zoneinfo import ZoneInfo

from nodeworkers.seats import metrics
from nodeworkers.seats.backend import Backend, Held
from nodeworkers.seats.doors import Doors
from nodeworkers.seats.gate import Gate
from nodeworkers.seats.helper.driver import CardMemory
from nodeworkers.seats.history import GroupHistory
from nodeworkers.seats.proxy_words import News, ProxyError
from nodeworkers.seats.records import SeatRecords
from nodeworkers.seats.reporting import GroupFacts
from nodeworkers.seats.slots import Slots
from nodeworkers.seats.standing import standing
from nodeworkers.seats.tenants import GroupTenants, Tenant, Tenants
from nodeworkers.seats.ways import Ways
from nodeworkers.seats.world import LostError, Moved, SeatLook, State, UntouchedError, Wanted
from planning.seats.choosing import choose
from planning.seats.group import Choice, GroupView, Phase, SeatView
from planning.seats.host_memory import Level, NodeMemory, Parking, refusal
from planning.seats.parking import Way
from planning.seats.preflight import Check
from planning.seats.room import CardRoom, lacks
from planning.seats.status import SwitchPicture

POLL = 0.25  # seconds between looks at what tells nothing of itself, such as a server that starts
_STATES: Mapping[Held, State] = {
    "Running": "Running", "Locked": "Locked", "Parked": "Parked", "Changing": "Changing", "Failed": "Failed",
    "Gone": "Running",  # it has nothing on the GPUs yet, and may have in the next moment
}  # fmt: skip


class Host(Protocol):
    """What switching needs of the machine beside containers, backends and the proxy."""

    async def memory(self, group: str, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        """Of these GPUs, as the driver says. Raises UntouchedError where it does not."""

    async def serves(self, tenant: Tenant) -> str:
        """Why its server does not answer, '' if it does."""

    async def levels(self, tenant: Tenant) -> tuple[Level, ...]:
        """The limits that the container is under."""

    async def node(self) -> NodeMemory | None:
        """The node's memory; None where nobody knows."""

    async def end(self, tenant: Tenant) -> None:
        """Ends all processes of the container."""


@dataclass(slots=True)
class _Group:
    history: GroupHistory
    tenants: GroupTenants
    looks: Mapping[str, SeatLook]
    since: dict[str, tuple[Phase, float]]  # what a seat's phase was when it was asked last, and since when
    last: Choice | None = None


class NodeWorld:
    """One node's. `backend`: what parks a tenant in a way; `missing`: what a seat's driver lacks for a checkpoint."""

    def __init__(
        self, tenants: Tenants, backend: Callable[[Tenant, Way], Backend], doors: Doors, host: Host, slots: Slots,
        records: SeatRecords, gate: Gate, missing: Callable[[str], Sequence[str]],
    ) -> None:  # fmt: skip
        self._tenants, self._doors, self._host = tenants, doors, host
        self._slots, self._records, self._gate = slots, records, gate
        self._ways = Ways(backend, missing, records, host)
        self._groups: dict[str, _Group] = {}
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._parking: dict[str, int] = {}  # bytes that parks under way will take, by seat

    # ---- what is

    async def look(self, group: str) -> Mapping[str, SeatLook] | None:
        tenants = await self._tenants.of(group)
        if tenants is None:
            self._groups.pop(group, None)
            return None
        looked = await asyncio.gather(*(self._look(each) for each in tenants.seats.values()))
        looks = dict(zip(tenants.seats, looked, strict=True))
        now, known = time.time(), self._groups.get(group)
        if known is None or known.history.window != tenants.policy.window:
            history = GroupHistory(tenants.policy.window, now)
            slot = self._slots.slot(group)
            if slot.phase == "Active":
                history.opened(slot.seat, slot.since)
            known = self._groups[group] = _Group(history, tenants, looks, {})
        known.tenants, known.looks = tenants, looks
        for seat, tenant in tenants.seats.items():
            if tenant is None:
                self._gate.forget(seat)
                known.history.ended(seat, now)
        return looks

    async def _look(self, tenant: Tenant | None) -> SeatLook:
        if tenant is None:
            return SeatLook("Absent")
        known = self._records.held_by(tenant.seat, tenant.uid).known
        if not tenant.running:
            return SeatLook("Waiting", told=tenant.told or (known.why_not if known.lost else ""), ended=tenant.ended)
        try:
            reading = await self._ways.backend(tenant).read(self._ways.server(tenant))
        except UntouchedError as unread:
            # Nobody knows how it is. That is not that it does nothing.
            return SeatLook("Changing", told=str(unread))
        state = _STATES[reading.held]
        if reading.held == "Gone" and known.processes and not self._slots.has(tenant.seat):
            # What was parked is gone with its processes, and its container runs on without them.
            return SeatLook("Failed", told="The processes that were parked have ended.")
        if state != "Running":
            return SeatLook(state, told=reading.told)
        silent = await self._host.serves(tenant)
        return SeatLook(state, not silent, reading.told or silent)

    async def changed(self, group: str, seconds: float) -> None:
        news = self._news[group]
        news.clear()
        try:
            async with asyncio.timeout(min(seconds, POLL)):
                await news.wait()
        except TimeoutError:
            return

    def stir(self, group: str) -> None:
        """Something is news there: whoever waits looks again."""
        self._news[group].set()

    # ---- whose turn it is

    async def choose(self, group: str, active: str) -> Wanted:
        known = self._groups.get(group)
        if known is None:
            return Wanted("", f"Nothing is known of {group} yet.", 1.0)
        choice = await self.decide(group)
        return Wanted(choice.seat, choice.reason, choice.within)

    async def decide(self, group: str) -> Choice:
        """Whose turn it is, by the last look. Whoever waits is told for how long."""
        known, now = self._groups[group], time.time()
        choice = choose(await self._view(known, now), now)
        known.last = choice
        for seat, wait in choice.waits.items():
            known.history.told(seat, wait, now)
        return choice

    def facts(
        self, group: str, last: SwitchPicture | None, preflight: Sequence[Check] = (), *, simulated: bool
    ) -> GroupFacts | None:
        """What is known of the group, for people; None where it was not looked at yet. `last`: its last switch;
        `preflight`: what was found out of its node.
        """
        known = self._groups.get(group)
        if known is None:
            return None
        tenants = known.tenants.seats
        there = {seat: tenant for seat, tenant in tenants.items() if tenant is not None}
        return GroupFacts(
            slot=self._slots.slot(group),
            seats=tenants,
            phases={seat: phase for seat, (phase, _) in known.since.items()},
            looks=known.looks,
            records={seat: self._records.held_by(seat, tenant.uid) for seat, tenant in there.items()},
            backends={seat: self._ways.of(tenant) for seat, tenant in there.items()},
            traffic={seat: traffic for seat in tenants if (traffic := known.history.traffic(seat)) is not None},
            waits=known.last.waits if known.last is not None else {},
            last=last,
            preflight=preflight,
            busy={seat: self._busy(known, tenant) for seat, tenant in there.items()},
            gpus=len(known.tenants.cards),
            window=known.history.window,
            rebalance=known.tenants.rebalance,
            notes={seat: note for seat, tenant in there.items() if (note := self._ways.note(tenant))},
            simulated=simulated,
        )

    def _busy(self, known: _Group, tenant: Tenant) -> float:
        """For how much of the time it is asked; a batch is all the time, and one whose requests are passed on never."""
        if self._records.held_by(tenant.seat, tenant.uid).known.passed_on:
            return 0.0
        return known.history.busy(tenant.seat, time.time()) if tenant.settings.port else 1.0

    def strange(self, group: str) -> bool:
        """Whether the last look fits the slot as it stands in the ledger: if not, its workflow puts it in order."""
        known, slot = self._groups[group], self._slots.slot(group)
        for seat, look in known.looks.items():
            mine = slot.phase == "Active" and slot.seat == seat
            if look.state == "Failed" or (look.state in ("Running", "Locked") and not mine):
                return True
            if mine and (look.state != "Running" or not look.serves):
                return True
        return slot.phase == "Active" and slot.seat not in known.looks

    async def show(self, group: str) -> None:
        """Tells the proxy of the group's tenants as the last look and the last decision have them."""
        known = self._groups[group]
        tenants = [tenant for tenant in known.tenants.seats.values() if tenant is not None]
        waits = known.last.waits if known.last is not None else {}
        await self._doors.show(tenants, self._slots.epoch(group), waits)

    async def _view(self, known: _Group, now: float) -> GroupView:
        tenants = known.tenants
        slot, waiting = self._slots.slot(tenants.group), self._gate.waiting(tenants.group)
        memory = await self._host.node()
        if memory is not None:
            memory = replace(memory, coming=sum(self._parking.values()), parked=self._parked())
        seats = []
        for seat, tenant in tenants.seats.items():
            # One that was ended to be parked has a container that wants to start all the time. It waits for requests.
            ended = tenant is not None and self._records.held_by(seat, tenant.uid).known.ended
            asked = waiting[seat].since if seat in waiting and not ended else None
            phase = standing(known.looks.get(seat, SeatLook("Absent")), slot, seat, asks=asked is not None)
            before = known.since.get(seat)
            since = before[1] if before is not None and before[0] is phase else now
            known.since[seat] = (phase, since)
            if tenant is None:
                seats.append(SeatView(seat, Phase.ABSENT))
                continue
            if not tenant.uid and phase is Phase.LOST:
                seats.append(SeatView(seat, Phase.ABSENT))  # its pod is not known yet, nor whether it has a port
                continue
            record = self._records.held_by(seat, tenant.uid).known
            view = known.history.view(seat, phase, since, asked, tenant.settings, record, now)
            if record.passed_on:
                view = replace(view, held=0, running=0, batch=False, idle=view.resident)  # another serves them
            if phase is Phase.ACTIVE and memory is not None:
                need = self._ways.need(tenant, record.bytes)
                view = replace(view, bytes=need, levels=await self._host.levels(tenant))
            seats.append(view)
        pins = [
            tenant.seat
            for tenant in tenants.seats.values()
            if tenant is not None
            and tenant.settings.pinned
            and not self._records.held_by(tenant.seat, tenant.uid).known.passed_on
        ]
        offset = datetime.fromtimestamp(now, UTC).astimezone(ZoneInfo(tenants.zone)).utcoffset()
        return GroupView(
            tuple(seats), tenants.policy, known.history.lost(now), pins[0] if len(pins) == 1 else "",
            slot.next or slot.seat if slot.phase not in ("Active", "Empty") else "", memory,
            offset.total_seconds() if offset is not None else 0.0,
        )  # fmt: skip

    def _parked(self) -> int:
        return sum(
            self._records.of(seat).known.host_bytes
            for known in self._groups.values()
            for seat, look in known.looks.items()
            if look.state == "Parked"
        )

    def heard(self, news: News) -> set[str]:
        """The proxy tells of requests: the groups in which somebody else may be next."""
        now, touched = time.time(), set()
        for group, known in self._groups.items():
            for traffic in news.traffic:
                if traffic.seat not in known.tenants.seats:
                    continue
                look = known.looks.get(traffic.seat)
                if known.history.heard(traffic, now, starts=look is not None and look.state == "Waiting"):
                    touched.add(group)
            for seat in news.removed:
                if seat in known.tenants.seats:
                    known.history.forgotten(seat)
        for group in touched:
            self.stir(group)
        return touched

    # ---- requests

    async def close(self, seat: str, epoch: int) -> None:
        known, tenant = self._tenant(seat)
        if tenant is not None:
            await self._doors.hold(tenant, epoch)
        known.history.closed(seat, time.time())

    async def drain(self, seat: str, epoch: int) -> str:
        known, tenant = self._tenant(seat)
        if tenant is None:
            return ""
        began = time.time()
        drained = await self._doors.drain(tenant, epoch)
        now = time.time()
        if drained.left:
            requests = "1 request is" if drained.left == 1 else f"{drained.left} requests are"
            return f"{requests} still in flight after {tenant.settings.drain:.0f} s (kyb.ai/drain-seconds)"
        self._note(seat, "drain", now - began)
        known.history.drained(seat, now)
        return ""

    async def open(self, seat: str, epoch: int) -> None:
        known, tenant = self._tenant(seat)
        if tenant is None:
            return
        slot, now = self._slots.slot(known.tenants.group), time.time()
        if slot.seat == seat and slot.phase == "Starting":
            self._note(seat, "start", now - slot.since)
        record = self._records.of(seat).known
        self._records.put(seat, replace(record, lost=False, ended=False))
        await self._doors.open(tenant, epoch)
        known.history.opened(seat, now)

    async def pass_on(self, seat: str, pod: str, address: str) -> str:
        """Sends requests for the seat of the pod with this UID elsewhere, once none is with its server; '' takes that
        back. Why it was not done, '' if it was.
        """
        known, tenant = self._tenant(seat)
        if not address:
            return await self._take_back(known, seat, pod, tenant)
        if tenant is None or tenant.uid != pod:
            return f"the pod that is to move does not have {seat} (any more)"
        epoch = self._slots.epoch(known.tenants.group)
        record = self._records.held_by(seat, pod).known
        if not record.passed_on:
            drained = await self._doors.drain(tenant, epoch)
            if drained.left:
                await self._doors.pass_on(tenant, epoch)
                told = "1 request is" if drained.left == 1 else f"{drained.left} requests are"
                return f"{told} still in flight after {tenant.settings.drain:.0f} s (kyb.ai/drain-seconds)"
            record = self._records.held_by(seat, pod).known
        self._records.put(seat, replace(record, passed_on=address))
        await self._doors.pass_on(tenant, epoch)
        self.stir(known.tenants.group)
        return ""

    async def _take_back(self, known: _Group, seat: str, pod: str, tenant: Tenant | None) -> str:
        """By its record, also while nobody knows yet whose the seat is: what stays there outlives this process."""
        record = self._records.of(seat)
        if record.holder == pod and record.known.passed_on:
            self._records.put(seat, replace(record.known, passed_on=""))
        if tenant is not None and tenant.uid in ("", pod):
            with suppress(ProxyError):  # what it is to serve it is told once it is there again
                await self._doors.pass_on(tenant, self._slots.epoch(known.tenants.group))
        self.stir(known.tenants.group)
        return ""

    # ---- memory

    async def park(self, seat: str, epoch: int) -> Moved:
        known, _ = self._tenant(seat)
        tenants = await self._tenants.of(known.tenants.group, anew=True)
        tenant = tenants.seats.get(seat) if tenants is not None else None
        if tenants is None or tenant is None:
            raise LostError(f"nobody holds {seat} any more")
        known.tenants = tenants
        held = await self._held_by(known, tenant)
        need = self._ways.need(tenant, sum(held.values()))
        memory, levels = await self._host.node(), tuple[Level, ...]()
        if memory is not None:
            memory = replace(memory, coming=sum(self._parking.values()), parked=self._parked())
            levels = await self._host.levels(tenant)
            if why := refusal(Parking(seat, need, levels=levels), memory):
                self._ways.refused(tenant, why, by_way=False)
                raise UntouchedError(why)
        way, server = self._ways.of(tenant), self._ways.begun(tenant, held)
        self._parking[seat] = need
        began = time.monotonic()
        try:
            moved = await self._ways.backend(tenant).park(server, epoch)
        except UntouchedError as untouched:
            self._ways.refused(tenant, str(untouched), by_way=True)
            raise
        except LostError as why:
            self._records.put(seat, replace(self._records.of(seat).known, lost=True, why_not=str(why)))
            raise
        finally:
            self._parking.pop(seat, None)
        took = time.monotonic() - began
        self._note(seat, "park", took)
        await self._ways.parked(tenant, moved, levels)
        moved = replace(moved, bytes=0 if way == "cold" else moved.bytes or sum(held.values()))
        metrics.parked(known.tenants.group, way, moved, took)
        return moved

    async def wake(self, seat: str, epoch: int) -> Moved:
        known, tenant = self._tenant(seat)
        if tenant is None:
            raise LostError(f"nobody holds {seat} any more")
        began = time.monotonic()
        try:
            moved = await self._ways.backend(tenant).wake(self._ways.server(tenant), epoch)
        except LostError as why:
            self._records.put(seat, replace(self._records.of(seat).known, lost=True, why_not=str(why)))
            raise
        took = time.monotonic() - began
        self._note(seat, "wake", took)
        moved = replace(moved, bytes=moved.bytes or self._records.of(seat).known.bytes)
        metrics.woken(known.tenants.group, self._ways.of(tenant), moved, took)
        return moved

    async def lacks(self, group: str, seat: str) -> str:
        known = self._groups.get(group)
        # What was started in a container since the last look is not to be taken for a stranger.
        tenants = await self._tenants.of(group, anew=True)
        if known is None or tenants is None:
            return f"nothing is known of {group} yet"
        known.tenants = tenants
        memory = await self._host.memory(group, known.tenants.cards)
        owners = {
            process.pid: tenant.seat
            for tenant in known.tenants.seats.values()
            if tenant is not None
            for process in tenant.processes
        }
        cards = {
            card: CardRoom(memory[card].free, memory[card].holders) if card in memory else None
            for card in known.tenants.cards
        }
        return lacks(group, seat, cards, owners, self._records.of(seat).known.cards)

    async def _held_by(self, known: _Group, tenant: Tenant) -> dict[str, int]:
        """Bytes that it has on each GPU."""
        memory = await self._host.memory(known.tenants.group, tenant.cards)
        pids = {process.pid for process in tenant.processes}
        return {card: sum(size for pid, size in each.holders.items() if pid in pids) for card, each in memory.items()}

    async def discard(self, seat: str, epoch: int, why: str) -> None:
        known, tenant = self._tenant(seat)
        known.history.ended(seat, time.time())
        if tenant is None:
            return
        self._records.put(seat, replace(self._records.of(seat).known, lost=True, why_not=why))
        await self._doors.hold(tenant, epoch)
        await self._host.end(tenant)

    # ---- common

    def _tenant(self, seat: str) -> tuple[_Group, Tenant | None]:
        """By the last look, which comes before whatever is done."""
        for known in self._groups.values():
            if seat in known.tenants.seats:
                return known, known.tenants.seats[seat]
        raise UntouchedError(f"{seat} is no seat of this node any more")

    def _note(self, seat: str, what: str, seconds: float) -> None:
        self._records.put(seat, self._records.of(seat).known.took(what, seconds))
