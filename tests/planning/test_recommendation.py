"""Recommendations: never below what was seen in use, never less for more, nothing before enough was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crds.gpuworkload import PRIORITIES
from crds.gpuworkload_status import GPUWorkloadStatus
from planning.accelerators import AMD, NVIDIA, NVIDIA_MEMORY_LABEL
from planning.decay import DAY, HALF_LIFE
from planning.model import GPU_MODEL_LABEL, WHOLE, NodeView
from planning.profiles import Mark, Profile, Run, fold
from planning.recommendation import (
    Ask,
    GpuType,
    Recommendation,
    advised,
    ask_of,
    gpu_types,
    recommend,
    shown,
)
from planning.samples import Usage
from planning.typical import Kind
from planning.views import node_view
from tests.planning.builders import node, workload

NOW = 20_000 * DAY
FLEET = (GpuType(24_000, "A10", 4), GpuType(40_000, "A100-40", 8), GpuType(80_000, "A100-80", 8))


def ran(number: int, active: int = 1, memory: int = 20_000, *, took: float = 60.0, gpus: int = 4) -> Run:
    usage = Usage(9, active, memory, {16: 9}, {12: 9}, simulated=True)
    return Run(Mark(int(NOW) + number, "u"), "ns", "m", gpus, NOW, True, "Completed", 0, took, usage=usage)


FOUR = Ask(4, "normal")


def of(*runs: Run, ask: Ask = FOUR, types: tuple[GpuType, ...] = FLEET, now: float = NOW) -> Any:
    return recommend(fold(Profile("ns", "m"), runs), ask, types, now)


def test_what_nine_runs_with_four_gpus_of_which_one_was_used_recommend() -> None:
    found = of(*(ran(i) for i in range(12)))
    assert found == Recommendation(
        1, 23_000, "A10", "high", 0.75,
        "simulated samples of its runs with 4 GPUs show at most 1 in use at once, with up to 20000 MiB each; "
        "nine in ten take up to 1m (0.066 GPU-hours), which is short",
        simulated=True,
    )  # fmt: skip


runs = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 100_000)), max_size=20)


@given(runs, st.integers(1, 8))
def test_never_below_what_was_seen_in_use(given_runs: list[tuple[int, int]], gpus: int) -> None:
    seen = [ran(i, min(active, gpus), memory, gpus=gpus) for i, (active, memory) in enumerate(given_runs)]
    found = of(*seen, ask=Ask(gpus))
    if len(seen) < 3:
        assert found is None
        return
    assert found is not None
    most, peak = max(min(active, gpus) for active, _ in given_runs), max(memory for _, memory in given_runs)
    assert found.gpu_count == max(1, most) <= gpus
    assert found.memory_mib is None if peak == 0 else found.memory_mib >= peak * 1.15
    memory_of = {each.model: each for each in FLEET}
    if found.gpu_type is not None:
        chosen = memory_of[found.gpu_type]
        assert chosen.memory_mib >= found.memory_mib and chosen.gpus >= found.gpu_count
        smaller = [each for each in FLEET if each.memory_mib < chosen.memory_mib]
        assert all(each.memory_mib < found.memory_mib or each.gpus < found.gpu_count for each in smaller)


@given(
    runs.filter(lambda given_runs: len(given_runs) > 2), st.integers(0, 8), st.integers(0, 100_000), st.floats(0, 10**7)
)
def test_more_never_recommends_less(given_runs: list[tuple[int, int]], active: int, memory: int, took: float) -> None:
    seen = [ran(i, *each, gpus=8) for i, each in enumerate(given_runs)]
    before, after = of(*seen, ask=Ask(8, 0)), of(*seen, ran(99, active, memory, took=took, gpus=8), ask=Ask(8, 0))
    assert after.gpu_count >= before.gpu_count
    assert (after.memory_mib or 0) >= (before.memory_mib or 0)
    assert after.confidence >= before.confidence
    sizes = {each.model: each.memory_mib for each in FLEET}
    if before.gpu_type is not None:
        assert after.gpu_type is None or sizes[after.gpu_type] >= sizes[before.gpu_type]


@given(st.lists(st.floats(1, 10**7), min_size=3, max_size=9), st.floats(1, 100), st.integers(1, 8))
def test_longer_runs_are_never_recommended_to_go_before(times: list[float], factor: float, gpus: int) -> None:
    def priority(by: float) -> int:
        found = of(*(ran(i, took=each * by, gpus=gpus) for i, each in enumerate(times)), ask=Ask(gpus, "normal"))
        assert found is not None and found.priority is not None
        return PRIORITIES[found.priority]

    assert priority(factor) <= priority(1.0)


def test_confidence_grows_with_runs_and_fades_with_time() -> None:
    def sure(count: int, weeks: int = 0) -> float | None:
        found = of(*(ran(i) for i in range(count)), now=NOW + weeks * HALF_LIFE * DAY)
        return None if found is None else float(found.confidence)

    assert [sure(count) for count in (2, 3, 4, 36)] == [None, 0.43, 0.5, 0.9]
    assert (sure(36, weeks=1), sure(36, weeks=3), sure(36, weeks=4)) == (0.82, 0.53, None)


def test_only_runs_with_as_many_gpus_tell_what_so_many_do() -> None:
    seen = [ran(i, 2, gpus=2) for i in range(5)]
    assert of(*seen, ask=Ask(4)) is None
    found = of(*seen, ask=Ask(2))
    assert found is not None and found.gpu_count == 2


def test_without_samples_only_a_priority_is_recommended() -> None:
    timed = [replace(ran(i, took=40 * 3600.0), usage=None) for i in range(5)]
    found = of(*timed)
    assert (found.gpu_count, found.memory_mib, found.gpu_type, found.priority) == (None, None, None, "low")
    assert not found.simulated and found.reason.endswith("which is long")
    assert of(*timed, ask=Ask(4, 250)) is None, "a number was chosen with care"
    assert of(*timed, ask=Ask(4, None)) is None


def test_idle_gpus_leave_one_and_a_fleet_without_memory_labels_no_type() -> None:
    idle = of(*(ran(i, 0, 0) for i in range(5)))
    assert (idle.gpu_count, idle.memory_mib, idle.gpu_type) == (1, None, None)
    assert of(*(ran(i) for i in range(5)), types=()).gpu_type is None
    assert of(*(ran(i, 8, gpus=8) for i in range(5)), ask=Ask(8)).gpu_type == "A100-40", "an A10 node has four"


def test_the_fleets_gpu_types() -> None:
    def gpu_node(name: str, model: str, memory: str, gpus: int = 8) -> NodeView:
        labels = {GPU_MODEL_LABEL: model, NVIDIA_MEMORY_LABEL: memory}
        raw = {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": {NVIDIA: str(gpus)}}}
        return node_view(raw, NVIDIA)

    nodes = [
        gpu_node("a", "H100", "81559"),
        gpu_node("b", "H100", "81000", 4),
        gpu_node("c", "T4", "15360", 2),
        gpu_node("d", "B200", "lots"),
        gpu_node("e", "", "1"),
        gpu_node("f", "X", "9" * 99),
        gpu_node("g", "Y", "1", 0),
        node("h"),
    ]
    assert gpu_types(nodes) == (GpuType(15_360, "T4", 2), GpuType(81_000, "H100", 8))


def test_a_node_of_two_vendors_has_two_types() -> None:
    labels = {GPU_MODEL_LABEL: "T4", NVIDIA_MEMORY_LABEL: "15360"}
    labels |= {"amd.com/gpu.product-name": "MI300X", "amd.com/gpu.vram": "192G"}
    raw = {"metadata": {"labels": labels}, "status": {"allocatable": {NVIDIA: "2", AMD: "8"}}}
    assert gpu_types([node_view(raw, NVIDIA)]) == (GpuType(15_360, "T4", 2), GpuType(192 * 1024, "MI300X", 8, AMD))
    assert gpu_types([node_view(raw, AMD)]) == (GpuType(15_360, "T4", 2, NVIDIA), GpuType(192 * 1024, "MI300X", 8))


def test_only_types_of_the_resource_that_is_asked_for() -> None:
    types = (*FLEET, GpuType(1_000_000, "MI300X", 8, AMD))
    asks = replace(FOUR, gpu_resource=AMD)
    assert of(*(ran(i) for i in range(5)), ask=asks, types=types) is None, "runs with other GPUs tell nothing of these"
    amd = of(*(replace(ran(i), kind=Kind(4, WHOLE, 0, resource=AMD)) for i in range(5)), ask=asks, types=types)
    assert "its runs with 4 amd.com/gpu show" in amd.reason
    assert amd.gpu_type == "MI300X" and of(*(ran(i) for i in range(5)), types=types).gpu_type != "MI300X"


def test_what_is_asked_for() -> None:
    spec = workload("w", 2, spec={"priority": "high", "nodeSelector": {GPU_MODEL_LABEL: "T4"}}).spec
    assert spec is not None and ask_of(spec, NVIDIA) == Ask(2, "high", "T4")
    amd = workload("w", 1, spec={"gpuResource": AMD, "nodeSelector": {"amd.com/gpu.product-name": "MI300X"}}).spec
    assert amd is not None and ask_of(amd, NVIDIA) == Ask(1, "normal", "MI300X", AMD)
    assert ask_of(amd, AMD) == Ask(1, "normal", "MI300X")
    plain = workload("w", 2).spec
    assert plain is not None and ask_of(plain, NVIDIA) == Ask(2, "normal", "")


def test_a_status_shows_it_and_nothing_of_the_one_before() -> None:
    found = of(*(ran(i) for i in range(12)))
    told = shown(found)
    GPUWorkloadStatus.model_validate({"recommendation": told})
    assert told["gpuCount"] == 1 and told["memoryMiB"] == 23_000 and told["simulated"] is True
    before = workload("w", status={"recommendation": {"gpuCount": 2, "priority": "low", "confidence": 0.1}})
    fewer = advised({"phase": "Running"}, before, replace(found, priority=None, simulated=False))
    assert fewer["recommendation"]["priority"] is None and "simulated" not in fewer["recommendation"]
    assert advised({"phase": "Running"}, before, None) == {"phase": "Running", "recommendation": None}
    hostile = workload("w", status={"recommendation": ["x"]})
    assert advised({}, hostile, found) == {"recommendation": told}
