"""One switch of a group's slot, step by step: whoever has it is drained and parked, the memory is proven free, whoever
is to have it is woken or started, and proven to serve. For the activities of the group's workflow.

Whatever was begun and not ended (a process killed, a call that hung) is read from the hardware and gone on with, never
guessed and never repeated blindly. At most one seat of a group has the slot; nothing else of it is on the GPUs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from nodeworkers.seats.slots import Slot, Slots
from nodeworkers.seats.world import LostError, SeatLook, UnsettledError, UntouchedError, World
from planning.seats.orders import GroupPhase

_ON_GPU = frozenset({"Running", "Locked"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. `settle`: for a driver's call that goes on; `free`: for memory that is to become free; `start`: for a
    container to start and serve; `serve`: for a woken server to answer. `again`: until what failed is tried again.
    """

    settle: float = 900.0
    free: float = 20.0
    start: float = 900.0
    serve: float = 60.0
    again: float = 5.0


@dataclass(slots=True)
class Timed:
    """How long each stage of a switch took, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 4)


@dataclass(frozen=True, slots=True)
class Cleared:
    """How the first half of a switch ended. `next` is the seat that is to get the slot, '' where all stays as it is;
    the rest as `Turned` has it.
    """

    phase: GroupPhase
    active: str = ""
    next: str = ""
    reason: str = ""
    within: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Filled:
    """How the second half ended; `active` is '' where that did not come off, and `reason` why."""

    phase: GroupPhase
    active: str = ""
    reason: str = ""
    within: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


class _Quarantine(Exception):
    """The group must be left alone until somebody, or time, has mended it. The text is a sentence."""


class Group:
    """The switching of one group, for one run of its workflow (`epoch`); one at a time."""

    def __init__(self, name: str, epoch: int, slots: Slots, world: World, patience: Patience) -> None:
        self._name, self._epoch = name, epoch
        self._slots, self._world, self._patience = slots, world, patience
        self.doing = "reading the hardware"

    # ---- the two halves of a switch

    async def clear(self) -> Cleared:
        """Raises SupersededError where another run of the workflow took over."""
        timed = Timed()
        try:
            with timed.stage("settle"):
                slot = await self._settle()
            if slot is None:
                return Cleared("Empty", gone=True)
            if slot.phase == "Starting":
                return await self._still_starting(slot)
            wanted = await self._world.choose(self._name, slot.seat)
            if not wanted.seat or wanted.seat == slot.seat:
                self._put(slot, reason=wanted.reason)
                return Cleared(slot.phase, slot.seat, "", wanted.reason, wanted.within)
            left_alone = self._slots.slot(self._name).phase == "Quarantined" and not slot.seat
            # It stays what it is until that has passed: since when tells people how long.
            if left_alone and (why := await self._world.lacks(self._name, wanted.seat)):
                raise _Quarantine(f"{self._name} has no room for {wanted.seat}: {why}")
            if slot.seat and (kept := await self._vacate(slot, wanted.seat, timed)):
                return Cleared("Active", slot.seat, "", kept, self._patience.again, timed.seconds)
            self._put(slot, "VerifyFree", seat="", next=wanted.seat, reason=wanted.reason)
            return Cleared("VerifyFree", "", wanted.seat, wanted.reason, None, timed.seconds)
        except _Quarantine as why:
            return self._quarantined(str(why), timed)

    async def fill(self, seat: str) -> Filled:
        """Raises SupersededError where another run of the workflow took over."""
        timed = Timed()
        try:
            slot = self._slots.slot(self._name)
            if slot.phase != "VerifyFree" or slot.next != seat:
                return await self._after_all(seat, timed)
            with timed.stage("verify free"):
                await self._prove_free(seat)
            state = (await self._seat(seat)).state
            if state == "Parked":
                try:
                    await self._restore(slot, seat, timed)
                except LostError as lost:
                    await self._discard(seat, str(lost))
                    state = "Waiting"
            if state in ("Waiting", "Absent") and not await self._start(slot, seat, timed):
                reason = await self._unstarted(seat, timed.seconds["start"])
                self._put(slot, "Empty", seat="", next="", reason=reason)
                return Filled("Empty", "", reason, self._patience.again, timed.seconds)
            return await self._verify_serving(seat, timed)
        except UntouchedError as why:
            self._put(self._slots.slot(self._name), "Empty", seat="", next="", reason=str(why))
            return Filled("Empty", "", f"{seat} could not be woken: {why}", self._patience.again, timed.seconds)
        except UnsettledError as why:
            return Filled("Restoring", "", str(why), 0.0, timed.seconds)
        except _Quarantine as why:
            told = self._quarantined(str(why), timed)
            return Filled(told.phase, "", told.reason, told.within, told.seconds)

    # ---- what was left

    async def _settle(self) -> Slot | None:
        """The slot as the hardware has it, with nothing left halfway; None where there is no such group."""
        seats = await self._still()
        if seats is None:
            self._slots.forget(self._name, self._epoch)
            return None
        slot = self._slots.slot(self._name)
        for seat, look in seats.items():
            if look.state == "Failed":
                await self._discard(seat, look.told or f"its driver gave {seat} up")
        on_gpu = sorted(seat for seat, look in seats.items() if look.state in _ON_GPU)
        # Who has the slot by the ledger keeps it; where it was lost with the ledger, whoever serves has it.
        keeper = slot.seat if slot.seat in on_gpu else next((seat for seat in on_gpu if seats[seat].serves), "")
        keeper = keeper or (on_gpu[0] if on_gpu else "")
        for seat in on_gpu:
            if seat != keeper:
                await self._remove(seat, keeper)
        if keeper:
            return await self._kept_by(keeper, seats[keeper], slot)
        if slot.phase in ("Active", "Starting") and seats.get(slot.seat, SeatLook("Absent")).state == "Waiting":
            # Its container ended and starts again: the slot is still its own.
            return self._put(slot, "Starting", next="")
        if slot.phase == "Quarantined":
            return replace(slot, phase="Empty", seat="", next="")  # once that is known to have passed it is written
        return self._put(slot, "Empty", seat="", next="")

    async def _kept_by(self, seat: str, look: SeatLook, slot: Slot) -> Slot:
        """The slot of the one seat that is on the GPUs."""
        if look.state == "Locked":
            await self._unlock(seat)
        if slot.phase in ("Starting", "Restoring", "VerifyServing"):
            if not look.serves:
                return self._put(slot, "Starting", seat=seat, next="")
            slot = replace(slot, switches=slot.switches + 1)
        self._slots.check(self._name, self._epoch)
        await self._world.open(seat, self._epoch)
        return self._put(slot, "Active", seat=seat, next="")

    async def _still(self) -> Mapping[str, SeatLook] | None:
        """The seats, as soon as no driver's call goes on."""
        self.doing = "reading the hardware"
        deadline = time.monotonic() + self._patience.settle
        while True:
            seats = await self._world.look(self._name)
            changing = sorted(seat for seat, look in (seats or {}).items() if look.state == "Changing")
            if not changing:
                return seats
            if time.monotonic() > deadline:
                told = seats[changing[0]].told if seats is not None else ""
                raise _Quarantine(
                    f"A driver's call on {', '.join(changing)} has not ended for {self._patience.settle:.0f} s "
                    f"({told or 'nothing more is known'}). It is not broken off, for that can lose the server."
                )
            await self._world.changed(self._name, 1.0)

    async def _unlock(self, seat: str) -> None:
        self._slots.check(self._name, self._epoch)
        try:
            await self._world.wake(seat, self._epoch)
        except LostError as lost:
            await self._discard(seat, str(lost))
        except (UntouchedError, UnsettledError) as why:
            raise _Quarantine(f"{seat} was left locked and cannot be unlocked: {why}") from why

    async def _remove(self, seat: str, keeper: str) -> None:
        """One that is on the GPUs without having the slot."""
        _log.warning("%s is on the GPUs of %s, whose slot has %s: it is parked", seat, self._name, keeper)
        self._slots.check(self._name, self._epoch)
        await self._world.close(seat, self._epoch)
        try:
            await self._world.park(seat, self._epoch)
        except LostError as lost:
            await self._discard(seat, str(lost))
        except (UntouchedError, UnsettledError) as why:
            raise _Quarantine(
                f"{seat} and {keeper} are on the GPUs of {self._name} both, and {seat} cannot be parked: {why}"
            ) from why

    # ---- clear

    async def _vacate(self, slot: Slot, heir: str, timed: Timed) -> str:
        """Drains and parks whoever has the slot. Why it keeps it, '' if it does not."""
        seat = slot.seat
        self.doing = f"draining {seat} for {heir}"
        self._put(slot, "Draining", next=heir, reason=f"{heir} is to have the slot")
        self._slots.check(self._name, self._epoch)
        await self._world.close(seat, self._epoch)
        with timed.stage("drain"):
            busy = await self._world.drain(seat, self._epoch)
        if busy:
            return await self._keep(slot, f"{seat} was not parked: {busy}")
        self.doing = f"parking {seat} for {heir}"
        self._put(slot, "Parking", next=heir, reason=f"{heir} is to have the slot")
        self._slots.check(self._name, self._epoch)
        try:
            with timed.stage("park"):
                moved = await self._world.park(seat, self._epoch)
            timed.seconds.update({f"park: {name}": seconds for name, seconds in moved.seconds.items()})
        except UntouchedError as why:
            return await self._keep(slot, f"{seat} was not parked: {why}")
        except LostError as lost:
            await self._discard(seat, str(lost))
        except UnsettledError:
            after = (await self._still() or {}).get(seat, SeatLook("Absent"))
            if after.state in _ON_GPU:
                return await self._keep(slot, f"{seat} was not parked: {after.told or 'it is on the GPUs again'}")
            if after.state == "Failed":
                await self._discard(seat, after.told)
        return ""

    async def _keep(self, slot: Slot, why: str) -> str:
        if (await self._seat(slot.seat)).state == "Locked":
            await self._unlock(slot.seat)
        self._put(slot, "Active", next="", reason=why)
        await self._world.open(slot.seat, self._epoch)
        return why

    async def _prove_free(self, seat: str) -> None:
        self.doing = f"proving that {self._name} has room for {seat}"
        deadline = time.monotonic() + self._patience.free
        while why := await self._world.lacks(self._name, seat):
            if time.monotonic() > deadline:
                raise _Quarantine(f"{self._name} has no room for {seat}: {why}")
            await self._world.changed(self._name, 0.2)

    async def _still_starting(self, slot: Slot) -> Cleared:
        """A container that has the slot and was not seen to serve: it goes on with its time, others wait."""
        waited = time.time() - slot.since
        if waited < self._patience.start and await self._started(slot.seat, self._patience.start - waited):
            self._put(slot, "Active", reason="it serves")
            self._slots.check(self._name, self._epoch)
            await self._world.open(slot.seat, self._epoch)
            return Cleared("Active", slot.seat, reason=f"{slot.seat} serves", within=0.0)
        reason = await self._unstarted(slot.seat, time.time() - slot.since)
        self._put(slot, "Empty", seat="", reason=reason)
        return Cleared("Empty", reason=reason, within=0.0)

    async def _unstarted(self, seat: str, waited: float) -> str:
        """Takes the slot from a seat that did not come to serve. Why, for people."""
        look = await self._seat(seat)
        if look.state in ("Absent", "Waiting"):
            left = "nobody holds it any more" if look.state == "Absent" else "its container does not run"
            return f"{seat} had the slot for {waited:.0f} s, and {left}. {look.told}".strip()
        why = f"{seat} had the slot for {waited:.0f} s and did not come to serve"
        await self._discard(seat, why)
        return f"{why}. {look.told}".strip()

    # ---- fill

    async def _after_all(self, seat: str, timed: Timed) -> Filled:
        """The slot is not clear for it (any more): what was begun before is brought to its end."""
        slot = await self._settle()
        phase: GroupPhase = slot.phase if slot is not None else "Empty"
        active = slot.seat if slot is not None and phase == "Active" else ""
        told = f"{seat} serves" if active == seat else f"the slot was not clear for {seat} any more"
        return Filled(phase, active, f"{told}.", 0.0, timed.seconds)

    async def _restore(self, slot: Slot, seat: str, timed: Timed) -> None:
        self.doing = f"waking {seat}"
        self._put(slot, "Restoring", seat=seat, next="", reason=slot.reason)
        self._slots.check(self._name, self._epoch)
        with timed.stage("wake"):
            moved = await self._world.wake(seat, self._epoch)
        timed.seconds.update({f"wake: {name}": seconds for name, seconds in moved.seconds.items()})

    async def _start(self, slot: Slot, seat: str, timed: Timed) -> bool:
        """Whether its container came to serve in time."""
        self.doing = f"waiting for {seat} to start"
        self._put(slot, "Starting", seat=seat, next="", reason=slot.reason)
        with timed.stage("start"):
            return await self._started(seat, self._patience.start)

    async def _started(self, seat: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            look = await self._seat(seat)
            if look.serves and look.state == "Running":
                return True
            # One that ended after it got the slot the kubelet starts again, after a pause: nobody waits for that.
            failed = look.state == "Waiting" and look.ended > self._slots.slot(self._name).since
            if look.state == "Absent" or failed or time.monotonic() > deadline:
                return False
            await self._world.changed(self._name, 1.0)

    async def _verify_serving(self, seat: str, timed: Timed) -> Filled:
        self.doing = f"waiting for {seat} to answer"
        slot = self._put(self._slots.slot(self._name), "VerifyServing", seat=seat, next="")
        with timed.stage("verify serving"):
            serves = await self._started(seat, self._patience.serve)
        if not serves:
            why = f"{seat} did not answer within {self._patience.serve:.0f} s after it was woken"
            await self._discard(seat, why)
            self._put(slot, "Starting", reason=why)
            return Filled("Starting", "", f"{why}; it starts cold.", 0.0, timed.seconds)
        slot = self._put(slot, "Active", reason=f"{seat} serves", switches=slot.switches + 1)
        self._slots.check(self._name, self._epoch)
        await self._world.open(seat, self._epoch)
        wanted = await self._world.choose(self._name, seat)
        within = 0.0 if wanted.seat not in ("", seat) else wanted.within
        return Filled("Active", seat, f"{seat} serves.", within, timed.seconds)

    # ---- common

    async def _seat(self, seat: str) -> SeatLook:
        return (await self._world.look(self._name) or {}).get(seat, SeatLook("Absent"))

    async def _discard(self, seat: str, why: str) -> None:
        _log.warning("the server of %s must start cold: %s", seat, why)
        self._slots.check(self._name, self._epoch)
        try:
            await self._world.discard(seat, self._epoch, why)
        except (UntouchedError, UnsettledError) as still:
            raise _Quarantine(f"The server of {seat} must end ({why}), and does not: {still}") from still

    def _quarantined(self, why: str, timed: Timed) -> Cleared:
        slot = self._slots.slot(self._name)
        if slot.phase != "Quarantined":
            _log.warning("the group %s is left alone for now: %s", self._name, why)
        self._put(slot, "Quarantined", next="", reason=why)
        return Cleared("Quarantined", slot.seat, "", why, self._patience.again, timed.seconds)

    def _put(self, slot: Slot, phase: GroupPhase | None = None, **changes: object) -> Slot:
        changed = replace(slot, phase=phase or slot.phase, **changes)  # type: ignore[arg-type]
        return self._slots.put(changed, self._epoch, time.time())
