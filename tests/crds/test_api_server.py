"""The CRD on a real kube-apiserver: what it takes, defaults, refuses, and in which words."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from crds.definitions import DEFINITIONS
from crds.generate import render
from stack import Stack

pytestmark = pytest.mark.stack


class Door:
    """kubectl's door into one namespace."""

    def __init__(self, stack: Stack, namespace: str) -> None:
        self.stack, self.namespace = stack, namespace

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.stack.kubectl("-n", self.namespace, *args, stdin=stdin)

    def apply(self, name: str, spec: dict[str, Any], *args: str) -> str:
        body = {"apiVersion": "gpu.warp.dev/v1alpha1", "kind": "GPUWorkload", "metadata": {"name": name}, "spec": spec}
        return self.kubectl("apply", "--server-side", "-f", "-", *args, stdin=json.dumps(body))

    def refused(self, name: str, spec: dict[str, Any], *args: str) -> str:
        with pytest.raises(Exception) as caught:
            self.apply(name, spec, *args)
        return str(caught.value) + str(getattr(caught.value, "hint", "")) + str(getattr(caught.value, "stderr", ""))

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", "gpuw", name, "-o", "json"))
        return found

    def set_status(self, name: str, status: dict[str, Any]) -> None:
        self.kubectl(
            "patch", "gpuw", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
        )


@pytest.fixture(scope="module")
def door(stack: Stack) -> Iterator[Door]:
    for definition in DEFINITIONS:
        stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=render(definition))
        crd = f"crd/{definition.plural}.{definition.group}"
        stack.kubectl("wait", "--for=condition=Established", crd, "--timeout=30s")
    namespace = f"crd-{uuid.uuid4().hex[:8]}"
    stack.kubectl("create", "namespace", namespace)
    yield Door(stack, namespace)
    stack.kubectl("delete", "namespace", namespace, "--wait=false")


MINIMAL = {"modelName": "m", "gpuCount": 1}


@pytest.mark.parametrize("name", [f"{definition.plural}.{definition.group}" for definition in DEFINITIONS])
def test_the_schema_is_structural_and_within_the_cel_budget(door: Door, name: str) -> None:
    crd = json.loads(door.stack.kubectl("get", "crd", name, "-o", "json"))
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions["Established"] == "True" and conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_defaults_are_upstreams_and_the_strategy_has_none(door: Door) -> None:
    door.apply("defaults", MINIMAL)
    assert door.get("defaults")["spec"] == {
        **MINIMAL,
        "replicas": 1,
        "priority": "normal",
        "retryPolicy": {"maxRetries": 3, "backoffSeconds": 30},
    }


@pytest.mark.parametrize("count", [0, 9, -1])
def test_gpu_counts_outside_one_to_eight_are_refused(door: Door, count: int) -> None:
    assert "spec.gpuCount" in door.refused("count", {**MINIMAL, "gpuCount": count})


def test_unknown_fields_are_refused_by_kubectl(door: Door) -> None:
    message = door.refused("unknown", {**MINIMAL, "gpus": 2})
    assert "gpus" in message


@pytest.mark.parametrize("priority", ["urgent", "5", 1_000_001, -1_000_001])
def test_priorities_that_mean_nothing_are_refused_with_what_is_allowed(door: Door, priority: object) -> None:
    assert "must be low, normal, high or an integer" in door.refused("priority", {**MINIMAL, "priority": priority})


@pytest.mark.parametrize("priority", ["low", "high", 0, -1_000_000, 1_000_000])
def test_priorities_by_name_and_number(door: Door, priority: object) -> None:
    door.apply("priorities", {**MINIMAL, "priority": priority})
    assert door.get("priorities")["spec"]["priority"] == priority


def test_a_template_excludes_image_and_its_kin(door: Door) -> None:
    template = {"spec": {"containers": [{"name": "a", "image": "b"}]}}
    assert "template cannot be combined" in door.refused("both", {**MINIMAL, "template": template, "image": "b"})


