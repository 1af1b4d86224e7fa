"""Decides what the Job of a GPUWorkload looks like, and what of it placement must know beforehand.

For the activity that creates Jobs. A Job is pinned to its node by affinity, so that the kube-scheduler still checks
everything; a gang's pods are held back by a gate, and pinned one by one. It neither retries nor disappears by itself,
because berth counts retries and records outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crds.gpuworkload import API_VERSION, KIND, ContainerResources, GPUWorkloadSpec
from crds.settings import Settings
from planning import naming
from planning.accelerators import KNOWN, asked_resource, is_gpu, known_as, memory_label, seat_size, taint_keys
from planning.filters import Constraints, Shape, TolerationView
from planning.model import Assignment, Resources, Stopped, Turn, WorkloadView
from planning.places import gang_of, places_text, pods_in
from planning.podspecs import (
    container_requests,
    mapping,
    mappings,
    node_terms,
    pod_requests,
    resources_of,
    selector,
    text,
    tolerations,
)
from planning.quantities import MEBIBYTE, quantity, whole
from planning.views import requests_text

Manifest = dict[str, Any]

# Annotations that a Job and its pods have in some turns only.
_OF_A_TURN = (
    naming.BACKFILL_ANNOTATION,
    naming.LENT_ANNOTATION,
    naming.PREEMPTED_ANNOTATION,
    naming.WITHDRAWN_ANNOTATION,
)
_OF_A_POD = (naming.CONSUME_ANNOTATION, naming.CLASS_ANNOTATION)


def refusal(spec: GPUWorkloadSpec, settings: Settings) -> str:
    """'' if a Job can be made of this spec, else where and why not, for a person."""
    gpu, installed = asked_resource(spec, settings.gpu_resource), settings.gpu_resource
    if gpu != installed and not is_gpu(gpu):
        own = "" if is_gpu(installed) else f", and here {installed}"
        return f"spec.gpuResource: {gpu} is nothing that berth counts as GPUs; it counts {KNOWN}{own}"
    if spec.reservation is not None and gpu != installed:
        return f"spec.reservation: reserved are GPUs of {installed}, and this workload asks for {gpu}"
    if seat_size(gpu) and spec.gpu_count != 1:
        return f"spec.gpuCount: must be 1, for a workload has one seat ({gpu}); larger ones are named by gpuResource"
    if spec.gpu_memory is not None and whole(spec.gpu_memory) < MEBIBYTE:
        return f"spec.gpuMemory: {spec.gpu_memory} is less than a MiB; it wants a unit, such as 40G"
    if spec.resources is not None:
        for name in (*spec.resources.requests, *spec.resources.limits):
            if is_gpu(name) or name == installed:
                how = "gpuCount" if name == gpu else "gpuCount and gpuResource"
                return f"spec.resources: GPUs are asked for by {how}; remove {name}"
    return _template_refusal(spec, settings) if spec.template is not None else ""


def requests_of(spec: GPUWorkloadSpec, settings: Settings) -> Resources:
    """What the pod of this spec will ask for, in planning's units."""
    return resources_of(pod_requests(_pod_spec(spec, settings)), settings.gpu_resource)


def shape_of(spec: GPUWorkloadSpec, settings: Settings) -> Shape:
    """All that decides where this spec fits."""
    gpu = asked_resource(spec, settings.gpu_resource)
    memory = _mebibytes(spec.gpu_memory)
    kind = known_as(gpu, settings.gpu_resource) if memory else ""
    if spec.template is None:
        asked = _simple_requests(spec.resources)
        asked[gpu] = spec.gpu_count
        tolerated = [
            TolerationView(item.key, item.operator, item.value, item.effect) for item in spec.tolerations or ()
        ]
        tolerated += (TolerationView(k, "Exists", "", "NoSchedule") for k in taint_keys(gpu, settings.gpu_resource))
        chosen = tuple(sorted((spec.node_selector or {}).items()))
        constraints = Constraints(chosen, tuple(tolerated), None, kind, memory)
        return Shape(resources_of(asked, settings.gpu_resource), constraints)
    pod = _pod_spec(spec, settings)
    return Shape(
        resources_of(pod_requests(pod), settings.gpu_resource),
        Constraints(
            selector(pod.get("nodeSelector")),
            tolerations(pod.get("tolerations")),
            node_terms(pod.get("affinity")),
            kind,
            memory,
        ),
    )


