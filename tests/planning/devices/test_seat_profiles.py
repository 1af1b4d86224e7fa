"""Which GPUSeatProfile is a node's: the oldest that selects it, whoever else does and whatever is written in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from planning.devices.seat_profiles import Configuration, Named, SeatProfileView, chosen, document_of, seat_profile_view
from tests.crds.test_gpuseatprofile import anything, spec


def view(name: str, created: str = "2026-11-22T12:00:00Z", wanted: Any = None) -> SeatProfileView:
    meta = {"uid": f"uid-{name}", "name": name, "generation": 3, "creationTimestamp": created}
    return seat_profile_view({"metadata": meta, "spec": spec() if wanted is None else wanted})


def test_the_oldest_is_followed_and_the_others_are_named() -> None:
    old, older, same = (
        view("b", "2026-01-02T00:00:00Z"),
        view("c", "2026-01-01T00:00:00Z"),
        view("a", "2026-01-02T00:00:00Z"),
    )
    found = chosen([old, older, same], {})
    assert (found.source, found.spec) == ("GPUSeatProfile c", spec())
    assert found.profile == Named("uid-c", "c", 3)
    assert [each.name for each in found.overruled] == ["a", "b"], "by name where two are of one second"
    assert chosen([same, older, old], {}) == found


def test_only_those_that_select_the_node_count() -> None:
    h100 = view("h100", wanted=spec() | {"nodeSelector": {"gpu": "h100", "zone": "a"}})
    assert chosen([h100], {"gpu": "h100", "zone": "a", "more": ""}).profile is not None
    for labels in ({}, {"gpu": "h100"}, {"gpu": "l4", "zone": "a"}):
        assert chosen([h100], labels) == Configuration()


def test_a_bad_spec_stays_the_nodes_and_a_bad_selector_selects_none() -> None:
    good = view("good", "2027-01-01T00:00:00Z")
    assert chosen([good, view("bad", wanted={"profiles": 3})], {}).source == "GPUSeatProfile bad"
    for selector in ("all", ["a"], {"a": 1}, {1: "a"}, 0):
        bad = view("bad", wanted={"nodeSelector": selector})
        assert bad.selector is None and chosen([good, bad], {"a": "1"}).source == "GPUSeatProfile good"
    for wanted in (3, "x", [1]):
        assert view("bad", wanted=wanted).selector is None


@given(anything, anything)
def test_whatever_somebody_writes_can_be_looked_at(wanted: Any, selector: Any) -> None:
    for each in (wanted, {"nodeSelector": selector}):
        chosen([view("any", wanted=each)], {})
        document_of(each)
        document_of({"apiVersion": wanted, "kind": selector, "spec": each})


def test_a_files_document_is_the_resource() -> None:
    whole = {"apiVersion": "kyb.ai/v1alpha1", "kind": "GPUSeatProfile", "spec": spec()}
    assert document_of(whole) == (spec(), "")


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (spec(), "Its apiVersion must be kyb.ai/v1alpha1, not None"),
        (
            {"apiVersion": "kyb.ai/v1", "kind": "GPUSeatProfile"},
            "Its apiVersion must be kyb.ai/v1alpha1, not 'kyb.ai/v1'",
        ),
        ({"apiVersion": "kyb.ai/v1alpha1", "kind": "List"}, "Its kind must be GPUSeatProfile, not 'List'"),
        ({"apiVersion": "kyb.ai/v1alpha1", "kind": "GPUSeatProfile", "spec": None}, "It has no spec"),
        ([spec()], "It must be one document"),
    ],
)
def test_what_is_no_such_document_is_refused(document: Any, told: str) -> None:
    found, problem = document_of(document)
    assert found is None and problem.startswith(told)
