"""Turns Kubernetes objects into the small values that planning works on; for the activities' cache and single reads.

Nothing here raises, whatever the object: what cannot be read counts as absent, and a GPUWorkload that the models
refuse becomes a view that says where and why. Nothing large is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from crds.gpuquota import GPUQuotaSpec
from crds.gpureservation import GPUReservationSpec
from crds.gpuworkload import MAX_INT32, GPUWorkloadSpec, serialised_size
from planning.accelerators import AMD, NVIDIA, gpu_counts, gpu_model, known_as, memory_mib, seat_size
from planning.devices.prefer_group import preferred_group
from planning.model import (
    TOMBSTONES,
    Ended,
    Gap,
    JobView,
    NodeView,
    PodView,
    QuotaView,
    RequestView,
    Resources,
    Taint,
    WorkloadView,
)
from planning.naming import (
    ATTEMPT_LABEL,
    BACKFILL_ANNOTATION,
    FINALIZER,
    GATE,
    GENERATION_ANNOTATION,
    INDEX_KEY,
    LENT_ANNOTATION,
    NODE_ANNOTATION,
    PLACES_ANNOTATION,
    PREEMPTED_ANNOTATION,
    REQUESTS_ANNOTATION,
    RESUMED_ANNOTATION,
    RETRIES_ANNOTATION,
    SPEC_HASH_ANNOTATION,
    STRATEGY_ANNOTATION,
    WITHDRAWN_ANNOTATION,
    WORKLOAD_UID_LABEL,
)
from planning.places import places_from, pods_in
from planning.podspecs import mapping, mappings, pod_requests, resources_of, text
from planning.quantities import amounts
from planning.times import seconds
from planning.windows import ReservationView

_STATUS_LIMIT = 64 * 1024
_MESSAGE_LIMIT = 1024


def node_view(raw: object, gpu_resource: str) -> NodeView:
    """A node. Its allocatable GPUs alone count; capacity and labels only tell why there are none."""
    node = mapping(raw)
    meta, spec, status = mapping(node.get("metadata")), mapping(node.get("spec")), mapping(node.get("status"))
    ready, since = False, None
    for condition in mappings(status.get("conditions")):
        if condition.get("type") == "Ready":
            ready = condition.get("status") == "True"
            since = None if ready else seconds(condition.get("lastTransitionTime"))
    labels = {str(key): value for key, value in mapping(meta.get("labels")).items() if isinstance(value, str)}
    allocatable = amounts(status.get("allocatable"))
    gpus, capacity = (gpu_counts(each, gpu_resource) for each in (allocatable, amounts(status.get("capacity"))))
    gaps = tuple(_gaps(dict(gpus), dict(capacity), labels, gpu_resource))
    known = dict.fromkeys([*(name for name, _ in gpus), *(gap.resource for gap in gaps)])
    memory = ((name, memory_mib(labels, name or gpu_resource)) for name in known)
    models = ((name, sys.intern(gpu_model(labels, name or gpu_resource))) for name in known)
    return NodeView(
        name=text(meta.get("name")),
        uid=text(meta.get("uid")),
        resource_version=_integer(meta.get("resourceVersion")),
        ready=ready,
        unschedulable=spec.get("unschedulable") is True,
        taints=tuple(
            Taint(text(taint.get("key")), text(taint.get("value")), text(taint.get("effect")))
            for taint in mappings(spec.get("taints"))
        ),
        labels=labels,
        allocatable=Resources.counting(
            gpus, allocatable.get("cpu", 0), allocatable.get("memory", 0), allocatable.get("pods", 0)
        ),
        gaps=gaps,
        not_ready_since=since,
        created=seconds(meta.get("creationTimestamp")) or 0.0,
        gpu_memory=tuple((name, mib) for name, mib in memory if mib),
        gpu_models=tuple((name, model) for name, model in models if model),
    )


def pod_view(raw: object, gpu_resource: str) -> PodView | None:
    """A live pod; None when it has ended (Succeeded or Failed), for then it holds nothing."""
    pod = mapping(raw)
    meta, spec, status = mapping(pod.get("metadata")), mapping(pod.get("spec")), mapping(pod.get("status"))
    phase = status.get("phase")
    if not meta or phase in ("Succeeded", "Failed"):
        return None
    labels = mapping(meta.get("labels"))
    blocked = ""
    if not spec.get("nodeName"):
        for condition in mappings(status.get("conditions")):
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                if condition.get("reason") == "SchedulingGated":
                    continue  # nobody has tried it yet
                blocked = (text(condition.get("message")) or text(condition.get("reason")))[:_MESSAGE_LIMIT]
    return PodView(
        uid=text(meta.get("uid")),
        namespace=text(meta.get("namespace")),
        name=text(meta.get("name")),
        resource_version=_integer(meta.get("resourceVersion")),
        node=text(spec.get("nodeName")),
        requests=resources_of(pod_requests(spec), gpu_resource),
        workload_uid=text(labels.get(WORKLOAD_UID_LABEL)),
        job_name=_job_of(meta, labels),
        terminating=meta.get("deletionTimestamp") is not None,
        gone_by=seconds(meta.get("deletionTimestamp")),
        running=phase == "Running",
        blocked=blocked,
        index=pod_index(meta),
        gated=is_gated(spec),
        prefers=preferred_group(meta),
    )


def pod_index(meta: Mapping[str, Any]) -> int:
    """Which of its Job's pods it is, by its metadata; -1 unless they are numbered."""
    return _index(mapping(meta.get("labels")).get(INDEX_KEY))


