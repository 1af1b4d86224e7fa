"""Manifests and referrers from registries that misbehave: each way is bounded, and told in words."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import re
import ssl
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from images.descriptor import OCI_INDEX, OCI_MANIFEST, Descriptor
from images.endpoints import Settings
from images.errors import RegistryError
from images.reference import Reference
from images.registry import Registry
from planning.caches.limits import MANIFEST_BYTES
from stack.pki import Authority
from tests.images import hostile
from tests.images.hostile import IMPATIENT, an_image, answering, cutting, descriptor, endless, sha256


async def failing(registry: Registry, reference: Reference) -> RegistryError:
    with pytest.raises(RegistryError) as caught:
        await registry.resolve(reference)
    return caught.value


# --- what a registry should do


async def test_a_tag_becomes_a_digest(registry: Registry, server: hostile.Registry) -> None:
    image = an_image(10)
    reference = server.has(image)
    assert await registry.resolve(reference) == image.descriptor
    assert (await registry.manifest(reference.at(image.descriptor.digest))).data == image.manifest
    assert await registry.small(reference, (await registry.manifest(reference)).config()) == image.config


async def test_a_registry_need_not_promise_a_digest(registry: Registry, server: hostile.Registry) -> None:
    image = an_image(10)
    server.trick("/manifests/", answering(200, image.manifest, Content_Type=OCI_MANIFEST))
    assert await registry.resolve(server.reference()) == image.descriptor


async def test_what_is_not_there(registry: Registry, server: hostile.Registry) -> None:
    error = await failing(registry, server.reference("v9"))
    assert error.kind == "not_found"
    assert str(error) == (
        f"{server.host}/team/cache:v9: {server.host} does not have it (status 404, MANIFEST_UNKNOWN). "
        "Check the reference; some registries also say this of what one may not see."
    )


# --- what it does instead


@pytest.mark.parametrize(
    ("handler", "kind", "told"),
    [
        (answering(200, b"x" * (MANIFEST_BYTES + 1)), "too_large", "bytes, where 4194304 are allowed"),
        (endless(), "too_large", "longer than the 4194304 bytes"),
        (answering(200, b"", Content_Type=OCI_MANIFEST), "malformed", "not JSON"),
        (answering(200, b"[]", Content_Type=OCI_MANIFEST), "malformed", "not an object"),
        (answering(200, b"[" * 100_000, Content_Type=OCI_MANIFEST), "malformed", "not JSON"),
        (answering(200, b"<html>", Content_Type="text/html"), "malformed", "not JSON"),
        (answering(200, b"{}", Content_Type=OCI_MANIFEST, Docker_Content_Digest=sha256(b"")), "lied", "promised"),
        (answering(403), "unauthorized", "refuses it (status 403)"),
        (answering(401), "unauthorized", "takes nothing that we can say"),
        (answering(400), "malformed", "does not understand"),
        (answering(302), "malformed", "does not understand"),
        (answering(302, Location="http://[x"), "malformed", "no address"),
        (answering(302, Location="/v2/team/cache/manifests/v1"), "lied", "redirects more than 5 times"),
        (answering(302, Location="http://elsewhere.example/x?signature=y"), "lied", "elsewhere.example, but it is"),
        (answering(302, Location="file:///etc/passwd"), "lied", "not an address of the web"),
        (answering(302, Location="https://169.254.169.254/latest"), "lied", "an address of this machine or its link"),
        (cutting(b"x" * 100, 10), "away", "cut the connection"),
    ],
)  # fmt: skip
async def test_misbehaviour_is_told(
    registry: Registry, server: hostile.Registry, handler: hostile.Handler, kind: str, told: str
) -> None:
    server.trick("/manifests/", handler)
    started = time.monotonic()
    error = await failing(registry, server.reference())
    assert (error.kind, told in str(error)) == (kind, True), str(error)
    assert time.monotonic() - started < 10
    assert len(server.requests) < 10 and len(str(error)) < 500


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_manifest_of_2_gib_is_not_read(registry: Registry, server: hostile.Registry, chunked: bool) -> None:
    server.trick("/manifests/", endless() if chunked else cutting(b"", 0, promised=2**31))
    before = peak()
    assert (await failing(registry, server.reference())).kind == "too_large"
    assert peak() - before < 64 * 1024, "KiB"


def peak() -> int:
    """The most memory this process ever had, in KiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


async def test_a_digest_is_of_what_came(registry: Registry, server: hostile.Registry) -> None:
    image, other = an_image(10), an_image(11)
    server.has(image)
    server.manifests[image.descriptor.digest] = (other.manifest, OCI_MANIFEST)
    error = await failing(registry, server.reference(image.descriptor.digest))
    assert error.kind == "lied" and other.descriptor.digest in str(error)


