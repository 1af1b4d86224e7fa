"""Seats are rebalanced on a real control plane: where a GPUSeatProfile asks for it, the server moves that is worth it,
or that is only said. Nodes, their seats and how much these are asked for are simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from activities.migration_signatures import rebalancing_id
from crds.gpuseatprofile import Rebalance
from kube.resources import GPUSEATPROFILES, SEATMIGRATIONS
from tests.application.seat_nodes import SimulatedSeats, simulated_seats
from tests.application.tenant import Tenant, eventually
from tests.application.test_seat_migrations import hears, pods, start
from tests.crds.test_gpuseatprofile import spec

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]


@asynccontextmanager
async def rebalanced(tenant: Tenant, node: SimulatedSeats, mode: Rebalance) -> AsyncIterator[None]:
    """Three servers share one group, each asked for most of the time, and nobody has a seat of the other."""
    for name in ("a", "b", "c"):
        await start(tenant, node, name)
    node.busy, node.rebalance = {"a": 0.9, "b": 0.9, "c": 0.9}, mode
    body: dict[str, Any] = {
        "metadata": {"name": tenant.namespace},
        "spec": spec() | {"nodeSelector": {"pool": tenant.namespace}, "rebalance": mode},
    }
    await tenant.kube.create(GPUSEATPROFILES, body)
    try:
        yield
    finally:
        node.rebalance = None
        await tenant.kube.delete(GPUSEATPROFILES, tenant.namespace)
        async with asyncio.timeout(60):
            await tenant.temporal.get_workflow_handle(rebalancing_id("default")).result()


async def test_one_of_a_group_that_is_too_full_moves_and_only_once(tenant: Tenant) -> None:
    async with simulated_seats(tenant, "n", ("G01", "G23")) as node, rebalanced(tenant, node, "Perform"):

        async def moved() -> bool:
            found, _ = await tenant.kube.list(SEATMIGRATIONS, tenant.namespace)
            return [each.get("status", {}).get("phase") for each in found] == ["Completed"]

        await eventually(moved, 90, lambda: f"nothing moved: {node.held}")
        (ordered,) = (await tenant.kube.list(SEATMIGRATIONS, tenant.namespace))[0]
        assert ordered["spec"] == {"pod": "c", "to": {"group": "G23", "node": node.node}, "deadlineSeconds": 600}
        assert "270 % of what it can be awake" in ordered["metadata"]["annotations"]["kyb.ai/because"]
        now = await pods(tenant)
        (new,) = now.keys() - {"a", "b"}
        assert [seat for seat, who in node.held.items() if who[1] == new] == ["kyb-G23-s1"]
        await hears(tenant, "Pod", "c", "SeatMoveOrdered", "SeatMigrating", "SeatMigrated")
        # What has moved is as busy as before. Two of nearly a whole each would gain nothing by another move.
        node.busy = {**node.busy, new: 0.9}
        await asyncio.sleep(8)  # two looks
        assert len((await tenant.kube.list(SEATMIGRATIONS, tenant.namespace))[0]) == 1


async def test_a_move_that_is_only_to_be_proposed_is_said_and_not_done(tenant: Tenant) -> None:
    async with simulated_seats(tenant, "n", ("G01", "G23")) as node, rebalanced(tenant, node, "Propose"):
        await hears(tenant, "Pod", "c", "SeatMoveProposed", seconds=60)
        assert sorted(await pods(tenant)) == ["a", "b", "c"]
        assert not (await tenant.kube.list(SEATMIGRATIONS, tenant.namespace))[0]
