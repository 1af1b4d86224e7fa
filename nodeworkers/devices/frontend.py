"""What the allocation core is to its front ends, the device plugin and DRA: their only way to devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from planning.devices.offers import Device, Injection


class Devices(Protocol):
    """All calls answer from memory or the node's ledger, at once, and never wait for hardware (law 3), but one:
    `before_start`.
    """

    @property
    def version(self) -> int:
        """Another number whenever `offered` says something else."""

    def offered(self) -> Mapping[str, tuple[Device, ...]]:
        """The devices of each resource, sorted by id. A device that vanished while somebody holds it stays, unhealthy.
        A resource that had devices since this process started stays, with none.
        """

    async def changed(self, version: int) -> int:
        """Waits until `version` is not the present one any more, 100 ms at least after the last change; the new one."""

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        """The best `size` of the available devices, with all that it must have; never raises, and is soon done. Called
        in a thread beside the loop's, and so is `before_start`.
        """

    def allocate(self, resource: str, ids: Sequence[str], claim: str = "", admin: bool = False) -> Injection:
        """What a container gets with these devices; recorded in the ledger. `claim`: uid of the DRA claim, which may
        come for other devices as well and then has them all. The same devices may be asked for time and again.
        `admin`: to look at them, whoever has them and however they are; nothing is recorded. Raises Refused, or Held
        where it may be had later.
        """

    def before_start(self, resource: str, ids: Sequence[str]) -> None:
        """May a container with these devices start (again)? Where cards are reset before, that takes seconds, and ends
        within 25. Raises Refused.
        """

    def holds(self, claim: str) -> bool:
        """Whether a DRA claim has devices."""

    def release(self, claim: str) -> None:
        """A DRA claim's devices are given back; a claim that nobody knows is one that was given back before."""
