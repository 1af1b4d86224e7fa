"""A promise ends as made, stale or refused, and never by giving up while the API server is away; statuses follow."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment

from activities.patience import ATTEMPTS
from activities.placements import Placements
from activities.signatures import STATUS_LIMIT, CarryOut
from crds.settings import Settings
from kube.errors import AccessDenied, Conflict, Forbidden, NotFound, Unavailable
from kube.resources import GPURESERVATIONS, JOBS, PODS
from planning.ledger import after_carrying_out, after_deciding
from planning.model import (
    Assignment,
    Completion,
    Decision,
    Defaults,
    Expectation,
    JobView,
    Ledger,
    Pin,
    Resources,
    Snapshot,
    Turn,
    Verdict,
    Waiting,
    Withdrawal,
    WorkloadView,
)
from planning.recommendation import Recommendation
from planning.times import timestamp
from planning.views import reservation_view, workload_view
from tests.planning.builders import NOW, node, reservation, snapshot


class Away:
    """An API server that answers nothing."""

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object, **__: object) -> None:
            raise Unavailable("connection refused", reason="ConnectionFailed", request=name)

        return call


class Kept:
    """One kind of the cache."""

    def __init__(self, *items: Any) -> None:
        self.items = {item.uid: item for item in items}

    def observe(self, raw: dict[str, Any]) -> None:
        view = workload_view(raw)
        self.items[view.uid] = view


class Cache:
    settings, defaults = Settings(), Defaults("leastLoaded")

    def __init__(self, *workloads: WorkloadView, jobs: tuple[JobView, ...] = ()) -> None:
        self.workloads, self.pods, self.nodes, self.quotas = Kept(*workloads), Kept(), Kept(), Kept()
        self.live_jobs = {job.uid: job for job in jobs}
        self.reservations = Kept()
        self.recommended: Recommendation | None = None

    def recommendation(self, _: WorkloadView) -> Recommendation | None:
        return self.recommended

    async def reach(self, *_: object) -> dict[str, int]:
        return {}

    def jobs_of(self, namespace: str, uid: str) -> tuple[JobView, ...]:
        return tuple(job for job in self.live_jobs.values() if (job.namespace, job.workload_uid) == (namespace, uid))

    async def wait_synced(self) -> None:
        return None


def carry_out(
    decision: Decision, attempt: int = 1, *, cache: Cache | None = None, kube: Any = None, temporal: Any = None,
    heard: list[str] | None = None,
) -> Any:  # fmt: skip
    events = SimpleNamespace(record=lambda **event: None if heard is None else heard.append(event["reason"]))
    placements = Placements(cast(Any, cache or Cache()), cast(Any, kube or Away()), temporal, cast(Any, events))
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=attempt)
    return environment.run(placements.carry_out, CarryOut(decision))


def stored(phase: str = "Scheduled", version: int = 7) -> dict[str, Any]:
    return {
        "metadata": {
            "uid": "u", "namespace": "ns", "name": "w", "generation": 1, "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["gpu.warp.dev/finalizer"],
        },
        "spec": {"modelName": "m", "gpuCount": 1},
        "status": {"phase": phase, "jobName": "w-u-0", "observedGeneration": 1},
    }  # fmt: skip


RUNNING = JobView(
    "j", "ns", "w-u-0", 5, "u", 0, 0, "n", Resources(gpus=1), time.time(), started=time.time(), ready=True
)


class Server:
    """Has one workload and takes its patches, or refuses them by `conflicts`."""

    def __init__(self, conflicts: int = 0) -> None:
        self.conflicts = conflicts
        self.patches: list[dict[str, Any]] = []
        self.raw = stored()

    async def get(self, *_: Any) -> dict[str, Any]:
        return self.raw

    async def merge_patch(
        self, kind: Any, name: str, namespace: str, body: dict[str, Any], **__: Any
    ) -> dict[str, Any]:
        if self.conflicts:
            self.conflicts -= 1
            raise Conflict("it changed", reason="Conflict", request=name)
        self.patches.append(body)
        told = {key: value for key, value in body.get("status", {}).items() if value is not None}
        version = str(int(self.raw["metadata"]["resourceVersion"]) + 1)
        metadata = {**self.raw["metadata"], **body["metadata"], "resourceVersion": version}
        self.raw = {**self.raw, "metadata": metadata, "status": {**self.raw["status"], **told}}
        return self.raw


@pytest.mark.parametrize("attempt", [1, ATTEMPTS, 100])
async def test_an_assignment_is_never_given_up_on_while_the_api_server_is_away(attempt: int) -> None:
    promise = Assignment("u", "ns", "w", 1, 1, Turn(), "n", Resources(gpus=1), "leastLoaded", "w-u-0")
    with pytest.raises(Unavailable):
        await carry_out(Decision(assignments=[promise]), attempt)


async def test_a_status_that_cannot_be_written_holds_up_nobody() -> None:
    waiting = Waiting("u", "ns", "w", 1, "WaitingForCapacity", "m")
    done = await carry_out(Decision(waiting=[waiting]), ATTEMPTS)
    assert done.stale == []


class Young:
    """An API server that has just begun: it knows nobody's rights to workloads, and to Jobs perhaps."""

    def __init__(self, job: dict[str, Any] | None) -> None:
        self.job = job

    async def get(self, resource: Any, name: str, _: str) -> dict[str, Any]:
        if resource is JOBS and self.job is not None:
            return self.job
        raise AccessDenied("cannot get", reason="Forbidden", request=name)

    merge_patch = create = get


