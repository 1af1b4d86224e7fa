"""Nodes whose process is simulated: they serve their task queues and answer orders about kernel caches as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from benchmarks import cache_agents
from berth.process import ProcessOptions, connect_temporal
from planning.caches.orders import PREPARE, REMOVE, NodeTask, Report
from stack import Endpoints


def is_ready(task: NodeTask) -> Report:
    """What a node answers with which all is well."""
    return Report(task.node, task.order.epoch, "ready", task.order.digest, "Verified", "signed by release")


@dataclass
class SimulatedAgent:
    """The process of one node. `answers` says what becomes of a digest, `pods` how many have the cache mounted;
    `orders` are all that came, in their order.
    """

    node: str
    answers: Callable[[NodeTask], Report] = is_ready
    pods: int = 0
    orders: list[NodeTask] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    serves: str = ""

    def __post_init__(self) -> None:
        self.gate.set()

    @activity.defn(name=PREPARE)
    async def prepare(self, task: NodeTask) -> Report:
        self.orders.append(task)
        while not self.gate.is_set():
            activity.heartbeat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gate.wait(), 1)
        report = self.answers(task)
        self.serves = report.serves or self.serves
        return replace(report, serves=self.serves)

    @activity.defn(name=REMOVE)
    async def remove(self, task: NodeTask) -> Report:
        self.orders.append(task)
        while self.pods and self.pods == task.pods:
            activity.heartbeat()
            await asyncio.sleep(0.1)
        outcome: Any = "busy" if self.pods else "removed"
        reason = "InUse" if self.pods else ""
        self.serves = self.serves if self.pods else ""
        return Report(self.node, task.order.epoch, outcome, self.serves, reason, f"{self.pods} pods", self.pods)

    def worker(self, temporal: Client) -> Worker:
        return cache_agents.node_worker(temporal, self.node, self.prepare, self.remove)


@contextlib.asynccontextmanager
async def serving(endpoints: Endpoints, agents: Iterable[SimulatedAgent]) -> AsyncIterator[None]:
    """The agents' queues are served within the block."""
    options = ProcessOptions(
        temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace
    )
    temporal = await connect_temporal(options, lazy=False)
    async with cache_agents.serving([agent.worker(temporal) for agent in agents]):
        yield
