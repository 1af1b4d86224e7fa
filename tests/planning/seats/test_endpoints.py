"""EndpointSlices of Services of seats: whoever asks finds somebody, and no node takes what is another's pods'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.seats.endpoints import (
    MOST_ENDPOINTS,
    PORT_ANNOTATION,
    SERVICE_ANNOTATION,
    ProxyPort,
    SeatPod,
    SeatService,
    Standing,
    endpoint_slices,
    proxy_ports,
    seat_pod,
    seat_service,
)

SERVICE = SeatService("team", "llama", "s-uid", {"app": "llama"}, "http")


def service(told: str = "app=llama", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "name": "llama", "uid": "s-uid", "annotations": {SERVICE_ANNOTATION: told}},
        "spec": {"ports": [{"name": "http", "port": 80}]} | spec,
    }


def pod(name: str, node: str = "n1", host: str = "10.0.0.1", *, ready: bool = False, app: str = "llama") -> SeatPod:
    return SeatPod("team", name, f"{name}-uid", {"app": app}, node, host, ready)


def port(
    pod: str, node: str = "n1", standing: Standing = "serves", number: int = 31000, seat: str = "kyb-G01-s1"
) -> ProxyPort:
    return ProxyPort(node, seat, standing, number, "team", pod)


def ready(slices: dict[str, dict[str, Any]]) -> dict[str, bool]:
    return {
        each["targetRef"]["name"]: each["conditions"]["ready"]
        for found in slices.values()
        for each in found["endpoints"]
    }


def test_a_service_of_seats_is_known_by_its_annotation() -> None:
    assert seat_service({"metadata": {"name": "other"}, "spec": {}}) is None
    assert seat_service(service()) == SERVICE
    found = seat_service(service("app=llama, tier=gold", ports=[{"port": 80, "appProtocol": "kubernetes.io/h2c"}]))
    assert found is not None
    assert (found.labels, found.port, found.app_protocol) == (
        {"app": "llama", "tier": "gold"}, "", "kubernetes.io/h2c"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "spec", "why"),
    [
        ("", {}, "no list of labels"),
        ("app", {}, "no list of labels such as app=llama: app"),
        ("app==llama", {}, "no list of labels"),
        ("app=llama,", {}, "no list of labels"),
        ("app=llama", {"selector": {"app": "llama"}}, "remove the selector"),
        ("app=llama", {"ports": []}, "it has 0 ports"),
        ("app=llama", {"ports": [{"port": 1}, {"port": 2}]}, "it has 2 ports"),
        ("app=llama", {"ports": [{"port": 1, "protocol": "UDP"}]}, "not of TCP"),
    ],
)
def test_what_cannot_be_served_is_said_and_gets_nothing(told: str, spec: dict[str, Any], why: str) -> None:
    found = seat_service(service(told, **spec))
    assert found is not None and why in found.problem
    assert endpoint_slices(found, [pod("a", ready=True)], [port("a")]) == {}


def test_a_parked_pod_is_reached_by_its_nodes_proxy() -> None:
    (found,) = endpoint_slices(SERVICE, [pod("a"), pod("b", app="qwen")], [port("a"), port("b", number=31001)]).values()
    assert found["metadata"]["name"] == "llama-seats-31000"
    assert found["metadata"]["labels"]["kubernetes.io/service-name"] == "llama"
    assert found["ports"] == [{"name": "http", "port": 31000, "protocol": "TCP"}]
    assert found["endpoints"] == [
        {
            "addresses": ["10.0.0.1"],
            "conditions": {"ready": True, "serving": True, "terminating": False},
            "nodeName": "n1",
            "targetRef": {"kind": "Pod", "namespace": "team", "name": "a", "uid": "a-uid"},
        }
    ]


def test_nodes_that_use_the_same_port_share_a_slice_and_families_do_not() -> None:
    pods = [pod("a"), pod("b", "n2", "10.0.0.2"), pod("c", "n3", "fd00::3")]
    slices = endpoint_slices(SERVICE, pods, [port("a"), port("b", "n2"), port("c", "n3")])
    assert {name: (len(each["endpoints"]), each["addressType"]) for name, each in slices.items()} == {
        "llama-seats-31000": (2, "IPv4"), "llama-seats-31000-v6": (1, "IPv6")
    }  # fmt: skip


def test_a_node_does_not_speak_for_a_pod_that_runs_elsewhere() -> None:
    assert endpoint_slices(SERVICE, [pod("a", "n2", "10.0.0.2", ready=True)], [port("a", "n1")]) == {}


def test_a_pod_of_another_namespace_is_not_meant() -> None:
    other = SeatPod("prod", "a", "u", {"app": "llama"}, "n1", "10.0.0.1", ready=True)
    assert endpoint_slices(SERVICE, [other], [ProxyPort("n1", "s", "serves", 31000, "prod", "a")]) == {}


def test_whoever_has_yet_to_start_is_asked_only_where_nobody_serves() -> None:
    pods = [pod("a"), pod("b")]
    waiting = port("b", standing="starts", number=31001, seat="kyb-G01-s2")
    assert ready(endpoint_slices(SERVICE, pods, [port("a"), waiting])) == {"a": True, "b": False}
    gone = port("a", standing="none")
    assert ready(endpoint_slices(SERVICE, pods, [gone, waiting])) == {"a": False, "b": True}


def test_of_a_pod_that_moves_and_the_one_in_its_stead_one_is_asked() -> None:
    new = replace(pod("b", ready=True), replaces="a")
    there = port("b", number=31001, seat="kyb-G23-s1")
    both = [pod("a", ready=True), new]
    assert ready(endpoint_slices(SERVICE, both, [port("a"), there])) == {"a": True, "b": False}
    assert ready(endpoint_slices(SERVICE, both, [port("a", standing="starts"), there])) == {"a": True, "b": False}
    assert ready(endpoint_slices(SERVICE, both, [port("a", standing="moved"), there])) == {"a": False, "b": True}
    assert ready(endpoint_slices(SERVICE, [new], [there])) == {"b": True}, "it is gone"
    moved_alone = endpoint_slices(SERVICE, both, [port("a", standing="moved")])
    assert ready(moved_alone) == {"a": True}, "its node's proxy knows where to"
    moved = {"id": "s", "phase": "Active", "port": 31000, "passedOn": "10.0.0.1:31001"}
    (found,) = proxy_ports({"spec": {"nodeName": "n1"}, "status": {"seats": [moved | {"heldBy": {"pod": "a"}}]}})
    assert found.standing == "moved"


def test_many_endpoints_are_several_slices() -> None:
    pods = [pod(f"p{i}", f"n{i}", f"10.0.1.{i}") for i in range(MOST_ENDPOINTS + 1)]
    slices = endpoint_slices(SERVICE, pods, [port(each.name, each.node) for each in pods])
    assert sorted(len(each["endpoints"]) for each in slices.values()) == [1, MOST_ENDPOINTS]


def test_a_pod_counts_while_it_lives_and_says_where_it_listens() -> None:
    raw: dict[str, Any] = {
        "metadata": {"namespace": "team", "name": "a", "uid": "a-uid", "labels": {"app": "llama"},
                     "annotations": {PORT_ANNOTATION: "8000"}},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", "hostIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip
    assert seat_pod(raw) == pod("a", ready=True)
    assert seat_pod(raw | {"status": {"phase": "Failed"}}) is None
    assert seat_pod(raw | {"metadata": {"name": "a"}}) is None
    unreachable = seat_pod(raw | {"status": {"hostIP": "127.0.0.1"}})
    assert unreachable is not None and endpoint_slices(SERVICE, [unreachable], [port("a")]) == {}


def test_what_a_group_says_is_read_with_care() -> None:
    held = {"namespace": "team", "pod": "a", "container": "c"}
    raw = {
        "spec": {"nodeName": "n1"},
        "status": {
            "seats": [
                {"id": "kyb-G01-s1", "phase": "Parked", "port": 31000, "heldBy": held},
                {"id": "kyb-G01-s2", "phase": "Parked", "port": 0, "heldBy": held},
                {"id": "kyb-G01-s3", "phase": "Parked", "port": True, "heldBy": held},
                {"id": "kyb-G01-s4", "phase": "Parked", "port": 31003},
                "nonsense",
            ]
        },
    }
    assert proxy_ports(raw) == [port("a")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["metadata", "spec", "status", "annotations", SERVICE_ANNOTATION, PORT_ANNOTATION, "ports", "seats", "heldBy",
         "labels", "conditions", "hostIP", "port", "pod", "nodeName"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), JSON))
def test_whatever_it_is_it_is_read_without_harm(raw: dict[str, Any]) -> None:
    seat_service(raw)
    seat_pod(raw)
    proxy_ports(raw)


STANDINGS = st.sampled_from(get_args(Standing))


@given(
    st.lists(st.builds(pod, st.sampled_from("abcd"), st.sampled_from(["n1", "n2"]), ready=st.booleans()), max_size=6),
    st.lists(
        st.builds(port, st.sampled_from("abcd"), st.sampled_from(["n1", "n2"]), STANDINGS, st.integers(31000, 31003)),
        max_size=12,
    ),
)
def test_each_endpoint_is_a_pod_of_its_own_node_once(pods: list[SeatPod], ports: list[ProxyPort]) -> None:
    slices = endpoint_slices(SERVICE, pods, ports)
    told = [(each.node, each.pod, each.port) for each in ports]
    for found in slices.values():
        number = found["ports"][0]["port"]
        for each in found["endpoints"]:
            assert (each["nodeName"], each["targetRef"]["name"], number) in told
            assert any((one.node, one.name) == (each["nodeName"], each["targetRef"]["name"]) for one in pods)
    if any(each.standing != "none" and (each.node, each.pod) in {(p.node, p.name) for p in pods} for each in ports):
        endpoints = [each for found in slices.values() for each in found["endpoints"]]
        assert any(each["conditions"]["ready"] for each in endpoints), "a request finds somebody"
