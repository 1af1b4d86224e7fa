"""Reading JSON, base64 and PEM that strangers wrote: bounded, without ambiguity, with one kind of error.

For everything in `images.signatures`. Two readers of one document must never see two things in it, so what JSON leaves
open (a key twice, NaN) is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from images.signatures import limits


class BadSignature(Exception):
    """Why something is no signature that counts, as a clause: `is over another image (sha256:…)`."""


def read_json(raw: bytes, limit: int, what: str) -> Mapping[str, Any]:
    """The object in it. Raises BadSignature."""
    if len(raw) > limit:
        raise BadSignature(f"{what} has more than {limit // 1024} KiB")
    try:
        document = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as wrong:
        raise BadSignature(f"{what} is no JSON: {shown(str(wrong))}") from None
    if not isinstance(document, dict):
        raise BadSignature(f"{what} is no JSON object")
    if _deeper(document, limits.DEPTH):
        raise BadSignature(f"{what} is nested more than {limits.DEPTH} levels deep")
    return document


def member(document: Mapping[str, Any], *path: str) -> Any:
    """What lies at a path of keys; None where nothing does."""
    found: Any = document
    for key in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def text(value: Any, what: str) -> str:
    """A string that is not empty, and that is one in any encoding. Raises BadSignature."""
    if not isinstance(value, str) or not value:
        raise BadSignature(f"{what} is missing")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadSignature(f"{what} is no text") from None
    return value


def decoded(value: Any, what: str) -> bytes:
    """Bytes from base64. Raises BadSignature."""
    try:
        return base64.b64decode(text(value, what), validate=True)
    except (binascii.Error, ValueError):
        raise BadSignature(f"{what} is no base64") from None


def shown(value: object, limit: int = 160) -> str:
    """A stranger's text as it may stand in a message: printable, short, on one line."""
    flat = "".join(each if each.isprintable() else "�" for each in str(value))
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _deeper(document: Any, levels: int) -> bool:
    layer = [document]
    for _ in range(levels):
        layer = [
            item
            for each in layer
            for item in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return any(isinstance(each, dict | list) for each in layer)
