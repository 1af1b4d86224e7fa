"""Profiles learn every run once, whoever writes beside them and whatever fails; what is old goes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities.cache import DEPARTED, ClusterCache
from activities.profiles import Profiles
from activities.sampling import Usages
from activities.signatures import Learned
from kube.errors import AlreadyExists, Conflict, Forbidden, NotFound, Unavailable
from planning.decay import DAY
from planning.model import Ended, WorkloadView
from planning.naming import profile_name
from planning.profile_status import profile_view
from planning.profiles import BATCH, FORGET, SETTLE, Gpus, Profile
from planning.samples import GpuSample, PodSample
from planning.typical import Kind
from tests.planning.builders import job, workload


class Server:
    """Profiles as the API server keeps them; `fails` raises instead, by the call's name, once."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.version = 10
        self.fails: dict[str, Exception] = {}
        self.writes = 0

    def _call(self, name: str) -> None:
        if name in self.fails:
            raise self.fails.pop(name)
        self.version += 1
        self.writes += 1

    async def create(self, _: object, body: dict[str, Any], namespace: str) -> dict[str, Any]:
        self._call("create")
        key = namespace, body["metadata"]["name"]
        if key in self.objects:
            raise AlreadyExists("exists", request="create")
        meta = {**body["metadata"], "uid": f"uid-{self.version}", "resourceVersion": str(self.version)}
        self.objects[key] = {**body, "metadata": meta}
        return self.objects[key]

    async def merge_patch(
        self, _: object, name: str, namespace: str, body: dict[str, Any], *, subresource: str
    ) -> dict[str, Any]:
        self._call("patch")
        found = self.objects.get((namespace, name))
        if found is None:
            raise NotFound("gone", request="patch")
        if found["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise Conflict("changed", request="patch")
        meta = {**found["metadata"], "resourceVersion": str(self.version)}
        self.objects[namespace, name] = {**found, "metadata": meta, subresource: body["status"]}
        return self.objects[namespace, name]

    async def delete(self, _: object, name: str, namespace: str, *, uid: str, resource_version: int) -> None:
        self._call("delete")
        assert self.objects[namespace, name]["metadata"]["uid"] == uid
        del self.objects[namespace, name]


class Worker:
    """A worker with a cache of its own."""

    def __init__(self, server: Server, *views: WorkloadView) -> None:
        self.server = server
        self.cache = ClusterCache(cast(Any, None))
        for reflector in self.cache.reflectors.values():
            reflector.synced.set()
        self.usages = Usages()
        self.ends(*views)

    def ends(self, *views: WorkloadView) -> None:
        for view in views:
            self.cache.workloads._put(view.uid, view.resource_version, view)

    def watch(self) -> None:
        """Catches up with the server."""
        for uid in [*self.cache.profiles.items]:
            self.cache.profiles._remove(uid, self.server.version)
        for raw in self.server.objects.values():
            view = profile_view(raw)
            assert view is not None
            self.cache.profiles._put(view.uid, view.resource_version, view)

    async def learn(self) -> Learned:
        profiles = Profiles(self.cache, cast(Any, self.server), self.usages)
        result: Learned = await ActivityEnvironment().run(profiles.learn)
        return result

    def profile(self, model: str = "m") -> Profile:
        found = profile_view(self.server.objects["ns", profile_name(model)])
        assert found is not None
        return found


def ended(uid: str, *, model: str = "m", age: float = 60.0, took: float = 30.0) -> WorkloadView:
    told = time.time() - age
    view = workload(uid, 2, spec={"modelName": model}, status={"phase": "Succeeded"})
    return replace(view, created=told - 99, ended=Ended(told, told, told - took, "Completed"))


async def test_a_run_is_learned_once_with_all_that_is_known_of_it() -> None:
    worker = Worker(Server(), ended("a"), ended("b"), ended("later", age=SETTLE / 2), workload("going"))
    for _ in range(3):
        worker.usages.take(PodSample("ns", "a", (GpuSample(80.0, 20_000, 300.0), GpuSample(0, 0, 0)), simulated=True))
    learned = await worker.learn()
    assert (learned.runs, learned.profiles) == (2, 1)
    assert learned.next_in == pytest.approx(SETTLE / 2, abs=2)
    profile = worker.profile()
    at = profile.at[Gpus(2)]
    assert profile.runs == 2 and sum(at.durations.values()) == 2 * sum(at.active.values())
    assert at.peak_memory_mib == 20_000 and at.simulated
    assert set(profile.typical) == {Kind(2, 1000, 0)}
    worker.watch()
    writes = worker.server.writes
    assert (await worker.learn()).runs == 0
    assert worker.server.writes == writes, "nothing to learn, nothing to write"


async def test_a_job_that_completed_is_looked_at_again_though_nobody_pokes() -> None:
    worker = Worker(Server(), ended("a"), workload("b"))
    worker.cache.jobs._put("j", 1, job("b", "n", finished="Complete"))
    learned = await worker.learn()
    assert (learned.runs, learned.next_in) == (1, SETTLE)


async def test_two_workers_count_no_run_twice() -> None:
    server = Server()
    one, other = Worker(server, ended("a")), Worker(server, ended("a"))
    assert (await one.learn()).runs == 1
    assert (await other.learn()).runs == 0, "it has not seen the profile, which exists"
    other.watch()
    one.ends(ended("b", age=50))
    one.watch()
    assert (await one.learn()).runs == 1
    other.ends(ended("b", age=50))
    again = await other.learn()
    assert (again.runs, again.next_in) == (0, 0), "what it has seen is older; it tries again"
    other.watch()
    assert (await other.learn()).next_in is None
    assert one.profile().runs == 2


@pytest.mark.parametrize("call", ["create", "patch"])
async def test_a_write_that_is_refused_or_lost_is_made_up_for(call: str) -> None:
    worker = Worker(Server(), ended("a", model="A b"), ended("b", model="c"))
    worker.server.fails[call] = Forbidden("a policy", request=call)
    learned = await worker.learn()
    assert (learned.runs, learned.next_in) == (1, 0)
    worker.watch()
    assert (await worker.learn()).runs == 1
    assert {raw["spec"]["modelName"] for raw in worker.server.objects.values()} == {"A b", "c"}
    assert worker.profile("A b").runs == worker.profile("c").runs == 1


async def test_an_api_server_that_is_away_is_not_asked_for_each() -> None:
    worker = Worker(Server(), *(ended(f"{i}", model=f"m{i}") for i in range(20)))
    worker.server.fails["create"] = Unavailable("away", reason="ConnectionFailed", request="create")
    with pytest.raises(Unavailable):
        await worker.learn()
    assert len(worker.server.objects) < 20
    worker.watch()
    await worker.learn()
    assert all(raw["status"]["runs"] == 1 for raw in worker.server.objects.values())


async def test_no_more_profiles_than_a_batch_are_written_in_one_go() -> None:
    worker = Worker(Server(), *(ended(f"{i}", model=f"m{i}") for i in range(BATCH + 1)))
    first = await worker.learn()
    assert (first.profiles, first.next_in) == (BATCH, 0)
    worker.watch()
    assert (await worker.learn()).profiles == 1


async def test_a_run_whose_workload_was_deleted_is_learned_all_the_same() -> None:
    worker = Worker(Server(), ended("a"), ended("b", age=50))
    worker.cache.workloads._remove("a", 99)
    worker.cache.workloads._remove("b", 99)
    assert set(worker.cache.departed) == {"a", "b"}
    assert (await worker.learn()).runs == 2
    assert worker.cache.departed == {}
    for number in range(DEPARTED + 5):
        worker.ends(ended(f"{number}"))
        worker.cache.workloads._remove(f"{number}", 99)
    assert len(worker.cache.departed) == DEPARTED and "0" not in worker.cache.departed
    worker.ends(replace(workload("never ended"), status={"phase": "Running"}))
    worker.cache.workloads._remove("never ended", 99)
    assert "never ended" not in worker.cache.departed


async def test_a_profile_of_what_nobody_runs_any_more_goes() -> None:
    server = Server()
    worker = Worker(server, ended("a"), ended("b", model="n"))
    await worker.learn()
    old = server.objects["ns", "m"]
    old["status"]["watermark"]["told"] -= int(FORGET * DAY)
    worker.cache.workloads._remove("a", 99)
    worker.cache.departed.clear()
    worker.watch()
    assert (await worker.learn()).runs == 0
    assert set(server.objects) == {("ns", "n")}


async def test_a_deleted_profile_is_learned_anew_from_what_is_there() -> None:
    worker = Worker(Server(), ended("a"), ended("b", age=50))
    await worker.learn()
    worker.server.objects.clear()
    worker.watch()
    assert (await worker.learn()).runs == 2
