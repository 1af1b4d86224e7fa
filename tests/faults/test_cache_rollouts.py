"""SIGKILL of the node's process, controller, worker, Temporal and registry at every step of a kernel cache's rollout.

Each ends Ready with the new digest, and whoever mounts the cache meanwhile finds one image whole. The kubelet is the
test itself: it calls the driver's socket without a pause, and looks at every file. The node's process dies in a world
of its own beside the others', for whoever gave it an order waits long until it asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from berth.cli.application import after_up, application_processes, node_process
from crds.kernelcache import API_VERSION
from images.build import Said, build, read
from images.descriptor import OCI_MANIFEST, Descriptor
from images.endpoints import Settings
from images.oci_folder import push
from images.reference import Reference
from images.registry import Registry
from images.signatures.signing import referring, sign
from kube.client import KubeClient
from kube.resources import CSINODES, KERNELCACHEPOLICIES, NODES, TRITONKERNELCACHES
from nodeworkers.csi import mounts
from nodeworkers.rpc import csi_pb2
from planning.caches.volumes import DRIVER
from stack import SimulatedNode, Stack, UpOptions, kubelet_root, node_manifest
from tests.application.stories import Begun, side_by_side
from tests.faults.test_kills import insist
from tests.images.caches import kernel
from tests.images.conftest import RealRegistry, running
from tests.images.signatures.rig import new_key, public_pem
from tests.nodeworkers.csi_rig import needs_mounts
from tests.nodeworkers.whole import program

pytestmark = [
    *needs_mounts, pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip

NODE = "cache-node"
SIZE = 6 * 1024**2  # of an image: long enough in coming that each step is seen
KEY = new_key()
VICTIMS = {"a-node": ("node",), "what-it-needs": ("controller", "worker", "temporal", "registry")}


class Gate:
    """An address that stays while the registry behind it comes and goes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.behind = ""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            host, _, port = self.behind.rpartition(":")
            with socket.create_connection((host, int(port or 0))) as server:
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@dataclass
class Prober:
    """Mounts the cache again and again, as pods do, and looks at all that lies there."""

    stack: Stack
    images: dict[str, str] = field(default_factory=dict)  # what all files of an image hash to -> its tag
    strange: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        kubelet = kubelet_root(self.stack.layout.root)
        number = 0
        while not self.over.is_set():
            number += 1
            folder = kubelet / "pods" / f"probe-{number}" / "volumes" / "kubernetes.io~csi" / "kernels"
            folder.mkdir(parents=True)
            with grpc.insecure_channel(f"unix:{kubelet}/plugins/{DRIVER}/csi.sock") as channel:
                self._probe(channel, number, folder / "mount")
            shutil.rmtree(kubelet / "pods" / f"probe-{number}", ignore_errors=True)
            self.over.wait(0.1)  # the others need a processor, too

    def _probe(self, channel: grpc.Channel, number: int, target: Path) -> None:
        context = {
            "kernel-name": "llama",
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.name": f"probe-{number}",
            "csi.storage.k8s.io/pod.namespace": "default",
            "csi.storage.k8s.io/pod.uid": f"probe-{number}",
        }
        capability = csi_pb2.VolumeCapability(mount=csi_pb2.VolumeCapability.MountVolume())
        publish = csi_pb2.NodePublishVolumeRequest(
            volume_id=f"csi-{number}", target_path=str(target), volume_context=context, volume_capability=capability
        )
        try:
            _call(channel, "NodePublishVolume", publish)
        except grpc.RpcError as refused:
            self.refused.add(f"{refused.code().name}: {refused.details()}"[:160])
        else:
            tag = self.images.get(_content(target))
            if tag is None:
                self.strange.append(f"probe {number}: {sorted(str(path) for path in target.rglob('*'))[:20]}")
            elif self.seen[-1:] != [tag]:
                self.seen.append(tag)
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(volume_id=f"csi-{number}", target_path=str(target))
        while not self.over.is_set():  # as the kubelet does: until it succeeds
            try:
                _call(channel, "NodeUnpublishVolume", unpublish)
                return
            except grpc.RpcError:
                self.over.wait(0.1)


