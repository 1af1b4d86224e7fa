"""The little that the controller keeps of each object: just enough to tell whether, and whom, a change concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from planning.model import TOMBSTONES
from planning.naming import (
    ATTEMPT_LABEL,
    FINALIZER,
    NODE_ANNOTATION,
    PLACES_ANNOTATION,
    PREEMPTED_ANNOTATION,
    WORKLOAD_LABEL,
    WORKLOAD_UID_LABEL,
)
from planning.places import places_from, pods_in
from planning.views import all_ready, is_halted


@dataclass(frozen=True, slots=True)
class WorkloadDigest:
    """`caught_up`: the status was written for this generation. `expires`: when a finished one may be deleted."""

    namespace: str
    name: str
    generation: int
    finished: bool
    deleting: bool
    finalizer: bool
    caught_up: bool
    expires: float | None


@dataclass(frozen=True, slots=True)
class JobDigest:
    """`complete`: it finished well; a Job that failed is finished only. `nodes`: all of a gang's, `node` is
    the first; `assembled`: all pods of a gang were created; `halted`: it was stopped for another, and counts no pod.
    """

    namespace: str
    name: str
    workload_uid: str
    workload: str
    attempt: int
    node: str
    ready: bool
    finished: bool
    deleting: bool
    uid: str = ""
    complete: bool = False
    nodes: tuple[str, ...] = ()
    assembled: bool = False
    halted: bool = False

    @property
    def telling(self) -> bool:
        """True once there is something for the workload's own workflow to see."""
        return self.finished or self.deleting


@dataclass(frozen=True, slots=True)
class NodeDigest:
    name: str
    able: bool  # ready and in service
    fingerprint: int  # of all that placement looks at
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestDigest:
    """A ProvisioningRequest. `told`: the conditions that are true of it."""

    workload_uid: str
    told: frozenset[str]


def workload_digest(raw: Mapping[str, Any]) -> WorkloadDigest:
    meta, status = raw.get("metadata") or {}, raw.get("status") or {}
    spec = raw.get("spec")
    ttl = spec.get("ttlSecondsAfterFinished") if isinstance(spec, dict) else None
    phase = status.get("phase")
    finished = phase in TOMBSTONES
    ended = _seconds(status.get("finishTime"))
    return WorkloadDigest(
        namespace=meta.get("namespace", ""),
        name=meta.get("name", ""),
        generation=int(meta.get("generation") or 0),
        finished=finished,
        deleting="deletionTimestamp" in meta,
        finalizer=FINALIZER in (meta.get("finalizers") or ()),
        caught_up=status.get("observedGeneration") == meta.get("generation"),
        expires=ended + ttl if finished and ended is not None and isinstance(ttl, int) else None,
    )


def job_digest(raw: Mapping[str, Any]) -> JobDigest | None:
    meta, status = raw.get("metadata") or {}, raw.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    uid = labels.get(WORKLOAD_UID_LABEL)
    if not uid:
        return None
    owner: Mapping[str, Any] = next((o for o in meta.get("ownerReferences") or () if o.get("uid") == uid), {})
    attempt = str(labels.get(ATTEMPT_LABEL, "0"))
    places = places_from(annotations.get(PLACES_ANNOTATION), (raw.get("spec") or {}).get("completions"))
    pods = pods_in(places)
    ended = {c.get("type") for c in status.get("conditions") or () if c.get("status") == "True"}
    return JobDigest(
        namespace=meta.get("namespace", ""),
        name=meta.get("name", ""),
        workload_uid=uid,
        workload=owner.get("name") or labels.get(WORKLOAD_LABEL, ""),
        attempt=int(attempt) if attempt.isdigit() else 0,
        node=str(annotations.get(NODE_ANNOTATION, ""))[:253],
        ready=all_ready(status, pods),
        finished=not ended.isdisjoint(("Complete", "Failed")),
        deleting="deletionTimestamp" in meta,
        uid=meta.get("uid", ""),
        complete="Complete" in ended,
        nodes=tuple(name for name, _ in places),
        assembled=0 < pods <= int(status.get("active") or 0),
        halted=PREEMPTED_ANNOTATION in annotations and is_halted(status),
    )


def request_digest(raw: Mapping[str, Any]) -> RequestDigest | None:
    uid = ((raw.get("metadata") or {}).get("labels") or {}).get(WORKLOAD_UID_LABEL)
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return RequestDigest(uid, frozenset(c["type"] for c in conditions if c.get("status") == "True")) if uid else None


def node_digest(raw: Mapping[str, Any]) -> NodeDigest:
    meta, spec, status = raw.get("metadata") or {}, raw.get("spec") or {}, raw.get("status") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    taints = spec.get("taints") or ()
    seen = (
        ready,
        bool(spec.get("unschedulable")),
        sorted((t.get("key", ""), t.get("value", ""), t.get("effect", "")) for t in taints),
        sorted((meta.get("labels") or {}).items()),
        sorted((status.get("allocatable") or {}).items()),
    )
    out = any(t.get("key") == "node.kubernetes.io/out-of-service" for t in taints)
    return NodeDigest(meta.get("name", ""), ready and not out, hash(str(seen)), meta.get("labels") or {})


def _seconds(timestamp: object) -> float | None:
    if not isinstance(timestamp, str):
        return None
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return None
