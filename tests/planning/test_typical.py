"""What counts as typical, and how much of a node's free GPUs that cannot use."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.decay import DAY, HALF_LIFE
from planning.demand import PAUSE, kind, learned, models
from planning.filters import Constraints, Requirement
from planning.jobs import shape_of
from planning.model import GPU_MODEL_LABEL, WHOLE, Devices, Ended, WorkloadView
from planning.profiles import Profile, fold, run_of
from planning.typical import Fragments, Kind, Typical, as_often_as_it_fits, typical
from tests.planning.builders import NOW, SETTINGS, workload

kinds = st.builds(
    Kind,
    st.integers(0, 8),
    st.just(WHOLE),
    st.integers(0, 4).map(lambda n: n * 1000),
    st.sets(st.sampled_from(["T4", "H200"])).map(lambda names: tuple(sorted(names))),
) | st.builds(Kind, st.just(1), st.integers(1, 999), st.integers(0, 4).map(lambda n: n * 1000))
gpus = st.lists(st.integers(0, WHOLE) | st.just(WHOLE), max_size=8).map(lambda free: tuple(sorted(free, reverse=True)))


def test_the_most_frequent_that_make_up_95_percent() -> None:
    one, two, rare = Kind(1, WHOLE, 1000), Kind(2, WHOLE, 1000), Kind(8, WHOLE, 1000)
    found = typical([(one, 60), (two, 36), (rare, 4)])
    assert [(each.kind, round(each.share, 3)) for each in found] == [(one, 0.625), (two, 0.375)]
    assert typical([]) == ()


@given(st.permutations([(Kind(n, WHOLE, 0), 1.0) for n in range(1, 7)]))
def test_their_order_does_not_depend_on_who_came_first(asked: list[tuple[Kind, float]]) -> None:
    assert [each.kind.gpus for each in typical(asked)] == [1, 2, 3, 4, 5, 6]


def unusable(kind: Kind, model: str, cpu: int, devices: Devices) -> float:
    """The paper's definition, one request at a time."""
    usable = [free for free in devices if free >= kind.gpu_milli]
    if not kind.gpus or cpu < kind.cpu_milli or (kind.models and model not in kind.models):
        return sum(devices)
    return sum(devices) - (sum(usable) if len(usable) >= kind.gpus else 0)


@given(st.lists(st.tuples(kinds, st.floats(0.1, 9)), max_size=8), st.sampled_from(["T4", "x"]), st.data())
def test_fragments_are_what_typical_requests_cannot_use(
    asked: list[tuple[Kind, float]], model: str, data: st.DataObject
) -> None:
    found = typical(asked)
    fragments = Fragments(found)
    for _ in range(5):
        cpu, devices = data.draw(st.integers(-1, 5000)), data.draw(gpus)
        expected = sum(each.share * unusable(each.kind, model, cpu, devices) for each in found)
        assert fragments.on(model, cpu, devices) == pytest.approx(expected, abs=1e-6)


@given(kinds, st.integers(-1, 9000), gpus)
def test_counting_how_often_it_fits_never_makes_more_usable(kind: Kind, cpu: int, devices: Devices) -> None:
    once, often = Fragments([Typical(kind, 1.0)]), Fragments([Typical(kind, 1.0)], as_often_as_it_fits)
    least, most = once.on("T4", cpu, devices), often.on("T4", cpu, devices)
    assert most >= least - 1e-6
    assert often.on("T4", 10**9, devices) == pytest.approx(once.on("T4", 10**9, devices), abs=1e-6), (
        "CPU is what tells them apart"
    )


def test_cpu_for_two_of_four_makes_half_of_the_gpus_usable() -> None:
    often = Fragments([Typical(Kind(1, WHOLE, 1000), 1.0)], as_often_as_it_fits)
    assert [often.on("", cpu, (WHOLE,) * 4) for cpu in (999, 1000, 2000, 9000)] == [4000, 3000, 2000, 0]