def job_manifest(workload: WorkloadView, assignment: Assignment, settings: Settings) -> Manifest:
    """The Job for this assignment, complete; ValueError if no Job can be made of the spec."""
    manifest = _manifest(workload, assignment.turn, assignment.strategy, settings, pods_in(assignment.places))
    manifest["metadata"]["name"] = assignment.job_name
    manifest["metadata"]["annotations"] |= {
        naming.NODE_ANNOTATION: assignment.node,
        naming.REQUESTS_ANNOTATION: requests_text(assignment.requests),
    }
    if assignment.backfill is not None:
        manifest["metadata"]["annotations"][naming.BACKFILL_ANNOTATION] = str(int(assignment.backfill))
    if assignment.lent:
        manifest["metadata"]["annotations"][naming.LENT_ANNOTATION] = "true"
    if assignment.booking is not None:
        manifest["spec"]["template"]["metadata"]["annotations"] |= {
            naming.CONSUME_ANNOTATION: assignment.booking.request,
            naming.CLASS_ANNOTATION: assignment.booking.class_name,
        }
    if assignment.places:
        manifest["metadata"]["annotations"][naming.PLACES_ANNOTATION] = places_text(assignment.places)
    else:
        pod = manifest["spec"]["template"]["spec"]
        pod["affinity"] = pinned(pod.get("affinity"), assignment.node)
    return manifest


def resumed(manifest: Manifest, stopped: Stopped, now: float) -> Manifest:
    """The merge patch by which a Job that was stopped becomes the one of `manifest` and goes on, in one write.

    Both were made from the same spec, so it names every key that may be too many. It holds the whole pod template:
    where containers differ (the settings may have changed) the API server refuses it. Keys that others added stay.
    """
    meta, spec = manifest["metadata"], manifest["spec"]
    template = {**spec["template"]["metadata"]}
    template["annotations"] = dict.fromkeys(_OF_A_POD) | template["annotations"]
    return {
        "metadata": {
            "uid": stopped.uid,
            "resourceVersion": str(stopped.version),
            "labels": meta["labels"],
            "annotations": dict.fromkeys(_OF_A_TURN) | meta["annotations"] | {naming.RESUMED_ANNOTATION: str(int(now))},
        },
        "spec": {
            "suspend": False,
            "activeDeadlineSeconds": spec.get("activeDeadlineSeconds"),
            "template": {"metadata": template, "spec": spec["template"]["spec"]},
        },
    }


def pinned(affinity: object, node: str) -> Manifest:
    """Require the node by name, in addition to whatever node affinity there is: every term gets the requirement, which
    is also all that may be done to a pod behind a gate.
    """
    pin = {"key": "metadata.name", "operator": "In", "values": [node]}
    return _required(affinity, "matchFields", [pin])


def _required(affinity: object, part: str, either: list[Manifest]) -> Manifest:
    """The affinity with one of these requirements in that part of every term: each term once for each of them."""
    whole = {**mapping(affinity)}
    node_affinity = {**mapping(whole.get("nodeAffinity"))}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = [dict(term) for term in mappings(mapping(node_affinity.get(key)).get("nodeSelectorTerms"))]
    if isinstance(node_affinity.get(key), Mapping):
        # An empty term matches nothing, and stays so.
        empty = [not (term.get("matchExpressions") or term.get("matchFields")) for term in terms]
        terms = [
            term if nothing else {**term, part: [*mappings(term.get(part)), each]}
            for term, nothing in zip(terms, empty, strict=True)
            for each in (either[:1] if nothing else either)
        ]
    else:
        terms = [{part: [each]} for each in either]
    node_affinity[key] = {"nodeSelectorTerms": terms}
    whole["nodeAffinity"] = node_affinity
    return whole


def lifted(pod: Mapping[str, Any], node: str) -> Manifest:
    """The merge patch that tells a gated pod its node and lifts berth's gate, for the pod as it is here only."""
    meta, spec = mapping(pod.get("metadata")), mapping(pod.get("spec"))
    others = [gate for gate in mappings(spec.get("schedulingGates")) if gate.get("name") != naming.GATE]
    return {
        "metadata": {"uid": meta.get("uid"), "resourceVersion": meta.get("resourceVersion")},
        "spec": {"schedulingGates": others, "affinity": pinned(spec.get("affinity"), node)},
    }


