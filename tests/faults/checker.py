"""The independent judge of a fault test: walks the revisions and names every broken promise.

Shares no code with planning: it parses Jobs and nodes for itself, from what etcd held. A Job is live from its creation
until it is finished or gone, and as long as it is live it claims its GPUs on the node that it is pinned to; a gang's
claims them for each pod on the node that its annotation tells, until that pod has ended well. A Job that is being
deleted makes no pods any more: once each of its pods was seen, and has gone, it claims nothing, however long the
garbage collector takes to remove it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults.revisions import Revision

GPU = "nvidia.com/gpu"
WORKLOAD = "gpu.warp.dev/workload-uid"
JOB = "batch.kubernetes.io/controller-uid"
PLACES = "gpu.warp.dev/places"


@dataclass(frozen=True)
class Demand:
    """What must have become of a workload in the end. No `phase`: it was deleted on the way, and must be gone."""

    phase: str = ""
    reason: str = ""
    retries: int = 0


@dataclass
class Report:
    """What was found. `violations` must be empty; the rest tells whether the test tested anything."""

    violations: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)  # workload uid -> terminal phase
    failed_jobs: dict[str, int] = field(default_factory=dict)  # workload uid -> Jobs whose pod failed by itself
    deleted_live: int = 0  # workloads whose deletion began while a Job of theirs was live
    suspended_live: int = 0  # suspensions that began so
    jobs_made: int = 0
    most_gpus_at_once: int = 0
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Seen:
    """A workload as it was last seen."""

    uid: str
    kind: str
    phase: str
    reason: str
    retries: int
    deleting: bool
    suspended: bool


@dataclass(frozen=True)
class _Claim:
    """`gpus`: by node; '' for a pod that has none yet. `job`: the Job's UID, a pod's too. `leaving`: a Job of so many
    `pods` that is being deleted.
    """

    workload: str
    gpus: dict[str, int]
    job: str = ""
    pods: int = 1
    leaving: bool = False


def check(revisions: Iterable[Revision], demands: Mapping[str, Demand] | None = None) -> Report:
    """Every workload's end, no GPU promised twice, never two live Jobs for one workload, nothing left.

    `demands`: what must become of a workload, by the value of its label `demand`; each workload must have one then.
    """
    report = Report()
    workloads: dict[str, _Seen] = {}  # by key, the last that was there
    failed: dict[str, set[str]] = {}  # workload uid -> Jobs
    capacity: dict[str, int] = {}
    promised: dict[str, _Claim] = {}  # by Job key
    running: dict[str, _Claim] = {}  # by pod key
    had: dict[str, set[str]] = {}  # Job uid -> keys of all pods that it ever had
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
            before, now = workloads.get(revision.key), _seen(value)
            workloads[revision.key] = now
            live = any(claim.workload == uid for claim in promised.values())
            known = before if before is not None and before.uid == uid else None
            report.deleted_live += live and now.deleting and not (known is not None and known.deleting)
            report.suspended_live += live and now.suspended and not (known is not None and known.suspended)
            if uid in report.ended and phase != report.ended[uid]:
                report.violations.append(
                    f"@{revision.number} workload {revision.key} was {report.ended[uid]} and is {phase}"
                )
            if phase in ("Succeeded", "Failed"):
                report.ended[uid] = phase
        elif revision.kind == "job":
            claim = _job_claim(value)
            if value is not None and _failed_by_itself(value):
                failed.setdefault(value["metadata"]["labels"][WORKLOAD], set()).add(value["metadata"]["uid"])
            if value is not None and value["metadata"]["uid"] not in seen_jobs and claim is not None:
                seen_jobs.add(value["metadata"]["uid"])
                report.jobs_made += 1
                if claim.workload in report.ended:
                    report.violations.append(f"@{revision.number} Job {revision.key} was made after its workload's end")
            _set(promised, revision.key, claim)
            _judge_jobs(report, revision, promised, claim)
            _judge_node(report, revision, "Jobs promised", _claiming(promised, running, had), capacity, claim)
        elif revision.kind == "pod":
            claim = _pod_claim(value)
            _set(running, revision.key, claim)
            if claim is not None:
                had.setdefault(claim.job, set()).add(revision.key)
            _judge_node(report, revision, "pods on", running, capacity, claim)
        report.most_gpus_at_once = max(report.most_gpus_at_once, sum(sum(c.gpus.values()) for c in running.values()))
    report.failed_jobs = {uid: len(jobs) for uid, jobs in failed.items()}
    for key, seen in workloads.items():
        _judge_retries(report, key, seen)
        if demands is not None:
            _judge_end(report, key, seen, key in present, demands)
    report.left = [f"{kind} {key}" for key, kind in present.items() if not key.endswith("zz-end-of-history")]
    return report


def _judge_retries(report: Report, key: str, seen: _Seen) -> None:
    """A retry is counted for a Job that failed, and for nothing that was killed, taken back or lost on the way."""
    failures = report.failed_jobs.get(seen.uid, 0)
    if seen.retries > failures:
        report.violations.append(f"workload {key} shows {seen.retries} retries, but {failures} of its Jobs failed")


def _judge_end(report: Report, key: str, seen: _Seen, present: bool, demands: Mapping[str, Demand]) -> None:
    demand = demands.get(seen.kind)
    if demand is None:
        report.violations.append(f"workload {key} has no known demand: {seen.kind!r}")
    elif not demand.phase:
        if present:
            report.violations.append(f"workload {key} ({seen.kind}) was to be gone, and is {seen.phase or 'new'}")
    elif (seen.phase, seen.reason, seen.retries) != (demand.phase, demand.reason, demand.retries):
        wanted = f"{demand.phase} ({demand.reason}) after {demand.retries} retries"
        found = f"{seen.phase or 'new'} ({seen.reason}) after {seen.retries}"
        report.violations.append(f"workload {key} ({seen.kind}) was to end {wanted}; it ended {found}")


def _seen(workload: dict[str, Any]) -> _Seen:
    meta, status = workload["metadata"], workload.get("status", {})
    finished = [c for c in status.get("conditions") or () if c["type"] == "Finished" and c["status"] == "True"]
    return _Seen(
        uid=meta["uid"],
        kind=meta.get("labels", {}).get("demand", ""),
        phase=status.get("phase", ""),
        reason=finished[0].get("reason", "") if finished else "",
        retries=status.get("retryCount", 0),
        deleting="deletionTimestamp" in meta,
        suspended=bool(workload.get("spec", {}).get("suspend")),
    )


def _failed_by_itself(job: dict[str, Any]) -> bool:
    """Its pod's container ended with a failure: not evicted, not beyond its deadline."""
    return WORKLOAD in job["metadata"].get("labels", {}) and any(
        c["type"] == "Failed" and c["status"] == "True" and c.get("reason") == "BackoffLimitExceeded"
        for c in job.get("status", {}).get("conditions") or ()
    )