def test_newer_workloads_count_more_and_those_that_cannot_be_read_not_at_all() -> None:
    views = [
        workload("new", 1, created=NOW - PAUSE),
        workload("old-1", 2, created=NOW - 3 * HALF_LIFE * DAY),
        workload("old-2", 2, created=NOW - 3 * HALF_LIFE * DAY),
        workload("just-now", 4, created=NOW),
        workload("asleep", 5, spec={"suspend": True}, created=NOW - PAUSE),
        workload("unreadable", 99, created=NOW - PAUSE),
        workload(
            "refused",
            1,
            spec={
                "template": {
                    "spec": {
                        "containers": [{"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "7"}}}]
                    }
                }
            },
            created=NOW - PAUSE,
        ),
    ]
    shares = {each.kind.gpus: each.share for each in learned(views, partial(shape_of, settings=SETTINGS), NOW)}
    assert shares == {1: pytest.approx(0.8), 2: pytest.approx(0.2)}


@given(st.lists(st.floats(0, 30 * DAY), max_size=20), st.floats(0, PAUSE - 1))
def test_what_was_learned_stays_the_same_for_a_while(ages: list[float], later: float) -> None:
    now = NOW // PAUSE * PAUSE
    views = [workload(f"w{i}", 1 + i % 3, created=now - age) for i, age in enumerate(ages)]
    shape = partial(shape_of, settings=SETTINGS)
    newcomer = workload("newcomer", 8, created=now + later)
    assert learned(views, shape, now) == learned([*views, newcomer], shape, now + later)


def ended(uid: str, gpus: int, created: float) -> WorkloadView:
    tombstone = Ended(told=NOW - 60, finished=NOW - 60)
    return workload(uid, gpus, created=created, status={"phase": "Succeeded"}, ended=tombstone)


def shares(*arguments: Any) -> dict[int, float]:
    return {each.kind.gpus: each.share for each in learned(*arguments)}


def profile_of(views: list[WorkloadView]) -> Profile:
    shape = partial(shape_of, settings=SETTINGS)
    runs = [run_of(view, kind(view.spec, shape(view.spec))) for view in views if view.spec is not None]
    return fold(Profile("ns", "m"), [run for run in runs if run is not None])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.floats(PAUSE, 11 * DAY)), min_size=1, max_size=20), st.data())
def test_those_that_a_profile_has_learned_count_as_before_also_when_they_are_gone(
    asked: list[tuple[int, float]], data: st.DataObject
) -> None:
    shape = partial(shape_of, settings=SETTINGS)
    views = [ended(f"w{i}", gpus, NOW - age) for i, (gpus, age) in enumerate(asked)]
    going = [workload(f"g{i}", 1 + i % 3, created=NOW - 9 * DAY) for i in range(data.draw(st.integers(0, 3)))]
    left = data.draw(st.lists(st.sampled_from(views), unique_by=lambda view: view.uid))
    before = shares([*views, *going], shape, NOW)
    now = shares([*left, *going], shape, NOW, [profile_of(views)])
    # Weights are rounded, which may decide what is the last to make up 95 percent.
    for gpus in before.keys() | now.keys():
        assert now.get(gpus, 0.0) == pytest.approx(before.get(gpus, 0.0), abs=0.06)


def test_one_that_its_profile_does_not_know_yet_counts_because_it_exists() -> None:
    shape = partial(shape_of, settings=SETTINGS)
    known, new = ended("a", 1, NOW - DAY), replace(ended("b", 2, NOW - DAY), ended=Ended(told=NOW, finished=NOW))
    assert shares([known, new], shape, NOW, [profile_of([known])]) == {1: 0.5, 2: 0.5}
    assert shares([known, new], shape, NOW, [profile_of([known, new])]) == {1: 0.5, 2: 0.5}
    elsewhere = replace(profile_of([known]), namespace="other")
    assert shares([known], shape, NOW, [elsewhere]) == {1: 1.0}


@pytest.mark.parametrize(
    ("constraints", "told"),
    [
        (Constraints(), ()),
        (Constraints(selector=(("zone", "a"), (GPU_MODEL_LABEL, "T4"))), ("T4",)),
        (Constraints(affinity=((Requirement(GPU_MODEL_LABEL, "In", ("T4", "H200")),),)), ("H200", "T4")),
        (Constraints(affinity=((Requirement(GPU_MODEL_LABEL, "In", ("T4",)),), ())), ("T4",)),
        (Constraints(affinity=((Requirement(GPU_MODEL_LABEL, "In", ("T4",)),), (Requirement("a", "Exists", ()),))), ()),
        (Constraints(affinity=((Requirement(GPU_MODEL_LABEL, "NotIn", ("T4",)),),)), ()),
    ],
)
def test_the_gpu_models_that_a_request_takes(constraints: Constraints, told: tuple[str, ...]) -> None:
    assert models(constraints) == told
