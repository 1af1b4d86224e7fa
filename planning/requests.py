"""Decides what comes next for one order of a node, and what its ProvisioningRequest looks like.

For the activity behind the workflow `provisioning/<uid>`. The request and its conditions are the Cluster Autoscaler's
API (autoscaling.x-k8s.io/v1): whoever serves its class decides about nodes, berth asks, waits and takes it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from crds.gpuworkload import API_VERSION, KIND, GPUWorkloadSpec
from crds.settings import Provisioning as Rules
from crds.settings import Settings
from planning import naming
from planning.accelerators import asked_resource, known_as
from planning.backoff import delay
from planning.filters import show_gpus
from planning.jobs import order_template
from planning.model import JobView, PodView, RequestView, Stage, WorkloadView
from planning.places import least_pods
from planning.times import timestamp

# Seconds after which to look again at the latest, for a poke may be lost; and while a Job waits for its pod, a node for
# its GPUs, or an older request holds the name, of which nobody tells.
LOOK_AGAIN = 300.0
LOOK_SOON = 30.0
LONGEST_BACKOFF = 1800.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What a look at an order sees. `known`: its history says that this attempt's request was made. `coming`: a node is
    there whose GPUs will do once they are usable. `gpu_resource`: the installation's.
    """

    now: float
    generation: int
    attempt: int
    workload: WorkloadView | None
    jobs: tuple[JobView, ...]
    pods: tuple[PodView, ...]
    requests: tuple[RequestView, ...]
    known: bool
    coming: bool
    jitter: float
    gpu_resource: str


@dataclass(frozen=True, slots=True)
class Step:
    """What comes next. order: make this attempt's request. wait: `within` seconds, or for a poke. retry: take the
    request back, and look for another after `within`. fail: take it back for good. over: the same, nobody needs it.

    `reason`: why it failed, CamelCase. `message`: for a person.
    """

    kind: Literal["order", "wait", "retry", "fail", "over"]
    message: str = ""
    within: float = 0.0
    stage: Stage = ""
    reason: str = ""
    request: RequestView | None = None


def next_step(seen: Observation, rules: Rules | None) -> Step:
    """The next step of an order."""
    if not_needed := _not_needed(seen):
        return Step("over", not_needed)
    if rules is None:
        return Step("over", "provisioning is no longer among the settings")
    current = _current(seen)
    if current is None or current.deleting:
        if seen.known:
            return failed(seen, rules, "RequestDeleted", "somebody deleted it")
        if current is not None:
            return Step("wait", f"waits for the older ProvisioningRequest {current.name} to go", LOOK_SOON)
        if seen.coming:
            return Step("wait", "a node is there whose GPUs are not usable yet; none is ordered meanwhile", LOOK_SOON)
        return Step("order")
    for reason, said in (
        ("Failed", current.failed), ("CapacityRevoked", current.revoked), ("BookingExpired", current.expired),
    ):  # fmt: skip
        if said is not None:
            return failed(seen, rules, reason, said, current)
    return _open(seen, rules, current)


def failed(seen: Observation, rules: Rules, reason: str, why: str, request: RequestView | None = None) -> Step:
    """The next step after this attempt brought nothing."""
    what = f"ProvisioningRequest {request.name}: {why}" if request is not None else f"ProvisioningRequest: {why}"
    attempt = request.attempt if request is not None else seen.attempt
    if attempt >= rules.retries:
        return Step("fail", f"{what}; given up after {attempt + 1} tries", reason=reason, request=request)
    wait = delay(rules.backoff_seconds, attempt, seen.jitter, LONGEST_BACKOFF)
    told = f"{what}; retry {attempt + 1} of {rules.retries} in {wait:.0f} s"
    return Step("retry", told, wait, reason=reason, request=request)


