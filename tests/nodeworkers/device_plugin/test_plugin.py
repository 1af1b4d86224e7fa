"""The device plugin service over a real unix socket, with a simulated allocation core."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from nodeworkers.device_plugin import plugin as module
from nodeworkers.device_plugin.plugin import DevicePlugin
from nodeworkers.rpc import deviceplugin_pb2 as messages
from nodeworkers.sockets import serve
from planning.devices.offers import Device, Injection, Refused
from tests.nodeworkers.device_plugin.simulated_devices import GPU, N150, SimulatedDevices, simulated

_METHODS = messages.DESCRIPTOR.services_by_name["DevicePlugin"].methods_by_name


class Kubelet:
    """The kubelet's side of one socket."""

    def __init__(self, path: Path) -> None:
        self.channel = grpc.aio.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)])

    def _call(self, name: str, answer: type) -> Callable[..., Any]:
        kind = self.channel.unary_stream if name == "ListAndWatch" else self.channel.unary_unary
        return kind(
            f"/{_METHODS[name].containing_service.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,  # type: ignore[attr-defined]
        )

    async def options(self) -> messages.DevicePluginOptions:
        call = self._call("GetDevicePluginOptions", messages.DevicePluginOptions)
        answer: messages.DevicePluginOptions = await call(messages.Empty(), timeout=10)
        return answer

    def watch(self) -> Any:
        return self._call("ListAndWatch", messages.ListAndWatchResponse)(messages.Empty())

    async def allocate(self, *containers: list[str]) -> messages.AllocateResponse:
        request = messages.AllocateRequest(
            container_requests=[messages.ContainerAllocateRequest(devices_ids=each) for each in containers]
        )
        answer: messages.AllocateResponse = await self._call("Allocate", messages.AllocateResponse)(request, timeout=10)
        return answer

    async def prefer(self, available: list[str], must: list[str], size: int) -> list[str]:
        each = messages.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        request = messages.PreferredAllocationRequest(container_requests=[each])
        call = self._call("GetPreferredAllocation", messages.PreferredAllocationResponse)
        return list((await call(request, timeout=10)).container_responses[0].deviceIDs)

    async def before_start(self, *ids: str) -> None:
        request = messages.PreStartContainerRequest(devices_ids=ids)
        await self._call("PreStartContainer", messages.PreStartContainerResponse)(request, timeout=10)


@pytest.fixture
def devices() -> SimulatedDevices:
    made = SimulatedDevices()
    made.offer(*simulated(4))
    return made


@pytest.fixture
def plugin(devices: SimulatedDevices) -> DevicePlugin:
    return DevicePlugin(N150, devices)


@pytest.fixture
async def kubelet(plugin: DevicePlugin, tmp_path: Path) -> AsyncIterator[Kubelet]:
    server = await serve(tmp_path / "p.sock", [plugin.service()], 64 * 1024 * 1024)
    kubelet = Kubelet(tmp_path / "p.sock")
    yield kubelet
    await kubelet.channel.close()
    plugin.close()
    await server.stop(grace=2)