def is_gated(spec: Mapping[str, Any]) -> bool:
    """Whether berth's own gate keeps the kube-scheduler off a pod of this spec."""
    return any(gate.get("name") == GATE for gate in mappings(spec.get("schedulingGates")))


def job_view(raw: object, gpu_resource: str) -> JobView | None:
    """A Job that berth made, read back from its own labels and annotations; None for any other Job."""
    job = mapping(raw)
    meta, spec, status = mapping(job.get("metadata")), mapping(job.get("spec")), mapping(job.get("status"))
    labels, annotations = mapping(meta.get("labels")), mapping(meta.get("annotations"))
    workload_uid = text(labels.get(WORKLOAD_UID_LABEL))
    if not workload_uid:
        return None
    finished, finished_at, reason, message = "", None, "", ""
    for condition in mappings(status.get("conditions")):
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            finished = text(condition.get("type"))
            finished_at = seconds(condition.get("lastTransitionTime"))
            reason = text(condition.get("reason"))[:256]
            message = text(condition.get("message"))[:_MESSAGE_LIMIT]
            break
    deadline = spec.get("activeDeadlineSeconds")
    places = places_from(annotations.get(PLACES_ANNOTATION), spec.get("completions"))
    suspended = spec.get("suspend") is True
    preempted = suspended and PREEMPTED_ANNOTATION in annotations
    resumed = _resumed(annotations.get(RESUMED_ANNOTATION), status)
    return JobView(
        uid=text(meta.get("uid")),
        namespace=text(meta.get("namespace")),
        name=text(meta.get("name")),
        resource_version=_integer(meta.get("resourceVersion")),
        workload_uid=workload_uid,
        attempt=min(_integer(labels.get(ATTEMPT_LABEL)), MAX_INT32),
        retries=min(_integer(annotations.get(RETRIES_ANNOTATION)), MAX_INT32),
        node=text(annotations.get(NODE_ANNOTATION))[:253],
        requests=_job_requests(
            annotations.get(REQUESTS_ANNOTATION), mapping(spec.get("template")).get("spec"), gpu_resource
        ),
        created=max(seconds(meta.get("creationTimestamp")) or 0.0, resumed or 0.0),
        started=seconds(status.get("startTime")),
        ready=all_ready(status, pods_in(places)),
        finished=finished,
        finished_at=finished_at,
        reason=reason,
        message=message,
        deleting=meta.get("deletionTimestamp") is not None,
        active_deadline=deadline if isinstance(deadline, int) and not isinstance(deadline, bool) else None,
        counted=_counted(status),
        strategy=text(annotations.get(STRATEGY_ANNOTATION))[:63],
        spec_hash=text(annotations.get(SPEC_HASH_ANNOTATION))[:63],
        withdrawn=WITHDRAWN_ANNOTATION in annotations,
        suspended=suspended,
        preempted=preempted,
        halted=preempted and is_halted(status),
        resumed=resumed is not None,
        backfill=_number(annotations.get(BACKFILL_ANNOTATION)),
        places=places,
        done=_indices(status.get("completedIndexes"), pods_in(places)),
        missing=_missing(status, pods_in(places)),
        lent=LENT_ANNOTATION in annotations,
    )


