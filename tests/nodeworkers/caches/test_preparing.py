"""A cache is prepared: verified, checked for the GPUs, extracted, shown; and nothing is done twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from planning.caches.volumes import Admission, VolumeRequest, admit
from tests.images import caches, hostile
from tests.nodeworkers.caches.rig import Rig, node


@pytest.fixture
async def registry() -> AsyncIterator[hostile.Registry]:
    async with hostile.Registry() as made:
        yield made


@pytest.fixture
async def rig(tmp_path: Path, registry: hostile.Registry) -> AsyncIterator[Rig]:
    async with node(tmp_path / "node", registry.settings, registry.host) as made:
        yield made


def kernels(folder: Path) -> Path:
    caches.kernel(folder)
    return folder


async def test_from_a_signed_image_to_a_mount(rig: Rig, registry: hostile.Registry, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    report = await rig.prepare(ref, digest)
    assert (report.outcome, report.reason, report.serves, report.epoch) == ("ready", "Verified", digest, 1)
    row = rig.row(ref)
    assert row.serves == digest == row.digest and row.mount_path == caches.AT and row.signatures
    asked = VolumeRequest("TritonKernelCache", "llama", "", False, "p", "team-a", "server")
    assert isinstance(admit(asked, rig.ledger.caches("llama")), Admission)
    (content,) = rig.store.lower(row.digest, row.mount_path)
    assert list(content.rglob("add.cubin"))
    status = rig.told(ref)["status"]
    assert (status["digest"], status["targetDigest"], status["kernels"]) == (digest, digest, 1)
    assert (status["gpuType"], status["driverVersion"]) == ("NVIDIA H100", "580.10")
    assert {kind: found[:2] for kind, found in rig.conditions(ref).items()} == {
        "Verified": ("True", "Verified"), "Compatible": ("True", "Compatible"),
        "HitPredicted": ("Unknown", "RuntimeNotGiven"), "Ready": ("True", "Ready"),
    }  # fmt: skip
    assert rig.clean() and rig.beats


async def test_again_nothing_is_fetched_but_the_signatures(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    await rig.prepare(ref, digest)
    registry.requests.clear()
    report = await rig.prepare(ref, digest)
    assert report.outcome == "ready"
    fetched = [path for method, path, _ in registry.requests if method == "GET"]
    assert not [path for path in fetched if path.endswith(digest) and "/manifests/" in path]
    layers = [each.digest for each in rig_layers(registry, digest)]
    assert not [path for path in fetched if path.rpartition("/")[2] in layers]
    assert [path for path in fetched if "sha256-" in path], "the signatures are asked for anew"


def rig_layers(registry: hostile.Registry, digest: str) -> list[hostile.Descriptor]:
    from images.descriptor import Manifest

    data, media = registry.manifests[digest]
    return list(Manifest.read(data, digest, media).layers())