async def test_a_job_made_by_an_earlier_try_is_not_refused_by_a_server_that_has_just_begun() -> None:
    promise = Assignment("u", "ns", "w", 1, 7, Turn(), "n", Resources(gpus=1), "leastLoaded", "w-u-0")
    decision = Decision(assignments=[promise])
    cache = Cache(workload_view(stored()))
    for attempt in (1, 2, ATTEMPTS, 100):
        with pytest.raises(AccessDenied):
            await carry_out(decision, attempt, cache=cache, kube=Young(None))
    made = stored_job()
    made["metadata"]["annotations"] = {"gpu.warp.dev/node": "n"}
    done = await carry_out(decision, ATTEMPTS, cache=cache, kube=Young(made))
    assert (list(done.made), done.refused) == (["u"], [])


class Full:
    """A namespace whose quota the Job of an earlier try has used up."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    async def get(self, resource: Any, *_: Any) -> dict[str, Any]:
        return self.job if resource is JOBS else stored()

    async def create(self, _: Any, body: dict[str, Any], *__: Any, **___: Any) -> dict[str, Any]:
        raise Forbidden("exceeded quota", reason="Forbidden", request=body["metadata"]["name"])


async def test_a_job_made_by_an_earlier_try_is_not_refused_by_the_quota_that_it_used_up() -> None:
    promise = Assignment("u", "ns", "w", 1, 7, Turn(), "n", Resources(gpus=1), "leastLoaded", "w-u-0")
    made = stored_job()
    made["metadata"]["annotations"] = {"gpu.warp.dev/node": "n"}
    kube = Full(made)
    done = await carry_out(Decision(assignments=[promise]), 2, cache=Cache(workload_view(stored())), kube=kube)
    assert (list(done.made), done.refused) == (["u"], [])


class Refusing:
    """A Temporal that takes no signal."""

    async def start_workflow(self, *_: Any, **__: Any) -> None:
        raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")


VERDICT = Verdict("u", "ns", "w", Turn(), "NoSuitableNode", "m", 1)


async def test_a_verdict_that_temporal_does_not_take_is_tried_again() -> None:
    with pytest.raises(RPCError):
        await carry_out(Decision(verdicts=[VERDICT]), temporal=Refusing())


async def test_a_verdict_that_reaches_nobody_holds_nobody() -> None:
    decision = Decision(verdicts=[VERDICT])
    done = await carry_out(decision, ATTEMPTS, temporal=Refusing())
    held = after_deciding(Ledger(), decision)
    assert held.held == {"u": Turn()}
    after = after_carrying_out(held, [], done.stale, done.refused, done.accepted, done.rejected, done.made, done.spared)
    assert after.held == {}


WITHDRAWAL = Withdrawal("u", "ns", "w", "w-u-0", "j", Turn(1), "m", job_version=5, generation=1)


MARK = "gpu.warp.dev/withdrawn"


def stored_job(uid: str = "j", version: int = 5, mark: str | None = None, **metadata: Any) -> dict[str, Any]:
    labels = {"gpu.warp.dev/workload-uid": "u", "gpu.warp.dev/attempt": "0"}
    names = {"uid": uid, "namespace": "ns", "name": "w-u-0", "resourceVersion": str(version), "labels": labels}
    annotations = {MARK: mark} if mark is not None else {}
    return {"metadata": names | {"annotations": annotations} | metadata, "spec": {}, "status": {}}


class Jobs(Server):
    """Keeps one Job as an API server does. `refusal` is its answer to deletions."""

    def __init__(self, job: dict[str, Any] | None = None, refusal: Exception | None = None) -> None:
        super().__init__()
        self.job, self.refusal = job, refusal

    def _found(self, uid: str, version: object) -> dict[str, Any]:
        if self.job is None:
            raise NotFound("no such Job", reason="NotFound")
        meta: dict[str, Any] = self.job["metadata"]
        if meta["uid"] != uid or version not in (None, meta["resourceVersion"]):
            raise Conflict("it changed", reason="Conflict")
        return meta

    async def get(self, *_: Any) -> dict[str, Any]:
        if self.job is None:
            raise NotFound("no such Job", reason="NotFound")
        return self.job

    async def merge_patch(
        self, kind: Any, name: str, namespace: str, body: dict[str, Any], **more: Any
    ) -> dict[str, Any]:
        if kind != JOBS:
            return await super().merge_patch(kind, name, namespace, body, **more)
        meta = self._found(body["metadata"]["uid"], body["metadata"].get("resourceVersion"))
        marks = meta["annotations"] | body["metadata"]["annotations"]
        changed = {key: value for key, value in marks.items() if value is not None}
        if changed != meta["annotations"]:
            meta |= {"annotations": changed, "resourceVersion": str(int(meta["resourceVersion"]) + 1)}
        assert self.job is not None
        return self.job

    async def delete(self, _: Any, __: str, ___: str, *, uid: str, resource_version: object, **____: Any) -> None:
        meta = self._found(uid, str(resource_version))
        if self.refusal is not None:
            raise self.refusal
        meta |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "99"}


async def withdraw(server: Jobs, attempt: int = 1, cache: Cache | None = None) -> list[str]:
    done = await carry_out(Decision(withdrawals=[WITHDRAWAL]), attempt, cache=cache, kube=server)
    stale: list[str] = done.stale
    return stale


def marks(server: Jobs) -> dict[str, str]:
    assert server.job is not None
    found: dict[str, str] = server.job["metadata"]["annotations"]
    return found


async def test_a_job_is_marked_and_taken_back_as_it_was_decided_upon() -> None:
    server = Jobs(stored_job())
    assert await withdraw(server) == []
    assert marks(server) == {MARK: "m"}
    assert server.job is not None and "deletionTimestamp" in server.job["metadata"]
    assert await withdraw(server, 2) == [], "a result that was lost: the Job is going, and counts as taken back"
    server.job = None
    assert await withdraw(server, 3) == []
    server.job = stored_job("of-a-later-turn")
    assert await withdraw(server, 4) == []


async def test_a_job_that_changed_since_it_was_decided_upon_is_not_withdrawn() -> None:
    moved = Jobs(stored_job(version=6))
    assert await withdraw(moved) == ["u"] and marks(moved) == {}
    # It found its place between the mark and the deletion, or the worker died there.
    late = Jobs(stored_job(), Conflict("it runs by now", reason="Conflict"))
    assert await withdraw(late) == ["u"] and marks(late) == {}
    died = Jobs(stored_job(version=6, mark="m"))
    assert await withdraw(died, 2) == ["u"] and marks(died) == {}


async def test_what_somebody_else_took_away_was_not_withdrawn() -> None:
    going = Jobs(stored_job(version=6, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert await withdraw(going) == ["u"] and marks(going) == {}
    assert await withdraw(Jobs()) == ["u"]


async def test_a_withdrawal_that_is_refused_or_given_up_on_is_none() -> None:
    assert await withdraw(Jobs(stored_job(), Forbidden("a policy refuses it", reason="Forbidden"))) == ["u"]
    slow = Jobs(stored_job(), Unavailable("no answer in time", reason="Timeout"))
    assert await withdraw(slow, ATTEMPTS) == ["u"]


async def test_the_status_of_a_withdrawn_workload_says_so_and_why_once() -> None:
    cache, server = Cache(workload_view(stored())), Jobs(stored_job())
    assert await withdraw(server, cache=cache) == []
    (patch,) = server.patches
    told = patch["status"]
    assert (told["phase"], told["message"], told["attempt"], told["assignedNode"]) == ("Scheduling", "m", 1, None)
    scheduled = next(c for c in told["conditions"] if c["type"] == "Scheduled")
    assert (scheduled["status"], scheduled["reason"], scheduled["message"]) == ("False", "Withdrawn", "m")
    assert await withdraw(server, 2, cache=cache) == []
    assert len(server.patches) == 1


async def test_nothing_is_given_up_on_while_nobody_answers_but_a_slow_answer_holds_up_nobody() -> None:
    with pytest.raises(Unavailable):
        await carry_out(Decision(withdrawals=[WITHDRAWAL]), 100)
    slow = Jobs(stored_job(), Unavailable("no answer in time", reason="Timeout"))
    with pytest.raises(Unavailable):
        await withdraw(slow, ATTEMPTS - 1)
    await withdraw(slow, ATTEMPTS)


async def test_a_running_job_is_shown_once_and_known_before_the_watch_tells() -> None:
    cache, server = Cache(workload_view(stored()), jobs=(RUNNING,)), Server()
    assert (await carry_out(Decision(), cache=cache, kube=server)).lagging == 0
    assert [(p["status"]["phase"], p["metadata"]["resourceVersion"]) for p in server.patches] == [("Running", "7")]
    assert cache.workloads.items["u"].resource_version == 8
    await carry_out(Decision(), cache=cache, kube=server)
    assert len(server.patches) == 1


async def test_what_is_recommended_is_shown_with_the_rest_and_costs_no_write() -> None:
    cache, server = Cache(workload_view(stored()), jobs=(RUNNING,)), Server()
    cache.recommended = Recommendation(1, None, None, None, 0.5, "seen")
    await carry_out(Decision(), cache=cache, kube=server)
    (patch,) = server.patches
    assert patch["status"]["recommendation"] == {"gpuCount": 1, "confidence": 0.5, "reason": "seen"}
    cache.recommended = replace(cache.recommended, gpu_count=2)
    await carry_out(Decision(), cache=cache, kube=server)
    assert len(server.patches) == 1


async def test_who_waits_is_told_when_it_should_start_and_hears_of_it_once() -> None:
    server, heard = Server(), list[str]()
    entry = Waiting("u", "ns", "w", 7, "WaitingForCapacity", "m")
    await carry_out(Decision(waiting=[entry]), cache=(cache := Cache(workload_view(stored("")))), kube=server)
    start = time.time() + 600
    decision = Decision(expected=[Expectation("u", "ns", "w", start, start + 60)])
    for _ in range(2):
        await carry_out(decision, cache=cache, kube=server, heard=heard)
    assert [patch["status"].get("expectedStartTime") for patch in server.patches] == [None, *[timestamp(start)] * 2]
    assert heard == ["StartExpected"]


def completed(server: Server, **changes: Any) -> Cache:
    return Cache(workload_view(server.raw), jobs=(replace(RUNNING, ready=False, finished="Complete", **changes),))


COMPLETION = Decision(completions=[Completion("u", "ns", "w", "w-u-0")])


async def test_a_workload_whose_first_job_completed_ends_with_two_writes_however_often_it_is_tried() -> None:
    server = Server()
    cache = completed(server)
    for _ in range(2):
        done = await carry_out(COMPLETION, cache=cache, kube=server)
        assert (done.lagging, done.shown) == (0, 1)
    ended, let_go = server.patches
    assert (ended["status"]["phase"], ended["metadata"]["resourceVersion"]) == ("Succeeded", "7")
    assert let_go["metadata"]["finalizers"] == []


async def test_an_end_that_is_not_as_it_was_decided_upon_is_decided_again() -> None:
    server = Server(conflicts=1)
    assert (await carry_out(COMPLETION, cache=completed(server), kube=server)).lagging == 1
    cache = Cache(workload_view(stored()), jobs=(replace(RUNNING, attempt=0),))
    cache.live_jobs["older"] = replace(RUNNING, uid="older", finished="Complete", attempt=-1)
    assert (await carry_out(COMPLETION, cache=cache, kube=server)).lagging >= 1
    assert [p for p in server.patches if p.get("status", {}).get("phase") == "Succeeded"] == []
    assert (await carry_out(COMPLETION, cache=Cache(), kube=server)).lagging == 0, "gone"


async def test_a_status_that_changed_meanwhile_is_left_to_the_next_round() -> None:
    cache, server = Cache(workload_view(stored()), jobs=(RUNNING,)), Server(conflicts=1)
    assert (await carry_out(Decision(), cache=cache, kube=server)).lagging == 1
    assert server.patches == []


async def test_a_status_that_is_given_up_on_is_looked_at_again() -> None:
    cache = Cache(workload_view(stored()), jobs=(RUNNING,))

    class Slow(Server):
        async def merge_patch(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise Unavailable("no answer in time", reason="Timeout")

    with pytest.raises(Unavailable):
        await carry_out(Decision(), ATTEMPTS - 1, cache=cache, kube=Slow())
    assert (await carry_out(Decision(), ATTEMPTS, cache=cache, kube=Slow())).lagging == 1


async def test_statuses_that_nobody_may_write_do_not_keep_the_others_out() -> None:
    def raw(namespace: str, uid: str) -> dict[str, Any]:
        it = stored()
        it["metadata"] |= {"uid": uid, "namespace": namespace, "name": uid}
        return it

    locked, healthy = [f"l{i}" for i in range(STATUS_LIMIT + 50)], [f"h{i}" for i in range(10)]
    views = [workload_view(raw("locked", uid)) for uid in locked] + [workload_view(raw("ns", uid)) for uid in healthy]
    jobs = tuple(replace(RUNNING, uid=f"j-{v.uid}", workload_uid=v.uid, namespace=v.namespace) for v in views)
    cache = Cache(*views, jobs=jobs)

    asked: list[str] = []

    class Locked(Server):
        async def merge_patch(
            self, kind: Any, name: str, namespace: str, body: dict[str, Any], **__: Any
        ) -> dict[str, Any]:
            asked.append(name)
            if namespace == "locked":
                raise Forbidden("a policy refuses it", reason="Forbidden", request=name)
            answer = raw(namespace, name)
            answer["metadata"]["resourceVersion"] = "8"
            answer["status"] |= {key: value for key, value in body["status"].items() if value is not None}
            return answer

    for _ in range(40):
        asked.clear()
        done = await carry_out(Decision(), cache=cache, kube=Locked())
        assert done.lagging >= len(locked)
        assert len(asked) <= STATUS_LIMIT
        if done.lagging == len(locked):
            break
    assert {cache.workloads.items[uid].phase for uid in healthy} == {"Running"}
    assert (await carry_out(Decision(), cache=cache, kube=Locked())).shown == 0


async def test_a_defect_at_one_object_leaves_the_others_to_be_told() -> None:
    cache = Cache(workload_view(stored()), jobs=(RUNNING,))

    class Broken(Server):
        async def merge_patch(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise TypeError("a defect")

    assert (await carry_out(Decision(), ATTEMPTS, cache=cache, kube=Broken())).lagging == 1


class Pods:
    """The API server with a gang's pods; a write of one of `stubborn` conflicts."""

    def __init__(self, *pods: dict[str, Any], stubborn: tuple[str, ...] = ()) -> None:
        self.pods, self.stubborn = pods, stubborn
        self.patched: dict[str, dict[str, Any]] = {}

    async def list(self, kind: Any, namespace: str, *, label_selector: str) -> tuple[list[dict[str, Any]], int]:
        assert (kind, namespace, label_selector) == (PODS, "ns", "batch.kubernetes.io/controller-uid=j")
        return list(self.pods), 9

    async def merge_patch(self, kind: Any, name: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        assert (kind, namespace) == (PODS, "ns")
        if name in self.stubborn:
            raise Conflict("it changed", reason="Conflict", request=name)
        self.patched[name] = body
        return {}


def gated(index: int) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"p{index}", "uid": f"u{index}", "resourceVersion": "3",
            "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"schedulingGates": [{"name": "gpu.warp.dev/placement"}]},
    }  # fmt: skip