def _resumed(mark: object, status: Mapping[str, Any]) -> float | None:
    """Since when a Job goes on that was stopped: what is written on it, if its controller ever had it suspended, and no
    later than that says. Anybody who may edit Jobs may write there, and the deadline by which it must have a place
    counts from it.
    """
    since = _number(mark)
    told = next((each for each in mappings(status.get("conditions")) if each.get("type") == "Suspended"), None)
    if since is None or told is None:
        return None
    return min(since, seconds(told.get("lastTransitionTime")) or since) if told.get("status") == "False" else since


def is_halted(status: Mapping[str, Any]) -> bool:
    """Whether the Job controller has suspended a Job, and counts no pod of it, not even one that is going."""
    suspended = any(
        condition.get("type") == "Suspended" and condition.get("status") == "True"
        for condition in mappings(status.get("conditions"))
    )
    return suspended and not any(_integer(status.get(key)) for key in ("active", "terminating"))


def all_ready(status: Mapping[str, Any], pods: int) -> bool:
    """Whether a Job's pods are ready: of a gang's `pods` all that have not ended well."""
    ready = _integer(status.get("ready"))
    return ready > 0 and ready + _integer(status.get("succeeded")) >= pods


def quota_view(raw: object) -> QuotaView:
    """A GPUQuota; what the models refuse has no spec, and says why."""
    spec, invalid = GPUQuotaSpec.parse(mapping(raw).get("spec"))
    return QuotaView(*_identity(raw), spec, invalid, _bounded_status(raw))


def reservation_view(raw: object) -> ReservationView:
    """A GPUReservation; what the models refuse has no spec, and says why."""
    spec, invalid = GPUReservationSpec.parse(mapping(raw).get("spec"))
    return ReservationView(*_identity(raw), spec, invalid, _bounded_status(raw))


def _identity(raw: object) -> tuple[str, str, int, int, float]:
    """Name, UID, resourceVersion, generation and when it was created."""
    meta = mapping(mapping(raw).get("metadata"))
    return (
        text(meta.get("name")),
        text(meta.get("uid")),
        _integer(meta.get("resourceVersion")),
        _integer(meta.get("generation")),
        seconds(meta.get("creationTimestamp")) or 0.0,
    )


def _bounded_status(raw: object) -> Mapping[str, Any]:
    status = mapping(mapping(raw).get("status"))
    return status if serialised_size(status, _STATUS_LIMIT) <= _STATUS_LIMIT else {}


def request_view(raw: object) -> RequestView:
    """A ProvisioningRequest of berth's; conditions that are not True count as absent."""
    request = mapping(raw)
    meta, spec = mapping(request.get("metadata")), mapping(request.get("spec"))
    labels, annotations = mapping(meta.get("labels")), mapping(meta.get("annotations"))
    moments: dict[str, float] = {}
    messages: dict[str, str] = {}
    for condition in mappings(mapping(request.get("status")).get("conditions")):
        if condition.get("status") == "True":
            kind = text(condition.get("type"))
            moments[kind] = seconds(condition.get("lastTransitionTime")) or 0.0
            said = text(condition.get("message")) or text(condition.get("reason")) or kind
            messages[kind] = said[:_MESSAGE_LIMIT]
    return RequestView(
        name=text(meta.get("name")),
        uid=text(meta.get("uid")),
        attempt=min(_integer(labels.get(ATTEMPT_LABEL)), MAX_INT32),
        generation=_integer(annotations.get(GENERATION_ANNOTATION)),
        class_name=text(spec.get("provisioningClassName")),
        created=seconds(meta.get("creationTimestamp")) or 0.0,
        deleting=meta.get("deletionTimestamp") is not None,
        accepted=moments.get("Accepted"),
        provisioned=moments.get("Provisioned"),
        failed=messages.get("Failed"),
        expired=messages.get("BookingExpired"),
        revoked=messages.get("CapacityRevoked"),
    )


