"""What is refused while it is written, what is only warned of, and what is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds import gpuquota, gpureservation
from crds.gpuquota import GPUQuotaSpec
from crds.gpuworkload import KIND
from crds.settings import Settings
from planning.accelerators import KNOWN, NVIDIA, SEAT
from planning.admission import Installation, Review, filled_in, refusal, warnings
from planning.model import Ledger, NodeView, QuotaView
from planning.placement import decide
from planning.quotas import Books
from planning.strategies import installed
from planning.times import timestamp
from planning.views import quota_view
from planning.windows import ReservationView
from tests.planning.builders import NOW, node, quota, reservation, snapshot, workload

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
        "gpuResource": st.sampled_from([NVIDIA, SEAT, "x/y"]) | json_values,
        "gpuMemory": st.sampled_from(["40G", "1e99", "1n", 0, 2**62]) | json_values,
        "gpuFraction": st.floats(0, 1) | json_values,
        "reservation": st.just("r") | json_values,
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
        ({"gpuResource": "x/y"}, f"spec.gpuResource: x/y is nothing that berth counts as GPUs; it counts {KNOWN}"),
        (
            {"reservation": "r", "gpuFraction": 0.5},
            f"spec.reservation: reserved are GPUs of {NVIDIA}, and this workload asks for {SEAT}",
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
    other = Review("ConfigMap", "", {"spec": 1})
    assert (refusal(other, TEAM), warnings(other, TEAM), filled_in(other, TEAM)) == ("", [], [])


@given(objects, objects | st.none(), st.sampled_from(["team-a", "team-b", "other", ""]))
def test_nothing_that_somebody_writes_is_an_error(new: Any, old: Any, namespace: str) -> None:
    asked = Review(KIND, namespace, new, old)
    assert isinstance(refusal(asked, TEAM), str)
    assert all(isinstance(said, str) for said in warnings(asked, TEAM))
    for change in filled_in(asked, TEAM):
        assert change["path"] == "/spec/schedulingStrategy" and new["spec"].get("schedulingStrategy") is None


@given(near_specs)
def test_the_door_and_the_ledger_agree(spec: dict[str, Any]) -> None:
    """What is refused at the door the ledger refuses in the same words, and what it lets in the ledger takes."""
    view = workload("w", spec=spec)
    decision = decide(snapshot([node("n", 8)], [view]), Ledger(), Settings(), limit=9, seed=0)
    told = [each.message for each in decision.waiting if each.reason in ("Invalid", "UnknownStrategy")]
    said = refusal(review(spec), Installation())
    assert told == ([said] if said else [])


# --- GPUQuotas -----------------------------------------------------------------------------------------------------


def written(name: str, *namespaces: str, created: float | None = None, **spec: Any) -> dict[str, Any]:
    """A GPUQuota as somebody writes it; one that is there already has a time."""
    metadata = {"name": name}
    if created is not None:
        metadata["creationTimestamp"] = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"metadata": metadata, "spec": {"namespaces": list(namespaces), **spec}}


def asked(new: dict[str, Any], *there: QuotaView, old: dict[str, Any] | None = None) -> tuple[str, list[str]]:
    """What is refused, and what is warned of."""
    quotas, review = Installation(quotas=there), Review(gpuquota.KIND, "", new, old)
    return refusal(review, quotas), warnings(review, quotas)


TENANT = "GPUQuota t names namespaces, so it is a tenant and not a cohort: move them to one below it"


@pytest.mark.parametrize(
    ("new", "there", "said"),
    [
        (written("p", "a", nominal={"gpus": 4}, cohort="c"), [quota("c")], ""),
        (written("p", "a", nominal={"gpus": -1}), [], "spec.nominal.gpus: must be at least 0, not -1"),
        (written("q", cohort="p"), [quota("p", cohort="q")], "spec.cohort: q → p → q is a circle"),
        (written("p", cohort="p"), [], "spec.cohort: p → p is a circle"),
        (written("p", "a", cohort="t"), [quota("t", "b")], f"spec.cohort: {TENANT}"),
        (written("t", "b"), [quota("p", "a", cohort="t")], f"GPUQuota p would be wrong then: spec.cohort: {TENANT}"),
        (
            written("p", "a", "b"), [quota("q", "b")],
            "spec.namespaces: b belongs to GPUQuota q, which is older, and counts there",
        ),
        (
            written("p", "*", cohort="late"), [quota("q", "*")],
            "spec.namespaces: * belongs to GPUQuota q, which is older, and counts there",
        ),
        (
            written("q8", cohort="q9"), [*(quota(f"q{i}", cohort=f"q{i + 1}") for i in range(8)), quota("q9")],
            "GPUQuota q0 would be wrong then: spec.cohort: it lies more than 8 cohorts deep",
        ),
    ],
)  # fmt: skip
def test_a_gpuquota_that_the_books_cannot_take_is_refused(
    new: dict[str, Any], there: list[QuotaView], said: str
) -> None:
    assert asked(new, *there) == (said, asked(new, *there)[1])


def test_a_cohort_that_is_not_there_yet_is_only_warned_of() -> None:
    told = "spec.cohort: there is no GPUQuota c; until then it neither lends nor borrows"
    assert asked(written("p", "a", cohort="c")) == ("", [told])
    assert asked(written("c"), quota("p", "a", cohort="c")) == ("", [])


def test_a_namespace_moves_when_the_one_that_has_it_gives_it_up() -> None:
    old, young = quota("old", "a", created=NOW), quota("young", "b", created=NOW + 9)
    was, wants = written("old", "a", created=NOW), written("old", "a", "b", created=NOW)
    said = "GPUQuota young would be wrong then: spec.namespaces: b belongs to GPUQuota old, which is older"
    assert asked(wants, old, young, old=was)[0].startswith(said)
    assert asked(wants, old, quota("young", created=NOW + 9), old=was) == ("", [])


def test_a_gpuquota_that_was_wrong_before_may_be_edited_and_new_wrong_may_not() -> None:
    there = [quota("p", cohort="q"), quota("q", cohort="p"), quota("t", "a"), quota("u", "a", created=NOW + 1)]
    circle = written("p", cohort="q", created=NOW)
    assert asked({**circle, "spec": {**circle["spec"], "weight": 2}}, *there, old=circle) == ("", [])
    assert asked(written("p", created=NOW), *there, old=circle) == ("", [])
    assert asked(written("p", "a", cohort="q", created=NOW), *there, old=circle)[0] != ""
    double = written("u", "a", created=NOW + 1)
    assert asked(written("u", "a", "b", created=NOW + 1), *there, old=double) == ("", [])
    assert asked(written("u", "a", cohort="t", created=NOW + 1), *there, old=double)[0] == f"spec.cohort: {TENANT}"


names = st.sampled_from(["p", "q", "r", "s"])
quota_specs = st.fixed_dictionaries(
    {"namespaces": st.lists(st.sampled_from(["a", "b", "*"]), max_size=2, unique=True)},
    optional={"cohort": names, "nominal": st.fixed_dictionaries({"gpus": st.integers(-1, 8)})},
)


@given(st.lists(st.tuples(names, quota_specs | st.none()), max_size=12))
def test_what_the_door_lets_in_has_no_problem_in_the_books_but_an_unknown_cohort(
    writes: list[tuple[str, dict[str, Any] | None]],
) -> None:
    """Whatever the order in which they are created, edited and (None) deleted."""
    there: dict[str, dict[str, Any]] = {}
    for step, (name, spec) in enumerate(writes):
        if spec is None:
            there.pop(name, None)
            continue
        old = there.get(name)
        # Two are created within the same second, as far as the API server tells.
        created = old["metadata"]["creationTimestamp"] if old else f"2026-11-21T10:00:{step // 2:02}Z"
        new = {"metadata": {"name": name, "creationTimestamp": created}, "spec": spec}
        said, told = asked(new, *map(quota_view, there.values()), old=old)
        books = Books(map(quota_view, {**there, name: new}.values()))
        found = [problem for all_of_one in books.problems.values() for problem in all_of_one]
        assert bool(said) == any(not problem.awaited for problem in found), (said, found)
        if not said:
            there[name] = new
            assert told == [str(problem) for problem in books.problems.get(name, ())]


@given(objects, objects | st.none())
def test_no_gpuquota_that_somebody_writes_is_an_error(new: Any, old: Any) -> None:
    said, told = asked(new, quota("p", "a", cohort="q"), quota("q"), old=old)
    if GPUQuotaSpec.parse(new.get("spec"))[0] is None and old is None and not is_leaving(new):
        assert said.startswith("spec")
    assert not told or told[0].startswith("spec.cohort: there is no GPUQuota ")


def is_leaving(raw: dict[str, Any]) -> bool:
    metadata = raw.get("metadata")
    return isinstance(metadata, dict) and bool(metadata.get("deletionTimestamp"))


# --- GPUReservations -----------------------------------------------------------------------------------------------

FOUR = [node(name, 4, labels={"pool": name[0]}) for name in ("a1", "a2", "b1")]


def window(start: float, end: float, gpus: int, **spec: Any) -> dict[str, Any]:
    """A GPUReservation's spec as somebody writes it; times in seconds from NOW."""
    times = {"start": timestamp(NOW + start), "end": timestamp(NOW + end)}
    return {**times, "gpus": gpus, "namespaces": ["ns"], **spec}


