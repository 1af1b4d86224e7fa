"""Tokens and passwords: asked for, renewed, tried one after the other, and never given to anybody else."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import traceback
from dataclasses import replace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from images.authorization import challenges_of, token_of
from images.credentials import Credentials
from images.endpoints import Settings
from images.errors import RegistryError
from images.registry import Registry
from tests.images import hostile
from tests.images.hostile import an_image, answering

SECRET = "hunter2-of-all-places"
TOKEN = "token-that-nobody-may-see"


def credentials(*keys: str, identity_token: str = "") -> Credentials:
    entries = {
        key: {"username": f"user{number}", "password": SECRET, "identitytoken": identity_token}
        for number, key in enumerate(keys)
    }
    return Credentials.parse(json.dumps({"auths": entries}).encode())


def basic(user: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{SECRET}".encode()).decode()


class TokenService:
    """Asks for a token before it serves; `takes` says whose."""

    def __init__(self, server: hostile.Registry, realm: str | None = None) -> None:
        self.server = server
        self.realm = realm or f"{server.url}/token"
        self.valid = {TOKEN}
        self.takes: set[str | None] = {basic("user0")}
        self.asked: list[tuple[str, dict[str, str], str | None]] = []
        self.answer: dict[str, object] = {"token": TOKEN, "expires_in": 300}
        server.trick("/token", self.token)
        server.trick("/v2/", self.guard)

    async def token(self, request: web.Request) -> web.StreamResponse:
        form = dict(await request.post()) if request.method == "POST" else dict(request.query)
        given = request.headers.get("Authorization")
        self.asked.append((request.method, {k: str(v) for k, v in form.items()}, given))
        if given not in self.takes and form.get("refresh_token") != SECRET:
            return web.Response(status=401)
        return web.json_response(self.answer)

    async def guard(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization", "").removeprefix("Bearer ") in self.valid:
            return await self.server.honest(request)
        challenge = f'Bearer realm="{self.realm}",service="the registry",scope="repository:other/secret:pull,push"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})


async def failing(registry: Registry, server: hostile.Registry) -> RegistryError:
    with pytest.raises(RegistryError) as caught:
        await registry.resolve(server.reference())
    return caught.value


async def test_basic(server: hostile.Registry) -> None:
    image = an_image(10)
    reference = server.has(image)

    async def guard(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") == basic("user0"):
            return await server.honest(request)
        return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})

    server.trick("/v2/", guard)
    async with Registry(server.settings, credentials(server.host)) as registry:
        assert await registry.resolve(reference) == image.descriptor
        await registry.resolve(reference)
    assert len(server.requests) == 3, "once without, and from then on with the password"
    async with Registry(server.settings) as registry:
        assert (await failing(registry, server)).kind == "unauthorized"


async def test_a_token_of_our_own_scope_not_the_registrys(server: hostile.Registry) -> None:
    """A registry that asks for a token for another repository would read it with our rights."""
    reference = server.has(an_image(10))
    service = TokenService(server)
    async with Registry(server.settings, credentials(server.host)) as registry:
        await registry.resolve(reference)
        await registry.resolve(reference)
    ((method, form, given),) = service.asked
    assert (method, given) == ("GET", basic("user0"))
    assert form == {"scope": "repository:team/cache:pull", "service": "the registry"}


async def test_a_token_without_a_password(server: hostile.Registry) -> None:
    reference = server.has(an_image(10))
    service = TokenService(server)
    service.takes = {None}
    async with Registry(server.settings) as registry:
        await registry.resolve(reference)
    assert service.asked[0][2] is None


async def test_an_identity_token_is_posted(server: hostile.Registry) -> None:
    reference = server.has(an_image(10))
    service = TokenService(server)
    service.answer = {"access_token": TOKEN}
    async with Registry(server.settings, credentials(server.host, identity_token=SECRET)) as registry:
        await registry.resolve(reference)
    ((method, form, given),) = service.asked
    assert (method, given, form["grant_type"]) == ("POST", None, "refresh_token")


async def test_a_token_that_expired_is_renewed(server: hostile.Registry) -> None:
    reference = server.has(an_image(10))
    service = TokenService(server)
    async with Registry(server.settings, credentials(server.host)) as registry:
        await registry.resolve(reference)
        service.valid = {"another"}
        service.answer = {"token": "another"}
        await registry.resolve(reference)
    assert len(service.asked) == 2


async def test_a_token_that_lives_too_short_is_not_begun_with(server: hostile.Registry) -> None:
    reference = server.has(an_image(10))
    service = TokenService(server)
    service.answer = {"token": TOKEN, "expires_in": 11}
    async with Registry(server.settings, credentials(server.host)) as registry:
        await registry.resolve(reference)
        await asyncio.sleep(1.1)
        await registry.resolve(reference)
    assert len(service.asked) == 2


async def test_parallel_blobs_share_a_token(server: hostile.Registry, tmp_path: object) -> None:
    image = hostile.Image(b"{}", tuple(bytes([n]) * 1000 for n in range(8)))
    reference = server.has(image)
    service = TokenService(server)
    async with Registry(server.settings, credentials(server.host)) as registry:
        manifest = await registry.manifest(reference)
        await asyncio.gather(*(registry.small(reference, each) for each in manifest.layers()))
    assert len(service.asked) == 1


async def test_credentials_are_tried_one_after_the_other(server: hostile.Registry) -> None:
    """As the kubelet does: that of the longer path may be the one that was revoked."""
    reference = server.has(an_image(10))
    service = TokenService(server)
    service.takes = {basic("user1")}
    async with Registry(server.settings, credentials(f"{server.host}/team", server.host)) as registry:
        await registry.resolve(reference)
    assert [given for _, _, given in service.asked] == [basic("user0"), basic("user1")]


@pytest.mark.parametrize("accepted", [True, False])
async def test_a_registry_that_is_never_content_is_left(server: hostile.Registry, accepted: bool) -> None:
    """401 for ever, whether its token service gives tokens or not."""
    server.has(an_image(10))
    service = TokenService(server)
    service.valid = set()
    if not accepted:
        service.takes = set()
    async with Registry(server.settings, credentials(f"{server.host}/team", server.host)) as registry:
        assert (await failing(registry, server)).kind == "unauthorized"
    assert len(server.requests) < 12


@pytest.mark.parametrize(
    ("realm", "told"),
    [
        ("http://token.example/token", "plain http"),
        ("http://169.254.169.254/latest/meta-data", "plain http"),
        ("ftp://token.example/", "not an address of the web"),
        ("https://me:pw@token.example/", "it holds a user name"),
        ("/token", "does not say where from"),
        ("http://[", "does not say where from"),
        ("", "does not say where from"),
    ],
)
async def test_realms_that_are_not_asked(server: hostile.Registry, realm: str, told: str) -> None:
    server.has(an_image(10))
    TokenService(server, realm or " ")
    async with Registry(server.settings, credentials(server.host)) as registry:
        error = await failing(registry, server)
    assert error.kind in ("lied", "malformed") and told in str(error)


async def test_a_realm_on_this_machine_is_asked_only_where_it_is_configured(server: hostile.Registry) -> None:
    """The registry is meant to be elsewhere: by another name, it must not make us connect to ourselves."""
    async with hostile.Registry() as inner:
        server.has(an_image(10))
        TokenService(server, f"https://localhost:{inner.port}/token")
        async with Registry(server.settings, credentials(server.host)) as registry:
            error = await failing(registry, server)
        assert error.kind == "lied" and "an address of this machine or its link" in str(error)
        assert not inner.requests


async def test_a_configured_token_service_elsewhere_gets_the_password_and_the_registry_never(
    server: hostile.Registry,
) -> None:
    reference = server.has(an_image(10))
    async with hostile.Registry() as other:
        service = TokenService(server, f"http://{other.host}/token")
        other.trick("/token", service.token)
        settings = replace(server.settings, insecure=frozenset({server.host, other.host}))
        async with Registry(settings, credentials(server.host)) as registry:
            await registry.resolve(reference)
        assert other.asked("/token")[0]["Authorization"] == basic("user0")
    assert all(headers.get("Authorization") != basic("user0") for headers in server.asked("/v2/"))


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"[]", b'"token"', b'{"token": 7}', b'{"token": ""}', b'{"token": "a\\r\\nX: b"}',
        b'{"token": "\xc3\xa9"}', b"{" * 100_000,
    ],
)  # fmt: skip
async def test_token_services_that_answer_nonsense(server: hostile.Registry, answer: bytes) -> None:
    server.has(an_image(10))
    TokenService(server)
    server.tricks.insert(0, ("/token", answering(200, answer), 99))
    async with Registry(server.settings, credentials(server.host)) as registry:
        error = await failing(registry, server)
    assert error.kind == "malformed" and "without a token" in str(error)


async def test_a_token_service_without_end_is_bounded(server: hostile.Registry) -> None:
    server.has(an_image(10))
    TokenService(server)
    server.tricks.insert(0, ("/token", hostile.endless(), 99))
    async with Registry(server.settings, credentials(server.host)) as registry:
        assert (await failing(registry, server)).kind == "too_large"


async def test_no_failure_shows_a_secret(server: hostile.Registry, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the registry says it back to us."""
    caplog.set_level(logging.DEBUG)
    server.has(an_image(10))
    TokenService(server)
    settings = replace(server.settings, proxy=f"http://me:{SECRET}@127.0.0.1:9")

    async def echo(request: web.Request) -> web.StreamResponse:
        words = request.headers.get("Authorization", "") + SECRET + TOKEN
        return web.json_response({"errors": [{"code": words, "message": words}]}, status=status, reason=words)

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    shown = []
    for status in (400, 403, 404, 500, 0):
        server.tricks.insert(0, ("/manifests/", echo if status else cut, 99))
        async with Registry(settings, credentials(server.host)) as registry:
            error = await failing(registry, server)
        shown += ["".join(traceback.format_exception(error)), repr(error), repr(vars(error)), repr(registry)]
    text = "\n".join(shown) + caplog.text
    for secret in (SECRET, TOKEN, basic("user0").removeprefix("Basic ")):
        assert secret not in text


