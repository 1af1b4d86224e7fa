"""Each bad reference plugin breaks the rule that it was made for, and the good one breaks none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from nodeworkers.rpc import deviceplugin_pb2 as api
from tests.fake_kubelet import checks
from tests.fake_kubelet.kubelet import UNEXPECTED, FakeKubelet
from tests.fake_kubelet.reference_plugin import FAULTS, ReferencePlugin, running
from tests.fake_kubelet.transcript import RULES
from tests.fake_kubelet.wire import CallFailed

CARD = "example.com/card"


async def lived_through(kubelet: FakeKubelet, *faults: str) -> set[str]:
    """The rules that a plugin breaks that registers, has a pod with an init container, and outlives a kubelet."""
    plugin = ReferencePlugin(kubelet.plugins, devices=4, faults=faults)
    try:
        await plugin.start()
    except CallFailed:
        await plugin.stop()
        return kubelet.transcript.rules_broken()
    with suppress(TimeoutError):
        await kubelet.until(lambda: bool(kubelet.transcript.of("list")), 1, "a list")
        await kubelet.until(lambda: bool(kubelet.violations), 0.2, "a violation")
    if kubelet.allocatable.get(CARD):
        pod = await kubelet.admit("first", [{CARD: 2}], [{CARD: 1}])
        kubelet.delete(pod)
    await plugin.stop()
    await kubelet.restart()
    await plugin.start()
    with suppress(TimeoutError):
        await kubelet.until(lambda: bool(kubelet.violations), 0.2, "a violation")
    await plugin.stop()
    return kubelet.transcript.rules_broken()


async def test_a_good_plugin_breaks_no_rule(kubelet: FakeKubelet) -> None:
    assert await lived_through(kubelet) == set()
    assert kubelet.transcript.of("Allocate") and kubelet.transcript.of("PreStartContainer")


@pytest.mark.parametrize("fault", sorted(set(FAULTS) & set(RULES)))
async def test_a_fault_is_seen(kubelet: FakeKubelet, fault: str) -> None:
    assert fault in await lived_through(kubelet, fault)


@pytest.mark.parametrize("fault", sorted(set(FAULTS) & set(RULES) - {"vanished-while-asked"}))
async def test_a_fault_breaks_no_other_rule(kubelet: FakeKubelet, fault: str) -> None:
    assert await lived_through(kubelet, fault) - {fault} <= {"vanished-while-held"}


async def test_an_answer_that_is_too_large_fails_the_pod(kubelet: FakeKubelet) -> None:
    async with running(ReferencePlugin(kubelet.plugins, faults=["large-response"])):
        await kubelet.until_allocatable(CARD, 4)
        pod = await kubelet.admit("first", [{CARD: 1}])
        assert (pod.phase, pod.reason) == ("Failed", UNEXPECTED)
        assert kubelet.transcript.rules_broken() == {"message-too-large"}


async def test_a_device_of_two_resources_is_seen(kubelet: FakeKubelet) -> None:
    other = ReferencePlugin(kubelet.plugins, "example.com/other", ["card-0"])
    async with running(ReferencePlugin(kubelet.plugins)), running(other):
        await kubelet.until_allocatable(CARD, 4)
        await kubelet.until_allocatable("example.com/other", 1)
    assert kubelet.transcript.rules_broken() == {"shared-device-id"}


async def test_a_socket_of_two_resources_is_seen(kubelet: FakeKubelet) -> None:
    plugin = ReferencePlugin(kubelet.plugins)
    await plugin.start()
    await kubelet.until_allocatable(CARD, 4)
    plugin.resource = "example.com/other"
    await plugin._register(plugin._path.name)
    await plugin.stop()
    assert "endpoint-shared" in kubelet.transcript.rules_broken()


async def test_a_held_device_that_vanishes_is_seen_and_looks_healthy(kubelet: FakeKubelet) -> None:
    plugin = ReferencePlugin(kubelet.plugins, devices=2)
    async with running(plugin):
        await kubelet.until_allocatable(CARD, 2)
        pod = await kubelet.admit("first", [{CARD: 2}])
        plugin.healthy["card-0"] = False
        plugin.changed()
        await kubelet.until_allocatable(CARD, 1)
        assert kubelet.health(pod) == {"c0": {CARD: {"card-0": "Unhealthy", "card-1": "Healthy"}}}
        assert kubelet.violations == []
        del plugin.healthy["card-0"]
        plugin.changed()
        await kubelet.until(lambda: kubelet.capacity[CARD] == 1, 10, "the card is gone")
        assert kubelet.health(pod) == {"c0": {CARD: {"card-0": "Healthy", "card-1": "Healthy"}}}
        assert kubelet.transcript.rules_broken() == {"vanished-while-held"}


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("tenstorrent.com/n150", True),
        ("kyb.ai/gpu-2x-seat", True),
        ("a/B_c.d", True),
        ("n150", False),
        ("kubernetes.io/n150", False),
        ("x.kubernetes.io/n150", False),
        ("requests.example.com/card", False),
        ("Tenstorrent.com/n150", False),
        ("a/b/c", False),
        ("a/", False),
        ("/b", False),
        ("a/-b", False),
        ("a/" + "b" * 63, True),
        ("a/" + "b" * 64, False),
        ("", False),
    ],
)
def test_names_of_resources(name: str, valid: bool) -> None:
    assert checks.is_extended_resource(name) is valid


def test_what_a_response_may_name() -> None:
    known = {"card-0", "card-1", "0", "1"}

    def broken(**given: Any) -> set[str]:
        response = api.AllocateResponse(container_responses=[api.ContainerAllocateResponse(**given)])
        return {rule for rule, _ in checks.allocation({"card-0"}, known, response)}

    mount = {"host_path": "/a", "container_path": "/b"}
    assert broken() == set()
    assert broken(envs={"A": "card-0,1", "B": "card-10"}, annotations={"c": "0"}) == set()
    assert broken(envs={"A": "x;card-1"}) == {"foreign-device"}
    assert broken(cdi_devices=[{"name": "example.com/card=card-0"}], mounts=[mount]) == set()
    assert broken(cdi_devices=[{"name": "example.com/card=card-1"}]) == {"foreign-device"}
    assert broken(devices=[{"host_path": "/dev/card-1", "container_path": "/dev/x", "permissions": "rw"}]) == {
        "foreign-device"
    }
    for bad in (
        {"envs": {"A=B": "x"}},
        {"cdi_devices": [{"name": "card-0"}]},
        {"mounts": [{"host_path": "a", "container_path": "/b"}]},
        {"mounts": [mount, {"host_path": "/c", "container_path": "/b"}]},
        {"devices": [{**mount, "permissions": ""}]},
        {"devices": [{**mount, "permissions": "rwx"}]},
    ):
        assert broken(**bad) == {"malformed-response"}, bad


def test_what_may_be_preferred() -> None:
    def broken(*chosen: str) -> set[str]:
        response = api.PreferredAllocationResponse(container_responses=[{"deviceIDs": chosen}])
        return {rule for rule, _ in checks.preference({"a", "b", "c"}, {"a"}, 2, response)}

    assert broken("a", "b") == broken() == set()
    for bad in (("a",), ("a", "a"), ("a", "b", "c"), ("b", "c"), ("a", "d")):
        assert broken(*bad) == {"bad-preference"}, bad
    assert not list(checks.preference({"a"}, {"a"}, 1, api.PreferredAllocationResponse()))