def kept(name: str, gpus: int, start: float, end: float, **labels: str) -> ReservationView:
    return reservation(name, gpus=gpus, start=start, end=end, nodeSelector=labels)


def reserving(
    new: Any, *there: ReservationView, old: Any = None, nodes: list[NodeView] = FOUR
) -> tuple[str, list[str]]:
    asked = Review(
        gpureservation.KIND,
        "",
        {"metadata": {"name": "new"}, "spec": new},
        None if old is None else {"metadata": {"name": "new"}, "spec": old},
    )
    at = Installation(reservations=there, nodes=tuple(nodes), now=NOW)
    return refusal(asked, at), warnings(asked, at)


@pytest.mark.parametrize(
    ("new", "there", "said"),
    [
        (window(10, 20, 12), [], ""),
        (window(-10, 20, 12), [], ""),
        (window(20, 20, 1), [], "spec.end: must be after start (1970-01-12T13:47:00Z), not 1970-01-12T13:47:00Z"),
        (window(-20, -10, 1), [], "spec.end: 1970-01-12T13:46:30Z is past; it is 1970-01-12T13:46:40Z"),
        (window(1, 2, 3, gpusPerNode=2), [],
         "spec.gpusPerNode: gpus must be a multiple of it, and 3 is none of 2"),
        ({**window(1, 2, 1), "start": "2026-01-01T00:00:00"}, [], "spec.start: must match"),
        ({**window(1, 2, 1), "start": "2026-02-30T00:00:00Z"}, [],
         "spec.start: is no time that there is, such as 2026-03-01T14:00:00Z; it is 2026-02-30T00:00:00Z"),
        ({**window(1, 2, 1), "namespaces": []}, [], "spec.namespaces: must have at least 1 entries"),
        (window(1, 2, 13), [], "spec.gpus: the 3 nodes that match its nodeSelector have 12 GPUs"),
        (window(1, 2, 9, gpusPerNode=3), [], ""),
        (window(1, 2, 12, gpusPerNode=3), [],
         "spec.gpus: the 3 nodes that match its nodeSelector have 9 GPUs in blocks of 3"),
        (window(1, 2, 1, nodeSelector={"pool": "c"}), [],
         "spec.gpus: the 0 nodes that match its nodeSelector have 0 GPUs"),
        (window(10, 20, 8), [reservation("r", gpus=4, start=15, end=30)], ""),
        (window(10, 20, 9), [reservation("r", gpus=4, start=20, end=30)], ""),
        (window(10, 20, 9), [reservation("r", gpus=4, start=15, end=30)],
         "spec.gpus: with GPUReservation r 13 GPUs would be reserved at 1970-01-12T13:46:55Z, and the 3 nodes that "
         "match have 12"),
        (window(10, 20, 5), [kept("r", 4, 0, 12), kept("s", 4, 12, 30)], ""),
        (window(10, 20, 4, nodeSelector={"pool": "a"}),
         [kept("r", 4, 0, 30, pool="a"), kept("s", 4, 0, 30)],
         ""),
        (window(10, 20, 4, nodeSelector={"pool": "a"}),
         [kept("r", 4, 0, 30, pool="b"), kept("s", 5, 0, 30)],
         "spec.gpus: with GPUReservation r, s 13 GPUs would be reserved at 1970-01-12T13:46:50Z, and the 3 nodes that "
         "match have 12"),
    ],
)  # fmt: skip
def test_a_gpureservation_is_refused_with_place_and_reason(
    new: dict[str, Any], there: list[ReservationView], said: str
) -> None:
    found, told = reserving(new, *there)
    assert found.startswith(said) and bool(found) == bool(said) and told == []