def test_a_templates_unknown_fields_are_preserved(door: Door) -> None:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "a", "newField": {"x": [1]}}]}}
    door.apply("template", {**MINIMAL, "template": template})
    assert door.get("template")["spec"]["template"] == template


def test_an_environment_variable_has_one_source(door: Door) -> None:
    env = [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    assert "either value or valueFrom" in door.refused("env", {**MINIMAL, "env": env})


def test_a_strategy_that_is_no_name_is_refused(door: Door) -> None:
    assert "schedulingStrategy" in door.refused("strategy", {**MINIMAL, "schedulingStrategy": "Least Loaded!"})


def test_after_the_first_job_only_suspend_priority_and_deadline_change(door: Door) -> None:
    spec = {**MINIMAL, "image": "a", "args": ["x"], "env": [{"name": "A", "value": "1"}]}
    door.apply("fixed", spec)
    door.apply("fixed", {**spec, "image": "b"})  # no Job yet: anything may change
    door.set_status("fixed", {"phase": "Scheduled", "jobName": "fixed-0"})
    door.apply("fixed", {**spec, "image": "b", "suspend": True, "priority": "high", "activeDeadlineSeconds": 5})
    now = {**spec, "image": "b"}
    for change in (
        {"image": "c"},
        {"modelName": "n"},
        {"gpuCount": 2},
        {"args": ["y"]},
        {"env": [{"name": "A", "value": "2"}]},
        {"retryPolicy": {"maxRetries": 9}},
        {"nodeSelector": {"a": "b"}},
        {"ttlSecondsAfterFinished": 3},
        {"schedulingStrategy": "random"},
    ):
        message = door.refused("fixed", {**now, **change})
        assert f"spec.{next(iter(change))}" in message and "cannot change once a Job was created" in message


def test_a_template_is_fixed_after_the_first_job(door: Door) -> None:
    def template(image: str) -> dict[str, Any]:
        return {
            **MINIMAL,
            "template": {"spec": {"containers": [{"name": "a", "image": image, "deep": {"x": [image]}}]}},
        }

    door.apply("fixed-template", template("a"))
    door.set_status("fixed-template", {"phase": "Scheduled", "jobName": "fixed-template-0"})
    assert "spec.template" in door.refused("fixed-template", template("b"))
    door.apply("fixed-template", {**template("a"), "suspend": True})


def test_a_spec_of_1_4_mib_is_bounded_by_the_schema(door: Door) -> None:
    assert "spec.args" in door.refused("large", {**MINIMAL, "args": ["x" * 1_400_000]})


def test_a_template_of_1_4_mib_passes_the_door_and_is_refused_by_the_model(door: Door) -> None:
    from planning.views import workload_view

    template = {"spec": {"containers": [{"name": "a", "args": ["x" * 1_400_000]}]}}
    door.apply("large-template", {**MINIMAL, "template": template})
    view = workload_view(door.get("large-template"))
    assert view.spec is None and view.invalid == "spec.template: must be at most 64 KiB as JSON"


def test_a_name_of_253_characters_is_taken(door: Door) -> None:
    name = ".".join(["n" * 63] * 3 + ["n" * 61])
    assert len(name) == 253
    door.apply(name, {**MINIMAL, "modelName": "meta-llama/Llama 2 " + "x" * 200})


def test_columns_and_short_name(door: Door) -> None:
    door.apply("columns", MINIMAL)
    door.set_status("columns", {"phase": "Running", "strategy": "leastLoaded", "assignedNode": "n1", "retryCount": 2})
    head, row = door.kubectl("get", "gpuw", "columns").splitlines()[:2]
    assert head.split() == ["NAME", "MODEL", "GPUS", "STRATEGY", "PHASE", "NODE", "RETRIES", "AGE"]
    assert row.split()[:7] == ["columns", "m", "1", "leastLoaded", "Running", "n1", "2"]


def test_a_spec_that_the_model_refuses_cannot_be_written_past_the_status(door: Door) -> None:
    door.apply("subresource", MINIMAL)
    door.kubectl("patch", "gpuw", "subresource", "--type=merge", "-p", '{"status":{"phase":"Succeeded"}}')
    assert "status" not in door.get("subresource")
