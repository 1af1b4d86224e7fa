"""Whose workflow is begun: each SeatMigration's that has not ended, and of one that has and cannot go."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from activities.migration_signatures import MigrationRef
from controller.migrations import MigrationDigest, MigrationWatch, migration_digest
from crds.seatmigration import ENDED, FINALIZER
from tests.controller.fake_temporal import UNAVAILABLE, FakeTemporal
from tests.controller.test_pokes import until


def raw(uid: str = "u", phase: str = "", **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "name": f"m-{uid}", "uid": uid} | meta,
        "status": {"phase": phase} if phase else None,
    }


def watch(temporal: FakeTemporal) -> MigrationWatch:
    return MigrationWatch(cast(Any, None), cast(Any, temporal))


def put(watched: MigrationWatch, body: dict[str, Any], version: int = 1) -> None:
    reflector = watched.migrations
    reflector._put(body["metadata"]["uid"], version, migration_digest(body))


def test_one_that_has_ended_concerns_nobody_but_whoever_has_to_let_it_go() -> None:
    assert migration_digest(raw()) == MigrationDigest(MigrationRef("team", "m-u", "u"), True)
    assert migration_digest(raw(phase="Switching")).open
    for phase in ENDED:
        assert not migration_digest(raw(phase=phase)).open
        assert not migration_digest(raw(phase=phase, finalizers=[FINALIZER])).open, "its workflow is about to"
        assert migration_digest(raw(phase=phase, finalizers=[FINALIZER], deletionTimestamp="now")).open
        assert not migration_digest(raw(phase=phase, finalizers=["other"], deletionTimestamp="now")).open


async def test_each_is_begun_once_and_again_by_a_sweep() -> None:
    temporal = FakeTemporal()
    watched = watch(temporal)
    running = asyncio.create_task(watched.run())
    put(watched, raw("a"))
    put(watched, raw("b", "Completed"))
    await until(lambda: len(temporal.started) == 1)
    put(watched, raw("a", "Starting"), 2)  # the same to us
    watched.sweep()
    await until(lambda: len(temporal.started) == 2)
    assert [id for id, _ in temporal.started] == ["seatmigration/a", "seatmigration/a"]
    running.cancel()


async def test_one_that_temporal_does_not_take_stays_due() -> None:
    temporal = FakeTemporal()
    temporal.away = UNAVAILABLE
    watched = watch(temporal)
    running = asyncio.create_task(watched.run())
    put(watched, raw("a"))
    await until(lambda: bool(watched.trouble))
    temporal.away = None
    await until(lambda: bool(temporal.started) and not watched.trouble, 5.0)
    running.cancel()
