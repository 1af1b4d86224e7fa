"""A pod that prefers a group of GPUs: what becomes of its request, and which pods are taken as they come."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from planning.devices.prefer_group import CLAIM, Preference, SeatClass, patch, preference, seat_class, template

SEAT = "kyb.ai/gpu-2x-seat"
CLASS = SeatClass("gpu-2x-seat", SEAT)


def pod(group: str = "G01", *, amount: str = "1", resource: str = SEAT, **spec: Any) -> dict[str, Any]:
    own = {resource: amount}
    container = {"name": "c", "resources": {"limits": {"cpu": "1", **own}, "requests": dict(own)}}
    return {
        "metadata": {"annotations": {"kyb.ai/prefer-group": group}},
        "spec": {"containers": [{"name": "sidecar"}, container], **spec},
    }


def wanted(raw: object) -> Preference | None:
    return preference(raw, [SeatClass("other", "kyb.ai/gpu-1x-seat"), CLASS])


def applied(raw: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """RFC 6902, as far as it is used."""
    found = copy.deepcopy(raw)
    for each in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:]]
        at: Any = found
        for part in path:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if each["op"] == "remove":
            del at[last]
        elif last == "-":
            at.append(each["value"])
        else:
            at[last] = each["value"]
    return found


def test_its_request_becomes_a_claim_for_that_group_or_any() -> None:
    raw = pod()
    found = wanted(raw)
    assert found is not None
    made = template(found, "team-a")
    (request,) = made["spec"]["spec"]["devices"]["requests"]
    preferred, anyone = request["firstAvailable"]
    assert preferred["selectors"][0]["cel"]["expression"] == 'device.attributes["devices.kyb.ai"].group == "G01"'
    assert [each["deviceClassName"] for each in (preferred, anyone)] == ["gpu-2x-seat"] * 2
    assert "selectors" not in anyone
    spec = applied(raw, patch(raw, found))["spec"]
    assert spec["resourceClaims"] == [{"name": CLAIM, "resourceClaimTemplateName": made["metadata"]["name"]}]
    assert spec["containers"][1]["resources"] == {"limits": {"cpu": "1"}, "requests": {}, "claims": [{"name": CLAIM}]}
    assert spec["containers"][0] == {"name": "sidecar"}


def test_claims_that_it_has_stay() -> None:
    raw = pod(resourceClaims=[{"name": "nic"}])
    raw["spec"]["containers"][1]["resources"]["claims"] = [{"name": "nic"}]
    found = wanted(raw)
    assert found is not None
    spec = applied(raw, patch(raw, found))["spec"]
    assert [each["name"] for each in spec["resourceClaims"]] == ["nic", CLAIM]
    assert spec["containers"][1]["resources"]["claims"] == [{"name": "nic"}, {"name": CLAIM}]


def test_pods_that_want_the_same_share_a_template() -> None:
    one, other, third = (wanted(pod(group)) for group in ("G01", "G01", "G23"))
    assert one is not None and other is not None and third is not None
    assert one.template == other.template != third.template


@pytest.mark.parametrize(
    "raw",
    [
        pod(""),
        pod("G 01"),
        pod('G01" || true || "'),
        pod("G" * 60),
        pod(amount="2"),
        pod(resource="kyb.ai/gpu-4x-seat"),  # not offered through DRA
        pod(resource="nvidia.com/gpu"),
        pod(initContainers=[{"resources": {"limits": {SEAT: "1"}}}]),  # two seats, which one claim cannot be
        pod(resourceClaims=[{"name": CLAIM}]),
        {"metadata": {"annotations": None}, "spec": None},
        {"metadata": {"annotations": {"kyb.ai/prefer-group": ["G01"]}}, "spec": {"containers": "x"}},
        None,
    ],
)
def test_others_are_taken_as_they_come(raw: object) -> None:
    assert wanted(raw) is None


def test_a_class_of_seats_is_one_that_stands_for_their_resource() -> None:
    raw: dict[str, Any] = {"metadata": {"name": "gpu-2x-seat"}, "spec": {"extendedResourceName": SEAT}}
    assert seat_class(raw) == CLASS
    raw["spec"]["extendedResourceName"] = "nvidia.com/gpu"
    assert seat_class(raw) is None
    assert seat_class({}) is None
