"""Nodes whose seats are simulated: pods that kwok runs get seats as a node's process would tell, and requests are
diverted by nobody but on paper. For tests of what the control plane does with seats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from temporalio import activity
from temporalio.worker import Worker

from berth.process import ProcessOptions, connect_temporal
from crds.gpuseatprofile import Rebalance
from kube.resources import GPUSEATGROUPS, NODES, PODS
from planning.seats.endpoints import PORT_ANNOTATION
from planning.seats.orders import DIVERT, PREFER, Divert, Diverted, Preferred, seat_queue
from planning.seats.status import GroupPicture, SeatPicture, document, object_name, status
from tests.application.tenant import Tenant

SEAT = "kyb.ai/gpu-2x-seat"
SEATS = 4  # of a group
STARTS = "start-in"  # annotation of a pod: the group in which the simulated kubelet starts it, whoever is preferred
PORTS = 23_000


@dataclass
class SimulatedSeats:
    """One node's. `starts`: whether servers that have a seat come to serve; `why_not`: what a diversion meets."""

    tenant: Tenant
    node: str
    groups: tuple[str, ...]
    starts: bool = True
    why_not: str = ""
    busy: Mapping[str, float] = field(default_factory=dict)  # by pod
    rebalance: Rebalance | None = None
    preferred: str = ""
    held: dict[str, tuple[str, str]] = field(default_factory=dict)  # seat: namespace, pod
    diverted: dict[str, str] = field(default_factory=dict)  # seat: where to
    asked: list[Divert] = field(default_factory=list)

    @activity.defn(name=PREFER)
    async def prefer(self, preferred: Preferred) -> None:
        self.preferred = preferred.group

    @activity.defn(name=DIVERT)
    async def divert(self, order: Divert) -> Diverted:
        self.asked.append(order)
        if order.address and self.why_not:
            return Diverted(self.why_not)
        self.diverted[order.seat] = order.address
        await self.tell()
        return Diverted()

    def fill(self, group: str, leave: int = 0) -> None:
        """Seats of others, so that so many are left."""
        for number in range(SEATS, leave, -1):
            self.held.setdefault(f"kyb-{group}-s{number}", (self.tenant.namespace, f"other-{number}"))

    async def look(self) -> None:
        """Gives seats to pods that run here, and takes back those of pods that are gone."""
        pods, _ = await self.tenant.kube.list(PODS, field_selector=f"spec.nodeName={self.node}")
        there = {(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in pods}
        for seat, who in list(self.held.items()):
            if who not in there and not who[1].startswith("other-"):
                del self.held[seat]
                self.diverted.pop(seat, None)
        for who, pod in there.items():
            annotations = pod["metadata"].get("annotations", {})
            if PORT_ANNOTATION in annotations and who not in self.held.values():
                group = annotations.get(STARTS) or self.preferred or self.groups[0]
                free = [f"kyb-{group}-s{n}" for n in range(1, SEATS + 1) if f"kyb-{group}-s{n}" not in self.held]
                if free:
                    self.held[free[0]] = who
        await self.tell()

    async def tell(self) -> None:
        for group in self.groups:
            seats = [self._seat(f"kyb-{group}-s{number}") for number in range(1, SEATS + 1)]
            body = {"status": {"seats": None} | status(self._picture(group, seats), 1_000_000.0)}
            name = object_name(self.node, group)
            await self.tenant.kube.merge_patch(GPUSEATGROUPS, name, None, body, subresource="status")

    def _picture(self, group: str, seats: list[SeatPicture]) -> GroupPicture:
        return GroupPicture(group, "Empty", seats=seats, gpus=2, window=60.0, rebalance=self.rebalance)

    def _seat(self, seat: str) -> SeatPicture:
        if seat not in self.held:
            return SeatPicture(seat, "Absent")
        _, group, number = seat.split("-")
        port = PORTS + 10 * self.groups.index(group) + int(number[1:])
        phase = "Parked" if self.starts else "Waiting"
        busy, diverted = self.busy.get(self.held[seat][1], 0.0), self.diverted.get(seat, "")
        return SeatPicture(seat, phase, (*self.held[seat], "server"), port, passed_on=diverted, busy=busy)

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def simulated_seats(tenant: Tenant, name: str, groups: tuple[str, ...]) -> AsyncIterator[SimulatedSeats]:
    """A node with these groups, and its worker."""
    node = await tenant.node(name, 0, offers={SEAT: SEATS * len(groups)})
    await tenant.usable(node)
    uid = (await tenant.kube.get(NODES, node))["metadata"]["uid"]
    for group in groups:
        await tenant.kube.create(GPUSEATGROUPS, document(node, uid, group))
    made, endpoints = SimulatedSeats(tenant, node, groups), tenant.stack.endpoints
    await made.look()
    there = ProcessOptions(temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace)
    temporal = await connect_temporal(there, lazy=False)
    async with Worker(temporal, task_queue=seat_queue(node), activities=[made.prefer, made.divert]):
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()


def server(name: str, node: str, **annotations: str) -> dict[str, Any]:
    """A pod with a seat."""
    meta = {"name": name, "labels": {"app": name}, "annotations": {PORT_ANNOTATION: "8000"} | annotations}
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [
            {
                "name": "server",
                "image": "none",
                "env": [{"name": "MODEL", "value": name}],
                "resources": {"limits": {SEAT: "1"}},
            }
        ],
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
