"""What the control plane takes from NodeDevices: nothing that a broken or hostile one could do harm with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.devices.fleet import (
    HeldSeat,
    NodeDevicesView,
    fleet_verdicts,
    held_seats,
    news,
    node_devices_view,
    passed_over,
    seat_standing,
)
from planning.devices.prefer_group import ANNOTATION
from planning.devices.seat_status import seat_status
from planning.views import pod_view
from tests.crds.test_gpuseatprofile import anything
from tests.planning.devices.test_seat_profiles import view
from tests.planning.devices.test_seat_status import REFUSED

SERVING = {"source": "GPUSeatProfile pairs", "generation": 3, "groups": 1, "seats": 4}


def node(name: str, **seats: Any) -> NodeDevicesView:
    return NodeDevicesView(name, seats, None)


def test_each_node_speaks_of_the_profile_that_is_its_own() -> None:
    mine = view("pairs", "2026-01-01T00:00:00Z")
    late = view("late", "2026-02-01T00:00:00Z")
    labels: dict[str, dict[str, str]] = {"a": {}, "b": {}}
    gone, by_file = node("gone", **SERVING), node("b", source="the file seats.yaml", seats=4)
    found = fleet_verdicts([late, mine], [node("a", **SERVING, problems=[REFUSED]), gone, by_file], labels)
    assert [(each.node, each.uid, each.seats, each.instead) for each in found] == [
        ("a", "uid-pairs", 4, ""),
        ("a", "uid-late", 0, "pairs"),
    ]
    assert found[0].problems == (REFUSED,)


def test_an_event_is_worth_what_became_true() -> None:
    profile = view("pairs")
    (waits,) = fleet_verdicts([profile], [node("a", **SERVING, waiting=["Group G01 waits."])], {"a": {}})
    (serves,) = fleet_verdicts([profile], [node("a", **SERVING)], {"a": {}})
    first = seat_status(profile, {}, [waits], 1.0)
    assert news({}, first) == []
    second = seat_status(profile, first, [serves], 2.0)
    assert [each["reason"] for each in news(first, second)] == ["Serving"] and news(second, second) == []


@pytest.mark.parametrize(
    ("id", "group", "counts"),
    [
        ("kyb-G01-s1", "G01", True),
        ("kyb-a-s2-s64", "a-s2", True),
        ("kyb-G01-s65", "G01", False),
        ("kyb-G01-s01", "G01", False),
        ("kyb-G01-s0", "G01", False),
        ("kyb-G02-s1", "G01", False),
        ("anything", "G01", False),
        (f"kyb-{'G' * 49}-s1", "G" * 49, False),
    ],
)
def test_only_what_is_named_as_a_seat_of_its_group_is_one(id: str, group: str, counts: bool) -> None:
    device = {"id": id, "group": group, "resource": "kyb.ai/gpu-2x-seat", "heldBy": {"namespace": "ns", "pod": "p"}}
    raw = {"metadata": {"name": "n"}, "status": {"devices": [device]}}
    assert held_seats(raw) == ((HeldSeat(id, group, "ns", "p"),) if counts else ())


def test_a_pod_is_passed_over_once_whatever_seats_its_node_makes_up() -> None:
    raw = {"metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": {ANNOTATION: "G09"}}}
    pod = pod_view({**raw, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}}, "nvidia.com/gpu")
    assert pod is not None
    held = [HeldSeat(f"kyb-G01-s{number}", "G01", "ns", "p") for number in range(1, 9)]
    assert passed_over([NodeDevicesView("n", {}, None, tuple(held))], [pod]) == [(pod, held[0])]


_DEVICE = st.fixed_dictionaries(
    {}, optional={"id": anything, "group": anything, "resource": st.just("kyb.ai/gpu-2x-seat"), "heldBy": anything}
)


@given(anything, anything, st.lists(_DEVICE | anything), st.dictionaries(st.text(max_size=9), anything, max_size=3))
def test_whatever_stands_in_a_status_is_read(seats: Any, labels: Any, devices: Any, more: dict[str, Any]) -> None:
    said = {**more, "seats": seats, "labels": labels, "devices": devices}
    raw = {"metadata": {"name": "n", "uid": "u"}, "status": said}
    read = node_devices_view(raw)
    verdicts = fleet_verdicts([view("pairs")], [read], {"n": {}})
    seat_status(view("pairs"), seat_standing(raw).status, verdicts, 1.0)
    assert node_devices_view({**raw, "status": more.get("x")}).node == "n"
