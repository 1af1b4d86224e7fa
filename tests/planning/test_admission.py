"""What is refused while it is written, what is only warned of, and what is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crds.gpuworkload import KIND
from crds.settings import Settings
from planning.admission import Installation, Review, filled_in, refusal, warnings
from planning.model import Ledger
from planning.placement import decide
from planning.strategies import installed
from tests.planning.builders import node, snapshot, workload

PLAIN: dict[str, Any] = {"modelName": "m", "gpuCount": 1}
UNKNOWN = f"there is no strategy 'nope'; installed are {', '.join(installed())}"
TEAM = Installation(namespace_strategies={"team-a": "headroom", "team-b": "nope"})

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
# Near enough to a spec that the checks get beyond its first field.
near_specs = st.fixed_dictionaries(
    {"modelName": st.just("m"), "gpuCount": st.integers(1, 8)},
    optional={
        "schedulingStrategy": st.sampled_from([*installed(), "nope"]) | json_values,
        "resources": st.fixed_dictionaries({}, optional={"limits": json_values, "requests": json_values}),
        "template": st.fixed_dictionaries(
            {"spec": st.fixed_dictionaries({"containers": st.lists(st.dictionaries(st.sampled_from(
                ["name", "image", "resources", "env", "restartPolicy"]), json_values), max_size=3)},
                optional={"initContainers": json_values, "nodeSelector": json_values, "nodeName": json_values})}
        ),
        "suspend": st.booleans(),
        "tolerations": json_values,
    },
)  # fmt: skip
objects = st.dictionaries(st.sampled_from(["spec", "metadata", "status", "kind"]), json_values) | st.builds(
    lambda spec, metadata: {"spec": spec, "metadata": metadata}, near_specs, json_values
)


def review(spec: object, old: object = None, namespace: str = "default", **metadata: Any) -> Review:
    before = {"spec": old} if old is not None else None
    return Review(KIND, namespace, {"metadata": metadata, "spec": spec}, before)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, ""),
        ({"schedulingStrategy": "headroom"}, ""),
        ({"schedulingStrategy": "nope"}, f"spec.schedulingStrategy: {UNKNOWN}"),
        ({"gpuCount": 9}, "spec.gpuCount: must be at most 8, not 9"),
        (
            {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
            "spec.resources: GPUs are asked for by gpuCount; remove nvidia.com/gpu",
        ),
        (
            {"template": {"spec": {"containers": [{"name": "c"}], "nodeName": "n"}}},
            "spec.template.spec.nodeName: berth chooses the node; use nodeSelector or node affinity",
        ),
        ({"nodeSelector": {"a b": "v"}}, "spec.nodeSelector.a b: is not a label key (such as example.com/gpu-type)"),
    ],
)  # fmt: skip
def test_a_refusal_says_where_and_why(more: Mapping[str, Any], said: str) -> None:
    assert refusal(review({**PLAIN, **more}), Installation()) == said


def test_settings_decide_what_a_gpu_is() -> None:
    wanted = review({**PLAIN, "resources": {"limits": {"example.com/gpu": "1"}}})
    assert refusal(wanted, Installation()) == ""
    assert "remove example.com/gpu" in refusal(wanted, Installation(Settings(gpu_resource="example.com/gpu")))


def test_what_was_wrong_before_may_be_edited_and_new_wrong_may_not() -> None:
    old = {**PLAIN, "schedulingStrategy": "nope"}  # it was installed once, or nobody was there to refuse it
    assert refusal(review({**old, "suspend": True}, old), Installation()) == ""
    assert refusal(review({**old, "schedulingStrategy": "neither"}, old), Installation()) != ""
    assert refusal(review({**old, "gpuCount": 9}, old), Installation()) == "spec.gpuCount: must be at most 8, not 9"
    assert refusal(review(old, PLAIN), Installation()) != ""


def test_what_is_being_deleted_is_never_held_up() -> None:
    gone = review({**PLAIN, "gpuCount": 9}, PLAIN, deletionTimestamp="2026-11-21T10:00:00Z")
    assert refusal(gone, Installation()) == ""


def test_a_wrong_default_is_a_warning_and_names_whose_it_is() -> None:
    tail = "; the workload waits until that is mended"
    assert warnings(review(PLAIN, namespace="team-b"), TEAM) == [f"namespace team-b: {UNKNOWN}{tail}"]
    assert warnings(review({**PLAIN, "schedulingStrategy": "random"}, namespace="team-b"), TEAM) == []
    assert warnings(review(PLAIN, namespace="team-a"), TEAM) == []
    everywhere = Installation(Settings(default_strategy="nope"))
    assert warnings(review(PLAIN), everywhere) == [f"the installation's settings: {UNKNOWN}{tail}"]


def test_the_namespaces_strategy_is_filled_in_and_nothing_else() -> None:
    patch = [{"op": "add", "path": "/spec/schedulingStrategy", "value": "headroom"}]
    assert filled_in(review(PLAIN, namespace="team-a"), TEAM) == patch
    assert filled_in(review({**PLAIN, "schedulingStrategy": "random"}, namespace="team-a"), TEAM) == []
    assert filled_in(review(PLAIN, namespace="team-b"), TEAM) == [], "one that is not installed may yet be corrected"
    assert filled_in(review(PLAIN, namespace="other"), TEAM) == [], "the installation's may change for those that wait"


def test_other_kinds_are_taken_as_they_come() -> None:
    other = Review("GPUQuota", "", {"spec": 1})
    assert (refusal(other, TEAM), warnings(other, TEAM), filled_in(other, TEAM)) == ("", [], [])


@settings(deadline=None)
@given(objects, objects | st.none(), st.sampled_from(["team-a", "team-b", "other", ""]))
def test_nothing_that_somebody_writes_is_an_error(new: Any, old: Any, namespace: str) -> None:
    asked = Review(KIND, namespace, new, old)
    assert isinstance(refusal(asked, TEAM), str)
    assert all(isinstance(said, str) for said in warnings(asked, TEAM))
    for change in filled_in(asked, TEAM):
        assert change["path"] == "/spec/schedulingStrategy" and new["spec"].get("schedulingStrategy") is None


@settings(deadline=None)
@given(near_specs)
def test_the_door_and_the_ledger_agree(spec: dict[str, Any]) -> None:
    """What is refused at the door the ledger refuses in the same words, and what it lets in the ledger takes."""
    view = workload("w", spec=spec)
    decision = decide(snapshot([node("n", 8)], [view]), Ledger(), Settings(), limit=9, seed=0)
    told = [each.message for each in decision.waiting if each.reason in ("Invalid", "UnknownStrategy")]
    said = refusal(review(spec), Installation())
    assert told == ([said] if said else [])
