"""Between bytes and objects: JSON documents, the lines of a watch, and in what words a request is spoken of.

For the client. Whatever is not what the API promises becomes a KubeError that says what came instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import orjson

from kube.errors import KubeError, TooLarge, Unavailable, bad_response, error_from_status
from kube.resources import Resource

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


async def read(content: aiohttp.StreamReader, at_most: int | None, request: str) -> bytes:
    """All that comes; TooLarge as soon as it is more than `at_most` bytes."""
    chunks: list[bytes] = []
    length = 0
    while chunk := await content.readany():
        chunks.append(chunk)
        length += len(chunk)
        if at_most is not None and length > at_most:
            raise TooLarge(f"the answer is longer than {at_most} bytes", reason="AnswerTooLarge", request=request)
    return b"".join(chunks)


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


def selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    query = {}
    if label_selector:
        query["labelSelector"] = label_selector
    if field_selector:
        query["fieldSelector"] = field_selector
    return query


def describe(
    method: str, resource: Resource, namespace: str | None, name: str | None, subresource: str | None = None
) -> str:
    target = "/".join(part for part in (namespace, name, subresource) if part)
    return f"{method} {resource.qualified} {target}" if target else f"{method} {resource.qualified}"


def unavailable(exc: BaseException, request: str, host: str) -> KubeError:
    """What became of a request that got no answer, in words that help."""
    if isinstance(exc, asyncio.TimeoutError):
        return Unavailable(f"{host} did not answer in time", reason="Timeout", request=request)
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        advice = "The certificate is not of the kubeconfig's authority: is this the right cluster?"
        return Unavailable(f"{host}: {exc}", reason="ConnectionFailed", request=request, advice=advice)
    return Unavailable(f"{host}: {str(exc) or type(exc).__name__}", reason="ConnectionFailed", request=request)
