"""A node that is told to prepare caches: an API server and a registry in this process, or a real registry; signatures,
the child that checks them, the child that extracts, ledger and store are real.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from temporalio.testing import ActivityEnvironment

from crds.settings import SETTINGS_KEY, SETTINGS_NAME, SETTINGS_NAMESPACE
from images.build import Said, build, read
from images.credentials import Credentials
from images.descriptor import OCI_CONFIG, OCI_INDEX, OCI_MANIFEST, Descriptor
from images.endpoints import Settings
from images.folder import Folder
from images.layout import read_manifest
from images.reference import Reference
from images.registry import Registry
from images.signatures.signing import PrivateKey, referring, sign
from kube.client import KubeClient
from kube.resources import (
    CONFIGMAPS,
    KERNELCACHEPOLICIES,
    NODES,
    TRITONKERNELCACHENODESTATUSES,
    TRITONKERNELCACHES,
)
from nodeworkers.caches.obtaining import Images
from nodeworkers.caches.preparing import Caches
from nodeworkers.caches.pulling import Incoming
from nodeworkers.caches.reporting import Statuses
from nodeworkers.caches.rules import Rules
from nodeworkers.ledger import Ledger, Mount
from nodeworkers.store import Store
from planning.caches import labels
from planning.caches.compatibility import GPU
from planning.caches.node_status import status_name
from planning.caches.orders import CacheRef, NodeOrder, NodeTask, Report
from planning.caches.volumes import NodeCache
from tests.images import hostile
from tests.images.signatures.rig import new_key, public_pem
from tests.kube.fake_api import FakeApi

NODE = "node-1"
H100 = GPU("GPU-1", "NVIDIA H100", "cuda", "90", 32, "580.10")
MI300X = GPU("GPU-2", "AMD MI300X", "hip", "gfx942", 64, "6.14")
QUOTA = 2**30
CREATED = "2026-11-22T12:00:00Z"


@dataclass
class Found:
    """Hardware that is what a test says."""

    gpus: tuple[GPU, ...] | None = (H100,)
    problem: str = ""
    simulated: bool = False


@dataclass(kw_only=True)
class Publisher:
    """Whoever makes caches: pushes images to `host`, as `settings` reach it, and signs them with `key`."""

    settings: Settings
    host: str
    key: PrivateKey = field(default_factory=new_key)
    credentials: Credentials = field(default_factory=Credentials)

    def open(self) -> Registry:
        return Registry(self.settings, self.credentials)

    @property
    def image(self) -> str:
        return f"{self.host}/team/cache"

    def reference(self, digest: str = "") -> Reference:
        return Reference.parse(f"{self.image}@{digest}" if digest else self.image)

    async def push(self, folder: Path, *, index: bool = False, signed: PrivateKey | None = None) -> str:
        """Packs a cache's folder, pushes and signs it; its digest."""
        out = folder.with_name(f"{folder.name}-image")
        top = build(read(folder, Said()), out, tag=None, index=index).top
        layout = Folder(out)
        async with self.open() as registry:
            body = layout.blob(top.digest).read_bytes()
            digests = [each["digest"] for each in json.loads(body)["manifests"]] if index else [top.digest]
            for digest in digests:
                await self._push_image(registry, layout, digest)
            if index:
                await registry.push_manifest(self.reference(top.digest), body, OCI_INDEX)
        await self.sign(top.digest, len(body), OCI_INDEX if index else OCI_MANIFEST, signed or self.key)
        return top.digest

    async def _push_image(self, registry: Registry, layout: Folder, digest: str) -> None:
        body = layout.blob(digest).read_bytes()
        manifest = read_manifest(body)
        for each in (manifest.config, *manifest.layers):
            await registry.push_blob(
                self.reference(), Descriptor(each.media_type, each.digest, each.size), layout.blob(each.digest)
            )
        await registry.push_manifest(self.reference(digest), body, OCI_MANIFEST)

    async def push_raw(self, config: bytes, *layers: bytes) -> str:
        """An image of any content, signed."""
        image = hostile.Image(config, layers)
        async with self.open() as registry:
            for blob in (config, *layers):
                await registry.push_blob(self.reference(), hostile.descriptor(blob), blob)
            digest = (await registry.push_manifest(self.reference(), image.manifest, OCI_MANIFEST)).digest
        await self.sign(digest, len(image.manifest), OCI_MANIFEST, self.key)
        return digest

    async def relabelled(self, digest: str, *targets: Mapping[str, Any]) -> str:
        """The same layers under labels that name other targets, signed."""
        async with self.open() as registry:
            manifest = await registry.manifest(self.reference(digest))
            config = json.loads(await registry.small(self.reference(), manifest.config()))
            config["config"]["Labels"][labels.summary("triton")] = json.dumps({"targets": targets})
            body = json.dumps(config).encode()
            document = {**manifest.document, "config": hostile.descriptor(body, OCI_CONFIG).as_json()}
            await registry.push_blob(self.reference(), hostile.descriptor(body), body)
            made = json.dumps(document).encode()
            found = await registry.push_manifest(self.reference(hostile.sha256(made)), made, OCI_MANIFEST)
        await self.sign(found.digest, len(made), OCI_MANIFEST, self.key)
        return found.digest

    async def sign(self, digest: str, size: int, media_type: str, key: PrivateKey) -> None:
        made = referring(sign(digest, key), media_type, digest, size, CREATED)
        async with self.open() as registry:
            for blob in made.blobs.values():
                await registry.push_blob(self.reference(), hostile.descriptor(blob), blob)
            manifest = self.reference(hostile.sha256(made.manifest))
            await registry.push_manifest(manifest, made.manifest, OCI_MANIFEST)