def _not_needed(seen: Observation) -> str:
    """Why nobody needs the node (any more); '' if the workload waits for it."""
    view = seen.workload
    if view is None or view.deleting or view.finished:
        return "the workload is gone"
    if view.generation != seen.generation or view.spec is None:
        return "the workload was edited"
    if view.spec.suspend:
        return "the workload is suspended"
    # A gang's pods are bound one after the other, and all of them use what is booked.
    bound = [bool(pod.node) for pod in seen.pods]
    placed = any(bound) or any(job.ready for job in seen.jobs) if view.spec.replicas == 1 else bound and all(bound)
    return "the workload has a place" if placed or any(job.finished for job in seen.jobs) else ""


def _current(seen: Observation) -> RequestView | None:
    """This attempt's request. Where none was made yet, one of another attempt is as good: whoever made it is
    forgotten, with Temporal's data.
    """
    mine = [each for each in seen.requests if each.generation == seen.generation]
    exact = next((each for each in mine if each.attempt == seen.attempt), None)
    if exact is not None or seen.known:
        return exact
    return max((each for each in mine if not each.deleting), key=lambda each: each.attempt, default=None)


def _open(seen: Observation, rules: Rules, current: RequestView) -> Step:
    """A request that may still bring a node."""
    view = seen.workload
    told = f"ordered {_what(view.spec, seen.gpu_resource) if view is not None and view.spec is not None else ''}"
    told += f" (ProvisioningRequest {current.name})"
    if current.provisioned is not None:
        left = current.provisioned + rules.booking_seconds - seen.now
        if left <= 0:
            why = f"the workload found no place in the {rules.booking_seconds} s after it was provisioned"
            return failed(seen, rules, "BookingExpired", why, current)
        told += f"; provisioned at {timestamp(current.provisioned)}, waits for the GPUs to be usable"
        return Step("wait", told, min(left, LOOK_SOON if seen.jobs else LOOK_AGAIN), "provisioned", request=current)
    left = current.created + rules.timeout_seconds - seen.now
    if left <= 0:
        why = f"it was not provisioned in {rules.timeout_seconds} s"
        return failed(seen, rules, "TimedOut", why, current)
    if current.accepted is not None:
        told += f"; accepted at {timestamp(current.accepted)}"
        return Step("wait", told, min(left, LOOK_AGAIN), "accepted", request=current)
    told += f" at {timestamp(current.created)}; not accepted yet"
    return Step("wait", told, min(left, LOOK_AGAIN), "ordered", request=current)


def _what(spec: GPUWorkloadSpec, installed: str) -> str:
    """What is ordered, for a person: how many nodes a gang needs is the autoscaler's to find out."""
    each, pods = show_gpus(spec.gpu_count, known_as(asked_resource(spec, installed), installed)), least_pods(spec)
    return f"1 node for {each}" if pods == 1 else f"nodes for {pods} pods of {each} each"


# --- what is created -----------------------------------------------------------------------------------------------


def order_manifests(
    view: WorkloadView, attempt: int, settings: Settings, rules: Rules
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The PodTemplate and the ProvisioningRequest of one attempt; ValueError if no Job can be made of the spec."""
    template, name = order_template(view, settings), naming.request_name(view.name, view.uid, view.generation, attempt)
    metadata = _metadata(view, name, attempt)
    request = {
        "apiVersion": "autoscaling.x-k8s.io/v1",
        "kind": "ProvisioningRequest",
        "metadata": metadata,
        "spec": {
            "provisioningClassName": rules.class_name,
            "parameters": dict(rules.parameters),
            "podSets": [{"count": least_pods(view.spec) if view.spec else 1, "podTemplateRef": {"name": name}}],
        },
    }
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template}, request


def _metadata(view: WorkloadView, name: str, attempt: int) -> Mapping[str, Any]:
    model = view.spec.model_name if view.spec is not None else ""
    return {
        "name": name,
        "namespace": view.namespace,
        "labels": naming.workload_labels(view.name, view.uid, model, attempt),
        "annotations": {
            naming.CREATED_BY_ANNOTATION: naming.CREATED_BY,
            naming.GENERATION_ANNOTATION: str(view.generation),
        },
        "ownerReferences": [
            {"apiVersion": API_VERSION, "kind": KIND, "name": view.name, "uid": view.uid, "controller": True}
        ],
    }
