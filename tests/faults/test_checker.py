"""The judge itself: each broken promise is found, and a clean history is found clean."""

from __future__ import annotations

from typing import Any

from tests.faults.checker import check
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


def pod(gpus: int, phase: str = "Running") -> dict[str, Any]:
    return {
        "metadata": {},
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


def test_gpus_promised_twice_are_found() -> None:
    report = check(
        revisions(("node", "/n", NODE), ("job", "/j1", job("j1", "a", 1)), ("job", "/j2", job("j2", "b", 2)))
    )
    assert len(report.violations) == 1
    assert "claim 3 GPUs, it has 2" in report.violations[0]


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
