"""What switching needs of a node, and nothing else: the seats of a group as they are, and a few things to do to them.

The seam between the sequence of a switch (`switching.py`) and how its steps are carried out: by drivers, engines, the
proxy and the container runtime, or by a simulated node in tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

State = Literal["Absent", "Waiting", "Running", "Locked", "Parked", "Changing", "Failed"]
"""Of a seat's server, as its processes, its driver and the container runtime have it now.

Absent: nobody holds the seat. Waiting: a pod holds it whose container does not run. Running: it has memory of the GPUs,
or may take some at any moment. Locked: its calls wait, its memory is still on the GPUs. Parked: it has none, and cannot
take any. Changing: a driver's call goes on. Failed: the driver gave it up; only its end helps.
"""


class UntouchedError(Exception):
    """It was not done, and nothing is another thing than before: it may be tried again later."""


class LostError(Exception):
    """The server's state is gone: it must end and start cold."""


class UnsettledError(Exception):
    """A call was begun of which nobody knows how it ends. It is read until it has, and never sent again blindly."""


@dataclass(frozen=True, slots=True)
class SeatLook:
    """One seat. `serves`: whether its server answers; `told`: what a person should know of its state; `ended`: when its
    container ended last, in seconds of the epoch, 0 if it never did.
    """

    state: State
    serves: bool = False
    told: str = ""
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Who is to have the slot by the policy: a seat, or '' where all stays as it is. `reason` for people, `within`:
    seconds after which to look again without news.
    """

    seat: str
    reason: str
    within: float | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """What a park or a wake moved: bytes (0 where nobody counted them), and seconds by stage. `processes`: whose memory
    that was, as pid and start.
    """

    bytes: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


class World(Protocol):
    """A node, as far as the switching of its groups goes. `park` and `wake` raise UntouchedError, LostError and
    UnsettledError. `epoch` is that of the workflow's run which acts: whoever has heard of a newer one refuses.
    """

    async def look(self, group: str) -> Mapping[str, SeatLook] | None:
        """The group's seats now, read from the hardware; None where the node has no such group."""

    async def changed(self, group: str, seconds: float) -> None:
        """Returns when a look may show something else, `seconds` from now at most."""

    async def choose(self, group: str, active: str) -> Wanted:
        """Whose turn it is."""

    async def close(self, seat: str, epoch: int) -> None:
        """From now on its requests are held."""

    async def drain(self, seat: str, epoch: int) -> str:
        """Waits until no request of it is in flight; why some still are after its time is over, '' if none is."""

    async def open(self, seat: str, epoch: int) -> None:
        """From now on its requests are passed on."""

    async def pass_on(self, seat: str, pod: str, address: str) -> str:
        """Requests for the seat of the pod with this UID go there once none is in flight; '' to its server again. Why
        all is as it was, '' where it was done.
        """

    async def park(self, seat: str, epoch: int) -> Moved:
        """Its memory leaves the GPUs."""

    async def wake(self, seat: str, epoch: int) -> Moved:
        """Its memory comes back, and its calls go on. Also for one that is locked."""

    async def lacks(self, group: str, seat: str) -> str:
        """Why the group's GPUs have no room for this seat now, '' if they have: by the driver's word on free memory and
        on who holds some.
        """

    async def discard(self, seat: str, epoch: int, why: str) -> None:
        """Ends a server whose state is gone; its container may start anew. Raises UntouchedError and UnsettledError
        where it does not end.
        """