@pytest.mark.parametrize("prepare", [True, False])
async def test_silence_ends(registry: Registry, server: hostile.Registry, prepare: bool) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if prepare:
            await response.prepare(request)
        await asyncio.sleep(60)
        return response

    server.trick("/manifests/", hang)
    started = time.monotonic()
    error = await failing(registry, server.reference())
    assert error.kind == "away" and "did not answer in time" in str(error)
    assert time.monotonic() - started < 3 * IMPATIENT.answer


async def test_one_byte_at_a_time_ends_too(registry: Registry, server: hostile.Registry) -> None:
    """Never silent for long, and never done."""

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.1)

    server.trick("/manifests/", drip)
    started = time.monotonic()
    assert (await failing(registry, server.reference())).kind == "away"
    assert time.monotonic() - started < 3 * IMPATIENT.answer


async def test_what_does_not_speak_http(registry: Registry) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-registry\r\n")
        writer.close()

    listener = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    host = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with Registry(Settings(insecure=frozenset({host}), timeouts=IMPATIENT)) as plain:
        error = await failing(plain, Reference.parse(f"{host}/a:v1"))
    assert error.kind == "malformed" and "does not speak HTTP" in str(error)
    async with Registry(Settings(timeouts=IMPATIENT)) as secure:
        error = await failing(secure, Reference.parse(f"{host}/a:v1"))
    assert error.kind == "away" and "configure it as insecure" in str(error)
    listener.close()
    await listener.wait_closed()


async def test_nobody_there() -> None:
    async with Registry(Settings(timeouts=IMPATIENT), environment={}) as registry:
        error = await failing(registry, Reference.parse("127.0.0.1:9/a:v1"))
        assert error.kind == "away" and "127.0.0.1:9 cannot be reached: nothing answers there" in str(error)
        error = await failing(registry, Reference.parse("registry.invalid/a:v1"))
        assert error.kind == "away" and "its name is not known" in str(error)


# --- patience


@pytest.mark.parametrize(("status", "after"), [(429, "0"), (503, "1"), (429, "nonsense"), (503, "")])
async def test_a_busy_registry_is_asked_again(
    registry: Registry, server: hostile.Registry, status: int, after: str
) -> None:
    image = an_image(10)
    reference = server.has(image)
    server.trick("/manifests/", answering(status, Retry_After=after), times=1)
    started = time.monotonic()
    assert await registry.resolve(reference) == image.descriptor
    assert time.monotonic() - started >= (0 if after == "0" else 1)


async def test_a_long_pause_is_the_callers(registry: Registry, server: hostile.Registry) -> None:
    """Its retries are durable; ours would hold a worker."""
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=600)
    for after in ("600", email.utils.format_datetime(moment, usegmt=True)):
        server.requests.clear()
        server.trick("/manifests/", answering(429, Retry_After=after), times=1)
        error = await failing(registry, server.reference())
        assert error.kind == "away" and error.retry_after is not None and 590 < error.retry_after <= 600
        assert len(server.requests) == 1


async def test_a_registry_that_is_always_busy_is_left(registry: Registry, server: hostile.Registry) -> None:
    server.trick("/manifests/", answering(503, Retry_After="0"))
    assert (await failing(registry, server.reference())).kind == "away"
    assert len(server.requests) == 4


# --- redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_credentials_do_not_follow_a_redirect(server: hostile.Registry, status: int) -> None:
    from tests.images.test_authorization import TokenService, credentials

    image = an_image(10)
    reference = server.has(image)
    async with hostile.Registry() as storage:
        TokenService(server)
        storage.trick("/bucket", answering(200, image.config))
        server.tricks.insert(0, ("/blobs/", answering(status, Location=f"{storage.url}/bucket?signature=a%2Fb"), 99))
        settings = replace(server.settings, insecure=frozenset({server.host, storage.host}))
        async with Registry(settings, credentials(server.host)) as registry:
            manifest = await registry.manifest(reference)
            assert await registry.small(reference, manifest.config()) == image.config
        ((_, path, headers),) = storage.requests
        assert path == "/bucket?signature=a%2Fb", "a signed address is not to be rewritten"
        assert "Authorization" not in headers and "Cookie" not in headers
    assert "Authorization" in server.asked("/blobs/")[0]


