"""GPUs that are offered through DRA: which class's they are, how many are left, and what the node has then."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.devices.counted import (
    ClassView,
    Counted,
    SliceView,
    claim_view,
    class_view,
    counted,
    slice_view,
    with_devices,
)
from planning.views import node_view

DRIVER, RESOURCE = "devices.kyb.ai", "nvidia.com/gpu"


def device_class(*expressions: str, resource: str | None = RESOURCE) -> dict[str, Any]:
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": each}} for each in expressions]}
    return {"metadata": {"name": "c"}, "spec": spec | ({"extendedResourceName": resource} if resource else {})}


def resource_slice(*names: str, node: str = "n", generation: int = 1, driver: str = DRIVER, **more: Any) -> SliceView:
    devices = [
        {
            "name": name,
            "attributes": {"resource": {"string": RESOURCE}, "index": {"int": 0}, "ok": {"bool": True}},
            "capacity": {"memory": {"value": "80Gi"}},
            **more,
        }
        for name in names
    ]
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    view = slice_view({"spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": devices}})
    assert view is not None
    return view


def read(*expressions: str) -> ClassView:
    view = class_view(device_class(*expressions))
    assert view is not None
    return view


OURS = read(f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].resource == '{RESOURCE}'")


@pytest.mark.parametrize(
    ("expressions", "counts"),
    [
        ([f"device.driver == '{DRIVER}'"], True),
        ([f'device.attributes["{DRIVER}"].ok == true', "device.driver == 'devices.kyb.ai'"], True),
        ([f'device.attributes["{DRIVER}"].index == 0'], True),
        ([f'device.attributes["{DRIVER}"].index == 1'], False),
        ([f'device.attributes["{DRIVER}"].ok == 1'], False),
        ([f'device.attributes["{DRIVER}"].index == false'], False),
        (["device.driver == 'gpu.nvidia.com'"], False),
        ([f"device.driver == '{DRIVER}' || true"], False),
        ([f"device.driver == '{DRIVER}' && device.capacity['x'].y.compareTo(quantity('1')) > 0"], False),
        ([], False),
    ],
)
def test_a_class_counts_what_its_selectors_say_and_nothing_where_they_cannot_be_read(
    expressions: list[str], counts: bool
) -> None:
    found = counted([resource_slice("a", "b")], [read(*expressions)], [])
    assert found == ({"n": (Counted(RESOURCE, 2, 81_920),)} if counts else {})


def test_a_class_that_is_no_extended_resource_counts_nothing() -> None:
    assert class_view(device_class("device.driver == 'x'", resource=None)) is None


def test_what_is_tainted_or_claimed_is_not_to_be_had() -> None:
    taint = [{"key": "k", "effect": "NoSchedule"}]
    found = counted([resource_slice("a", "b"), resource_slice("c", taints=taint)], [OURS], [((DRIVER, "n", "b"),)])
    assert found == {"n": (Counted(RESOURCE, 1, 81_920),)}
    assert counted([resource_slice("a", taints=[{"effect": "None"}])], [OURS], [])


def test_of_a_pool_the_newest_generation_counts() -> None:
    slices = [resource_slice("a", "b", generation=1), resource_slice("a", generation=2)]
    assert counted(slices, [OURS], []) == {"n": (Counted(RESOURCE, 1, 81_920),)}


def claim(annotations: dict[str, str], **result: Any) -> dict[str, Any]:
    results = [{"driver": DRIVER, "pool": "n", "device": "a", "request": "r", **result}]
    return {"metadata": {"annotations": annotations}, "status": {"allocation": {"devices": {"results": results}}}}


def test_a_claim_for_a_pods_extended_resource_is_counted_by_the_pod() -> None:
    assert claim_view(claim({})) == ((DRIVER, "n", "a"),)
    assert claim_view(claim({"resource.kubernetes.io/extended-resource-claim": "true"})) is None
    assert claim_view(claim({}, adminAccess=True)) is None
    assert claim_view({"status": {}}) is None


def node(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n", "labels": {"nvidia.com/gpu.present": "true"}}, "status": status}


def test_the_node_has_them_beside_its_allocatable() -> None:
    view = node_view(node(allocatable={"cpu": "4", "tenstorrent.com/n150": "2"}), RESOURCE)
    assert [gap.resource for gap in view.gaps] == [""]
    more = with_devices(view, (Counted(RESOURCE, 3, 81_920), Counted("example.com/nic", 9, 0)), RESOURCE)
    assert dict(more.allocatable.gpus_by_resource()) == {"": 3, "tenstorrent.com/n150": 2}
    assert more.allocatable.cpu_milli == 4000 and more.gpu_memory == (("", 81_920),)
    assert more.gaps == (), "it is there, though no device plugin has it"
    assert with_devices(view, (), RESOURCE) is view


def test_capacity_that_a_device_plugin_left_behind_is_no_gap() -> None:
    view = node_view(node(capacity={RESOURCE: "8"}, allocatable={RESOURCE: "0"}), RESOURCE)
    assert view.gaps
    more = with_devices(view, (Counted(RESOURCE, 8, 0),), RESOURCE)
    assert more.allocatable.gpus == 8 and not more.gaps


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["metadata", "spec", "status", "devices", "attributes", "capacity", "memory", "value", "taints", "pool",
             "generation", "nodeName", "driver", "selectors", "cel", "expression", "extendedResourceName",
             "allocation", "results", "annotations", "name", "a"]
        ),
        inner, max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


@given(junk, junk, junk)
def test_whatever_anybody_writes_nothing_breaks(one: object, other: object, third: object) -> None:
    slices, classes, claims = slice_view(one), class_view(other), claim_view(third)
    counted([slices] if slices else [], [classes] if classes else [], [claims] if claims else [])
