"""A look sends orders for a moment only, and records what it has sent: the next one sends the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.client import Client

from activities import kernel_caches
from activities.cache import ClusterCache
from activities.kernel_caches import SENDING, KernelCaches
from kube.client import KubeClient
from kube.events import EventRecorder
from planning.caches.orders import CacheRef, NodeOrder
from planning.caches.rollout import Aim, Sent, Step

REF = CacheRef("TritonKernelCache", "ns", "c", "uid")
ORDERS = tuple(Sent(f"n{i}", "key", NodeOrder(1, "prepare", "r/i", "sha256:a")) for i in range(10))


class SlowTemporal:
    """Every order takes it so many seconds, of a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.started = seconds, 0.0, 0

    async def start_workflow(self, *_: Any, **__: Any) -> None:
        self.now += self.seconds
        self.started += 1


async def sent(temporal: SlowTemporal, step: Step, monkeypatch: pytest.MonkeyPatch) -> Step:
    clock = SimpleNamespace(monotonic=lambda: temporal.now)
    monkeypatch.setattr(kernel_caches, "time", clock)
    nothing = cast(ClusterCache, None), cast(KubeClient, None)
    look = KernelCaches(*nothing, cast(Client, temporal), cast(EventRecorder, None))
    return await look._send(REF, step)


async def test_what_there_was_no_time_for_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    temporal = SlowTemporal(SENDING / 4)
    taken = await sent(temporal, Step(Aim(), orders=ORDERS), monkeypatch)
    assert taken.orders == ORDERS[:5] and temporal.started == 5


async def test_one_is_always_sent_and_all_if_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await sent(SlowTemporal(SENDING * 2), Step(Aim(), orders=ORDERS), monkeypatch)).orders == ORDERS[:1]
    assert (await sent(SlowTemporal(0), Step(Aim(), orders=ORDERS), monkeypatch)).orders == ORDERS


async def test_nobody_looks_after_a_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await sent(SlowTemporal(SENDING), Step(Aim(), orders=ORDERS, over=True), monkeypatch)).orders == ORDERS
