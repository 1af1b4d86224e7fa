"""The Job of a workload: what it asks for, where it may run, and what of a template is kept or refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from crds.settings import Settings
from planning.accelerators import SEAT
from planning.filters import Constraints, repelling_taint
from planning.jobs import examination_manifest, job_manifest, refusal, requests_of, resumed, shape_of
from planning.model import Assignment, Booking, NodeView, Resources, Stopped, Turn, WorkloadView
from planning.naming import job_name
from planning.podspecs import node_terms, tolerations
from planning.views import job_view
from tests.planning.builders import GIB, SETTINGS, merge, node, taint, workload

GPU = "nvidia.com/gpu"


def manifest(view: WorkloadView, settings: Settings = SETTINGS, *, turn: Turn | None = None) -> dict[str, Any]:
    assert view.spec is not None, view.invalid
    turn = turn or Turn()
    requests = shape_of(view.spec, settings).requests
    assignment = Assignment(
        view.uid, "ns", view.name, 1, 1, turn, "n1", requests, "random", job_name(view.name, view.uid, turn.attempt)
    )
    return job_manifest(view, assignment, settings)


def pod_of(made: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = made["spec"]["template"]["spec"]
    return spec


def template(*containers: dict[str, Any], **pod: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": list(containers) or [{"name": "a", "image": "b"}], **pod}}}


def asking(gpus: Any, name: str = "a") -> dict[str, Any]:
    return {"name": name, "image": "b", "resources": {"limits": {GPU: gpus}}}


def test_the_default_job_runs_and_ends() -> None:
    pod = pod_of(manifest(workload("a", 2)))
    (container,) = pod["containers"]
    assert (container["name"], container["image"]) == ("gpu-workload", "busybox:1.36")
    assert container["command"] == ["/bin/sh", "-c"] and "MODEL_NAME" in container["args"][0]
    assert container["env"] == [{"name": "MODEL_NAME", "value": "m"}, {"name": "GPU_COUNT", "value": "2"}]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError" and pod["restartPolicy"] == "Never"


def test_an_own_image_is_not_given_the_default_command() -> None:
    (container,) = pod_of(manifest(workload("a", spec={"image": "x"})))["containers"]
    assert "command" not in container and "args" not in container


def test_berth_counts_retries_and_records_outcomes_not_the_job_controller() -> None:
    spec = manifest(workload("a"))["spec"]
    assert spec["backoffLimit"] == 0 and spec["podReplacementPolicy"] == "Failed"
    assert "ttlSecondsAfterFinished" not in spec and "activeDeadlineSeconds" not in spec
    assert spec["podFailurePolicy"] == {
        "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    }
    assert manifest(workload("a", spec={"activeDeadlineSeconds": 9}))["spec"]["activeDeadlineSeconds"] == 9


def test_the_owner_and_what_is_read_back() -> None:
    made = manifest(workload("a", 3), turn=Turn(5, 2))
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
        "GPUWorkload", "a", True, True,
    )  # fmt: skip
    view = job_view(made, GPU)
    assert view is not None
    assert (view.name, view.attempt, view.retries, view.node, view.strategy) == ("a-a-5", 5, 2, "n1", "random")
    assert view.requests == Resources(3, 0, 0, 1) and view.workload_uid == "a"
    assert made["spec"]["template"]["metadata"]["labels"] == made["metadata"]["labels"]


def test_a_job_tells_of_which_spec_it_is() -> None:
    def told(gpus: int = 1, **spec: Any) -> str:
        view = job_view(manifest(workload("a", gpus, spec=spec)), GPU)
        assert view is not None
        return view.spec_hash

    assert told()
    assert told() == told(suspend=True, priority="high", activeDeadlineSeconds=9)
    assert told() == told(retryPolicy={"maxRetries": 3}), "what is given as its default is the same spec"
    others = [
        told(2), told(image="x"), told(args=["x"]), told(nodeSelector={"a": "b"}), told(retryPolicy={"maxRetries": 4}),
        told(**template()), told(**template(newField=1)),
    ]  # fmt: skip
    assert len({told(), *others}) == 8


def test_the_node_is_required_by_affinity_and_not_by_node_name() -> None:
    pod = pod_of(manifest(workload("a")))
    assert "nodeName" not in pod
    terms = node_terms(pod["affinity"])
    assert terms is not None and [r.values for term in terms for r in term] == [("n1",)] and terms[0][0].field


def test_the_templates_own_affinity_still_holds() -> None:
    own = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}]},
                {},
            ]
        },
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}],
    }
    affinity = {"nodeAffinity": own, "podAntiAffinity": {"x": "y"}}
    made = pod_of(manifest(workload("a", spec=template(affinity=affinity))))["affinity"]
    required = made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    pin = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    assert required[0]["matchExpressions"][0]["key"] == "zone" and required[0]["matchFields"] == [pin]
    assert required[1]["matchFields"][1] == pin and required[2] == {}
    assert (
        made["podAntiAffinity"] == {"x": "y"}
        and "preferredDuringSchedulingIgnoredDuringExecution" in made["nodeAffinity"]
    )
    found = shape_of(workload("a", spec=template(affinity=affinity)).spec, SETTINGS).constraints.affinity  # type: ignore[arg-type]
    assert found is not None and len(found) == 3


def test_env_of_the_person_wins() -> None:
    env = [
        {"name": "GPU_COUNT", "value": "x"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    (container,) = pod_of(manifest(workload("a", spec={"env": env})))["containers"]
    assert container["env"] == [{"name": "MODEL_NAME", "value": "m"}, *env]


def test_resources_selectors_and_tolerations() -> None:
    spec = {
        "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}},
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "x", "operator": "Exists"}],
    }
    view = workload("a", 2, spec=spec)
    pod = pod_of(manifest(view))
    assert pod["containers"][0]["resources"] == {"limits": {"memory": "2Gi", GPU: "2"}, "requests": {"cpu": "500m"}}
    assert pod["nodeSelector"] == {"zone": "a"}
    assert pod["tolerations"] == [
        {"key": "x", "operator": "Exists"},
        {"key": GPU, "operator": "Exists", "effect": "NoSchedule"},
    ]
    assert view.spec is not None
    shape = shape_of(view.spec, SETTINGS)
    assert shape.requests == requests_of(view.spec, SETTINGS) == Resources(2, 500, 2 * GIB, 1)


def test_a_gpu_taint_does_not_keep_gpu_workloads_off() -> None:
    from planning.filters import refusal as node_refusal

    view = workload("a")
    assert view.spec is not None
    tainted: NodeView = node("n", taints=(taint(GPU, value="present"),))
    assert node_refusal(shape_of(view.spec, SETTINGS).constraints, tainted) == ""


@pytest.mark.parametrize("spec", [{"gpuFraction": 0.5}, {"gpuResource": "kyb.ai/gpu-2x-seat"}])
@pytest.mark.parametrize("given", [{}, template()], ids=["simple", "template"])
def test_a_gpu_taint_does_not_keep_off_who_asks_for_a_seat(spec: dict[str, Any], given: dict[str, Any]) -> None:
    """Seats lie on NVIDIA's GPUs, whose nodes many clouds taint by that name."""
    view, settings = workload("a", spec={**spec, **given}), Settings(gpu_resource="example.com/gpu")
    assert view.spec is not None
    seen, told = shape_of(view.spec, settings).constraints, pod_of(manifest(view, settings))["tolerations"]
    for key in (GPU, "example.com/gpu", spec.get("gpuResource", SEAT)):
        assert repelling_taint(seen, node("n", taints=(taint(key, value="present"),))) is None
        assert repelling_taint(Constraints((), tolerations(told)), node("n", taints=(taint(key),))) is None
    for other in (node("n", taints=(taint("amd.com/gpu"),)), node("n", taints=(taint("theirs"),))):
        assert repelling_taint(seen, other) and repelling_taint(Constraints((), tolerations(told)), other)
    assert len(told) == 3 and len(pod_of(manifest(view))["tolerations"]) == 2, "each of them once"


