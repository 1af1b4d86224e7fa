"""One HTTP request to a registry, whatever the registry does with it: bounded in time, in redirects and in trust.

For the registry client. Credentials go to the server that was meant and to nobody else: neither cookies nor netrc nor a
redirect carries them away. Failures become RegistryErrors, and no exception of aiohttp, which holds the request's
headers, is chained to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import aiohttp
from yarl import URL

from images.endpoints import (
    Endpoint,
    Settings,
    authority,
    configured,
    elsewhere,
    forbidden,
    proxy_for,
    same_origin,
    tls_context,
)
from images.errors import RegistryError

_REDIRECTS = 5
_REDIRECT = frozenset({301, 302, 303, 307, 308})
_BUFFER = 512 * 1024  # bytes that aiohttp holds of an answer before it stops reading
_CONNECTIONS = 16
_AGAIN = 0.2  # seconds after which a connection that broke is tried again
_BUSY = 1.0  # after which a registry that says it cannot now is asked again, if it does not say when
_LONGEST_RETRY = 86_400.0
_AGENT = "berth"


class Transport:
    """Two pools of connections: to what is configured, and to what registries name. `async with`."""

    def __init__(self, settings: Settings, environment: Mapping[str, str] | None = None) -> None:
        self.settings = settings
        self._environment = os.environ if environment is None else environment
        self._tls = tls_context(settings.authorities)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """By whether what they connect to is configured."""

    async def __aenter__(self) -> Transport:
        self._sessions = {True: self._session(None), False: self._session(_guarded)}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()

    def _session(self, sockets: Callable[[aiohttp.AddrInfoType], socket.socket] | None) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS, ssl=self._tls, socket_factory=sockets),
            trust_env=False,  # netrc would be read, and proxies are ours to choose
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a digest is of the bytes as they come
            read_bufsize=_BUFFER,
            headers={"User-Agent": _AGENT, "Accept-Encoding": "identity"},
        )

    @contextlib.asynccontextmanager
    async def request(
        self,
        endpoint: Endpoint,
        method: str,
        url: URL,
        what: str,
        *,
        headers: Mapping[str, str] | None = None,
        authorization: str | None = None,
        body: Callable[[], Any] | None = None,
        total: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, after redirects, whatever its status; `what` names the image in errors.

        `authorization` goes to the origin of `url` alone. `body` makes what is sent. `total`: seconds for all of it,
        reading included. Raises RegistryError, also while the answer is read.
        """
        timeouts = self.settings.timeouts
        deadline = time.monotonic() + (timeouts.answer if total is None else total)
        meant = url
        for _ in range(_REDIRECTS + 1):
            sent = dict(headers or {})
            if authorization is not None and same_origin(url, meant):
                sent["Authorization"] = authorization
            trusted = same_origin(url, endpoint.url)
            if not trusted and (why := elsewhere(self.settings, url)):
                raise RegistryError("lied", what, f"{endpoint.name} leads to {_shown(url)}, but {why}")
            session, options = self._route(endpoint, url, trusted=trusted)
            with _translated(what, url):
                response = await session.request(
                    method,
                    url,
                    headers=sent,
                    data=None if body is None else body(),
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=max(deadline - time.monotonic(), 0.001),
                        sock_connect=timeouts.connect,
                        sock_read=timeouts.silence if body is None else None,
                    ),
                    **options,
                )
                try:
                    target = _redirected(response, url, what) if method in ("GET", "HEAD") else None
                    if target is None:
                        yield response
                        return
                finally:
                    # what is left of an answer is not waited for: it may never end
                    response.release() if response.content.at_eof() else response.close()
            url = target
        raise RegistryError("lied", what, f"{endpoint.name} redirects more than {_REDIRECTS} times")

    def _route(self, endpoint: Endpoint, url: URL, *, trusted: bool) -> tuple[aiohttp.ClientSession, dict[str, Any]]:
        """By which pool and proxy a URL is reached. Behind a proxy the proxy decides what may be reached."""
        proxy = proxy_for(self.settings, url, self._environment)
        open_to = trusted or proxy is not None or configured(self.settings, endpoint, url)
        return self._sessions[open_to], {} if proxy is None else {"proxy": proxy}