async def test_who_asks_after_a_redirect_is_told_nothing(server: hostile.Registry) -> None:
    """Storage that answers 401 with a realm of its own would be given the registry's password."""
    from tests.images.test_authorization import TokenService, credentials

    image = an_image(10)
    reference = server.has(image)
    async with hostile.Registry() as storage:
        service = TokenService(server)
        challenge = f'Bearer realm="{storage.url}/token"'
        storage.trick("/", answering(401, WWW_Authenticate=challenge))
        server.tricks.insert(0, ("/blobs/", answering(307, Location=f"{storage.url}/bucket"), 99))
        settings = replace(server.settings, insecure=frozenset({server.host, storage.host}))
        async with Registry(settings, credentials(server.host)) as registry:
            manifest = await registry.manifest(reference)
            with pytest.raises(RegistryError) as caught:
                await registry.small(reference, manifest.config())
        assert caught.value.kind == "unauthorized"
        assert [path for _, path, _ in storage.requests] == ["/bucket"]
    assert len(service.asked) == 1


async def test_cookies_are_not_kept(registry: Registry, server: hostile.Registry) -> None:
    image = an_image(10)
    reference = server.has(image)
    server.trick("/manifests/", answering(429, Set_Cookie="a=b", Retry_After="0"), times=1)
    await registry.resolve(reference)
    assert all("Cookie" not in headers for headers in server.asked("/manifests/"))


# --- mirrors


async def test_mirrors_are_asked_in_their_order(server: hostile.Registry) -> None:
    image = an_image(10)
    reference = server.has(image)
    async with hostile.Registry() as first, hostile.Registry() as second:
        settings = Settings(
            mirrors={server.host: (first.host, second.host)},
            insecure=frozenset({first.host, second.host, server.host}),
            timeouts=IMPATIENT,
        )
        async with Registry(settings) as registry:
            assert await registry.resolve(reference) == image.descriptor
            second.has(image)
            server.requests.clear()
            assert await registry.resolve(reference) == image.descriptor
            assert len(first.requests) == 2 and not server.requests
            second.manifests[image.descriptor.digest] = (b"{}", OCI_MANIFEST)
            assert await registry.resolve(reference.at(image.descriptor.digest)) == image.descriptor
            assert len(server.requests) == 1, "a mirror that lies is passed over"
            error = await failing(registry, server.reference("v9"))
    assert error.kind == "not_found"
    assert all(host in str(error) for host in (first.host, second.host, server.host))


async def test_a_mirror_says_more_than_a_registry_that_is_away(server: hostile.Registry) -> None:
    """Behind an air gap the registry itself never answers; that the mirror lacks the image is what counts."""
    settings = Settings(
        mirrors={"127.0.0.1:9": (server.host,)}, insecure=frozenset({server.host, "127.0.0.1:9"}), timeouts=IMPATIENT
    )
    async with Registry(settings) as registry:
        assert (await failing(registry, Reference.parse("127.0.0.1:9/team/cache:v9"))).kind == "not_found"


# --- referrers


def index_of(*entries: Descriptor) -> bytes:
    manifests = [each.as_json() for each in entries]
    return orjson.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests})


SIGNATURE = Descriptor(OCI_MANIFEST, sha256(b"signature"), 9, "application/vnd.dev.sigstore.bundle.v0.3+json")
OTHER = Descriptor(OCI_MANIFEST, sha256(b"other"), 5)


async def test_referrers_by_api_and_by_page(registry: Registry, server: hostile.Registry) -> None:
    image = an_image(10)
    reference = server.has(image).at(image.descriptor.digest)
    link = f'</v2/team/cache/referrers/{reference.digest}?last=a%2Fb>; rel="next"'
    server.trick("/referrers/", answering(200, index_of(SIGNATURE), Content_Type=OCI_INDEX, Link=link), times=1)
    server.trick("/referrers/", answering(200, index_of(OTHER), Content_Type=OCI_INDEX))
    assert await registry.referrers(reference) == (SIGNATURE, OTHER)
    asked = [path for _, path, *_ in server.requests if "/referrers/" in path]
    assert len(asked) == 2 and asked[-1].endswith("?last=a%2Fb")


async def test_a_referrer_that_somebody_pushes_hides_none_behind_the_fallback_tag(
    registry: Registry, server: hostile.Registry
) -> None:
    image = an_image(10)
    reference = server.has(image).at(image.descriptor.digest)
    server.trick("/referrers/", answering(200, index_of(OTHER), Content_Type=OCI_INDEX))
    server.manifests[reference.digest.replace(":", "-")] = (index_of(SIGNATURE, OTHER), OCI_INDEX)
    assert await registry.referrers(reference) == (OTHER, SIGNATURE)