def order_template(workload: WorkloadView, settings: Settings) -> Manifest:
    """The template of its Job's pod before a node is chosen, for whoever looks for a node by it: it says also how much
    memory the GPUs must have, as far as labels can tell. ValueError if no Job can be made of the spec.
    """
    template: Manifest = _manifest(workload, Turn(), "", settings, 0)["spec"]["template"]  # no gate: it is never run
    spec, pod = workload.spec, template["spec"]
    if spec is not None and spec.gpu_memory is not None:
        label = memory_label(asked_resource(spec, settings.gpu_resource))
        most = str(_mebibytes(spec.gpu_memory) - 1)
        # A node group that has no node yet, or another vendor's, does not show the label.
        enough = {"key": label, "operator": "Gt", "values": [most]}
        untold = {"key": label, "operator": "DoesNotExist"}
        pod["affinity"] = _required(pod.get("affinity"), "matchExpressions", [enough, untold])
    return template


def examination_manifest(workload: WorkloadView, settings: Settings) -> Manifest:
    """The same Job without a node, for a dry run by which the API server checks a template."""
    gang = gang_of(workload.spec) if workload.spec is not None else None
    manifest = _manifest(workload, Turn(), "", settings, gang.pods if gang is not None else 0)
    manifest["metadata"]["generateName"] = naming.job_name(workload.name, workload.uid, 0)[:50].rstrip("-") + "-"
    return manifest


def _manifest(workload: WorkloadView, turn: Turn, strategy: str, settings: Settings, pods: int) -> Manifest:
    """`pods`: of a gang; 0 for a single one."""
    spec = workload.spec
    if spec is None:
        raise ValueError(workload.invalid or "the spec is not valid")
    refused = refusal(spec, settings)
    if refused:
        raise ValueError(refused)
    labels = naming.workload_labels(workload.name, workload.uid, spec.model_name, turn.attempt)
    annotations = {
        naming.CREATED_BY_ANNOTATION: naming.CREATED_BY,
        naming.MODEL_NAME_ANNOTATION: spec.model_name,
        naming.RETRIES_ANNOTATION: str(turn.retries),
        naming.STRATEGY_ANNOTATION: strategy,
        naming.SPEC_HASH_ANNOTATION: naming.spec_hash(spec),
    }
    given = mapping((spec.template or {}).get("metadata"))
    metadata: Manifest = {
        "labels": {**mapping(given.get("labels")), **labels},
        "annotations": {**mapping(given.get("annotations")), naming.MODEL_NAME_ANNOTATION: spec.model_name},
    }
    job: Manifest = {
        "backoffLimit": 0,
        "completions": 1,
        "parallelism": 1,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": metadata, "spec": _pod_spec(spec, settings)},
    }
    if pods:
        job |= {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
        _gate(job["template"]["spec"], pods)
    if spec.active_deadline_seconds is not None:
        job["activeDeadlineSeconds"] = spec.active_deadline_seconds
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "namespace": workload.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": workload.name,
                    "uid": workload.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": job,
    }


def _pod_spec(spec: GPUWorkloadSpec, settings: Settings) -> Manifest:
    """The pod spec without a node. From a template every field is kept but those that berth answers for."""
    gpu, count = asked_resource(spec, settings.gpu_resource), str(spec.gpu_count)
    if spec.template is None:
        container: Manifest = {"name": naming.CONTAINER, "image": spec.image or settings.default_image}
        resources = spec.resources or ContainerResources()
        container["resources"] = {"limits": {**resources.limits, gpu: count}, "requests": dict(resources.requests)}
        given = [item.model_dump(by_alias=True, exclude_none=True) for item in spec.env or ()]
        container["env"] = given
        command, arguments = spec.command, spec.args
        if spec.image is None and command is None and arguments is None:
            command, arguments = settings.default_command, settings.default_args
        if command:
            container["command"] = list(command)
        if arguments:
            container["args"] = list(arguments)
        pod: Manifest = {"containers": [container]}
    else:
        pod = _copy(mapping(spec.template.get("spec")))
        if _asked_gpus(pod, gpu) == 0:
            first = pod["containers"][0]
            resources_of_first = {**mapping(first.get("resources"))}
            resources_of_first["limits"] = {**mapping(resources_of_first.get("limits")), gpu: count}
            if gpu in mapping(resources_of_first.get("requests")):
                resources_of_first["requests"] = {**mapping(resources_of_first.get("requests")), gpu: count}
            first["resources"] = resources_of_first
    for container in pod["containers"]:
        _tell_what_it_is(container, spec, seat_size(gpu) or spec.gpu_count)
    pod["restartPolicy"] = "Never"  # podFailurePolicy demands it, and a second run would be a retry nobody counted
    if spec.node_selector:
        pod["nodeSelector"] = {**mapping(pod.get("nodeSelector")), **spec.node_selector}
    own = [item.model_dump(by_alias=True, exclude_defaults=True) for item in spec.tolerations or ()]
    added = (
        {"key": key, "operator": "Exists", "effect": "NoSchedule"}  # as ExtendedResourceToleration would add
        for key in taint_keys(gpu, settings.gpu_resource)
    )
    pod["tolerations"] = [*mappings(pod.get("tolerations")), *own, *added]
    return pod


