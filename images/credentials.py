"""Who we are to a registry: a Secret of type kubernetes.io/dockerconfigjson, matched as the kubelet does.

For the registry client alone. A secret never leaves these values but by `authorization` and `identity_token`: neither
`repr` nor any exception has it, nor is an exception chained to one that has.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import orjson

from images.reference import DOCKER_HUB

SECRET_TYPE = "kubernetes.io/dockerconfigjson"  # noqa: S105 - a type
SECRET_KEY = ".dockerconfigjson"  # noqa: S105 - a name
LIMIT = 1024 * 1024  # bytes; a Secret cannot be larger

_HUB_KEY = f"index.{DOCKER_HUB}"
_KEY_LIMIT = 512


class BadCredentials(ValueError):
    """The file or Secret is not what it should be; the message says where, and nothing of what stands there."""


class Credential:
    """One user of one registry."""

    __slots__ = ("_identity_token", "_password", "_username")

    def __init__(self, username: str, password: str, identity_token: str = "") -> None:
        self._username = username
        self._password = password
        self._identity_token = identity_token

    @property
    def authorization(self) -> str:
        """The value of an Authorization header, Basic."""
        return "Basic " + base64.b64encode(f"{self._username}:{self._password}".encode()).decode()

    @property
    def identity_token(self) -> str:
        """A refresh token that replaces the password at the token service; empty if there is none."""
        return self._identity_token

    def __repr__(self) -> str:
        return "Credential(…)"


class Credentials:
    """All that one Secret holds. Empty: anonymous."""

    def __init__(self, by_key: Mapping[str, Credential] | None = None) -> None:
        self._by_key = dict(by_key or {})
        # the kubelet's order: reversed, so that of two keys that match the longer path comes first
        self._order = sorted(self._by_key, reverse=True)

    @classmethod
    def parse(cls, data: bytes) -> Credentials:
        """The content of `.dockerconfigjson`. Raises BadCredentials with the place of the mistake."""
        if len(data) > LIMIT:
            raise BadCredentials(f"the credentials are longer than {LIMIT} bytes")
        document = _json(data)
        auths = document.get("auths", {}) if isinstance(document, dict) else None
        if not isinstance(auths, dict):
            raise BadCredentials('the credentials must be JSON with an object "auths" (kubernetes.io/dockerconfigjson)')
        found: dict[str, Credential] = {}
        for key, entry in auths.items():
            credential = _credential(entry, _place(key))
            matched = _key(key)
            if credential is not None and matched:
                found[matched] = credential
        return cls(found)

    @classmethod
    def from_secret(cls, secret: Mapping[str, object]) -> Credentials:
        """A Secret as the API server gives it. Raises BadCredentials, with nothing of its content."""
        if secret.get("type") != SECRET_TYPE:
            raise BadCredentials(f"it is no Secret of type {SECRET_TYPE}")
        data = secret.get("data")
        encoded = data.get(SECRET_KEY) if isinstance(data, Mapping) else None
        if not isinstance(encoded, str):
            raise BadCredentials(f"data: has no {SECRET_KEY}")
        try:
            content = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            content = None
        if content is None:
            raise BadCredentials(f"data.{SECRET_KEY}: is not base64")
        return cls.parse(content)

    def find(self, registry: str, repository: str) -> tuple[Credential, ...]:
        """Those that may serve this repository, most specific first. The registry's name, without a scheme."""
        found = tuple(self._by_key[key] for key in self._order if _matches(key, registry, repository))
        if not found and registry == DOCKER_HUB and _HUB_KEY in self._by_key:
            return (self._by_key[_HUB_KEY],)
        return found

    def __repr__(self) -> str:
        return f"Credentials({len(self._by_key)} entries)"


def _json(data: bytes) -> object:
    """The document, or None; no exception of the parser's, which carries the text, outlives this."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _credential(entry: object, place: str) -> Credential | None:
    if not isinstance(entry, dict):
        raise BadCredentials(f"{place}: must be an object")
    fields = {}
    for name in ("username", "password", "auth", "identitytoken"):
        value = entry.get(name) or ""
        if not isinstance(value, str):
            raise BadCredentials(f"{place}.{name}: must be text")
        fields[name] = value
    username, password = fields["username"], fields["password"]
    if fields["auth"]:
        decoded = _decoded(fields["auth"])
        if decoded is None:
            raise BadCredentials(f"{place}.auth: must be the base64 of user:password")
        username, _, password = decoded.partition(":")
    if not (username or password or fields["identitytoken"]):
        return None
    return Credential(username, password, fields["identitytoken"])


def _decoded(auth: str) -> str | None:
    """`user:password`, or None. The padding may be missing, as the kubelet has it."""
    text = auth.strip()
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if ":" in decoded else None


def _key(key: str) -> str:
    """Host and path of an entry's key as the kubelet reads it (`https://host/v1/` is `host`); empty: of no use."""
    rest = key.removeprefix("https://").removeprefix("http://")
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    path = slash + path
    if path.startswith(("/v1/", "/v2/")):
        path = path[3:]
    host = authority.rpartition("@")[2].lower()
    if not host or len(host) + len(path) > _KEY_LIMIT:
        return ""
    return host + (path if path != "/" else "")


def _place(key: str) -> str:
    """The entry as it may be named: a key can hold a user and a password."""
    return f"auths[{_key(key)[:100]!r}]"


def _matches(key: str, registry: str, repository: str) -> bool:
    """The kubelet's rule: the same port, each part of the host's name by its pattern, and the path a prefix."""
    authority, slash, path = key.partition("/")
    pattern, pattern_port = _split(authority)
    host, port = _split(registry)
    if port != pattern_port or len(pattern) != len(host) or not f"/{repository}".startswith(slash + path):
        return False
    return all(fnmatchcase(part, each.replace("[^", "[!")) for part, each in zip(host, pattern, strict=True))


def _split(authority: str) -> tuple[list[str], str]:
    host, colon, port = authority.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = authority, ""
    if host.startswith("["):
        return [host.replace("[", "").replace("]", "")], port  # an IPv6 address has no parts, and no pattern
    return host.split("."), port
