"""What is asked of the kubelet about devices, and what becomes of the ways in which it does not answer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from nodeworkers.device_plugin import podresources as module
from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.devices.holdings import Claimed, Holding, PodResourcesError
from nodeworkers.rpc import podresources_pb2 as messages
from nodeworkers.sockets import handler


class SimulatedLister:
    """Answers with `answer`, after so many refusals of its limiter; `code` and `details` are an error instead."""

    def __init__(self, answer: Any = None, limited: int = 0) -> None:
        self.answer = answer
        self.limited = limited
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.calls = 0

    async def List(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.limited:
            self.limited -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        if self.error:
            await context.abort(*self.error)
        return self.answer

    GetAllocatableResources = List


async def serve(path: Path, lister: SimulatedLister) -> grpc.aio.Server:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler(messages.DESCRIPTOR.services_by_name["PodResourcesLister"], lister)])
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


def pods(count: int, devices: int) -> messages.ListPodResourcesResponse:
    return messages.ListPodResourcesResponse(
        pod_resources=[
            messages.PodResources(
                name=f"pod-{number}",
                namespace="default",
                containers=[
                    messages.ContainerResources(
                        name="main",
                        devices=[
                            messages.ContainerDevices(
                                resource_name="nvidia.com/gpu",
                                device_ids=[f"GPU-{number:030d}-{each:020d}" for each in range(devices)],
                            )
                        ],
                    ),
                    messages.ContainerResources(name="side"),
                ],
            )
            for number in range(count)
        ]
    )


async def test_who_has_which_device(tmp_path: Path) -> None:
    server = await serve(tmp_path / "k.sock", SimulatedLister(pods(2, 1)))
    told = await PodResources(tmp_path / "k.sock").list()
    assert told == (
        Holding("default", "pod-0", "main", "nvidia.com/gpu", f"GPU-{0:030d}-{0:020d}"),
        Holding("default", "pod-1", "main", "nvidia.com/gpu", f"GPU-{1:030d}-{0:020d}"),
    )
    await server.stop(grace=None)


def listed(*names: str) -> messages.ListPodResourcesResponse:
    return messages.ListPodResourcesResponse(pod_resources=[messages.PodResources(name=name) for name in names])


@pytest.mark.parametrize(
    ("names", "knows"),
    [((), False), (("etcd-node-1",), False), (("etcd-node-1", "proxy-x7f2a"), True), (("proxy-x7f2a",), True)],
)
async def test_a_list_without_a_pod_of_the_api_servers_does_not_say_that_it_knows_them(
    tmp_path: Path, names: tuple[str, ...], knows: bool
) -> None:
    server = await serve(tmp_path / "k.sock", SimulatedLister(listed(*names)))
    assert (await PodResources(tmp_path / "k.sock", "node-1").pods()).knows is knows
    await server.stop(grace=None)


async def test_who_has_which_device_of_a_claim(tmp_path: Path) -> None:
    def resource(name: str, *cdi: str, driver: str = "devices.kyb.ai", pool: str = "node-1") -> messages.ClaimResource:
        names = [messages.CDIDevice(name=each) for each in cdi]
        return messages.ClaimResource(cdi_devices=names, driver_name=driver, pool_name=pool, device_name=name)

    claims = [
        messages.DynamicResource(
            claim_name="a",
            claim_resources=[
                resource("other", "gpu.example.com/claim=x-0", driver="gpu.example.com"),
                resource("tt-1", "berth.dev/tenstorrent=tt-1", "devices.kyb.ai/claim=0af3-77-0"),
                resource("tt-2"),
                resource("tt-9", pool="node-9"),
            ],
        ),
        messages.DynamicResource(claim_name="b", claim_resources=[resource("tt-3", "berth.dev/tenstorrent=tt-3")]),
    ]
    container = messages.ContainerResources(name="main", dynamic_resources=claims)
    pod = messages.PodResources(name="trainer", namespace="team-a", containers=[container])
    server = await serve(tmp_path / "k.sock", SimulatedLister(messages.ListPodResourcesResponse(pod_resources=[pod])))
    assert (await PodResources(tmp_path / "k.sock", "node-1").pods()).claimed == (
        Claimed("team-a", "trainer", "main", "tt-1", "0af3-77"),
        Claimed("team-a", "trainer", "main", "tt-2", "0af3-77"),
        Claimed("team-a", "trainer", "main", "tt-3", ""),
    )
    await server.stop(grace=None)


async def test_what_is_allocatable(tmp_path: Path) -> None:
    answer = messages.AllocatableResourcesResponse(
        devices=[
            messages.ContainerDevices(resource_name="a/b", device_ids=["1"]),
            messages.ContainerDevices(resource_name="a/b", device_ids=["2", "3"]),
            messages.ContainerDevices(resource_name="c/d", device_ids=["4"]),
        ]
    )
    server = await serve(tmp_path / "k.sock", SimulatedLister(answer))
    assert await PodResources(tmp_path / "k.sock").allocatable() == {"a/b": {"1", "2", "3"}, "c/d": {"4"}}
    await server.stop(grace=None)


async def test_a_full_node_tells_more_than_grpc_takes_if_nobody_says_so(tmp_path: Path) -> None:
    answer = pods(1000, 100)
    assert 4 * 1024 * 1024 < answer.ByteSize() < 16 * 1024 * 1024
    server = await serve(tmp_path / "k.sock", SimulatedLister(answer))
    assert len(await PodResources(tmp_path / "k.sock").list()) == 100_000
    await server.stop(grace=None)


async def test_a_kubelet_that_is_asked_too_much_is_asked_again(tmp_path: Path) -> None:
    lister = SimulatedLister(pods(1, 1), limited=3)
    server = await serve(tmp_path / "k.sock", lister)
    assert len(await PodResources(tmp_path / "k.sock").list()) == 1
    assert lister.calls == 4
    await server.stop(grace=None)


async def test_one_that_is_always_asked_too_much_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    lister = SimulatedLister(limited=1_000_000)
    server = await serve(tmp_path / "k.sock", lister)
    with pytest.raises(PodResourcesError, match=r"rejected by rate limit \(RESOURCE_EXHAUSTED\)"):
        await PodResources(tmp_path / "k.sock").list()
    assert 1 < lister.calls < 20
    await server.stop(grace=None)


async def test_an_answer_that_is_too_long_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MESSAGE_LIMIT", 1024)
    lister = SimulatedLister(pods(100, 10))
    server = await serve(tmp_path / "k.sock", lister)
    with pytest.raises(PodResourcesError, match="larger than max"):
        await PodResources(tmp_path / "k.sock").list()
    assert lister.calls == 1
    await server.stop(grace=None)


async def test_one_that_is_away_or_too_old_is_told(tmp_path: Path) -> None:
    with pytest.raises(PodResourcesError, match=f"does not answer List on {tmp_path}/k.sock: .*UNAVAILABLE"):
        await PodResources(tmp_path / "k.sock").list()
    lister = SimulatedLister()
    lister.error = (grpc.StatusCode.UNIMPLEMENTED, "unknown method")
    server = await serve(tmp_path / "k.sock", lister)
    with pytest.raises(PodResourcesError, match=r"GetAllocatableResources .*unknown method \(UNIMPLEMENTED\)"):
        await PodResources(tmp_path / "k.sock").allocatable()
    await server.stop(grace=None)


async def test_one_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "k.sock"))
        hung.listen()
        with pytest.raises(PodResourcesError, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"):
            await PodResources(tmp_path / "k.sock").list()