def _tell_what_it_is(container: Manifest, spec: GPUWorkloadSpec, gpus: int) -> None:
    """MODEL_NAME and GPU_COUNT unless the person set them, and last words that outlive the container."""
    given = container.get("env")
    env = list(given) if isinstance(given, list) else []
    named = {text(item.get("name")) for item in mappings(env)}
    told = {"MODEL_NAME": spec.model_name, "GPU_COUNT": str(gpus)}
    container["env"] = [{"name": key, "value": value} for key, value in told.items() if key not in named] + env
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _gate(pod: Manifest, pods: int) -> None:
    """Hold the pods back until all are there, and tell each of how many it is one."""
    pod["schedulingGates"] = [*mappings(pod.get("schedulingGates")), {"name": naming.GATE}]
    for container in pod["containers"]:
        if not any(item.get("name") == "REPLICAS" for item in mappings(container["env"])):
            container["env"].insert(0, {"name": "REPLICAS", "value": str(pods)})


def _template_refusal(spec: GPUWorkloadSpec, settings: Settings) -> str:
    """What in a template contradicts the rest of the spec, or takes a decision that is berth's."""
    pod, gpu = mapping((spec.template or {}).get("spec")), asked_resource(spec, settings.gpu_resource)
    if pod.get("nodeName"):
        return "spec.template.spec.nodeName: berth chooses the node; use nodeSelector or node affinity"
    if text(pod.get("restartPolicy")) not in ("", "Never"):
        return "spec.template.spec.restartPolicy: must be Never; berth's own retryPolicy decides on retries"
    both = mapping(pod.get("nodeSelector"))
    for key, value in (spec.node_selector or {}).items():
        if key in both and both[key] != value:
            return f"spec.nodeSelector: {key} contradicts the template's nodeSelector"
    for place in ("containers", "initContainers"):
        for index, container in enumerate(mappings(pod.get(place))):
            for kind in ("limits", "requests"):
                given = mapping(mapping(container.get("resources")).get(kind))
                path = f"spec.template.spec.{place}[{index}].resources.{kind}:"
                other = next((name for name in given if name != gpu and _counts(str(name), settings)), None)
                if other is not None:
                    return f"{path} asks for {other}, but the workload's GPUs are {gpu}: see spec.gpuResource"
                value, path = given.get(gpu, 0), f"{path} {gpu}"
                try:
                    number = quantity(value)
                except ValueError:
                    return f"{path} is not a quantity"
                if number < 0 or number != number.to_integral_value():
                    return f"{path} must be a whole number of GPUs"
    asked = _asked_gpus(pod, gpu)
    if asked not in (0, spec.gpu_count):
        return f"spec.template: its containers ask for {asked} {gpu} in all, but gpuCount is {spec.gpu_count}"
    effective = requests_of(spec, settings).gpus
    if effective != spec.gpu_count:
        return f"spec.template: its init containers ask for {effective} {gpu}, but gpuCount is {spec.gpu_count}"
    return ""


def _counts(name: str, settings: Settings) -> bool:
    """Whether a resource counts as a GPU here."""
    return name == settings.gpu_resource or is_gpu(name)


def _asked_gpus(pod: Mapping[str, Any], gpu: str) -> int:
    """GPUs that containers and sidecars ask for."""
    sidecars = (item for item in mappings(pod.get("initContainers")) if item.get("restartPolicy") == "Always")
    return sum(container_requests(item).get(gpu, 0) for item in (*mappings(pod.get("containers")), *sidecars))


def _simple_requests(resources: ContainerResources | None) -> dict[str, int]:
    if resources is None:
        return {}
    return container_requests({"resources": {"limits": resources.limits, "requests": resources.requests}})


def _mebibytes(memory: str | int | None) -> int:
    return -(-whole(memory) // MEBIBYTE)


def _copy(value: Mapping[str, Any]) -> Manifest:
    copied: Manifest = json.loads(json.dumps(value))
    return copied