# --- what a challenge and an answer mean


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        (['Bearer realm="https://a/t",service="s",scope="x:y:pull,push"'],
         {"bearer": {"realm": "https://a/t", "service": "s", "scope": "x:y:pull,push"}}),
        (["Basic realm=plain, Bearer realm=\"b\""], {"basic": {"realm": "plain"}, "bearer": {"realm": "b"}}),
        (["BASIC realm=\"a\"", "Bearer Realm = \"b\\\"c\""], {"basic": {"realm": "a"}, "bearer": {"realm": 'b"c'}}),
        (["Basic"], {"basic": {}}),
        (['Bearer realm="1"', 'Bearer realm="2"'], {"bearer": {"realm": "1"}}),
        (['Bearer realm="1",realm="2"'], {"bearer": {"realm": "1"}}),
        (["", "=", '"'], {}),
    ],
)  # fmt: skip
def test_challenges(headers: list[str], found: dict[str, dict[str, str]]) -> None:
    assert challenges_of(headers) == found


@given(st.lists(st.text(max_size=60) | st.text('Bearer Basic="\\,realm ', max_size=60), max_size=3))
def test_any_header_is_a_challenge_or_none(headers: list[str]) -> None:
    for scheme, parameters in challenges_of(headers).items():
        assert scheme == scheme.lower()
        assert all(name == name.lower() for name in parameters)


def test_a_long_header_is_read_in_time() -> None:
    for piece in ('Bearer a="', "a ", 'a="\\', ",", "Bearer realm=x,"):
        challenges_of([piece * 100_000])


FIELDS = st.recursive(
    st.none() | st.text(max_size=5) | st.integers(),
    lambda inner: st.dictionaries(st.sampled_from(["token", "access_token", "expires_in"]), inner, max_size=3),
)


@given(st.binary(max_size=60) | FIELDS.map(lambda fields: json.dumps(fields).encode()))
def test_any_answer_is_a_token_or_refused(answer: bytes) -> None:
    try:
        header, life = token_of(answer, "r.example", "x")
    except RegistryError as error:
        assert error.kind == "malformed"  # noqa: PT017
    else:
        assert header.isprintable() and header.isascii() and 0 < life < 2**31


def test_settings_are_checked_before_anything_is_asked() -> None:
    with pytest.raises(ValueError, match="insecure"):
        Registry(Settings(insecure=frozenset({"http://x"})))