ParseSpec = Callable[[object], tuple[GPUWorkloadSpec | None, str]]


def workload_view(raw: object, parse: ParseSpec = GPUWorkloadSpec.parse) -> WorkloadView:
    """A GPUWorkload. An invalid or oversized spec is not kept: `spec` is None and `invalid` tells where and why.

    Of a tombstone's status only the phase, its sentence and what can be learned from it are kept. `parse` stands in for
    the model's own where equal specs are shared.
    """
    workload = mapping(raw)
    meta, status = mapping(workload.get("metadata")), mapping(workload.get("status"))
    spec, invalid = parse(workload.get("spec"))
    listed = meta.get("finalizers")
    finalizers = [f for f in listed if isinstance(f, str)] if isinstance(listed, list | tuple) else []
    if status and serialised_size(status, _STATUS_LIMIT) > _STATUS_LIMIT:
        status = {"phase": text(status.get("phase"))[:32]}  # somebody else wrote this; a tombstone stays one
    ended = None
    if status.get("phase") in TOMBSTONES:
        ended = _ended(status)
        status = {key: status[key] for key in ("phase", "message") if key in status}
    return WorkloadView(
        uid=text(meta.get("uid")),
        namespace=text(meta.get("namespace")),
        name=text(meta.get("name")),
        resource_version=_integer(meta.get("resourceVersion")),
        generation=_integer(meta.get("generation")),
        created=seconds(meta.get("creationTimestamp")) or 0.0,
        spec=spec,
        invalid=invalid,
        deleting=meta.get("deletionTimestamp") is not None,
        finalizer=FINALIZER in finalizers,
        other_finalizers=tuple(f for f in finalizers if f != FINALIZER),
        status=status,
        ended=ended,
    )


def _ended(status: Mapping[str, Any]) -> Ended | None:
    """What a tombstone tells of its run; None unless it says when."""
    finished = seconds(status.get("finishTime"))
    for condition in mappings(status.get("conditions")):
        if condition.get("type") == "Finished" and condition.get("status") == "True":
            told = seconds(condition.get("lastTransitionTime"))
            if told is None or told <= 0 or finished is None:
                return None
            return Ended(
                told=told,
                finished=finished,
                started=seconds(status.get("startTime")),
                reason=text(condition.get("reason"))[:256],
                retries=min(_integer(status.get("retryCount")), MAX_INT32),
            )
    return None


def requests_text(requests: Resources) -> str:
    """Requests as a Job's annotation holds them."""
    told = {"gpus": requests.gpus, "cpuMilli": requests.cpu_milli, "memory": requests.memory, "pods": requests.pods}
    named = {"gpuResource": requests.gpu_resource} if requests.gpu_resource else {}
    return json.dumps({**told, **named}, separators=(",", ":"))


def _indices(listed: object, pods: int) -> frozenset[int]:
    """The numbers below `pods` in a list such as `0,2-5`; what cannot be read counts as none."""
    found: set[int] = set()
    for part in text(listed).split(",", pods)[:pods]:
        first, _, last = part.partition("-")
        low, high = _index(first), _index(last or first)
        if 0 <= low <= high:
            found.update(range(low, min(high + 1, pods)))
    return frozenset(found)


