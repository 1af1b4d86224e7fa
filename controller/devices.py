"""Watches what nodes say of their devices, and GPUSeatProfiles, and pokes the workflow that shows all of it; begins the
one that rebalances seats where a profile asks for that.

A part of the leader's term. It decides nothing. A fleet that starts says a thousand things at once: they wait for each
other, and are one poke.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from opentelemetry import metrics
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from activities.device_signatures import DEVICES_WORKFLOW, DevicesState, devices_attributes, devices_id
from activities.messages import Poke
from activities.migration_signatures import (
    SEAT_REBALANCING_WORKFLOW,
    RebalancingState,
    rebalancing_attributes,
    rebalancing_id,
)
from activities.signatures import TASK_QUEUE, Versions
from controller.digests import NodeDigest
from controller.outage import ANSWER, TEMPORAL_AWAY, reason
from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import GPUSEATPROFILES, NODEDEVICES
from planning.devices.fleet import held_seats
from planning.podspecs import mapping
from workflows.placement import newest

log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds that news waits for company
APART = 5.0  # and that pokes are apart: a node looks at its own devices every 2 s, a thousand of them all the time
LONGEST_PAUSE = 15.0

_sent = metrics.get_meter("berth.controller").create_counter(
    "berth_device_pokes_sent", description="Pokes of the workflow of devices that Temporal took"
)


class DeviceWatch:
    """`run` watches and pokes until cancelled; `node_changed` is told of nodes by whoever watches them."""

    def __init__(self, kube: KubeClient, temporal: Client, *, pool: str = "default") -> None:
        self._temporal = temporal
        self._pool = pool
        self._due: Versions | None = None
        self._wake = asyncio.Event()
        self.trouble = ""
        self.seat_profiles: Reflector[tuple[int, bool]] = Reflector(
            kube, GPUSEATPROFILES, project=_asked, on_change=partial(self._changed, "gpuseatprofiles")
        )
        self.node_devices: Reflector[int] = Reflector(
            kube, NODEDEVICES, project=_told, on_change=partial(self._changed, "nodedevices")
        )

    @property
    def reflectors(self) -> dict[str, Reflector[Any]]:
        return {"gpuseatprofiles": self.seat_profiles, "nodedevices": self.node_devices}

    def sweep(self) -> None:
        """For a new term, for Temporal that came back, and from time to time; an installation without devices has no
        such workflow.
        """
        if self.seat_profiles.items or self.node_devices.items:
            self._poke({})

    def node_changed(self, before: NodeDigest | None, now: NodeDigest | None, version: int) -> None:
        """Labels say which GPUSeatProfile is a node's, and somebody may have removed one of berth's. A node that goes
        takes its NodeDevices along, and that is heard of.
        """
        others = now is not None and (before is None or before.labels != now.labels)
        if others and (self.seat_profiles.items or self.node_devices.items):
            self._poke({"nodes": version})

    async def run(self) -> None:
        failures = 0
        while True:
            await self._wake.wait()
            await asyncio.sleep(PAUSE)
            self._wake.clear()
            if await self._deliver():
                if failures:
                    self.sweep()  # Temporal may have come back without its data
                failures, self.trouble = 0, ""
                await asyncio.sleep(APART)
                continue
            failures += 1
            await asyncio.sleep(min(LONGEST_PAUSE, 0.5 * 2.0 ** min(failures, 10)))

    async def flush(self, seconds: float) -> None:
        """Tells once what was seen and not told yet, `seconds` at most: the next leader sweeps."""
        try:
            async with asyncio.timeout(seconds):
                await self._deliver()
        except TimeoutError:
            log.warning("a poke of the workflow of devices is left to the next leader's sweep")

    def _changed(self, kind: str, change: Change[Any]) -> None:
        if change.old != change.new:
            self._poke({kind: change.resource_version})

    def _poke(self, seen: Versions) -> None:
        self._due = newest(self._due or {}, seen)
        self._wake.set()

    async def _rebalance(self) -> None:
        await self._temporal.start_workflow(
            SEAT_REBALANCING_WORKFLOW,
            RebalancingState(self._pool),
            id=rebalancing_id(self._pool),
            task_queue=TASK_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            search_attributes=rebalancing_attributes(self._pool),
            static_summary=f"Which seats of pool {self._pool} should move",
            rpc_timeout=ANSWER,
        )

    async def _deliver(self) -> bool:
        """False if Temporal did not take it: it stays due."""
        if self._due is None:
            return True
        seen, self._due = self._due, None
        taken = False
        try:
            await self._temporal.start_workflow(
                DEVICES_WORKFLOW,
                DevicesState(self._pool),
                id=devices_id(self._pool),
                task_queue=TASK_QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                search_attributes=devices_attributes(self._pool),
                static_summary=f"What nodes of pool {self._pool} say of their devices",
                start_signal="poke",
                start_signal_args=[Poke(seen)],
                rpc_timeout=ANSWER,
            )
            if any(rebalance for _, rebalance in self.seat_profiles.items.values()):
                await self._rebalance()
            taken = True
            _sent.add(1)
        except TEMPORAL_AWAY as away:
            if not self.trouble:
                log.warning("Temporal did not take a poke about devices: %s; trying again", reason(away))
            self.trouble = reason(away)
        finally:
            if not taken:
                self._poke(seen)
        return taken


def _asked(raw: Mapping[str, Any]) -> tuple[int, bool]:
    """Of a GPUSeatProfile: its generation, and whether it asks for seats to be rebalanced."""
    generation = int((raw.get("metadata") or {}).get("generation") or 0)
    return generation, bool(mapping(raw.get("spec")).get("rebalance"))


def _told(raw: Mapping[str, Any]) -> int:
    """Something that is another where what is shown elsewhere is: not health, and of who holds what the seats."""
    status = mapping(raw.get("status"))
    return hash((repr(status.get("seats")), repr(status.get("labels")), held_seats(raw)))
