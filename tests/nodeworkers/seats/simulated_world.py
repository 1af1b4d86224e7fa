"""A simulated node for switching: seats that are on the GPUs or are not, calls that fail as drivers' do, a process that
is killed at any step, and a judge that knows at every moment who is on the GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nodeworkers.seats.slots import Slots
from nodeworkers.seats.world import LostError, Moved, SeatLook, State, UnsettledError, UntouchedError, Wanted

Fault = Literal["untouched", "locked", "killed while locked", "lost", "unsettled", "hangs", "failed"]
GROUP = "G01"


class KilledError(BaseException):
    """The node's process ends here; what it began goes on without it, or not."""


@dataclass
class Server:
    """A seat's server. `ends_as`: what a call that goes on becomes, after `ends_in` more looks."""

    state: State = "Absent"
    serves: bool = False
    held: bool = False
    ends_as: State = "Parked"
    ends_in: int = 0
    starts: bool = True


@dataclass
class SimulatedWorld:
    """`wanted`: whose turn it is, '' to leave all as it is. `faults`: what the next call of this kind meets.
    `die_at`: the call, counted from now on, at which the process is killed, before or after it was carried out.
    """

    slots: Slots
    servers: dict[str, Server] = field(default_factory=dict)
    wanted: str = ""
    busy: str = ""
    foreign: str = ""
    gone: bool = False
    faults: dict[str, Fault] = field(default_factory=dict)
    die_at: int = 0
    die_after: bool = False
    violations: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    passed: Callable[[], None] = lambda: None

    # ---- for tests

    def add(self, seat: str, state: State = "Waiting") -> Server:
        self.servers[seat] = Server(state, serves=state == "Running", held=state == "Parked")
        return self.servers[seat]

    def on_gpu(self) -> list[str]:
        return [seat for seat, each in self.servers.items() if each.state in ("Running", "Locked", "Changing")]

    def judge(self) -> None:
        if len(there := self.on_gpu()) > 1:
            self.violations.append(f"{', '.join(there)} are on the GPUs")
        for seat, each in self.servers.items():
            if each.state == "Running" and not each.held and self.slots.slot(GROUP).seat not in ("", seat):
                self.violations.append(f"requests are passed on to {seat}, which has not the slot")
            if each.state in ("Locked", "Parked", "Changing") and not each.held:
                self.violations.append(f"requests are passed on to {seat}, which is {each.state}")

    def kubelet(self) -> None:
        """Starts what may start."""
        for seat, each in self.servers.items():
            if each.state == "Waiting" and each.starts and self.slots.may_start(GROUP, seat):
                each.state, each.serves = "Running", True
        self.judge()

    # ---- the protocol

    async def look(self, group: str) -> Mapping[str, SeatLook] | None:
        if self.gone:
            return None
        for each in self.servers.values():
            if each.state == "Changing":
                each.ends_in -= 1
                if each.ends_in <= 0:
                    each.state, each.serves = each.ends_as, each.ends_as == "Running"
        self.judge()
        return {seat: SeatLook(each.state, each.serves, "told") for seat, each in self.servers.items()}

    async def changed(self, group: str, seconds: float) -> None:
        self.kubelet()
        self.passed()
        await asyncio.sleep(0)

    async def choose(self, group: str, active: str) -> Wanted:
        return Wanted(self.wanted if self.wanted != active else "", "because")

    async def close(self, seat: str, epoch: int) -> None:
        self._act("close", seat)
        self.servers[seat].held = True
        self._acted()

    async def drain(self, seat: str, epoch: int) -> str:
        self._act("drain", seat)
        return self.busy

    async def pass_on(self, seat: str, pod: str, address: str) -> str:
        self._act("pass on", seat)
        return self.busy

    async def open(self, seat: str, epoch: int) -> None:
        self._act("open", seat)
        self.servers[seat].held = False
        self._acted()

    async def park(self, seat: str, epoch: int) -> Moved:
        self._act("park", seat)
        server = self.servers[seat]
        if server.state not in ("Running", "Locked"):
            self.violations.append(f"{seat} is parked while it is {server.state}")
        if not server.held:
            self.violations.append(f"{seat} is parked while requests are passed on to it")
        self._meet("park", server, "Parked")
        server.state, server.serves = "Parked", False
        self._acted()
        return Moved(1, (), {"checkpoint": 0.1})

    async def wake(self, seat: str, epoch: int) -> Moved:
        self._act("wake", seat)
        server = self.servers[seat]
        if server.state not in ("Parked", "Locked"):
            self.violations.append(f"{seat} is woken while it is {server.state}")
        if server.state == "Parked" and (self.foreign or [each for each in self.on_gpu() if each != seat]):
            self.violations.append(f"{seat} is woken without room")
        self._meet("wake", server, "Running")
        server.state, server.serves = "Running", True
        self._acted()
        return Moved(1, (), {"restore": 0.1})

    async def lacks(self, group: str, seat: str) -> str:
        others = [each for each in self.on_gpu() if each != seat]
        return self.foreign or (f"{others[0]} is there" if others else "")

    async def discard(self, seat: str, epoch: int, why: str) -> None:
        self._act("discard", seat)
        self.servers[seat].state, self.servers[seat].serves = "Waiting", False
        self._acted()

    def _act(self, name: str, seat: str) -> None:
        self.calls.append(f"{name} {seat}")
        if self.die_at:
            self.die_at -= 1
            if not self.die_at and not self.die_after:
                raise KilledError

    def _acted(self) -> None:
        self.judge()
        if self.die_after and not self.die_at:
            self.die_after = False
            raise KilledError

    def _meet(self, name: str, server: Server, becomes: State) -> None:
        match self.faults.pop(name, None):
            case "untouched":
                raise UntouchedError("the driver is busy")
            case "locked" if name == "park":
                server.state, server.serves = "Locked", False
                raise UntouchedError("its memory could not be copied")
            case "killed while locked" if name == "park":
                server.state, server.serves = "Locked", False
                raise KilledError
            case "lost":
                server.state, server.serves = "Failed", False
                raise LostError("restore failed")
            case "unsettled":
                server.state, server.serves, server.ends_as, server.ends_in = "Changing", False, becomes, 3
                raise UnsettledError("nobody answered")
            case "failed":
                server.state, server.serves, server.ends_as, server.ends_in = "Changing", False, "Failed", 2
                raise UnsettledError("nobody answered")
            case "hangs":
                server.state, server.serves, server.ends_in = "Changing", False, 10**9
                raise UnsettledError("nobody answered")