def test_a_gpureservation_may_be_ended_early_and_what_was_wrong_before_may_be_edited() -> None:
    past, large = window(-20, -10, 1), window(10, 20, 99)
    assert reserving(past, old=window(-20, 99, 1)) == ("", [])
    assert reserving(large, old=large) == ("", [])
    assert reserving({**large, "namespaces": ["other"]}, old=large)[0] != "", "it is written anew, and must fit"
    assert reserving(window(10, 20, 12), reservation("new", gpus=12, start=10, end=20), old=window(10, 20, 11))[0] == ""


def test_a_workload_is_told_at_the_door_what_placement_would_tell_it() -> None:
    there = (
        reservation("r", gpus=1, start=0, end=9), reservation("over", gpus=1, start=-9, end=-1),
        reservation("theirs", "other", gpus=1, start=0, end=9), reservation("wrong", gpus=0, start=0, end=9),
    )  # fmt: skip
    at = Installation(reservations=there, now=NOW)
    for name, refused in {"r": None, "over": True, "theirs": True, "wrong": False, "none": False}.items():
        asked = review({**PLAIN, "reservation": name}, namespace="ns")
        view = workload("w", spec={"reservation": name})
        seen = snapshot([node("n", 8)], [view], reservations=there)
        waiting = decide(seen, Ledger(), Settings(), limit=9, seed=0).waiting
        told = [each.message for each in waiting if each.reason == "NoReservation"]
        tail = "; the workload waits until that is mended"
        assert refusal(asked, at) == (told[0] if refused else ""), name
        assert refused is None or refused or warnings(asked, at) == [told[0] + tail]
        assert (refused is None) == (told == [])
        edited = review({**PLAIN, "reservation": name, "suspend": True}, {**PLAIN, "reservation": name}, "ns")
        assert refusal(edited, at) == ""


@given(
    st.fixed_dictionaries(
        {"start": st.sampled_from(["2030-01-01T00:00:00Z", "x"]) | json_values, "end": st.just("2031-01-01T00:00:00Z")},
        optional={"gpus": st.integers(-1, 20) | json_values, "gpusPerNode": json_values | st.integers(1, 9),
                  "namespaces": st.just(["ns"]) | json_values, "nodeSelector": json_values},
    )
    | json_values,
    json_values,
)  # fmt: skip
def test_no_gpureservation_that_somebody_writes_is_an_error(new: Any, old: Any) -> None:
    said, told = reserving(new, reservation("r", gpus=3, start=0, end=10**9), old=old)
    assert isinstance(said, str)
    assert told == []
