"""A registry's answer or the reason why there is none: authorization, statuses, patience, and who is asked next.

For the registry client's reading and writing. A registry that is busy is waited for a little; longer waits are the
caller's, whose retries are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import orjson
from yarl import URL

from images.authorization import PULL, Authorizer
from images.credentials import Credentials
from images.descriptor import INDEXES, MANIFESTS, Malformed, Manifest
from images.endpoints import Endpoint, Settings, endpoints, same_origin
from images.errors import Kind, RegistryError
from images.reference import Reference, is_digest
from images.transport import Transport, read, retry_after
from planning.caches.limits import MANIFEST_BYTES

_ASKS = 8  # requests of one call, for credentials that are tried one after the other
_ATTEMPTS = 4  # of a call that a busy registry refuses
_ERROR_LIMIT = 8 * 1024
_CODES = frozenset(
    {
        "BLOB_UNKNOWN", "BLOB_UPLOAD_INVALID", "BLOB_UPLOAD_UNKNOWN", "DIGEST_INVALID", "MANIFEST_BLOB_UNKNOWN",
        "MANIFEST_INVALID", "MANIFEST_UNKNOWN", "NAME_INVALID", "NAME_UNKNOWN", "SIZE_INVALID", "UNAUTHORIZED",
        "DENIED", "UNSUPPORTED", "TOOMANYREQUESTS",
    }
)  # fmt: skip
_BUSY = frozenset({408, 429, 500, 502, 503, 504})

_ACCEPT = ", ".join((*MANIFESTS, *INDEXES))

Result = TypeVar("Result")


class Client:
    """Who speaks to registries with one set of credentials. `async with`."""

    def __init__(
        self, settings: Settings, credentials: Credentials, environment: Mapping[str, str] | None = None
    ) -> None:
        self.settings = settings
        self._transport = Transport(settings, environment)
        self._authorizer = Authorizer(self._transport, credentials)

    async def __aenter__(self) -> Client:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._transport.__aexit__(kind, value, traceback)

    @contextlib.asynccontextmanager
    async def answer(
        self,
        endpoint: Endpoint,
        method: str,
        url: URL,
        what: str,
        *,
        actions: str = PULL,
        headers: Mapping[str, str] | None = None,
        body: Callable[[], Any] | None = None,
        total: float | None = None,
        also: Collection[int] = (),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful answer, or one with a status of `also`. Raises RegistryError, also while it is read."""
        ours = same_origin(url, endpoint.url)
        for _ in range(_ASKS):
            sent = self._authorizer.header(endpoint, actions) if ours else None
            async with self._transport.request(
                endpoint, method, url, what, headers=headers, authorization=sent, body=body, total=total
            ) as response:
                if response.status != 401:
                    self._authorizer.accept(endpoint, actions, sent)
                    if not 200 <= response.status < 300 and response.status not in also:
                        raise await _failure(response, endpoint, what)
                    yield response
                    return
                # after a redirect it is another server that asks, which is told nothing
                ours = same_origin(response.url, endpoint.url)
                challenges = response.headers.getall("WWW-Authenticate", [])
            if not ours or not await self._authorizer.renew(endpoint, actions, challenges, sent, what):
                break
        raise RegistryError("unauthorized", what, f"{endpoint.name} takes nothing that we can say of ourselves")

    async def manifest(self, endpoint: Endpoint, target: str, what: str, *, actions: str = PULL) -> Manifest:
        """One endpoint's manifest by tag or digest; its own digest is of the bytes that came. Raises RegistryError."""
        url = endpoint.path(f"manifests/{target}")
        async with self.answer(endpoint, "GET", url, what, actions=actions, headers={"Accept": _ACCEPT}) as response:
            data = await read(response, MANIFEST_BYTES, what)
            promised = response.headers.get("Docker-Content-Digest", "")
            media_type = response.content_type
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if is_digest(target) and digest != target:
            raise RegistryError("lied", what, f"{endpoint.name} sent a manifest whose digest is {digest}")
        if is_digest(promised) and promised != digest:
            raise RegistryError("lied", what, f"{endpoint.name} promised {promised} and sent {digest}")
        try:
            return Manifest.read(data, digest, media_type)
        except Malformed as error:
            raise RegistryError("malformed", what, str(error)) from None

    async def patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Calls again as long as a registry says that it helps, and that is soon."""
        patience = self.settings.timeouts.patience
        for attempt in range(_ATTEMPTS):
            try:
                return await call()
            except RegistryError as error:
                wait = error.retry_after
                if error.kind != "away" or wait is None or wait > patience or attempt == _ATTEMPTS - 1:
                    raise
                patience -= wait
                await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def anywhere(self, reference: Reference, call: Callable[[Endpoint], Awaitable[Result]]) -> Result:
        """The result of the first who has one: mirrors in their order, then the registry. Raises RegistryError, which
        tells of all."""
        failures: list[tuple[Endpoint, RegistryError]] = []
        for endpoint in endpoints(self.settings, reference):
            try:
                return await self.patiently(partial(call, endpoint))
            except RegistryError as error:
                failures.append((endpoint, error))
        raise together(failures, str(reference))


def together(failures: list[tuple[Endpoint, RegistryError]], what: str) -> RegistryError:
    """One error of many: the kind is the registry's own, or a mirror's that said more than that nobody is there."""
    if len(failures) == 1:
        return failures[0][1]
    chosen = next((error for _, error in reversed(failures) if error.kind != "away"), failures[-1][1])
    waits = [error.retry_after for _, error in failures if error.retry_after is not None]
    why = "; ".join(f"{endpoint.url.authority}: {error.why}" for endpoint, error in failures)
    return RegistryError(chosen.kind, what, why, retry_after=min(waits, default=None))


async def _failure(response: aiohttp.ClientResponse, endpoint: Endpoint, what: str) -> RegistryError:
    """What a status means. Of the registry's own words only the specification's codes are believed."""
    code = await _code(response, what)
    told = f"status {response.status}" + (f", {code}" if code else "")
    if response.status in _BUSY:
        return RegistryError("away", what, f"{endpoint.name} cannot now ({told})", retry_after=retry_after(response))
    kinds: dict[int, tuple[Kind, str]] = {
        403: ("unauthorized", "refuses it"),
        404: ("not_found", "does not have it"),
        413: ("too_large", "finds it too large"),
    }
    kind, words = kinds.get(response.status, ("malformed", "does not understand the request"))
    return RegistryError(kind, what, f"{endpoint.name} {words} ({told})")


async def _code(response: aiohttp.ClientResponse, what: str) -> str:
    try:
        document = orjson.loads(await read(response, _ERROR_LIMIT, what))
        code = document["errors"][0]["code"]
    except (RegistryError, orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return ""
    return code if isinstance(code, str) and code in _CODES else ""
