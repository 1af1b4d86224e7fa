"""What the control plane takes from NodeDevices: nothing that a broken or hostile one could do harm with."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planning.devices.fleet import NodeDevicesView, fleet_verdicts, news, node_devices_view, seat_standing
from planning.devices.seat_status import seat_status
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
