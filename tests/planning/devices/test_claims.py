"""What the scheduler gave to a claim, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.devices.claims import Portion, Result, portions, results
from planning.devices.offers import Device, Refused
from planning.devices.slices import DRIVER

OFFERED = {
    "r/x": (Device("GPU-A", "r/x", ()), Device("GPU-B", "r/x", ())),
    "r/y": (Device("y-1", "r/y", ()),),
}


def claim(*given: dict[str, Any], **devices: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team-a", "name": "c", "uid": "u-1"},
        "status": {"allocation": {"devices": {"results": list(given), **devices}}},
    }


def given_to(request: str, device: str, **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": "n", "device": device, **more}


def test_devices_come_by_request_and_resource() -> None:
    body = claim(
        given_to("gpus", "gpu-a"), given_to("gpus", "gpu-b"), given_to("any/second", "y-1"),
        given_to("look", "gpu-a", adminAccess=True, shareID="s"),
        {"request": "nic", "driver": "other", "pool": "elsewhere", "device": "eth0"},
    )  # fmt: skip
    found = results(body, "u-1", "n")
    look = Result("look", "n", "gpu-a", admin=True, share="s")
    assert portions(found, OFFERED) == (
        Portion("gpus", "r/x", ("GPU-A", "GPU-B"), (Result("gpus", "n", "gpu-a"), Result("gpus", "n", "gpu-b"))),
        Portion("any", "r/y", ("y-1",), (Result("any", "n", "y-1"),)),
        Portion("look", "r/x", ("GPU-A",), (look,), admin=True),
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({**claim(given_to("a", "gpu-a")), "metadata": {"uid": "u-2"}}, "is another one by now"),
        ({"metadata": {"uid": "u-1"}}, "the scheduler has not allocated any"),
        (claim({**given_to("a", "gpu-a"), "driver": "other"}), f"has no device of {DRIVER}"),
        (claim({**given_to("a", "gpu-a"), "pool": "m"}), "this is the node n"),
        (claim(given_to("a", "b"), config=[{"opaque": {"driver": DRIVER, "parameters": {}}}]), "opaque parameters"),
    ],
)
def test_what_is_not_ours_is_refused(body: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        results(body, "u-1", "n")


def test_a_device_that_went_is_refused() -> None:
    with pytest.raises(Refused, match=r"gpu-c is not on the node n any more\. Delete the pod"):
        portions(results(claim(given_to("a", "gpu-c")), "u-1", "n"), OFFERED)


def test_parameters_for_others_are_none_of_ours() -> None:
    body = claim(given_to("a", "gpu-a"), config=[{"opaque": {"driver": "other"}}, {}])
    assert len(results(body, "u-1", "n")) == 1


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(json, json)
def test_nonsense_is_refused_and_nothing_worse(status: Any, given: Any) -> None:
    for body in ({"metadata": {"uid": "u-1"}, "status": status}, claim(given), {"metadata": given}):
        with pytest.raises(Refused):
            results(body, "u-1", "n")