def _index(value: object) -> int:
    """A pod's index; -1 for anything else."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 7 else -1


def _missing(status: Mapping[str, Any], pods: int) -> int:
    """How many of a gang's pods are yet to be created; 0 once one has failed, for then its Job ends."""
    failing = any(condition.get("type") == "FailureTarget" for condition in mappings(status.get("conditions")))
    if failing or _integer(status.get("failed")) or any(mapping(status.get("uncountedTerminatedPods")).values()):
        return 0
    return max(0, pods - sum(_integer(status.get(key)) for key in ("active", "terminating", "succeeded")))


def _counted(status: Mapping[str, Any]) -> bool:
    """Whether the Job controller ever counted a pod: it goes, it ended, or the Job's end is about to be written. For a
    moment between a pod's end and the Job's, `active` is 0.
    """
    if any(_integer(status.get(key)) > 0 for key in ("active", "terminating", "succeeded", "failed")):
        return True
    if any(mapping(status.get("uncountedTerminatedPods")).values()):
        return True
    return any(
        condition.get("type") in ("SuccessCriteriaMet", "FailureTarget") and condition.get("status") == "True"
        for condition in mappings(status.get("conditions"))
    )


def _job_requests(annotation: object, pod_spec: object, gpu_resource: str) -> Resources:
    """What the Job's pod asks for: from the annotation, or (if somebody damaged that) from its pod template."""
    try:
        found = json.loads(annotation) if isinstance(annotation, str) and len(annotation) < 1024 else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        values = [found.get(key) for key in ("gpus", "cpuMilli", "memory", "pods")]
        if all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 for value in values):
            gpus, cpu_milli, memory, pods = (int(value) for value in values if isinstance(value, int))
            resource = sys.intern(text(found.get("gpuResource")))
            return Resources(gpus, cpu_milli, memory, pods, gpu_resource=resource)
    return resources_of(pod_requests(pod_spec), gpu_resource)


def _gaps(
    gpus: Mapping[str, int], capacity: Mapping[str, int], labels: Mapping[str, str], gpu_resource: str
) -> Iterator[Gap]:
    """Why the node offers no GPU of a resource that it has, and how many to expect."""
    for name, count in capacity.items():
        if count > 0 and gpus.get(name, 0) == 0:
            what = name or "GPUs"
            yield Gap(
                count,
                f"capacity shows {count} {what} but allocatable 0: the device plugin is not ready or all are unhealthy",
                name,
            )
    if any(seat_size(name) for name in capacity):
        return  # what the labels tell of may well be in the seats
    for resource in dict.fromkeys((gpu_resource, NVIDIA, AMD)):
        name = known_as(resource, gpu_resource)
        if gpus.get(name, 0) == 0 and capacity.get(name, 0) == 0:
            gap = _labelled(resource, labels)
            if gap:
                yield Gap(*gap, name)


def _labelled(resource: str, labels: Mapping[str, str]) -> tuple[int, str] | None:
    """How many GPUs of a resource that is not registered the labels tell of (0: some), and which of them does."""
    count = labels.get(f"{resource}.count", "")
    expected = int(count) if count.isdecimal() and len(count) <= 3 else 0
    if expected > 0:
        return expected, f"label {resource}.count={count} but no GPU is registered: no device plugin runs there"
    for label in (resource, f"{resource}.present"):
        value = labels.get(label, "")
        if value and value.lower() not in ("false", "0"):
            return 0, f"label {label}={value} but no GPU is registered: no device plugin runs there"
    return None


def _job_of(meta: Mapping[str, Any], labels: Mapping[str, Any]) -> str:
    """The Job that made a pod: by its owner reference, else by the Job controller's label."""
    for owner in mappings(meta.get("ownerReferences")):
        if owner.get("kind") == "Job" and owner.get("controller") is True:
            return text(owner.get("name"))
    return text(labels.get("batch.kubernetes.io/job-name")) or text(labels.get("job-name"))


def _integer(value: object) -> int:
    """A non-negative integer out of an integer or its digits; 0 for all else."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int):
        return max(value, 0)
    if isinstance(value, str) and value.isdecimal() and value.isascii() and len(value) <= 20:
        return int(value)
    return 0


def _number(value: object) -> float | None:
    """A time as berth writes it into an annotation, in whole seconds; None for anything else."""
    return float(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12 else None
