"""The independent judge of a fault test: walks the revisions and names every broken promise.

Shares no code with planning: it parses Jobs and nodes for itself, from what etcd held. A Job is live from its creation
until it is finished or gone, and as long as it is live it claims its GPUs on the node that it is pinned to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.revisions import Revision

GPU = "nvidia.com/gpu"
WORKLOAD = "gpu.warp.dev/workload-uid"


@dataclass
class Report:
    """What was found. `violations` must be empty; the rest tells whether the test tested anything."""

    violations: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)  # workload uid -> terminal phase
    jobs_made: int = 0
    most_gpus_at_once: int = 0
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Claim:
    workload: str
    node: str
    gpus: int


def check(revisions: Iterable[Revision]) -> Report:
    """Every workload's end, no GPU promised twice, never two live Jobs for one workload, nothing left."""
    report = Report()
    capacity: dict[str, int] = {}
    promised: dict[str, _Claim] = {}  # by Job key
    running: dict[str, _Claim] = {}  # by pod key
    present: dict[str, str] = {}
    seen_jobs: set[str] = set()
    for revision in revisions:
        value = revision.value
        if value is None:
            present.pop(revision.key, None)
        elif revision.kind != "node":
            present[revision.key] = revision.kind
        if revision.kind == "node" and value is not None:
            capacity[value["metadata"]["name"]] = int(value.get("status", {}).get("allocatable", {}).get(GPU, 0))
        elif revision.kind == "workload" and value is not None:
            phase = value.get("status", {}).get("phase", "")
            uid = value["metadata"]["uid"]
            if uid in report.ended and phase != report.ended[uid]:
                report.violations.append(
                    f"@{revision.number} workload {revision.key} was {report.ended[uid]} and is {phase}"
                )
            if phase in ("Succeeded", "Failed"):
                report.ended[uid] = phase
        elif revision.kind == "job":
            claim = _job_claim(value)
            if value is not None and value["metadata"]["uid"] not in seen_jobs and claim is not None:
                seen_jobs.add(value["metadata"]["uid"])
                report.jobs_made += 1
                if claim.workload in report.ended:
                    report.violations.append(f"@{revision.number} Job {revision.key} was made after its workload's end")
            _set(promised, revision.key, claim)
            _judge_jobs(report, revision, promised, capacity, claim)
        elif revision.kind == "pod":
            claim = _pod_claim(value)
            _set(running, revision.key, claim)
            _judge_node(report, revision, "pods on", running, capacity, claim)
        report.most_gpus_at_once = max(report.most_gpus_at_once, sum(c.gpus for c in running.values()))
    report.left = [f"{kind} {key}" for key, kind in present.items() if not key.endswith("zz-end-of-history")]
    return report


def _judge_jobs(
    report: Report, revision: Revision, promised: dict[str, _Claim], capacity: dict[str, int], claim: _Claim | None
) -> None:
    if claim is None:
        return
    twins = [key for key, other in promised.items() if other.workload == claim.workload]
    if len(twins) > 1:
        report.violations.append(f"@{revision.number} two live Jobs for one workload: {sorted(twins)}")
    _judge_node(report, revision, "Jobs promised", promised, capacity, claim)


def _judge_node(
    report: Report,
    revision: Revision,
    what: str,
    claims: dict[str, _Claim],
    capacity: dict[str, int],
    claim: _Claim | None,
) -> None:
    if claim is None or not claim.node:
        return
    total = sum(c.gpus for c in claims.values() if c.node == claim.node)
    if total > capacity.get(claim.node, 0):
        report.violations.append(
            f"@{revision.number} {what} node {claim.node} claim {total} GPUs, it has {capacity.get(claim.node, 0)}"
        )


def _set(claims: dict[str, _Claim], key: str, claim: _Claim | None) -> None:
    if claim is None:
        claims.pop(key, None)
    else:
        claims[key] = claim


def _job_claim(job: dict[str, Any] | None) -> _Claim | None:
    if job is None or WORKLOAD not in job["metadata"].get("labels", {}):
        return None
    if any(
        c["type"] in ("Complete", "Failed") and c["status"] == "True"
        for c in job.get("status", {}).get("conditions") or ()
    ):
        return None
    spec = job["spec"]["template"]["spec"]
    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (node,) = affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"]
    return _Claim(job["metadata"]["labels"][WORKLOAD], node, _gpus(spec))


def _pod_claim(pod: dict[str, Any] | None) -> _Claim | None:
    if pod is None or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return None
    gpus = _gpus(pod["spec"])
    if not gpus:
        return None
    return _Claim(pod["metadata"].get("labels", {}).get(WORKLOAD, ""), pod["spec"].get("nodeName", ""), gpus)


def _gpus(spec: dict[str, Any]) -> int:
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in spec["containers"])
