"""Where the API server is and who we are there: configuration, TLS, credentials and the pool of connections.

For the client alone. Loading and authentication are `kubernetes.aio`'s; what is added: credentials are loaded anew when
the server refuses them, and a peer that vanished without a word is noticed within a minute.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import load_incluster_config, load_kube_config

from kube.errors import BadConfig

log = logging.getLogger(__name__)

_RELOAD_EVERY = 5.0  # seconds; an exec plugin is not started more often, however many requests are refused
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000))


class _Pool(RESTClientObject):
    """kubernetes.aio's TLS context and connection pool, without its request path (which re-encodes bodies)."""

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(limit=self.maxsize, ssl=self.ssl_context, socket_factory=_socket)

    def session(self) -> aiohttp.ClientSession:
        if self.pool_manager is None:
            self.pool_manager = self._create_pool_manager()
        return self.pool_manager

    def reload_client_certificate(self) -> None:
        if self.configuration.cert_file:
            self.ssl_context.load_cert_chain(self.configuration.cert_file, keyfile=self.configuration.key_file)


class Connection:
    """One API server and one identity. `load` re-reads the credentials into `configuration`."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        user_agent: str = "berth",
        timeout: float = 30.0,
        load: Callable[[Configuration], Awaitable[None]] | None = None,
    ) -> None:
        self.configuration = configuration
        self.host: str = configuration.host.rstrip("/")
        self._load = load
        self._reload_lock = asyncio.Lock()
        self._loaded = time.monotonic()
        configuration.client_session_kwargs = {
            # trust_env would look for a netrc file and proxies on every single call; proxies are looked up once, below
            "trust_env": False,
            "cookie_jar": aiohttp.DummyCookieJar(),
            "timeout": aiohttp.ClientTimeout(total=timeout, sock_connect=min(10.0, timeout)),
            "headers": {"User-Agent": user_agent, "Accept-Encoding": "gzip"},
        }
        try:
            self._pool = _Pool(configuration)
        except OSError as exc:  # ssl.SSLError and unreadable files alike
            raise BadConfig(f"the TLS files for {self.host} cannot be used: {exc}", reason="BadConfig") from exc
        self.session = self._pool.session()
        self.options: dict[str, Any] = {"allow_redirects": False}
        proxy = configuration.proxy or _proxy_from_environment(self.host)
        if proxy:
            self.options["proxy"] = proxy
        if configuration.proxy_headers:
            self.options["proxy_headers"] = configuration.proxy_headers
        if configuration.tls_server_name:
            self.options["server_hostname"] = configuration.tls_server_name

    @classmethod
    async def open(
        cls, kubeconfig: Path | None, context: str | None, *, user_agent: str = "berth", timeout: float = 30.0
    ) -> Connection:
        """The file given, else KUBECONFIG, else the pod's service account (unless a context is named), else
        ~/.kube/config. BadConfig when none of them serves."""
        source = _kubeconfig_path(kubeconfig, context)
        configuration = Configuration()

        async def load(into: Configuration) -> None:
            if source is None:
                load_incluster_config(into)  # type: ignore[no-untyped-call]
            else:
                await load_kube_config(str(source), context, into, persist_config=False)  # type: ignore[no-untyped-call]

        try:
            await load(configuration)
        except Exception as exc:  # the loader raises whatever a malformed file makes of it
            where = source or "the pod's service account"
            raise BadConfig(f"{where}: {str(exc) or type(exc).__name__}", reason="BadConfig") from exc
        # a service account's token is read anew every minute by the library's own hook
        return cls(configuration, user_agent=user_agent, timeout=timeout, load=load if source else None)

    async def authorization(self) -> str | None:
        """The Authorization header, or None (client certificate, or anonymous)."""
        key: str | None = await self.configuration.get_api_key_with_prefix("BearerToken")
        return key

    async def reload(self, sent: float) -> bool:
        """Loads the credentials again after a request sent at `sent` (monotonic) was refused; True: try again."""
        if self._load is None:
            return False
        async with self._reload_lock:
            if self._loaded > sent:
                return True  # somebody else did already
            if time.monotonic() - self._loaded < _RELOAD_EVERY:
                return False
            try:
                await self._load(self.configuration)
                self._pool.reload_client_certificate()
            except Exception as exc:  # the loader raises whatever: what worked before may still do
                log.warning("could not load the credentials for %s again: %s", self.host, exc)
                return False
            finally:
                self._loaded = time.monotonic()
            return True

    async def close(self) -> None:
        await self._pool.close()


def _kubeconfig_path(kubeconfig: Path | None, context: str | None) -> str | Path | None:
    """None means in-cluster."""
    if kubeconfig is not None:
        path = kubeconfig.expanduser()
        if not path.is_file():
            raise BadConfig(f"{path} does not exist", reason="BadConfig")
        return path
    if from_env := os.environ.get("KUBECONFIG"):
        return from_env  # may be a list of files
    if context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    path = Path.home() / ".kube" / "config"
    if not path.is_file():
        raise BadConfig(f"no {path}, no KUBECONFIG, and this is not a pod of a cluster", reason="BadConfig")
    return path


def _proxy_from_environment(host: str) -> str | None:
    url = urlsplit(host)
    if not url.hostname or _loopback(url.hostname) or urllib.request.proxy_bypass(url.hostname):
        return None
    return urllib.request.getproxies().get(url.scheme)


def _loopback(name: str) -> bool:
    """Whether it is this machine, to which no proxy leads (as kubectl has it, whatever NO_PROXY says)."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose dead peer is noticed: a watch sends nothing, so nothing else would."""
    family, kind, proto, _, _ = info
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
