"""The judge itself: each broken promise is found, and a clean history is found clean."""

from __future__ import annotations

from typing import Any

from tests.faults.checker import Demand, check
from tests.faults.revisions import Revision

NODE = {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "2"}}}


def job(uid: str, workload: str, gpus: int, *, finished: bool = False) -> dict[str, Any]:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
    return {
        "metadata": {"uid": uid, "labels": {"gpu.warp.dev/workload-uid": workload}},
        "spec": {
            "template": {
                "spec": {
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}
                        }
                    },
                    "containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}],
                }
            }
        },
        "status": {"conditions": [{"type": "Complete", "status": "True"}] if finished else []},
    }


def pod(gpus: int, phase: str = "Running", of: str = "") -> dict[str, Any]:
    return {
        "metadata": {"labels": {"batch.kubernetes.io/controller-uid": of}},
        "spec": {"nodeName": "n", "containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]},
        "status": {"phase": phase},
    }


def workload(phase: str) -> dict[str, Any]:
    return {"metadata": {"uid": "w"}, "status": {"phase": phase}}


def revisions(*entries: tuple[str, str, dict[str, Any] | None]) -> list[Revision]:
    return [Revision(i, kind, key, value) for i, (kind, key, value) in enumerate(entries, 1)]


def test_a_clean_history_is_clean() -> None:
    report = check(
        revisions(
            ("node", "/n", NODE),
            ("job", "/j1", job("j1", "w", 2)),
            ("pod", "/p1", pod(2)),
            ("pod", "/p1", pod(2, "Succeeded")),
            ("job", "/j1", job("j1", "w", 2, finished=True)),
            ("workload", "/w", workload("Succeeded")),
            ("job", "/j2", job("j2", "v", 2)),
            ("job", "/j1", None),
            ("job", "/j2", None),
            ("pod", "/p1", None),
            ("workload", "/w", None),
        )
    )
    assert report.violations == []
    assert report.left == []
    assert report.jobs_made == 2
    assert report.ended == {"w": "Succeeded"}


def test_a_gang_claims_for_each_pod_until_that_has_ended_well() -> None:
    gang = job("j1", "a", 1)
    gang["metadata"]["annotations"] = {"gpu.warp.dev/places": '[["m",1],["n",2]]'}
    nodes = [("node", "/n", NODE), ("node", "/m", {**NODE, "metadata": {"name": "m"}})]
    other = ("job", "/j2", job("j2", "b", 1))
    assert len(check(revisions(*nodes, ("job", "/j1", gang), other)).violations) == 1
    ending = {**gang, "status": {"completedIndexes": "0,2"}}
    assert check(revisions(*nodes, ("job", "/j1", ending), other)).violations == []
    assert len(
        check(revisions(*nodes, ("job", "/j1", {**gang, "status": {"completedIndexes": "0"}}), other)).violations
    )


def test_gpus_promised_twice_are_found() -> None:
    report = check(
        revisions(("node", "/n", NODE), ("job", "/j1", job("j1", "a", 1)), ("job", "/j2", job("j2", "b", 2)))
    )
    assert len(report.violations) == 1
    assert "claim 3 GPUs, it has 2" in report.violations[0]


def test_a_suspended_job_promises_nothing_but_its_pods_hold() -> None:
    stopped = job("j1", "w", 2)
    stopped["spec"]["suspend"] = True
    entries = [("node", "/n", NODE), ("job", "/j1", stopped), ("job", "/j2", job("j2", "v", 2))]
    assert check(revisions(*entries)).violations == []
    pods = [("pod", "/p1", pod(2)), ("pod", "/p2", pod(1))]
    assert len(check(revisions(*entries, *pods)).violations) == 1


def test_a_job_that_is_deleted_claims_as_long_as_it_has_pods_or_may_get_them() -> None:
    going = job("j1", "w", 2)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    before = [("node", "/n", NODE), ("job", "/j1", job("j1", "w", 2))]
    lived = [("pod", "/p1", pod(2, of="j1")), ("job", "/j1", going)]
    other = ("job", "/j2", job("j2", "v", 2))
    assert check(revisions(*before, *lived, ("pod", "/p1", None), other)).violations == []
    assert len(check(revisions(*before, *lived, other)).violations) == 1, "its pod is there"
    assert len(check(revisions(*before, ("job", "/j1", going), other)).violations) == 1, "its pod may be to come"
    assert len(check(revisions(*before, lived[0], ("pod", "/p1", None), other)).violations) == 1, "it is not deleted"
    strangers = [("pod", "/p0", pod(0, of="j1")), ("pod", "/p1", pod(2, of="j0")), ("pod", "/p1", None)]
    assert len(check(revisions(*before, *strangers, ("job", "/j1", going), other)).violations) == 1, "another's pod"


def test_a_gang_that_is_deleted_claims_until_each_pod_was_seen() -> None:
    gang = job("j1", "a", 1)
    gang["metadata"]["annotations"] = {"gpu.warp.dev/places": '[["n",2]]'}
    gang["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    seen = [("node", "/n", NODE), ("pod", "/p1", pod(1, of="j1")), ("pod", "/p1", None), ("job", "/j1", gang)]
    other = ("job", "/j2", job("j2", "b", 1))
    assert len(check(revisions(*seen, other)).violations) == 1
    second = [("pod", "/p2", pod(1, of="j1")), ("pod", "/p2", None)]
    assert check(revisions(*seen, *second, other)).violations == []


def test_pods_beyond_the_node_are_found() -> None:
    report = check(revisions(("node", "/n", NODE), ("pod", "/p1", pod(2)), ("pod", "/p2", pod(1))))
    assert "pods on node n claim 3" in report.violations[0]


def test_two_live_jobs_for_one_workload_are_found() -> None:
    report = check(
        revisions(("node", "/n", NODE), ("job", "/j1", job("j1", "w", 1)), ("job", "/j2", job("j2", "w", 1)))
    )
    assert any("two live Jobs" in v for v in report.violations)


def test_a_workload_that_comes_back_to_life_is_found() -> None:
    ended = ("workload", "/w", workload("Succeeded"))
    assert check(revisions(ended, ("workload", "/w", workload("Running")))).violations
    assert check(revisions(("node", "/n", NODE), ended, ("job", "/j", job("j", "w", 1)))).violations


def test_what_is_left_is_named() -> None:
    assert check(revisions(("job", "/j1", job("j1", "w", 0)))).left == ["job /j1"]


DEMANDS = {"succeeds": Demand("Succeeded", "Completed"), "fails": Demand("Failed", "Spent", 1), "deleted": Demand()}


def ended(demand: str, phase: str, reason: str = "", retries: int = 0, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"uid": "w", "labels": {"demand": demand}, **metadata},
        "status": {
            "phase": phase,
            "retryCount": retries,
            "conditions": [{"type": "Finished", "status": "True" if reason else "False", "reason": reason}],
        },
    }


def failing(uid: str, reason: str = "BackoffLimitExceeded") -> tuple[str, str, dict[str, Any]]:
    body = job(uid, "w", 1)
    body["status"]["conditions"] = [{"type": "Failed", "status": "True", "reason": reason}]
    return "job", f"/{uid}", body


def judged(*entries: tuple[str, str, dict[str, Any] | None]) -> list[str]:
    return check(revisions(("node", "/n", NODE), *entries), DEMANDS).violations


def test_each_must_end_as_its_demand_says() -> None:
    gone = ("workload", "/w", None)
    assert judged(("workload", "/w", ended("succeeds", "Succeeded", "Completed")), gone) == []
    assert "was to end Succeeded" in judged(("workload", "/w", ended("succeeds", "Failed", "Spent")), gone)[0]
    assert "it ended Running" in judged(("workload", "/w", ended("succeeds", "Running")), gone)[0]
    assert "no known demand" in judged(("workload", "/w", ended("else", "Succeeded", "Completed")))[0]


def test_what_was_deleted_must_be_gone() -> None:
    there = ("workload", "/w", ended("deleted", "Running"))
    assert judged(there, ("workload", "/w", None)) == []
    assert judged(there) == ["workload /w (deleted) was to be gone, and is Running"]


def test_a_retry_is_counted_for_a_job_that_failed_and_for_nothing_else() -> None:
    spent = ("workload", "/w", ended("fails", "Failed", "Spent", 1))
    assert judged(failing("j1"), failing("j2"), spent) == []
    assert "shows 1 retries, but 0 of its Jobs failed" in judged(failing("j1", "PodFailurePolicy"), spent)[0]
    unspent = ("workload", "/w", ended("fails", "Failed", "Spent", 0))
    assert "was to end Failed (Spent) after 1 retries" in judged(failing("j1"), unspent)[0]


def test_suspensions_and_deletions_of_what_has_a_job_are_counted_once() -> None:
    asked = ("workload", "/w", ended("deleted", "Running", deletionTimestamp="2026-01-01T00:00:00Z"))
    live, done = ("job", "/j", job("j", "w", 1)), ("job", "/j", job("j", "w", 1, finished=True))
    node = ("node", "/n", NODE)
    assert check(revisions(node, live, asked, asked)).deleted_live == 1
    assert check(revisions(node, live, done, asked)).deleted_live == 0
    paused = ("workload", "/w", ended("suspended", "Running") | {"spec": {"suspend": True}})
    assert check(revisions(node, live, paused, paused)).suspended_live == 1
    assert check(revisions(node, paused, live, paused)).suspended_live == 0
