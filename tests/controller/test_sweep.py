"""What a sweep finds, and when it believes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from controller.digests import JobDigest, WorkloadDigest
from controller.routing import Route
from controller.sweep import Suspect, by_workload, confirmed, expire, littered, repairs, tidy_tombstones
from kube.errors import Conflict, NotFound
from planning.model import Turn
from planning.naming import FINALIZER

NEW = WorkloadDigest("ns", "w", 1, finished=False, deleting=False, finalizer=False, caught_up=False, expires=None)
TOMBSTONE = replace(NEW, finished=True, caught_up=True, finalizer=True)
JOB = JobDigest("ns", "w-0", "u", "w", 0, "n1", ready=False, finished=False, deleting=False, uid="j")


class FakeKube:
    """Takes note of what is asked; `on_call` may change the world meanwhile, as watches do."""

    def __init__(self, objects: dict[str, dict[str, Any]] | None = None, on_call: Any = None) -> None:
        self.objects = objects or {}
        self.on_call = on_call
        self.deleted: list[tuple[str, str, str]] = []
        self.patched: list[tuple[str, dict[str, Any]]] = []
        self.conflicts = 0

    async def delete(
        self, resource: Any, name: str, namespace: str, *, uid: str, propagation: str = "", **_: Any
    ) -> None:
        self.deleted.append((name, uid, propagation))
        if self.on_call:
            self.on_call()

    async def get(self, resource: Any, name: str, namespace: str) -> dict[str, Any]:
        if name not in self.objects:
            raise NotFound("gone", status=404)
        return self.objects[name]

    async def merge_patch(self, resource: Any, name: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.conflicts:
            self.conflicts -= 1
            raise Conflict("changed", status=409)
        self.patched.append((name, body))
        return self.objects[name]


def stored(uid: str) -> dict[str, Any]:
    return {
        "metadata": {
            "uid": uid,
            "name": "w",
            "namespace": "ns",
            "resourceVersion": "7",
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": ["other", FINALIZER],
        },
        "spec": {"modelName": "m", "gpuCount": 1},
    }


def test_an_edit_that_nobody_answered_is_found_also_before_the_job_is_ready() -> None:
    waiting = replace(NEW, generation=2)
    assert [p.begin for p in repairs({"u": waiting}, by_workload([JOB]), set()).workloads] == [True]
    assert repairs({"u": replace(waiting, caught_up=True)}, by_workload([JOB]), set()).workloads == ()
    assert repairs({"u": waiting}, {}, set()).workloads == (), "without a Job it is the ledger's"


def test_that_a_job_runs_is_told_by_the_ledger_and_begins_nothing() -> None:
    ready = by_workload([replace(JOB, ready=True)])
    for workload in (NEW, replace(NEW, caught_up=True)):
        route = repairs({"u": workload}, ready, set())
        assert route.ledger
        assert route.workloads == ()


def test_a_job_that_ended_unseen_is_found_and_its_end_is_shown_from_the_start() -> None:
    ended = replace(JOB, finished=True)
    for complete, phase in ((True, "Succeeded"), (False, "Running")):
        route = repairs({"u": NEW}, by_workload([replace(ended, attempt=1, complete=complete)]), set())
        assert [(p.begin, p.phase) for p in route.workloads] == [(True, phase)]


def test_an_end_that_the_ledger_tells_begins_no_workflow_but_ends_one_that_is_open() -> None:
    ended = replace(JOB, finished=True, complete=True)
    assert repairs({"u": NEW}, by_workload([ended]), set()) == Route(ledger=True)
    assert [p.begin for p in repairs({"u": NEW}, by_workload([ended]), {"u"}).workloads] == [True]
    assert [p.begin for p in repairs({"u": NEW}, by_workload([ended, replace(ended, name="w-x")]), set()).workloads]
    (poke,) = repairs({"u": TOMBSTONE}, by_workload([ended]), {"u"}).workloads
    assert (poke.begin, poke.ended) == (False, True)


def test_a_verdict_is_lost_only_if_its_workflow_was_missing_twice() -> None:
    found = {"u": Turn(1, 1)}
    lost, suspects = confirmed(found, {}, 100.0, 30.0)
    assert lost == {}
    assert suspects == {"u": Suspect(Turn(1, 1), 100.0)}
    assert confirmed(found, suspects, 129.0, 30.0) == ({}, suspects), "too soon"
    assert confirmed(found, suspects, 130.0, 30.0) == ({"u": Turn(1, 1)}, {})
    assert confirmed({}, suspects, 130.0, 30.0) == ({}, {}), "its workflow came"


def test_a_verdict_about_another_turn_is_a_new_suspect() -> None:
    lost, suspects = confirmed({"u": Turn(2, 2)}, {"u": Suspect(Turn(1, 1), 0.0)}, 100.0, 30.0)
    assert lost == {}
    assert suspects == {"u": Suspect(Turn(2, 2), 100.0)}


@pytest.mark.parametrize("job", [(), (JOB,)])
def test_only_tombstones_that_are_being_deleted_are_littered(job: tuple[JobDigest, ...]) -> None:
    going = replace(TOMBSTONE, deleting=True)
    assert littered(going, job)
    assert littered(replace(going, finalizer=False), job) == bool(job)
    assert not littered(TOMBSTONE, job)
    assert not littered(replace(going, finished=False), job)
    assert not littered(None, job)


async def test_leftovers_go_by_their_uid() -> None:
    kube = FakeKube({"w": stored("u")})
    kube.conflicts = 1
    jobs = {"u": [JOB, replace(JOB, name="w-1", uid="k", finished=True), replace(JOB, name="w-2", deleting=True)]}
    assert await tidy_tombstones(cast(Any, kube), {"u": TOMBSTONE}, jobs, set()) == 2
    assert kube.deleted == [("w-0", "j", "Foreground")], "the Job that ended stays as long as its workload"
    assert kube.patched == [("w", {"metadata": {"finalizers": ["other"], "uid": "u", "resourceVersion": "7"}})]


async def test_another_workload_of_that_name_keeps_its_finalizer() -> None:
    kube = FakeKube({"w": stored("another")})
    assert await tidy_tombstones(cast(Any, kube), {"u": TOMBSTONE}, {}, set()) == 0
    assert kube.patched == []


async def test_followed_tombstones_are_left_to_their_workflow() -> None:
    kube = FakeKube({"w": stored("u")})
    assert await tidy_tombstones(cast(Any, kube), {"u": TOMBSTONE}, {"u": [JOB]}, {"u"}) == 0


async def test_the_world_may_change_while_a_sweep_writes() -> None:
    workloads = {uid: replace(TOMBSTONE, finalizer=False, expires=1.0) for uid in ("u", "v")}
    kube = FakeKube(on_call=workloads.clear)
    await tidy_tombstones(cast(Any, kube), workloads, {"u": [JOB]}, set())
    workloads |= {uid: replace(TOMBSTONE, expires=1.0) for uid in ("u", "v")}
    await expire(cast(Any, kube), workloads)
    assert len(kube.deleted) == 3