@pytest.mark.parametrize(
    "handler",
    [answering(404), answering(405), answering(200, index_of(), Content_Type=OCI_INDEX), answering(200, b"<html>")],
)
async def test_referrers_by_the_fallback_tag(
    registry: Registry, server: hostile.Registry, handler: hostile.Handler
) -> None:
    """Also where there is an API that knows nothing: the image was copied with its tags."""
    image = an_image(10)
    reference = server.has(image).at(image.descriptor.digest)
    server.trick("/referrers/", handler)
    assert await registry.referrers(reference) == ()
    server.manifests[reference.digest.replace(":", "-")] = (index_of(SIGNATURE), OCI_INDEX)
    assert await registry.referrers(reference) == (SIGNATURE,)


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (answering(200, b"[]", Content_Type=OCI_INDEX), "malformed"),
        (endless(content_type=OCI_INDEX), "too_large"),
        (answering(200, index_of(OTHER), Content_Type=OCI_INDEX, Link='<?last=1>; rel="next"'), "too_large"),
        (answering(200, index_of(OTHER), Content_Type=OCI_INDEX, Link='<http://a.example/>; rel="next"'), "lied"),
        (answering(500, Retry_After="9"), "away"),
        (answering(403), "unauthorized"),
    ],
)
async def test_referrers_that_cannot_be_had_are_not_none(
    registry: Registry, server: hostile.Registry, handler: hostile.Handler, kind: str
) -> None:
    """Whoever takes a failure for an empty list takes an image with a bad signature for one without."""
    image = an_image(10)
    reference = server.has(image).at(image.descriptor.digest)
    server.trick("/referrers/", handler)
    with pytest.raises(RegistryError) as caught:
        await registry.referrers(reference)
    assert caught.value.kind == kind
    assert len(server.requests) < 100


async def test_no_entry_hides_a_signature(registry: Registry, server: hostile.Registry) -> None:
    """Whoever may push can add what refers to an image, as much and as odd as they like."""
    image = an_image(10)
    reference = server.has(image).at(image.descriptor.digest)
    odd = [{}, 7, OTHER.as_json() | {"artifactType": "x"}, OTHER.as_json() | {"annotations": {"a": 1}}]
    flood = [descriptor(str(number).encode()).as_json() for number in range(5_000)]
    listed = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*odd, *flood, SIGNATURE.as_json()]}
    server.trick("/referrers/", answering(200, orjson.dumps(listed), Content_Type=OCI_INDEX))
    found = await registry.referrers(reference)
    assert found[-1] == SIGNATURE and len(found) == 5_001


async def test_referrers_of_a_tag_are_a_mistake(registry: Registry, server: hostile.Registry) -> None:
    with pytest.raises(ValueError, match="no digest"):
        await registry.referrers(server.reference())


# --- TLS and proxies


async def test_a_private_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "registries")
    context = server_context(authority)
    image = an_image(10)
    async with hostile.Registry(tls=context) as server:
        reference = server.has(image)
        pem = authority.pair.cert.read_text()
        async with Registry(Settings(authorities=pem, timeouts=IMPATIENT)) as registry:
            assert await registry.resolve(reference) == image.descriptor
        async with Registry(Settings(timeouts=IMPATIENT)) as registry:
            error = await failing(registry, reference)
    assert error.kind == "away" and "certificate of" in str(error) and "authority" in str(error)


def server_context(authority: Authority) -> ssl.SSLContext:
    pair = authority.server("registry", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    return context


async def test_a_proxy_is_used_and_told_of(server: hostile.Registry) -> None:
    image = an_image(10)
    server.has(image)
    proxy = f"http://me:hunter2@{server.host}"
    settings = Settings(proxy=proxy, insecure=frozenset({"r.example"}), timeouts=IMPATIENT)
    async with Registry(settings) as registry:
        assert await registry.resolve(Reference.parse("r.example/team/cache:v1")) == image.descriptor
        assert server.requests[-1][2]["Host"] == "r.example"
        error = await failing(registry, Reference.parse("other.example/team/cache:v1"))
    assert error.kind == "away" and "the proxy does not lead to other.example" in str(error)
    for dead in (replace(settings, proxy="http://me:hunter2@127.0.0.1:9"), Settings(timeouts=IMPATIENT)):
        async with Registry(dead, environment={"HTTPS_PROXY": "http://me:hunter2@127.0.0.1:9"}) as registry:
            error = await failing(registry, Reference.parse("other.example/team/cache:v1"))
        assert "the proxy that leads to other.example cannot be reached" in str(error)
        assert "hunter2" not in f"{error!r}{error.__cause__!r}"
