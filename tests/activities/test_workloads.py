"""A look at a workload sees what is that workload's, and nothing that a label claims to be."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities import workloads as module
from activities.cache import ClusterCache
from activities.signatures import Followed, FollowRequest, Versions, WorkloadRef
from activities.workloads import Workloads
from kube.errors import NotFound
from planning.model import JobView, Resources, Turn
from planning.profiles import Mark, Profile, Run, fold
from planning.samples import Usage
from planning.views import workload_view

REAL = JobView("j", "ns", "w-u-0", 5, "u", 0, 0, "n", Resources(gpus=1), time.time(), started=time.time(), ready=True)
FORGED = replace(REAL, uid="evil", namespace="attacker", name="evil", attempt=99, ready=False, finished="Complete")


class Server:
    """Takes note of every write, and of every list. `jobs` are those that it has, whatever a cache shows."""

    def __init__(self, *, jobs: tuple[dict[str, Any], ...] = (), workload: dict[str, Any] | None = None) -> None:
        self.jobs, self.workload, self.version = list(jobs), workload or stored(), 10
        self.patched: list[tuple[str, str]] = []
        self.deleted: list[tuple[str, str]] = []
        self.listed: list[tuple[str, str]] = []
        self.finalizers: list[list[str]] = []
        self.recommended: list[Any] = []

    async def merge_patch(self, _: Any, name: str, namespace: str, body: dict[str, Any], **__: Any) -> dict[str, Any]:
        if "finalizers" in body["metadata"]:
            self.finalizers.append(body["metadata"]["finalizers"])
        else:
            self.patched.append((namespace, body["status"]["phase"]))
            self.recommended.append(body["status"].get("recommendation"))
        return self.workload

    async def delete(self, _: Any, name: str, namespace: str, **__: Any) -> None:
        self.deleted.append((namespace, name))

    async def get(self, _: Any, name: str, namespace: str) -> dict[str, Any]:
        if namespace != "ns":
            raise NotFound("no such object", reason="NotFound", request=name)
        return self.workload

    async def list(self, resource: Any, namespace: str, *, label_selector: str) -> tuple[list[dict[str, Any]], int]:
        self.listed.append((resource.plural, label_selector))
        return [job for job in self.jobs if job["metadata"]["namespace"] == namespace], self.version


def stored(**metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "uid": "u", "namespace": "ns", "name": "w", "generation": 1, "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["gpu.warp.dev/finalizer"], **metadata,
        },
        "spec": {"modelName": "m", "gpuCount": 1},
        "status": {"phase": "Scheduled"},
    }  # fmt: skip


async def look(
    namespace: str,
    server: Server,
    jobs: tuple[JobView, ...] = (REAL, FORGED),
    fresh: Versions | None = None,
    profile: Profile | None = None,
) -> Followed:
    cache = ClusterCache(cast(Any, None))
    for reflector in cache.reflectors.values():
        reflector.synced.set()
    cache.workloads._put("u", 7, workload_view(server.workload))
    for job in jobs:
        cache.jobs._put(job.uid, 5, job)
    if profile is not None:
        cache.profiles._put("p", 5, profile)
    events = SimpleNamespace(record=lambda **_: None)
    workloads = Workloads(cache, cast(Any, server), cast(Any, None), cast(Any, events))
    request = FollowRequest(WorkloadRef("u", namespace, "w"), Turn(), fresh or {}, 0.0)
    followed: Followed = await ActivityEnvironment().run(workloads.follow, request)
    return followed


async def test_a_job_of_another_namespace_does_not_end_a_workload() -> None:
    server = Server()
    followed = await look("ns", server)
    assert followed.next == "wait"
    assert server.deleted == []
    assert [phase for _, phase in server.patched] in ([], ["Running"], ["Scheduled"])


async def test_a_workflow_begun_for_a_forged_job_touches_its_own_namespace_only() -> None:
    server = Server()
    followed = await look("attacker", server)
    assert (followed.next, followed.phase) == ("end", "Deleted")
    assert server.deleted == [("attacker", "evil")]
    assert server.patched == []


async def test_an_end_tells_what_is_recommended_and_a_look_on_the_way_leaves_what_was() -> None:
    usage = Usage(9, 1, 1000, {16: 9}, {12: 9})
    runs = [
        Run(Mark(int(time.time()) - i, "x"), "ns", "m", 1, 0.0, False, "Failed", 0, None, usage=usage) for i in range(4)
    ]
    profile = fold(Profile("ns", "m"), runs)
    server = Server()
    await look("ns", server, (REAL,), profile=profile)
    assert server.recommended == [None]
    ended = Server()
    await look("ns", ended, (replace(REAL, finished="Complete", finished_at=time.time()),), profile=profile)
    (told,) = ended.recommended
    assert (told["gpuCount"], told["memoryMiB"], told["confidence"]) == (1, 1150, 0.5)
    elsewhere = Server()
    done = (replace(REAL, finished="Complete", finished_at=time.time()),)
    await look("ns", elsewhere, done, profile=replace(profile, namespace="other"))
    assert elsewhere.recommended == [None]


DELETING = stored(deletionTimestamp="2026-01-01T01:00:00Z")
UNSEEN = {
    "metadata": {
        "uid": "j", "namespace": "ns", "name": "w-u-0", "resourceVersion": "9",
        "labels": {"gpu.warp.dev/workload-uid": "u", "gpu.warp.dev/attempt": "0"},
    },
}  # fmt: skip


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a cache that is behind."""
    monkeypatch.setattr(module, "CATCH_UP", 0.0)