async def until(true: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def healths(snapshot: messages.ListAndWatchResponse) -> list[str]:
    return [each.health for each in snapshot.devices]


@pytest.mark.parametrize("gated", [False, True])
async def test_its_options(devices: SimulatedDevices, tmp_path: Path, gated: bool) -> None:
    plugin = DevicePlugin(N150, devices, gated)
    server = await serve(tmp_path / "p.sock", [plugin.service()])
    kubelet = Kubelet(tmp_path / "p.sock")
    assert not plugin.asked
    options = await kubelet.options()
    assert options.get_preferred_allocation_available and options.pre_start_required is gated
    assert plugin.asked
    await kubelet.channel.close()
    await server.stop(grace=None)


async def test_the_list_comes_at_once_and_then_on_change_only(
    devices: SimulatedDevices, plugin: DevicePlugin, kubelet: Kubelet
) -> None:
    stream = kubelet.watch()
    first = await stream.read()
    assert [each.ID for each in first.devices] == [each.id for each in simulated(4)]
    assert healths(first) == ["Healthy"] * 4
    assert [[node.ID for node in each.topology.nodes] for each in first.devices] == [[0], [1], [0], [1]]

    devices.offer(*simulated(1, GPU, "GPU"), resource=GPU)  # nothing that is said here
    devices.offer(*simulated(4))  # the same
    devices.sicken(simulated(4)[2].id)
    assert healths(await stream.read()) == ["Healthy", "Healthy", "Unhealthy", "Healthy"]
    devices.sicken(simulated(4)[2].id, healthy=True)
    assert healths(await stream.read()) == ["Healthy"] * 4
    devices.offer()
    assert list((await stream.read()).devices) == []


async def test_nothing_that_says_the_same_is_sent_again(devices: SimulatedDevices, kubelet: Kubelet) -> None:
    stream = kubelet.watch()
    await stream.read()
    again = asyncio.ensure_future(stream.read())
    for _ in range(20):
        devices.offer(*simulated(4))
        await asyncio.sleep(0)
    await kubelet.allocate([simulated(1)[0].id])  # the loop came round
    assert not again.done()
    devices.offer(*simulated(5))
    assert len((await again).devices) == 5


async def test_a_node_that_is_not_known_is_not_told(devices: SimulatedDevices, kubelet: Kubelet) -> None:
    devices.offer(Device("a", N150, (), numa=(-1,)), Device("b", N150, ()), Device("c", N150, (), numa=(0, 1)))
    first = await kubelet.watch().read()
    assert [each.HasField("topology") for each in first.devices] == [False, False, True]
    assert [node.ID for node in first.devices[2].topology.nodes] == [0, 1]


async def test_many_streams_hold_up_nothing_and_end_with_the_plugin(
    devices: SimulatedDevices, plugin: DevicePlugin, kubelet: Kubelet
) -> None:
    streams = [kubelet.watch() for _ in range(40)]
    for stream in streams:
        await stream.read()
    assert plugin.streams == 40 and plugin.opened is not None
    assert (await kubelet.allocate([simulated(1)[0].id])).container_responses
    streams.pop().cancel()
    await until(lambda: plugin.streams == 39)
    plugin.close()
    for stream in streams:
        assert await stream.read() == grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK
    await until(lambda: plugin.streams == 0 and devices.waiting == 0)


async def test_a_core_that_cannot_tell_ends_the_stream_with_a_sentence(
    devices: SimulatedDevices, plugin: DevicePlugin, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("no ledger")

    monkeypatch.setattr(devices, "offered", broken)
    with pytest.raises(grpc.aio.AioRpcError, match=f"cannot list its {N150}.*no ledger"):
        await kubelet.watch().read()
    await until(lambda: plugin.streams == 0)


async def test_more_devices_than_the_kubelet_takes_are_cut(
    devices: SimulatedDevices, plugin: DevicePlugin, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    devices.offer(*simulated(90_000, name="a-name-as-long-as-an-nvidia-one-"))
    first = await kubelet.watch().read()  # with the limit of 4 MiB that the kubelet has
    assert 4_000_000 < first.ByteSize() <= 4 * 1024 * 1024
    assert "90000 devices" in caplog.text and "are not offered" in caplog.text
    assert plugin.healthy() == {each.ID for each in first.devices}


async def test_each_container_gets_all_that_its_devices_need(devices: SimulatedDevices, kubelet: Kubelet) -> None:
    a, b, c, _ = (each.id for each in simulated(4))
    answer = await kubelet.allocate([a, b], [c], [])
    first, second, nothing = answer.container_responses
    assert dict(first.envs) == {"SIMULATED_DEVICES": f"{a},{b}"}
    assert [(each.host_path, each.container_path, each.permissions) for each in first.devices] == [
        (f"/dev/simulated/by-id/{each}", f"/dev/simulated/{each}", "rw") for each in (a, b)
    ]
    assert [(each.host_path, each.container_path, each.read_only) for each in first.mounts] == [
        ("/dev/hugepages-1G", "/dev/hugepages-1G", False)
    ]
    assert [each.name for each in first.cdi_devices] == [f"berth.dev/simulated={each}" for each in (a, b)]
    assert dict(first.annotations) == {"berth.dev/simulated": "true"}
    assert dict(second.envs) == {"SIMULATED_DEVICES": c}
    assert dict(nothing.envs) == {"SIMULATED_DEVICES": ""}
    again = await kubelet.allocate([a, b], [c], [])  # an init container's devices go to its app
    assert again == answer


@pytest.mark.parametrize(
    ("fault", "ids", "code", "sentence"),
    [
        (None, ["nobody"], grpc.StatusCode.NOT_FOUND, f"nobody is no device of {N150} on this node."),
        (None, [simulated(2)[1].id], grpc.StatusCode.FAILED_PRECONDITION, "unhealthy: Hot."),
        (Refused("A container asks for one seat."), [simulated(1)[0].id], grpc.StatusCode.FAILED_PRECONDITION, "seat"),
        (OSError("disk full"), [simulated(1)[0].id], grpc.StatusCode.INTERNAL, "disk full"),
        (Refused("long " * 10_000), [simulated(1)[0].id], grpc.StatusCode.FAILED_PRECONDITION, "long"),
    ],
)
async def test_what_cannot_be_had_is_refused_with_a_sentence(
    devices: SimulatedDevices,
    kubelet: Kubelet,
    fault: Exception | None,
    ids: list[str],
    code: grpc.StatusCode,
    sentence: str,
) -> None:
    devices.sicken(simulated(2)[1].id)
    devices.fault = fault
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await kubelet.allocate(ids)
    assert caught.value.code() == code and sentence in (caught.value.details() or "")
    assert len(caught.value.details() or "") <= 1024
    devices.fault = None
    assert (await kubelet.allocate([simulated(1)[0].id])).container_responses


async def test_what_makes_no_message_is_an_error_and_no_hang(
    devices: SimulatedDevices, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "allocate", lambda *_: Injection(env={"A": 1}))  # type: ignore[dict-item]
    with pytest.raises(grpc.aio.AioRpcError, match="by an error of berth's") as caught:
        await kubelet.allocate([f"device-{number}" for number in range(100)])
    assert "device-4 and 95 more" in (caught.value.details() or "")


async def test_which_are_preferred(kubelet: Kubelet) -> None:
    assert await kubelet.prefer(["c", "b", "a"], ["c"], 2) == ["c", "a"]


async def test_a_choice_that_fails_is_left_to_the_kubelet(devices: SimulatedDevices, kubelet: Kubelet) -> None:
    devices.fault = ZeroDivisionError("no links")
    assert await kubelet.prefer(["a", "b"], [], 1) == []


async def test_a_choice_that_hangs_is_left_to_the_kubelet(devices: SimulatedDevices, kubelet: Kubelet) -> None:
    devices.held = threading.Event()
    try:
        for _ in range(3):
            began = time.monotonic()
            assert await kubelet.prefer(["a", "b"], [], 1) == []
            assert time.monotonic() - began < 5  # 0.8 s; the machine may be slow
        assert sum(thread.name == "preferred" for thread in threading.enumerate()) == 1
        assert (await kubelet.allocate([simulated(1)[0].id])).container_responses
    finally:
        devices.held.set()
    devices.held = None
    await until(lambda: not any(thread.name == "preferred" for thread in threading.enumerate()))
    assert await kubelet.prefer(["a", "b"], [], 1) == ["a"]


async def test_choices_at_once_wait_for_each_other(kubelet: Kubelet) -> None:
    assert await asyncio.gather(*(kubelet.prefer(["b", "a"], [], 1) for _ in range(20))) == [["a"]] * 20


async def test_as_many_free_devices_as_a_kubelet_can_name(kubelet: Kubelet) -> None:
    ids = [f"{number:051d}" for number in range(90_000)]  # 4.8 MB, more than gRPC takes if nobody says so
    assert await kubelet.prefer(ids, [], 2) == ids[:2]


async def test_a_container_may_start_or_may_not(devices: SimulatedDevices, kubelet: Kubelet) -> None:
    await kubelet.before_start("tt-0000000000000000")
    devices.fault = Refused("tt-0000000000000000 is held by another container.")
    with pytest.raises(grpc.aio.AioRpcError, match="held by another") as caught:
        await kubelet.before_start("tt-0000000000000000")
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    devices.fault = OSError("no such ioctl")
    with pytest.raises(grpc.aio.AioRpcError, match="no such ioctl") as caught:
        await kubelet.before_start("tt-0000000000000000")
    assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_a_reset_that_hangs_ends_the_call_and_holds_up_nothing(
    devices: SimulatedDevices, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEFORE_START_SECONDS", 0.3)
    devices.held = threading.Event()
    try:
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be made ready") as caught:
            await kubelet.before_start("a")
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await kubelet.allocate([simulated(1)[0].id])).container_responses
    finally:
        devices.held.set()


async def test_a_call_under_way_is_answered_when_the_server_ends(devices: SimulatedDevices, tmp_path: Path) -> None:
    plugin = DevicePlugin(N150, devices)
    server = await serve(tmp_path / "q.sock", [plugin.service()])
    kubelet = Kubelet(tmp_path / "q.sock")
    await kubelet.watch().read()
    devices.held = threading.Event()
    under_way = asyncio.ensure_future(kubelet.before_start("a"))
    await until(lambda: any(thread.name.startswith("before_start") for thread in threading.enumerate()))
    plugin.close()
    ending = asyncio.ensure_future(server.stop(grace=10))
    await until(lambda: plugin.streams == 0)
    assert not under_way.done()
    devices.held.set()
    await under_way
    await ending
    await kubelet.channel.close()
