"""What counts as typical, and how much of a node's free GPUs that cannot use."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.decay import DAY, HALF_LIFE
from planning.demand import PAUSE, kind, learned, models
from planning.filters import Constraints, Requirement
from planning.jobs import shape_of
from planning.model import GPU_MODEL_LABEL, WHOLE, Devices, Ended, WorkloadView
from planning.profiles import Profile, fold, run_of
from planning.typical import Fragments, Kind, Room, Typical, typical
from tests.planning.builders import NOW, SETTINGS, workload

kinds = st.builds(
    Kind,
    st.integers(0, 8),
    st.just(WHOLE),
    st.integers(0, 4).map(lambda n: n * 1000),
    st.sets(st.sampled_from(["T4", "H200"])).map(lambda names: tuple(sorted(names))),
) | st.builds(Kind, st.just(1), st.integers(1, 999), st.integers(0, 4).map(lambda n: n * 1000))
gpus = st.lists(st.integers(0, WHOLE) | st.just(WHOLE), max_size=8).map(lambda free: tuple(sorted(free, reverse=True)))


def test_the_most_frequent_that_make_up_95_percent_are_typical_and_the_other_ones_for_gpus_rare() -> None:
    one, two, four, eight = (Kind(n, WHOLE, 1000) for n in (1, 2, 4, 8))
    found = typical([(one, 600), (two, 360), (four, 30), (eight, 10), (Kind(0, 0, 1000), 5)])
    assert [(each.kind, each.share) for each in found if not each.rare] == [(one, 0.625), (two, 0.375)]
    assert [(each.kind, each.share) for each in found if each.rare] == [(four, 0.75), (eight, 0.25)]
    assert typical([]) == ()


def test_of_very_many_rare_kinds_those_are_left_out_that_hardly_anybody_asks_for() -> None:
    found = typical(
        [(Kind(1, WHOLE, 0), 99_000.0), *((Kind(2, WHOLE, n), 1.0) for n in range(999)), (Kind(8, WHOLE, 0), 9)]
    )
    assert [(each.kind.gpus, each.share) for each in found if each.rare] == [(8, 0.01)]


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
        expected = sum(each.share * unusable(each.kind, model, cpu, devices) for each in found if not each.rare)
        assert fragments.on(model, cpu, devices) == pytest.approx(expected, abs=1e-6)


@given(
    st.lists(st.tuples(kinds, st.floats(0.1, 9), st.booleans()), max_size=8),
    st.sampled_from(["T4", "x"]),
    st.integers(0, 20_000),
    st.integers(0, 8),
)
def test_room_is_what_rare_requests_for_whole_gpus_could_use(
    asked: list[tuple[Kind, float, bool]], model: str, cpu: int, whole: int
) -> None:
    expected = 0.0
    for each, share, rare in asked:
        if (
            not rare
            or each.gpu_milli < WHOLE
            or not 0 < each.gpus <= whole
            or (each.models and model not in each.models)
        ):
            continue
        times = served = whole // each.gpus
        while served * each.cpu_milli > cpu:
            served -= 1
        expected += share * whole * served / times
    room = Room(Typical(each, share, rare) for each, share, rare in asked)
    assert room.on(model, cpu, whole) == pytest.approx(expected, abs=1e-9)


def test_cpu_for_one_of_two_makes_room_on_half_of_the_gpus() -> None:
    room = Room([Typical(Kind(4, WHOLE, 30_000), 1.0, rare=True)])
    assert [room.on("", cpu, 8) for cpu in (29_999, 30_000, 59_999, 60_000)] == [0, 4, 4, 8]
    assert [room.on("", 60_000, whole) for whole in range(8)] == [0, 0, 0, 0, 4, 5, 6, 7]


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