def _call(channel: grpc.Channel, name: str, request: Any) -> None:
    method: Any = channel.unary_unary(
        f"/csi.v1.Node/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=lambda data: data,
    )
    method(request, timeout=10)


def _content(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != ".berth":
            digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass
class World:
    stack: Stack
    gate: Gate
    prober: Prober
    folder: Path
    pushed: list[tuple[Path, str]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)  # of images, by tag

    def make(self, tag: str) -> None:
        """Builds an image that no other is like."""
        cache = self.folder / f"cache-{tag}"
        place = kernel(cache, seed="add")
        (place / "add.llir").write_bytes(os.urandom(SIZE))
        for number in range(50):
            kernel(cache, seed=f"{tag}-{number}")
        built = build(read(cache, Said()), self.folder / f"image-{tag}", tag=None, index=False)
        self.prober.images[_content(cache)] = tag
        shutil.rmtree(cache)
        self.pushed.append((self.folder / f"image-{tag}", tag))
        self.digests[tag] = built.top.digest

    async def publish(self, host: str) -> None:
        """Has a registry hold all images and their signatures, at its own address."""
        async with Registry(Settings(insecure=frozenset({host}))) as registry:
            for layout, tag in self.pushed:
                named = Reference.parse(f"{host}/team/cache:{tag}")
                top = await push(registry, layout, named)
                made = referring(sign(top.digest, KEY), top.media_type, top.digest, top.size, "2026-11-22T00:00:00Z")
                for digest, blob in made.blobs.items():
                    await registry.push_blob(named, Descriptor("application/octet-stream", digest, len(blob)), blob)
                beside = Reference(named.registry, named.repository)
                await registry.push_manifest(beside, made.manifest, OCI_MANIFEST)

    def cache(self, tag: str) -> dict[str, Any]:
        spec = {"ociImage": {"image": f"{self.gate.host}/team/cache:{tag}"}}
        return {"apiVersion": API_VERSION, "metadata": {"name": "llama"}, "spec": spec}

    def node_root(self) -> Path:
        return self.stack.layout.root / "node" / "berth"


def asked(world: World, digest: str) -> bool:
    """Nothing was done yet."""
    return True


def fetching(world: World, digest: str) -> bool:
    return any((world.node_root() / "incoming" / digest.removeprefix("sha256:")).glob("*"))


def extracting(world: World, digest: str) -> bool:
    return any((world.node_root() / "store" / "staging").iterdir())


def kept(world: World, digest: str) -> bool:
    """Whole on the disk; the ledger may not know yet, nor anybody else."""
    return (world.node_root() / "store" / "caches" / digest.removeprefix("sha256:")).is_dir()


Step = Callable[[World, str], bool]
STEPS: tuple[Step, ...] = (asked, fetching, extracting, kept)


@contextlib.contextmanager
def a_world(folder: Callable[[str], Path], tags: Iterable[str]) -> Iterator[World]:
    """An installation with one node; `folder` makes new folders."""
    gate = Gate()
    stack = Stack(folder("rollouts"))
    options = UpOptions(end_with_caller=True)

    def settle(endpoints: Any) -> None:
        after_up(endpoints, {"registries": {"insecure": [gate.host]}})
        asyncio.run(_node(endpoints.kubeconfig("admin")))
        after_up(endpoints, node=NODE)

    prober = Prober(stack)
    stack.up(
        options,
        processes=lambda endpoints: [
            *application_processes(endpoints, options),
            node_process(endpoints, NODE, "1xH100"),
        ],
        after_up=settle,
    )
    thread = threading.Thread(target=prober.run, daemon=True)
    try:
        world = World(stack, gate, prober, folder("images"))
        for tag in tags:
            world.make(tag)
        thread.start()
        yield world
    finally:
        prober.over.set()
        if thread.is_alive():
            thread.join(30)
        stack.down()
        for point in reversed(mounts.here(below=str(stack.layout.root))):
            mounts.unmount(point.place)


def steps_of(victims: tuple[str, ...]) -> dict[str, tuple[str, Step]]:
    """Every step of each victim, by the tag of the image that is rolled out meanwhile."""
    return {f"{victim}-{step.__name__}": (victim, step) for victim in victims for step in STEPS}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    """All are there before anybody is killed, so that what they cost makes no step pass unseen."""
    with contextlib.ExitStack() as entered:
        yield {
            name: entered.enter_context(a_world(tmp_path_factory.mktemp, ("first", *steps_of(victims))))
            for name, victims in VICTIMS.items()
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def killed(worlds: dict[str, World]) -> AsyncIterator[Begun]:
    stories = {name: rollouts_survive_a_kill_at_each_step(world, VICTIMS[name]) for name, world in worlds.items()}
    async with side_by_side(stories) as begun:
        yield begun


async def _node(kubeconfig: Path) -> None:
    """A node as its kubelet would leave it once berth's driver is registered."""
    async with await KubeClient.connect(kubeconfig) as kube:
        await kube.create(NODES, node_manifest(SimulatedNode(NODE, gpus=1)))
        drivers = [{"name": DRIVER, "nodeID": NODE, "topologyKeys": None}]
        await kube.create(CSINODES, {"metadata": {"name": NODE}, "spec": {"drivers": drivers}})
        signer = {"name": "release", "key": public_pem(KEY)}
        spec = {"images": ["**"], "signers": [signer]}
        await kube.create(KERNELCACHEPOLICIES, {"metadata": {"name": "all"}, "spec": spec})


async def is_ready_with(kube: KubeClient, digest: str) -> bool:
    raw = await insist(kube.get, TRITONKERNELCACHES, "llama", "default")
    status = raw.get("status", {})
    ready: dict[str, Any] = next((each for each in status.get("conditions", []) if each["type"] == "Ready"), {})
    same = status.get("observedGeneration") == raw["metadata"]["generation"]
    return same and ready.get("status") == "True" and status.get("lastKnownGoodDigest") == digest


async def until(seconds: float, what: str, holds: Callable[[], Any], pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while True:
        found = holds()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < deadline, f"after {seconds:.0f} s still not: {what}"
        await asyncio.sleep(pause)


@pytest.mark.parametrize("name", VICTIMS)
async def test_a_rollout_survives_a_kill_at_each_of_its_steps(killed: Begun, name: str) -> None:
    await killed[name]


async def rollouts_survive_a_kill_at_each_step(world: World, victims: tuple[str, ...]) -> None:
    digests, blobs = world.digests, world.folder / "blobs"
    blobs.mkdir()
    with contextlib.ExitStack() as registries:

        async def serve() -> RealRegistry:
            started = registries.enter_context(running(program("registry-referrers"), blobs=blobs))
            await world.publish(started.host)
            world.gate.behind = started.host
            return started

        registry = await serve()
        async with await KubeClient.connect(world.stack.endpoints.kubeconfig("admin")) as kube:
            await insist(kube.create, TRITONKERNELCACHES, world.cache("first"), "default")
            await until(90, "the first is Ready", partial(is_ready_with, kube, digests["first"]))
            for tag, (victim, step) in steps_of(victims).items():
                change = {"spec": world.cache(tag)["spec"]}
                await insist(kube.merge_patch, TRITONKERNELCACHES, "llama", "default", change)
                await until(30, f"{tag} comes to its step", partial(step, world, digests[tag]), 0.002)
                if victim == "registry":
                    world.gate.behind = ""
                    registry.process.kill()
                    registry.process.wait()
                    registry = await serve()
                else:
                    old = await asyncio.to_thread(world.stack.kill, victim)
                    await asyncio.to_thread(world.stack.wait_restarted, victim, old, 60)
                await until(120, f"{tag} is Ready", partial(is_ready_with, kube, digests[tag]))
    assert world.prober.strange == [], "something that is no whole image was mounted"
    order = [list(digests).index(tag) for tag in world.prober.seen]
    assert order == sorted(order), f"pods got an older image again: {world.prober.seen}"
    assert len(set(order)) > len(digests) // 2, f"the prober saw only {world.prober.seen}"
    assert list((world.node_root() / "store" / "staging").iterdir()) == [], "something half-made is left on the disk"
    assert not any(said.startswith("INTERNAL") for said in world.prober.refused), world.prober.refused
