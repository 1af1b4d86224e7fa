"""What counts as a GPU, on nodes of several vendors and on pods that ask for any; and what labels tell of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.settings import Settings
from planning.accelerators import (
    AMD,
    NVIDIA,
    SEAT,
    asked_resource,
    gpu_counts,
    gpu_model,
    is_gpu,
    known_as,
    memory_mib,
    seat_size,
)
from planning.capacity import Room
from planning.model import Resources
from planning.views import job_view, node_view, pod_view, requests_text
from tests.planning.builders import workload

OWN = "example.com/gpu"
XE = "gpu.intel.com/xe"
amounts = st.dictionaries(st.sampled_from(["", AMD, SEAT, "tenstorrent.com/n150"]), st.integers(0, 9))


@pytest.mark.parametrize(
    ("resource", "counts"),
    [
        (NVIDIA, True),
        (AMD, True),
        ("gpu.intel.com/i915", True),
        (XE, True),
        ("gpu.intel.com/i915_monitoring", False),
        ("gpu.intel.com/memory.max", False),
        ("gpu.intel.com/millicores", False),
        ("gpu.intel.com/tiles", False),
        ("tenstorrent.com/n150", True),
        (SEAT, True),
        ("kyb.ai/gpu-4x-seat", True),
        ("kyb.ai/gpu-0x-seat", False),
        ("nvidia.com/gpu.count", False),
        ("x-nvidia.com/gpu", False),
        ("rdma/hca", False),
        ("cpu", False),
        ("", False),
    ],
)
def test_what_counts_as_a_gpu(resource: str, counts: bool) -> None:
    assert is_gpu(resource) == counts


def test_the_size_of_a_seat() -> None:
    sizes = [seat_size(name) for name in (SEAT, "kyb.ai/gpu-4x-seat", NVIDIA, "kyb.ai/gpu-x-seat")]
    assert sizes == [1, 4, 0, 0]


def test_the_installations_resource_has_no_name_and_comes_first() -> None:
    asked = {"cpu": 4, AMD: 2, NVIDIA: 1, OWN: 3}
    assert gpu_counts(asked, NVIDIA) == (("", 1), (AMD, 2))
    assert gpu_counts(asked, OWN) == (("", 3), (AMD, 2), (NVIDIA, 1))
    assert gpu_counts({"cpu": 4}, NVIDIA) == ()


def test_a_node_that_boasts_of_many_kinds_is_not_believed() -> None:
    assert len(gpu_counts({f"tenstorrent.com/c{i}": 1 for i in range(9999)}, NVIDIA)) <= 16


def test_names_of_nothing_hide_nothing() -> None:
    asked = {f"gpu.intel.com/c{i}": 0 for i in range(99)} | {NVIDIA: 3}
    assert gpu_counts(asked, OWN) == ((NVIDIA, 3),)


@pytest.mark.parametrize(
    ("resource", "labels", "mib"),
    [
        (NVIDIA, {"nvidia.com/gpu.memory": "81559"}, 81559),
        (SEAT, {"nvidia.com/gpu.memory": "81559"}, 81559),
        (AMD, {"nvidia.com/gpu.memory": "81559"}, 0),
        (AMD, {"amd.com/gpu.vram": "192G"}, 192 * 1024),
        (AMD, {"beta.amd.com/gpu.vram": "16G"}, 16 * 1024),
        (AMD, {"amd.com/gpu.vram": "16T"}, 0),
        (
            "gpu.intel.com/xe",
            {"gpu.intel.com/memory.max": str(2 * 48 * 2**30), "gpu.intel.com/millicores": "2000"},
            49152,
        ),
        ("gpu.intel.com/xe", {"gpu.intel.com/memory.max": str(2**30)}, 0),
        ("gpu.intel.com/xe", {"gpu.intel.com/memory.max": "1", "gpu.intel.com/millicores": "0"}, 0),
        ("tenstorrent.com/n150", {"tenstorrent.com/n150.memory": "12288"}, 12288),
        (NVIDIA, {"nvidia.com/gpu.memory": "lots"}, 0),
        (NVIDIA, {"nvidia.com/gpu.memory": "-1"}, 0),
        (NVIDIA, {"nvidia.com/gpu.memory": "9" * 63}, 0),
        (NVIDIA, {}, 0),
    ],
)
def test_what_labels_tell_of_memory(resource: str, labels: dict[str, str], mib: int) -> None:
    assert memory_mib(labels, resource) == mib


def test_what_labels_tell_of_the_model() -> None:
    assert gpu_model({"nvidia.com/gpu.product": "H200"}, NVIDIA) == "H200"
    assert gpu_model({"amd.com/gpu.product-name": "MI300X"}, AMD) == "MI300X"
    assert gpu_model({"gpu.intel.com/product": "Max_1550"}, XE) == "Max_1550"
    assert gpu_model({"zone": "a"}, NVIDIA) == ""
    both = {"amd.com/gpu.product-name": "MI300X", "nvidia.com/gpu.product": "T4"}
    assert [gpu_model(both, resource) for resource in (NVIDIA, AMD, SEAT)] == ["T4", "MI300X", "T4"]
    assert gpu_model(both, XE) == gpu_model(both, "tenstorrent.com/n150") == "", "nobody tells of these"
    assert gpu_model(both, "example.com/gpu") == "T4", "what the installation calls a GPU is some vendor's"


@pytest.mark.parametrize(
    ("spec", "resource"),
    [({}, OWN), ({"gpuResource": AMD}, AMD), ({"gpuFraction": 0.25}, SEAT)],
)
def test_what_a_workload_asks_for(spec: dict[str, Any], resource: str) -> None:
    parsed = workload("w", spec=spec).spec
    assert parsed is not None and asked_resource(parsed, OWN) == resource


# --- counted amounts ----------------------------------------------------------------------------------------------


@given(amounts)
def test_resources_tell_what_was_counted(counts: dict[str, int]) -> None:
    counted = Resources.counting(counts.items(), 1, 2, 3)
    assert {name: counted.of(name) for name in counts} == counts
    assert counted.all_gpus == sum(counts.values())
    assert bool(counted.gpus) == bool(counted.all_gpus), "the first is one that there is"
    assert (counted.cpu_milli, counted.memory, counted.pods) == (1, 2, 3)


@given(amounts, amounts, amounts)
def test_a_room_gives_and_takes_each_resource_apart(
    there: dict[str, int], taken: dict[str, int], back: dict[str, int]
) -> None:
    room = Room(0, 0, 0, 0)
    room.give_back(Resources.counting(there.items(), 10, 10, 10))
    room.take(Resources.counting(taken.items(), 4, 3, 2))
    room.give_back(Resources.counting(back.items(), 1, 1, 1))
    left = {name: there.get(name, 0) - taken.get(name, 0) + back.get(name, 0) for name in (*there, *taken, *back)}
    assert {name: room.of(name) for name in left} == left
    assert (room.cpu_milli, room.memory, room.pods) == (7, 8, 9)
    assert {name: room.as_resources().of(name) for name in left} == {
        name: max(0, count) for name, count in left.items()
    }


# --- objects of the cluster ---------------------------------------------------------------------------------------


def node_of(
    allocatable: dict[str, str], capacity: dict[str, str] | None = None, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    status = {"allocatable": allocatable, "capacity": allocatable if capacity is None else capacity}
    return {"metadata": {"name": "n", "labels": labels or {}}, "status": status}


def test_a_node_of_two_vendors() -> None:
    view = node_view(node_of({NVIDIA: "4", XE: "1", f"{XE}_monitoring": "1"}), NVIDIA)
    assert view.allocatable == Resources(4, other_gpus=((XE, 1),)) and view.gaps == ()
    assert (view.most(""), view.most(XE), view.most(AMD)) == (4, 1, 0)


def test_memory_is_told_by_resource() -> None:
    labels = {"nvidia.com/gpu.memory": "81559", "amd.com/gpu.vram": "192G"}
    view = node_view(node_of({NVIDIA: "4", AMD: "2", SEAT: "3"}, labels=labels), NVIDIA)
    assert [view.memory_of(name) for name in ("", AMD, SEAT, "tenstorrent.com/n150")] == [81559, 196608, 81559, 0]
    coming = node_view(node_of({}, {NVIDIA: "4"}, labels), NVIDIA)
    assert coming.memory_of("") == 81559, "also where they are not allocatable yet"


@pytest.mark.parametrize("installed", [NVIDIA, AMD])
def test_a_model_is_told_by_resource(installed: str) -> None:
    labels = {"nvidia.com/gpu.product": "T400", "amd.com/gpu.product-name": "MI300X"}
    view = node_view(node_of({NVIDIA: "1", AMD: "8", XE: "1"}, labels=labels), installed)
    models = {name: view.model_of(known_as(name, installed)) for name in (NVIDIA, AMD, XE)}
    assert models == {NVIDIA: "T400", AMD: "MI300X", XE: ""}
    coming = node_view(node_of({}, {AMD: "8"}, labels), installed)
    assert coming.model_of(known_as(AMD, installed)) == "MI300X", "also where they are not allocatable yet"


def test_each_resource_has_its_own_gap() -> None:
    view = node_view(node_of({NVIDIA: "4", SEAT: "0"}, {NVIDIA: "4", SEAT: "3"}), NVIDIA)
    (gap,) = view.gaps
    assert (gap.resource, gap.expected) == (SEAT, 3) and f"capacity shows 3 {SEAT}" in gap.why
    assert view.most(SEAT) == 3 and view.gap("") is None
    amd = node_view(node_of({}, {}, {"amd.com/gpu.count": "2"}), NVIDIA)
    assert amd.most(AMD) == 2 and amd.most("") == 0


def test_gpus_that_are_in_seats_are_not_waited_for() -> None:
    seated = node_view(node_of({SEAT: "8"}, labels={"nvidia.com/gpu.count": "8"}), NVIDIA)
    assert seated.most("") == 0 and seated.gaps == ()


def test_a_pod_may_ask_for_several() -> None:
    asked = {"containers": [{"resources": {"limits": {AMD: "1"}}}, {"resources": {"limits": {NVIDIA: "2"}}}]}
    view = pod_view({"metadata": {"name": "p"}, "spec": asked}, NVIDIA)
    assert view is not None and view.requests == Resources(2, pods=1, other_gpus=((AMD, 1),))


@pytest.mark.parametrize("resource", ["", AMD])
def test_a_job_tells_which_gpus_it_asks_for(resource: str) -> None:
    asked = Resources(2, 500, 1, 1, gpu_resource=resource)
    labels = {"gpu.warp.dev/workload-uid": "u"}
    annotations = {"gpu.warp.dev/requests": requests_text(asked)}
    view = job_view({"metadata": {"name": "j", "labels": labels, "annotations": annotations}}, NVIDIA)
    assert view is not None and view.requests == asked
    nonsense = annotations["gpu.warp.dev/requests"].replace("}", ',"gpuResource":[]}')
    damaged = job_view({"metadata": {"labels": labels, "annotations": {"gpu.warp.dev/requests": nonsense}}}, NVIDIA)
    assert damaged is not None and damaged.requests.gpu_resource == ""


@pytest.mark.parametrize("resource", [NVIDIA, AMD, SEAT, XE, "tenstorrent.com/n150"])
@pytest.mark.parametrize("installed", [NVIDIA, AMD])
def test_a_damaged_job_still_tells_by_its_template_which_gpus_it_holds(resource: str, installed: str) -> None:
    pod = {"containers": [{"resources": {"limits": {resource: "4", "cpu": "2"}}}]}
    meta = {"labels": {"gpu.warp.dev/workload-uid": "u"}, "annotations": {"gpu.warp.dev/requests": "{"}}
    view = job_view({"metadata": meta, "spec": {"template": {"spec": pod}}}, installed)
    assert view is not None
    assert view.requests == Resources(4, 2000, pods=1, gpu_resource=known_as(resource, installed))


def test_any_resource_may_be_the_installations() -> None:
    settings, problem = Settings.parse({"gpuResource": "tenstorrent.com/n150"})
    assert settings is not None, problem
    view = node_view(node_of({"tenstorrent.com/n150": "4", NVIDIA: "1"}), settings.gpu_resource)
    assert view.allocatable == Resources(4, other_gpus=((NVIDIA, 1),))
