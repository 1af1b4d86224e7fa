"""A Job that was stopped goes on in its workload's next turn, or is replaced; however often that is tried, once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities.cache import ClusterCache
from activities.messages import Requeue
from activities.patience import ATTEMPTS
from activities.signatures import FollowRequest, HandBack, WorkloadRef
from activities.workloads import Workloads
from activities.writes import delete_job_before
from crds.settings import Settings
from kube.errors import AccessDenied, AlreadyExists, Conflict, Forbidden, Invalid, KubeError, NotFound, Unavailable
from kube.resources import GPUWORKLOADS, JOBS
from planning.jobs import job_manifest
from planning.model import Assignment, Decision, JobView, Resources, Stopped, Turn, Verdict, Withdrawal
from planning.views import job_view, workload_view
from tests.activities.test_placements import Cache, carry_out, stored
from tests.planning.builders import merge

FIRST = Assignment("u", "ns", "w", 1, 7, Turn(0), "a", Resources(1, 0, 0, 1), "leastLoaded", "w-u-0")
NEXT = replace(FIRST, turn=Turn(1), node="b", job_name="w-u-1", resumes=Stopped("w-u-0", "j", 5))
STOPPED = {"type": "Suspended", "status": "True"}
IMMUTABLE = Invalid("spec.template: Invalid value: …: field is immutable", status=422)
POLICY = Forbidden("admission webhook denied the request", status=403)
BROKEN = Unavailable("failed calling webhook", status=500, reason="InternalError")
GOES_ON, REPLACED = ["patch w-u-0"], ["delete w-u-0", "create w-u-1"]


class Dies(Exception):
    """The worker does, between two requests."""


class Cluster:
    """Has Jobs, and merges patches into them at their version; `refusal` is its answer to any update of a Job, `kept`
    to its deletion. One that is deleted stays until the garbage collector has been there, and the namespace's quota
    has room for one Job. `dies_after`: so many writes that took effect, and of the last one nobody hears.
    """

    def __init__(
        self, refusal: KubeError | None = None, dies_after: int = 99, *, kept: KubeError | None = None
    ) -> None:
        self.refusal, self.kept, self.dies_after, self.version = refusal, kept, dies_after, 5
        self.done: list[str] = []
        job = job_manifest(workload_view(stored()), FIRST, Settings())
        job["metadata"] |= {"uid": "j", "resourceVersion": "5"}
        job["metadata"]["annotations"]["gpu.warp.dev/preempted"] = "for another"
        job["spec"]["suspend"] = True
        self.jobs: dict[str, dict[str, Any]] = {"w-u-0": job | {"status": {"conditions": [STOPPED]}}}

    def _wrote(self, what: str, job: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        job["metadata"]["resourceVersion"] = str(self.version)
        self.done.append(what)
        if len(self.done) == self.dies_after:
            raise Dies
        return job

    def _at(self, name: str, uid: str, version: object) -> dict[str, Any]:
        if name not in self.jobs:
            raise NotFound("no such Job", status=404)
        meta = self.jobs[name]["metadata"]
        if (uid, version or meta["resourceVersion"]) != (meta["uid"], meta["resourceVersion"]):
            raise Conflict("it changed", status=409)
        return self.jobs[name]

    async def get(self, kind: Any, name: str, _: str) -> dict[str, Any]:
        if kind != JOBS:
            return stored()
        if name not in self.jobs:
            raise NotFound("no such Job", status=404)
        return self.jobs[name]

    async def merge_patch(self, kind: Any, name: str, _: str, body: dict[str, Any], **__: Any) -> dict[str, Any]:
        if kind != JOBS:
            return stored()
        meta = body["metadata"]
        job = self._at(name, meta["uid"], meta.get("resourceVersion"))
        if self.refusal is not None:
            raise self.refusal
        merge(job, body)
        return self._wrote(f"patch {name}", job)

    async def create(self, _: Any, manifest: dict[str, Any], __: str) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        if name in self.jobs:
            raise AlreadyExists("there is one", status=409)
        if self.jobs:
            raise Forbidden("exceeded quota: one, used: count/jobs.batch=1", status=403)
        self.jobs[name] = manifest
        manifest["metadata"]["uid"] = name
        return self._wrote(f"create {name}", manifest)

    async def delete(self, _: Any, name: str, __: str, *, uid: str, resource_version: object, **___: Any) -> None:
        job = self._at(name, uid, None if resource_version is None else str(resource_version))
        if self.kept is not None:
            raise self.kept
        job["metadata"].setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
        self._wrote(f"delete {name}", job)

    def collect(self) -> None:
        self.jobs = {name: job for name, job in self.jobs.items() if "deletionTimestamp" not in job["metadata"]}

    @property
    def live(self) -> list[tuple[str, int, str]]:
        """Jobs that are to run: name, attempt, node."""
        found = (view for job in self.jobs.values() if (view := job_view(job, Settings().gpu_resource)) is not None)
        views = [view for view in found if not view.preempted and not view.deleting]
        return [(view.name, view.attempt, view.node) for view in views]


async def place(
    cluster: Cluster,
    attempt: int = 1,
    heard: list[str] | None = None,
    *,
    given: Assignment = NEXT,
    temporal: Any = None,
) -> Any:
    cache = Cache(workload_view(stored()))
    decision = Decision(assignments=[given])
    return await carry_out(decision, attempt, cache=cache, kube=cluster, heard=heard, temporal=temporal)


async def test_a_stopped_job_becomes_the_next_turns_in_one_write() -> None:
    cluster, heard = Cluster(), list[str]()
    done = await place(cluster, heard=heard)
    assert (cluster.done, done.made, done.stale, done.refused) == (GOES_ON, {"u": 6}, [], [])
    assert cluster.live == [("w-u-0", 1, "b")] and heard == ["Scheduled"]
    job = cluster.jobs["w-u-0"]
    assert "gpu.warp.dev/preempted" not in job["metadata"]["annotations"] and job["spec"]["suspend"] is False
    assert job["spec"]["template"]["metadata"]["labels"]["gpu.warp.dev/attempt"] == "1"


@pytest.mark.parametrize(
    ("refusal", "attempt"),
    [(IMMUTABLE, 1), (POLICY, 1), (BROKEN, ATTEMPTS), (AccessDenied("no", status=403), ATTEMPTS)],
)
async def test_one_that_may_not_go_on_is_deleted_and_replaced_when_it_is_gone(refusal: KubeError, attempt: int) -> None:
    cluster, heard = Cluster(refusal), list[str]()
    done = await place(cluster, attempt, heard)
    assert (cluster.done, cluster.live, heard) == (REPLACED[:1], [], ["NotResumed"])
    assert (done.made, done.stale, done.refused) == ({}, ["u"], []), "decided anew, and nothing is counted"
    cluster.collect()
    done = await place(cluster, heard=heard, given=replace(NEXT, resumes=None))
    assert (cluster.done, cluster.live) == (REPLACED, [("w-u-1", 1, "b")])
    assert (list(done.made), done.stale, done.refused, heard[1:]) == (["u"], [], [], ["Scheduled"])


async def test_a_servers_error_may_pass_and_replaces_nothing_at_first() -> None:
    for failed in (BROKEN, AccessDenied("no", status=403)):
        cluster = Cluster(failed)
        with pytest.raises(type(failed)):
            await place(cluster, ATTEMPTS - 1)
        assert cluster.done == []


async def test_one_that_may_neither_go_on_nor_be_deleted_is_named() -> None:
    verdicts: list[Verdict] = []

    async def start_workflow(*_: Any, start_signal_args: list[Verdict], **__: Any) -> None:
        verdicts.extend(start_signal_args)

    cluster = Cluster(IMMUTABLE, kept=Forbidden("jobs may not be deleted on Fridays", status=403))
    done = await place(cluster, temporal=SimpleNamespace(start_workflow=start_workflow))
    assert (cluster.done, done.refused, done.stale) == ([], verdicts, [])
    (verdict,) = verdicts
    assert verdict.reason == "JobRefused" and "Job w-u-0, whose place it takes, could not be deleted" in verdict.message
    assert "on Fridays" in verdict.message
    cluster.kept = BROKEN
    with pytest.raises(Unavailable):
        await place(cluster)


async def test_one_that_changed_while_it_was_refused_is_not_deleted() -> None:
    """Somebody let it go on, say: what it is now, nobody has decided upon."""

    class Edited(Cluster):
        async def merge_patch(self, kind: Any, name: str, _: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
            if kind == JOBS:
                self._wrote("edit", self.jobs[name])
                raise POLICY
            return await super().merge_patch(kind, name, _, body, **how)

    cluster, heard = Edited(), list[str]()
    done = await place(cluster, heard=heard)
    assert (cluster.done, done.stale, done.refused, heard) == (["edit"], ["u"], [], [])


async def test_one_that_somebody_deleted_meanwhile_is_replaced() -> None:
    cluster = Cluster()
    cluster.jobs.clear()
    assert list((await place(cluster)).made) == ["u"]
    assert cluster.live == [("w-u-1", 1, "b")]


async def test_one_that_changed_meanwhile_is_decided_upon_again() -> None:
    for refusal in (None, IMMUTABLE):
        cluster = Cluster(refusal)
        cluster.jobs["w-u-0"]["metadata"]["resourceVersion"] = "9"
        done = await place(cluster)
        assert (done.stale, done.made, cluster.done) == (["u"], {}, [])


async def test_while_nobody_answers_it_is_neither_replaced_nor_refused() -> None:
    cluster = Cluster(Unavailable("no answer", reason="ConnectionFailed"))
    with pytest.raises(Unavailable):
        await place(cluster)
    assert cluster.done == []


@pytest.mark.parametrize("tries", [1, 2])
async def test_a_worker_that_dies_after_it_let_it_go_on_leaves_one_job(tries: int) -> None:
    cluster = Cluster(dies_after=1)
    with pytest.raises(Dies):
        await place(cluster)
    for attempt in range(2, 2 + tries):
        done = await place(cluster, attempt)
        assert (done.made, done.stale, done.refused) == ({"u": 6}, [], [])
    assert (cluster.done, cluster.live) == (GOES_ON, [("w-u-0", 1, "b")])


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("dies_after", [1, 2])
async def test_a_worker_that_dies_while_it_replaces_one_leaves_one_job(dies_after: int, collected: bool) -> None:
    cluster = Cluster(IMMUTABLE, dies_after=dies_after)
    for attempt in range(1, 5):
        try:
            done = await place(cluster, attempt)
        except Dies:
            done = None
        assert done is None or (done.refused, len(done.stale) + len(done.made)) == ([], 1)
        if collected or attempt == 2:
            cluster.collect()
    assert (cluster.done, cluster.live) == (REPLACED, [("w-u-1", 1, "b")])
    assert done is not None and list(done.made) == ["u"]


async def test_two_that_let_it_go_on_at_once_make_one_job() -> None:
    """The first was given up on and goes on all the same; the second came while its answer was on its way."""
    cluster = Cluster()
    for _ in range(2):
        done = await place(cluster)
        assert (done.made, done.stale) == ({"u": 6}, [])
    assert cluster.done == GOES_ON


async def test_the_end_of_a_turn_writes_nothing_to_a_job_that_is_kept() -> None:
    cluster = Cluster()
    over = Withdrawal(
        "u", "ns", "w", "w-u-0", "j", Turn(1), "m", job_version=5, generation=1, reason="Preempted", keep=True
    )
    done = await carry_out(Decision(withdrawals=[over]), cache=Cache(workload_view(stored())), kube=cluster)
    assert (done.stale, cluster.done) == ([], [])


def seen(cluster: Cluster) -> JobView:
    view = job_view(cluster.jobs["w-u-0"], Settings().gpu_resource)
    assert view is not None
    return view


async def test_a_job_that_goes_on_is_not_taken_for_that_of_the_turn_before() -> None:
    """A workload's own workflow deletes Jobs by what its cache shows, which may be older than the turn."""
    cluster = Cluster()
    before = seen(cluster)
    await place(cluster)
    await delete_job_before(cast(Any, cluster), before, 1, Settings().gpu_resource)
    assert cluster.live == [("w-u-0", 1, "b")]
    await delete_job_before(cast(Any, cluster), before, 2, Settings().gpu_resource)
    assert cluster.live == []
    cluster.collect()
    await delete_job_before(cast(Any, cluster), before, 3, Settings().gpu_resource)


