"""Where an image is asked for: mirrors before the registry itself, by https unless configured, past a proxy or not.

Pure, for the registry client: settings in, addresses out. Every other address that a registry names (a token service, a
redirected blob) is judged here too, for a registry must not choose what berth connects to inside a cluster.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from yarl import URL

from crds.settings import Registries
from images.reference import DOCKER_HUB, BadReference, Reference, check_repository, parse_registry

_HUB_HOST = "registry-1.docker.io"


class BadSettings(ValueError):
    """A setting cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. A blob may take long, but must not stop coming, and not come slower than `slowest` bytes a second."""

    connect: float = 10.0
    silence: float = 30.0
    answer: float = 60.0
    """For a whole answer that is no blob."""
    patience: float = 20.0
    """For which a registry that asks to be left alone (429, 503) is waited for before the caller hears of it."""
    slowest: int = 128 * 1024


@dataclass(frozen=True)
class Settings:
    """How registries are reached. `checked` them once: what is here is trusted from then on."""

    mirrors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Registry to what is asked before it, in this order: `host[:port][/path]`, the path before every repository."""
    insecure: frozenset[str] = frozenset()
    """Hosts (with their ports) that are spoken to by plain http, and no others."""
    authorities: str = ""
    """Certificates (PEM) that are trusted beside the system's."""
    proxy: str = ""
    """A proxy's URL; left out, that of the environment (HTTPS_PROXY, HTTP_PROXY)."""
    no_proxy: str = ""
    """Hosts, domains and networks that it does not lead to; without `proxy` that of the environment (NO_PROXY)."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def checked(self) -> Settings:
        """Itself. Raises BadSettings."""
        for registry, mirrors in self.mirrors.items():
            _check_host(registry, "mirrors")
            for mirror in mirrors:
                _check_mirror(mirror)
        for host in self.insecure:
            _check_host(host, "insecure")
        tls_context(self.authorities)
        if self.proxy and not _is_proxy(self.proxy):
            raise BadSettings("proxy: must be a URL such as http://proxy.example:3128 (http or https)")
        return self


def settings_of(registries: Registries) -> Settings:
    """What `registries` of berth-settings says. Raises BadSettings, with the path of what cannot be used."""
    try:
        return Settings(
            mirrors={registry: tuple(mirrors) for registry, mirrors in registries.mirrors.items()},
            insecure=frozenset(registries.insecure),
            authorities=registries.authorities,
            proxy=registries.proxy,
            no_proxy=registries.no_proxy,
        ).checked()
    except BadSettings as wrong:
        raise BadSettings(f"registries.{wrong}") from None


@dataclass(frozen=True)
class Endpoint:
    """One server that may have a repository, and what the repository is called there."""

    url: URL
    """Scheme, host and port."""
    name: str
    """Host and port as credentials know it."""
    repository: str

    def path(self, rest: str) -> URL:
        """Of the distribution API, such as `manifests/v1`; `rest` is taken as it is."""
        return self.url.with_path(f"/v2/{self.repository}/{rest}", encoded=True)


def endpoints(settings: Settings, reference: Reference, *, mirrors: bool = True) -> tuple[Endpoint, ...]:
    """Who is asked for this image, one after the other; the registry itself is the last."""
    found = []
    for mirror in settings.mirrors.get(reference.registry, ()) if mirrors else ():
        host, _, prefix = mirror.partition("/")
        repository = f"{prefix.strip('/')}/{reference.repository}" if prefix else reference.repository
        found.append(Endpoint(_base(settings, host.lower()), host.lower(), repository))
    itself = _HUB_HOST if reference.registry == DOCKER_HUB else reference.registry
    found.append(Endpoint(_base(settings, itself), reference.registry, reference.repository))
    return tuple(found)


def _base(settings: Settings, host: str) -> URL:
    return URL(f"{'http' if host in settings.insecure else 'https'}://{host}")


def same_origin(one: URL, other: URL) -> bool:
    """Whether both are of one server. What is no address at all is of none."""
    try:
        return bool(one.host) and (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)
    except ValueError:
        return False


def elsewhere(settings: Settings, url: URL) -> str:
    """Why an address that this registry names is not to be asked; empty: it may be.

    By https, or to a host that is configured for http. That an address is this machine's own or its link's is only
    known when it is connected to (`forbidden`).
    """
    if url.scheme not in ("http", "https") or not url.host:
        return "it is not an address of the web"
    if url.user is not None or url.password is not None:
        return "it holds a user name"
    if url.scheme == "http" and authority(url) not in settings.insecure:
        return "it is plain http, and its host is not configured as insecure"
    return ""


def configured(settings: Settings, endpoint: Endpoint, url: URL) -> bool:
    """Whether somebody wrote this host into the configuration or the reference, whatever the port."""
    hosts = {endpoint.url.host, *(URL(f"http://{host}").host for host in settings.insecure)}
    return url.host in hosts


def forbidden(address: str) -> bool:
    """Whether an IP address is this machine's or its link's (cloud metadata): no business of a registry."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    if mapped is not None:
        ip = mapped
    return ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified


def authority(url: URL) -> str:
    """Host and port as `insecure` has them."""
    host = f"[{url.host}]" if ":" in (url.host or "") else str(url.host)
    return host if url.explicit_port is None else f"{host}:{url.explicit_port}"


def proxy_for(settings: Settings, url: URL, environment: Mapping[str, str]) -> str | None:
    """The proxy that leads to a URL, or None. This machine is never behind one."""
    host = url.host or ""
    if settings.proxy:
        proxy: str | None = settings.proxy
        without = settings.no_proxy
    else:
        names = (f"{url.scheme}_proxy", f"{url.scheme}_proxy".upper())
        proxy = next((environment[name] for name in names if environment.get(name)), None)
        without = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if not proxy or _loopback(host) or any(_bypasses(each.strip(), host, url.port) for each in without.split(",")):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    return proxy if _is_proxy(proxy) else None


def _bypasses(entry: str, host: str, port: int | None) -> bool:
    """One entry of NO_PROXY: `*`, a host with or without a port, a domain and all below it, or a network."""
    entry = entry.lower()
    if not entry or entry == "*":
        return entry == "*"
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        pass  # one of them is a name, or the entry has a port
    name, colon, wanted = entry.rpartition(":")
    if colon and wanted.isdecimal() and "]" not in wanted:
        if wanted != str(port):
            return False
        entry = name.strip("[]")
    domain = entry.removeprefix("*").removeprefix(".")
    return host == domain or host.endswith(f".{domain}")


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=4)
def tls_context(authorities: str) -> ssl.SSLContext:
    """Trusts the system's authorities, as they were when this was first asked for, and these (PEM): to load the
    system's takes tens of milliseconds. Raises BadSettings.
    """
    context = ssl.create_default_context()
    if authorities:
        try:
            context.load_verify_locations(cadata=authorities)
        except (ssl.SSLError, ValueError):
            raise BadSettings("authorities: must be certificates in PEM (-----BEGIN CERTIFICATE-----)") from None
    return context


def _is_proxy(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _check_host(text: str, setting: str) -> None:
    try:
        known = parse_registry(text, text)
    except BadReference as error:
        raise BadSettings(f"{setting}: {error}") from None
    if known != text:
        raise BadSettings(f"{setting}: {text!r} must be written as {known!r}")


def _check_mirror(text: str) -> None:
    host, slash, prefix = text.partition("/")
    try:
        parse_registry(host, text)
        if slash:
            check_repository(prefix, text)
    except BadReference as error:
        raise BadSettings(f"mirrors: {error}") from None
