"""GPUSeatProfile as a model: what a platform engineer may write, and refusals that name group, profile and GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.gpuseatprofile import MOST_GROUPS, MOST_NAME, MOST_SEATS, GPUSeatProfileSpec

PAIR: dict[str, Any] = {"name": "pair", "resource": "kyb.ai/gpu-2x-seat", "groupSize": 2, "seatsPerGroup": 4}
QUAD: dict[str, Any] = {"name": "quad", "resource": "kyb.ai/gpu-4x-seat", "groupSize": 4, "seatsPerGroup": 2}
HOURS: dict[str, Any] = {"seats": ["chat"], "days": ["Mon", "Fri"], "start": "08:00", "end": "18:30"}
UUID = "GPU-5170aaaa-0000-4000-8000-000000000000"


def policy(**said: Any) -> dict[str, Any]:
    return spec(profiles=(PAIR | {"policy": said},))


def spec(*groups: tuple[str, list[Any]], profiles: tuple[dict[str, Any], ...] = (PAIR,)) -> dict[str, Any]:
    named = [{"name": name, "gpus": gpus} for name, gpus in groups]
    return {"profiles": list(profiles), **({"gpuTopology": {"groups": named}} if groups else {})}


@pytest.mark.parametrize(
    "good",
    [
        spec(),
        spec(("G01", [0, 1]), ("G23", [3, 2])),
        spec(("mixed", [0, UUID])),
        spec(("G0123", [0, 1, 2, 3]), ("G45", [4, 5]), profiles=(PAIR, QUAD)),
        spec() | {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
        spec(
            *[(f"g{n}", [n]) for n in range(MOST_GROUPS)],
            profiles=(PAIR | {"groupSize": 1, "resource": "kyb.ai/gpu-1x-seat"},),
        ),
        policy(),
        policy(type="priority", lostPercent=50, windowSeconds=60),
        policy(type="schedule", timeZone="Europe/Berlin", schedule=[HOURS, HOURS | {"days": ["Sun"], "end": "00:00"}]),
        policy(type="schedule", timeZone="Etc/GMT+5", schedule=[{"seats": ["a"], "start": "00:00", "end": "23:59"}]),
    ],
)
def test_what_may_be_written(good: dict[str, Any]) -> None:
    found, refused = GPUSeatProfileSpec.parse(good)
    assert found is not None and refused == ""
    assert GPUSeatProfileSpec.parse(found.model_dump(mode="json", by_alias=True, exclude_none=True))[0] == found


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (spec(("G012", [0, 1, 2])), "G012 has 3 GPUs (0, 1, 2), and no profile is for that: pair takes groups of 2"),
        (spec(("G01", [0, 1]), ("G12", [1, 2])), "overlap: GPU 1 is in G01 and in G12"),
        (spec(("A", [0, UUID]), ("B", [UUID.upper(), 2])), "overlap: GPU GPU-5170AAAA"),
        (spec(("G00", [0, 0])), "names GPU 0 twice"),
        (spec(("G01", [0, 1]), ("G01", [2, 3])), "have the names G01 and G01"),
        (spec(("G01", [0, 1]), ("g01", [2, 3])), "not in case alone"),
        (spec(("G01", [0, "1"])), "spec.gpuTopology.groups[0].gpus[1]: must be an integer, not '1'"),
        (spec(("G01", [0, -1])), "must be at least 0, not -1"),
        (spec(("G01", [0, True])), "spec.gpuTopology.groups[0].gpus[1]"),
        (spec(("G 01", [0, 1])), "spec.gpuTopology.groups[0].name: must match"),
        (spec(("G" * (MOST_NAME + 1), [0, 1])), f"at most {MOST_NAME} characters"),
        (spec(("G01", [])), "spec.gpuTopology.groups[0].gpus: must have at least 1"),
        ({"profiles": [PAIR], "gpuTopology": {"groups": []}}, "must have at least 1 entries"),
        (spec(profiles=()), "spec.profiles: must have at least 1 entries"),
        (spec(profiles=(PAIR, PAIR | {"groupSize": 4, "resource": "kyb.ai/gpu-4x-seat"})), "two profiles of the name"),
        (spec(profiles=(PAIR, PAIR | {"name": "other"})), "has pair and other, both for groups of 2"),
        (spec(profiles=(PAIR | {"resource": "kyb.ai/gpu-4x-seat"},)), "must be kyb.ai/gpu-2x-seat, not 'kyb.ai/gpu"),
        (spec(profiles=(PAIR | {"resource": "nvidia.com/gpu"},)), "must be kyb.ai/gpu-2x-seat"),
        (spec(profiles=(PAIR | {"seatsPerGroup": 0},)), "must be at least 1, not 0"),
        (spec(profiles=(PAIR | {"groupSize": 0},)), "must be at least 1, not 0"),
        (policy(type="fastest"), "spec.profiles[0].policy.type"),
        (policy(lostPercent=0), "must be at least 1, not 0"),
        (policy(lostPercent=51), "must be at most 50, not 51"),
        (policy(windowSeconds=59), "must be at least 60, not 59"),
        (policy(type="schedule"), "spec.profiles[0].policy: is of type schedule and needs hours in schedule"),
        (policy(schedule=[HOURS]), "is of type onDemand and has a schedule, which onDemand has not"),
        (policy(type="schedule", schedule=[]), "must have at least 1 entries"),
        (policy(type="schedule", schedule=[HOURS | {"start": "8:00"}]), "policy.schedule[0].start"),
        (policy(type="schedule", schedule=[HOURS | {"end": "24:00"}]), "policy.schedule[0].end: must match"),
        (policy(type="schedule", schedule=[HOURS | {"days": ["Monday"]}]), "policy.schedule[0].days[0]"),
        (policy(type="schedule", schedule=[HOURS | {"days": ["Mon", "Mon"]}]), "has Mon twice"),
        (policy(type="schedule", schedule=[HOURS | {"seats": ["a", "a"]}]), "has a twice"),
        (policy(type="schedule", schedule=[HOURS | {"seats": []}]), "policy.schedule[0].seats: must have at least 1"),
        (policy(type="schedule", timeZone="../../etc/passwd", schedule=[HOURS]), "policy.timeZone: must match"),
        (spec() | {"gpus": 4}, "spec.gpus: is not a field that berth knows"),
        ([], "spec: must be an object"),
    ],
)  # fmt: skip
def test_refusals_say_where_and_why(bad: Any, told: str) -> None:
    found, refused = GPUSeatProfileSpec.parse(bad)
    assert found is None and told in refused


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(anything, anything, anything, anything)
def test_garbage_is_refused_with_a_sentence(profiles: Any, groups: Any, gpus: Any, whole: Any) -> None:
    for raw in (
        whole,
        {"profiles": profiles},
        {"profiles": [PAIR, profiles], "gpuTopology": groups},
        {"profiles": [PAIR], "gpuTopology": {"groups": groups}},
        {"profiles": [PAIR | {"policy": groups}]},
        {"profiles": [PAIR | {"policy": {"type": "schedule", "schedule": groups, "timeZone": gpus}}]},
        {"profiles": [PAIR], "gpuTopology": {"groups": [{"name": "G", "gpus": gpus}]}, "nodeSelector": whole},
    ):
        found, refused = GPUSeatProfileSpec.parse(raw)
        assert (found is None) == (refused != "")


def test_a_seats_id_always_fits_into_a_devices() -> None:
    assert len(f"kyb-{'G' * MOST_NAME}-s{MOST_SEATS}") <= 63
