"""GPUWorkload and settings as models: defaults as upstream's, bounds on everything, refusals with path and reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings

MINIMAL = {"modelName": "m", "gpuCount": 1}


def refused(**changes: Any) -> str:
    spec, message = GPUWorkloadSpec.parse({**MINIMAL, **changes})
    assert spec is None
    return message


def test_defaults() -> None:
    spec, message = GPUWorkloadSpec.parse(MINIMAL)
    assert spec is not None and message == ""
    assert (spec.priority, spec.priority_value, spec.scheduling_strategy) == ("normal", 0, None)
    assert (spec.retry_policy.max_retries, spec.retry_policy.backoff_seconds, spec.suspend) == (3, 30, False)


@pytest.mark.parametrize(
    ("given", "value"), [("low", -100), ("normal", 0), ("high", 100), (7, 7), (-1_000_000, -1_000_000)]
)
def test_priorities(given: str | int, value: int) -> None:
    spec, _ = GPUWorkloadSpec.parse({**MINIMAL, "priority": given})
    assert spec is not None and spec.priority_value == value


@pytest.mark.parametrize("wrong", ["urgent", "5", True, 1_000_001, 0.5, None, [], "LOW"])
def test_what_is_no_priority(wrong: object) -> None:
    assert refused(priority=wrong) == (
        "spec.priority: must be low, normal, high or an integer from -1000000 to 1000000"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpuCount": 9}, "spec.gpuCount: must be at most 8, not 9"),
        ({"gpuCount": True}, "spec.gpuCount: must be an integer, not true"),
        ({"modelName": ""}, "spec.modelName: must have at least 1 characters"),
        ({"schedulingStrategy": "Foo"}, "spec.schedulingStrategy: must match ^[a-z][A-Za-z0-9]{0,62}$, not 'Foo'"),
        ({"retryPolicy": {"maxRetries": 11}}, "spec.retryPolicy.maxRetries: must be at most 10, not 11"),
        ({"retryPolicy": {"backoffSeconds": 0}}, "spec.retryPolicy.backoffSeconds: must be at least 1, not 0"),
        ({"env": [{"name": "A"}, {"name": "A"}]}, "spec: env names A twice"),
        ({"env": [{"name": "A", "value": 1}]}, "spec.env[0].value: must be a string, not 1"),
        (
            {"env": [{"name": "A", "value": "x", "valueFrom": {}}]},
            "spec.env[0]: has either value or valueFrom, not both",
        ),
        ({"resources": {"limits": {"cpu": "x"}}}, "spec.resources.limits.cpu: is not a quantity"),
        ({"nodeSelector": {"a": "b c"}}, "spec.nodeSelector.a: must match"),
        ({"args": ["x"] * 65}, "spec.args: must have at most 64 entries"),
        ({"tolerations": [{"operator": "Maybe"}]}, "spec.tolerations[0].operator: must be '', 'Exists' or 'Equal'"),
        ({"template": {"spec": {"containers": []}}}, "spec.template: needs a spec with at least one container"),
        ({"template": {"spec": {"containers": [{}]}, "kind": "Pod"}}, "spec.template: is a pod template and has only"),
        ({"template": {"spec": {"containers": [{}]}}, "image": "x"}, "spec: template cannot be combined with image"),
        (
            {"template": {"spec": {"containers": [{"x": "y" * 70_000}]}}},
            "spec.template: must be at most 64 KiB as JSON",
        ),
        ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds: must be at least 1, not 0"),
        ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished: must be at least 0, not -1"),
        ({"suspend": "yes"}, "spec.suspend: must be true or false, not 'yes'"),
        ({"gpus": 2}, "spec.gpus: is not a field that berth knows"),
        ({"gpuResource": "gpu"}, "spec.gpuResource: must match"),
        ({"gpuMemory": "lots"}, "spec.gpuMemory: is not a quantity"),
        ({"gpuMemory": "-1Gi"}, "spec.gpuMemory: is not a quantity"),
        ({"gpuFraction": 0}, "spec.gpuFraction: must be at least 0.001, not 0"),
        ({"gpuFraction": 1}, "spec.gpuFraction: must be at most 0.999, not 1"),
        ({"gpuFraction": "0.5"}, "spec.gpuFraction: must be a number, not '0.5'"),
        ({"gpuFraction": True}, "spec.gpuFraction: must be a number, not true"),
        ({"gpuFraction": float("nan")}, "spec.gpuFraction: "),
        ({"gpuFraction": 0.5, "gpuCount": 2}, "spec: gpuFraction is a part of one GPU, given as a seat: gpuCount must"),
        ({"gpuFraction": 0.5, "gpuResource": "amd.com/gpu"}, "spec: gpuFraction is a part of one GPU"),
    ],
)
def test_refusals_say_where_and_why(changes: dict[str, Any], message: str) -> None:
    assert refused(**changes).startswith(message)


def test_a_refusal_is_short_however_much_is_wrong() -> None:
    message = refused(**{f"field{i}" + "x" * 500: i for i in range(100)})
    assert len(message) <= 1024 and message.endswith("and 97 more")


@given(
    st.dictionaries(
        st.text(max_size=20), st.recursive(st.none() | st.text(max_size=9), st.lists, max_leaves=4), max_size=4
    )
)
def test_parse_never_raises(raw: dict[str, Any]) -> None:
    spec, message = GPUWorkloadSpec.parse({**MINIMAL, **raw})
    assert (spec is None) == bool(message)


def test_settings_have_defaults_and_refuse_what_they_do_not_know() -> None:
    settings, message = Settings.parse({})
    assert settings is not None and message == ""
    assert (settings.default_strategy, settings.gpu_resource, settings.bind_deadline_seconds) == (
        "leastLoaded", "nvidia.com/gpu", 30,
    )  # fmt: skip
    assert Settings.parse(None) == (settings, "")
    assert (
        Settings.parse({"bindDeadlineSeconds": 0})[1] == "settings.yaml.bindDeadlineSeconds: must be at least 1, not 0"
    )
    assert Settings.parse({"nope": 0})[1] == "settings.yaml.nope: is not a field that berth knows"
    assert Settings.parse([])[1] == "settings.yaml: must be a mapping"