@dataclass(kw_only=True)
class Rig(Publisher):
    """`async with node(...)`."""

    api: FakeApi
    kube: KubeClient
    ledger: Ledger
    store: Store
    folder: Path
    hardware: Found
    caches: Caches
    statuses: Statuses
    beats: list[str] = field(default_factory=list)

    # ---- what there is

    def settle(self, **settings: Any) -> None:
        """Writes berth-settings."""
        raw = {"registries": {"insecure": [self.host]}, **settings}
        self.api.put(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE, data={SETTINGS_KEY: json.dumps(raw)})

    def trust(self, key: PrivateKey | None = None, **spec: Any) -> None:
        """Writes the policy, which names one key."""
        signer = {"name": "release", "key": public_pem(key or self.key)}
        self.api.put(KERNELCACHEPOLICIES, "team", spec={"images": ["**"], "signers": [signer], **spec})

    def cache(self, name: str = "llama", **spec: Any) -> CacheRef:
        """Writes a cache; fields of its ociImage too."""
        image = {"image": f"{self.image}:v1", **spec.pop("image", {})}
        raw = self.api.put(TRITONKERNELCACHES, name, "team-a", spec={"ociImage": image, **spec})
        return CacheRef("TritonKernelCache", "team-a", name, raw["metadata"]["uid"])

    # ---- what happens

    async def prepare(
        self, ref: CacheRef, digest: str, epoch: int = 1, env: ActivityEnvironment | None = None
    ) -> Report:
        order = NodeOrder(epoch, "prepare", self.image, digest, 1)
        return await (env or self.env()).run(self.caches.prepare, NodeTask(ref, NODE, order))

    async def remove(
        self, ref: CacheRef, epoch: int = 2, pods: int = -1, env: ActivityEnvironment | None = None
    ) -> Report:
        return await (env or self.env()).run(self.caches.remove, NodeTask(ref, NODE, NodeOrder(epoch, "remove"), pods))

    def env(self) -> ActivityEnvironment:
        made = ActivityEnvironment()
        made.on_heartbeat = lambda *said: self.beats.append(str(said[0]))
        return made

    # ---- what came of it

    def row(self, ref: CacheRef) -> NodeCache:
        found = self.ledger.cache(ref.uid)
        assert found is not None
        return found

    def told(self, ref: CacheRef) -> dict[str, Any]:
        """The status as the API server has it."""
        found: dict[str, Any] = self.api.objects(TRITONKERNELCACHENODESTATUSES)["team-a", status_name(ref.name, NODE)]
        return found

    def conditions(self, ref: CacheRef) -> dict[str, tuple[str, str, str]]:
        return {
            each["type"]: (each["status"], each["reason"], each["message"])
            for each in self.told(ref)["status"]["conditions"]
        }

    def mount(self, ref: CacheRef, pod: str = "pod-1") -> Mount:
        """As the CSI driver records it."""
        row = self.row(ref)
        mount = Mount(
            volume_id=f"csi-{pod}", target_path=f"/k/{pod}", pod_uid=pod, pod_namespace="team-a",
            pod_name=f"name-{pod}", cache_uid=ref.uid, cache_kind=ref.kind, cache_name=ref.name, digest=row.digest,
            mount_path="/cache", size_bytes=row.size_bytes, upper="", size_cap=0, published_at=1.0,
        )  # fmt: skip
        self.ledger.put_mount(mount)
        return mount

    def arrived(self) -> int:
        """Bytes that were fetched and not extracted yet."""
        return sum(path.stat().st_size for path in (self.folder / "incoming").rglob("*") if path.is_file())

    def clean(self) -> bool:
        """Nothing is left of what was fetched or half extracted."""
        return not [*(self.folder / "incoming").iterdir(), *(self.store.root / "staging").iterdir()]


@asynccontextmanager
async def node(folder: Path, settings: Settings, host: str, *, quota: int = QUOTA) -> AsyncIterator[Rig]:
    """A node whose registry is `host`, as `settings` reach it."""
    ledger, store, hardware = Ledger(folder), Store(folder / "store", quota), Found()
    incoming = Incoming(folder / "incoming")

    def opened(found: Settings, credentials: Credentials) -> Registry:
        return Registry(replace(found, timeouts=settings.timeouts), credentials)

    async with FakeApi() as api, await api.client(user_agent="berth-node") as kube:
        api.put(NODES, NODE)
        statuses = Statuses(kube, ledger, NODE)
        images = Images(ledger, store, incoming, hardware)
        caches = Caches(NODE, Rules(kube), ledger, store, images, hardware, statuses, opened)
        rig = Rig(
            settings=settings, host=host, api=api, kube=kube, ledger=ledger, store=store, folder=folder,
            hardware=hardware, caches=caches, statuses=statuses,
        )  # fmt: skip
        rig.settle()
        rig.trust()
        yield rig
    ledger.close()