def _claiming(promised: dict[str, _Claim], running: dict[str, _Claim], had: dict[str, set[str]]) -> dict[str, _Claim]:
    """Of the Jobs those that may have pods, now or later."""
    live = {claim.job for claim in running.values()}

    def emptied(claim: _Claim) -> bool:
        return claim.leaving and claim.job not in live and len(had.get(claim.job, ())) >= claim.pods

    return {key: claim for key, claim in promised.items() if not emptied(claim)}


def _judge_jobs(report: Report, revision: Revision, promised: dict[str, _Claim], claim: _Claim | None) -> None:
    if claim is None:
        return
    twins = [key for key, other in promised.items() if other.workload == claim.workload]
    if len(twins) > 1:
        report.violations.append(f"@{revision.number} two live Jobs for one workload: {sorted(twins)}")


def _judge_node(
    report: Report,
    revision: Revision,
    what: str,
    claims: dict[str, _Claim],
    capacity: dict[str, int],
    claim: _Claim | None,
) -> None:
    for node in claim.gpus if claim is not None else ():
        total = sum(c.gpus.get(node, 0) for c in claims.values())
        if node and total > capacity.get(node, 0):
            report.violations.append(
                f"@{revision.number} {what} node {node} claim {total} GPUs, it has {capacity.get(node, 0)}"
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
    if job["spec"].get("suspend"):
        return None  # it will get no pods, and those it still has are judged themselves
    meta, spec = job["metadata"], job["spec"]["template"]["spec"]
    workload, leaving = meta["labels"][WORKLOAD], "deletionTimestamp" in meta
    if places := meta.get("annotations", {}).get(PLACES):
        nodes = [node for node, pods in json.loads(places) for _ in range(pods)]
        done = _indices(job.get("status", {}).get("completedIndexes", ""))
        left = Counter(node for index, node in enumerate(nodes) if index not in done)
        gpus = {node: pods * _gpus(spec) for node, pods in left.items()}
        return _Claim(workload, gpus, meta["uid"], len(nodes), leaving)
    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (node,) = affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"]
    return _Claim(workload, {node: _gpus(spec)}, meta["uid"], 1, leaving)


def _indices(listed: str) -> set[int]:
    """`0,2-4` as numbers."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _pod_claim(pod: dict[str, Any] | None) -> _Claim | None:
    if pod is None or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return None
    gpus = _gpus(pod["spec"])
    if not gpus:
        return None
    labels = pod["metadata"].get("labels", {})
    return _Claim(labels.get(WORKLOAD, ""), {pod["spec"].get("nodeName", ""): gpus}, labels.get(JOB, ""))


def _gpus(spec: dict[str, Any]) -> int:
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in spec["containers"])
