"""Who holds a node's seats: which container of which pod, and what it says of its server. For whoever looks at a group,
parks and wakes.

A seat is its device id. That a pod has it the kubelet tells; which processes are its, the container runtime does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from crds.gpuseatprofile import Rebalance
from nodeworkers.seats.backend import Process, Server
from planning.seats.group import Policy
from planning.seats.pod_settings import PodSettings


@dataclass(frozen=True, slots=True)
class Tenant:
    """A container that has a seat. `running`: its first process is there, and `processes` are all of it; `told`: why it
    does not run, or what is wrong with it, '' for nothing. `began`: when the pod was made, and `ended` when
    its container ended last (0: never), in seconds of the epoch; `address`: the pod's.
    """

    seat: str
    cards: Sequence[str]
    namespace: str
    pod: str
    container: str
    uid: str = ""
    id: str = ""
    running: bool = False
    processes: Sequence[Process] = ()
    address: str = ""
    began: float = 0.0
    settings: PodSettings = field(default_factory=PodSettings)
    told: str = ""
    ended: float = 0.0

    def server(self, parked: Sequence[Process] = (), had: int = 0) -> Server:
        """As backends take it; `parked`: the processes of it that were parked, `had`: bytes that these had."""
        return Server(self.seat, self.cards, self.processes, parked, self.endpoint, had)

    @property
    def endpoint(self) -> str:
        """Where its server listens, '' where it does not, or has no address yet."""
        if not self.settings.port or not self.address:
            return ""
        return (
            f"[{self.address}]:{self.settings.port}" if ":" in self.address else f"{self.address}:{self.settings.port}"
        )


@dataclass(frozen=True, slots=True)
class GroupTenants:
    """A group: its GPUs' UUIDs in order, its seats with who holds each (None: nobody), and its policy.
    `rebalance`: whether servers may be moved to other groups.
    """

    group: str
    cards: Sequence[str]
    seats: Mapping[str, Tenant | None]
    policy: Policy = field(default_factory=Policy)
    zone: str = "UTC"
    rebalance: Rebalance | None = None


class Tenants(Protocol):
    """One node's."""

    def groups(self) -> Sequence[str]:
        """All groups that have seats, sorted."""

    async def of(self, group: str, *, anew: bool = False) -> GroupTenants | None:
        """The group as it is, by a look of a moment ago at most, with `anew` by one of now; None where the node has no
        such group.
        """
