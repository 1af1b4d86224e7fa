"""Pushing: blobs before what names them, byte for byte, not twice, and signatures so that they are found."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from images.descriptor import OCI_INDEX, OCI_MANIFEST
from images.errors import RegistryError
from images.registry import Registry
from tests.images import hostile
from tests.images.hostile import Image, an_image, answering, descriptor, sha256

IMAGE = an_image()
BLOB = IMAGE.layers[0]
LAYER = descriptor(BLOB)


@pytest.mark.parametrize("as_file", [True, False])
async def test_a_blob_is_sent_once(registry: Registry, server: hostile.Registry, tmp_path: Path, as_file: bool) -> None:
    (tmp_path / "layer").write_bytes(BLOB)
    source = tmp_path / "layer" if as_file else BLOB
    assert await registry.push_blob(server.reference(), LAYER, source)
    assert server.blobs == {LAYER.digest: BLOB}
    assert not await registry.push_blob(server.reference(), LAYER, source)
    assert [method for method, _, _ in server.requests] == ["HEAD", "POST", "PUT", "HEAD"]
    sent_to = server.requests[2][1].replace("%3A", ":")
    assert sent_to == f"/v2/team/cache/uploads/1?state=a%2Fb&digest={LAYER.digest}", "a signed address is kept as it is"


async def test_an_upload_that_breaks_is_begun_anew(registry: Registry, server: hostile.Registry) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    server.trick("/uploads/1", cut, times=2)
    assert await registry.push_blob(server.reference(), LAYER, BLOB)
    assert server.blobs == {LAYER.digest: BLOB}


@pytest.mark.parametrize(
    ("path", "handler", "kind", "told"),
    [
        ("/blobs/uploads", answering(202), "malformed", "does not say where to send it"),
        ("/blobs/uploads", answering(202, Location="http://elsewhere.example/"), "lied", "plain http"),
        ("/blobs/uploads", answering(404), "not_found", "no such repository, and makes none"),
        ("/blobs/uploads", answering(403), "unauthorized", "refuses it"),
        ("/uploads/1", answering(413), "too_large", "finds it too large"),
        ("/uploads/1", answering(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}'), "malformed", "DIGEST_INVALID"),
        ("/uploads/1", answering(503, Retry_After="9"), "away", "cannot now"),
    ],
)
async def test_uploads_that_fail(
    registry: Registry, server: hostile.Registry, path: str, handler: hostile.Handler, kind: str, told: str
) -> None:
    server.trick(path, handler)
    with pytest.raises(RegistryError) as caught:
        await registry.push_blob(server.reference(), LAYER, BLOB)
    assert (caught.value.kind, told in str(caught.value)) == (kind, True), str(caught.value)


async def test_an_upload_elsewhere_does_not_get_the_password(server: hostile.Registry) -> None:
    from dataclasses import replace

    from tests.images.test_authorization import TokenService, credentials

    async with hostile.Registry() as storage:
        service = TokenService(server)
        storage.trick("/bucket", answering(201))
        location = answering(202, Location=f"{storage.url}/bucket?signature=a%2Fb")

        async def start(request: web.Request) -> web.StreamResponse:
            allowed = "Authorization" in request.headers
            return await (location(request) if allowed else service.guard(request))

        server.tricks.insert(0, ("/blobs/uploads", start, 99))
        settings = replace(server.settings, insecure=frozenset({server.host, storage.host}))
        async with Registry(settings, credentials(server.host)) as registry:
            await registry.push_blob(server.reference(), LAYER, BLOB)
        ((_, path, headers),) = storage.requests
    assert path.startswith("/bucket?signature=a%2Fb&digest=") and "Authorization" not in headers
    assert service.asked[0][1]["scope"] == "repository:team/cache:pull,push"


async def test_a_manifest_is_pushed_byte_for_byte(registry: Registry, server: hostile.Registry) -> None:
    """Written anew it would have another digest, and no signature would be of it."""
    data = json.dumps(orjson.loads(IMAGE.manifest), indent=3).encode()
    pushed = await registry.push_manifest(server.reference(), data, OCI_MANIFEST)
    assert server.manifests["v1"] == (data, OCI_MANIFEST)
    assert pushed == descriptor(data, OCI_MANIFEST)
    await registry.push_manifest(server.reference(sha256(data)), data, OCI_MANIFEST)
    with pytest.raises(RegistryError, match="Push it under its own digest"):
        await registry.push_manifest(server.reference(sha256(b"other")), data, OCI_MANIFEST)
    server.trick("/manifests/", answering(201, Docker_Content_Digest=sha256(b"other")))
    with pytest.raises(RegistryError, match=r"took sha256:.* and calls it"):
        await registry.push_manifest(server.reference(), data, OCI_MANIFEST)


async def test_what_is_no_manifest_is_not_pushed(registry: Registry, server: hostile.Registry) -> None:
    for data in (b"", b"{}", IMAGE.manifest.replace(b'"layers"', b'"manifests"')):
        with pytest.raises(RegistryError) as caught:
            await registry.push_manifest(server.reference(), data, OCI_MANIFEST)
        assert caught.value.kind == "malformed"
    assert not server.requests


async def test_what_refers_to_an_image_is_found_without_the_api(registry: Registry, server: hostile.Registry) -> None:
    reference = server.has(IMAGE).at(IMAGE.descriptor.digest)
    first = Image(b"{}", (b"1",), IMAGE.descriptor, "application/x.signature")
    second = Image(b"{}", (b"2",), IMAGE.descriptor)
    for each in (first, second, first):
        await registry.push_manifest(reference.tagged("").at(each.descriptor.digest), each.manifest, OCI_MANIFEST)
    found = await registry.referrers(reference)
    assert [(each.digest, each.artifact_type) for each in found] == [
        (second.descriptor.digest, "application/vnd.oci.image.config.v1+json"),
        (first.descriptor.digest, "application/x.signature"),
    ]


async def test_the_fallback_tag_is_left_alone_where_the_registry_noticed(
    registry: Registry, server: hostile.Registry
) -> None:
    server.trick("/manifests/", answering(201, OCI_Subject=IMAGE.descriptor.digest))
    signature = Image(b"{}", (b"1",), IMAGE.descriptor)
    await registry.push_manifest(server.reference(signature.descriptor.digest), signature.manifest, OCI_MANIFEST)
    assert len(server.requests) == 1


async def test_what_others_wrote_into_the_fallback_index_stays(registry: Registry, server: hostile.Registry) -> None:
    reference = server.has(IMAGE)
    theirs = [{"platform": {"os": "odd"}, "digest": "?"}, 7]
    tag = IMAGE.descriptor.digest.replace(":", "-")
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": theirs}
    server.manifests[tag] = (orjson.dumps(index), OCI_INDEX)
    signature = Image(b"{}", (b"1",), IMAGE.descriptor)
    own = reference.tagged("").at(signature.descriptor.digest)
    await registry.push_manifest(own, signature.manifest, OCI_MANIFEST)
    assert orjson.loads(server.manifests[tag][0])["manifests"][:2] == theirs
    server.manifests[tag] = server.manifests["v1"]
    with pytest.raises(RegistryError, match="holds no index"):
        await registry.push_manifest(own, signature.manifest, OCI_MANIFEST)


async def test_an_index_that_cannot_be_read_is_not_written_over(registry: Registry, server: hostile.Registry) -> None:
    """Signatures of others would be gone."""
    reference = server.has(IMAGE)
    signature = Image(b"{}", (b"1",), IMAGE.descriptor)
    server.trick(f"/manifests/{IMAGE.descriptor.digest.replace(':', '-')}", answering(500, Retry_After="9"))
    with pytest.raises(RegistryError) as caught:
        await registry.push_manifest(
            reference.tagged("").at(signature.descriptor.digest), signature.manifest, OCI_MANIFEST
        )
    assert caught.value.kind == "away"
    assert not [method for method, path, _ in server.requests if method == "PUT" and "sha256-" in path]