def _redirected(response: aiohttp.ClientResponse, url: URL, what: str) -> URL | None:
    if response.status not in _REDIRECT:
        return None
    location = response.headers.get("Location", "")
    try:
        return url.join(URL(location, encoded=True)) if location else None
    except ValueError:
        raise RegistryError("malformed", what, f"{authority(url)} redirects to what is no address") from None


async def read(response: aiohttp.ClientResponse, at_most: int, what: str) -> bytes:
    """All of an answer. Raises RegistryError (too_large) before more than `at_most` bytes were read."""
    if (response.content_length or 0) > at_most:
        raise RegistryError("too_large", what, f"it has {response.content_length} bytes, where {at_most} are allowed")
    parts: list[bytes] = []
    length = 0
    with _translated(what, response.url):
        while part := await response.content.readany():
            parts.append(part)
            length += len(part)
            if length > at_most:
                raise RegistryError("too_large", what, f"it is longer than the {at_most} bytes that are allowed")
    return b"".join(parts)


def retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds after which a registry wants to be asked again: a number, or a date, or what is usual."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal() and len(text) < 12:
        return min(float(text), _LONGEST_RETRY)
    try:
        seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError, IndexError):
        return _BUSY
    return min(max(seconds, 0.0), _LONGEST_RETRY)


@contextlib.contextmanager
def _translated(what: str, url: URL) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, aiohttp.ClientError, ssl.SSLError, ConnectionError) as error:
        raise trouble(error, what, authority(url)) from None


def trouble(error: BaseException, what: str, host: str) -> RegistryError:
    """What became of a request that got no answer, in words that help, and nothing of what aiohttp wrote."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or "it is not trusted"
        return RegistryError(
            "away", what, f"the certificate of {host} is refused: {reason}",
            "Give its authority's certificate, or mend the registry's.",
        )  # fmt: skip
    if isinstance(error, aiohttp.ClientHttpProxyError):
        why = f"the proxy does not lead to {host} (status {error.status})"
        return RegistryError("away", what, why, "Check the proxy.")
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return RegistryError("away", what, f"the proxy that leads to {host} cannot be reached", "Check the proxy.")
    if isinstance(error, aiohttp.ClientSSLError):
        return RegistryError(
            "away", what, f"{host} does not speak TLS as it should",
            "If it serves plain http, configure it as insecure.",
        )  # fmt: skip
    if isinstance(error, asyncio.TimeoutError):
        return RegistryError("away", what, f"{host} did not answer in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        if error.os_error.errno == errno.EACCES:
            return RegistryError(
                "lied", what, f"a registry names {host}, which is an address of this machine or its link",
                "If that is meant, configure the host.",
            )  # fmt: skip
        reason = (
            "its name is not known" if isinstance(error, aiohttp.ClientConnectorDNSError) else "nothing answers there"
        )
        return RegistryError("away", what, f"{host} cannot be reached: {reason}")
    if isinstance(error, aiohttp.ClientConnectionError | ConnectionError | aiohttp.ClientPayloadError):
        return RegistryError("away", what, f"{host} cut the connection", retry_after=_AGAIN)
    return RegistryError("malformed", what, f"{host} does not speak HTTP as it should", "Is this a registry?")


def _guarded(info: aiohttp.AddrInfoType) -> socket.socket:
    """Refuses addresses that no registry has to name. Asked when connecting, so that no name can change its meaning."""
    family, kind, protocol, _, address = info
    if forbidden(str(address[0])):
        raise PermissionError(errno.EACCES, "not for a registry to name")
    return socket.socket(family, kind, protocol)


def _shown(url: URL) -> str:
    """Without user and query, which may be a signature."""
    return (f"{url.scheme}://{authority(url)}" if url.host else f"{url.scheme}:")[:200]