PIN = Pin("u", "ns", "w", "w-u-0", "j", (("a", 1), ("b", 1)))


async def test_each_pod_of_a_gang_is_told_its_node_and_one_that_changed_is_left_for_the_next_round() -> None:
    kube = Pods(gated(0), gated(1), stubborn=("p0",))
    await carry_out(Decision(pins=[PIN]), kube=kube)
    (name,) = kube.patched
    patch = kube.patched[name]
    assert name == "p1" and patch["metadata"] == {"uid": "u1", "resourceVersion": "3"}
    assert patch["spec"]["schedulingGates"] == [] and '"b"' in json.dumps(patch["spec"]["affinity"])


async def test_no_gate_is_lifted_unless_all_pods_are_there() -> None:
    kube = Pods(gated(1))
    await carry_out(Decision(pins=[PIN]), kube=kube)
    assert kube.patched == {}


async def test_a_reservations_status_is_written_and_what_is_new_of_it_is_an_event() -> None:
    keeps = replace(reservation("r", gpus=2, start=100, end=200), resource_version=5)

    class Takes(Server):
        async def merge_patch(
            self, kind: Any, name: str, namespace: str, body: dict[str, Any], **how: Any
        ) -> dict[str, Any]:
            assert kind == GPURESERVATIONS and (name, how) == ("r", {"subresource": "status"})
            assert body["metadata"] == {"uid": "uid-r", "resourceVersion": "5"}
            self.patches.append(body["status"])
            return {"metadata": {"uid": "uid-r", "name": "r", "resourceVersion": "6"}, "status": body["status"]}

    class Watched(Cache):
        def snapshot(self) -> Snapshot:
            return snapshot([node("n", 8)], reservations=tuple(self.reservations.items.values()), now=NOW)

    class Reservations(Kept):
        def observe(self, raw: dict[str, Any]) -> None:
            self.items["uid-r"] = replace(keeps, resource_version=6, status=reservation_view(raw).status)

    cache, kube, told = Watched(), Takes(), list[dict[str, Any]]()
    cache.reservations = Reservations(keeps)
    events = SimpleNamespace(record=lambda **event: told.append(event))
    placements = Placements(cast(Any, cache), cast(Any, kube), cast(Any, None), cast(Any, events))
    for _ in range(2):
        await ActivityEnvironment().run(placements.carry_out, CarryOut(Decision(), reserved={"uid-r": {"n": 2}}))
    (status,), (event,) = kube.patches, told
    assert (status["phase"], status["reserved"]) == ("Reserved", 2)
    assert (event["type"], event["reason"], event["regarding"].kind) == ("Normal", "Reserved", "GPUReservation")
    assert event["note"].startswith("2 GPUs are kept on node n from")


async def test_without_the_ledgers_choice_nothing_is_said_of_reservations() -> None:
    cache = Cache()
    cache.reservations = Kept(reservation("r", gpus=2, start=100, end=200))
    await carry_out(Decision(), cache=cache)