@pytest.mark.usefixtures("impatient")
async def test_a_teardown_does_not_end_on_a_cache_that_is_behind() -> None:
    server = Server(workload=DELETING)
    followed = await look("ns", server, (), {"jobs": 9})
    assert (followed.next, followed.phase, followed.within) == ("wait", "Deleting", 2.0)
    assert "nothing is left" not in followed.message
    assert server.finalizers == []


async def test_a_teardown_ends_only_when_the_api_server_has_no_job_left() -> None:
    server = Server(workload=DELETING, jobs=(UNSEEN,))
    followed = await look("ns", server, ())
    assert (followed.next, followed.message) == ("wait", "deleting: waiting for Job w-u-0 to go")
    assert server.listed == [("jobs", "gpu.warp.dev/workload-uid=u")]
    assert server.deleted == [("ns", "w-u-0")]
    assert server.finalizers == []
    server.jobs.clear()
    followed = await look("ns", server, ())
    assert (followed.next, followed.phase) == ("end", "Deleted")
    assert server.finalizers == [[]]


async def test_a_tombstones_teardown_takes_a_job_along_that_nobody_saw() -> None:
    server = Server(workload={**DELETING, "status": {"phase": "Succeeded"}}, jobs=(UNSEEN,))
    assert (await look("ns", server, ())).next == "end"
    assert (server.deleted, server.finalizers) == ([("ns", "w-u-0")], [[]])


async def test_success_asks_for_no_list() -> None:
    server = Server()
    ended = replace(REAL, finished="Complete", ready=False, finished_at=time.time())
    assert (await look("ns", server, (ended,))).next == "end"
    assert (server.listed, server.patched, server.deleted, server.finalizers) == (
        [], [("ns", "Succeeded")], [], [[]],
    )  # fmt: skip


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("version", "restored"), [(8, True), (9, False)])
async def test_what_a_restored_server_never_will_have_is_not_waited_for_again(version: int, restored: bool) -> None:
    server = Server()
    server.version = version
    followed = await look("ns", server, fresh={"jobs": 9})
    assert (followed.next, followed.within, followed.restored) == ("wait", 2.0, restored)
    assert server.listed == [("configmaps", "berth-version-probe")]


async def test_a_cache_that_is_not_behind_asks_for_no_version() -> None:
    server = Server()
    assert (await look("ns", server)).restored is False
    assert server.listed == []


async def test_why_a_job_was_withdrawn_is_left_to_the_ledger_to_tell() -> None:
    server, going = Server(), replace(REAL, ready=False, deleting=True)
    followed = await look("ns", server, (replace(going, withdrawn=True),))
    assert (followed.next, followed.within, followed.turn) == ("retry", 0.0, Turn(1))
    assert server.patched == []
    followed = await look("ns", server, (going,))
    assert (followed.next, followed.turn) == ("retry", Turn(1))
    assert server.patched == [("ns", "Scheduling")], "what somebody else deleted, it tells itself"


async def test_a_look_that_changed_something_is_one_line_and_an_idle_one_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await look("ns", Server())
    assert caplog.messages == []
    await look("ns", Server(), (replace(REAL, finished="Complete", finished_at=time.time()),))
    await look("ns", Server(workload=DELETING), ())
    ended, deleted = caplog.messages
    assert ended.startswith("GPUWorkload ns/w: Succeeded, Completed: ")
    assert deleted == "GPUWorkload ns/w: Deleted, its Jobs and pods are gone"
