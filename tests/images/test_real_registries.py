"""Against real registries, with the referrers API and without, and beside oras, another client of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import oras.provider
import pytest

from images.credentials import Credentials
from images.descriptor import OCI_CONFIG, OCI_INDEX, OCI_MANIFEST
from images.endpoints import Settings
from images.errors import RegistryError
from images.oci_folder import pull, push
from images.reference import Reference
from images.registry import Registry
from stack.pki import Authority
from tests.images.conftest import RealRegistry, running
from tests.images.hostile import Image, an_image, descriptor

pytestmark = pytest.mark.stack


async def pushed(registry: Registry, reference: Reference, image: Image) -> Reference:
    """Under the tag, or the digest where there is no tag; at its digest."""
    await registry.push_blob(reference, descriptor(image.config, OCI_CONFIG), image.config)
    for layer in image.layers:
        await registry.push_blob(reference, descriptor(layer), layer)
    found = await registry.push_manifest(reference, image.manifest, OCI_MANIFEST)
    return reference.at(found.digest)


async def test_there_and_back(real_registry: RealRegistry, tmp_path: Path) -> None:
    image = an_image(20_000_000)
    async with Registry(real_registry.settings) as registry:
        reference = await pushed(registry, real_registry.reference("a/deep/name:v1"), image)
        assert reference.digest == image.descriptor.digest
        assert (await registry.resolve(reference.tagged("v1"))) == image.descriptor
        manifest = await registry.manifest(reference)
        (layer,) = manifest.layers()
        (tmp_path / "layer.part").write_bytes(image.layers[0][:7_654_321])
        await registry.blob(reference, layer, tmp_path / "layer")
        assert (tmp_path / "layer").read_bytes() == image.layers[0]
        for missing in (reference.tagged("v9"), real_registry.reference("no/such:v1")):
            with pytest.raises(RegistryError) as caught:
                await registry.resolve(missing)
            assert caught.value.kind == "not_found"


async def test_signatures_are_found_in_both_kinds(real_registry: RealRegistry) -> None:
    async with Registry(real_registry.settings) as registry:
        reference = await pushed(registry, real_registry.reference("signed:v1"), an_image(1000))
        assert await registry.referrers(reference) == ()
        first = Image(b"{}", (b"1",), (await registry.manifest(reference)).descriptor, "application/x.signature")
        second = Image(b"{}", (b"2",), first.subject, "application/x.signature")
        for each in (first, second):
            own = Reference(reference.registry, reference.repository, digest=each.descriptor.digest)
            await pushed(registry, own, each)
        found = await registry.referrers(reference)
        assert {each.digest for each in found} == {first.descriptor.digest, second.descriptor.digest}


async def test_a_registry_that_is_killed_midway_and_comes_back(registry_program: Path, tmp_path: Path) -> None:
    """Its port is the same, its manifests are gone, its blobs are there: the download goes on where it was."""
    (tmp_path / "blobs").mkdir()
    image = an_image(30_000_000)
    with running(registry_program, blobs=tmp_path / "blobs") as first:
        async with Registry(first.settings) as registry:
            reference = await pushed(registry, first.reference("killed:v1"), image)

            def kill(count: int) -> None:
                first.process.kill()

            with pytest.raises(RegistryError) as caught:
                await registry.blob(reference, descriptor(image.layers[0]), tmp_path / "layer", kill)
            assert caught.value.kind == "away"
            kept = (tmp_path / "layer.part").stat().st_size
            assert 0 < kept < 30_000_000
            with running(registry_program, blobs=tmp_path / "blobs", address=first.host):
                told: list[int] = []
                await registry.blob(reference, descriptor(image.layers[0]), tmp_path / "layer", told.append)
    assert told[0] > kept and (tmp_path / "layer").read_bytes() == image.layers[0]


async def test_a_password_and_a_private_authority(registry_program: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "registries")
    pair = authority.server("registry", ["127.0.0.1"])
    with running(registry_program, password="hunter2", tls=pair) as real:
        settings = Settings(authorities=authority.pair.cert.read_text())
        known = json.dumps({"auths": {f"https://{real.host}/v2/": {"username": "someone", "password": "hunter2"}}})
        reference = real.reference("private:v1")
        async with Registry(settings, Credentials.parse(known.encode())) as registry:
            await pushed(registry, reference, an_image(5_000_000))
            assert (await registry.resolve(reference)).media_type == OCI_MANIFEST
        wrong = known.replace("hunter2", "hunter3").encode()
        for credentials in (Credentials(), Credentials.parse(wrong)):
            async with Registry(settings, credentials) as registry:
                with pytest.raises(RegistryError) as caught:
                    await registry.resolve(reference)
                assert caught.value.kind == "unauthorized" and "hunter" not in str(caught.value)


async def test_images_travel_with_their_index(real_registry: RealRegistry, tmp_path: Path) -> None:
    """One image for each GPU target: folder, registry, folder, another registry, and the digest stays."""
    images = [an_image(200_000, seed) for seed in (b"sm_80", b"gfx90a")]
    async with Registry(real_registry.settings) as registry:
        reference = real_registry.reference("multi:v1")
        for image in images:
            own = Reference(reference.registry, reference.repository, digest=image.descriptor.digest)
            await pushed(registry, own, image)
        entries = [image.descriptor.as_json() for image in images]
        index = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()
        top = await registry.push_manifest(reference, index, OCI_INDEX)
        assert await pull(registry, reference, tmp_path / "folder") == top
        assert await pull(registry, reference, tmp_path / "folder") == top, "once more, with all of it there"
        assert await push(registry, tmp_path / "folder", real_registry.reference("copy:v2")) == top
        assert await registry.resolve(real_registry.reference("copy:v2")) == top


async def test_what_oras_pushed_is_read_and_the_other_way_round(
    real_registry: RealRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # it reads docker's configuration there
    monkeypatch.chdir(tmp_path)
    peer = oras.provider.Registry(hostname=real_registry.host, insecure=True)
    (tmp_path / "kernels.bin").write_bytes(b"kernels" * 1000)
    name = f"{real_registry.host}/oras:v1"
    peer.push(target=name, files=["kernels.bin"], quiet=True)
    async with Registry(real_registry.settings) as registry:
        reference = Reference.parse(name)
        manifest = await registry.manifest(reference)
        await registry.blob(reference, manifest.layers()[0], tmp_path / "layer")
        assert (tmp_path / "layer").read_bytes() == b"kernels" * 1000
        await pull(registry, reference, tmp_path / "folder")
        await push(registry, tmp_path / "folder", reference.tagged("v2"))
    shutil.rmtree(tmp_path / "folder")
    peer.pull(target=f"{real_registry.host}/oras:v2", outdir=str(tmp_path / "pulled"))
    assert (tmp_path / "pulled" / "kernels.bin").read_bytes() == b"kernels" * 1000