async def test_a_hand_back_deletes_a_stopped_job_though_its_status_changed_meanwhile() -> None:
    cluster = Cluster()
    cache = Cache(workload_view(stored()), jobs=(seen(cluster),))
    cluster.jobs["w-u-0"]["metadata"]["resourceVersion"] = "6"

    async def signal(*_: Any, **__: Any) -> None:
        return None

    temporal = SimpleNamespace(start_workflow=signal)
    workloads = Workloads(cast(Any, cache), cast(Any, cluster), cast(Any, temporal), cast(Any, None))
    await ActivityEnvironment().run(workloads.hand_back, HandBack(WorkloadRef("u", "ns", "w"), Turn(1)))
    assert cluster.done == ["delete w-u-0"]


@pytest.mark.parametrize("now", [{"suspend": True}, {"image": "edited"}])
async def test_a_look_that_is_behind_leaves_a_job_that_goes_on_in_this_turn(now: dict[str, Any]) -> None:
    """Its workload is suspended, or edited, and the cache still shows the Job of the turn before."""
    cluster = Cluster()
    before = seen(cluster)
    await place(cluster)
    asked = stored() | {"spec": stored()["spec"] | now}
    cache, requeued = ClusterCache(cast(Any, None)), list[Turn]()
    cache.workloads._put("u", 7, workload_view(asked))
    cache.jobs._put(before.uid, before.resource_version, before)
    for reflector in cache.reflectors.values():
        reflector.synced.set()

    async def signal(*_: Any, start_signal_args: list[Requeue], **__: Any) -> None:
        requeued.extend(back.turn for back in start_signal_args)

    async def get(kind: Any, name: str, namespace: str) -> dict[str, Any]:
        return asked if kind == GPUWORKLOADS else await Cluster.get(cluster, kind, name, namespace)

    cast(Any, cluster).get = get
    temporal = SimpleNamespace(start_workflow=signal)
    workloads = Workloads(cache, cast(Any, cluster), cast(Any, temporal), cast(Any, None))
    request = FollowRequest(WorkloadRef("u", "ns", "w"), Turn(1), {}, 0.0)
    followed = await ActivityEnvironment().run(workloads.follow, request)
    assert (followed.next, requeued) == ("wait", [Turn(1)])
    assert (cluster.done, cluster.live) == (GOES_ON, [("w-u-0", 1, "b")])
