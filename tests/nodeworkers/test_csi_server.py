"""The CSI server as the kubelet sees it: over its sockets, call by call. Nothing is mounted here, so that it runs
anywhere; `test_volumes.py` mounts.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.csi.driver import Driver, Places
from nodeworkers.csi.volumes import Refused
from nodeworkers.ledger import Ledger, LedgerError, Mount
from nodeworkers.rpc import csi_pb2, pluginregistration_pb2
from nodeworkers.sockets import SocketError, Sockets
from tests.nodeworkers.csi_rig import CACHE, CAPTURED, DIGEST, UPPER_BYTES, Store

SERVICES = {
    **{f"csi.v1.{name}": csi_pb2.DESCRIPTOR.services_by_name[name] for name in ("Identity", "Node", "Controller")},
    "pluginregistration.Registration": pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"],
}
POD = {
    "csi.storage.k8s.io/ephemeral": "true",
    "csi.storage.k8s.io/pod.name": "server",
    "csi.storage.k8s.io/pod.namespace": "team-a",
    "csi.storage.k8s.io/pod.uid": "pod-1",
}


class Client:
    """Calls by name, as `csi.v1.Node/NodeGetInfo`."""

    def __init__(self, path: Path) -> None:
        self.channel = grpc.aio.insecure_channel(f"unix:{path}")

    async def call(self, name: str, request: Message, timeout: float = 20) -> Any:
        service, _, method = name.partition("/")
        answer = GetMessageClass(SERVICES[service].methods_by_name[method].output_type)
        call: Any = self.channel.unary_unary(
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return await call(request, timeout=timeout)

    async def refused(self, name: str, request: Message) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(name, request)
        return f"{caught.value.code().name}: {caught.value.details()}"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "k").mkdir()
    return Places(tmp_path / "k", tmp_path / "berth")


@pytest.fixture
def ledger(places: Places) -> Iterator[Ledger]:
    opened = Ledger(places.folder)
    opened.put_cache(CACHE)
    opened.put_cache(replace(CACHE, uid="0a0a-2", name="pending", state="Pending", reason="extracting"))
    yield opened
    with suppress(OSError):
        opened.close()


def driver_of(places: Places, ledger: Ledger) -> Driver:
    if not (places.folder / "store").exists():
        Store(places.folder / "store")
    store = Store.__new__(Store)
    store.folder = places.folder / "store"
    driver = Driver(places, "node-7", ledger, store, UPPER_BYTES)
    driver.uppers.prepare = lambda: ""  # type: ignore[method-assign]
    driver.uppers.folder.mkdir(exist_ok=True)
    return driver


@asynccontextmanager
async def serving(places: Places, ledger: Ledger) -> AsyncIterator[tuple[Driver, Client]]:
    driver = driver_of(places, ledger)
    await driver.start()
    client = Client(places.endpoint)
    try:
        yield driver, client
    finally:
        await client.channel.close()
        await driver.stop()


def publish(target: str = "", volume_id: str = "csi-1", **changed: Any) -> csi_pb2.NodePublishVolumeRequest:
    capability = csi_pb2.VolumeCapability(
        mount=csi_pb2.VolumeCapability.MountVolume(**changed.pop("mount", {})),
        access_mode=csi_pb2.VolumeCapability.AccessMode(mode=csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER),
    )
    context = {**POD, "kernel-name": "llama", **changed.pop("attributes", {})}
    return csi_pb2.NodePublishVolumeRequest(
        volume_id=volume_id, target_path=target, volume_capability=changed.pop("capability", capability),
        volume_context=context, **changed,
    )  # fmt: skip


def target_in(places: Places) -> str:
    return f"{places.kubelet_root}/pods/pod-1/volumes/kubernetes.io~csi/cache/mount"


async def test_who_is_there_and_what_is_served(places: Places, ledger: Ledger) -> None:
    async with serving(places, ledger) as (_, client):
        info = await client.call("csi.v1.Identity/GetPluginInfo", csi_pb2.GetPluginInfoRequest())
        assert info.name == "csi.tkm.io" and info.vendor_version
        offered = await client.call("csi.v1.Identity/GetPluginCapabilities", csi_pb2.GetPluginCapabilitiesRequest())
        assert list(offered.capabilities) == []
        assert (await client.call("csi.v1.Identity/Probe", csi_pb2.ProbeRequest())).ready.value
        node = await client.call("csi.v1.Node/NodeGetInfo", csi_pb2.NodeGetInfoRequest())
        assert (node.node_id, node.max_volumes_per_node) == ("node-7", 1024)
        can = await client.call("csi.v1.Node/NodeGetCapabilities", csi_pb2.NodeGetCapabilitiesRequest())
        types = csi_pb2.NodeServiceCapability.RPC.Type
        names = {types.Name(each.rpc.type) for each in can.capabilities}
        assert names == {"GET_VOLUME_STATS", "VOLUME_CONDITION", "VOLUME_MOUNT_GROUP"}
        staged = await client.refused("csi.v1.Node/NodeStageVolume", csi_pb2.NodeStageVolumeRequest())
        assert staged.startswith("UNIMPLEMENTED")


async def test_a_probe_fails_when_the_ledger_does(places: Places, ledger: Ledger) -> None:
    async with serving(places, ledger) as (_, client):
        ledger._db.close()
        told = await client.refused("csi.v1.Identity/Probe", csi_pb2.ProbeRequest())
        assert told.startswith("FAILED_PRECONDITION: The ledger ") and "start berth node anew" in told
        refused = await client.refused("csi.v1.Node/NodePublishVolume", publish(target_in(places)))
        assert refused.startswith("UNAVAILABLE: The ledger "), "with a final code nobody would unpublish what is left"


async def test_a_probe_that_waits_for_the_ledger_keeps_nobody_waiting(places: Places, ledger: Ledger) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with ledger.transaction():  # as a writer has it while the disk is slow
            begun.set()
            go_on.wait(5)

    async with serving(places, ledger) as (_, client):
        writing = asyncio.create_task(asyncio.to_thread(write))
        await asyncio.to_thread(begun.wait)
        probe = asyncio.create_task(client.call("csi.v1.Identity/Probe", csi_pb2.ProbeRequest()))
        for _ in range(20):
            await client.call("csi.v1.Identity/GetPluginInfo", csi_pb2.GetPluginInfoRequest())
        assert not probe.done()
        go_on.set()
        await writing
        assert (await probe).ready.value


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"volume_id": ""}, "INVALID_ARGUMENT: the volume id is missing."),
        ({"volume_id": "../../etc"}, "INVALID_ARGUMENT: '../../etc' is no volume id of a kubelet."),
        ({"target": ""}, "INVALID_ARGUMENT: the target path is missing."),
        ({"target": "/etc"}, "INVALID_ARGUMENT: the target path '/etc' is none that the kubelet"),
        ({"capability": None}, "INVALID_ARGUMENT: the volume capability is missing."),
        (
            {"capability": csi_pb2.VolumeCapability(block=csi_pb2.VolumeCapability.BlockVolume())},
            "INVALID_ARGUMENT: a kernel cache is a folder",
        ),
        ({"mount": {"fs_type": "xfs"}}, "INVALID_ARGUMENT: a kernel cache has neither fsType nor mountOptions"),
        ({"mount": {"mount_flags": ["exec"]}}, "INVALID_ARGUMENT: a kernel cache has neither fsType nor mountOptions"),
        ({"mount": {"volume_mount_group": "-1"}}, "INVALID_ARGUMENT: the group '-1' is no number of a group."),
        ({"mount": {"volume_mount_group": "4294967295"}}, "INVALID_ARGUMENT: the group '4294967295' is no number"),
        ({"mount": {"volume_mount_group": "²"}}, "INVALID_ARGUMENT: the group '²' is no number"),
        ({"secrets": {"a": "hunter2"}}, "INVALID_ARGUMENT: nodePublishSecretRef does nothing here"),
        ({"attributes": {"kernel": "x"}}, "INVALID_ARGUMENT: the volume has an attribute 'kernel'"),
        ({"attributes": {"kernel-name": "none"}}, "NOT_FOUND: TritonKernelCache team-a/none is not known on this node"),
        (
            {"attributes": {"kernel-name": "pending"}},
            "FAILED_PRECONDITION: TritonKernelCache team-a/pending is not Ready on this node yet: extracting",
        ),
        ({"attributes": {"csi.storage.k8s.io/pod.uid": "pod-2"}}, "INVALID_ARGUMENT: the volume is said to be of pod"),
    ],
)
async def test_a_refusal_is_a_status_and_a_sentence(
    changed: dict[str, Any], told: str, places: Places, ledger: Ledger
) -> None:
    async with serving(places, ledger) as (_, client):
        request = publish(**{"target": target_in(places), **changed})
        assert (await client.refused("csi.v1.Node/NodePublishVolume", request)).startswith(told)
    assert ledger.mounts() == [] and not list((places.folder / "volumes").iterdir())


async def test_unpublish_of_what_never_was_is_done_and_stats_of_it_are_not_found(
    places: Places, ledger: Ledger
) -> None:
    async with serving(places, ledger) as (_, client):
        target = target_in(places)
        await client.call(
            "csi.v1.Node/NodeUnpublishVolume", csi_pb2.NodeUnpublishVolumeRequest(volume_id="csi-9", target_path=target)
        )
        for volume_id, path in (("", target), ("csi-9", "")):
            gone = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=path)
            assert "INVALID_ARGUMENT" in await client.refused("csi.v1.Node/NodeUnpublishVolume", gone)
            stats = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=path)
            assert "INVALID_ARGUMENT" in await client.refused("csi.v1.Node/NodeGetVolumeStats", stats)
        stats = csi_pb2.NodeGetVolumeStatsRequest(volume_id="csi-9", volume_path=target)
        assert "NOT_FOUND: no volume 'csi-9'" in await client.refused("csi.v1.Node/NodeGetVolumeStats", stats)


def record(places: Places, **changed: Any) -> Mount:
    mount = Mount(
        volume_id="csi-1", target_path=target_in(places), pod_uid="pod-1", pod_namespace="team-a", pod_name="server",
        cache_uid=CACHE.uid, cache_kind="TritonKernelCache", cache_name="llama", digest=DIGEST, mount_path=CAPTURED,
        size_bytes=1000, upper="/upper", size_cap=UPPER_BYTES, published_at=1.0,
    )  # fmt: skip
    return replace(mount, **changed)


@pytest.mark.parametrize(
    ("free", "inodes", "upper", "lacking", "abnormal", "told"),
    [
        (900, 90, "/upper", "", False, f"llama is mounted, {DIGEST}"),
        (40, 90, "/upper", "", True, "the pod's writable layer of 16 MiB is nearly full"),
        (900, 4, "/upper", "", True, "nearly full"),
        (0, 0, "", "", False, "llama is mounted"),
        (900, 90, "/upper", "the store's folder /x is gone", True, "the store's folder /x is gone"),
    ],
)
async def test_stats_tell_use_and_condition(
    free: int,
    inodes: int,
    upper: str,
    lacking: str,
    abnormal: bool,
    told: str,
    places: Places,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = os.statvfs_result((4096, 4096, 1000, free, free, 100, inodes, inodes, 0, 255))
    async with serving(places, ledger) as (driver, client):
        monkeypatch.setattr(driver.volumes, "stats", lambda *_: (record(places, upper=upper), found))
        monkeypatch.setattr(driver.volumes, "lacking", lambda _: lacking)
        stats = csi_pb2.NodeGetVolumeStatsRequest(volume_id="csi-1", volume_path=target_in(places))
        answer = await client.call("csi.v1.Node/NodeGetVolumeStats", stats)
    assert answer.volume_condition.abnormal == abnormal and told in answer.volume_condition.message
    usage = {each.unit: (each.total, each.used, each.available) for each in answer.usage}
    if upper:
        assert usage[1] == (4096_000, 4096 * (1000 - free), 4096 * free) and usage[2] == (100, 100 - inodes, inodes)
    else:
        assert usage == {1: (1000, 1000, 0)}


async def test_calls_for_one_volume_come_one_at_a_time_and_others_meanwhile(
    places: Places, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: dict[str, int] = {}
    most, together = 0, 0
    turn = threading.Lock()

    def act(volume_id: str, *_: object) -> None:
        nonlocal most, together
        with turn:
            busy[volume_id] = busy.get(volume_id, 0) + 1
            most, together = max(most, busy[volume_id]), max(together, sum(busy.values()))
        time.sleep(0.02)
        with turn:
            busy[volume_id] -= 1

    async with serving(places, ledger) as (driver, client):
        monkeypatch.setattr(driver.volumes, "publish", act)
        monkeypatch.setattr(driver.volumes, "unpublish", act)
        calls = []
        for number in range(12):
            volume_id = f"csi-{number % 3}"
            calls.append(client.call("csi.v1.Node/NodePublishVolume", publish("/t", volume_id)))
            gone = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path="/t")
            calls.append(client.call("csi.v1.Node/NodeUnpublishVolume", gone))
        await asyncio.gather(*calls)
        assert (most, together) == (1, 3)
        assert driver.node._turns == {} and driver.node._under_way == set()


async def test_what_was_begun_is_finished_though_the_kubelet_gave_up(
    places: Places, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(*_: object) -> None:
        begun.set()
        go_on.wait(20)
        order.append("published")

    async with serving(places, ledger) as (driver, client):
        monkeypatch.setattr(driver.volumes, "publish", slow)
        monkeypatch.setattr(driver.volumes, "unpublish", lambda *_: order.append("unpublished"))
        waiting = asyncio.create_task(client.call("csi.v1.Node/NodePublishVolume", publish("/t")))
        await asyncio.to_thread(begun.wait, 20)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        gone = csi_pb2.NodeUnpublishVolumeRequest(volume_id="csi-1", target_path="/t")
        after = asyncio.create_task(client.call("csi.v1.Node/NodeUnpublishVolume", gone))
        await until(lambda: driver.node._turns["csi-1"].waiting == 2)
        go_on.set()
        await after
        assert order == ["published", "unpublished"]


async def test_a_defect_is_told_and_ends_nothing(
    places: Places, ledger: Ledger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(places, ledger) as (driver, client):

        def broken(*_: object) -> None:
            raise ZeroDivisionError("x" * 5000)

        monkeypatch.setattr(driver.volumes, "publish", broken)
        told = await client.refused("csi.v1.Node/NodePublishVolume", publish("/t"))
        assert told.startswith("INTERNAL: berth node failed: ZeroDivisionError") and len(told) < 400
        assert "A call for volume csi-1 failed." in caplog.text
        assert (await client.call("csi.v1.Identity/Probe", csi_pb2.ProbeRequest())).ready.value


STRANGE = st.text(max_size=300) | st.sampled_from(["csi-1", "/", "..", "true", "cluster", "llama", "0"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_sent_is_answered_with_a_status_of_ours(data: st.DataObject, tmp_path: Path) -> None:
    async def exchange() -> None:
        places = Places(tmp_path / "k", tmp_path / "berth")
        places.kubelet_root.mkdir(exist_ok=True)
        ledger = Ledger(places.folder)
        ledger.put_cache(CACHE)
        try:
            async with serving(places, ledger) as (_, client):
                for _ in range(4):
                    await one(places, client)
            assert ledger.mounts() == []
        finally:
            ledger.close()

    async def one(places: Places, client: Client) -> None:
        target = data.draw(st.sampled_from([target_in(places), "/etc"]) | STRANGE)
        volume_id = data.draw(STRANGE)
        attributes = data.draw(
            st.dictionaries(st.sampled_from([*POD, "kernel-name", "scope"]) | STRANGE, STRANGE, max_size=5)
        )
        mount = {
            "fs_type": data.draw(st.just("") | STRANGE),
            "mount_flags": data.draw(st.lists(STRANGE, max_size=2)),
            "volume_mount_group": data.draw(st.sampled_from(["", "5"]) | STRANGE),
        }
        requests: list[tuple[str, Message]] = [
            ("NodePublishVolume", publish(target, volume_id, attributes=attributes, mount=mount)),
            ("NodeUnpublishVolume", csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=target)),
            ("NodeGetVolumeStats", csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id, volume_path=target)),
        ]
        for name, request in requests:
            status, told = "OK", ""
            try:
                await client.call(f"csi.v1.Node/{name}", request)
            except grpc.aio.AioRpcError as error:
                status, told = error.code().name, error.details() or ""
            assert status in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION") or (
                status == "OK" and name == "NodeUnpublishVolume"
            ), told
            assert len(told) < 1024

    asyncio.run(exchange())


async def test_bytes_that_are_no_message_are_refused(places: Places, ledger: Ledger) -> None:
    async with serving(places, ledger) as (_, client):
        raw = client.channel.unary_unary(
            "/csi.v1.Node/NodePublishVolume",
            request_serializer=lambda sent: sent,
            response_deserializer=lambda got: got,
        )
        for sent in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"\0" * (5 * 1024 * 1024)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(sent, timeout=20)
            assert caught.value.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (await client.call("csi.v1.Identity/Probe", csi_pb2.ProbeRequest())).ready.value


async def test_the_kubelet_is_told_where_to_call(places: Places, ledger: Ledger) -> None:
    async with serving(places, ledger) as (driver, _):
        kubelet = Client(places.registration)
        info = await kubelet.call("pluginregistration.Registration/GetInfo", pluginregistration_pb2.InfoRequest())
        assert (info.type, info.name, list(info.supported_versions)) == ("CSIPlugin", "csi.tkm.io", ["1.0.0"])
        assert info.endpoint == str(places.endpoint)
        heard: list[tuple[bool | None, str]] = [(driver.registration.registered, driver.registration.error)]
        for registered, error in ((False, "no such driver"), (True, "")):
            status = pluginregistration_pb2.RegistrationStatus(plugin_registered=registered, error=error)
            await kubelet.call("pluginregistration.Registration/NotifyRegistrationStatus", status)
            heard.append((driver.registration.registered, driver.registration.error))
        assert heard == [(None, ""), (False, "no such driver"), (True, "")]
        await kubelet.channel.close()
        for path in (places.endpoint, places.registration):
            assert path.stat().st_mode & 0o777 == 0o600


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_sockets_that_were_taken_away_come_back(
    places: Places, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodeworkers.sockets._WATCH_SECONDS", 0.02)
    places.endpoint.parent.mkdir(parents=True)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(places.endpoint))  # of a process that was killed
    stale.close()
    async with serving(places, ledger) as (driver, _):
        watching = asyncio.create_task(driver.watch())
        places.registration.unlink()
        places.endpoint.unlink()
        await until(lambda: places.registration.exists() and places.endpoint.exists())
        for path, name, request in (
            (places.endpoint, "csi.v1.Identity/Probe", csi_pb2.ProbeRequest()),
            (places.registration, "pluginregistration.Registration/GetInfo", pluginregistration_pb2.InfoRequest()),
        ):
            client = Client(path)
            await client.call(name, request)
            await client.channel.close()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    assert not places.endpoint.exists()


async def test_a_socket_with_too_long_a_name_is_refused_in_words(tmp_path: Path) -> None:
    sockets = Sockets([(tmp_path / ("x" * 120), [])])
    with pytest.raises(SocketError, match="is too long for a socket, which has at most 107 bytes"):
        await sockets.start()


async def test_a_second_process_cannot_serve_the_same_node(places: Places, ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="Another berth node"):
        Ledger(places.folder)


async def test_what_the_kernel_refuses_is_told_and_leaves_nothing(
    places: Places, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any right to mount: the refusal is the kernel's own, and nothing is left on record."""
    async with serving(places, ledger) as (driver, client):
        store = driver.volumes.layers
        assert isinstance(store, Store)
        store.add(DIGEST, {"K/a": b"x"})
        os.makedirs(os.path.dirname(target_in(places)))

        def create(*_: object) -> Path:
            raise PermissionError(1, "Operation not permitted", "/volumes/csi-1")

        monkeypatch.setattr(driver.uppers, "create", create)
        told = await client.refused("csi.v1.Node/NodePublishVolume", publish(target_in(places)))
        assert told == "INTERNAL: llama cannot be mounted: Operation not permitted (/volumes/csi-1)."
        assert ledger.mounts() == [] and not list(places.kubelet_root.glob("pods/*/volumes/*/*/mount"))
        ledger.put_mount(record(places))
        with pytest.raises(Refused, match="is no longer mounted"):
            driver.volumes.stats("csi-1", target_in(places))


async def test_where_the_listener_cannot_be_offered_volumes_are_served(
    places: Places, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Any, *_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)

    monkeypatch.setattr(os, "setxattr", refused)
    async with serving(places, ledger) as (driver, client):
        assert driver.volumes.offered is None
        assert (await client.call("csi.v1.Node/NodeGetInfo", csi_pb2.NodeGetInfoRequest())).node_id == "node-7"
    assert f"{places.folder}/listener cannot be written (Operation not supported). Its disk must take" in caplog.text


async def test_what_pods_report_is_looked_at_while_the_driver_watches(
    places: Places, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, loop = asyncio.Event(), asyncio.get_running_loop()
    async with serving(places, ledger) as (driver, _):
        monkeypatch.setattr(driver.volumes.reports, "look", lambda: loop.call_soon_threadsafe(looked.set))
        watching = asyncio.create_task(driver.watch())
        async with asyncio.timeout(30):
            await looked.wait()
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
