"""How a seat's server leaves its GPUs and comes back: what each backend (`backends/`, a file each) offers to whoever
switches seats.

A backend keeps nothing in mind. Each call reads how the server is, does what is still to be done from there, and gives
what it did: whoever takes over from a process that was killed calls the same function again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nodeworkers.seats.world import Moved

Held = Literal["Running", "Locked", "Parked", "Changing", "Failed", "Gone"]
"""How a server's processes are, as `world.State` tells them; Gone: none of them has anything to do with GPUs (yet, or
any more)."""


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """By its pid in the host's namespace and when it started, in clock ticks since boot (field 22 of /proc/PID/stat):
    a pid alone may be another's by now.
    """

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Server:
    """The server of a seat. `cards`: UUIDs of its group's GPUs, in order; `processes`: all of its container;
    `parked`: those of them that were parked, where somebody wrote it down: each is needed to wake it. `address`:
    "ip:port" where it answers HTTP, '' where it has no port; `had`: bytes that it had on its GPUs when
    parking it was begun last, 0 if it never was.
    """

    seat: str
    cards: Sequence[str]
    processes: Sequence[Process]
    parked: Sequence[Process] = ()
    address: str = ""
    had: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """`device_bytes` it has on its GPUs, `host_bytes` of that kept in host memory, each 0 where nobody knows; `told` is
    a sentence for people where there is something to say.
    """

    held: Held
    device_bytes: int = 0
    host_bytes: int = 0
    told: str = ""


class Backend(Protocol):
    """One way to park. `epoch` fences: whoever carries a call out refuses one that is older than the newest it heard.
    `park` and `wake` raise what `world` has: UntouchedError, LostError, UnsettledError. They may be cancelled at any
    moment, which breaks no driver's call off.
    """

    async def read(self, server: Server) -> Reading:
        """How it is; changes nothing."""

    async def park(self, server: Server, epoch: int) -> Moved:
        """Its memory leaves the GPUs. One that is parked already is left as it is."""

    async def wake(self, server: Server, epoch: int, devices: Mapping[str, str] | None = None) -> Moved:
        """Its memory comes back and its calls go on, on other cards where `devices` (UUID it had -> UUID it gets) says
        so. One that runs is left as it is.
        """
