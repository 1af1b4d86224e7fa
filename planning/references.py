"""How an image is written in one line: registry, repository, tag and digest, and what is wrong with a text that is no
reference. For `images.reference`, which knows images by it, and for the door, where a cache's image is looked at.

Nothing is assumed about the registry: a reference without one means another image on every machine, so it is refused
with what to write instead. The grammar is that of `distribution/reference`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

LIMIT = 1024  # bytes of a reference
DOCKER_HUB = "docker.io"

_NAME_LIMIT = 255  # bytes of a repository's name, as registries have it
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PORT = re.compile(r"[0-9]{1,5}")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class BadReference(ValueError):
    """The text is no reference that berth takes; the message says why and what to write."""


class Parts(NamedTuple):
    """A reference taken apart; '' for a tag or a digest that is not there."""

    registry: str
    repository: str
    tag: str
    digest: str


def parts(text: str) -> Parts:
    """Raises BadReference. Where neither tag nor digest is given the tag is `latest`, as everywhere."""
    if len(text.encode(errors="replace")) > LIMIT:
        raise BadReference(f"the reference {_shown(text)} is longer than {LIMIT} bytes")
    name, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise BadReference(f"{_shown(text)}: what follows @ must be sha256: and 64 hexadecimal digits")
    first, slash, rest = name.partition("/")
    if not slash or not names_a_registry(first):
        example = f"registry.example/{name}" if _COMPONENT.fullmatch(name.split(":")[0].split("/")[0]) else ""
        raise BadReference(
            f"{_shown(text)} names no registry: write it with its host"
            + (f", such as {_shown(example)}" if example else ", such as registry.example/team/cache:v1")
        )
    registry = parse_registry(first, text)
    repository, colon, tag = rest.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise BadReference(
            f"{_shown(text)}: the tag must be at most 128 letters, digits, _, . or -, the first no . or -"
        )
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    check_repository(repository, text)
    return Parts(registry, repository, tag or ("" if digest else "latest"), digest)


def is_digest(text: str) -> bool:
    """Whether it is a digest of the one algorithm that everybody uses."""
    return _DIGEST.fullmatch(text) is not None


def parse_registry(text: str, within: str) -> str:
    """A registry's host and port in lower case. Raises BadReference, which names the text that it stood in."""
    host, port = _split_port(text.lower())
    if port is not None and not (_PORT.fullmatch(port) and 1 <= int(port) <= 65535):
        raise BadReference(f"{_shown(within)}: the port of the registry must be a number from 1 to 65535")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1] if host.endswith("]") else "")
        except ValueError:
            raise BadReference(f"{_shown(within)}: {_shown(host)} is not an IPv6 address") from None
    elif len(host) > 253 or not _HOST.fullmatch(host):
        raise BadReference(f"{_shown(within)}: {_shown(host)} is not the name of a host")
    if host == f"index.{DOCKER_HUB}" and port is None:
        return DOCKER_HUB
    return host if port is None else f"{host}:{port}"


def check_repository(repository: str, within: str) -> None:
    """Raises BadReference where it is not the name of a repository."""
    if len(repository) > _NAME_LIMIT:
        raise BadReference(f"{_shown(within)}: the repository's name is longer than {_NAME_LIMIT} characters")
    for part in repository.split("/"):
        if not _COMPONENT.fullmatch(part):
            raise BadReference(
                f"{_shown(within)}: {_shown(part)} cannot be a part of a repository's name, which has lower case "
                "letters and digits, and single . or _ between them (or __, or any number of -)"
            )


def names_a_registry(first: str) -> bool:
    """Whether the first part is a host, by the rule of docker: it has a dot or a port, or is localhost."""
    return "." in first or ":" in first or first.lower() == "localhost"


def _split_port(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        return (host + bracket, rest[1:]) if rest.startswith(":") else (host + bracket + rest, None)
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _shown(text: str) -> str:
    """As it may stand in a message: printable, and short."""
    return repr(text if len(text) <= 120 else f"{text[:117]}…")