def test_another_gpu_resource() -> None:
    settings = Settings(gpu_resource="amd.com/gpu")
    made = manifest(workload("a", 2), settings)
    assert pod_of(made)["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}


def test_the_workload_names_the_resource() -> None:
    view = workload("a", 2, spec={"gpuResource": "amd.com/gpu"})
    pod = pod_of(manifest(view))
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert pod["tolerations"] == [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert view.spec is not None
    shape = shape_of(view.spec, SETTINGS)
    assert shape.requests == requests_of(view.spec, SETTINGS) == Resources(2, pods=1, gpu_resource="amd.com/gpu")
    assert shape.constraints.tolerations[-1].key == "amd.com/gpu"
    back = job_view(manifest(view), GPU)
    assert back is not None and back.requests == shape.requests
    named = workload("b", 2, spec={"gpuResource": GPU}).spec
    assert named is not None and shape_of(named, SETTINGS).requests == Resources(2, pods=1), "the installation's own"


def test_a_template_of_another_resource() -> None:
    asked = {"name": "a", "image": "b", "resources": {"limits": {"amd.com/gpu": "2"}}}
    view = workload("a", 2, spec={"gpuResource": "amd.com/gpu", **template(asked)})
    assert pod_of(manifest(view))["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}
    unasked = pod_of(manifest(workload("b", 2, spec={"gpuResource": "amd.com/gpu", **template()})))
    assert unasked["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}


def test_a_part_of_a_gpu_is_a_seat() -> None:
    view = workload("a", spec={"gpuFraction": 0.5, "gpuMemory": "16G"})
    (container,) = pod_of(manifest(view))["containers"]
    assert container["resources"]["limits"] == {SEAT: "1"}
    assert {"name": "GPU_COUNT", "value": "1"} in container["env"]
    assert view.spec is not None
    shape = shape_of(view.spec, SETTINGS)
    assert shape.requests == Resources(1, pods=1, gpu_resource=SEAT)
    assert (shape.constraints.gpu_resource, shape.constraints.gpu_memory) == (SEAT, 15_259)


def test_a_seat_on_two_gpus_shows_two() -> None:
    (container,) = pod_of(manifest(workload("a", spec={"gpuResource": "kyb.ai/gpu-2x-seat"})))["containers"]
    assert container["resources"]["limits"] == {"kyb.ai/gpu-2x-seat": "1"}
    assert {"name": "GPU_COUNT", "value": "2"} in container["env"]


@pytest.mark.parametrize(("given", "mib"), [("80G", 76_294), ("80Gi", 81_920), (2**30, 1024), ("1.5Mi", 2)])
def test_gpu_memory_in_mib(given: str | int, mib: int) -> None:
    for spec in ({"gpuMemory": given}, {"gpuMemory": given, **template()}):
        parsed = workload("a", spec=spec).spec
        assert parsed is not None and shape_of(parsed, SETTINGS).constraints.gpu_memory == mib


def test_a_template_keeps_what_berth_does_not_know_and_is_not_changed_itself() -> None:
    spec = template({"name": "a", "image": "b", "newField": {"x": [1]}}, newPodField=True)
    spec["template"]["metadata"] = {"labels": {"team": "t", "gpu.warp.dev/workload-uid": "forged"}}
    view = workload("a", 3, spec=spec)
    before = copy.deepcopy(spec)
    made = manifest(view)
    pod = pod_of(made)
    assert pod["newPodField"] is True and pod["containers"][0]["newField"] == {"x": [1]}
    assert pod["containers"][0]["resources"]["limits"] == {GPU: "3"} and pod["restartPolicy"] == "Never"
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "t" and labels["gpu.warp.dev/workload-uid"] == "a"
    assert view.spec is not None and view.spec.template == before["template"]


def test_a_template_may_ask_for_its_gpus_itself() -> None:
    pod = pod_of(manifest(workload("a", 3, spec=template(asking(1), asking("2", "b")))))
    assert [c["resources"]["limits"][GPU] for c in pod["containers"]] == [1, "2"]
    assert all({"MODEL_NAME", "GPU_COUNT"} == {e["name"] for e in c["env"]} for c in pod["containers"])


@pytest.mark.parametrize(
    ("gpus", "spec", "message"),
    [
        (2, template(asking(1)), "spec.template: its containers ask for 1 nvidia.com/gpu in all, but gpuCount is 2"),
        (1, template(asking("500m")), "must be a whole number of GPUs"),
        (1, template(asking("x")), "is not a quantity"),
        (1, template(nodeName="n"), "berth chooses the node"),
        (1, template(restartPolicy="Always"), "must be Never"),
        (1, template(initContainers=[asking(4)]), "its init containers ask for 4 nvidia.com/gpu, but gpuCount is 1"),
        (
            1,
            {**template(nodeSelector={"z": "a"}), "nodeSelector": {"z": "b"}},
            "contradicts the template's nodeSelector",
        ),
        (1, {"resources": {"requests": {GPU: 1}}}, "GPUs are asked for by gpuCount"),
        (1, {"resources": {"limits": {"amd.com/gpu": 1}}}, "by gpuCount and gpuResource; remove amd.com/gpu"),
        (
            1,
            {"gpuResource": "example.com/gpu"},
            "spec.gpuResource: example.com/gpu is nothing that berth counts as GPUs",
        ),
        (1, {"gpuResource": "gpu.intel.com/xe_monitoring"}, "is nothing that berth counts as GPUs"),
        (2, {"gpuResource": SEAT}, "spec.gpuCount: must be 1, for a workload has one seat"),
        (1, {"gpuMemory": 40}, "spec.gpuMemory: 40 is less than a MiB; it wants a unit"),
        (1, {"gpuMemory": "0"}, "spec.gpuMemory: 0 is less than a MiB"),
        *(
            (1, {"reservation": "r", **asked}, f"spec.reservation: reserved are GPUs of {GPU}, and this workload asks")
            for asked in ({"gpuResource": "amd.com/gpu"}, {"gpuFraction": 0.5})
        ),
        (
            1,
            {"gpuResource": "amd.com/gpu", **template(asking(1))},
            "containers[0].resources.limits: asks for nvidia.com/gpu, but the workload's GPUs are amd.com/gpu",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(gpus: int, spec: dict[str, Any], message: str) -> None:
    view = workload("a", gpus, spec=spec)
    assert view.spec is not None, view.invalid
    assert message in refusal(view.spec, SETTINGS)
    with pytest.raises(ValueError, match="spec"):
        manifest(view)


@pytest.mark.parametrize("part", [{"affinity": 3}, {"tolerations": "x"}, {"nodeSelector": [1]}, {"initContainers": {}}])
def test_nonsense_in_a_template_is_left_to_the_dry_run(part: dict[str, Any]) -> None:
    view = workload("a", spec=template(**part))
    assert view.spec is not None
    assert refusal(view.spec, SETTINGS) == ""
    examination_manifest(view, SETTINGS)


def test_the_examination_is_the_same_job_without_a_node() -> None:
    made = examination_manifest(workload("a" * 253, spec=template()), SETTINGS)
    assert "name" not in made["metadata"] and len(made["metadata"]["generateName"]) <= 51
    assert "affinity" not in pod_of(made)


@pytest.mark.parametrize("before", [False, True])
def test_a_stopped_job_becomes_what_a_new_one_would_be(before: bool) -> None:
    """Whatever one turn had that the other has not; all that is left of the earlier one is who the Job is."""
    view = workload("a", spec={"activeDeadlineSeconds": 60, **template(hostNetwork=True, nodeSelector={"z": "a"})})
    assert view.spec is not None
    longer = replace(view, spec=view.spec.model_copy(update={"active_deadline_seconds": None}))
    plain = Assignment("a", "ns", "a", 1, 1, Turn(), "n1", Resources(1, 0, 0, 1), "random", "a-0")
    special = replace(plain, backfill=7.0, lent=True, booking=Booking("r", "c"), strategy="fgd")
    first, then = (special, plain) if before else (plain, special)
    then = replace(then, turn=Turn(3, 2), node="n2", job_name="a-3")
    old, new = (job_manifest(each, place, SETTINGS) for each, place in ((view, first), (longer, then)))
    old["metadata"] |= {"uid": "j", "resourceVersion": "5"}
    for mark in ("preempted", "withdrawn", "resumed"):
        old["metadata"]["annotations"][f"gpu.warp.dev/{mark}"] = "1"
    old["spec"]["suspend"] = True
    merge(old, resumed(new, Stopped("a-0", "j", 5), 9.5))
    new["metadata"] |= {"name": "a-0", "uid": "j", "resourceVersion": "5"}
    new["metadata"]["annotations"]["gpu.warp.dev/resumed"] = "9"
    new["spec"]["suspend"] = False
    assert old == new
