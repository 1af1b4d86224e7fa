"""A registry in this process that keeps to the specification but where a test tells it not to, and an image for it."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

import orjson
from aiohttp import web

from images.descriptor import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST, Descriptor
from images.endpoints import Settings, Timeouts
from images.reference import Reference

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

IMPATIENT = Timeouts(connect=2.0, silence=0.4, answer=2.0, patience=1.5)
"""Tests wait for misbehaviour, so it must not take long to be called that."""


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def descriptor(data: bytes, media_type: str = OCI_LAYER) -> Descriptor:
    return Descriptor(media_type, sha256(data), len(data))


@dataclass(frozen=True)
class Image:
    """A config, layers, and the manifest that names them."""

    config: bytes
    layers: tuple[bytes, ...]
    subject: Descriptor | None = None
    artifact_type: str = ""

    @property
    def manifest(self) -> bytes:
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": descriptor(self.config, OCI_CONFIG).as_json(),
            "layers": [descriptor(layer).as_json() for layer in self.layers],
        }
        if self.subject is not None:
            document["subject"] = self.subject.as_json()
        if self.artifact_type:
            document["artifactType"] = self.artifact_type
        return orjson.dumps(document)

    @property
    def descriptor(self) -> Descriptor:
        return descriptor(self.manifest, OCI_MANIFEST)


def an_image(size: int = 3_000_000, seed: bytes = b"kernels") -> Image:
    block = hashlib.sha512(seed).digest()
    return Image(b'{"os":"linux"}', ((block * (size // len(block) + 1))[:size],))


@dataclass
class Registry:
    """`async with` it. `requests` is what was asked: method, path with query, and headers."""

    tls: ssl.SSLContext | None = None
    manifests: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    tricks: list[tuple[str, Handler, int]] = field(default_factory=list)
    port: int = 0

    async def __aenter__(self) -> Registry:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}"

    @property
    def settings(self) -> Settings:
        return Settings(insecure=frozenset({self.host}), timeouts=IMPATIENT)

    def reference(self, target: str = "v1") -> Reference:
        separator = "@" if target.startswith("sha256:") else ":"
        return Reference.parse(f"{self.host}/team/cache{separator}{target}")

    def has(self, image: Image, tag: str = "v1") -> Reference:
        """Keeps an image; its reference by tag."""
        for blob in (image.config, *image.layers):
            self.blobs[sha256(blob)] = blob
        for target in (tag, image.descriptor.digest):
            self.manifests[target] = (image.manifest, OCI_MANIFEST)
        return self.reference(tag)

    def trick(self, path: str, handler: Handler, times: int = 1_000_000) -> None:
        """Lets `handler` answer what has `path` in its path, so many times."""
        self.tricks.append((path, handler, times))

    def asked(self, path: str) -> list[dict[str, str]]:
        """The headers of every request with this in its path."""
        return [headers for _, where, headers in self.requests if path in where]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs, dict(request.headers)))
        for index, (path, handler, times) in enumerate(self.tricks):
            if path in request.path and times > 0:
                self.tricks[index] = (path, handler, times - 1)
                return await handler(request)
        return await self.honest(request)

    async def honest(self, request: web.Request) -> web.StreamResponse:
        kind, _, target = request.path.removeprefix("/v2/team/cache/").partition("/")
        if kind == "manifests" and request.method == "PUT":
            data = await request.read()
            for name in (target, sha256(data)):
                self.manifests[name] = (data, request.headers["Content-Type"])
            return web.Response(status=201, headers={"Docker-Content-Digest": sha256(data)})
        if kind == "blobs" and request.method == "POST":
            return web.Response(status=202, headers={"Location": "/v2/team/cache/uploads/1?state=a%2Fb"})
        if kind == "uploads" and request.method == "PUT":
            data = await request.read()
            if sha256(data) != request.query["digest"]:
                return web.json_response({"errors": [{"code": "DIGEST_INVALID"}]}, status=400)
            self.blobs[sha256(data)] = data
            return web.Response(status=201)
        if kind == "manifests" and target in self.manifests:
            data, media_type = self.manifests[target]
            headers = {"Content-Type": media_type, "Docker-Content-Digest": sha256(data)}
            return web.Response(body=data, headers=headers)
        if kind == "blobs" and target in self.blobs:
            return _ranged(self.blobs[target], request)
        return web.json_response({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "see here"}]}, status=404)


def _ranged(blob: bytes, request: web.Request) -> web.Response:
    wanted = request.http_range
    if wanted.start is None:
        return web.Response(body=blob)
    part = blob[wanted.start : wanted.stop]
    span = f"bytes {wanted.start}-{wanted.start + len(part) - 1}/{len(blob)}"
    return web.Response(status=206, body=part, headers={"Content-Range": span})


def answering(status: int = 200, body: bytes = b"", **headers: str) -> Handler:
    """Always this; `_` in a header's name stands for `-`."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handler


def cutting(blob: bytes, after: int, promised: int | None = None) -> Handler:
    """Promises the blob from where it is asked for, sends `after` bytes of it, and cuts the connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        start = request.http_range.start or 0
        rest = blob[start:]
        response = web.StreamResponse(status=206 if start else 200)
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(blob) - 1}/{len(blob)}"
        response.content_length = len(rest) if promised is None else promised
        await response.prepare(request)
        await response.write(rest[:after])
        await asyncio.sleep(0.05)  # what lies in a buffer when the end comes is lost
        if request.transport is not None:
            request.transport.close()
        return response

    return handler


def endless(block: bytes = b" " * 65536, content_type: str = OCI_MANIFEST, limit: int = 2**31) -> Handler:
    """Never says how much it will be, and goes on."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        response.enable_chunked_encoding()
        await response.prepare(request)
        sent = 0
        while sent < limit:
            await response.write(block)
            sent += len(block)
        return response

    return handler
