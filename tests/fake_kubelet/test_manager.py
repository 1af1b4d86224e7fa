"""What a plugin meets in a kubelet's life: registrations, lists, pods, restarts, races."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.rpc import deviceplugin_pb2 as api
from nodeworkers.rpc import pluginregistration_pb2, podresources_pb2
from tests.fake_kubelet import checkpoint
from tests.fake_kubelet.kubelet import UNEXPECTED, FakeKubelet
from tests.fake_kubelet.pods import ids
from tests.fake_kubelet.reference_plugin import ReferencePlugin, running
from tests.fake_kubelet.wire import Caller, CallFailed, Context, serve

CARD = "example.com/card"
LISTER = podresources_pb2.DESCRIPTOR.services_by_name["PodResourcesLister"].methods_by_name


@asynccontextmanager
async def lister(kubelet: FakeKubelet) -> AsyncIterator[Caller]:
    caller = Caller(kubelet.pod_resources)
    yield caller
    await caller.close()


async def test_a_pod_gets_devices_and_gives_them_back(kubelet: FakeKubelet) -> None:
    async with running(ReferencePlugin(kubelet.plugins)):
        await kubelet.until_allocatable(CARD, 4)
        pod = await kubelet.admit("first", [{CARD: 3}])
        (container,) = pod.containers
        assert pod.phase == "Running" and container.running and container.starts == 1
        assert container.given.env == {"CARDS": ",".join(container.devices[CARD])}
        assert container.given.nodes == {f"/dev/{each}": (f"/dev/by-id/{each}", "rw") for each in pod.devices(CARD)}
        refused = await kubelet.admit("second", [{CARD: 2}])
        assert (refused.phase, refused.reason) == ("Failed", UNEXPECTED)
        assert "Requested: 2, Available: 1" in refused.message
        kubelet.delete(pod)
        assert (await kubelet.admit("third", [{CARD: 2}, {CARD: 2}])).phase == "Running"
        assert kubelet.capacity == kubelet.allocatable == {CARD: 4}
        assert kubelet.violations == []


async def test_what_no_plugin_serves_is_ignored(kubelet: FakeKubelet) -> None:
    pod = await kubelet.admit("first", [{"cpu": 1, CARD: 1}])
    assert pod.phase == "Running" and not pod.devices(CARD)
    with pytest.raises(ValueError, match="first is there already"):
        await kubelet.admit("first", [{}])


async def test_app_containers_use_again_what_init_containers_had(kubelet: FakeKubelet) -> None:
    async with running(plugin := ReferencePlugin(kubelet.plugins, devices=3)):
        await kubelet.until_allocatable(CARD, 3)
        for at in range(8):  # in whatever order
            pod = await kubelet.admit(f"p{at}", [{CARD: 2}, {CARD: 1}], [{CARD: 1}, {CARD: 3}])
            assert pod.phase == "Running"
            first, second, app, other = (set(each.devices[CARD]) for each in pod.containers)
            assert first < second and app < second and other == second - app
            assert [each.running for each in pod.containers] == [False, False, True, True]
            kubelet.delete(pod)
        assert len(plugin.allocations) == 8 * 4


async def test_a_container_that_starts_again_gets_what_it_had_without_an_allocate(kubelet: FakeKubelet) -> None:
    async with running(ReferencePlugin(kubelet.plugins, faults=["calls-by-changed-answers"])):
        await kubelet.until_allocatable(CARD, 4)
        pod = await kubelet.admit("first", [{CARD: 2}])
        given = pod.containers[0].given
        await kubelet.kill()
        await kubelet.start()
        await kubelet.until_allocatable(CARD, 4)
        await kubelet.restart_container(pod, "c0")
        assert pod.containers[0].given == given and given.env["CALL"] == "1"
        assert len(kubelet.transcript.of("Allocate")) == 1
        assert len(kubelet.transcript.of("PreStartContainer")) == pod.containers[0].starts == 2


async def test_a_container_whose_card_fails_its_last_check_does_not_start(kubelet: FakeKubelet) -> None:
    async with running(ReferencePlugin(kubelet.plugins, faults=["pre-start-failed"])):
        await kubelet.until_allocatable(CARD, 4)
        pod = await kubelet.admit("first", [{CARD: 1}])
        assert pod.phase == "Pending" and pod.active and "PreStartContainer rpc failed" in pod.containers[0].error


async def test_kubelets_come_and_go(kubelet: FakeKubelet) -> None:
    """Killed, every socket stays; started, all go but those in folders; pods that run keep what they have."""
    below = kubelet.plugins / "below"
    below.mkdir()
    for path in (below / "kept.sock", kubelet.plugins / "stale.sock"):
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    (kubelet.plugins / "a-file").touch()
    async with running(ReferencePlugin(kubelet.plugins)):
        await kubelet.until_allocatable(CARD, 4)
        pod = await kubelet.admit("first", [{CARD: 3}])
        had = pod.devices(CARD)
        for how in (kubelet.kill, kubelet.stop):
            await how()
            assert kubelet.allocatable == {}
            assert kubelet.socket.exists() is (how == kubelet.kill)
            assert (kubelet.plugins / "stale.sock").exists() is (how == kubelet.kill)
            await kubelet.start()
            assert kubelet.capacity == {CARD: 0} and pod.phase == "Running"
            assert {path.name for path in kubelet.plugins.iterdir() if path.is_socket()} == {"kubelet.sock"}
            assert (below / "kept.sock").is_socket() and (kubelet.plugins / "a-file").exists()
            refused = await kubelet.admit(f"too early for {how.__name__}", [{CARD: 1}])
            assert refused.reason == UNEXPECTED and "no healthy devices present" in refused.message
            await kubelet.until_allocatable(CARD, 4)
            assert kubelet._running().manager.allocations.held() == {CARD: had}
        assert (await kubelet.admit("second", [{CARD: 2}])).reason == UNEXPECTED
        kubelet.delete(pod)
        assert (await kubelet.admit("third", [{CARD: 4}])).phase == "Running"


async def test_a_pod_whose_container_ended_while_the_kubelet_was_away_fails(kubelet: FakeKubelet) -> None:
    async with running(ReferencePlugin(kubelet.plugins)):
        await kubelet.until_allocatable(CARD, 4)
        pod = await kubelet.admit("first", [{CARD: 1}])
        await kubelet.kill()
        pod.containers[0].running = False
        await kubelet.start()
        assert (pod.phase, pod.reason) == ("Failed", UNEXPECTED)


async def test_a_pod_that_is_found_when_the_plugin_is_back_already_keeps_what_it_has(kubelet: FakeKubelet) -> None:
    async with running(plugin := ReferencePlugin(kubelet.plugins)):
        await kubelet.until_allocatable(CARD, 4)
        pod = await kubelet.admit("first", [{CARD: 2}])
        pod.containers[0].running = False
        had = pod.devices(CARD)
        assert await kubelet._admit(pod, restored=True)
        assert pod.devices(CARD) == had and len(plugin.allocations) == 1
        plugin.healthy[min(had)] = False
        plugin.changed()
        await kubelet.until_allocatable(CARD, 3)
        assert not await kubelet._admit(pod, restored=True)
        assert "previously allocated devices are no longer healthy" in pod.message


async def test_the_checkpoint_is_written_at_each_list_and_each_allocation(kubelet: FakeKubelet) -> None:
    plugin = ReferencePlugin(kubelet.plugins)
    async with running(plugin):
        await kubelet.until_allocatable(CARD, 4)
        assert kubelet.checkpoint_writes == 1
        plugin.healthy["card-1"] = False
        plugin.changed()
        await kubelet.until_allocatable(CARD, 3)
        assert kubelet.checkpoint_writes == 2
        pod = await kubelet.admit("first", [{CARD: 2}])
        assert kubelet.checkpoint_writes == 3
        (entry,), registered = checkpoint.decode(kubelet.checkpoint.read_bytes())
        assert ids(entry) == pod.devices(CARD) and entry.pod_uid == pod.uid
        assert {key: set(value) for key, value in registered.items()} == {CARD: {"card-0", "card-2", "card-3"}}


async def test_a_kubelet_goes_on_without_a_checkpoint_that_is_corrupt(kubelet: FakeKubelet) -> None:
    async with running(ReferencePlugin(kubelet.plugins)):
        await kubelet.until_allocatable(CARD, 4)
        await kubelet.kill()
        kubelet.checkpoint.write_text("{}")
        await kubelet.start()
        assert "cannot be read" in kubelet.transcript.of("checkpoint")[0].text
        await kubelet.until_allocatable(CARD, 4)


async def test_capacity_stays_for_five_minutes_when_a_plugin_is_gone(folder: Path) -> None:
    now = [1000.0]
    async with FakeKubelet(folder, clock=lambda: now[0]) as kubelet:
        plugin = ReferencePlugin(kubelet.plugins)
        await plugin.start()
        await kubelet.until_allocatable(CARD, 4)
        await plugin.stop()
        await kubelet.until_allocatable(CARD, 0)
        now[0] += 299
        assert kubelet.capacity == {CARD: 4} and kubelet.allocatable == {CARD: 0}
        assert (await kubelet.admit("first", [{CARD: 1}])).reason == UNEXPECTED
        now[0] += 2
        assert kubelet.capacity == {}
        assert (await kubelet.admit("second", [{CARD: 1}])).phase == "Running", "without devices: nobody knows them"


@pytest.mark.parametrize("race", [True, False])
async def test_the_end_of_the_old_stream_ends_the_new_registration_up_to_1_36(folder: Path, race: bool) -> None:
    async with FakeKubelet(folder, disconnect_race=race) as kubelet:
        old, new = ReferencePlugin(kubelet.plugins), ReferencePlugin(kubelet.plugins, devices=2)
        await old.start()
        await kubelet.until_allocatable(CARD, 4)
        await new.start()
        await kubelet.until_allocatable(CARD, 2)
        await old.stop()
        await kubelet.until(lambda: len(kubelet.transcript.of("stream ended")) == 1 + race, 10, "streams have ended")
        assert kubelet.allocatable == {CARD: 0 if race else 2}
        assert bool(kubelet.transcript.of("disconnect race")) is race
        assert "registered-over-open-stream" in kubelet.transcript.rules_broken()
        assert (await kubelet.admit("first", [{CARD: 1}])).active is not race
        await new.stop()


async def test_a_failed_registration_hides_the_end_of_the_one_before(kubelet: FakeKubelet) -> None:
    """As the real one does: it forgets the client, and then nobody tells the manager."""
    good, bad = ReferencePlugin(kubelet.plugins), ReferencePlugin(kubelet.plugins, faults=["options-failed"])
    await good.start()
    await kubelet.until_allocatable(CARD, 4)
    with pytest.raises(CallFailed, match="failed to connect"):
        await bad.start()
    await bad.stop()
    await good.stop()
    await kubelet.until(lambda: bool(kubelet.transcript.of("stream ended")), 10, "the stream has ended")
    assert kubelet.allocatable == {CARD: 4}
    assert (await kubelet.admit("first", [{CARD: 1}])).reason == UNEXPECTED


async def test_a_plugin_that_is_cut_off_must_register_again(kubelet: FakeKubelet) -> None:
    async with running(ReferencePlugin(kubelet.plugins)):
        await kubelet.until_allocatable(CARD, 4)
        await kubelet.cut(CARD)
        assert kubelet.allocatable == {CARD: 0} and kubelet.capacity == {CARD: 4}
        await kubelet.until_allocatable(CARD, 4)
    await kubelet.until_allocatable(CARD, 0)
    with pytest.raises(TimeoutError, match="still not: 4 allocatable"):
        await kubelet.until_allocatable(CARD, 4, 0.1)


async def test_podresources(kubelet: FakeKubelet) -> None:
    plugin = ReferencePlugin(kubelet.plugins, devices=["a", "b", "c"])
    async with running(plugin), lister(kubelet) as caller:
        await kubelet.until_allocatable(CARD, 3)
        pod = await kubelet.admit("first", [{CARD: 1}, {}], [{CARD: 2}], namespace="team")
        await kubelet.admit("second", [{}])
        plugin.healthy["a"] = False
        plugin.changed()
        await kubelet.until_allocatable(CARD, 2)
        listed = await caller.call(LISTER["List"], podresources_pb2.ListPodResourcesRequest())
        assert [(each.name, each.namespace) for each in listed.pod_resources] == [
            ("first", "team"),
            ("second", "default"),
        ]
        first = listed.pod_resources[0]
        assert [each.name for each in first.containers] == ["c0", "c1"]
        (device,) = first.containers[0].devices
        assert (device.resource_name, tuple(device.device_ids)) == (CARD, pod.container("c0").devices[CARD])
        request = podresources_pb2.GetPodResourcesRequest(pod_name="first", pod_namespace="team")
        assert (await caller.call(LISTER["Get"], request)).pod_resources == first
        request.pod_name = "nobody"
        with pytest.raises(CallFailed, match="pod nobody in namespace team not found"):
            await caller.call(LISTER["Get"], request)
        found = await caller.call(LISTER["GetAllocatableResources"], podresources_pb2.AllocatableResourcesRequest())
        assert [each.device_ids[0] for each in found.devices] == ["b", "c"]


async def test_podresources_has_a_limit(kubelet: FakeKubelet) -> None:
    async with lister(kubelet) as caller:
        request = podresources_pb2.ListPodResourcesRequest()
        answers = await asyncio.gather(
            *(caller.call(LISTER["List"], request) for _ in range(60)), return_exceptions=True
        )
        refused = [each for each in answers if isinstance(each, CallFailed)]
        assert refused and {each.code for each in refused} == {"RESOURCE_EXHAUSTED"} and len(refused) < 60


class Registrar:
    """pluginregistration.Registration of a plugin that is found, not one that registers."""

    def __init__(self, **info: Any) -> None:
        self.info = pluginregistration_pb2.PluginInfo(**info)
        self.told: list[tuple[bool, str]] = []

    async def GetInfo(self, request: object, context: Context) -> pluginregistration_pb2.PluginInfo:
        return self.info

    async def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: Context
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        self.told.append((request.plugin_registered, request.error))
        return pluginregistration_pb2.RegistrationStatusResponse()


async def test_plugins_may_be_found_in_the_registry(folder: Path) -> None:
    services = {
        **pluginregistration_pb2.DESCRIPTOR.services_by_name,
        **api.DESCRIPTOR.services_by_name,
    }
    async with FakeKubelet(folder, watch_registry=True) as kubelet:
        plugin = ReferencePlugin(kubelet.plugins)
        good = Registrar(type="DevicePlugin", name=CARD, supported_versions=["v1beta1"])
        other = Registrar(type="DRAPlugin", name="x", supported_versions=["v1"])
        old = Registrar(type="DevicePlugin", name=CARD, supported_versions=["v1alpha1"])
        registry = pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"]
        servers = [
            await serve(
                kubelet.registry / "good.sock", folder / "s", [(registry, good), (services["DevicePlugin"], plugin)]
            ),
            await serve(kubelet.registry / "other.sock", folder / "s", [(registry, other)]),
            await serve(kubelet.registry / "old.sock", folder / "s", [(registry, old)]),
            await serve(kubelet.registry / ".hidden.sock", folder / "s", [(registry, other)]),
        ]
        await kubelet.until(lambda: bool(good.told and other.told and old.told), 10, "all are told")
        assert good.told == [(True, "")]
        assert not other.told[0][0] and "no handler registered for plugin type: DRAPlugin" in other.told[0][1]
        assert not old.told[0][0] and "v1beta1, is not among" in old.told[0][1]
        await kubelet.until_allocatable(CARD, 4)
        await kubelet.kill()
        await kubelet.start()
        await kubelet.until_allocatable(CARD, 4)
        assert (kubelet.registry / "good.sock").is_socket()
        (kubelet.registry / "good.sock").unlink()
        await kubelet.until_allocatable(CARD, 0)
        for server in servers:
            await server.stop(grace=None)


async def test_a_folder_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long for a socket"):
        await FakeKubelet(tmp_path / ("x" * 100)).start()


async def test_it_must_run_to_do_anything(folder: Path) -> None:
    kubelet = FakeKubelet(folder)
    for asked in (kubelet.admit("first", []), kubelet.kill(), kubelet.cut(CARD)):
        with pytest.raises(RuntimeError, match="does not run"):
            await asked
    await kubelet.start()
    with pytest.raises(RuntimeError, match="runs already"):
        await kubelet.start()
    await kubelet.stop()
    await kubelet.stop()


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.booleans()), max_size=12))
def test_no_device_is_two_pods_whatever_comes(seed: int, wanted: list[tuple[int, int, bool]]) -> None:
    """Each step admits a pod of so many devices, and so many for its init container, or deletes the oldest one."""
    import tempfile

    async def live() -> None:
        with tempfile.TemporaryDirectory(prefix="fk-") as made:
            async with FakeKubelet(Path(made), seed=seed) as kubelet, running(ReferencePlugin(kubelet.plugins)):
                await kubelet.until_allocatable(CARD, 4)
                for at, (count, init, restart) in enumerate(wanted):
                    live_pods = [pod for pod in kubelet.pods if pod.active]
                    free = 4 - sum(len(pod.devices(CARD)) for pod in live_pods)
                    pod = await kubelet.admit(f"p{at}", [{CARD: count}], [{CARD: init}] if init else [])
                    assert pod.active is (max(count, init) <= free), pod.message
                    held = [device for each in kubelet.pods if each.active for device in sorted(each.devices(CARD))]
                    assert len(held) == len(set(held))
                    if live_pods and not pod.active:
                        kubelet.delete(live_pods[0])
                    if restart:
                        await kubelet.restart()
                        await kubelet.until_allocatable(CARD, 4)

    asyncio.run(live())
