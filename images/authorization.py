"""Who may read what: the answer to a registry's 401, by the scheme that it asks for, one credential after the other.

For the registry client. The scope of a token is what berth needs and not what the registry names in its challenge, so
that no registry is handed a token for another repository. A token service may stand anywhere, for whoever runs the
registry could as well ask for the password itself; but it is asked by https, as `endpoints.elsewhere` has it.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from urllib.parse import urlencode

import orjson
from yarl import URL

from images.credentials import Credential, Credentials
from images.endpoints import Endpoint
from images.errors import RegistryError
from images.transport import Transport, read, retry_after

PULL = "pull"
PUSH = "pull,push"

_ANSWER_LIMIT = 256 * 1024  # bytes of a token service's answer
_TOKEN = re.compile(r"[\x21-\x7e]{1,65536}")
_LIFE = 60.0  # seconds that a token lives if nobody says how long
_SPARE = 10.0  # a token that lives no longer than this is not begun with
_HEADER_LIMIT = 8192

_CHALLENGE = re.compile(r"\s*,*\s*([A-Za-z][A-Za-z0-9_-]*)(?:\s+|$)")
_PARAMETER = re.compile(r'\s*,?\s*([A-Za-z][A-Za-z0-9_-]*)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))')


@dataclass
class _Grant:
    """What one endpoint let us do with one repository so far."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    header: str | None = None
    expires: float = 0.0
    candidate: int = 0
    accepted: bool = False


class Authorizer:
    """Keeps what registries granted. One for each client, as its credentials are one."""

    def __init__(self, transport: Transport, credentials: Credentials) -> None:
        self._transport = transport
        self._credentials = credentials
        self._grants: dict[tuple[str, str, str], _Grant] = {}

    def header(self, endpoint: Endpoint, actions: str) -> str | None:
        """The Authorization header to send; None before the registry asked for one."""
        grant = self._grant(endpoint, actions)
        if grant.expires <= time.monotonic() + _SPARE:
            grant.header = None
        return grant.header

    def accept(self, endpoint: Endpoint, actions: str, sent: str | None) -> None:
        """What was sent served."""
        grant = self._grant(endpoint, actions)
        if sent is not None and sent == grant.header:
            grant.accepted = True

    async def renew(
        self, endpoint: Endpoint, actions: str, challenges: list[str], refused: str | None, what: str
    ) -> bool:
        """Whether to ask again, now with another header; False: nobody is left who may be asked for one.

        Raises RegistryError when a token service is away, lies or is malformed.
        """
        grant = self._grant(endpoint, actions)
        async with grant.lock:
            if grant.header is not None and grant.header != refused:
                return True  # somebody else did already
            if refused is not None and not grant.accepted:
                grant.candidate += 1
            found = self._credentials.find(endpoint.name, endpoint.repository)
            candidates: tuple[Credential | None, ...] = found or (None,)
            for index in range(grant.candidate, len(candidates)):
                header, life = await self._ask(endpoint, actions, challenges, candidates[index], what)
                if header is not None:
                    grant.header, grant.expires = header, time.monotonic() + life
                    grant.candidate, grant.accepted = index, False
                    return True
            grant.header, grant.candidate, grant.accepted = None, 0, False
            return False

    def _grant(self, endpoint: Endpoint, actions: str) -> _Grant:
        return self._grants.setdefault((str(endpoint.url), endpoint.repository, actions), _Grant())

    async def _ask(
        self, endpoint: Endpoint, actions: str, challenges: list[str], credential: Credential | None, what: str
    ) -> tuple[str | None, float]:
        offered = challenges_of(challenges)
        if "bearer" in offered:
            return await self._token(endpoint, actions, offered["bearer"], credential, what)
        if "basic" in offered and credential is not None:
            return credential.authorization, float("inf")
        return None, 0.0

    async def _token(
        self, endpoint: Endpoint, actions: str, challenge: dict[str, str], credential: Credential | None, what: str
    ) -> tuple[str | None, float]:
        """The distribution specification's token authentication: GET with Basic, or POST with an identity token."""
        try:
            realm = URL(challenge.get("realm", ""))
        except ValueError:
            realm = URL()
        if not realm.is_absolute():
            raise RegistryError("malformed", what, f"{endpoint.name} asks for a token and does not say where from")
        fields = {"scope": f"repository:{endpoint.repository}:{actions}"}
        if "service" in challenge:
            fields["service"] = challenge["service"]
        if credential is not None and credential.identity_token:
            form = {**fields, "grant_type": "refresh_token", "client_id": "berth"}
            body = urlencode({**form, "refresh_token": credential.identity_token}).encode()
            call = self._transport.request(
                endpoint, "POST", realm, what, body=lambda: body,
                headers={"Content-Type": "application/x-www-form-urlencoded"},
            )  # fmt: skip
        else:
            authorization = credential.authorization if credential is not None else None
            call = self._transport.request(
                endpoint, "GET", realm.update_query(fields), what, authorization=authorization
            )
        async with call as response:
            if response.status in (400, 401, 403, 404):
                return None, 0.0
            if response.status != 200:
                raise RegistryError(
                    "away", what, f"the token service of {endpoint.name} fails (status {response.status})",
                    retry_after=retry_after(response),
                )  # fmt: skip
            answer = await read(response, _ANSWER_LIMIT, what)
        return token_of(answer, endpoint.name, what)


def token_of(answer: bytes, registry: str, what: str) -> tuple[str, float]:
    """The header that a token service's answer makes, and the seconds for which it serves. Raises RegistryError."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        document = None
    fields = document if isinstance(document, dict) else {}
    token = fields.get("token") or fields.get("access_token")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise RegistryError(
            "malformed", what, f"the token service of {registry} answers without a token",
            "This is for whoever runs the registry to mend.",
        )  # fmt: skip
    life = fields.get("expires_in")
    return f"Bearer {token}", float(life) if type(life) is int and 0 < life < 2**31 else _LIFE


def challenges_of(headers: list[str]) -> dict[str, dict[str, str]]:
    """WWW-Authenticate (RFC 9110, 11.6.1) as scheme to parameters, both in lower case; what is no challenge is left
    out. The first of a scheme counts."""
    found: dict[str, dict[str, str]] = {}
    for header in headers:
        text, at = header[:_HEADER_LIMIT], 0
        while scheme := _CHALLENGE.match(text, at):
            at = scheme.end()
            parameters: dict[str, str] = {}
            while parameter := _PARAMETER.match(text, at):
                at = parameter.end()
                quoted, plain = parameter[2], parameter[3]
                value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
                parameters.setdefault(parameter[1].lower(), value)
            found.setdefault(scheme[1].lower(), parameters)
    return found
