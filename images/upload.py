"""Writes to a registry: blobs in one stream, manifests byte for byte, and what refers to an image where no API tells.

For the registry client. Nothing is pushed to a mirror. A blob that is there already is not sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
from yarl import URL

from images.authorization import PUSH
from images.client import Client
from images.descriptor import OCI_INDEX, Descriptor, Malformed, Manifest
from images.endpoints import Endpoint, endpoints
from images.errors import RegistryError
from images.reference import Reference
from planning.caches.limits import MANIFEST_BYTES

_CHUNK = 1024 * 1024
_ATTEMPTS = 3
_GRACE = 60.0


async def push_blob(client: Client, reference: Reference, blob: Descriptor, source: Path | bytes) -> bool:
    """Whether it had to be sent. Raises RegistryError; the content is the caller's word, and the registry checks it."""
    endpoint = endpoints(client.settings, reference, mirrors=False)[0]
    what = f"{reference.registry}/{reference.repository}@{blob.digest}"
    if await client.patiently(lambda: _has(client, endpoint, blob, what)):
        return False
    for attempt in range(_ATTEMPTS):
        try:
            await client.patiently(lambda: _send(client, endpoint, blob, source, what))
            return True
        except RegistryError as error:
            if error.kind != "away" or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


async def _has(client: Client, endpoint: Endpoint, blob: Descriptor, what: str) -> bool:
    url = endpoint.path(f"blobs/{blob.digest}")
    async with client.answer(endpoint, "HEAD", url, what, actions=PUSH, also=(404,)) as response:
        return response.status == 200


async def _send(client: Client, endpoint: Endpoint, blob: Descriptor, source: Path | bytes, what: str) -> None:
    """One upload: a place for it, then all of it."""
    start = endpoint.path("blobs/uploads/")
    async with client.answer(
        endpoint, "POST", start, what, actions=PUSH, headers={"Content-Length": "0"}, also=(404,)
    ) as response:
        if response.status == 404:
            raise RegistryError("not_found", what, f"{endpoint.name} has no such repository, and makes none")
        location = response.headers.get("Location", "")
    try:
        place = start.join(URL(location, encoded=True))
        # by hand, for an address that is signed must stay as it is
        target = URL(f"{place}{'&' if place.raw_query_string else '?'}digest={blob.digest}", encoded=True)
    except ValueError:
        location = ""
    if not location:
        raise RegistryError("malformed", what, f"{endpoint.name} does not say where to send it")
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
    total = _GRACE + blob.size / client.settings.timeouts.slowest
    async with client.answer(
        endpoint, "PUT", target, what, actions=PUSH, headers=headers, body=_body(source, blob.size), total=total
    ):
        pass


def _body(source: Path | bytes, size: int) -> Callable[[], object]:
    if isinstance(source, bytes):
        return lambda: io.BytesIO(source)

    async def chunks() -> AsyncIterator[bytes]:
        sent = 0
        with source.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, min(_CHUNK, size - sent)):
                sent += len(chunk)
                yield chunk

    return chunks


async def push_manifest(client: Client, reference: Reference, data: bytes, media_type: str) -> Descriptor:
    """Under the reference's tag, or its digest if that is all it has. Raises RegistryError.

    Where it refers to another image (`subject`) and the registry does not say that it noticed, the index behind the
    fallback tag of the distribution specification is brought up to date too.
    """
    what = str(reference)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    try:
        manifest = Manifest.read(data, digest, media_type)
        subject = manifest.subject()
    except Malformed as error:
        raise RegistryError("malformed", what, str(error)) from None
    if reference.digest and reference.digest != digest:
        raise RegistryError("lied", what, f"the manifest's digest is {digest}", "Push it under its own digest.")
    endpoint = endpoints(client.settings, reference, mirrors=False)[0]
    noticed = await client.patiently(
        lambda: _put(client, endpoint, reference.tag or digest, data, media_type, digest, what)
    )
    if subject is not None and not noticed:
        await _refer(client, endpoint, subject, manifest, what)
    return manifest.descriptor


async def _put(
    client: Client, endpoint: Endpoint, target: str, data: bytes, media_type: str, digest: str, what: str
) -> bool:
    """Whether the registry noticed that the manifest refers to another."""
    headers = {"Content-Type": media_type}
    url = endpoint.path(f"manifests/{target}")
    async with client.answer(
        endpoint, "PUT", url, what, actions=PUSH, headers=headers, body=lambda: io.BytesIO(data)
    ) as response:
        said = response.headers.get("Docker-Content-Digest", digest)
        if said != digest:
            raise RegistryError("lied", what, f"{endpoint.name} took {digest} and calls it {said[:100]!r}")
        return "OCI-Subject" in response.headers


async def _refer(client: Client, endpoint: Endpoint, subject: Descriptor, manifest: Manifest, what: str) -> None:
    """Adds the manifest to the index behind the fallback tag. Who writes last wins: the specification has no lock."""
    tag, own = fallback_tag(subject.digest), manifest.descriptor.digest
    entries: list[object] = []
    try:
        found = await client.patiently(lambda: client.manifest(endpoint, tag, what, actions=PUSH))
    except RegistryError as error:
        if error.kind != "not_found":
            raise
    else:
        listed = found.document.get("manifests")
        if not isinstance(listed, list):
            raise RegistryError("malformed", what, f"the tag {tag} holds no index, so nothing can be added to it")
        # those of others stay as they are
        entries = [each for each in listed if not (isinstance(each, dict) and each.get("digest") == own)]
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*entries, _entry(manifest)]}
    data = orjson.dumps(index)
    if len(data) > MANIFEST_BYTES:
        raise RegistryError("too_large", what, f"the index behind {tag} would have {len(data)} bytes")
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    await client.patiently(lambda: _put(client, endpoint, tag, data, OCI_INDEX, digest, what))


def _entry(manifest: Manifest) -> dict[str, object]:
    """A manifest as the specification lists it: with the artifact's type, or the config's, and its annotations."""
    document = manifest.document
    config = document.get("config")
    artifact_type = document.get("artifactType") or (config.get("mediaType") if isinstance(config, dict) else None)
    more = {"artifactType": artifact_type, "annotations": document.get("annotations")}
    return manifest.descriptor.as_json() | {name: value for name, value in more.items() if value}


def fallback_tag(digest: str) -> str:
    """Where the distribution specification keeps an index of what refers to a digest, if a registry has no API."""
    return digest.replace(":", "-")
