"""From the bytes of an answer to objects: JSON documents, and the lines of a watch.

For the client. Whatever is not what the API promises becomes a KubeError that says what came instead.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import orjson

from kube.errors import TooLarge, Unavailable, bad_response, error_from_status

MAX_LINE = 16 * 1024 * 1024  # bytes of one watch event; etcd takes 1.5 MiB, and JSON is larger than what is stored


async def lines(content: aiohttp.StreamReader, request: str) -> AsyncGenerator[bytes, None]:
    """Splits a stream into its lines; a last line without its end is a connection that was cut."""
    pending: list[bytes] = []
    length = 0
    while chunk := await content.readany():
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            if pending:
                line = b"".join((*pending, line))
                pending.clear()
            length = 0
            if line:
                yield line
        if rest:
            pending.append(rest)
            length += len(rest)
            if length > MAX_LINE:
                raise TooLarge(
                    f"an event is longer than {MAX_LINE} bytes", reason="EventTooLarge", request=request, advice=""
                )
    if pending:
        raise Unavailable("the connection ended within an event", reason="ConnectionFailed", request=request)


def event(line: bytes, request: str) -> tuple[str, dict[str, Any]]:
    decoded = object_of(line, request)
    kind, item = decoded.get("type"), decoded.get("object")
    if not isinstance(kind, str) or not isinstance(item, dict):
        raise bad_response(f"not a watch event: {line[:100]!r}", request=request)
    if kind == "ERROR":
        raise error_from_status(item, request=request)
    return kind, item


def object_of(data: bytes, request: str) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise bad_response(f"the answer is not JSON ({exc}): {data[:100]!r}", request=request) from exc
    if not isinstance(value, dict):
        raise bad_response(f"the answer is not an object: {data[:100]!r}", request=request)
    return value
